"""Who computes what: grouping, placing and measuring samples of unequal size. NumPy and Numba, no JAX."""
