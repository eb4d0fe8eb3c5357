"""Planning before step 0: FLOPs, memory and step time of a model, in NumPy without JAX."""
