"""Bring tokens to the devices of their experts and back, exact and in static shapes: no capacity, none dropped.

Along the mesh axis `expert` every device has some of a layer's experts and some of the batch's
rows. An all-to-all brings each token once to every device that has one of its experts; what these
make of it comes back by the inverse, and is added up. There is room for somewhat more than an even
router sends: the tokens that find none go in another turn, in which all devices take part if any
has such tokens. Where that room is for all tokens, with few devices or many experts a token, tokens
are gathered along the axis instead, and sums scattered. Tensor parallelism cuts each expert's
hidden layer, so its devices' sums are added up as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import EXPERT, TENSOR, active, partition_spec, sharding, spec_axes

Tree = TypeVar("Tree")
# logical axes of the matrices into an expert's hidden layer
INTO = ("experts", "expert_embed", "mlp")
OUT = ("experts", "mlp", "expert_embed")  # and out of it
BIAS_INTO = ("experts", "mlp")
BIAS_OUT = ("experts", None)


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of tokens and experts on the mesh; on one device there is none, and nothing is exchanged."""

    mesh: Mesh | None = None
    tokens: PartitionSpec = PartitionSpec()  # of [b, t, d]
    into: PartitionSpec = PartitionSpec()
    out: PartitionSpec = PartitionSpec()
    biases: tuple[PartitionSpec, ...] = ()  # of gate, up and down
    divides: tuple[str, ...] = ()  # axes along which devices have other tokens
    parts: tuple[str, ...] = ()  # along which they have other experts, or other parts of them
    shards: tuple[str, ...] = ()  # of FSDP

    @classmethod
    def of(cls, tokens: tuple[int, ...], into: tuple[int, ...]) -> ExpertLayout:
        """Lay out tokens and matrices of these shapes on the active mesh."""
        current = active()
        if current is None:
            return cls()
        mesh, rules = current
        by_rows = sharding(mesh, rules, tokens, ("rows", "sequence", None)).spec
        experts, width, hidden = into
        specs = [
            sharding(mesh, rules, shape, axes).spec
            for shape, axes in (
                (into, INTO),
                ((experts, hidden, width), OUT),
                ((experts, hidden), BIAS_INTO),
                ((experts, width), BIAS_OUT),
            )
        ]
        used = [axis for axis in chain(*spec_axes(specs[0])) if mesh.shape[axis] > 1]
        return cls(
            mesh=mesh,
            tokens=by_rows,
            into=specs[0],
            out=specs[1],
            biases=(specs[2], specs[2], specs[3]),
            divides=tuple(axis for axis in chain(*spec_axes(by_rows)) if mesh.shape[axis] > 1),
            parts=tuple(axis for axis in (EXPERT, TENSOR) if axis in used),
            shards=tuple(axis for axis in used if axis not in (EXPERT, TENSOR)),
        )

    def run(
        self,
        function: Callable[..., Any],
        x: Array,
        valid: Array,
        router: Any,
        *weights: Any,
    ) -> Any:
        """Call `function` with these arrays on each device; it returns outputs like `x`, and sums reduced by `add_up`.

        router: arrays that all devices have. weights: two matrices into the hidden layer, one out of
        it, and the tuple of their biases, where they have some.
        """
        if self.mesh is None:
            return function(x, valid, router, *weights)
        replicated = PartitionSpec()
        specs = (
            self.tokens,
            partition_spec(self.tokens[:2]),
            replicated,
            self.into,
            self.into,
            self.out,
            self.biases[: len(weights[-1])],
        )
        run = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(self.tokens, replicated),
            check_vma=False,
        )
        return run(x, valid, router, *weights)

    @property
    def devices(self) -> int:
        """Return the number of devices that share the experts, 1 where each has all of them."""
        return self.mesh.shape[EXPERT] if EXPERT in self.parts else 1

    @property
    def cuts(self) -> int:
        """Return the number of devices that have parts of an expert's hidden layer."""
        return self.mesh.shape[TENSOR] if TENSOR in self.parts else 1

    @property
    def sends(self) -> bool:
        """Return whether devices that share experts have different tokens, so that tokens are sent between them."""
        return EXPERT in self.parts and EXPERT in self.divides

    @property
    def sharing(self) -> int:
        """Return the number of devices whose tokens share a device's experts, or its parts of them."""
        return math.prod(self.mesh.shape[axis] for axis in self.parts if axis in self.divides)

    # What follows is called inside of `run`.

    def first(self, count: int) -> Int[Array, ""] | int:
        """Return the number of the device's first expert, of which it has `count`."""
        return lax.axis_index(EXPERT) * count if self.devices > 1 else 0

    def gather(self, tree: Tree, parts: tuple[str, ...]) -> Tree:
        """Gather arrays `[n, ...]` of tokens from the devices along these axes, a subset of `self.parts`."""
        axes = tuple(axis for axis in parts if axis in self.divides)
        return (
            jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), tree)
            if axes
            else tree
        )

    def scatter(self, sums: Float[Array, "n d"], parts: tuple[str, ...]) -> Float[Array, "m d"]:
        """Sum the devices' outputs for the same tokens, and leave each its own tokens: the inverse of `gather`."""
        if axes := tuple(axis for axis in parts if axis not in self.divides):
            sums = lax.psum(sums, axes)
        if axes := tuple(axis for axis in parts if axis in self.divides):
            sums = lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True)
        return sums

    def send(self, x: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
        """Exchange equal parts of `x`, one for each device that shares the experts; its own inverse."""
        return lax.all_to_all(x, EXPERT, 0, 0, tiled=True)

    def gather_shards(self, weight: Float[Array, "e _ _"], axis: int) -> Float[Array, "e _ _"]:
        """Gather FSDP's shards of the device's experts, which divide this axis."""
        return lax.all_gather(weight, self.shards, axis=axis, tiled=True) if self.shards else weight

    def add_up(self, sums: Tree) -> Tree:
        """Add up sums over all tokens."""
        return lax.psum(sums, self.divides) if self.divides else sums


class Sends(NamedTuple):
    """Lists of the tokens that a device sends to each device, once to every one that has one of their experts.

    With room for 2 tokens at once (`size`), a device's list of 3 takes two turns.
    """

    token: Int[Array, "p l"]  # for each device, in order; n: none
    # in these lists, one after the other, of each token for the device of each expert
    place: Int[Array, "n k"]
    turns: Int[Array, ""]  # of all devices, in which the longest list of any is sent

    @classmethod
    def of(cls, expert: Int[Array, "n k"], count: int, size: int, layout: ExpertLayout) -> Sends:
        """List the tokens by the devices of their experts, which are `count` in all."""
        # 3 tokens with the experts (0 1), (3 0) and (2 3), of which 0 1 are on device 0, 2 3 on 1:
        #   device    0 0 | 1 0 | 1 1      of each token's experts
        #   goes      device 0 gets tokens 0 1, device 1 gets tokens 1 2
        #   rank      0 0 | 0 1 | 1 1      which of its list's tokens the token is
        #   token     0 1 3 3 | 1 2 3 3    both lists, of 4 entries for a `size` of 2; 3 is none
        #   place     0 8 | 4 1 | 5 8      device * 4 + rank; 8 where the token is there already
        tokens = len(expert)
        devices = layout.devices
        length = -(-tokens // size) * size
        device = expert // (count // devices)  # of padding, `devices`
        goes = (device[:, :, None] == jnp.arange(devices)).any(1)
        counts = jnp.cumsum(goes, axis=0, dtype=jnp.int32)
        rank = jnp.take_along_axis(counts - 1, jnp.minimum(device, devices - 1), axis=1)
        # A token's second expert on the same device has no place: the token is there already.
        again = jnp.tril(device[:, :, None] == device[:, None, :], -1).any(-1)
        place = jnp.where(again | (device == devices), devices * length, device * length + rank)
        token = (
            jnp.full(devices * length, tokens, jnp.int32)
            .at[place]
            .set(jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop")
        )
        # The same on all devices: each turn is an all-to-all, in which all must take part.
        turns = lax.pmax(-(-counts[-1].max() // size), layout.mesh.axis_names)
        return cls(token.reshape(devices, length), place, turns)

    def turn(self, number: Int[Array, ""], size: int) -> Sends:
        """Return the lists of one turn, `size` entries of each."""
        # Entry 5 of a list is entry 1 of turn 2 with a size of 2; of other turns it has no place.
        devices, length = self.token.shape
        device = self.place // length
        rank = self.place % length - number * size
        inside = (rank >= 0) & (rank < size) & (device < devices)
        token = lax.dynamic_slice_in_dim(self.token, number * size, size, axis=1)
        return self._replace(
            token=token, place=jnp.where(inside, device * size + rank, devices * size)
        )


def sum_parts(
    part: Callable[..., Array], parts: Int[Array, ""], tables: Any, *arrays: Array
) -> Array:
    """Sum `part(i, tables, *arrays)` in float32 over i < parts, a number that the data say.

    Only the inputs are kept for backward, which computes each part again. tables: arrays that have
    no gradient.
    """
    out = jax.eval_shape(part, jnp.int32(0), tables, *arrays)

    @jax.custom_vjp
    def total(parts: Array, tables: Any, arrays: tuple[Array, ...]) -> Array:
        def add(number: Array, total: Array) -> Array:
            return total + part(number, tables, *arrays).astype(jnp.float32)

        return lax.fori_loop(0, parts, add, jnp.zeros(out.shape, jnp.float32))

    def gradients(inputs: tuple, d_out: Array) -> tuple:
        parts, tables, arrays = inputs

        def add(number: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
            _, of_part = jax.vjp(partial(part, number, tables), *arrays)
            return jax.tree.map(jnp.add, total, of_part(d_out.astype(out.dtype)))

        return None, None, lax.fori_loop(0, parts, add, jax.tree.map(jnp.zeros_like, arrays))

    total.defvjp(lambda *inputs: (total(*inputs), inputs), gradients)
    return total(parts, tables, arrays)


@jax.custom_vjp
def sum_rows(
    x: Float[Array, "n ..."], rows: Int[Array, "m a"], back: Int[Array, "n b"]
) -> Float[Array, "m ..."]:
    """Sum for each output the rows of `x` that `rows` lists, n standing for none; back: the outputs in which a row is.

    So the gradient is such a sum as well, where JAX's own would scatter, in no fixed order on a
    GPU.
    """
    taken = x.at[rows].get(mode="fill", fill_value=0)
    return taken[:, 0] if rows.shape[1] == 1 else taken.sum(1, dtype=jnp.float32).astype(x.dtype)


sum_rows.defvjp(
    lambda x, rows, back: (sum_rows(x, rows, back), (rows, back)),
    lambda tables, gradient: (sum_rows(gradient, *tables[::-1]), None, None),
)
