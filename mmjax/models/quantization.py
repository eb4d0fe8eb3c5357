"""Frozen matrices stored in 4 or 8 bits, and computed with in the precision of the activations.

`nf4` is QLoRA's (Dettmers et al. 2023, arXiv:2305.14314, section 3), without double quantisation:
along the inputs, each block of 64 weights of one output is divided by its largest magnitude and
rounded to the nearest of 16 quantiles of the normal distribution. `int8` is that of the weights in
LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339): 127 steps up to the largest magnitude of each
output. Activations are not quantised, so there are no outliers to set apart. `fp8` is e4m3 with a
power of two as the scale of a matrix: what products in FP8 would round it to in every step
(`models.float8`), so there it changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.model import NF4_BLOCK
from mmjax.config.towers import Quantization
from mmjax.models.float8 import FORWARD, to_float8
from mmjax.parallel.sharding import Axes

# The values of NF4's codes 0 to 15 (appendix E).
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
NF4_BOUNDS = (NF4[:-1] + NF4[1:]) / 2  # between the weights of one code and of the next
INT8_STEPS = 127
PARTS = ("codes", "scales")  # last keys of the paths of a quantised matrix's parameters


class Quantized(NamedTuple):
    """A matrix `[in, out]`, or a stack, as codes and scales: the largest magnitudes of their blocks or outputs.

    nf4: uint8 `[in / 64, 32, out]`, two codes a byte, inputs 2i and 2i + 1 of a block in the upper
    and the lower half of byte i, and float32 `[in / 64, out]`. A shard of either holds whole
    blocks. int8: int8 `[in, out]`, and float32 `[out]`. fp8: float8_e4m3fn `[in, out]`, and float32
    `[]`.
    """

    codes: Int[Array, ...]
    scales: Float[Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix."""
        if self.codes.dtype != jnp.uint8:
            return self.codes.shape
        *stack, blocks, _, outputs = self.codes.shape
        return (*stack, blocks * NF4_BLOCK, outputs)


@partial(jax.jit, static_argnames="how")
def quantize(matrix: Float[Array, "*stack i o"], how: Quantization) -> Quantized:
    """Quantise matrices."""
    matrix = matrix.astype(jnp.float32)
    if how == "int8":
        scales = jnp.abs(matrix).max(-2)
        steps = matrix * (INT8_STEPS / jnp.where(scales > 0, scales, 1))[..., None, :]
        return Quantized(jnp.round(steps).astype(jnp.int8), scales)
    if how == "fp8":
        to_codes = partial(to_float8, dtype=FORWARD)
        for _ in matrix.shape[:-2]:
            to_codes = jax.vmap(to_codes)
        return Quantized(*to_codes(matrix))
    # [in, out] -> [in / 64, 32, 2, out]: inputs 2i and 2i + 1 of a block share byte i. A weight's
    # code is the number of bounds below it: -0.8 of a block's largest has one below, so code 1,
    # -0.696.
    *stack, inputs, outputs = matrix.shape
    blocks = matrix.reshape(*stack, inputs // NF4_BLOCK, NF4_BLOCK // 2, 2, outputs)
    scales = jnp.abs(blocks).max((-3, -2))
    parts = blocks / jnp.where(scales > 0, scales, 1)[..., None, None, :]
    codes = sum((parts > bound).astype(jnp.uint8) for bound in NF4_BOUNDS)
    return Quantized(codes[..., 0, :] << 4 | codes[..., 1, :], scales)


def dequantize(matrix: Array | Quantized, dtype: Any) -> Float[Array, "*stack i o"]:
    """Return quantised matrices in this precision, and others as they are."""
    if not isinstance(matrix, Quantized):
        return matrix
    codes, scales = matrix
    if codes.dtype == jnp.int8:
        return (codes.astype(jnp.float32) * scales[..., None, :] * (1 / INT8_STEPS)).astype(dtype)
    if codes.dtype == FORWARD:
        return (codes.astype(jnp.float32) * scales[..., None, None]).astype(dtype)
    # Byte 0xA3 is codes 10 and 3: [in / 64, 32, out] -> [in / 64, 32, 2, out] -> [in, out].
    halves = codes[..., None, :] >> np.array([[4], [0]], np.uint8) & 15
    values = jnp.asarray(NF4).at[halves].get(mode="promise_in_bounds")
    return (values * scales[..., None, None, :]).astype(dtype).reshape(matrix.shape)


class QuantizedMatrix(nnx.Module):
    """The weight of a linear layer, quantised; indexed like a parameter."""

    def __init__(self, matrix: Float[Array, "*stack i o"], axes: Axes, how: Quantization):
        codes, scales = quantize(matrix, how)
        inputs, outputs = axes
        self.codes = nnx.Param(codes, axes=(inputs, None, outputs) if how == "nf4" else axes)
        axes_of_scales = {"int8": (outputs,), "fp8": (), "nf4": axes}
        self.scales = nnx.Param(scales, axes=axes_of_scales[how])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix."""
        return self[...].shape

    def __getitem__(self, index: Any) -> Quantized:
        return Quantized(self.codes[index], self.scales[index])


def parameter_shapes(params: Any) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shapes of nested dicts of parameters by path, of a quantised matrix that of the whole."""
    leaves = {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(params)}
    shapes = {}
    for path, x in leaves.items():
        if not is_quantized(path):
            shapes[path] = x.shape
        elif path[-1] == "codes":
            shapes[path[:-1]] = Quantized(x, leaves[(*path[:-1], "scales")]).shape
    return shapes


def is_quantized(path: tuple[str, ...]) -> bool:
    """Return whether this is the path of a part of a quantised matrix."""
    return path[-1] in PARTS


def cast_frozen(params: Any, dtype: Any) -> Any:
    """Cast nested dicts of frozen parameters to the precision of the computation, but for quantised matrices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p if is_quantized((path[-1].key,)) else p.astype(dtype), params
    )
