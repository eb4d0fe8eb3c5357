"""Random keys of parameters, one for each that is made."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array


class ParameterKeys(nnx.Rngs):
    """The keys of `nnx.Rngs(params=key)`, counted in Python: with a traced counter tracing is quadratic in layers."""

    def __init__(self, key: Array) -> None:
        self.key, self.count = key, 0

    def params(self) -> Array:
        """Return the next key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)
