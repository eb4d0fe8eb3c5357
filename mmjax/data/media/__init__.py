"""Decode images and clips, and prepare them as each model's processor does."""
