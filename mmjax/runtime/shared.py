"""Parameters that two stages hold: one owns them and has their moments, the other has a copy.

Two that are each updated by a program of their own would drift apart, as programs order sums
differently. An encoder beside the LLM's stages has an owner, on the first of them, and a copy on
every other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mmjax.models.layer_stacks import Params
from mmjax.models.model import exclude, merge, restrict
from mmjax.parallel.sharding import AXES, partition_spec, without_shards
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.stage_program import StageProgram, Sums, zeros_like
from mmjax.runtime.state import TrainState, all_parameters
from mmjax.runtime.transfer import move, view


class SharedParameters:
    """Parameters of two stages, by their numbers, and the transfers that keep the copy equal."""

    def __init__(
        self,
        structure: Params,
        owner: int,
        holder: int,
        programs: Sequence[StageProgram],
        united: bool = False,
    ) -> None:
        """structure: nested dicts that have the shared leaves, and others or none.

        united: whether `CopiedParameters` adds up the gradients and brings the updated values.
        """
        self.structure = structure
        self.united = united
        self.owner = owner
        self.holder = holder
        trainable, frozen = (restrict(part, structure) for part in programs[holder].abstract)
        self.trained = bool(jax.tree.leaves(trainable))
        self.abstract = trainable if self.trained else frozen
        part = 0 if self.trained else 1
        self.copy_layouts, self.owner_layouts = (
            restrict(programs[number].shardings[part], structure) for number in (holder, owner)
        )
        self.sums = restrict(programs[holder].sums.gradients, structure)

    def owned(self, number: int, params: Params) -> Params:
        """Return what a stage owns of its parameters."""
        return exclude(params, self.structure) if number == self.holder else params

    def with_copy(
        self, number: int, parameters: tuple[Params, Params], copy: Params
    ) -> tuple[Params, Params]:
        """Return a stage's trainable and frozen parameters with its copy."""
        trainable, frozen = parameters
        if number != self.holder:
            return parameters
        return (
            (merge(trainable, copy), frozen) if self.trained else (trainable, merge(frozen, copy))
        )

    def spread(self, stages: Sequence[TrainState], key: tuple[Any, ...]) -> Params:
        """Move the owner's values to the other stage. key: names the transfer."""
        return move(
            restrict(all_parameters(stages[self.owner]), self.structure),
            self.copy_layouts,
            (*key, "copy"),
        )

    def gather(
        self,
        sums: list[Sums],
        local: Sequence[bool],
        key: tuple[Any, ...],
        wait: Callable[[Any], Any],
    ) -> None:
        """Add the gradients of the copy to the owner's, and drop them. sums: by stage. key: names the transfer."""
        if not self.trained or self.united:
            return
        if local[self.holder]:
            gradients = sums[self.holder].gradients
            copy = restrict(gradients, self.structure)
            sums[self.holder] = sums[self.holder]._replace(
                gradients=exclude(gradients, self.structure)
            )
        else:
            copy = jax.tree.map(without_shards, self.abstract, self.copy_layouts)
        arrived = move(copy, self.owner_layouts, (*key, "gradient"))
        if local[self.owner]:
            gradients = sums[self.owner].gradients
            total = wait(jax.tree.map(add_on_mesh, restrict(gradients, self.structure), arrived))
            sums[self.owner] = sums[self.owner]._replace(gradients=merge(gradients, total))

    def with_zeros(self, number: int, sums: Sums) -> Sums:
        """Return a stage's sums with zeros for the gradients of its copy."""
        if number != self.holder or not self.trained:
            return sums
        return sums._replace(gradients=merge(sums.gradients, self._zeros()))

    @cached_property
    def _zeros(self) -> Callable[[], Params]:
        return jax.jit(
            lambda: zeros_like(self.sums),
            out_shardings=jax.tree.map(lambda x: x.sharding, self.sums),
        )


def find_shared(
    stages: Sequence[PlacedStage], programs: Sequence[StageProgram]
) -> tuple[SharedParameters, ...]:
    """Return what several stages have: the LLM's table that is tied, and all of a stage that has copies."""
    model = stages[0].stage.model
    first = next(n for n, placed in enumerate(stages) for piece in placed.stage.text if piece.first)
    last = next(n for n, placed in enumerate(stages) if "llm" in placed.stage.losses)
    shared = []
    if first != last and model.config.llm.tied:
        shared.append(
            SharedParameters(
                {"llm": {"embed": model.abstract["llm"]["embed"]}}, first, last, programs
            )
        )
    owners: dict[str, int] = {}
    for number, placed in enumerate(stages):
        owner = owners.setdefault(placed.stage.description, number)
        if owner != number:
            parts = (part for part in programs[number].abstract if jax.tree.leaves(part))
            shared += [
                SharedParameters(part, owner, number, programs, united=True) for part in parts
            ]
    return tuple(shared)


class CopiedParameters:
    """Trained parameters that stages on several meshes of equal shape have copies of, and programs on all of these.

    The arrays of the copies become one by the shards that devices have already, one copy behind the
    other along the first axis. Processes meet before either program runs, as before all that have
    devices of several workers.
    """

    def __init__(self, stages: Sequence[PlacedStage], programs: Sequence[StageProgram]) -> None:
        count = max(placed.copy[1] for placed in stages)
        # Of every copy, the stages of all encoders; those of the first are the owners.
        self.stages = [
            [n for n, s in enumerate(stages) if s.copy == (copy, count)] for copy in range(count)
        ]
        self.programs = programs
        devices = np.stack([stages[numbers[0]].mesh.devices for numbers in self.stages])
        self.mesh = Mesh(devices, ("copy", *AXES), axis_types=(AxisType.Auto,) * devices.ndim)
        owned = [programs[n] for n in self.stages[0]]
        self.abstract = reduce(merge, (program.abstract[0] for program in owned))
        specs = jax.tree.map(
            lambda x: x.spec, reduce(merge, (program.shardings[0] for program in owned))
        )
        of_all = partial(NamedSharding, self.mesh)
        self._joined = jax.tree.map(
            lambda spec: of_all(_with_copies(spec)), specs, is_leaf=_is_spec
        )
        equal = jax.tree.map(of_all, specs, is_leaf=_is_spec)
        self._add = jax.jit(self._add_copies, out_shardings=equal, donate_argnums=0)
        self._repeat = jax.jit(self._repeat_first, out_shardings=equal)

    def gather(self, sums: list[Sums]) -> None:
        """Add up the gradients of all copies for the owners, and drop the others. sums: by stage."""
        by_copy = [reduce(merge, (sums[n].gradients for n in numbers)) for numbers in self.stages]
        for numbers in self.stages:
            for number in numbers:
                sums[number] = sums[number]._replace(gradients={})
        if not self.mesh.local_devices:
            return
        total = self._add(self._join(by_copy))
        for number in self.stages[0]:
            if self.programs[number].mesh.local_devices:
                sums[number] = sums[number]._replace(gradients=self._view(total, number))

    def spread(
        self, stages: Sequence[TrainState], copies: Mapping[int, Params]
    ) -> dict[int, Params]:
        """Return the owners' values for every other stage, by number. copies: what these have so far."""
        holders = [number for numbers in self.stages[1:] for number in numbers]
        if not self.mesh.local_devices:
            return {number: copies[number] for number in holders}
        owned = reduce(merge, (stages[number].trainable for number in self.stages[0]))
        parts = [
            reduce(merge, (copies[number] for number in numbers)) for numbers in self.stages[1:]
        ]
        values = self._repeat(self._join([owned, *parts]))
        is_local = {number: bool(self.programs[number].mesh.local_devices) for number in holders}
        return {
            number: self._view(values, number) if is_local[number] else copies[number]
            for number in holders
        }

    def _join(self, copies: Sequence[Params]) -> Params:
        """Join the copies' arrays, of which those of other processes have no shards here, or are left out."""
        structure = jax.tree.structure(self.abstract)
        local = [leaves for copy in copies if (leaves := jax.tree.leaves(copy))]
        joined = []
        for p, layout, *parts in zip(
            *map(jax.tree.leaves, (self.abstract, self._joined)), *local, strict=True
        ):
            shards = [shard.data for part in parts for shard in part.addressable_shards]
            shape = (len(copies) * p.shape[0], *p.shape[1:])
            joined.append(jax.make_array_from_single_device_arrays(shape, layout, shards))
        return jax.tree.unflatten(structure, joined)

    def _view(self, values: Params, number: int) -> Params:
        """Return what a stage has of arrays that are equal on all copies."""
        program = self.programs[number]
        return jax.tree.map(view, restrict(values, program.abstract[0]), program.shardings[0])

    def _split(self, joined: Params) -> Params:
        return jax.tree.map(lambda x: x.reshape(len(self.stages), -1, *x.shape[1:]), joined)

    def _add_copies(self, joined: Params) -> Params:
        return jax.tree.map(lambda x: x.sum(0), self._split(joined))

    def _repeat_first(self, joined: Params) -> Params:
        # A sum with zeros, since a selection of one copy would gather all of them.
        def select(x: jax.Array) -> jax.Array:
            first = jnp.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1)) == 0
            return jnp.where(first, x, 0).sum(0)

        return jax.tree.map(select, self._split(joined))


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _with_copies(spec: PartitionSpec) -> PartitionSpec:
    """Return how arrays are cut that lie one behind the other, one for each copy."""
    first, *rest = spec or (None,)
    axes = (first,) if isinstance(first, str) else first or ()
    return partition_spec((("copy", *axes), *rest))


@jax.jit
def add_on_mesh(a: jax.Array, b: jax.Array) -> jax.Array:
    """Add arrays of one mesh."""
    return a + b
