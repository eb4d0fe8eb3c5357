"""The transformer layers of decoders and encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.batch import MaskSpec
from mmjax.config import Activation, AudioConfig, AxisTables, Biased, VisionConfig
from mmjax.config.towers import INNER_MERGE
from mmjax.kernels.window_attention import MixedPlan, WindowPlan, plan_windows
from mmjax.models.attention import (
    Backend,
    Plan,
    attention,
    block_limit,
    in_windows,
    plan_attention,
)
from mmjax.models.blockwise_attention import DEFAULT_SCORING, Scoring, dense_attention
from mmjax.models.dropout import ATTENTION, MLP_SITE, Dropout, drop
from mmjax.models.embedding import look_up
from mmjax.models.expert_routing import Routing
from mmjax.models.kv_cache import KeyValue, KVCacheView, LayerCache
from mmjax.models.linear import Linear, apply_linears, clip
from mmjax.models.matmul import as_matrix
from mmjax.models.relative_positions import RelativePositions
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import Rotation, rotate
from mmjax.parallel.sharding import active, constrain, platform


class Context(NamedTuple):
    """Inputs of every layer of a tower beside its activations."""

    mask: MaskSpec
    rotation: Rotation | None = None
    dropout: Dropout | None = None  # None: nothing is dropped
    window_mask: MaskSpec | None = None  # of the layers with sliding-window or window attention
    window_rotation: Rotation | None = None  # of those layers; None: as of the others
    plan: Plan | None = None  # of attention under `mask`
    window_plan: Plan | None = None
    images: Any = None  # of a generator's layers: `diffusion_transformer.ImageInputs`
    # int32 [B, T] of layers that read tokens in order, where samples may have branches:
    # `token_paths.paths_of`
    path: Array | None = None
    # keys and values of a layer before, for those that share them, and of one with a window
    shared: KeyValue | None = None
    window_shared: KeyValue | None = None
    # [L, B, T, P] of tokens, for every layer; in a layer its own
    token_inputs: Array | None = None
    # of the layers behind a merger inside the tower; dropped there as before it
    merged: Context | None = None
    merging: Any = None  # what such a merger takes beside activations: `query_merger`
    # of layers with relative positions: `relative_positions.Places`, and of those with a window
    places: Any = None
    window_places: Any = None

    def behind_merger(self) -> Context:
        """Return the context of the layers behind a merger, whose positions are dropped as the first that each has."""
        merged = INNER_MERGE**2
        dropout = self.dropout and self.dropout._replace(key=self.dropout.key[:, ::merged])
        return self.merged._replace(dropout=dropout)

    def planned(
        self,
        backend: Backend,
        head_width: int,
        heads: tuple[int, int],
        dtype: jnp.dtype,
        window: int = 0,
        in_window: tuple[int, tuple[int, int]] | None = None,
    ) -> Context:
        """Plan attention under both masks, once for all layers. heads: of queries, and of keys. dtype: of both.

        window: tokens of a closed window of `window_mask`, at most; 0: its windows are of other kinds.
        in_window: head width and heads of the layers with windows; None: those of the others.
        """
        windows = (backend, window, self.mask.pos.shape[1], heads, dtype)
        plan = partial(
            plan_attention, backend=backend, dtype=dtype, max_block=block_limit(*windows)
        )
        window_width, window_heads = in_window or (head_width, heads)
        plan_window = (
            plan_windows
            if in_windows(*windows)
            else partial(plan, head_width=window_width, heads=window_heads)
        )
        return self._replace(
            plan=plan(self.mask, head_width=head_width, heads=heads),
            window_plan=self.window_mask and plan_window(self.window_mask),
        )

    def of_layers(self, windowed: bool) -> Context:
        """Return the context of the layers with a window, or of those without."""
        in_window = self._replace(
            mask=self.window_mask,
            plan=self.window_plan,
            rotation=self.window_rotation or self.rotation,
            shared=self.window_shared,
            places=self.window_places,
        )
        return (in_window if windowed else self)._replace(
            window_mask=None,
            window_plan=None,
            window_rotation=None,
            window_shared=None,
            window_places=None,
        )

    def stacked(self) -> Context:
        """Stack the contexts of layers without and with a window, [B, 2, ...]; `of_layer` takes one of both in a scan.

        Only what differs between them: one rotation of both kinds stays as it is.
        """
        full = self.of_layers(False)
        in_window = self.of_layers(True)

        def stack(*fields: str) -> dict[str, Any]:
            pairs = (
                [getattr(context, field) for field in fields]
                for context in (self.of_layers(False), in_window)
            )
            stacks = jax.tree.map(lambda *pair: jnp.stack(pair, axis=1), *pairs)
            return dict(zip(fields, stacks, strict=True))

        # Of a kernel for windows and one by lists both plans stay, which the kernels' wrapper takes.
        mixed = isinstance(in_window.plan, WindowPlan)
        fields = {"mask": True, "plan": not mixed, "rotation": self.window_rotation is not None}
        differing = [field for field, differs in fields.items() if differs]
        if mixed:
            full = full._replace(plan=MixedPlan(full.plan, in_window.plan))
        return full._replace(**stack(*differing))

    def of_layer(self, index: Int[Array, ""]) -> Context:
        """Return one layer's context from a `stacked` one. The kernel's wrapper takes its plan itself."""
        take = partial(jax.lax.dynamic_index_in_dim, index=index, axis=1, keepdims=False)
        rotation = self.rotation
        # Of both kinds it is [B, 2, T, H/2] beside masks [B, 2, T]; one for both is [B, T, H/2].
        if rotation is not None and rotation.cos.ndim > self.mask.sample.ndim:
            rotation = jax.tree.map(take, rotation)
        return self._replace(
            mask=jax.tree.map(take, self.mask),
            rotation=rotation,
            plan=self.plan and self.plan._replace(index=index),
        )


def hidden_padding(width: int) -> int:
    """Return how many channels of zeros a GPU's products with a hidden layer of this width are faster with.

    Its matrix units read rows that begin at multiples of 16 bytes; those of other widths, such as
    3,420 of Qwen2.5-VL's encoder, took up to 2.8 times as long on an H200. Channels sharded over
    `tensor` stay as they are.
    """
    current = active()
    if (
        platform() not in ("gpu", "cuda")
        or width % 8 == 0
        or (current and current.mesh.shape["tensor"] > 1)
    ):
        return 0
    return -width % 128


class PositionTable(nnx.Module):
    """A learned vector per row, column or time of a merged token, along one dimension."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (size, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=(None, "embed"))

    def __call__(self, index: Int[Array, "r m"], dtype: jnp.dtype) -> Float[Array, "r m d"]:
        return look_up(self.weight[...], (None, "embed"), index, dtype)


class FixedTable(nnx.Module):
    """A stored vector per position, a buffer in PyTorch's terms: it gets no gradient and no weight decay."""

    def __init__(self, table: Float[Array, "n d"]):
        self.weight = nnx.Param(table, axes=("fixed", "embed"))

    def __call__(self, index: Int[Array, "r m"], dtype: jnp.dtype) -> Float[Array, "r m d"]:
        table = constrain(jax.lax.stop_gradient(self.weight[...]).astype(dtype), None, None)
        return table[jnp.minimum(index, len(table) - 1)]


class RMSNorm(nnx.Module):
    """Divides by the root mean square of each position, times `offset + scale`; float32 inside.

    limit: what its inputs are clipped to, on both sides.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0, limit: float = math.inf):
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32), axes=(None,))
        self.eps = eps
        self.offset = offset
        self.limit = limit

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        @keep_inputs
        def norm(x: Array, scale: Array) -> Array:
            if self.limit < math.inf:
                limit = jnp.float32(min(self.limit, jnp.finfo(x.dtype).max))
                x = clip(x, -limit, limit)
            y = as_matrix(x).astype(jnp.float32)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
            # Gemma stores the scale less 1 (offset 1), others the scale itself (offset 0).
            return (y * (self.offset + scale.astype(jnp.float32))).astype(x.dtype).reshape(x.shape)

        return norm(x, self.scale[...])


class HeadNorm(nnx.Module):
    """Divides by the root mean square of each position, without a scale; float32 inside."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        @keep_inputs
        def norm(x: Array) -> Array:
            y = x.astype(jnp.float32)
            return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)).astype(
                x.dtype
            )

        return norm(x)


class LayerNorm(nnx.Module):
    """Zero mean and unit variance of each position, then scale and bias, if it has one; float32 inside."""

    def __init__(self, width: int, eps: float, biased: bool = True):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), axes=(None,)) if biased else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        @keep_inputs
        def norm(x: Array, scale: Array, *bias: Array) -> Array:
            y = as_matrix(x).astype(jnp.float32)
            y = y - jnp.mean(y, axis=-1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
            y = y * scale.astype(jnp.float32)
            for added in bias:
                y = y + added.astype(jnp.float32)
            return y.astype(x.dtype).reshape(x.shape)

        return norm(x, self.scale[...], *([] if self.bias is None else [self.bias[...]]))


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """`down(f(up(x)))`, or gated `down(f(gate(x)) * up(x))`."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        activation: Activation,
        rngs: nnx.Rngs,
        *,
        gated: bool = False,
        biases: tuple[Biased, ...] = (),
        clipped: bool = False,
    ):
        # Column parallel up and gate, row parallel down (Megatron): one all-reduce per MLP.
        into = partial(Linear, inputs, hidden, ("embed", "mlp"), rngs, clipped=clipped)
        self.gate = into(bias="gate" in biases) if gated else None
        self.up = into(bias="up" in biases)
        self.down = Linear(
            hidden, outputs, ("mlp", "embed"), rngs, bias="down" in biases, clipped=clipped
        )
        self.activation: Activation = activation

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        activation = ACTIVATIONS[self.activation]
        padding = hidden_padding(self.down.weight.shape[-2])

        # With the last product, whose operand is made again from the outputs of up and gate.
        @keep_inputs
        def down(up: Array, gate: Array | None = None) -> Array:
            return self.down.of_padded(
                activation(up) if gate is None else activation(gate) * up, padding
            )

        linears = (self.up,) if self.gate is None else (self.up, self.gate)
        return self.down.bounded(down(*apply_linears(x, *linears, padding=padding)))


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and variants of a transformer layer."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    backend: Backend
    norm: Callable[[int], nnx.Module]  # makes a norm of this width
    activation: Activation
    gated: bool
    biases: tuple[Biased, ...]
    head_norm: Callable[[int], nnx.Module] | None = None  # of the queries and keys of each head
    # of the concatenated queries, or keys, of all heads
    width_norm: Callable[[int], nnx.Module] | None = None
    attention_gate: bool = False  # beside the queries of each head
    separate_gate: bool = False  # the same, of a matrix of its own
    # makes attention of another kind of a layer's config
    attention: Callable[[LayerConfig, nnx.Rngs], nnx.Module] | None = None
    # makes what takes the place of attention
    delta_net: Callable[[nnx.Rngs], nnx.Module] | None = None
    convolution: Callable[[nnx.Rngs], nnx.Module] | None = None  # the same
    experts: Callable[[nnx.Rngs], nnx.Module] | None = None  # makes what takes the place of the MLP
    # the experts are beside the MLP: they read the stream's root mean square norm, and the outputs
    # of both have norms before they are added
    experts_beside: bool = False
    norm_eps: float = 1e-6  # of that norm
    merger: Callable[[nnx.Rngs], nnx.Module] | None = (
        None  # makes what merges its output's positions
    )
    pre_norms: bool = True  # of the inputs of attention and MLP
    # makes norms of the outputs of attention and MLP
    post_norm: Callable[[int], nnx.Module] | None = None
    parallel_mlp: bool = False  # the MLP reads what attention reads
    layer_scale: bool = False  # learned per-channel scales of the same outputs
    residual_scale: float = 1.0  # that the same outputs are multiplied by
    scoring: Scoring = DEFAULT_SCORING
    window: int = 0  # tokens of a closed window that layers of its tower attend in, at most
    rope_neighbours: bool = False  # RoPE turns channels 2i and 2i + 1 together
    rope_halves: bool = False  # RoPE turns each half of a head by itself
    has_rope: bool = True  # where the context has rotary positions
    grows: bool = True  # queries grow, where the context's do
    rotated_norm: Callable[[], nnx.Module] | None = None  # of queries and keys, behind RoPE
    sinks: bool = False  # a score of each head that attention's softmax has beside the keys'
    value_norm: Callable[[], nnx.Module] | None = None  # of the values of each head
    keys_as_values: bool = False  # values are what keys are before their norm
    shares_keys: bool = False  # attends the context's keys and values, and has none of its own
    # of the vector that the layer takes of each token; 0: it takes none
    token_width: int = 0
    output_scale: bool = False  # a stored number multiplies the layer's output
    clipped_linears: bool = False  # matrices clip their inputs and outputs to stored bounds
    # makes the learned vectors of relative positions
    relative: Callable[[], RelativePositions] | None = None


class SelfAttention(nnx.Module):
    """Grouped-query self-attention under a mask spec, with rotary positions where the context has them."""

    def __init__(self, block: LayerConfig, rngs: nnx.Rngs):
        b = block
        q_width = b.heads * b.head_width
        kv_width = b.kv_heads * b.head_width
        # With a gate, the outputs of a head are its query, then its gate (as in Qwen3.5).
        q_outputs = (1 + b.attention_gate) * q_width
        linear = partial(Linear, rngs=rngs, clipped=b.clipped_linears)
        self.query = linear(b.width, q_outputs, ("embed", "heads"), bias="query" in b.biases)
        self.gate = linear(b.width, q_width, ("embed", "heads")) if b.separate_gate else None
        kv = partial(linear, b.width, kv_width, ("embed", "kv_heads"))
        self.key = None if b.shares_keys else kv(bias="key" in b.biases)
        has_values = not (b.shares_keys or b.keys_as_values)
        self.value = kv(bias="value" in b.biases) if has_values else None
        self.output = linear(q_width, b.width, ("heads", "embed"), bias="output" in b.biases)
        # Queries and keys are normalised per head after the split (Qwen3), or over all heads before
        # it (InternViT).
        self.norm_heads = b.head_norm is not None
        # At most one of the two is configured.
        norm = b.head_norm or b.width_norm
        self.query_norm = norm and norm(b.head_width if self.norm_heads else q_width)
        key_norm = None if b.shares_keys else norm
        self.key_norm = key_norm and key_norm(b.head_width if self.norm_heads else kv_width)
        self.value_norm = b.value_norm and b.value_norm()
        self.gated = b.attention_gate
        self.heads = b.heads
        self.kv_heads = b.kv_heads
        self.head_width = b.head_width
        self.backend: Backend = b.backend
        self.scoring = b.scoring
        self.window = b.window
        self.rope_neighbours = b.rope_neighbours
        self.rope_halves = b.rope_halves
        self.has_rope = b.has_rope
        self.grows = b.grows
        self.rotated_norm = b.rotated_norm and b.rotated_norm()
        self.sinks = nnx.Param(jnp.zeros(b.heads), axes=("heads",)) if b.sinks else None
        self.relative = b.relative and b.relative()

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> tuple[Float[Array, "b t d"], KeyValue | None]:
        """Attend among the tokens, or the cache of `past` with them written in; return their keys and values too.

        Those of another layer, which `context` has, are complete, and none are returned.
        """
        linears = [y for y in (self.query, self.key, self.value, self.gate) if y is not None]
        q, *own = apply_linears(x, *linears)
        gate = None if self.gate is None else own.pop()
        if self.query_norm is not None and not self.norm_heads:
            q = self.query_norm(q)
        # A rank may have no rows, where no dimension can be left to be inferred.
        q = q.reshape(*x.shape[:2], self.heads, q.shape[-1] // self.heads)
        q, gate = jnp.split(q, 2, axis=-1) if self.gated else (q, gate)
        if self.query_norm is not None and self.norm_heads:
            q = self.query_norm(q)
        if context.rotation is not None and self.has_rope:
            q = rotate(q, context.rotation, self.rope_neighbours, self.rope_halves)
            if self.rotated_norm is not None:
                q = self.rotated_norm(q)
        if context.rotation is not None and self.grows:
            q = context.rotation.grown(q)
        sinks = None if self.sinks is None else self.sinks[...]
        made = self._keys_and_values(own, context) if own else None
        k, v = made or context.shared
        if self.relative is not None:
            zero_key, zero_value = map(self._of_zeros, (self.key, self.value))
            q, k, v = self.relative.widened(q, k, v, context.places, zero_key)
            sinks = jnp.zeros(self.heads) if self.relative.filled else None
        if past is None:
            heads = self.heads, self.kv_heads
            max_block = block_limit(self.backend, self.window, x.shape[1], heads, q.dtype)
            attn_out = attention(
                q, k, v, context.mask, self.backend, self.scoring, context.plan, max_block, sinks
            )
        else:
            # One token is no block of queries, so the backend does not matter: all scores at once.
            # Written into a copy that only this layer reads; `forward_with_kv` of the stack writes
            # them into the cache.
            keys, values = past.cache.updated(made, past.column) if made else context.shared
            attn_out = dense_attention(
                q, keys, values, context.mask, past.mask, self.scoring, sinks
            )

        if self.relative is not None:
            attn_out = self.relative.completed(attn_out, context.places, zero_value).astype(x.dtype)

        # With the last product, whose operand is made again from the gate and from attention's
        # output.
        @keep_inputs
        def output(attn_out: Array, gate: Array) -> Array:
            return self.output(
                (attn_out * jax.nn.sigmoid(gate).reshape(attn_out.shape)).reshape(
                    *x.shape[:2], self.heads * self.head_width
                )
            )

        if gate is not None:
            return output(attn_out, gate), made
        return self.output(attn_out.reshape(*x.shape[:2], self.heads * self.head_width)), made

    def _of_zeros(self, linear: Linear) -> Float[Array, "n h"]:
        """Return what a matrix of keys or values makes of zeros, by head."""
        shape = self.kv_heads, self.head_width
        return jnp.zeros(shape) if linear.bias is None else linear.bias[...].reshape(shape)

    def _keys_and_values(
        self, projected: list[Float[Array, "b t _"]], context: Context
    ) -> KeyValue:
        """Norm and turn what the layer's matrices make of the tokens; a single one makes both."""
        k, v = projected[0], projected[-1]
        if self.key_norm is not None and not self.norm_heads:
            k = self.key_norm(k)
        k, v = (y.reshape(*y.shape[:2], self.kv_heads, self.head_width) for y in (k, v))
        if self.key_norm is not None and self.norm_heads:
            k = self.key_norm(k)
        if self.value_norm is not None:
            v = self.value_norm(v)
        if context.rotation is not None and self.has_rope:
            k = rotate(k, context.rotation, self.rope_neighbours, self.rope_halves)
            if self.rotated_norm is not None:
                k = self.rotated_norm(k)
        return KeyValue(k, v)


class LayerScale(nnx.Module):
    """A learned scale per channel (LayerScale, Touvron et al. 2021)."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.full(width, 0.1, jnp.float32), axes=(None,))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return x * self.scale[...].astype(x.dtype)


def _post_module(block: LayerConfig) -> nnx.Module | None:
    """Build the module between attention or MLP and the residual sum, if the layer has one."""
    if block.post_norm is not None:
        return block.post_norm(block.width)
    return LayerScale(block.width) if block.layer_scale else None


class OutputScale(nnx.Module):
    """A stored number, a buffer in PyTorch's terms, which gets no gradient."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(1, jnp.float32), axes=("fixed",))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return x * jax.lax.stop_gradient(self.scale[...]).astype(x.dtype)


class TokenInput(nnx.Module):
    """Multiply what a gate makes of the stream by a vector of each token, and project it (Gemma 3n)."""

    def __init__(self, block: LayerConfig, rngs: nnx.Rngs):
        b = block
        self.gate = Linear(b.width, b.token_width, ("embed", "mlp"), rngs)
        self.projection = Linear(b.token_width, b.width, ("mlp", "embed"), rngs)
        self.norm = b.norm(b.width)
        self.activation: Activation = b.activation

    def __call__(
        self, x: Float[Array, "b t d"], token: Float[Array, "b t p"]
    ) -> Float[Array, "b t d"]:
        @keep_inputs
        def project(gate: Array, token: Array) -> Array:
            return self.projection(ACTIVATIONS[self.activation](gate) * token)

        return self.norm(project(self.gate(x), token))


class LayerOutput(NamedTuple):
    """A layer's outputs: the residual stream behind it, its cache and its routing."""

    x: Float[Array, "b t d"]
    cache: LayerCache | None
    routing: Routing | None  # of a mixture of experts


class NormLayer(nnx.Module):
    """A norm as the layer of a tower that does not attend (Gemma 4 Unified)."""

    def __init__(self, norm: nnx.Module):
        self.norm = norm

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> LayerOutput:
        return LayerOutput(self.norm(x), None, None)


class TransformerLayer(nnx.Module):
    """Attention, a delta net or a convolution, then an MLP or experts, each between its norms added to the stream.

    The MLP or the experts read the stream behind attention, or what attention reads (`parallel_mlp`).
    """

    def __init__(self, block: LayerConfig, rngs: nnx.Rngs):
        b = block
        self.attention_norm = b.norm(b.width) if b.pre_norms else None
        other = b.delta_net or b.convolution
        self.attention = None if other else (b.attention or SelfAttention)(b, rngs)
        self.delta_net = b.delta_net and b.delta_net(rngs)
        self.convolution = b.convolution and b.convolution(rngs)
        self.attention_after = _post_module(b)
        self.parallel_mlp = b.parallel_mlp
        self.mlp_norm = b.norm(b.width) if b.pre_norms and not b.parallel_mlp else None
        mlp = partial(
            MLP,
            b.width,
            b.mlp_width,
            b.width,
            b.activation,
            gated=b.gated,
            biases=b.biases,
            clipped=b.clipped_linears,
        )
        beside = b.experts_beside and b.experts is not None
        self.mlp = None if b.experts and not beside else mlp(rngs)
        self.experts = b.experts and b.experts(rngs)
        self.experts_norm = HeadNorm(b.norm_eps) if beside else None
        self.mlp_norm_after = b.norm(b.width) if beside else None
        self.experts_norm_after = b.norm(b.width) if beside else None
        self.mlp_after = _post_module(b)
        self.residual_scale = b.residual_scale
        self.token_input = TokenInput(b, rngs) if b.token_width else None
        self.output_scale = OutputScale() if b.output_scale else None
        self.merger = b.merger and b.merger(rngs)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> LayerOutput:
        """Apply the layer, on the cache of `past` if given; return the tokens' cache entries too."""
        mixer = self.attention or self.delta_net or self.convolution
        mixer_in = x if self.attention_norm is None else self.attention_norm(x)
        attn_out, layer_cache = mixer(mixer_in, context, past)
        if self.attention_after is not None:
            attn_out = self.attention_after(attn_out)
        x = x + self._scaled(drop(attn_out, context.dropout, ATTENTION))
        if self.parallel_mlp:
            mlp_in = mixer_in
        else:
            # The name that the remat policy `attention_mlp` saves (`stack_scan.SAVED`).
            x = checkpoint_name(x, "mlp_input")
            mlp_in = x if self.mlp_norm is None else self.mlp_norm(x)
        routing = None
        valid = context.mask.sample >= 0
        if self.experts is None:
            mlp_out = self.mlp(mlp_in)
        elif self.experts_norm is None:
            mlp_out, routing = self.experts(mlp_in, valid)
        else:
            experts_out, routing = self.experts(self.experts_norm(x), valid)
            mlp_out = self.mlp_norm_after(self.mlp(mlp_in)) + self.experts_norm_after(experts_out)
        if self.mlp_after is not None:
            mlp_out = self.mlp_after(mlp_out)
        x = x + self._scaled(drop(mlp_out, context.dropout, MLP_SITE))
        if self.token_input is not None:
            x = x + self.token_input(x, context.token_inputs)
        if self.output_scale is not None:
            x = self.output_scale(x)
        if self.merger is not None:
            x = self.merger(x, context)
        return LayerOutput(x, layer_cache, routing)

    def _scaled(self, out: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Multiply by the residual's scale, which is not rounded to the precision of the activations."""
        if self.residual_scale == 1:
            return out
        return (out.astype(jnp.float32) * self.residual_scale).astype(out.dtype)


NORMS: dict[str, Callable[..., nnx.Module]] = {
    "layer": LayerNorm,
    "layer_without_bias": partial(LayerNorm, biased=False),
    "rms": RMSNorm,
}


def longest_window(config: VisionConfig) -> int:
    """Count the positions of a window at most: the groups of an image's own tokens are in its first one."""
    group = config.connector.merge**2
    return config.window_positions + -(-config.own_tokens // group) * group


def with_relative_positions(
    config: VisionConfig, block: LayerConfig, in_window: bool
) -> LayerConfig:
    """Describe the layer with learned vectors of distances, in a window or in a whole image."""
    c = config
    side = c.window if in_window else c.positions.rows
    longest = c.window if in_window else c.relative_side
    scale = c.attention_scale or c.head_width**-0.5
    relative = partial(RelativePositions, side, longest, c.head_width, scale, in_window)
    # Queries are scaled before the products with vectors are beside them, and keys in windows have
    # a sink, which the kernel of windows has not.
    return replace(block, relative=relative, scoring=Scoring(1.0, 0.0), window=0)


def relative_width(config: VisionConfig, in_window: bool) -> int:
    """Return the channels of a head of queries and keys, with those of distances."""
    if not config.relative_side:
        return config.head_width
    return (
        config.head_width + 2 * (config.window if in_window else config.relative_side) + in_window
    )


def encoder_layer_config(config: VisionConfig | AudioConfig) -> LayerConfig:
    """Describe a layer with full attention. Raises ValueError where heads do not divide the width."""
    c = config
    if c.width % c.heads:
        raise ValueError(f"a width of {c.width} does not divide into {c.heads} heads")
    qk_norm = partial(RMSNorm, eps=c.qk_norm_eps) if c.qk_norm != "none" else None
    norm = partial(NORMS[c.norm], eps=c.norm_eps)
    return LayerConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.key_heads,
        head_width=c.head_width,
        mlp_width=c.mlp_width,
        backend=c.attention,
        norm=norm,
        activation=c.activation,
        gated=c.gated,
        biases=c.biases,
        head_norm=qk_norm if c.qk_norm == "head" else None,
        width_norm=qk_norm if c.qk_norm == "width" else None,
        layer_scale=c.layer_scale,
        pre_norms=c.norm_place != "after",
        post_norm=norm if c.norm_place != "before" else None,
        scoring=Scoring(c.attention_scale, 0.0),
        value_norm=partial(HeadNorm, c.norm_eps) if c.value_norm else None,
        clipped_linears=c.clipped_linears,
        rope_halves=isinstance(c.positions, AxisTables),
        rope_neighbours=c.rope_neighbours,
        window=longest_window(c) if c.modality == "image" and c.windowed else 0,
    )
