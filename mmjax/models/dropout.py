"""Dropout that does not depend on where a sample runs (docs/exactness.md).

Whether a value is dropped is a function of (seed, step, tower, sample, offset in it, layer, site, channel) and of
nothing else, so every balance mode, packing, mesh and number of microbatches trains the same. The random bits are JAX's
own: each position gets a threefry key, made where the position lies, from the ids that travel with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from mmjax.parallel.sharding import constrain

Noise = UInt32[Array, "2"] | UInt32[np.ndarray, "2"]  # (seed, step), at run time

# The sites of a layer: what its attention and its MLP add to the residual stream.
ATTENTION, MLP_SITE = SITES = 0, 1

IMPL = "threefry2x32"  # named, since other generators give other bits under vmap


class Dropout(NamedTuple):
    """What a layer drops."""

    key: Array  # of every position, PRNG keys [R, L]
    limit: Array  # uint32 []: values whose random word lies below are dropped
    scale: Array  # float32 []: of the values that stay, 1 / (1 - rate)
    layer: Array  # int32 []: its number in the whole tower, whatever the runs and stages


def tower_dropout(
    noise: Noise, tower: str, rate: float, owner: Int[Array, "r l"], offset: Int[Array, "r l"]
) -> Dropout:
    """Dropout in a tower's first layer, with a key for each position from its sample's id and its index in the sample.

    For layer i, replace `layer`. A rate of 0 to 1 (exclusive); padding, whose owner is -1, gets some key as well.
    """
    seed, step = noise
    key = jax.random.fold_in(jax.random.key(seed, impl=IMPL), step)
    # By its name, not its number: another encoder beside it changes nothing.
    key = jax.random.fold_in(key, np.uint32(zlib.crc32(tower.encode())))

    def of_position(owner: Array, offset: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, owner), offset)

    keys = constrain(_everywhere(of_position)(owner, offset), "rows", "length")
    return Dropout(keys, np.uint32(rate * 2**32), np.float32(1 / (1 - rate)), np.int32(0))


def drop(x: Float[Array, "r l d"], dropout: Dropout | None, site: int) -> Float[Array, "r l d"]:
    """`x` with values dropped at one site of a layer and the others scaled up, in its own dtype; None drops nothing."""
    if dropout is None:
        return x

    place = dropout.layer * len(SITES) + site

    def words(key: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, place), x.shape[-1:])

    stays = _everywhere(words)(dropout.key) >= dropout.limit
    # Rounded once, after the product: 1 / (1 - rate) itself rounded to bfloat16 would shift the mean.
    scaled = (x.astype(jnp.float32) * dropout.scale).astype(x.dtype)
    return jnp.where(stays, scaled, 0)


def _everywhere(function: Callable[..., Array]) -> Callable[..., Array]:
    """Map over rows and positions."""
    return jax.vmap(jax.vmap(function))
