"""Parameters that two stages hold: one owns them and has their moments, the other has a copy.

Two that are each updated by a program of their own would drift apart, as programs order sums differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax

from mmjax.models.layer_stacks import Params
from mmjax.models.model import exclude, merge, restrict
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import without_shards
from mmjax.runtime.stage_program import StageProgram, Sums, zeros_like
from mmjax.runtime.state import TrainState, all_parameters
from mmjax.runtime.transfer import move


class SharedParameters:
    """Parameters of two stages, by their numbers, and the transfers that keep the copy equal."""

    def __init__(self, structure: Params, owner: int, holder: int, programs: Sequence[StageProgram]) -> None:
        """structure: nested dicts that have the shared leaves, and others or none."""
        self.structure = structure
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

    def with_copy(self, number: int, parameters: tuple[Params, Params], copy: Params) -> tuple[Params, Params]:
        """Return a stage's trainable and frozen parameters with its copy."""
        trainable, frozen = parameters
        if number != self.holder:
            return parameters
        return (merge(trainable, copy), frozen) if self.trained else (trainable, merge(frozen, copy))

    def spread(self, stages: Sequence[TrainState], key: tuple[Any, ...]) -> Params:
        """Move the owner's values to the other stage. key: names the transfer."""
        return move(restrict(all_parameters(stages[self.owner]), self.structure), self.copy_layouts, (*key, "copy"))

    def gather(self, sums: list[Sums], local: Sequence[bool], key: tuple[Any, ...], wait: Callable[[Any], Any]) -> None:
        """Add the gradients of the copy to the owner's, and drop them. sums: by stage. key: names the transfer."""
        if not self.trained:
            return
        if local[self.holder]:
            gradients = sums[self.holder].gradients
            copy = restrict(gradients, self.structure)
            sums[self.holder] = sums[self.holder]._replace(gradients=exclude(gradients, self.structure))
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
        return jax.jit(lambda: zeros_like(self.sums), out_shardings=jax.tree.map(lambda x: x.sharding, self.sums))


def tied_table(stages: Sequence[Stage], programs: Sequence[StageProgram]) -> tuple[SharedParameters, ...]:
    """Return the LLM's table where its first and its last stage have it."""
    model = stages[0].model
    first = next(n for n, stage in enumerate(stages) for piece in stage.text if piece.first)
    last = next(n for n, stage in enumerate(stages) if "llm" in stage.losses)
    if first == last or not model.config.llm.tied:
        return ()
    return (SharedParameters({"llm": {"embed": model.abstract["llm"]["embed"]}}, first, last, programs),)


@jax.jit
def add_on_mesh(a: jax.Array, b: jax.Array) -> jax.Array:
    """Add arrays of one mesh."""
    return a + b
