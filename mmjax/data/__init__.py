"""From files to packed batches: sources, length index, step plan, packing, prefetching. No JAX of our own."""
