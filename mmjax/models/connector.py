"""From an encoder's width to the LLM's: neighbours merged into one token, an MLP, and where the token was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import ConnectorConfig
from mmjax.models.layers import MLP, LayerNorm, Linear, PositionTable, RMSNorm
from mmjax.parallel.sharding import constrain


class Connector(nnx.Module):
    """A norm, concatenation of each group of neighbours, an MLP or one matrix, plus positions if there is a table.

    A group is `merge ** len(axes)` contiguous positions; `axes` are the coordinates that are merged and that the table
    names: (1, 2) = (y, x) for images, (0,) = time for audio. Padded members of a group count as zeros.

    deepstack: layers whose outputs it takes beside the last one's. Each has an MLP of its own, with a norm after the
    merge (Qwen3-VL), and what these give follows along the width.
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
        self.merge = config.merge
        self.axes = axes
        self.group = config.merge ** len(axes)
        c, merged, eps = config, self.group * inputs, config.norm_eps or eps
        norms = {"layer": (LayerNorm, inputs), "rms": (RMSNorm, inputs), "merged_layer": (LayerNorm, merged)}
        norm, width = norms.get(c.norm, (None, 0))
        self.norm = None if norm is None else norm(width, eps)
        self.norm_merged = c.norm == "merged_layer"
        mlp, bias = c.mlp_width, "down" in c.biases
        self.mlp = MLP(merged, mlp, outputs, c.activation, rngs, biases=c.biases) if mlp else None
        self.linear = None if mlp else Linear(merged, outputs, ("mlp", "embed"), rngs, bias=bias)
        tables = [PositionTable(config.position_grid, outputs, rngs) for _ in axes] if config.position_grid else []
        self.positions = nnx.Dict({("t", "y", "x")[axis]: table for axis, table in zip(axes, tables, strict=False)})
        self.newline = PositionTable(1, outputs, rngs) if config.newline else None
        self.deepstack, own = deepstack, replace(config, norm="merged_layer", position_grid=0, newline=False)
        deeper = {str(n): Connector(own, inputs, outputs, axes, eps, rngs) for n in range(len(deepstack))}
        self.deeper = nnx.Dict(deeper)

    def __call__(
        self,
        x: Float[Array, "r l d"],
        item: Int[Array, "r l"],
        coordinates: Int[Array, "r l 3"],
        deeper: Sequence[Float[Array, "r l d"]] = (),
    ) -> Float[Array, "r m e"]:
        rows, length, width = x.shape
        if length % self.group:
            raise ValueError(f"{length} positions do not divide into groups of {self.group} to merge")
        if self.norm is not None and not self.norm_merged:
            x = self.norm(x)
        x = jnp.where((item >= 0)[..., None], x, 0).reshape(rows, length // self.group, self.group * width)
        x = self.norm(x) if self.norm_merged else x
        x = self.linear(x) if self.mlp is None else self.mlp(x)
        # The first member of a group is its top left one, which an image that reaches into the group always has.
        corner = coordinates[:, :: self.group] // self.merge
        for name, table in self.positions.items():
            x = x + table(corner[..., ("t", "y", "x").index(name)], x.dtype)
        more = [self.deeper[str(n)](below, item, coordinates) for n, below in enumerate(deeper)]
        x = jnp.concatenate([x, *more], axis=-1) if more else x
        return constrain(x, "rows", "length", "width")

    def with_newline(self, tokens: Float[Array, "r m e"]) -> Float[Array, "r n e"]:
        """Rows of tokens that end with one more, the newline, where there is one: nothing of it is added deeper."""
        if self.newline is None:
            return tokens
        line = self.newline(jnp.zeros((len(tokens), 1), jnp.int32), tokens.dtype)
        line = jnp.pad(line, ((0, 0), (0, 0), (0, tokens.shape[-1] - line.shape[-1])))
        return jnp.concatenate([tokens, line], axis=1)
