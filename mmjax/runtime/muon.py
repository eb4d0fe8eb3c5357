"""Muon's directions on a mesh: every device orthogonalizes whole layers, so no matrix is gathered on all of them.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one. Its
products need the whole matrix, which lies in shards. One all-to-all per mesh axis turns shards of
every layer into some whole layers per device, and another one turns the result back: each device
sends and receives its shard twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from mmjax.models.layer_stacks import Params, key_names
from mmjax.parallel.sharding import Axes, active, sharding, spec_axes

ITERATIONS = 5
# a x + b (x x') x + c (x x')^2 x moves singular values into about 0.7 to 1.2, the smallest ones
# fastest.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def scale_by_muon(
    momentum: float, axes: Mapping[tuple[str, ...], Axes], dtype: Any
) -> optax.GradientTransformation:
    """Replace gradients by orthogonal directions of their Nesterov momentum. All parameters are matrices or stacks.

    axes: the logical axes of parameters, for their shards on the active mesh. dtype: of the matrix
    products.
    """

    def dimensions(params: Params) -> Params:
        return jax.tree.map(
            lambda p: optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params
        )

    # Without iterations, Optax's directions are the momentum of norm 1.
    normalized = optax.contrib.scale_by_muon(
        beta=momentum, ns_steps=0, weight_dimension_numbers=dimensions
    )

    def update(gradients: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        directions, state = normalized.update(gradients, state, params)

        def direction(key_path: Any, x: Array) -> Array:
            layers = x.astype(dtype).reshape(-1, *x.shape[-2:])
            # Experts are matrices like layers, and what lies on one axis with these is not divided
            # by theirs.
            orthogonal = (
                orthogonalize(layers, axes[key_names(key_path)][-2:])
                .reshape(x.shape)
                .astype(x.dtype)
            )
            # One learning rate suits matrices of every shape.
            return orthogonal * math.sqrt(max(1.0, x.shape[-1] / x.shape[-2]))

        return jax.tree_util.tree_map_with_path(direction, directions), state

    return optax.GradientTransformation(normalized.init, update)


def orthogonalize(layers: Float[Array, "l i o"], axes: Axes) -> Float[Array, "l i o"]:
    """Orthogonalize matrices of norm 1, one after the other, on the active mesh each on one device of its shards.

    axes: the two logical axes of a matrix.
    """
    current = active()
    if current is None:
        return jax.lax.map(newton_schulz, layers)
    mesh = current.mesh
    spec = sharding(mesh, current.rules, layers.shape, axes).spec
    # Mesh axis and dimension of every cut. Of two axes on one dimension the last is the inner one,
    # gathered first.
    cuts = [
        (axis, dim)
        for dim, names in enumerate(spec_axes(spec))
        for axis in reversed(names)
        if mesh.shape[axis] > 1
    ]

    # 8 layers [i, o] with i cut by 2 devices and o by 4, on each device:
    #   shards                 [8, i / 2, o / 4]
    #   all-to-all along i     [4, i, o / 4]
    #   all-to-all along o     [1, i, o]          a whole matrix, orthogonalized, and back
    def on_device(x: Array) -> Array:
        for axis, dim in cuts:
            x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
        x = jax.lax.map(newton_schulz, x)
        for axis, dim in reversed(cuts):
            x = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
        return x

    devices = math.prod(mesh.shape[axis] for axis, _ in cuts)
    padded = jnp.pad(layers, ((0, -len(layers) % devices), (0, 0), (0, 0)))
    on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return on_devices(padded)[: len(layers)]


def newton_schulz(x: Float[Array, "i o"]) -> Float[Array, "i o"]:
    """Move the singular values of a matrix of norm 1 towards 1; products are summed in float32."""
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    a, b, c = COEFFICIENTS
    # The iteration commutes with transposition: that of the shorter side has the smaller products.
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(ITERATIONS):
        square = product(wide, wide.T).astype(x.dtype)
        polynomial = (b * square + c * product(square, square)).astype(x.dtype)
        wide = (a * wide + product(polynomial, wide)).astype(x.dtype)
    return wide if wide.shape == x.shape else wide.T
