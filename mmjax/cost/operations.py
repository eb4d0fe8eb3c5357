"""List the operations of a traced program: products, and what is computed element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.models.float8 import FORWARD, GRADIENT

# JAX primitives as XLA's analysis counts them: one each for an addition, product, comparison or
# selection, none for exp or tanh.
# fmt: off
ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "abs", "sign", "square", "integer_pow", "add_any", "max",
    "min", "clamp", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor",
    "cumsum", "cummax",
}
# fmt: on
REDUCTIONS = {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_and",
    "argmax",
    "argmin",
}
FLOAT8 = {jnp.dtype(FORWARD), jnp.dtype(GRADIENT)}
ERFC_OPERATIONS = 50  # of the polynomials that XLA makes of it


# --------------------------------------------------------------------------------------------------
# programs


class Operations(NamedTuple):
    """Operations of one equation of a program."""

    count: int | float
    is_product: bool
    scope: str
    shape: tuple[int, ...]  # of the result
    sizes: frozenset[int] = frozenset()  # of the dimensions of operands
    of_pair: bool = False  # of one pair of positions in a pair of blocks
    in_float8: bool = False


def list_operations(program: Any, times: int = 1, scope: str = "") -> Iterator[Operations]:
    """List the products and elementwise operations of a program; operations in a scan count as often as they run."""
    for equation in program.eqns:
        name = equation.primitive.name
        inner = f"{scope}/{equation.source_info.name_stack}"
        if products := _product_operations(equation):
            sizes = frozenset(size for x in equation.invars for size in x.aval.shape)
            in_float8 = equation.invars[0].aval.dtype in FLOAT8
            yield Operations(
                times * products,
                True,
                inner,
                equation.outvars[0].aval.shape,
                sizes,
                in_float8=in_float8,
            )
        elif name in ELEMENTWISE or name == "erfc":
            result = equation.outvars[0].aval
            factor = ERFC_OPERATIONS if name == "erfc" else 1
            yield Operations(times * factor * result.size, False, inner, result.shape)
        elif name in REDUCTIONS:
            yield Operations(
                times * equation.invars[0].aval.size, False, inner, equation.outvars[0].aval.shape
            )
        elif name == "while":
            yield from _of_blocks(equation.params["body_jaxpr"].jaxpr, inner)
        elif name == "cond":
            # Which branch runs is data: the most expensive one counts.
            branches = [
                list(list_operations(branch.jaxpr, times, inner))
                for branch in equation.params["branches"]
            ]
            yield from max(branches, key=lambda operations: sum(x.count for x in operations))
        elif name != "pallas_call":
            # Of a call, as of jit, remat or custom_vjp, the body runs once.
            length = equation.params["length"] if name == "scan" else 1
            for inside in inner_programs(equation):
                yield from list_operations(inside, length * times, inner)


def _of_blocks(body: Any, scope: str) -> Iterator[Operations]:
    """List the operations of a loop over blocks of attention for each pair of positions in a pair of blocks.

    Its first product is of the scores `[..., queries, keys]`. Other loops of unknown length are
    left out.
    """
    operations = list(list_operations(body, 1, scope))
    # A visit of 128 queries and 128 keys makes scores [..., 128, 128], so its operations are
    # divided by 16,384; how many pairs are visited is a matter of the mask, and multiplied in
    # later.
    if scores := next((x for x in operations if x.is_product), None):
        pairs = math.prod(scores.shape[-2:])
        yield from (x._replace(count=x.count / pairs, of_pair=True) for x in operations)


def _product_operations(equation: Any) -> int:
    """Count the operations of a matrix product or convolution, of which a multiply-add is two; 0 for anything else."""
    name = equation.primitive.name
    operands = [x.aval for x in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return (
            2
            * equation.outvars[0].aval.size
            * math.prod(operands[0].shape[axis] for axis in contracted)
        )
    if name == "ragged_dot_general":
        # Every row [k] meets the matrix of its own group alone, [k, n] of [groups, k, n]: the size
        # of the rows [m, k] times n, whatever the groups are.
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, contracted), _ = numbers.dot_dimension_numbers
        once = {*contracted, *numbers.rhs_group_dimensions}
        return (
            2
            * operands[0].size
            * math.prod(n for axis, n in enumerate(operands[1].shape) if axis not in once)
        )
    if name == "conv_general_dilated":
        return _convolution_operations(
            equation.params, *(x.shape for x in (*operands, equation.outvars[0].aval))
        )
    return 0


def _convolution_operations(params: Mapping[str, Any], image: Any, kernel: Any, result: Any) -> int:
    """Count the operations of a convolution, without products with zeros of padding or dilation."""
    # Count, axis by axis, the (output, tap) pairs that read a pixel. With 4 pixels, a kernel of 3
    # and a padding of 1, the 4 outputs read the places
    #     -1 0 1,  0 1 2,  1 2 3,  2 3 4
    # of which 10 lie inside; on a square image 10 * 10 pairs of the 12 * 12 do.
    numbers = params["dimension_numbers"]
    taps = 1
    for axis, (padding, _) in enumerate(params["padding"]):
        size, width, outputs = (
            shape[spec[2 + axis]]
            for shape, spec in (
                (image, numbers.lhs_spec),
                (kernel, numbers.rhs_spec),
                (result, numbers.out_spec),
            )
        )
        starts = np.arange(outputs)[:, None] * params["window_strides"][axis] - padding
        place = starts + np.arange(width) * params["rhs_dilation"][axis]
        # A gradient's image is spread out, its pixels `dilation` apart with zeros between.
        dilation = params["lhs_dilation"][axis]
        inside = (place >= 0) & (place <= (size - 1) * dilation)
        taps *= int((inside & (place % dilation == 0)).sum())
    inputs = kernel[numbers.rhs_spec[1]]
    return 2 * taps * inputs * math.prod(result[axis] for axis in numbers.out_spec[:2])


def inner_programs(equation: Any) -> Iterator[Any]:
    """Iterate over the programs that an equation calls: of loops, branches and remat."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner
