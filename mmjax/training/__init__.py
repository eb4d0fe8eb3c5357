"""State, step, optimizer, checkpoint and metrics of a run."""
