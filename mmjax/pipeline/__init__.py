"""Pipelines over units: stages on meshes of their own, the transfers between them, and the executor that runs both."""
