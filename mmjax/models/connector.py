"""From an encoder's width to the LLM's: neighbours merged into one token, an MLP, and where the token was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import ConnectorConfig
from mmjax.models.layers import MLP, LayerNorm
from mmjax.parallel.sharding import constrain


class PositionTable(nnx.Module):
    """A learned vector per row, column or time of a merged token, along one dimension."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (size, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=(None, "embed"))

    def __call__(self, index: Int[Array, "r m"], dtype: jnp.dtype) -> Float[Array, "r m d"]:
        return constrain(self.weight[...].astype(dtype), None, None)[index]


class Connector(nnx.Module):
    """LayerNorm, concatenation of each group of neighbours, GELU MLP, plus positions if there is a table.

    A group is `merge ** len(axes)` contiguous positions; `axes` are the coordinates that are merged and that the table
    names: (1, 2) = (y, x) for images, (0,) = time for audio. Padded members of a group count as zeros.
    """

    def __init__(
        self, config: ConnectorConfig, inputs: int, outputs: int, axes: tuple[int, ...], eps: float, rngs: nnx.Rngs
    ):
        self.merge = config.merge
        self.axes = axes
        self.group = config.merge ** len(axes)
        self.norm = LayerNorm(inputs, eps)
        self.mlp = MLP(self.group * inputs, config.mlp_width, outputs, "gelu_tanh", rngs, biases=("up", "down"))
        tables = [PositionTable(config.position_grid, outputs, rngs) for _ in axes] if config.position_grid else []
        self.positions = nnx.Dict({("t", "y", "x")[axis]: table for axis, table in zip(axes, tables, strict=False)})

    def __call__(
        self, x: Float[Array, "r l d"], item: Int[Array, "r l"], coordinates: Int[Array, "r l 3"]
    ) -> Float[Array, "r m e"]:
        rows, length, width = x.shape
        if length % self.group:
            raise ValueError(f"{length} positions do not divide into groups of {self.group} to merge")
        x = jnp.where((item >= 0)[..., None], self.norm(x), 0)
        x = self.mlp(x.reshape(rows, length // self.group, self.group * width))
        # The first member of a group is its top left one, which an image that reaches into the group always has.
        corner = coordinates[:, :: self.group] // self.merge
        for name, table in self.positions.items():
            x = x + table(corner[..., ("t", "y", "x").index(name)], x.dtype)
        return constrain(x, "rows", "length", "width")
