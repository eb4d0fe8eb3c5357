"""Validate a config's values against each other; `parallel.mesh` checks them against the devices."""

from mmjax.config_checks.experiment import validate

__all__ = ["validate"]
