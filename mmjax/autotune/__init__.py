"""Fit a run into memory by traced, compiled and measured figures; forecast its speed."""
