"""The connector between an encoder and the LLM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import ConnectorConfig
from mmjax.models.layers import ACTIVATIONS, MLP, HeadNorm, LayerNorm, PositionTable, RMSNorm
from mmjax.models.linear import Linear
from mmjax.models.remat import keep_inputs
from mmjax.parallel.sharding import constrain

AXES = ("t", "y", "x")  # of `ItemBatch.coordinates`
TORCH_EPS = 1e-5  # of PyTorch's LayerNorm where a config says none


class Standardization(nnx.Module):
    """Subtract a stored number of every channel and multiply by another, buffers in PyTorch's terms; float32 inside."""

    def __init__(self, width: int):
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), axes=("fixed",))
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=("fixed",))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        bias, scale = (
            jax.lax.stop_gradient(y[...]).astype(jnp.float32) for y in (self.bias, self.scale)
        )
        return (x.astype(jnp.float32) - bias) * scale


class Connector(nnx.Module):
    """A norm, concatenation or mean of each group of neighbours, a matrix, an MLP or one matrix, and learned positions.

    A group is `merge ** len(axes)` contiguous positions; `axes` are the coordinates that are merged
    and that the position tables name: (1, 2) = (y, x) for images, (0,) = time for audio. Padded
    members of a group count as zeros.

    deepstack: encoder layers whose outputs are taken beside the last one's. Each has a connector of
    its own in `deeper`, by its number, with a norm after the merge (Qwen3-VL).
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
        # Neighbours along every axis: 2 x 2 patches of an image, or 2 frames of a clip.
        self.group = c.merge ** len(axes)
        self.merging = c.merging
        merged = inputs if c.merging == "mean" else self.group * inputs
        eps = c.norm_eps or eps
        self.norm_place = c.norm.rpartition("_")[0]
        width = merged if self.norm_place == "merged" else inputs
        norms = {
            "layer": partial(LayerNorm, width, eps),
            "rms": partial(RMSNorm, width, eps, c.norm_offset),
            "unscaled": partial(HeadNorm, eps),
        }
        self.norm = None if c.norm == "none" else norms[c.norm.rpartition("_")[2]]()
        self.feature_scale = c.feature_scale
        self.standardization = Standardization(merged) if c.standardize else None
        hidden = c.mlp_width
        bias = c.merger_bias
        self.merger = (
            Linear(merged, c.merger_width, ("mlp", "embed"), rngs, bias=bias)
            if c.merger_width
            else None
        )
        features = c.merger_width or merged
        self.projection = (
            Linear(features, features, ("mlp", "embed"), rngs) if c.projection else None
        )
        self.projection_norm = LayerNorm(features, TORCH_EPS) if c.projection else None
        made = c.output_width or outputs
        make_mlp = partial(
            MLP, features, hidden, made, c.activation, rngs, gated=c.gated, biases=c.biases
        )
        self.mlp = make_mlp() if hidden else None
        bias = "down" in c.biases
        self.linear = None if hidden else Linear(features, made, ("mlp", "embed"), rngs, bias=bias)
        last = partial(Linear, made, outputs, ("mlp", "embed"), rngs, bias=not c.output_activation)
        self.output = last() if c.output_width else None
        self.output_activation = ACTIVATIONS[c.activation] if c.output_activation else None
        table_axes = axes if c.position_grid else ()
        self.positions = nnx.Dict(
            {AXES[axis]: PositionTable(c.position_grid, outputs, rngs) for axis in table_axes}
        )
        self.newline = PositionTable(1, outputs, rngs) if c.newline else None
        self.deepstack = deepstack
        # Positions and the newline belong to the tokens themselves, not to what is added to deeper
        # layers.
        inner = replace(c, norm="merged_layer", position_grid=0, newline=False)
        self.deeper = nnx.Dict(
            {
                str(n): Connector(inner, inputs, outputs, axes, eps, rngs=rngs)
                for n in range(len(deepstack))
            }
        )

    @jax.named_scope("connector")
    def __call__(
        self, x: Float[Array, "r l d"], item: Int[Array, "r l"], coordinates: Int[Array, "r l 3"]
    ) -> Float[Array, "r m e"]:
        # Positions are in merge order: the members of a group follow each other.
        rows, length, width = x.shape
        if length % self.group:
            raise ValueError(
                f"{length} positions do not divide into groups of {self.group} to merge"
            )
        x = self._normed(x, "")
        # With a merge of 2 x 2, [R, L, W] -> [R, L / 4, 4, W] -> [R, L / 4, 4 W], or the mean [R, L
        # / 4, W]. Masked after the norm, whose bias would make padding nonzero.
        x = jnp.where((item >= 0)[..., None], x, 0).reshape(
            rows, length // self.group, self.group, width
        )
        x = x.swapaxes(2, 3) if self.merging == "interleave" else x
        x = x.mean(2) if self.merging == "mean" else x.reshape(*x.shape[:2], self.group * width)
        x = self._normed(self._standardized(x), "merged")
        x = x if self.merger is None else self.merger(x)
        x = self._normed(x, "merger")
        x = (
            x
            if self.projection is None
            else ACTIVATIONS["gelu"](self.projection_norm(self.projection(x)))
        )
        x = self.linear(x) if self.mlp is None else self.mlp(x)
        x = x if self.output is None else self._output(x)
        x = self._normed(x, "token")
        # The first member of a group is its top left one, which an image that reaches into the
        # group always has: patch (y, x) = (6, 4) is of the token (3, 2).
        corner = coordinates[:, :: self.group] // self.merge
        for name, table in self.positions.items():
            x = x + table(corner[..., AXES.index(name)], x.dtype)
        return constrain(x, "rows", "length", "width")

    def _normed(self, x: Float[Array, "r _ f"], place: str) -> Float[Array, "r _ f"]:
        """Apply the connector's norm, if it stands in this place."""
        return x if self.norm is None or place != self.norm_place else self.norm(x)

    def _output(self, made: Float[Array, "r m f"]) -> Float[Array, "r m e"]:
        """Make tokens of what the MLP makes."""
        if self.output_activation is None:
            return self.output(made)

        # The operand of the product is made again in backward.
        @keep_inputs
        def output(made: Array) -> Array:
            return self.output(self.output_activation(made))

        return output(made)

    def _standardized(self, x: Float[Array, "r m f"]) -> Float[Array, "r m f"]:
        """Scale merged features, and standardise them where the connector does."""
        if self.feature_scale == 1 and self.standardization is None:
            return x
        y = x.astype(jnp.float32) * self.feature_scale
        return (y if self.standardization is None else self.standardization(y)).astype(x.dtype)

    def with_newline(
        self, tokens: Float[Array, "r m e"], deeper_only: bool
    ) -> Float[Array, "r n e"]:
        """Append the newline token to every row, where the connector has one; zeros to tokens of `deeper` alone."""
        if self.newline is None:
            return tokens
        index = jnp.zeros((len(tokens), 1), jnp.int32)
        line = tokens[:, :1, :0] if deeper_only else self.newline(index, tokens.dtype)
        # Zeros along the deepstack's part of the width: it adds nothing to the LLM's first layers.
        line = jnp.pad(line, ((0, 0), (0, 0), (0, tokens.shape[-1] - line.shape[-1])))
        return jnp.concatenate([tokens, line], axis=1)
