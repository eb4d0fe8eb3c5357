"""The text decoder: attention or gated delta nets, rotary or learned positions, an MLP or experts, an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mmjax.batch import MaskSpec, TextBatch, branch_gap
from mmjax.config import DecoderConfig, PlainRope
from mmjax.config.decoder import UNLIMITED, LayerKind
from mmjax.kernels.token_paths import paths_of
from mmjax.models.blockwise_attention import Scoring
from mmjax.models.embedding import look_up
from mmjax.models.experts import Experts
from mmjax.models.gated_convolution import GatedConvolution
from mmjax.models.gated_delta_net import GatedDeltaNet
from mmjax.models.latent_attention import LatentAttention
from mmjax.models.layer_stacks import LayerStacks
from mmjax.models.layers import (
    NORMS,
    Context,
    HeadNorm,
    LayerConfig,
    PositionTable,
    RMSNorm,
    TransformerLayer,
)
from mmjax.models.linear import Linear
from mmjax.models.matmul import as_matrix, on_one_cpu, sum_outer_products
from mmjax.models.rope import text_rotation
from mmjax.models.stack_scan import LayerStack
from mmjax.parallel.sharding import constrain, in_row_order

# `jnp.maximum.accumulate` would be a scan over the tokens.
_running_max = partial(jax.lax.cummax, axis=1)


class TokenTable(nnx.Module):
    """One vector per token of the vocabulary: the embedding, or the output projection that `logits_of` applies."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=("vocab", "embed"))

    def embed(self, token: Int[Array, "r t"], dtype: jnp.dtype) -> Float[Array, "r t d"]:
        return look_up(self.weight[...], ("vocab", "embed"), token, dtype)


def logits_of(
    x: Float[Array, "r t d"],
    table: Float[Array, "*p v d"],
    cap: float = 0.0,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "r t v"]:
    """Compute float32 logits over an output table or a slice of one, soft-capped by tanh where `cap` is not 0.

    A table `[p, v, d]` has a copy for every part of the rows. dtype: of the products' operands, by
    default that of `x`.
    """
    parts = as_matrix(x) if table.ndim == 2 else x.reshape(len(table), -1, *x.shape[1:])
    logits = _logits(parts, table, dtype or x.dtype).reshape(*x.shape[:-1], -1)
    return soft_cap(constrain(logits, "rows", "length", "vocab"), cap)


def soft_cap(logits: Float[Array, "*t v"], cap: float) -> Float[Array, "*t v"]:
    """Limit logits to `cap` by tanh, where it is not 0."""
    return jnp.tanh(logits / cap) * cap if cap else logits


def multiply_table(x: Array, table: Array) -> Array:
    """Multiply `x` by an output table in the precision of `x`, to float32 logits without a cap.

    A matrix of positions `[t, d]` or rows of them `[r, t, d]` by `[v, d]`; where every part p of the
    rows has a table of its own, `[p, ..., d]` by `[p, v, d]`.
    """
    x_axes, table_axes, logit_axes = _axes(x, table)
    return jnp.einsum(
        f"{x_axes},{table_axes}->{logit_axes}",
        x,
        table.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )


def hidden_gradient(d_logits: Array, table: Array) -> Array:
    """Compute the float32 gradient of the `x` of `multiply_table`, by a product in the precision of `d_logits`."""
    x_axes, table_axes, logit_axes = _axes(d_logits, table)
    return jnp.einsum(
        f"{logit_axes},{table_axes}->{x_axes}",
        d_logits,
        table.astype(d_logits.dtype),
        preferred_element_type=jnp.float32,
    )


def table_gradient(d_logits: Array, x: Array, table: Array, dtype: DTypeLike) -> Array:
    """Compute the gradient of the table of `multiply_table` in `dtype`, by a product in the precision of `d_logits`."""
    x_axes, table_axes, logit_axes = _axes(x, table)
    x = x.astype(d_logits.dtype)
    if x.ndim == 2 and on_one_cpu():
        return sum_outer_products(d_logits, x, dtype)
    return jnp.einsum(
        f"{logit_axes},{x_axes}->{table_axes}", d_logits, x, preferred_element_type=dtype
    )


def _axes(x: Array, table: Array) -> tuple[str, str, str]:
    """Name the axes of positions, of a table and of logits: `td`, `vd`, `tv`, or `ptd`, `pvd`, `ptv`."""
    p = "p" * (table.ndim - 2)
    t = p + "rt"[: x.ndim - len(p) - 1]
    return f"{t}d", f"{p}vd", f"{t}v"


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logits(x: Array, table: Array, dtype: jnp.dtype) -> Array:
    """Multiply operands in `dtype`, summing in float32, in backward too."""
    return multiply_table(x.astype(dtype), table)


def _logits_forward(x: Any, table: Any, dtype: jnp.dtype) -> tuple[Array, Any]:
    # Each is needed for the gradient of the other alone, which a frozen one lacks. Empty slices
    # tell the dtypes.
    residuals = x.value if table.perturbed else None, table.value if x.perturbed else None
    return _logits(x.value, table.value, dtype), (*residuals, x.value[:0], table.value[:0])


def _logits_backward(
    dtype: jnp.dtype, residuals: Any, d_logits: Array
) -> tuple[Array | None, Array | None]:
    x, table, no_x, no_table = residuals
    # The logits' gradient is float32, and would make both products so.
    d_logits = d_logits.astype(dtype)
    d_x = d_table = None
    if table is not None:
        d_x = hidden_gradient(d_logits, table).astype(no_x.dtype)
    if x is not None:
        # Rounded by the product itself, like the gradients of all weights, so that ranks reduce it
        # in `dtype`.
        d_table = table_gradient(d_logits, x, no_table, dtype).astype(no_table.dtype)
    return d_x, d_table


_logits.defvjp(_logits_forward, _logits_backward, symbolic_zeros=True)


def scaled(x: Float[Array, "*b d"], scale: float) -> Float[Array, "*b d"]:
    """Multiply by a scale in the precision of `x`, unless it is 1."""
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


def norm_of(config: DecoderConfig, eps: float = 0.0) -> Callable[[int], nnx.Module]:
    """Return the constructor of the residual stream's norms, which takes a width. eps: 0: that of most."""
    offset = {"offset": config.norm_offset} if config.norm == "rms" else {}
    return partial(NORMS[config.norm], eps=eps or config.norm_eps, **offset)


def decoder_layer_config(config: DecoderConfig, kind: LayerKind) -> LayerConfig:
    """Describe a decoder's layers of a kind."""
    c = config
    delta_net = partial(GatedDeltaNet, c.delta_net, c.width, c.norm_eps, c.activation)
    head_width, (heads, kv_heads) = c.heads_of(not kind.is_full)
    latent = partial(LatentAttention, c.latent, 2 * c.rotary_pairs)
    head_norms = {
        "head": partial(RMSNorm, eps=c.norm_eps, offset=c.norm_offset),
        "unscaled": lambda _: HeadNorm(c.norm_eps),
    }
    return LayerConfig(
        width=c.width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=(kind.shares_keys and c.shared_mlp_width) or c.mlp_width,
        backend=c.attention,
        norm=norm_of(c),
        activation=c.activation,
        gated=c.gated,
        biases=c.biases,
        head_norm=head_norms.get(c.qk_norm),
        attention_gate=c.attention_gate and not c.separate_gate,
        separate_gate=c.separate_gate,
        attention=latent if c.latent else None,
        delta_net=delta_net if kind.has_delta_net else None,
        convolution=partial(GatedConvolution, c.convolution, c.width)
        if kind.has_convolution
        else None,
        experts=partial(Experts, c.experts, c.width, c.activation) if kind.has_experts else None,
        experts_beside=kind.has_experts and c.experts.beside_mlp,
        norm_eps=c.norm_eps,
        pre_norms=c.pre_norms,
        post_norm=norm_of(c, c.post_norm_eps) if c.post_norms else None,
        residual_scale=c.residual_scale,
        parallel_mlp=c.parallel_mlp,
        scoring=Scoring(c.attention_scale, c.attention_cap),
        rope_neighbours=c.rope_neighbours,
        has_rope=kind.has_rope,
        grows=kind.has_rope == (c.growing == "rotated"),
        rotated_norm=partial(HeadNorm, c.norm_eps) if c.qk_norm == "rotated" else None,
        sinks=c.sinks,
        value_norm=partial(HeadNorm, c.norm_eps) if c.value_norm and not kind.shares_keys else None,
        keys_as_values=c.keys_as_values and kind.is_full,
        shares_keys=kind.shares_keys,
        token_width=c.token_inputs.width if c.token_inputs else 0,
        output_scale=c.output_scales,
    )


class TokenInputs(nnx.Module):
    """The vectors of tokens that layers take: of each layer's table, and of a projection of the embeddings."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        width = c.layers * c.token_inputs.width
        self.table = TokenTable(c.token_inputs.vocab, width, rngs)
        self.projection = Linear(c.width, width, ("embed", None), rngs)
        self.norm = RMSNorm(c.token_inputs.width, c.norm_eps, c.norm_offset)
        self.config = config

    def __call__(
        self, x: Float[Array, "b t d"], token: Int[Array, "b t"]
    ) -> Float[Array, "l b t p"]:
        """Make them of embeddings, those of images and clips among them, and of tokens."""
        c = self.config
        shape = (*x.shape[:2], c.layers, c.token_inputs.width)
        entries = self.table.embed(token, x.dtype)
        # 0 stands for padding, images and clips: an entry that learns nothing.
        entries = jnp.where((token == 0)[..., None], jax.lax.stop_gradient(entries), entries)
        entries = scaled(entries, c.token_inputs.width**0.5)
        projected = self.norm(scaled(self.projection(x), c.width**-0.5).reshape(shape))
        added = scaled(projected + entries.reshape(shape), 2**-0.5)
        return constrain(jnp.moveaxis(added, 2, 0), None, "rows", "length", None)


class DecoderHead(nnx.Module):
    """The final norm, and the output table if it is not the input's."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        plain = replace(config, norm_offset=0.0)
        self.norm = norm_of(plain if config.plain_head_norm else config)(config.width)
        self.table = None if config.tied else TokenTable(config.vocab, config.width, rngs)


class Decoder(nnx.Module):
    """embed -> layers -> head."""

    def __init__(
        self, config: DecoderConfig, plan: tuple[LayerStack, ...], dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.embed = TokenTable(config.vocab, config.width, rngs)
        self.embed_norm = HeadNorm(config.norm_eps) if config.embedding_norm else None
        learned = config.learned_positions
        self.positions = PositionTable(learned, config.width, rngs) if learned else None
        self.token_inputs = TokenInputs(config, rngs) if config.token_inputs else None
        kinds = config.layer_kinds
        configs = {kind: decoder_layer_config(config, kind) for kind in set(kinds)}
        self.layers = LayerStacks(
            lambda i, rngs: TransformerLayer(configs[kinds[i]], rngs),
            plan,
            rngs,
            config.windowed,
            key_sources=config.key_sources,
        )
        self.head = DecoderHead(config, rngs)
        self.config = config
        self.dropout = config.dropout
        self.dtype = dtype

    def embedded(self, token: Int[Array, "r t"]) -> Float[Array, "r t d"]:
        c = self.config
        x = self.embed.embed(token, self.dtype)
        x = x if self.embed_norm is None else self.embed_norm(x)
        # Gemma's sqrt(width), rounded to the activations' precision as in HF.
        return x if c.scaled_items else scaled(x, c.embedding_scale)

    def positioned(
        self, x: Float[Array, "r t d"], position: Int[Array, "r t *n"]
    ) -> Float[Array, "r t d"]:
        """Add learned positions, where the decoder has them, to tokens at these places of their samples.

        With `scaled_items` they are multiplied first, those of images and clips among them.
        """
        x = scaled(x, self.config.embedding_scale) if self.config.scaled_items else x
        return (
            x
            if self.positions is None
            else x + self.positions(position + self.config.first_position, x.dtype)
        )

    def with_token_inputs(
        self, context: Context, x: Float[Array, "r t d"], token: Int[Array, "r t"]
    ) -> Context:
        """Add what layers take of tokens, where they do. x: the first layer's input."""
        if self.token_inputs is None:
            return context
        return context._replace(token_inputs=self.token_inputs(x, token))

    def context(self, text: TextBatch) -> Context:
        """Build the masks and the rotary angles of a batch."""
        pos = text.pos
        if self.config.windowed:
            # A window counts the tokens of its own branch and of branch 0, as if each branch
            # followed that at once. All branches but the first move towards branch 0, so none comes
            # to see what is behind it in the row.
            pos = pos - in_row_order(
                partial(branch_gap, _running_max), text.pos, text.sample, text.kind
            )
        context = self.context_of(text.mask._replace(pos=pos), text.position)
        if text.branches is None:
            return context
        return context._replace(path=paths_of(text.sample, text.kind))

    def context_of(self, mask: MaskSpec, position: Int[Array, "b t *n"]) -> Context:
        """Build the masks and the rotary angles of tokens with this mask, at these RoPE positions."""
        c = self.config
        head_width, heads = c.heads_of(windowed=False)
        full = replace(c, head_width=head_width)
        rotation = None if c.learned_positions else text_rotation(full, position, mask.sample)
        in_window = mask
        if c.items == "in_windows":
            mask = mask._replace(span=jnp.zeros_like(mask.span))
        if not c.windowed:
            # Without windows there is no `reach`, and the program has no comparison for it.
            return Context(mask, rotation).planned(c.attention, head_width, heads, self.dtype)
        near = c
        if c.window_rope_theta:
            near = replace(c, rope_theta=c.window_rope_theta, rope_scaling=PlainRope())
        is_own = near != full and not c.learned_positions
        window_rotation = text_rotation(near, position, mask.sample) if is_own else None
        # Both masks need a window, so that a scan over layers of both kinds can select one of two
        # equal pytrees.
        window_mask = in_window._replace(reach=jnp.full_like(mask.pos, c.reach(position)))
        full_mask = mask._replace(reach=jnp.full_like(mask.pos, UNLIMITED))
        return Context(
            full_mask, rotation, window_mask=window_mask, window_rotation=window_rotation
        ).planned(c.attention, head_width, heads, self.dtype, in_window=c.heads_of(windowed=True))

    def origin(self, text: TextBatch) -> tuple[Int[Array, "r t"], Int[Array, "r t"]]:
        """Return every position's sample id and its index in the sample."""
        return text.owner, text.offset

    def hidden_and_table(
        self, x: Float[Array, "r t d"]
    ) -> tuple[Float[Array, "r t d"], Float[Array, "*p v d"]]:
        """Return the operands of `logits_of`: activations after the final norm, and the output table as stored.

        The scale of the logits is in the activations.
        """
        table = self.embed if self.head.table is None else self.head.table
        x = scaled(self.head.norm(x), self.config.logit_scale)
        # Whole along the length: chunks of the vocabulary would each gather it again.
        return constrain(x, "rows", "length", "width"), table.weight[...]
