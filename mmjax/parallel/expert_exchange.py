"""Bring tokens to the devices of their experts and back, exact and in static shapes: no capacity, none dropped.

Along the mesh axis `expert` every device has some of a layer's experts and some of the batch's rows. Tokens are
gathered along the axis with their routes, each device sums what its own experts make of them, and these sums are added
up and scattered to the devices that the tokens came from. Tensor parallelism cuts each expert's hidden layer, so its
devices' sums are added up as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import EXPERT, TENSOR, active, sharding

Tree = TypeVar("Tree")
INTO = ("experts", "expert_embed", "mlp")  # logical axes of the matrices into an expert's hidden layer
OUT = ("experts", "mlp", "expert_embed")  # and out of it


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of tokens and experts on the mesh; on one device there is none, and nothing is exchanged."""

    mesh: Mesh | None = None
    tokens: PartitionSpec = PartitionSpec()  # of [b, t, d]
    into: PartitionSpec = PartitionSpec()
    out: PartitionSpec = PartitionSpec()
    divides: tuple[str, ...] = ()  # axes along which devices have other tokens
    parts: tuple[str, ...] = ()  # along which they have other experts, or other parts of them
    shards: tuple[str, ...] = ()  # of FSDP

    @classmethod
    def of(cls, tokens: tuple[int, ...], into: tuple[int, ...]) -> ExpertLayout:
        """Lay out tokens and matrices of these shapes on the active mesh."""
        current = active()
        if current is None:
            return cls()
        mesh, rules, _ = current
        by_rows = sharding(mesh, rules, tokens, ("rows", "sequence", None)).spec
        specs = [sharding(mesh, rules, shape, axes).spec for shape, axes in ((into, INTO), (_turned(into), OUT))]
        used = [axis for axis in _axes(specs[0]) if mesh.shape[axis] > 1]
        return cls(
            mesh=mesh,
            tokens=by_rows,
            into=specs[0],
            out=specs[1],
            divides=tuple(axis for axis in _axes(by_rows) if mesh.shape[axis] > 1),
            parts=tuple(axis for axis in (EXPERT, TENSOR) if axis in used),
            shards=tuple(axis for axis in used if axis not in (EXPERT, TENSOR)),
        )

    def run(self, function: Callable[..., Any], x: Array, valid: Array, router: Array, *matrices: Array) -> Any:
        """Call a function of these on each device; it returns outputs like `x`, and sums that `add_up` has added up.

        matrices: two into the hidden layer, and one out of it.
        """
        if self.mesh is None:
            return function(x, valid, router, *matrices)
        replicated = PartitionSpec()
        specs = (self.tokens, PartitionSpec(*self.tokens[:2]), replicated, self.into, self.into, self.out)
        run = jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=(self.tokens, replicated), check_vma=False
        )
        return run(x, valid, router, *matrices)

    @property
    def exchanges(self) -> bool:
        """Return whether tokens are brought to the devices of their experts."""
        return EXPERT in self.parts

    # What follows is called inside of `run`.

    def first(self, count: int) -> Int[Array, ""] | int:
        """Return the number of the device's first expert, of which it has `count`."""
        return lax.axis_index(EXPERT) * count if self.exchanges else 0

    def gather(self, tree: Tree) -> Tree:
        """Gather arrays `[n, ...]` of tokens from the devices that have other parts of the experts."""
        axes = tuple(axis for axis in self.parts if axis in self.divides)
        return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), tree) if axes else tree

    def scatter(self, sums: Float[Array, "n d"]) -> Float[Array, "m d"]:
        """Add up what the devices have made of the same tokens, and leave each its own: the inverse of `gather`."""
        if axes := tuple(axis for axis in self.parts if axis not in self.divides):
            sums = lax.psum(sums, axes)
        if axes := tuple(axis for axis in self.parts if axis in self.divides):
            sums = lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True)
        return sums

    def gather_shards(self, weight: Float[Array, "e _ _"], axis: int) -> Float[Array, "e _ _"]:
        """Gather FSDP's shards of the device's experts, which divide this axis."""
        return lax.all_gather(weight, self.shards, axis=axis, tiled=True) if self.shards else weight

    def add_up(self, sums: Tree) -> Tree:
        """Add up sums over all tokens."""
        return lax.psum(sums, self.divides) if self.divides else sums


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
