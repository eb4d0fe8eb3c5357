"""The gated delta net (Yang et al. 2025, "Gated Delta Networks"), as the linear attention of Qwen3.5.

A head keeps a matrix S instead of keys and values, and every token t decays it and writes into it:
`S_t = e^g_t S_(t-1) + k_t (beta_t (v_t - k_t' e^g_t S_(t-1)))'`, then reads `o_t = S_t' q_t`.

Rows hold several samples: the state and the short convolution before it begin anew wherever the
sample changes, and a branch of a sample goes on from what they are where its branch 0 ends. What
belongs to another sample or branch enters as a product with an exact zero, as in attention, so it
cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.config import Activation, DeltaNetConfig
from mmjax.kernels.delta_blocks import Tokens
from mmjax.kernels.delta_rule import States, delta_rule, unsupported
from mmjax.kernels.token_paths import continues, extend_paths, trunk_of
from mmjax.models.delta_context import DeltaInputs, delta_over_context, shares_rows
from mmjax.models.kv_cache import KVCacheView, RecurrentState
from mmjax.models.layers import ACTIVATIONS, Context
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.remat import keep_inputs
from mmjax.models.short_convolution import ChannelFilter, causal_convolution, last_inputs
from mmjax.parallel.sharding import active, active_spec, constrain, platform, single_axes

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
    path: Int[Array, "b t"],
    states: States | None = None,
    *,
    branched: bool = False,
) -> tuple[Float[Array, "b t m v"], States]:
    """Compute the outputs of every token, in the dtype of `v`, and the float32 states after the last one.

    Each of the `n` key heads serves `m / n` value heads. g: logarithms of the decays, not positive.
    path: of each token (`mmjax.kernels.token_paths`); padding has k = beta = g = 0 and the path
    before it. states: of the first token's path, and, with branches, of its trunk; None: zeros.
    Returned are those of the last token's. branched: samples may have branches.

    On GPUs kernels compute it where they can (`describe_delta_rule`), from queries and keys that
    are normalised and then rounded to bfloat16. Elsewhere it runs in segments of chunks of tokens,
    float32 inside; backward keeps the inputs, and the states before each segment.

    With c_i the sum of g over a chunk's tokens up to i on its path, and D_ij = e^(c_i - c_j) for j
    on the path of i, else 0 (section 3.3 of the paper): (1 + strictly lower part of diag(beta) K K'
    * D) [U | W] = diag(beta) [V | diag(e^c) K], N = U - W S, O = diag(e^c) Q S + (Q K' * D) N, and
    the next S = e^c_last S + (diag(e^(c_last - c)) K)' N. A token reads the state of its path's
    last token before the chunk, S or the trunk's, and that of the trunk goes on as S does, up to
    the last token of the trunk.
    """
    (rows, length, _, key_width), (value_heads, value_width) = k.shape, v.shape[2:]
    if states is None:
        zeros = jnp.zeros((rows, value_heads, key_width, value_width), jnp.float32)
        states = (zeros,) * (1 + branched)
    if _kernel_reason(length, key_width, value_width, v.dtype) is None:
        return _by_kernel(q, k, v, g, beta, path, states)
    return _in_segments(q, k, v, g, beta, path, states)


def _in_segments(
    q: Array, k: Array, v: Array, g: Array, beta: Array, path: Array, states: States
) -> tuple[Array, States]:
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
    # last chunk is padding of the last path, which leaves its state alone.
    paths = chunks(path, mode="edge")
    # The path of the state before each chunk: that of the token before the chunk.
    owners = jnp.concatenate([path[None, :, 0], paths[:-1, :, -1]])
    inputs = (
        *(chunks(x, key_heads) for x in (q, k)),
        *(chunks(x, key_heads, group) for x in (v, g, beta)),
        *(paths, owners),
    )
    inputs = jax.tree.map(lambda x: x.reshape(x.shape[0] // segment, segment, *x.shape[1:]), inputs)
    # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier
    # against that.
    body = jax.checkpoint(_segment, prevent_cse=False)
    states = tuple(x.reshape(rows, key_heads, group, *x.shape[2:]) for x in states)
    # Of a head and token the recurrence has a decay, a read, a write and a query, the first without
    # additions.
    with jax.named_scope(f"needs={7 * value_heads * key_width * value_width}"):
        states, out = jax.lax.scan(body, states, inputs)
    out = out.reshape(out.shape[0] * segment, *out.shape[2:])
    out = jnp.moveaxis(out, 0, 1).reshape(rows, length + extra, value_heads, value_width)[
        :, :length
    ]
    return out, tuple(x.reshape(rows, value_heads, key_width, value_width) for x in states)


def describe_delta_rule(length: int, config: DeltaNetConfig, dtype: jnp.dtype) -> str:
    """Name what computes the gated delta rule in rows of this length, and why it is not the kernels for GPUs."""
    reason = _kernel_reason(length, config.key_width, config.value_width, dtype)
    return f"XLA ({reason})" if reason else "Triton"


def _kernel_reason(length: int, key_width: int, value_width: int, dtype: jnp.dtype) -> str | None:
    if platform() not in ("gpu", "cuda"):
        return f"platform {platform()}"
    return unsupported(length, key_width, value_width, dtype)


def _by_kernel(
    q: Array, k: Array, v: Array, g: Array, beta: Array, path: Array, states: States
) -> tuple[Array, States]:
    """Compute `gated_delta_rule` by kernels, on each device of its own rows and heads."""
    current = active()
    if current is None:
        return _kernels(q, k, v, g, beta, path, states)

    # Heads of values are cut only where those of keys are too, so that a group stays together.
    heads = active_spec(k, None, None, "heads", None)[2] and "heads"
    rows, _, heads, _ = active_spec(v, "rows", None, heads, None)
    single = single_axes(current.mesh, PartitionSpec(rows, heads))
    wide, narrow = (PartitionSpec(rows, single, heads, *rest) for rest in ((None,), ()))
    of_states = (PartitionSpec(rows, heads, single, None),) * len(states)
    return jax.shard_map(
        _kernels,
        mesh=current.mesh,
        in_specs=(wide, wide, wide, narrow, narrow, PartitionSpec(rows, None), of_states),
        out_specs=(wide, of_states),
        check_vma=False,
    )(q, k, v, g, beta, path, states)


def _kernels(
    q: Array, k: Array, v: Array, g: Array, beta: Array, path: Array, states: States
) -> tuple[Array, States]:
    """Compute `gated_delta_rule` by the kernels of one device."""
    q = (_normalized(q.astype(jnp.float32)) * q.shape[-1] ** -0.5).astype(q.dtype)
    k = _normalized(k.astype(jnp.float32)).astype(k.dtype)
    g, beta = (x.astype(jnp.float32) for x in (g, beta))
    return delta_rule(Tokens(q, k, v, g, beta), path, states, interpret=platform() == "cpu")


def rule_on_device(
    q: Array, k: Array, v: Array, g: Array, beta: Array, path: Array, states: States
) -> tuple[Array, States]:
    """Compute `gated_delta_rule` of one device's tokens and heads, inside of `shard_map`."""
    sizes = q.shape[1], k.shape[-1], v.shape[-1], v.dtype
    rule = _kernels if _kernel_reason(*sizes) is None else _in_segments
    return rule(q, k, v, g, beta, path, states)


class _Chunk(NamedTuple):
    """Operands of a chunk's outputs and of its next states, all but the states before it; float32 `[B, N, R, ...]`.

    Those of S states stand side by side, `[C, S * K]`.
    """

    u: Array  # [C, V]; what tokens write is `u - w state`
    w: Array  # [C, S * K]
    # [C, S * K], decayed since the state; zero for tokens that do not continue its path
    q: Array
    scores: Array  # [C, C] of queries and keys
    k: Array  # [C, S * K], decayed until the end of each next state's path
    decay: Array  # [S, S], from states before the chunk, along the second axis, to the next


def _segment(
    states: tuple[Array, ...], inputs: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    """Compute several chunks, `[chunks, B, C, ...]`: the states after them, `[B, N, R, K, V]`, and their outputs."""

    def advance(states: tuple[Array, ...], chunk: _Chunk) -> tuple[tuple[Array, ...], Array]:
        state = jnp.concatenate(states, -2)
        new = chunk.u - _matmul(chunk.w, state)
        out = _matmul(chunk.q, state) + _matmul(chunk.scores, new)
        written = jnp.split(_einsum("...ck,...cv->...kv", chunk.k, new), len(states), -2)
        states = tuple(
            sum((x * chunk.decay[..., s, t, None, None] for t, x in enumerate(states)), y)
            for s, y in enumerate(written)
        )
        return states, jnp.moveaxis(out, 3, 1).astype(inputs[2].dtype)

    without_states = partial(_without_state, branched=len(states) > 1)
    return jax.lax.scan(advance, states, jax.vmap(without_states)(inputs))


def _without_state(inputs: tuple[Array, ...], branched: bool) -> _Chunk:
    """Compute what one chunk, `[B, C, ...]`, needs beside the states before it."""
    # Cast here, so that what the scan keeps is in the activations' precision.
    q, k, v, g, beta = (x.astype(jnp.float32) for x in inputs[:5])
    path, owner = inputs[5:]
    size = path.shape[1]
    q, k = (_normalized(x) for x in (q, k))
    # [B, N, 1, C, K]
    q, k = (jnp.moveaxis(x, 1, 2)[:, :, None] for x in (q * q.shape[-1] ** -0.5, k))
    v, g, beta = (jnp.moveaxis(x, 1, 3) for x in (v, g, beta))  # [B, N, R, C, ...]
    # [B, 1, 1, C, C]: key j is on query i's path, and not behind it.
    low = continues(path[:, :, None], path[:, None, :], branched)
    low = (low & jnp.tri(size, dtype=bool))[:, None, None]
    # Sums of g over the tokens of a path alone: differences of sums over a chunk would round with
    # what others are.
    since = jnp.sum(jnp.where(low, g[..., None, :], 0), -1)
    # between_ij = the sum of g over the path of i, from the token behind j on, the logarithm of the
    # decay from token j to token i. g_i stands in row i of every column j that it continues; of
    # rows without branches all rows below j do, so these are added up down the column.
    steps = jnp.where(low & ~jnp.eye(size, dtype=bool), g[..., None], 0)
    between = _matmul(low.astype(jnp.float32), steps) if branched else jnp.cumsum(steps, -2)
    # Masked before the exponential, which overflows above the diagonal and would make gradients
    # NaN.
    decay = jnp.exp(jnp.where(low, between, -jnp.inf))
    # Which tokens read which state, [B, C, S].
    readers = [path == owner[:, None]]
    if branched:
        of_sample = trunk_of(path) == trunk_of(owner)[:, None]
        readers.append(of_sample & ~readers[0])
    reads = jnp.where(jnp.stack(readers, -1)[:, None, None], jnp.exp(since)[..., None], 0)
    # [B, C]: the last token of the trunk that the last token is of, or continues.
    in_trunk = jnp.where(path == trunk_of(path[:, -1:]), jnp.arange(size), -1)
    is_end = in_trunk == jnp.maximum(jnp.max(in_trunk, -1, keepdims=True), 0)

    def at_ends(x: Array) -> Array:
        """Take the rows of `[..., C, n]` of the tokens after which the next states stand, `[..., S, n]`."""
        last = x[..., -1:, :]
        if not branched:
            return last
        of_trunk = jnp.sum(jnp.where(is_end[:, None, None, :, None], x, 0), -2, keepdims=True)
        return jnp.concatenate([last, of_trunk], -2)

    state_decay = at_ends(reads)
    if branched:
        # A chunk without a token of the trunk leaves its state alone.
        untouched = of_sample[:, -1] & ~jnp.any(is_end, -1)
        of_trunk = jnp.array([[False, False], [False, True]])
        state_decay = jnp.where(untouched[:, None, None, None, None] & of_trunk, 1.0, state_decay)

    def per_state(x: Array, factors: Array) -> Array:
        """Multiply `[..., C, K]` by each state's factors, `[..., C, S]`, into `[..., C, S * K]`."""
        # As one product of [C, S, K] it crashed on CPUs: XLA's backward pass of it.
        return jnp.concatenate([x * y for y in jnp.split(factors, factors.shape[-1], -1)], -1)

    keys = _einsum("...id,...jd->...ij", k, k)
    system = jnp.where(jnp.tri(size, k=-1, dtype=bool), keys * decay * beta[..., None], 0)
    right = jnp.concatenate([v * beta[..., None], per_state(k, beta[..., None] * reads)], -1)
    u, w = jnp.split(_matmul(inverse_unit_lower(system), right), [v.shape[-1]], -1)
    return _Chunk(
        u=u,
        w=w,
        q=per_state(q, reads),
        scores=_einsum("...id,...jd->...ij", q, k) * decay,
        # Rows of decays: zero for tokens that the ends of these paths do not continue.
        k=per_state(k, jnp.swapaxes(at_ends(decay), -1, -2)),
        decay=state_decay,
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
        branched = context.path is not None
        path = context.path if branched else context.mask.sample
        valid = (path >= 0)[..., None]
        linears = (self.query, self.key, self.value, self.gate, self.beta, self.decay)
        q, k, v, gate, beta, decay = apply_linears(jnp.where(valid, x, 0), *linears)
        filters = [f.weight[...] for f in (self.query_filter, self.key_filter, self.value_filter)]
        if past is None:
            previous = [jnp.zeros((len(x), c.taps - 1, y.shape[-1]), y.dtype) for y in (q, k, v)]
        else:
            previous = past.cache.inputs
        count = jnp.sum(valid, axis=(1, 2), dtype=jnp.int32)
        inputs = tuple(last_inputs(*pair, count) for pair in zip(previous, (q, k, v), strict=True))
        gate = gate.reshape(*x.shape[:2], c.value_heads, c.value_width)
        bias = self.dt_bias[...].astype(jnp.float32)
        g = -jnp.exp(self.a_log[...].astype(jnp.float32)) * jax.nn.softplus(
            decay.astype(jnp.float32) + bias
        )
        g, beta = (jnp.where(valid, y, 0) for y in (g, jax.nn.sigmoid(beta)))
        if past is None and shares_rows(x.shape[1]):
            tokens = DeltaInputs(q, k, v, g, beta)
            out, states = delta_over_context(
                tokens, filters, path, branched, self._convolve, rule_on_device
            )
        else:
            path = extend_paths(path)
            convolved = self._convolve((q, k, v), filters, path, previous, branched=branched)
            q, k, v = (constrain(y, "rows", "length", "heads", None) for y in convolved)
            states = None if past is None else (past.cache.delta,)
            out, states = gated_delta_rule(q, k, v, g, beta, path, states, branched=branched)

        # With the last product, whose operand is made again from the outputs of the delta rule and
        # of the gate.
        @keep_inputs
        def output(out: Array, gate: Array) -> Array:
            return self.output(
                self.norm(out, gate).reshape(*x.shape[:2], c.value_heads * c.value_width)
            )

        return output(out, gate), RecurrentState(states[0], inputs)

    def _convolve(
        self,
        inputs: Sequence[Array],
        filters: Sequence[Array],
        path: Array,
        previous: Sequence[Array],
        previous_path: Array | None = None,
        *,
        branched: bool,
    ) -> tuple[Array, Array, Array]:
        """Convolve queries, keys and values, `[B, T, heads * width]`, into `[B, T, heads, width]`."""

        @keep_inputs
        def convolved(y: Array, weight: Array, previous: Array) -> Array:
            y = causal_convolution(y, weight, path, previous, previous_path, branched=branched)
            return ACTIVATIONS[self.activation](y)

        widths = self.config.key_width, self.config.key_width, self.config.value_width
        q, k, v = (
            convolved(*arrays).reshape(*path.shape, -1, width)
            for *arrays, width in zip(inputs, filters, previous, widths, strict=True)
        )
        return q, k, v
