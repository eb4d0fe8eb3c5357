"""Meshes and sharding rules: how arrays lie on devices."""
