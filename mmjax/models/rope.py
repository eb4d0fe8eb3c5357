"""Rotary positions: the frequencies of every scaling, and how queries and keys turn by them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.config import DecoderConfig, DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope


class Rotation(NamedTuple):
    """Cosines and sines by which rotary positions turn queries and keys. Both float32 [B, T, H/2]."""

    cos: Array
    sin: Array


def rotation_1d(position: Int[Array, "b t"], head_width: int, theta: float) -> Rotation:
    """Rotary angles of positions on a line: channel pair i turns by position * theta^(-2i / head_width)."""
    return _rotation(position[..., None], head_width, theta)


def rotation_2d(coordinates: Int[Array, "b t 2"], head_width: int, theta: float) -> Rotation:
    """Rotary angles of (y, x): the first half of the channel pairs turns with y, the other half with x."""
    return _rotation(coordinates, head_width, theta)


def _rotation(coordinates: Int[Array, "b t n"], head_width: int, theta: float) -> Rotation:
    dimensions = coordinates.shape[-1]
    if head_width % (2 * dimensions):
        raise ValueError(f"a head of {head_width} channels does not split into pairs for {dimensions} coordinate(s)")
    pairs = head_width // (2 * dimensions)
    frequencies = theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = coordinates.astype(jnp.float32)[..., None] * frequencies
    angles = angles.reshape(*coordinates.shape[:-1], head_width // 2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def text_rotation(config: DecoderConfig, position: Int[Array, "b t *n"], sample: Int[Array, "b t"]) -> Rotation:
    """Rotary angles of a decoder's tokens. `position` is `[B, T]`, or `[B, T, 3]` where the config has sections.

    sample: which of the row's samples; the scalings that depend on a sample's length ask for it.
    """
    along = position.astype(jnp.float32)
    if config.rope_sections:
        along = along[..., axis_of_pair(config.rope_sections, config.rope_interleaved)]
    else:
        along = along[..., None]
    scaling, pairs = config.rope_scaling, config.head_width // 2
    if isinstance(scaling, DynamicRope | LongRope):
        longest = position.max(-1) if position.ndim == 3 else position
        frequencies = _by_length(config, _sample_length(longest, sample)[..., None])
    else:
        frequencies = jnp.asarray(frequencies_of(scaling, config.rope_theta, pairs))
    scale = scaling.attention if isinstance(scaling, YarnRope | LongRope) else 1.0
    angles = along * frequencies
    return Rotation(jnp.cos(angles) * scale, jnp.sin(angles) * scale)


def axis_of_pair(sections: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """Which of (t, y, x) turns each channel pair, int `[pairs]`.

    Sections one after the other (Qwen2-VL), or taking turns as far as those of y and x reach (Qwen3-VL).
    """
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    axes = np.zeros(sum(sections), int)
    for axis in range(1, len(sections)):
        axes[axis : len(sections) * sections[axis] : len(sections)] = axis
    return axes


def frequencies_of(scaling: RopeScaling, theta: float, pairs: int) -> np.ndarray:
    """Radians per position of every channel pair, float32 `[pairs]`, by a scaling that no length changes."""
    plain = _plain(theta, pairs)
    match scaling:
        case LinearRope(factor=factor):
            return plain / np.float32(factor)
        case Llama3Rope():
            return _llama3(plain, scaling)
        case YarnRope():
            return _yarn(plain, scaling, theta)
    return plain


def _plain(theta: float, pairs: int) -> np.ndarray:
    return (1.0 / np.float32(theta) ** (np.arange(pairs, dtype=np.float32) / np.float32(pairs))).astype(np.float32)


def _llama3(plain: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    waves = scaling.positions * plain / (2 * np.pi)  # over the positions of the training before
    smooth = np.clip((waves - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return ((1 - smooth) * plain / scaling.factor + smooth * plain).astype(np.float32)


def _yarn(plain: np.ndarray, scaling: YarnRope, theta: float) -> np.ndarray:
    def channel(rotations: float) -> float:
        """The pair that turns so often over `positions`."""
        return len(plain) * math.log(scaling.positions / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = channel(scaling.fast), channel(scaling.slow)
    if scaling.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low or 0.001), 0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _sample_length(position: Int[Array, "b t"], sample: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """For every token, positions of its sample."""

    def of_row(position: Array, sample: Array) -> Array:
        slot = jnp.maximum(sample, 0)
        return jax.ops.segment_max(position, slot, len(position))[slot] + 1

    return jax.vmap(of_row)(position, sample)


def _by_length(config: DecoderConfig, length: Int[Array, "b t 1"]) -> Float[Array, "b t p"]:
    """Radians per position of every channel pair, for tokens of samples of these lengths."""
    scaling, pairs = config.rope_scaling, config.head_width // 2
    if isinstance(scaling, LongRope):
        plain = _plain(config.rope_theta, pairs)
        short, long = (jnp.asarray(plain / np.array(f, np.float32)) for f in (scaling.short, scaling.long))
        return jnp.where(length > scaling.positions, long, short)
    grown = jnp.maximum(length / scaling.positions, 1.0) * scaling.factor - (scaling.factor - 1)
    theta = config.rope_theta * grown ** (pairs / (pairs - 1))
    return theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)


def rotate(x: Float[Array, "b t n h"], rotation: Rotation) -> Float[Array, "b t n h"]:
    """Turn channel pairs (i, i + H/2) of every head; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
