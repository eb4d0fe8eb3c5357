"""Decide which rank computes what: group, place and measure samples of unequal size. NumPy and Numba, no JAX."""
