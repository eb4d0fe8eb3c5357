"""Run compiled programs on devices: step, state, optimizer, checkpoints, run folders."""
