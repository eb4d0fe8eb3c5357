"""Project encoder outputs to the LLM's width: neighbours are merged into one token, then an MLP and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import ConnectorConfig
from mmjax.models.layers import MLP, LayerNorm, Linear, PositionTable, RMSNorm
from mmjax.parallel.sharding import constrain

AXES = ("t", "y", "x")  # of `ItemBatch.coordinates`


class Connector(nnx.Module):
    """A norm, concatenation of each group of neighbours, an MLP or one matrix, plus learned positions if configured.

    A group is `merge ** len(axes)` contiguous positions; `axes` are the coordinates that are merged and that the table
    names: (1, 2) = (y, x) for images, (0,) = time for audio. Padded members of a group count as zeros.

    deepstack: encoder layers whose outputs are taken beside the last one's. Each has its own MLP, with a norm after the
    merge (Qwen3-VL); their tokens are concatenated along the width.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        inputs: int,
        outputs: int,
        axes: tuple[int, ...],
        eps: float,
        rngs: nnx.Rngs,
        deepstack: tuple[int, ...] = (),
    ):
        c = config
        self.merge = c.merge
        self.group = c.merge ** len(axes)
        merged = self.group * inputs
        eps = c.norm_eps or eps
        norms = {"layer": (LayerNorm, inputs), "rms": (RMSNorm, inputs), "merged_layer": (LayerNorm, merged)}
        norm, width = norms.get(c.norm, (None, 0))
        self.norm = None if norm is None else norm(width, eps)
        self.norm_merged = c.norm == "merged_layer"
        hidden = c.mlp_width
        self.mlp = MLP(merged, hidden, outputs, c.activation, rngs, biases=c.biases) if hidden else None
        bias = "down" in c.biases
        self.linear = None if hidden else Linear(merged, outputs, ("mlp", "embed"), rngs, bias=bias)
        table_axes = axes if c.position_grid else ()
        self.positions = nnx.Dict({AXES[axis]: PositionTable(c.position_grid, outputs, rngs) for axis in table_axes})
        self.newline = PositionTable(1, outputs, rngs) if c.newline else None
        self.deepstack = deepstack
        inner = replace(c, norm="merged_layer", position_grid=0, newline=False)
        self.deeper = nnx.Dict(
            {str(n): Connector(inner, inputs, outputs, axes, eps, rngs=rngs) for n in range(len(deepstack))}
        )

    def __call__(
        self,
        x: Float[Array, "r l d"],
        item: Int[Array, "r l"],
        coordinates: Int[Array, "r l 3"],
        deeper: Sequence[Float[Array, "r l d"]] = (),
    ) -> Float[Array, "r m e"]:
        # Positions are in merge order: the members of a group follow each other.
        rows, length, width = x.shape
        if length % self.group:
            raise ValueError(f"{length} positions do not divide into groups of {self.group} to merge")
        if self.norm is not None and not self.norm_merged:
            x = self.norm(x)
        # After the norm, whose bias would make padding nonzero.
        x = jnp.where((item >= 0)[..., None], x, 0).reshape(rows, length // self.group, self.group * width)
        x = self.norm(x) if self.norm_merged else x
        x = self.linear(x) if self.mlp is None else self.mlp(x)
        # The first member of a group is its top left one, which an image that reaches into the group always has.
        corner = coordinates[:, :: self.group] // self.merge
        for name, table in self.positions.items():
            x = x + table(corner[..., AXES.index(name)], x.dtype)
        if deeper:
            merged = [self.deeper[str(n)](layer, item, coordinates) for n, layer in enumerate(deeper)]
            x = jnp.concatenate([x, *merged], axis=-1)
        return constrain(x, "rows", "length", "width")

    def with_newline(self, tokens: Float[Array, "r m e"]) -> Float[Array, "r n e"]:
        """Append the newline token to every row, where the connector has one."""
        if self.newline is None:
            return tokens
        line = self.newline(jnp.zeros((len(tokens), 1), jnp.int32), tokens.dtype)
        # Zeros along the deepstack's part of the width: it adds nothing to the LLM's first layers.
        line = jnp.pad(line, ((0, 0), (0, 0), (0, tokens.shape[-1] - line.shape[-1])))
        return jnp.concatenate([tokens, line], axis=1)
