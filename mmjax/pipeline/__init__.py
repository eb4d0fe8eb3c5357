"""Units, chosen and planned: memory and time of their stages, compiled and forecast."""
