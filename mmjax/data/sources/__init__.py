"""Open data sets: chat files, Parquet, ArrayRecord, manifests, and functions."""
