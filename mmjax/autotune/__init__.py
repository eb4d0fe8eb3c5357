"""Plan a run stage by stage, fit it into memory, compile it, and forecast its speed."""
