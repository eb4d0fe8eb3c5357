"""Short causal convolutions of each channel by itself, over packed rows: no tap reaches off a token's path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.kernels.token_paths import earlier_tokens, last_trunk_tokens, token_before
from mmjax.models.embedding import take_tokens

CHUNK = 64  # tokens of a row with branches whose taps are one product


class ChannelFilter(nnx.Module):
    """The weights of a convolution of each channel by itself, initialised uniform as PyTorch's."""

    def __init__(self, taps: int, channels: int, rngs: nnx.Rngs):
        limit = taps**-0.5
        weight = jax.random.uniform(rngs.params(), (taps, channels), jnp.float32, -limit, limit)
        self.weight = nnx.Param(weight, axes=(None, "heads"))


def causal_convolution(
    x: Float[Array, "b t c"],
    weight: Float[Array, "n c"],
    path: Int[Array, "b t"],
    previous: Float[Array, "b p c"],
    previous_path: Int[Array, "b p"] | None = None,
    *,
    branched: bool = False,
) -> Float[Array, "b t c"]:
    """Sum every channel's last `n` inputs on a token's path by its weights, the last its own; float32 inside.

    previous: inputs before the first token, at least n - 1, of these paths (by default the first
    token's), or zeros. branched: samples may have branches; of these it needs the last tokens of
    trunks too.
    """
    taps = len(weight)
    if previous_path is None:
        previous_path = jnp.repeat(path[:, :1], previous.shape[1], 1)
    padded = jnp.concatenate([previous.astype(x.dtype), x], 1)
    paths = jnp.concatenate([previous_path, path], 1)
    earlier = _forked_inputs if branched else _shifted_inputs
    inputs = [*earlier(padded, paths, x.shape[1], taps), x]
    terms = [
        y.astype(jnp.float32) * w.astype(jnp.float32) for y, w in zip(inputs, weight, strict=True)
    ]
    return sum(terms[1:], terms[0]).astype(x.dtype)


def _shifted_inputs(padded: Array, path: Array, length: int, taps: int) -> list[Array]:
    """Return for each of the last tokens of the row the input `taps - 1` tokens before it, ..., and that 1 before."""
    # With 4 taps and 3 inputs before the first token, tap i reads `padded` from column i on.
    own = path[:, -length:]
    first = padded.shape[1] - length - (taps - 1)

    def shifted(x: Array, i: int) -> Array:
        return x[:, first + i : first + i + length]

    return [
        jnp.where((shifted(path, i) == own)[..., None], shifted(padded, i), 0)
        for i in range(taps - 1)
    ]


def _forked_inputs(padded: Array, path: Array, length: int, taps: int) -> list[Array]:
    """Return the same of rows with branches, whose first tokens follow the last of their trunk.

    A chunk's inputs are a product of zeros and ones with its own tokens, the `taps - 1` before it
    and as many before these that are in trunks: exact, and its gradient has the same bits every time.
    """
    reach = taps - 1
    size = max(min(CHUNK, length), reach)
    extra = -length % size
    padded = jnp.pad(padded, ((0, 0), (0, extra), (0, 0)))
    path = jnp.pad(path, ((0, 0), (0, extra)), constant_values=-1)
    rows, total = path.shape
    first = total - length - extra  # column of the first token
    chunks = (length + extra) // size
    # [B, chunks, size] for each tap
    column = jnp.broadcast_to(jnp.arange(first, total, dtype=jnp.int32), (rows, total - first))
    sources = [
        y.reshape(rows, chunks, size) for y in earlier_tokens(token_before(path), column, reach)
    ]
    # The columns that a chunk reads: the last in a trunk before its neighbours ...
    starts = first + size * jnp.arange(chunks, dtype=jnp.int32) - reach
    trunk = last_trunk_tokens(path, starts, reach)
    # ... and its neighbours and itself.
    near = starts[:, None] + jnp.arange(reach + size, dtype=jnp.int32)
    near = jnp.broadcast_to(near, (rows, *near.shape))
    read = jnp.concatenate([trunk, near], -1)  # [B, chunks, reach + reach + size]
    tokens = padded[:, first:].reshape(rows, chunks, size, -1)
    neighbours = jnp.concatenate(
        [padded[:, None, first - reach : first], tokens[:, :-1, -reach:]], 1
    )
    far = take_tokens(padded, jnp.maximum(trunk, 0).reshape(rows, -1))
    values = jnp.concatenate([far.reshape(rows, chunks, reach, -1), neighbours, tokens], 2)

    def inputs(source: Array) -> Array:
        # Columns of no trunk are -1 as well, where a token without one before it reads nothing.
        one = (source[..., None] == read[:, :, None]) & (source >= 0)[..., None]
        out = jnp.einsum(
            "bnij,bnjc->bnic", one.astype(values.dtype), values, precision=jax.lax.Precision.HIGHEST
        )
        return out.reshape(rows, length + extra, -1)[:, :length]

    return [inputs(source) for source in reversed(sources)]


def last_inputs(
    previous: Float[Array, "b p c"], x: Float[Array, "b t c"], count: Int[Array, " b"]
) -> Float[Array, "b p c"]:
    """Select the inputs of a convolution that the token behind the first `count` of each row needs."""
    padded = jnp.concatenate([previous.astype(x.dtype), x], 1)
    index = count[:, None] + jnp.arange(previous.shape[1])
    return jnp.take_along_axis(padded, index[..., None], axis=1)
