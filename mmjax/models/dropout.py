"""Drop activations and disturb embeddings at random, by a token's place in its sample, wherever the sample lies."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from mmjax.batch import TextBatch
from mmjax.models.sample_totals import sample_totals
from mmjax.parallel.sharding import constrain

Noise = UInt32[Array, "2"] | UInt32[np.ndarray, "2"]  # (seed, step), at run time

# The sites of a layer: the outputs of its attention and of its MLP, before they are added to the
# residual stream.
ATTENTION = 0
MLP_SITE = 1
SITES = 2

IMPL = "threefry2x32"  # named, since other generators give other bits under vmap


class Dropout(NamedTuple):
    """Random keys and rate of a layer's dropout."""

    key: Array  # of every position, PRNG keys [R, L]
    # of the outputs of attention and MLP; None: only adapters drop
    limit: Array | None  # uint32 []: values whose random word lies below are dropped
    scale: Array | None  # float32 []: 1 / (1 - rate), factor of the values that stay
    layer: Array  # int32 []: index in the tower, whatever the stacks and stages


_dropout: ContextVar[Dropout | None] = ContextVar("dropout", default=None)


@contextmanager
def dropping(dropout: Dropout | None) -> Iterator[None]:
    """Trace a layer whose adapters drop inputs with these keys; None: no adapter drops."""
    token = _dropout.set(dropout)
    try:
        yield
    finally:
        _dropout.reset(token)


def layer_dropout() -> Dropout | None:
    """Return the dropout of the layer that is being traced, for its adapters."""
    return _dropout.get()


def tower_dropout(
    noise: Noise, tower: str, rate: float, owner: Int[Array, "r l"], offset: Int[Array, "r l"]
) -> Dropout:
    """Set up dropout of a tower's first layer, with a key per position from its sample's id and index in the sample.

    For layer i, replace `layer`. A rate of 0 to 1 (exclusive), 0 where only adapters drop; padding,
    whose owner is -1, gets some key as well.
    """
    keys = constrain(position_keys(named_key(noise, tower), owner, offset), "rows", "sequence")
    return Dropout(keys, *(_limit_and_scale(rate) if rate else (None, None)), np.int32(0))


def _limit_and_scale(rate: float) -> tuple[np.uint32, np.float32]:
    # A random word is uniform in 0 .. 2^32 - 1, so the share `rate` of all words lies below the
    # limit.
    return np.uint32(rate * 2**32), np.float32(1 / (1 - rate))


def named_key(noise: Noise, name: str) -> Array:
    """Make a step's key for a tower or purpose of this name."""
    seed, step = noise
    key = jax.random.fold_in(jax.random.key(seed, impl=IMPL), step)
    # By its name, not its number: another encoder beside it changes nothing. The CRC, since
    # Python's own hash of a string differs from process to process.
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def position_keys(key: Array, owner: Int[Array, "r l"], offset: Int[Array, "r l"]) -> Array:
    """Make a key of every position from its sample's id and its index in the sample, PRNG keys `[R, L]`."""

    def position_key(owner: Array, offset: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, owner), offset)

    return jax.vmap(jax.vmap(position_key))(owner, offset)


def disturb(
    x: Float[Array, "r t d"], noise: Noise, alpha: float, text: TextBatch
) -> Float[Array, "r t d"]:
    """Add uniform noise of at most alpha / sqrt(tokens of the sample * d) to embedded tokens.

    NEFTune (Jain et al. 2023, "Noisy Embeddings Improve Instruction Finetuning").
    """
    tokens = sample_totals([jnp.ones(text.sample.shape, jnp.float32)], text)[0]
    keys = position_keys(named_key(noise, "llm.embed"), text.owner, text.offset)

    def uniform(key: Array) -> Array:
        return jax.random.uniform(key, x.shape[-1:], minval=-1.0, maxval=1.0)

    draws = jax.vmap(jax.vmap(uniform))(constrain(keys, "rows", "sequence"))
    size = alpha * jax.lax.rsqrt(tokens * x.shape[-1])
    return x + (size[..., None] * draws).astype(x.dtype)


def drop(x: Float[Array, "r l d"], dropout: Dropout | None, site: int) -> Float[Array, "r l d"]:
    """Drop values of `x` at one site of a layer and scale up the others, in its own dtype; None drops nothing."""
    if dropout is None or dropout.limit is None:
        return x
    # A number for every site of every layer: layer 3's MLP is 3 * 2 + 1 = 7.
    number = dropout.layer * SITES + site
    return _dropped(x, dropout.key, (number,), dropout.limit, dropout.scale)


def drop_inputs(
    x: Float[Array, "r l d"], key: Array, layer: Int[Array, ""], rate: float, name: str
) -> Float[Array, "r l d"]:
    """Drop inputs of an adapter, with the keys and the index of a layer's `Dropout`. name: of its linear layer."""
    return _dropped(x, key, (layer, np.uint32(zlib.crc32(name.encode()))), *_limit_and_scale(rate))


def _dropped(
    x: Float[Array, "r l d"],
    keys: Array,
    numbers: tuple[Any, ...],
    limit: Array | np.uint32,
    scale: Array | np.float32,
) -> Array:
    def words(key: Array) -> Array:
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.bits(key, x.shape[-1:])

    stays = jax.vmap(jax.vmap(words))(keys) >= limit
    # Rounded once, after the product: 1 / (1 - rate) itself rounded to bfloat16 would shift the
    # mean.
    scaled = (x.astype(jnp.float32) * scale).astype(x.dtype)
    return jnp.where(stays, scaled, 0)
