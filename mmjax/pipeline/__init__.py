"""Units, chosen for a cluster and forecast."""
