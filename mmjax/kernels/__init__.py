"""Kernels written in Pallas, and the masks that they evaluate."""
