"""Optimizer moments in two bytes or one: bfloat16 or int8, rounded up or down at random so that none is biased.

A moment changes by a small part per update. Rounding to nearest loses every change below half a
step of the format; rounding up with the probability of the remainder keeps it on average. The
random bits are a function of the number of the update, the parameter and the element: every mesh
and every division of layers into stacks draws the same ones, and a resumed run continues bit for
bit.

int8 follows 8-bit Adam (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"):
codes relative to the largest value of a block, dense near zero. A block is a row, the last axis,
whatever its length: sharding a row costs one small all-reduce, and a checkpoint has the same blocks
on every mesh. Codes are square roots of the mean, and fourth roots of the mean of squares, whose
root divides the mean. The latter's smallest code is 1: without a zero no mean is divided by eps
alone (Li et al. 2023, "Memory Efficient Optimizers with 4-bit States").
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt32

from mmjax.config.training import Moments
from mmjax.models.layer_stacks import Params, key_names, split_layers


class CodeFormat(NamedTuple):
    """Represent a value as `scale * (code / largest) ** power`, with the sign of the code."""

    dtype: Any
    power: int
    smallest: int  # code
    largest: int


# By the names that optax gives moments: means of gradients and of directions, and the mean of
# squares.
MEAN = CodeFormat(jnp.int8, power=2, smallest=0, largest=127)
FORMATS = {"mu": MEAN, "ema": MEAN, "nu": CodeFormat(jnp.uint8, power=4, smallest=1, largest=255)}


class Int8Moment(NamedTuple):
    """Store codes like the parameters, and the largest absolute value of every row."""

    codes: Params
    scales: Params  # float32 [..., 1]; `optax.MaskedNode` where the moment is stored in float32


def store_moments(
    inner: optax.GradientTransformation, dtype: Moments, matrices: Set[tuple[str, ...]]
) -> optax.GradientTransformation:
    """Store the moments of `matrices` in `dtype` between updates, which compute in float32; vectors stay float32.

    The state of `inner` has a `count` of updates and moments of the names in `FORMATS`.
    """
    if dtype == "float32":
        return inner

    def encode(state: Any) -> Any:
        count = state.count.astype(jnp.uint32)
        return state._replace(
            **{name: encode_moment(name, x, count) for name, x in _moments(state)}
        )

    def encode_moment(name: str, moment: Params, count: Array) -> Params | Int8Moment:
        form = FORMATS[name]

        def code(key_path: Any, x: Array, scale: Array | None = None) -> Array:
            path = key_names(key_path)
            if path not in matrices:
                return x
            # One draw of 32 bits is enough for both moments of Adam, 16 for each.
            bits = random_bits(path, x.shape, count)
            half = bits >> 16 if name == "nu" else bits & 0xFFFF
            return (
                round_to_bfloat16(x, half) if scale is None else encode_rows(x, scale, half, form)
            )

        if dtype == "bfloat16":
            return jax.tree_util.tree_map_with_path(code, moment)
        scales = jax.tree_util.tree_map_with_path(
            lambda path, x: row_scales(x) if key_names(path) in matrices else optax.MaskedNode(),
            moment,
        )
        return Int8Moment(jax.tree_util.tree_map_with_path(code, moment, scales), scales)

    def decode(state: Any) -> Any:
        return state._replace(
            **{name: _decode_moment(x, FORMATS[name]) for name, x in _moments(state)}
        )

    def empty(name: str, moment: Params) -> Params | Int8Moment:
        """Return stored zeros directly: XLA would take minutes to compile encoding them for 7B parameters."""
        form = CodeFormat(jnp.bfloat16, 1, 0, 0) if dtype == "bfloat16" else FORMATS[name]

        def code(path: Any, x: Array) -> Array:
            return (
                jnp.full(x.shape, form.smallest, form.dtype) if key_names(path) in matrices else x
            )

        def scale(path: Any, x: Array) -> Any:
            return (
                jnp.zeros((*x.shape[:-1], 1), x.dtype)
                if key_names(path) in matrices
                else optax.MaskedNode()
            )

        codes, scales = (
            jax.tree_util.tree_map_with_path(function, moment) for function in (code, scale)
        )
        return codes if dtype == "bfloat16" else Int8Moment(codes, scales)

    def init(params: Params) -> Any:
        state = inner.init(params)
        return state._replace(**{name: empty(name, x) for name, x in _moments(state)})

    def update(gradients: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        directions, state = inner.update(gradients, decode(state), params)
        return directions, encode(state)

    return optax.GradientTransformation(init, update)


def _moments(state: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(state, name)) for name in state._fields if name in FORMATS)


def _decode_moment(moment: Params | Int8Moment, form: CodeFormat) -> Params:
    if not isinstance(moment, Int8Moment):
        return jax.tree.map(lambda x: x.astype(jnp.float32), moment)
    return jax.tree.map(
        lambda x, scale: x if isinstance(scale, optax.MaskedNode) else decode_rows(x, scale, form),
        *moment,
    )


def round_to_bfloat16(x: Float[Array, "*b"], bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Round float32 to one of its two neighbours in bfloat16, away from zero where its lower bits and `bits` carry.

    bits: 16 random ones per element.
    """
    # bfloat16 is the upper half of a float32. A lower half of 0x4000, a quarter of a step, carries
    # with 16 random bits of 0xC000 and more: in a quarter of all draws.
    rounded = (jax.lax.bitcast_convert_type(x, jnp.uint32) + bits) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def row_scales(x: Float[Array, "*b n"]) -> Float[Array, "*b 1"]:
    """Return the largest absolute value of every row."""
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def encode_rows(
    x: Float[Array, "*b n"],
    scale: Float[Array, "*b 1"],
    bits: UInt32[Array, "*b n"],
    form: CodeFormat,
) -> Int[Array, "*b n"]:
    """Round every value to one of its two neighbours in `form`. bits: 16 random ones per element."""
    # Divisions only for each row: a GPU takes as long for one as for ten products.
    inverse = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, 1 / scale, 0.0)
    size = jnp.abs(x) * inverse * np.float32(form.largest**form.power)
    # `size` is code ** power: of power 2, with the row's largest value at 127^2 = 16,129, a value
    # of 1/100 of it has size 161.29. Its neighbours are the codes 12 (144) and 13 (169), and it
    # becomes 13 with the probability (161.29 - 144) / (169 - 144) = .69.
    lower = jnp.floor(_power(jnp.sqrt, size, form))
    low = _power(jnp.square, lower, form)
    high = _power(jnp.square, lower + 1, form)
    # The probability with which the expected value is x.
    up = (bits.astype(jnp.float32) + 0.5) * 2.0**-16 * (high - low) < size - low
    code = jnp.clip(lower + up, form.smallest, form.largest)
    return (jnp.sign(x) * code if jnp.issubdtype(form.dtype, jnp.signedinteger) else code).astype(
        form.dtype
    )


def _power(function: Callable[[Array], Array], x: Array, form: CodeFormat) -> Array:
    """Apply a square or a square root as often as the power of the codes says, which is 2 or 4."""
    for _ in range(form.power.bit_length() - 1):
        x = function(x)
    return x


def decode_rows(
    codes: Int[Array, "*b n"], scale: Float[Array, "*b 1"], form: CodeFormat
) -> Float[Array, "*b n"]:
    """Return the float32 values of codes."""
    code = codes.astype(jnp.float32)
    # The largest code is 1 to the bit.
    size = _power(jnp.square, jnp.abs(code) * np.float32(1 / form.largest), form)
    return scale * jnp.sign(code) * size


def random_bits(path: tuple[str, ...], shape: tuple[int, ...], count: Array) -> UInt32[Array, "*b"]:
    """Draw 32 bits for every element of a parameter, by a hash of update, parameter, layer and index in the layer.

    A few integer operations per element, which XLA fuses into the update.
    """
    name, layers = split_layers(path)
    seed = _mix(count ^ jnp.uint32(zlib.crc32(".".join(name).encode())))
    index = jnp.zeros(shape, jnp.uint32)
    stacked = len(layers) > 1
    for axis in range(stacked, len(shape)):
        index = index * jnp.uint32(shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    layer = jnp.uint32(layers.start)
    if stacked:
        layer += jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    return _mix(index ^ _mix(seed ^ layer))


def _mix(x: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Hash 32 bits, each of which changes every other with about even odds (Wellons' `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
