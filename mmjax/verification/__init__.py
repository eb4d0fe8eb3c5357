"""Find what is wrong with batches that another trainer fed to a model."""
