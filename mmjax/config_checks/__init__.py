"""What must hold between a config's values, each with its remedy. `parallel.mesh` checks the devices."""

from mmjax.config_checks.experiment import validate

__all__ = ["validate"]
