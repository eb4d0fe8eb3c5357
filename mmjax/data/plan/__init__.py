"""Decide which samples form each step, and where each of their parts is processed."""
