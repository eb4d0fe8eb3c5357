"""Random keys of parameters, one for each that is made."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from flax import nnx
from jax import Array

BLOCK = 32  # keys


class ParameterKeys(nnx.Rngs):
    """The keys of `nnx.Rngs(params=key)`, counted in Python: with a traced counter tracing is quadratic in layers.

    Keys are made in blocks: a program in which each has a `fold_in` of its own takes XLA much
    longer to compile.
    """

    def __init__(self, key: Array) -> None:
        self.key = key
        self.count = 0

    def params(self) -> Array:
        """Return the next key."""
        place = self.count % BLOCK
        if place == 0:
            self.block = jax.vmap(partial(jax.random.fold_in, self.key))(
                np.arange(self.count, self.count + BLOCK)
            )
        self.count += 1
        return self.block[place]
