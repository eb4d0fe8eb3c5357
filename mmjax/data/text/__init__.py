"""Tokenize conversations by a checkpoint's tokenizer and chat template."""
