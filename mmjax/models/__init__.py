"""Flax NNX modules: pure arrays in and out, no knowledge of the executor that runs them."""
