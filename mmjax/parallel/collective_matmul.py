"""Products of tensor-parallel layers between which tokens are divided, gathered and scattered behind the products.

Between layers each tensor-parallel device has its part of every row's tokens (Megatron's sequence
parallelism, Korthikanti et al. 2022). A product whose outputs are cut needs the tokens of all
devices, and one whose inputs are cut leaves each device a term of all tokens' sums. In place of one
collective, chunks go around a ring of the devices, each while the chunk before is multiplied (Wang
et al. 2023; StepCCL, MMScale section 6). So does backward, which gathers again what forward
gathered: only a device's own part is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from mmjax.parallel.sharding import Axes, active, partition_spec, sharding, spec_axes


def tensor_parallel_products(
    x: Float[Array, "b t i"], weights: Sequence[Float[Array, "*p i o"]], axes: Sequence[Axes]
) -> tuple[Float[Array, "b t o"], ...] | None:
    """Multiply `x` by weights cut alike, in its precision; None where tokens are not divided between layers.

    axes: logical axes of each weight. Of those with `embed` inputs the outputs are cut, and `x` is
    gathered once for all; else the inputs are, and there is one. A weight `[p, i, o]` has a copy
    for every part of the rows, along `data`, each with a gradient of its own. What the mesh does
    not divide is left to XLA: None too.
    """
    current = active()
    if current is None or x.ndim != 3 or current.rules.sequence == current.rules.length:
        return None
    mesh, rules = current
    axis = rules.sequence[-1]
    gathers = axes[0][0] == "embed"
    specs = [
        sharding(mesh, rules, w.shape[-2:], names).spec
        for w, names in zip(weights, axes, strict=True)
    ]
    tokens = sharding(mesh, rules, x.shape, ("rows", "sequence", None)).spec
    # Dimension of the weights that `tensor` cuts: outputs of query or up, inputs of output or down.
    cut, uncut = (1, 0) if gathers else (0, 1)
    divides = tokens == rules.spec(("rows", "sequence", None)) and all(
        spec_axes(spec)[cut] == (axis,) for spec in specs
    )
    if mesh.shape[axis] == 1 or not divides:
        return None
    copies = ("data",) * (weights[0].ndim - 2)
    layout = _Layout(
        mesh=mesh,
        axis=axis,
        overlaps=bool(rules.ring),
        gathers=gathers,
        tokens=tokens,
        inner=PartitionSpec(rules.rows, rules.length or None, axis),
        weights=tuple(partition_spec((*copies, *spec)) for spec in specs),
        shards=tuple(name for name in spec_axes(specs[0])[uncut] if mesh.shape[name] > 1),
        ranks=tuple(
            name
            for name in (*rules.rows, *rules.length)
            if mesh.shape[name] > 1 and name not in copies
        ),
    )
    return layout.products(x, tuple(weights))


@dataclass(frozen=True)
class _Layout:
    """The layout of a product's operands on the mesh, and the product there."""

    mesh: Mesh
    axis: str  # that divides tokens between layers, and the width inside
    overlaps: bool  # chunks of tokens travel behind products
    gathers: bool  # tokens, before the product; or else scatters its sums
    tokens: PartitionSpec  # of activations between layers
    inner: PartitionSpec  # of activations inside a layer
    weights: tuple[PartitionSpec, ...]
    shards: tuple[str, ...]  # axes of FSDP's shards of the weights
    ranks: tuple[str, ...]  # axes whose ranks have other tokens and the same weights

    def products(self, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Compute the products, with a backward pass that exchanges as they do."""
        run = jax.custom_vjp(self._forward)

        def forward(x: Any, weights: Any) -> tuple[tuple[Array, ...], Any]:
            values = tuple(w.value for w in weights)
            # Only weights that are trained need `x`.
            residuals = x.value if any(w.perturbed for w in weights) else None
            return self._forward(x.value, values), (residuals, values)

        def backward(
            residuals: Any, gradients: Sequence[Array]
        ) -> tuple[Array, tuple[Array | None, ...]]:
            return self._backward(*residuals, tuple(gradients))

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(x, weights)

    def _forward(self, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        def local(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
            step = _gather_and_multiply if self.gathers else _multiply_and_scatter
            return self._split(
                step(x, self._joined(weights, x.dtype), self.axis, self.overlaps)[0], weights
            )

        return self._on_devices(local, (self._inputs, self.weights), self._outputs)(x, weights)

    def _backward(
        self, x: Array | None, weights: tuple[Array, ...], gradients: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array | None, ...]]:
        # The transpose of gather-and-multiply is multiply-and-scatter, and the other way round. The
        # same ring brings the chunks of `x`, or of the gradients, that the weights' gradient needs.
        def local(
            x: Array | None, weights: tuple[Array, ...], gradients: tuple[Array, ...]
        ) -> tuple[Array, Any]:
            step = _multiply_and_scatter if self.gathers else _gather_and_multiply
            d_y = jnp.concatenate(gradients, axis=-1)
            d_x, d_joined = step(
                d_y, self._joined(weights, d_y.dtype).T, self.axis, self.overlaps, x
            )
            if d_joined is None:
                return d_x, (None,) * len(weights)
            # Reduced in the precision of the computation, like all gradients.
            parts = self._split(
                (d_joined if self.gathers else d_joined.T).astype(d_y.dtype), weights
            )
            sums = map(self._sum_over_ranks, parts)
            return d_x, tuple(
                d.reshape(w.shape).astype(w.dtype) for d, w in zip(sums, weights, strict=True)
            )

        in_specs = self._inputs, self.weights, self._outputs
        return self._on_devices(local, in_specs, (self._inputs, self.weights))(
            x, weights, gradients
        )

    @property
    def _inputs(self) -> PartitionSpec:
        return self.tokens if self.gathers else self.inner

    @property
    def _outputs(self) -> PartitionSpec:
        return self.inner if self.gathers else self.tokens

    def _on_devices(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _joined(self, weights: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """Gather a device's shards of the weights and join them, so that a chunk is multiplied once."""
        parts = [w.reshape(w.shape[-2:]).astype(dtype) for w in weights]
        if self.shards:
            dimension = 0 if self.gathers else 1
            parts = [
                lax.all_gather(part, self.shards, axis=dimension, tiled=True) for part in parts
            ]
        return jnp.concatenate(parts, axis=1)

    def _split(self, joined: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Split the last dimension by the outputs of the weights."""
        ends = [sum(w.shape[-1] for w in weights[:n]) for n in range(1, len(weights))]
        return tuple(jnp.split(joined, ends, axis=-1))

    def _sum_over_ranks(self, gradient: Array) -> Array:
        """Sum a weight's gradient over the ranks, and leave each its shard."""
        if axes := tuple(name for name in self.ranks if name not in self.shards):
            gradient = lax.psum(gradient, axes)
        if self.shards:
            dimension = 0 if self.gathers else 1
            gradient = lax.psum_scatter(
                gradient, self.shards, scatter_dimension=dimension, tiled=True
            )
        return gradient


# What follows runs on each device. An optimization barrier ends what a step of a ring computes:
# without it XLA merges the products of several steps into one, which waits for all their chunks.


def _gather_and_multiply(
    x: Float[Array, "b c i"],
    weight: Float[Array, "i o"],
    axis: str,
    overlaps: bool,
    factor: Float[Array, "b t k"] | None = None,
) -> tuple[Float[Array, "b t o"], Float[Array, "i k"] | None]:
    """Multiply the tokens of all devices, `c` of each; also return their transpose times `factor`, in float32."""
    if not overlaps:
        x = lax.all_gather(x, axis, axis=1, tiled=True)
        return x @ weight, _add_outer(None, x, factor, 0)
    size = lax.axis_size(axis)
    length = x.shape[1]
    first = lax.axis_index(axis)
    out = jnp.zeros((x.shape[0], size * length, weight.shape[1]), x.dtype)
    outer = None
    for step in range(size):
        # Device 2 of 4 multiplies the chunks of devices 2, 3, 0 and 1. Each step sends the chunk at
        # hand on while it is multiplied:
        #   step       0     1     2     3
        #   device 0   c0    c1    c2    c3
        #   device 1   c1    c2    c3    c0
        #   device 2   c2    c3    c0    c1
        #   device 3   c3    c0    c1    c2
        start = (first + step) % size * length
        following = None if step + 1 == size else _pass_on(x, axis)
        part = x @ weight
        outer = _add_outer(outer, x, factor, start)
        x, part, outer = lax.optimization_barrier((following, part, outer))
        out = lax.dynamic_update_slice_in_dim(out, part, start, axis=1)
    return out, outer


def _multiply_and_scatter(
    x: Float[Array, "b t i"],
    weight: Float[Array, "i o"],
    axis: str,
    overlaps: bool,
    factor: Float[Array, "b c k"] | None = None,
) -> tuple[Float[Array, "b c o"], Float[Array, "k i"] | None]:
    """Multiply and sum over the devices, each of which gets `c` tokens.

    With `factor`, whose tokens are gathered meanwhile, also return its transpose times `x`, in
    float32.
    """
    if not overlaps:
        total = lax.psum_scatter(x @ weight, axis, scatter_dimension=1, tiled=True)
        factor = None if factor is None else lax.all_gather(factor, axis, axis=1, tiled=True)
        return total, None if factor is None else _add_outer(None, factor, x, 0)
    size = lax.axis_size(axis)
    length = x.shape[1] // size
    first = lax.axis_index(axis)
    total = None
    outer = None
    for step in range(size):
        # Device 2 of 4 adds its terms of the chunks of devices 3, 0, 1 and 2; each sum ends where
        # its chunk lies. The sum of chunk 2 begins on device 1 and goes by 0 and 3 to device 2.
        start = (first + step + 1) % size * length
        received = None if total is None else _pass_on(total, axis)
        part = lax.dynamic_slice_in_dim(x, start, length, axis=1) @ weight
        # XLA has one chunk under way at a time, so the two of a step travel behind a product each.
        x, factor, received, part = lax.optimization_barrier((x, factor, received, part))
        total = part if received is None else received + part
        if factor is not None:
            following = None if step + 1 == size else _pass_on(factor, axis)
            outer = _add_outer(outer, factor, x, (first + step) % size * length)
            x, factor, outer, total = lax.optimization_barrier((x, following, outer, total))
    return total, outer


def _pass_on(x: Array, axis: str) -> Array:
    """Send a chunk to the device before, and receive that of the device behind."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i - 1) % size) for i in range(size)])


def _add_outer(
    total: Array | None, chunk: Array, tokens: Array | None, start: Array | int
) -> Array | None:
    """Add to `total` the transpose of a chunk times the same positions of `tokens`, which begin at `start`."""
    if tokens is None:
        return None
    same = lax.dynamic_slice_in_dim(tokens, start, chunk.shape[1], axis=1)
    product = jnp.einsum("bti,bto->io", chunk, same, preferred_element_type=jnp.float32)
    return product if total is None else total + product
