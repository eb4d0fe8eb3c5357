"""Load, pack and hash the batches of steps in worker processes."""
