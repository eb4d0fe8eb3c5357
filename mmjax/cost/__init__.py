"""Trace what a model costs from its program: operations, parameters and bytes kept for backward."""
