"""Coordinate processes and notice those that hang."""
