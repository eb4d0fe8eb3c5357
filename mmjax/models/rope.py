"""Rotary position embeddings (RoPE, Su et al. 2021): frequencies under every scaling, and the rotation itself."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.config import (
    DecoderConfig,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeScaling,
    YarnRope,
)

MAX_TIMESCALE = 10_000.0  # of sinusoids


class Rotation(NamedTuple):
    """Cosines and sines by which rotary positions turn queries and keys. Both float32 [B, T, P], of P channel pairs."""

    cos: Array
    sin: Array
    growth: Array | None = None  # float32 [B, T], by which queries are multiplied too

    def grown(self, q: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
        """Multiply queries by their growth, where there is one."""
        return q if self.growth is None else q * self.growth[:, :, None, None].astype(q.dtype)


def sinusoids(time: Int[Array, "r l"], width: int) -> Float[Array, "r l d"]:
    """Compute Whisper's position embedding: sines, then cosines, of `width / 2` timescales from 1 to 10000."""
    pairs = width // 2
    # Over pairs - 1 as in Whisper, so that the last timescale is MAX_TIMESCALE itself.
    scales = jnp.exp(
        -jnp.log(MAX_TIMESCALE) / max(pairs - 1, 1) * jnp.arange(pairs, dtype=jnp.float32)
    )
    angles = time.astype(jnp.float32)[..., None] * scales
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def rotation_1d(time: Int[Array, "b t"], width: int, theta: float) -> Rotation:
    """Compute rotary angles of times, by which the first `width` channels of a head turn."""
    angles = time.astype(jnp.float32)[..., None] * _unscaled(theta, width // 2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotation_2d(
    coordinates: Int[Array, "b t 2"],
    head_width: int,
    theta: float,
    alternating: bool = False,
    turns: bool = False,
) -> Rotation:
    """Compute rotary angles of (y, x): the first half of the channel pairs turns with y, the other half with x.

    Pair i of an axis turns by coordinate * theta^(-i / pairs), `pairs` being those of that axis.
    alternating: the axes share the frequencies of the whole head, y has the even ones and x the odd
    ones (Pixtral). turns: pairs 2i and 2i + 1 turn with x and y, by the frequency of pair i of an
    axis (MoonViT). Raises ValueError for a head that does not split into pairs.
    """
    if head_width % (2 if alternating else 4):
        raise ValueError(
            f"a head of {head_width} channels does not split into pairs for 2 coordinate(s)"
        )
    if alternating:
        frequencies = _unscaled(theta, head_width // 2)
        y, x = jnp.split(coordinates.astype(jnp.float32), 2, axis=-1)
        angles = jnp.concatenate([y * frequencies[0::2], x * frequencies[1::2]], axis=-1)
        return Rotation(jnp.cos(angles), jnp.sin(angles))
    # Of a head of 8 channels, pairs 0 and 1 turn with y, 2 and 3 with x: [B, T, 2] coordinates
    # times [2] frequencies are [B, T, 2, 2], joined to [B, T, 4].
    pairs = head_width // 4
    frequencies = theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = coordinates.astype(jnp.float32)[..., None] * frequencies
    if turns:
        angles = jnp.swapaxes(angles[..., ::-1, :], -1, -2)
    angles = angles.reshape(*coordinates.shape[:-1], head_width // 2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def text_rotation(
    config: DecoderConfig, position: Int[Array, "b t *n"], sample: Int[Array, "b t"]
) -> Rotation:
    """Compute rotary angles of a decoder's tokens; `position` is `[B, T]`, or `[B, T, 3]` with `rope_sections`.

    sample: which of the row's samples, for the scalings that depend on a sample's length.
    """
    pair_position = position.astype(jnp.float32)
    if config.rope_sections:
        # [B, T, 3] becomes [B, T, pairs]: each channel pair takes the coordinate of its own axis.
        pair_position = pair_position[
            ..., axis_of_pair(config.rope_sections, config.rope_interleaved)
        ]
    else:
        pair_position = pair_position[..., None]
    scaling = config.rope_scaling
    # Of (t, y, x) positions, the largest says how far a token is into its sample.
    longest = position.max(-1) if position.ndim == 3 else position
    if isinstance(scaling, DynamicRope | LongRope):
        frequencies = _frequencies_by_length(config, 1 + max_in_item(longest, sample)[..., None])
    else:
        frequencies = jnp.asarray(frequencies_of(scaling, config.rope_theta, config.rotary_pairs))
    # HF's `attention_scaling`: it multiplies cosines and sines, so scores get its square.
    scale = scaling.attention if isinstance(scaling, YarnRope | LongRope) else 1.0
    # Of one position `[B, T, 1]` and frequencies `[pairs]`, or of pairs each with its own position.
    angles = pair_position * frequencies
    growth = None
    if config.query_growth:
        reached = longest + (config.growing == "unrotated")
        growth = 1 + config.query_growth * jnp.log1p(
            (reached // config.query_span).astype(jnp.float32)
        )
    return Rotation(jnp.cos(angles) * scale, jnp.sin(angles) * scale, growth)


def axis_of_pair(sections: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """Assign each channel pair the axis of (t, y, x) = (0, 1, 2) that turns it, int `[pairs]`.

    Sections (3, 2, 2) give 0 0 0 1 1 2 2 (Qwen2-VL), and interleaved 0 1 2 0 1 2 0 (Qwen3-VL).
    """
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    axes = np.zeros(sum(sections), int)
    for axis in range(1, len(sections)):
        # Every third pair, as many as the section has; the others stay with axis 0, time.
        axes[axis : len(sections) * sections[axis] : len(sections)] = axis
    return axes


def frequencies_of(scaling: RopeScaling, theta: float, pairs: int) -> np.ndarray:
    """Compute radians per position of every channel pair, float32 `[pairs]`, for scalings that ignore length."""
    unscaled = _unscaled(theta, pairs)
    match scaling:
        case LinearRope(factor=factor):
            return unscaled / np.float32(factor)
        case Llama3Rope():
            # Pairs that turn often over the pretraining length stay, those that turn seldom are
            # divided by the factor.
            rotations = scaling.positions * unscaled / (2 * np.pi)
            smooth = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0, 1)
            return ((1 - smooth) * unscaled / scaling.factor + smooth * unscaled).astype(np.float32)
        case YarnRope():
            return _yarn(unscaled, scaling, theta)
        case ProportionalRope(share=share, factor=factor):
            turned = np.arange(pairs) < int(share * pairs)
            return np.where(turned, unscaled / np.float32(factor), np.float32(0))
    return unscaled


def _unscaled(theta: float, pairs: int) -> np.ndarray:
    return (
        1.0 / np.float32(theta) ** (np.arange(pairs, dtype=np.float32) / np.float32(pairs))
    ).astype(np.float32)


def _yarn(unscaled: np.ndarray, scaling: YarnRope, theta: float) -> np.ndarray:
    """Interpolate slow pairs and keep fast ones, with a linear ramp between (YaRN, Peng et al. 2023)."""

    def pair_of(rotations: float) -> float:
        """Find the (fractional) pair that turns this many times over the pretraining length."""
        # Pair i turns positions * theta^(-i / pairs) / (2 pi) times, solved for i.
        return (
            len(unscaled)
            * math.log(scaling.positions / (rotations * 2 * math.pi))
            / math.log(theta)
        )

    low = pair_of(scaling.fast)
    high = pair_of(scaling.slow)
    if scaling.whole:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    # Bound as in HF, which has the head's width there and not its pairs.
    high = min(high, 2 * len(unscaled) - 1)
    ramp = np.clip((np.arange(len(unscaled)) - low) / (high - low or 0.001), 0, 1)
    return (unscaled / scaling.factor * ramp + unscaled * (1 - ramp)).astype(np.float32)


def max_in_item(x: Int[Array, "b t *n"], item: Int[Array, "b t"]) -> Int[Array, "b t *n"]:
    """Find, for every position, the maximum of `x` (not negative) over its item or sample; -1 = padding."""

    def row_max(x: Array, item: Array) -> Array:
        slot = jnp.maximum(item, 0)
        # padding would count as item 0
        masked = jnp.where((item >= 0).reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
        return jax.ops.segment_max(masked, slot, len(item))[slot]

    return jax.vmap(row_max)(x, item)


def _frequencies_by_length(
    config: DecoderConfig, length: Int[Array, "b t 1"]
) -> Float[Array, "b t p"]:
    """Compute radians per position of every channel pair, for tokens of samples of these lengths."""
    scaling = config.rope_scaling
    pairs = config.rotary_pairs
    if isinstance(scaling, LongRope):
        unscaled = _unscaled(config.rope_theta, pairs)
        short, long = (
            jnp.asarray(unscaled / np.array(f, np.float32)) for f in (scaling.short, scaling.long)
        )
        return jnp.where(length > scaling.positions, long, short)
    # Dynamic NTK: the base grows with the length, so that the slowest pair is interpolated and the
    # fastest is not.
    growth = jnp.maximum(length / scaling.positions, 1.0) * scaling.factor - (scaling.factor - 1)
    theta = config.rope_theta * growth ** (pairs / (pairs - 1))
    return theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)


def rotate(
    x: Float[Array, "b t n h"],
    rotation: Rotation,
    neighbours: bool = False,
    halves: bool = False,
) -> Float[Array, "b t n h"]:
    """Turn channel pairs (i, i + P) of every head, of its first 2 P channels; float32 inside.

    neighbours: turn pairs (2 i, 2 i + 1), as in the paper and in GLM. halves: turn pairs inside each
    half of a head, the first pairs in its first half (Gemma 4's tower).
    """
    if halves:
        return _swap_quarters(rotate(_swap_quarters(x), rotation))
    # Of 8 channels that all turn (P = 4), pair 1 is channels 1 and 5, with `neighbours` 2 and 3.
    pairs = rotation.cos.shape[-1]
    # HF's layout, halves of a head.
    first, second, rest = jnp.split(x.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
    if neighbours:
        both = jnp.concatenate([first, second], axis=-1)
        first, second = both[..., 0::2], both[..., 1::2]
    cos = rotation.cos[:, :, None]
    sin = rotation.sin[:, :, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if neighbours:
        both = jnp.stack(turned, axis=-1)
        turned = [both.reshape(*both.shape[:-2], 2 * pairs)]
    return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


def _swap_quarters(x: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
    """Swap the second and the third quarter of every head: pairs inside its halves become pairs of its halves."""
    # Of 8 channels the pairs (0, 2), (1, 3), (4, 6), (5, 7) come to (0, 4), (1, 5), (2, 6), (3, 7).
    first, second, third, last = jnp.split(x, 4, axis=-1)
    return jnp.concatenate([first, third, second, last], axis=-1)
