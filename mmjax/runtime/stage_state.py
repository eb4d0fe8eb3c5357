"""Make and update the part of the training state that a stage owns: its parameters and their moments, on its mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mmjax.models.layer_stacks import Params
from mmjax.models.model import exclude, merge, modules_of, partition, restrict
from mmjax.models.quantization import cast_frozen
from mmjax.parallel.sharding import activations_on, without_shards
from mmjax.runtime.compiler_options import initial_compiler_options
from mmjax.runtime.program_cache import CachedProgram
from mmjax.runtime.stage_program import StageProgram, Sums
from mmjax.runtime.state import (
    Hyperparameters,
    Optimizer,
    TrainState,
    all_parameters,
    shardings_with_moments,
)

R = TypeVar("R")
NOTHING = jax.tree.structure({})


class StageState:
    """The shapes and shardings of a stage's part of the state, and the programs that make it."""

    def __init__(
        self,
        program: StageProgram,
        optimizer: Optimizer,
        select: Callable[[Params], Params] = lambda params: params,
        context: str | None = None,
    ) -> None:
        """select: keeps of the stage's parameters those that it owns. context: as of `CachedProgram`."""
        mesh = program.mesh
        self.program = program
        self.optimizer = optimizer
        trainable, frozen = map(select, program.abstract)
        self.shardings = shardings_with_moments(
            optimizer, trainable, *(select(part) for part in program.shardings), mesh=mesh
        )
        frozen = jax.eval_shape(self._cast, frozen)
        moments = jax.eval_shape(optimizer.init, trainable)
        structs = TrainState(jax.ShapeDtypeStruct((), jnp.int32), trainable, frozen, moments)
        # Shapes, dtypes and shardings; of moments in host memory, those on the devices.
        self.abstract: TrainState = jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=layout.with_memory_kind(None)
            ),
            structs,
            self.shardings,
        )
        device = [*mesh.local_devices, mesh.devices.flat[0]][0]  # of absent ones none is local
        self._jit = partial(
            CachedProgram, context, mesh, compiler_options=initial_compiler_options(device) or None
        )
        self.init_optimizer = self._jit(
            lambda trainable: (jnp.zeros((), jnp.int32), optimizer.init(trainable)),
            out_shardings=(self.shardings.step, self.shardings.optimizer),
        )
        self.random_parameters = cache(self._random_parameters)

    def init(self, key: jax.Array, params: Params) -> TrainState:
        """Make the state of step 0, every array in its shards: parameters are taken from `params`, or drawn.

        On a process that has none of the devices the arrays have no shards.
        """
        if not self.program.mesh.local_devices:
            return jax.tree.map(without_shards, self.abstract)
        provided = restrict(params, all_parameters(self.abstract))
        trainable, frozen = partition(
            provided, self.program.stage.model.frozen & modules_of(provided)
        )
        structs = restrict(self.abstract.frozen, frozen)
        if jax.tree.map(lambda x: x.dtype, frozen) != jax.tree.map(lambda x: x.dtype, structs):
            frozen = jax.jit(self._cast)(frozen)
        # Two programs: random bits need as much memory as the parameters, and are gone when the
        # moments come.
        drawn = self.random_parameters(jax.tree.structure(provided)).run(key)
        trainable = merge(drawn[0], trainable)
        frozen = merge(drawn[1], frozen)
        step, moments = self.init_optimizer.run(trainable)
        return TrainState(step, trainable, frozen, moments)

    def _cast(self, frozen: Params) -> Params:
        return cast_frozen(frozen, self.program.stage.model.dtype)

    def _random_parameters(self, provided: Any = NOTHING) -> CachedProgram:
        """Return the program that makes random parameters, trainable and frozen, in their shards.

        provided: the structure of those that are not made.
        """
        model = self.program.stage.model

        def select(part: Params, like: Params) -> Params:
            return exclude(
                restrict(part, like), jax.tree.unflatten(provided, [None] * provided.num_leaves)
            )

        def draw(key: jax.Array) -> tuple[Params, Params]:
            # XLA drops what is not selected: no device draws the parameters of other stages.
            params = self.program.stage.select(model.init(key))
            trainable, frozen = partition(params, model.frozen & modules_of(params))
            return select(trainable, self.abstract.trainable), select(
                self._cast(frozen), self.abstract.frozen
            )

        layouts = (select(part, part) for part in (self.shardings.trainable, self.shardings.frozen))
        return self._jit(draw, out_shardings=tuple(layouts))

    def update(
        self,
        state: TrainState,
        gradients: Params,
        hyper: Hyperparameters,
        settle: Callable[[jax.Array], tuple[jax.Array, R]],
        clear: Callable[[], Sums | None],
        norm: jax.Array | None = None,
    ) -> tuple[TrainState, Sums | None, R]:
        """Update the state where it may be; return it, sums of zero for the next step, and the step's report.

        settle: returns from the norm whether the state may be updated, and the report. clear: makes
        the sums. norm: as of `Optimizer.update`.
        """
        stored = self.optimizer.load(state.optimizer)
        with activations_on(self.program.mesh, self.program.rules):
            params, moments, norm = self.optimizer.update(
                gradients, stored, state.trainable, hyper, norm
            )
        valid, report = settle(norm)
        # A selection, not a branch: it is part of the update's own pass over the parameters.
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(valid, new, old),
            (params, moments),
            (state.trainable, stored),
        )
        cleared = clear()
        return TrainState(state.step + valid, params, state.frozen, moments), cleared, report
