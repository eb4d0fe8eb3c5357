"""Hugging Face checkpoints, in and out: what their configs say, where their tensors lie, and which are whose."""
