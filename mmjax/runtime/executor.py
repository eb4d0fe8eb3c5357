"""Run training steps: a graph of stages on their meshes, driven in one order that all processes walk.

On one mesh the model is one stage: one gradient program per shape and one update program.
Microbatches are a Python loop over donated buffers, so the microbatches of a step may differ in
shape and their number compiles nothing. Where steps are planned with one microbatch, its gradients
go straight to the update.

In a pipeline backpropagation is exact: gradients are those of one mesh, up to the order of float32
sums. Microbatches accumulate in float32 on each stage; the step's norm, report and validity come
from one small program on all devices, so that either every stage updates or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mmjax.batch import Microbatch
from mmjax.config import CrossEntropy, LossConfig
from mmjax.config.training import Carrier
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.losses.objective import TextObjective
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, merge
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import AXES, ShardingRules, replicated, tokens_sharding, without_shards
from mmjax.planning.schedules import ScheduleName
from mmjax.runtime.device_batch import (
    ProcessReport,
    TowerRows,
    bisect_bad,
    isolate_rows,
    merge_unreadable,
    put_local_rows,
    put_report,
)
from mmjax.runtime.devices import check_ram
from mmjax.runtime.passes import Gradients, Passes, PlacedStage, StagedBatch
from mmjax.runtime.placement import put_batch
from mmjax.runtime.program_cache import CachedProgram
from mmjax.runtime.shared import CopiedParameters, find_shared
from mmjax.runtime.stage_program import Sums, zeros_like
from mmjax.runtime.stage_state import StageState
from mmjax.runtime.state import (
    Hyperparameters,
    Optimizer,
    TrainState,
    all_parameters,
    parameter_shardings,
)
from mmjax.runtime.step_report import StepReport, is_valid, loss_weights, report_step
from mmjax.runtime.step_settlement import StepSettlement, UnreadableSamples, WeighedBatches
from mmjax.runtime.transfer import move, move_array, open_carrier, view

MAX_TRIALS = 64  # of rows of a microbatch whose gradients may not be finite


class State(NamedTuple):
    """State between steps, by stage, and the copies of `SharedParameters`."""

    stages: tuple[TrainState, ...]
    copies: tuple[Params, ...] = ()

    @property
    def trainable(self) -> Params:
        """Return the trainable parameters of all stages."""
        return reduce(merge, (stage.trainable for stage in self.stages))

    @property
    def frozen(self) -> Params:
        """Return the frozen parameters of all stages."""
        return reduce(merge, (stage.frozen for stage in self.stages))


class Executor:
    """Runs the steps of a model: a graph of stages, of one on one mesh."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        stages: Sequence[PlacedStage],
        *,
        sources: int,
        schedule: ScheduleName = "1f1b",
        stage_times: tuple[tuple[int, int], ...] = (),
        carrier: Carrier = "auto",
        loss: LossConfig = CrossEntropy(),
        loss_chunks: int = 1,
        accumulates: bool = True,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
        rows: Mapping[str, TowerRows] | None = None,
    ) -> None:
        """stage_times: forward and backward, by which a nested schedule is made.

        accumulates: False where one stage has steps of one microbatch, so that no gradients are
        kept between them.

        A step that must have more all the same adds them up in the precision of the computation,
        for want of memory.
        rows: which of each tower's rows this process packs; None: all. Of one stage it packs those
        of its ranks.
        """
        self.model = model
        self.optimizer = optimizer
        self.rows = rows
        self.objective = TextObjective.of(model, loss, loss_chunks)
        stages = [
            s._replace(stage=replace(s.stage, repeated=self.objective.repeated)) for s in stages
        ]
        self.stages = tuple(stages)
        self.is_one_stage = len(stages) == 1
        self.rules = stages[0].rules if self.is_one_stage else ShardingRules()  # on `mesh`
        self.accumulates = accumulates
        self.schedule = schedule
        closed_over = (
            model.description,
            optimizer.config,
            self.rules,
            sources,
            loss,
            loss_chunks,
            accumulates,
        )
        # Programs of one mesh are in the cache.
        context = repr(closed_over) if self.is_one_stage and None not in closed_over[:2] else None
        self.passes = Passes(
            stages,
            schedule,
            sources=sources,
            objective=self.objective,
            context=context,
            compiler_options=compiler_options,
            times=stage_times,
        )
        self.programs = self.passes.programs
        self.graph = self.passes.graph
        self.local = self.passes.local
        self.synchronous = self.passes.synchronous
        self.meshes = [placed.mesh for placed in stages]
        meshes = list(dict.fromkeys(self.meshes))
        # Of all devices, for what the whole step agrees on.
        devices = np.concatenate([mesh.devices.reshape(-1) for mesh in meshes])
        united = Mesh(
            devices.reshape(1, -1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES)
        )
        self.mesh = stages[0].mesh if self.is_one_stage else united
        self.shared = find_shared(self.stages, self.programs)
        is_copied = any(shared.united and shared.trained for shared in self.shared)
        self.copied = CopiedParameters(self.stages, self.programs) if is_copied else None
        self.states = [
            StageState(program, optimizer, partial(self._own, n), context)
            for n, program in enumerate(self.programs)
        ]
        self._meetings = 0
        if coordination.count() > 1 and not self.is_one_stage:
            self._check_agreement()
            open_carrier(carrier, devices[0].platform)
        # Both sides of a transfer derive its number from this count, so no process may walk the
        # passes alone.
        self._walks = 0
        self.settle = StepSettlement(stages, self.passes, self.mesh, self._meet, optimizer)
        self._loss_of_text = next(n for n, s in enumerate(stages) if "llm" in s.stage.losses)
        self._sums = [
            self._own(n, program.sums.gradients) for n, program in enumerate(self.programs)
        ]
        self._jit_step_programs(context, compiler_options)

    @classmethod
    def on_mesh(
        cls, model: Model, optimizer: Optimizer, mesh: Mesh, rules: ShardingRules, **options: Any
    ) -> Executor:
        """Make the executor of the whole model on one mesh. options: as of `Executor`."""
        return cls(
            model, optimizer, [PlacedStage("all", Stage.whole(model), mesh, rules)], **options
        )

    def _jit_step_programs(
        self, context: str | None, compiler_options: Mapping[str, Any] | None
    ) -> None:
        """Jit the programs of the whole step, on all devices, and every stage's update."""
        on_all = replicated(self.mesh)
        self._replicate = jax.jit(lambda x: x, out_shardings=on_all)
        self.merge_unreadable = jax.jit(merge_unreadable, out_shardings=on_all)
        if self.is_one_stage:
            # Norm, report and validity are part of the update.
            state = self.states[0]
            program = self.programs[0]
            # Shapes of a step's gradients: of one microbatch alone, in the precision of the
            # computation.
            products = jnp.float32 if self.accumulates else self.model.dtype
            self.sums: Sums = jax.tree.map(
                lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
                jax.eval_shape(partial(program.zero_sums, products)),
                program.sums_shardings,
            )
            jit = partial(
                CachedProgram, context, self.mesh, compiler_options=compiler_options or None
            )
            self.update_whole = jit(
                self._update_whole,
                out_shardings=(
                    state.shardings,
                    program.sums_shardings if self.accumulates else None,
                    on_all,
                ),
                # else gradients take the place of no output
                donate_argnums=(0, 1) if self.accumulates else 0,
            )
            return
        self.updates = [
            jax.jit(
                partial(self._update_stage, n),
                out_shardings=(
                    state.shardings,
                    Sums(
                        jax.tree.map(lambda x: x.sharding, sums),
                        self.programs[n].sums_shardings.losses,
                    ),
                ),
                donate_argnums=(0, 1),
            )
            for n, (sums, state) in enumerate(zip(self._sums, self.states, strict=True))
        ]

    def _check_agreement(self) -> None:
        """Raise UserError where processes would walk other passes: they would wait for each other for ever."""
        stages = [
            (
                name,
                stage.description,
                mesh.shape_tuple,
                [device.id for device in mesh.devices.flat],
                rules,
            )
            for name, stage, mesh, rules, _ in self.stages
        ]
        # The order of passes is a function of these and of a step's microbatches, which its plan's
        # digest covers.
        if not coordination.all_equal(repr((stages, self.graph, self.schedule))):
            raise UserError(
                "the processes have different units, cuts or pipeline.schedule, or versions of mmjax, and would wait "
                "for each other for ever; start all with the same config",
                everywhere=True,
            )

    def _meet(self, x: Any) -> Any:
        """Wait for arrays, and for all processes, before a program on all devices: it would hold all of the threads."""
        self.passes.wait(x)
        if self.synchronous:
            self._meetings += 1
            coordination.wait_for_all(f"pipeline/{self._meetings}")
        return x

    def _own(self, number: int, params: Params) -> Params:
        """Return what a stage owns of its parameters."""
        return reduce(lambda part, shared: shared.owned(number, part), self.shared, params)

    # ----------------------------------------------------------------------------------------------
    # state

    @property
    def parameter_shardings(self) -> Params:
        """Return the sharding of every parameter, on its stage's mesh."""
        return reduce(merge, (all_parameters(state.shardings) for state in self.states))

    def init(self, key: jax.Array, params: Params | None = None) -> State:
        """Make the state of step 0. params: those that are not drawn, which lie as `parameter_shardings` says."""
        return self.from_parts([state.init(key, params or {}) for state in self.states])

    def parts(self, state: State) -> tuple[TrainState, ...]:
        """Return the state by stage, on its devices. What several have, such as counters, is the same in each."""
        return tuple(
            stage._replace(optimizer=self.optimizer.load(stage.optimizer)) for stage in state.stages
        )

    def parameters(self, state: State, evaluated: str = "trained") -> Params:
        """Return all parameters on the mesh of all devices, to evaluate with. evaluated: as of `TrainingConfig`."""
        trainable = state.trainable
        if evaluated == "average":
            averages = (self.optimizer.average(stage.optimizer) for stage in state.stages)
            trainable = reduce(merge, averages)
        params = merge(trainable, state.frozen)
        if self.is_one_stage:
            # An average may be divided over `data`.
            moved = evaluated == "average" and self.optimizer.config.over_data
            return jax.device_put(params, self.parameter_shardings) if moved else params
        self._walks += 1
        shardings = parameter_shardings(self.model, self.mesh, self.rules)
        return self._meet(move(params, shardings, (self._walks, "parameters")))

    def from_parts(self, parts: Sequence[TrainState]) -> State:
        """Return the state of these stages, with the copies of what several hold."""
        states = tuple(
            part._replace(optimizer=self.optimizer.store(part.optimizer, state.shardings.optimizer))
            for part, state in zip(parts, self.states, strict=True)
        )
        return State(states, self._copies(states))

    def _copies(
        self, states: Sequence[TrainState], copies: Sequence[Params] = ()
    ) -> tuple[Params, ...]:
        """Return what holders have of the owners' parameters. copies: of before; those that are frozen stay."""
        self._walks += 1
        united = {}
        if copies and self.copied:
            self._meet(states)
            pairs = zip(self.shared, copies, strict=True)
            earlier = {
                shared.holder: copy for shared, copy in pairs if shared.trained and shared.united
            }
            united = self.passes.wait(self.copied.spread(states, earlier))
        spread = []
        for n, shared in enumerate(self.shared):
            if copies and not shared.trained:
                spread.append(copies[n])
            elif shared.united and shared.holder in united:
                spread.append(united[shared.holder])
            else:
                spread.append(self.passes.wait(shared.spread(states, (self._walks, n))))
        return tuple(spread)

    def zeros(self) -> list[Sums | None]:
        """Make zero gradients and losses, by stage; None where no gradients are kept between steps."""
        if not self.accumulates:
            return [None]
        return [
            program.zeros() if local else Sums({}, None)
            for local, program in zip(self.local, self.programs, strict=True)
        ]

    # ----------------------------------------------------------------------------------------------
    # a step

    def put(self, batch: Microbatch, number: int | None = None) -> StagedBatch:
        """Bring a packed microbatch to the devices: to each stage what its towers take, of this process's ranks.

        number: of the microbatch in its step, of which one copy of an encoder takes the items;
        None: all copies do.
        """
        if self.is_one_stage:
            return (put_local_rows(batch, self.mesh, self.rules),)
        return put_batch(self.stages, batch, self.rows, number)

    def step(
        self,
        state: State,
        sums: list[Sums],
        batches: Sequence[StagedBatch],
        hyper: Hyperparameters,
        process_report: ProcessReport | None = None,
        noise: np.ndarray | None = None,
    ) -> tuple[State, list[Sums], StepReport]:
        """Update once from microbatches that lie on the devices. `sums` are `zeros()` before and after.

        process_report: of this process, for the others. noise: uint32 (seed, step) of dropout;
        None: none is. Nothing is updated, and the step does not count, where processes differ in
        the digest of its plan, where loss or gradient are not finite, where no token of the step
        has a loss weight, or where more samples are unreadable than may be left out.
        """
        weighed = self.weigh_batches(batches, process_report)
        noise = noise if self.model.is_random else None
        gradients = self.gradients(state, sums, weighed.batches, weighed.weights, noise)
        return self._update(state, gradients, hyper, weighed)

    def weigh_batches(
        self, batches: Sequence[StagedBatch], process_report: ProcessReport | None = None
    ) -> WeighedBatches:
        """Add up the weights of a step's losses, without the samples that any process could not read."""
        reports = put_report(process_report or ProcessReport(), self.mesh)
        self._meet(
            [array for batch in batches for part in batch for array in jax.tree.leaves(part)]
        )
        unreadable = self.passes.wait(self.merge_unreadable(reports.unreadable))
        totals = loss_weights(self.model.config, np.float32(0))
        weighed = [list(batch) for batch in batches]
        for number in self.settle.loss_devices:
            if not self.local[number]:
                continue  # the stage's processes weigh
            # Replicated on all devices, so each of the stage's has a copy: nothing is sent.
            on_stage = tuple(view(x, replicated(self.stages[number].mesh)) for x in unreadable)
            for batch in weighed:
                totals, batch[number] = self.programs[number].weigh(totals, batch[number], on_stage)
        return WeighedBatches([tuple(batch) for batch in weighed], totals, reports, unreadable)

    def gradients(
        self,
        state: State,
        sums: Sequence[Sums],
        batches: Sequence[StagedBatch | None],
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> Gradients:
        """Add up the gradients of a step's microbatches, but those that are None; donates `sums`.

        weights: as `weigh_batches` returns them.
        """
        self._walks += 1
        parameters = [self._parameters(state, number) for number in range(len(self.stages))]
        run = self.passes.run(parameters, sums, batches, weights, noise, self._walks)
        for n, shared in enumerate(self.shared):
            shared.gather(run.sums, self.local, (self._walks, n), self.passes.wait)
        if self.copied:
            self._meet([sums.gradients for sums in run.sums])
            self.copied.gather(run.sums)
            self.passes.wait([sums.gradients for sums in run.sums])
        return run

    def _parameters(self, state: State, number: int) -> tuple[Params, Params]:
        """Return a stage's trainable and frozen parameters, with its copies of what others own."""
        parameters = state.stages[number].trainable, state.stages[number].frozen
        for shared, copy in zip(self.shared, state.copies, strict=True):
            parameters = shared.with_copy(number, parameters, copy)
        return parameters

    def _update(
        self, state: State, gradients: Gradients, hyper: Hyperparameters, weighed: WeighedBatches
    ) -> tuple[State, list[Sums | None], StepReport]:
        """Update every stage, or none, from a step's gradients."""
        if self.is_one_stage:
            arguments = weighed.weights, weighed.reports, weighed.unreadable
            updated, cleared, report = self.update_whole(
                state.stages[0], gradients.sums[0], hyper, *arguments
            )
            return State((updated,)), [cleared], report
        report, valid = self.settle(gradients, weighed, hyper)
        states, sums = [], []
        for number, mesh in enumerate(self.meshes):
            if not self.local[number]:
                states.append(state.stages[number])
                sums.append(Sums({}, None))
                continue
            # Both are on all devices already: the update of a stage waits for no other stage's.
            norm, may = (view(x, replicated(mesh)) for x in (report.gradient_norm, valid))
            new, cleared = self.passes.wait(
                self.updates[number](
                    state.stages[number], gradients.sums[number].gradients, hyper, norm, may
                )
            )
            states.append(new)
            for shared in self.shared:
                cleared = shared.with_zeros(number, cleared)
            sums.append(cleared)
        updated = any(shared.trained for shared in self.shared)
        copies = self._copies(states, state.copies) if updated else state.copies
        return State(tuple(states), copies), sums, report

    def _update_whole(
        self,
        state: TrainState,
        accumulated: Sums,
        hyper: Hyperparameters,
        weights: Mapping[str, jax.Array],
        reports: ProcessReport,
        unreadable: UnreadableSamples,
    ) -> tuple[TrainState, Sums | None, StepReport]:
        def settle(norm: jax.Array) -> tuple[jax.Array, StepReport]:
            report = report_step(accumulated.losses, norm, reports, unreadable)
            return is_valid(report, sum(weights.values())), report

        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), accumulated.gradients)
        clear = partial(jax.tree.map, jnp.zeros_like, accumulated if self.accumulates else None)
        return self.states[0].update(state, gradients, hyper, settle, clear)

    def _update_stage(
        self,
        number: int,
        state: TrainState,
        gradients: Params,
        hyper: Hyperparameters,
        norm: Any,
        valid: Any,
    ) -> tuple[TrainState, Sums]:
        sums = Sums(self._sums[number], self.programs[number].sums.losses)
        clear = partial(zeros_like, sums)
        return self.states[number].update(
            state, gradients, hyper, lambda norm: (valid, None), clear, norm
        )[:2]

    def find_bad(
        self,
        state: Any,
        batches: Sequence[Any],
        hyper: Hyperparameters,
        noise: np.ndarray | None,
        unreadable: Sequence[int],
    ) -> list[int]:
        """Return the ids of the samples in rows whose gradient is not finite; empty where no rows alone have such.

        batches: as `put` made them. unreadable: samples of the step that were left out.
        """
        weighed = self.weigh_batches(batches, ProcessReport(unreadable=unreadable))
        samples: list[int] = []
        for number, batch in enumerate(weighed.batches):
            owner = self._owners(batch)
            numbers = np.arange(len(owner))
            # Alone, at its place: another copy of an encoder has not its items.
            single = weighed._replace(
                batches=[batch if n == number else None for n in range(len(batches))]
            )

            def bad(
                rows: list[int], single: WeighedBatches = single, numbers: np.ndarray = numbers
            ) -> bool:
                return not self._is_finite(state, single, np.isin(numbers, rows), hyper, noise)

            rows = bisect_bad(numbers.tolist(), bad, MAX_TRIALS)
            samples += np.unique(owner[rows][owner[rows] >= 0]).tolist()
        return samples

    def _owners(self, batch: StagedBatch) -> np.ndarray:
        """Return every token's sample, of all rows on all processes."""
        last = self._loss_of_text
        # Every process bisects the same rows, so each needs the samples of all.
        owner = batch[last].text.owner
        if self.is_one_stage:
            return np.asarray(self._replicate(owner))
        if not self.local[last]:
            owner = without_shards(
                owner, tokens_sharding(self.stages[last].mesh, self.stages[last].rules)
            )
        self._walks += 1
        return np.asarray(
            self._meet(move_array(owner, replicated(self.mesh), (self._walks, "owners")))
        )

    def _is_finite(
        self,
        state: State,
        weighed: WeighedBatches,
        rows: np.ndarray,
        hyper: Hyperparameters,
        noise: np.ndarray | None,
    ) -> bool:
        """Return whether the gradients of these rows, bool `[R]`, of the microbatch that is not None are finite."""
        batch = next(batch for batch in weighed.batches if batch is not None)
        owners = self._owners(batch)
        isolated = tuple(
            isolate_rows(part, owners, rows) if local else part
            for local, part in zip(self.local, batch, strict=True)
        )
        single = [None if batch is None else isolated for batch in weighed.batches]
        noise = noise if self.model.is_random else None
        gradients = self.gradients(state, self.zeros(), single, weighed.weights, noise)
        report, _ = self.settle(gradients, weighed, hyper)
        return bool(report.finite)

    def compile(
        self, state: State, batches: Sequence[Microbatch], hyper: Hyperparameters
    ) -> list[Sums | None]:
        """Compile all programs for batches of these shapes ahead of the first step; return `zeros()`.

        In a pipeline later programs depend on where earlier ones leave residuals: the passes of two
        microbatches run.
        """
        # A model that drops nothing takes no noise: there is then one program, whether a step is
        # given any or not.
        noise = np.zeros(2, np.uint32) if self.model.is_random else None
        if self.is_one_stage:
            part = state.stages[0]
            sums = self.sums if self.accumulates else None
            for batch in batches:
                put = self.put(batch)
                # Twice, since the first total is a number and each later one an array: two programs
                # of `weigh`.
                weighed = self.weigh_batches([put, put])
                arguments = (
                    part.trainable,
                    part.frozen,
                    sums,
                    *weighed.batches[0],
                    weighed.weights,
                    noise,
                    {},
                )
                check_ram(
                    self.programs[0].forward_backward.compile(*arguments),
                    self.mesh.local_devices[0],
                )
            self.update_whole.compile(
                part, self.sums, hyper, weighed.weights, weighed.reports, weighed.unreadable
            )
            self.parts(state)  # moments in host memory are loaded by programs of their own
            return self.zeros()
        # Twice through each copy, since sums of a first microbatch and of a later one are two
        # programs.
        count = 2 * max(placed.copy[1] for placed in self.stages)
        for batch in batches:
            put = self.put(batch)
            weighed = self.weigh_batches([put] * count)
            gradients = self.gradients(state, self.zeros(), weighed.batches, weighed.weights, noise)
        # The update is lowered and not run, which would give the state's buffers away.
        self.settle(gradients, weighed, hyper)
        for number, mesh in enumerate(self.meshes):
            if not self.local[number]:
                continue
            scalars = (
                jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))
                for dtype in (jnp.float32, jnp.bool)
            )
            self.updates[number].lower(
                state.stages[number], gradients.sums[number].gradients, hyper, *scalars
            ).compile()
        self.parts(state)  # moments in host memory are loaded by programs of their own
        trained = [shared for shared in self.shared if shared.trained]
        for shared in trained:
            if self.local[shared.holder]:
                shared.with_zeros(shared.holder, gradients.sums[shared.holder])
        if trained:
            self._copies(state.stages, state.copies)
        return self.zeros()
