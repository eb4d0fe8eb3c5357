"""The gated delta net (Yang et al. 2025, "Gated Delta Networks"), as the linear attention of Qwen3.5.

A head keeps a matrix S instead of keys and values, and every token t decays it and writes into it:
`S_t = e^g_t S_(t-1) + k_t (beta_t (v_t - k_t' e^g_t S_(t-1)))'`, then reads `o_t = S_t' q_t`.

Rows hold several samples: the state and the short convolution before it begin anew wherever
`sample` changes. What belongs to another sample enters as a product with an exact zero, as in
attention, so it cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.config import Activation, DeltaNetConfig
from mmjax.kernels.delta_blocks import Tokens
from mmjax.kernels.delta_rule import delta_rule, unsupported
from mmjax.models.delta_context import (
    DeltaInputs,
    delta_over_context,
    extend_samples,
    shares_rows,
)
from mmjax.models.kv_cache import KVCacheView, RecurrentState
from mmjax.models.layers import ACTIVATIONS, Context
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.remat import keep_inputs
from mmjax.parallel.sharding import active, constrain, platform, sharding, spec_axes

CHUNK = 64  # tokens whose outputs are computed together, by matrix products
# Chunks whose products without the state are computed at once: a GPU launches fewer kernels, a CPU
# has less memory.
SEGMENT = {"gpu": 8, "cuda": 8}
OTHER_SEGMENT = 4
L2_EPS = 1e-6  # added to the squared norms of queries and keys

# Operands are float32, and products on accelerators would round them by default.
_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule(
    q: Float[Array, "b t n k"],
    k: Float[Array, "b t n k"],
    v: Float[Array, "b t m v"],
    g: Float[Array, "b t m"],
    beta: Float[Array, "b t m"],
    sample: Int[Array, "b t"],
    state: Float[Array, "b m k v"] | None = None,
) -> tuple[Float[Array, "b t m v"], Float[Array, "b m k v"]]:
    """Compute the outputs of every token, in the dtype of `v`, and the float32 state after the last one.

    Each of the `n` key heads serves `m / n` value heads. g: logarithms of the decays, not positive.
    sample: samples are contiguous; padding has k = beta = g = 0 and the sample before it. state: of
    the first token's sample, else zeros.

    On GPUs kernels compute it where they can (`describe_delta_rule`), from queries and keys that
    are normalised and then rounded to bfloat16. Elsewhere it runs in segments of chunks of tokens,
    float32 inside; backward keeps the inputs, and the state before each segment.

    With c_i the sum of g over a chunk's tokens up to i, and D_ij = e^(c_i - c_j) for j <= i, else 0
    (section 3.3 of the paper): (1 + strictly lower part of diag(beta) K K' * D) [U | W] =
    diag(beta) [V | diag(e^c) K], N = U - W S, O = diag(e^c) Q S + (Q K' * D) N, and the next S =
    e^c_last S + (diag(e^(c_last - c)) K)' N.
    """
    (rows, length, _, key_width), (value_heads, value_width) = k.shape, v.shape[2:]
    if state is None:
        state = jnp.zeros((rows, value_heads, key_width, value_width), jnp.float32)
    if _kernel_reason(length, key_width, value_width, v.dtype) is None:
        return _by_kernel(q, k, v, g, beta, sample, state)
    return _in_segments(q, k, v, g, beta, sample, state)


def _in_segments(
    q: Array, k: Array, v: Array, g: Array, beta: Array, sample: Array, state: Array
) -> tuple[Array, Array]:
    """Compute `gated_delta_rule` by XLA's operations, a segment of chunks at a time."""
    (rows, length, key_heads, key_width), (value_heads, value_width) = k.shape, v.shape[2:]
    group = value_heads // key_heads
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    segment = min(SEGMENT.get(platform(), OTHER_SEGMENT), -(-length // chunk))
    extra = -length % (chunk * segment)

    def chunks(x: Array, *heads: int, mode: str = "constant") -> Array:
        """Cut `[B, T, heads, ...]` into `[chunks, B, C, ...]`."""
        x = jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2), mode)
        return jnp.moveaxis(
            x.reshape(rows, x.shape[1] // chunk, chunk, *heads, *x.shape[2 + bool(heads) :]), 1, 0
        )

    # 200 tokens are cut into 4 chunks of 64, the last with 56 of padding; q becomes [4, B, 64, N,
    # K], then, for the scan, [segments, chunks of a segment, B, 64, N, K]. N is of key heads, and
    # values are [..., N, R, V]: each key head with the R value heads that it serves. What fills the
    # last chunk is padding of the last sample, which leaves its state alone.
    samples = chunks(sample, mode="edge")
    # The sample to which the state before each chunk belongs: that of the token before the chunk.
    owners = jnp.concatenate([sample[None, :, 0], samples[:-1, :, -1]])
    inputs = (
        *(chunks(x, key_heads) for x in (q, k)),
        *(chunks(x, key_heads, group) for x in (v, g, beta)),
        *(samples, owners),
    )
    inputs = jax.tree.map(lambda x: x.reshape(x.shape[0] // segment, segment, *x.shape[1:]), inputs)
    # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier
    # against that.
    body = jax.checkpoint(_segment, prevent_cse=False)
    # Of a head and token the recurrence has a decay, a read, a write and a query, the first without
    # additions.
    with jax.named_scope(f"needs={7 * value_heads * key_width * value_width}"):
        state, out = jax.lax.scan(
            body, state.reshape(rows, key_heads, group, key_width, value_width), inputs
        )
    out = out.reshape(out.shape[0] * segment, *out.shape[2:])
    out = jnp.moveaxis(out, 0, 1).reshape(rows, length + extra, value_heads, value_width)[
        :, :length
    ]
    return out, state.reshape(rows, value_heads, key_width, value_width)


def describe_delta_rule(length: int, config: DeltaNetConfig, dtype: jnp.dtype) -> str:
    """Name what computes the gated delta rule in rows of this length, and why it is not the kernels for GPUs."""
    reason = _kernel_reason(length, config.key_width, config.value_width, dtype)
    return f"XLA ({reason})" if reason else "Triton"


def _kernel_reason(length: int, key_width: int, value_width: int, dtype: jnp.dtype) -> str | None:
    if platform() not in ("gpu", "cuda"):
        return f"platform {platform()}"
    return unsupported(length, key_width, value_width, dtype)


def _by_kernel(
    q: Array, k: Array, v: Array, g: Array, beta: Array, sample: Array, state: Array
) -> tuple[Array, Array]:
    """Compute `gated_delta_rule` by kernels, on each device of its own rows and heads."""
    current = active()
    if current is None:
        return _kernels(q, k, v, g, beta, sample, state)

    def spec(x: Array, *axes: str | None) -> PartitionSpec:
        return sharding(current.mesh, current.rules, x.shape, axes).spec

    # Heads of values are cut only where those of keys are too, so that a group stays together.
    heads = spec(k, None, None, "heads", None)[2] and "heads"
    rows, _, heads, _ = spec(v, "rows", None, heads, None)
    # Gradients are summed over the axes that a spec leaves out; those of one device are named, to
    # need no all-reduce.
    named = {*chain(*spec_axes(PartitionSpec(rows, heads)))}
    single = tuple(
        axis for axis, size in current.mesh.shape.items() if size == 1 and axis not in named
    )
    wide, narrow = (PartitionSpec(rows, single or None, heads, *rest) for rest in ((None,), ()))
    of_state = PartitionSpec(rows, heads, single or None, None)
    return jax.shard_map(
        _kernels,
        mesh=current.mesh,
        in_specs=(wide, wide, wide, narrow, narrow, PartitionSpec(rows, None), of_state),
        out_specs=(wide, of_state),
        check_vma=False,
    )(q, k, v, g, beta, sample, state)


def _kernels(
    q: Array, k: Array, v: Array, g: Array, beta: Array, sample: Array, state: Array
) -> tuple[Array, Array]:
    """Compute `gated_delta_rule` by the kernels of one device."""
    q = (_normalized(q.astype(jnp.float32)) * q.shape[-1] ** -0.5).astype(q.dtype)
    k = _normalized(k.astype(jnp.float32)).astype(k.dtype)
    g, beta = (x.astype(jnp.float32) for x in (g, beta))
    return delta_rule(Tokens(q, k, v, g, beta), sample, state, interpret=platform() == "cpu")


def rule_on_device(
    q: Array, k: Array, v: Array, g: Array, beta: Array, sample: Array, state: Array
) -> tuple[Array, Array]:
    """Compute `gated_delta_rule` of one device's tokens and heads, inside of `shard_map`."""
    by_kernels = _kernel_reason(q.shape[1], k.shape[-1], v.shape[-1], v.dtype) is None
    return (_kernels if by_kernels else _in_segments)(q, k, v, g, beta, sample, state)


class _Chunk(NamedTuple):
    """Operands of a chunk's outputs and of its next state, all but the state before it; float32 `[B, N, R, ...]`."""

    u: Array  # [C, V]; what tokens write is `u - w state`
    w: Array  # [C, K]
    # [C, K], decayed since the state; zero for tokens of other samples than the one that wrote it
    q: Array
    scores: Array  # [C, C] of queries and keys
    k: Array  # [C, K], decayed until the chunk's end
    decay: Array  # [1, 1], of the state


def _segment(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """Compute several chunks, `[chunks, B, C, ...]`: the state after them, and their outputs."""

    def advance(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
        new = chunk.u - _matmul(chunk.w, state)
        out = _matmul(chunk.q, state) + _matmul(chunk.scores, new)
        state = state * chunk.decay + _einsum("...ck,...cv->...kv", chunk.k, new)
        return state, jnp.moveaxis(out, 3, 1).astype(inputs[2].dtype)

    return jax.lax.scan(advance, state, jax.vmap(_without_state)(inputs))


def _without_state(inputs: tuple[Array, ...]) -> _Chunk:
    """Compute what one chunk, `[B, C, ...]`, needs beside the state before it."""
    # Cast here, so that what the scan keeps is in the activations' precision.
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs[:5])
    sample, owner = inputs[5:]
    size = sample.shape[1]
    q, k = (_normalized(x) for x in (q, k))
    # [B, N, 1, C, K]
    q, k = (jnp.moveaxis(x, 1, 2)[:, :, None] for x in (q * q.shape[-1] ** -0.5, k))
    v, g, beta = (jnp.moveaxis(x, 1, 3) for x in (v, g, beta))  # [B, N, R, C, ...]
    # [B, C, C]: key j is of query i's sample, and, in `low`, not behind it.
    same = sample[:, :, None] == sample[:, None, :]
    low = (same & jnp.tri(size, dtype=bool))[:, None, None]
    # Sums of g over the tokens of a sample alone: differences of sums over a chunk would round with
    # what others are.
    since = jnp.sum(jnp.where(low, g[..., None, :], 0), -1)
    # between_ij = g_(j+1) + ... + g_i, the logarithm of the decay from token j to token i: g_i
    # stands in row i of every column j < i, and is added up down the column.
    between = jnp.cumsum(jnp.where(low & ~jnp.eye(size, dtype=bool), g[..., None], 0), -2)
    # Masked before the exponential, which overflows above the diagonal and would make gradients
    # NaN.
    decay = jnp.exp(jnp.where(low, between, -jnp.inf))
    # Only tokens of the sample that wrote the state read it.
    reads = jnp.where((sample == owner[:, None])[:, None, None], jnp.exp(since), 0)
    keys = _einsum("...id,...jd->...ij", k, k)
    system = jnp.where(jnp.tri(size, k=-1, dtype=bool), keys * decay * beta[..., None], 0)
    right = jnp.concatenate([v * beta[..., None], k * (beta * reads)[..., None]], -1)
    u, w = jnp.split(_matmul(inverse_unit_lower(system), right), [v.shape[-1]], -1)
    return _Chunk(
        u=u,
        w=w,
        q=q * reads[..., None],
        scores=_einsum("...id,...jd->...ij", q, k) * decay,
        # The last row of decays: zero for tokens of samples before the last one's.
        k=k * decay[..., -1, :, None],
        decay=reads[..., -1, None, None],
    )


def _normalized(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPS)


def inverse_unit_lower(low: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Invert `1 + low`, strictly lower triangular with a power of two rows: merge inverses of blocks of 1, 2, 4, ...

    Products alone, as accelerators want it, and as exact as substitution. (The product of `1 +
    (-low)^(2^n)` is not: its powers overflow where keys repeat.)
    """
    size = low.shape[-1]
    batch = low.shape[:-2]
    inverse = jnp.ones((*batch, size, 1, 1), low.dtype)
    half = 1
    while half < size:
        count = size // (2 * half)
        blocks = low.reshape(*batch, count, 2 * half, count, 2 * half)
        diagonal = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        inverse = inverse.reshape(*batch, count, 2, half, half)
        first = inverse[..., 0, :, :]
        second = inverse[..., 1, :, :]
        # [[a, 0], [x, d]] has the inverse [[a', 0], [-d' x a', d']].
        corner = -_matmul(second, _matmul(diagonal[..., half:, :half], first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        half *= 2
    return inverse[..., 0, :, :]


def causal_convolution(
    x: Float[Array, "b t c"],
    weight: Float[Array, "n c"],
    sample: Int[Array, "b t"],
    previous: Float[Array, "b p c"],
    previous_sample: Int[Array, "b p"] | None = None,
) -> Float[Array, "b t c"]:
    """Sum every channel's last `n` inputs by its weights, of which the last is the token's own; float32 inside.

    previous: the n - 1 inputs before the first token, of these samples (by default the first
    token's), or zeros. No tap reaches into another sample.
    """
    # With 4 taps, output t is the sum over i = 0..3 of weight[i] * x[t - 3 + i]; `padded` begins
    # with the 3 inputs before the first token, so tap i reads it from column i on.
    taps = len(weight)
    padded = jnp.concatenate([previous.astype(x.dtype), x], 1)
    if previous_sample is None:
        previous_sample = jnp.repeat(sample[:, :1], taps - 1, 1)
    owner = jnp.concatenate([previous_sample, sample], 1)
    length = x.shape[1]

    def tap(i: int) -> Array:
        value = jnp.where(
            (owner[:, i : i + length] == sample)[..., None], padded[:, i : i + length], 0
        )
        return value.astype(jnp.float32) * weight[i].astype(jnp.float32)

    return sum(tap(i) for i in range(taps)).astype(x.dtype)


class ChannelFilter(nnx.Module):
    """The weights of a convolution of each channel by itself, initialised uniform as PyTorch's."""

    def __init__(self, taps: int, channels: int, rngs: nnx.Rngs):
        limit = taps**-0.5
        weight = jax.random.uniform(rngs.params(), (taps, channels), jnp.float32, -limit, limit)
        self.weight = nnx.Param(weight, axes=(None, "heads"))


class GatedRMSNorm(nnx.Module):
    """Divide each head by its root mean square, times a scale, times the SiLU of a gate; float32 inside."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"], gate: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (
            y * self.scale[...].astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        ).astype(x.dtype)


class GatedDeltaNet(nnx.Module):
    """Projections, short convolutions, the gated delta rule and a gated norm, in the place of self-attention.

    Tensor parallelism shards by key heads with their value heads: queries, keys and values are
    three matrices.
    """

    def __init__(
        self, config: DeltaNetConfig, width: int, eps: float, activation: Activation, rngs: nnx.Rngs
    ):
        c = config
        keys = c.key_heads * c.key_width
        values = c.value_heads * c.value_width
        into = partial(Linear, width, axes=("embed", "heads"), rngs=rngs)
        self.query = into(keys)
        self.key = into(keys)
        self.value = into(values)
        self.gate = into(values)
        self.beta = into(c.value_heads)
        self.decay = into(c.value_heads)
        self.query_filter = ChannelFilter(c.taps, keys, rngs)
        self.key_filter = ChannelFilter(c.taps, keys, rngs)
        self.value_filter = ChannelFilter(c.taps, values, rngs)
        rate = jax.random.uniform(rngs.params(), (c.value_heads,), jnp.float32, 0.01, 16.0)
        self.a_log = nnx.Param(jnp.log(rate), axes=("heads",))
        self.dt_bias = nnx.Param(jnp.ones(c.value_heads, jnp.float32), axes=("heads",))
        self.norm = GatedRMSNorm(c.value_width, eps)
        self.output = Linear(values, width, ("heads", "embed"), rngs)
        self.config = config
        self.activation: Activation = activation

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> tuple[Float[Array, "b t d"], RecurrentState]:
        """Apply the layer to rows, or to tokens behind those of `past`; return the state behind each row's last token.

        With one sample in a row from its first column on, as in prefill and decode; of packed rows
        nobody reads it.
        """
        c = self.config
        sample = context.mask.sample
        valid = (sample >= 0)[..., None]
        linears = (self.query, self.key, self.value, self.gate, self.beta, self.decay)
        q, k, v, gate, beta, decay = apply_linears(jnp.where(valid, x, 0), *linears)
        filters = [f.weight[...] for f in (self.query_filter, self.key_filter, self.value_filter)]
        if past is None:
            previous = [jnp.zeros((len(x), c.taps - 1, y.shape[-1]), y.dtype) for y in (q, k, v)]
        else:
            previous = past.cache.inputs
        count = jnp.sum(valid, axis=(1, 2), dtype=jnp.int32)
        inputs = tuple(_last_inputs(*pair, count) for pair in zip(previous, (q, k, v), strict=True))
        gate = gate.reshape(*x.shape[:2], c.value_heads, c.value_width)
        bias = self.dt_bias[...].astype(jnp.float32)
        g = -jnp.exp(self.a_log[...].astype(jnp.float32)) * jax.nn.softplus(
            decay.astype(jnp.float32) + bias
        )
        g, beta = (jnp.where(valid, y, 0) for y in (g, jax.nn.sigmoid(beta)))
        if past is None and shares_rows(x.shape[1]):
            tokens = DeltaInputs(q, k, v, g, beta)
            out, state = delta_over_context(tokens, filters, sample, self._convolve, rule_on_device)
        else:
            sample = extend_samples(sample)
            convolved = self._convolve((q, k, v), filters, sample, previous)
            q, k, v = (constrain(y, "rows", "length", "heads", None) for y in convolved)
            state = None if past is None else past.cache.delta
            out, state = gated_delta_rule(q, k, v, g, beta, sample, state)

        # With the last product, whose operand is made again from the outputs of the delta rule and
        # of the gate.
        @keep_inputs
        def output(out: Array, gate: Array) -> Array:
            return self.output(
                self.norm(out, gate).reshape(*x.shape[:2], c.value_heads * c.value_width)
            )

        return output(out, gate), RecurrentState(state, inputs)

    def _convolve(
        self,
        inputs: Sequence[Array],
        filters: Sequence[Array],
        sample: Array,
        previous: Sequence[Array],
        previous_sample: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Convolve queries, keys and values, `[B, T, heads * width]`, into `[B, T, heads, width]`."""

        @keep_inputs
        def convolved(y: Array, weight: Array, previous: Array) -> Array:
            y = causal_convolution(y, weight, sample, previous, previous_sample)
            return ACTIVATIONS[self.activation](y)

        widths = self.config.key_width, self.config.key_width, self.config.value_width
        q, k, v = (
            convolved(*arrays).reshape(*sample.shape, -1, width)
            for *arrays, width in zip(inputs, filters, previous, widths, strict=True)
        )
        return q, k, v


def _last_inputs(previous: Array, x: Array, count: Array) -> Array:
    """Select the inputs of a convolution that the token behind the first `count` `[B]` of each row needs."""
    padded = jnp.concatenate([previous.astype(x.dtype), x], 1)
    index = count[:, None] + jnp.arange(previous.shape[1])
    return jnp.take_along_axis(padded, index[..., None], axis=1)
