"""What is decided before step 0: costs of a model on given lengths. NumPy, no JAX."""
