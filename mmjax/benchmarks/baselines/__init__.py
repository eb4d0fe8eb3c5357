"""The papers' algorithms, bounds and exhaustive searches, to compare with what training runs."""
