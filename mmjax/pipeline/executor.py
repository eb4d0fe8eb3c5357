"""Run a training step as a pipeline: stages on their own meshes, driven in one order that all processes walk.

Backpropagation is exact: gradients are those of the one-program step (`runtime.step`), up to the order of float32
sums. Microbatches accumulate in float32 on each stage; the step's norm, report and validity come from one small program
on all devices, so that either every stage updates or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mmjax.batch import Microbatch
from mmjax.config import CrossEntropy, Exchange, LossConfig
from mmjax.config.training import Carrier
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, merge
from mmjax.parallel.sharding import AXES, ShardingRules, replicated, tokens_sharding, without_shards
from mmjax.pipeline.passes import Gradients, Passes, PlacedStage, StagedBatch
from mmjax.pipeline.shared import add_on_mesh, tied_table
from mmjax.pipeline.transfer import move, move_array, open_carrier, view
from mmjax.pipeline.units import put_batch
from mmjax.planning.schedules import ScheduleName
from mmjax.runtime.device_batch import ProcessReport, TowerRows, isolate_rows
from mmjax.runtime.losses import Losses
from mmjax.runtime.objectives import TextObjective
from mmjax.runtime.stage_program import Sums, zeros_like
from mmjax.runtime.stage_state import StageState
from mmjax.runtime.state import Hyperparameters, Optimizer, TrainState, all_parameters, parameter_shardings
from mmjax.runtime.step import Runner, StepReport, is_valid, loss_weights, report_step


class PipelineState(NamedTuple):
    """State between steps, by stage, and the copies of `SharedParameters`."""

    stages: tuple[TrainState, ...]
    copies: tuple[Params, ...]


class PipelineExecutor(Runner):
    """Runs a model on several meshes, with the interface of `runtime.step.Executor`."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        stages: Sequence[PlacedStage],
        rules: ShardingRules,
        *,
        sources: int,
        schedule: ScheduleName = "1f1b",
        carrier: Carrier = "auto",
        exchange: Exchange = "padded",
        loss: LossConfig = CrossEntropy(),
        loss_chunks: int = 1,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
        rows: Mapping[str, TowerRows] | None = None,
    ) -> None:
        """rows: which of each tower's rows this process packs; None: all."""
        self.rows = rows
        self.stages = tuple(stages)
        self.schedule = schedule
        self.loss = loss
        self.loss_chunks = loss_chunks
        self.passes = Passes(
            stages,
            schedule,
            rules,
            sources=sources,
            exchange=exchange,
            objective=TextObjective(model, loss, loss_chunks),
            compiler_options=compiler_options,
        )
        self.programs = self.passes.programs
        self.graph = self.passes.graph
        self.local = self.passes.local
        self.synchronous = self.passes.synchronous
        meshes = list(dict.fromkeys(placed.mesh for placed in stages))
        # Of all devices, for what the whole step agrees on.
        devices = np.concatenate([mesh.devices.reshape(-1) for mesh in meshes])
        mesh = Mesh(devices.reshape(1, -1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self.shared = tied_table([placed.stage for placed in stages], self.programs)
        states = [StageState(program, optimizer, partial(self._own, n)) for n, program in enumerate(self.programs)]
        super().__init__(model, optimizer, mesh, rules, states)
        self._meetings = 0
        if coordination.count() > 1:
            self._check_agreement()
            open_carrier(carrier, devices[0].platform)
        # Both sides of a transfer derive its number from this count, so no process may walk the passes alone.
        self._walks = 0  # of all processes alike: it names their transfers
        # What is replicated on a mesh counts once, by its first device.
        firsts = {mesh.devices.flat[0] for mesh in meshes}
        self._counts = np.array([device in firsts for device in devices], np.float32)
        # The stages that make the losses, by tower, and the number of a device of each.
        self._losses = {tower: n for n, placed in enumerate(stages) for tower in placed.stage.losses}
        numbers = {device: number for number, device in enumerate(devices)}
        self._loss_devices = {n: numbers[stages[n].mesh.devices.flat[0]] for n in self._losses.values()}

        self._sums = [self._own(n, program.sums.gradients) for n, program in enumerate(self.programs)]
        self._jit_step_programs()

    def _jit_step_programs(self) -> None:
        """Jit the programs of the whole step, on the last stage's mesh or on all devices, and every stage's update."""
        self._squares = [jax.jit(_square_norm, out_shardings=replicated(placed.mesh)) for placed in self.stages]
        self._settle = jax.jit(self._settle_step, out_shardings=replicated(self.mesh))
        self.updates = [
            jax.jit(
                partial(self._update_stage, n),
                out_shardings=(state.shardings, Sums(shardings_of(sums), self.programs[n].sums_shardings.losses)),
                donate_argnums=(0, 1),
            )
            for n, (sums, state) in enumerate(zip(self._sums, self.states, strict=True))
        ]

    def _check_agreement(self) -> None:
        """Raise UserError where processes would walk other passes: they would wait for each other for ever."""
        stages = [
            (name, stage.description, mesh.shape_tuple, [device.id for device in mesh.devices.flat])
            for name, stage, mesh in self.stages
        ]
        # The order of passes is a function of these and of a step's microbatches, which its plan's digest covers.
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

    # ------------------------------------------------------------------------------------------------------ state

    def parts(self, state: PipelineState) -> tuple[TrainState, ...]:
        """Return the state by stage, on its devices. What several have, such as counters, is the same in each."""
        return tuple(stage._replace(optimizer=self.optimizer.load(stage.optimizer)) for stage in state.stages)

    def parameters(self, state: PipelineState) -> Params:
        """Return all parameters on the mesh of all devices, to evaluate with."""
        params = reduce(merge, map(all_parameters, state.stages))
        self._walks += 1
        shardings = parameter_shardings(self.model, self.mesh, self.rules)
        return self._meet(move(params, shardings, (self._walks, "parameters")))

    def from_parts(self, parts: Sequence[TrainState]) -> PipelineState:
        """Return the state of these stages, with the copies of what several hold."""
        states = tuple(
            part._replace(optimizer=self.optimizer.store(part.optimizer, state.shardings.optimizer))
            for part, state in zip(parts, self.states, strict=True)
        )
        return PipelineState(states, self._copies(states))

    def _copies(self, states: Sequence[TrainState]) -> tuple[Params, ...]:
        self._walks += 1
        return tuple(self.passes.wait(shared.spread(states, (self._walks,))) for shared in self.shared)

    def zeros(self) -> list[Sums]:
        """Make zero gradients and losses, by stage."""
        return [
            program.zeros() if local else Sums({}, None)
            for local, program in zip(self.local, self.programs, strict=True)
        ]

    # ----------------------------------------------------------------------------------------------------- a step

    def put(self, batch: Microbatch) -> StagedBatch:
        """Bring a packed microbatch to the devices: to each stage what its tower takes."""
        return put_batch(self.stages, batch, self.rows, self.rules)

    def step(
        self,
        state: PipelineState,
        sums: list[Sums],
        batches: Sequence[StagedBatch],
        hyper: Hyperparameters,
        process_report: ProcessReport | None = None,
        noise: np.ndarray | None = None,
    ) -> tuple[PipelineState, list[Sums], StepReport]:
        """Update once, as `runtime.step.Executor.step`. `sums` are `zeros()` before and after."""
        reports = self.put_report(process_report or ProcessReport())
        weights, batches, unreadable = self.weigh_batches(batches, reports)
        gradients = self.gradients(state, sums, batches, weights, noise if self.model.is_random else None)
        return self.update(state, gradients, hyper, reports, unreadable)

    def weigh_batches(
        self, batches: Sequence[StagedBatch], reports: ProcessReport
    ) -> tuple[dict[str, jax.Array], list[StagedBatch], tuple[jax.Array, jax.Array]]:
        """Return a step's loss weights by tower, and its microbatches without what could not be read.

        As `runtime.step.Executor`, with each weight on the stage that makes the loss.
        """
        self._meet([array for batch in batches for part in batch for array in jax.tree.leaves(part)])
        unreadable = self.passes.wait(self.merge_unreadable(reports.unreadable))
        totals = loss_weights(self.model.config, np.float32(0))
        weighed = [list(batch) for batch in batches]
        for number in self._loss_devices:
            if not self.local[number]:
                continue  # the stage's processes weigh
            # Replicated on all devices, so each of the stage's has a copy: nothing is sent.
            on_stage = tuple(view(x, replicated(self.stages[number].mesh)) for x in unreadable)
            for batch in weighed:
                totals, batch[number] = self.programs[number].weigh(totals, batch[number], on_stage)
        return totals, [tuple(batch) for batch in weighed], unreadable

    def gradients(
        self,
        state: PipelineState,
        sums: Sequence[Sums],
        batches: Sequence[StagedBatch],
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> Gradients:
        """Add up the gradients of a step's microbatches; donates `sums`. weights: as `weigh_batches` returns them."""
        self._walks += 1
        parameters = [self._parameters(state, number) for number in range(len(self.stages))]
        run = self.passes.run(parameters, sums, batches, weights, noise, self._walks)
        for shared in self.shared:
            shared.gather(run.sums, self.local, (self._walks,), self.passes.wait)
        return run

    def _parameters(self, state: PipelineState, number: int) -> tuple[Params, Params]:
        """Return a stage's trainable and frozen parameters, with its copies of what others own."""
        parameters = state.stages[number].trainable, state.stages[number].frozen
        for shared, copy in zip(self.shared, state.copies, strict=True):
            parameters = shared.with_copy(number, parameters, copy)
        return parameters

    def update(
        self,
        state: PipelineState,
        gradients: Gradients,
        hyper: Hyperparameters,
        reports: ProcessReport,
        unreadable: tuple[jax.Array, jax.Array],
    ) -> tuple[PipelineState, list[Sums], StepReport]:
        """Update every stage, or none, from a step's gradients."""
        report, valid = self._settle_gradients(gradients, reports, unreadable)
        states, sums = [], []
        for number, (_, _, mesh) in enumerate(self.stages):
            if not self.local[number]:
                states.append(state.stages[number])
                sums.append(Sums({}, None))
                continue
            # Both are on all devices already: the update of a stage waits for no other stage's.
            norm, may = (view(x, replicated(mesh)) for x in (report.gradient_norm, valid))
            new, cleared = self.passes.wait(
                self.updates[number](state.stages[number], gradients.sums[number].gradients, hyper, norm, may)
            )
            states.append(new)
            for shared in self.shared:
                cleared = shared.with_zeros(number, cleared)
            sums.append(cleared)
        updated = any(shared.trained for shared in self.shared)
        copies = self._copies(states) if updated else state.copies
        return PipelineState(tuple(states), copies), sums, report

    def _settle_gradients(
        self, gradients: Gradients, reports: ProcessReport, unreadable: tuple[jax.Array, jax.Array]
    ) -> tuple[StepReport, jax.Array]:
        """Report a step to all devices, and whether it may update."""
        # Squares of the stages that share a mesh are added up on it. A stage that another process has counts there.
        squares: dict[Mesh, jax.Array] = {}
        for (_, _, mesh), local, square, sums in zip(
            self.stages, self.local, self._squares, gradients.sums, strict=True
        ):
            if not local:
                continue
            norm = square(sums.gradients)
            squares[mesh] = add_on_mesh(squares[mesh], norm) if mesh in squares else self.passes.wait(norm)
        # The arrays of all meshes become one by the shards that devices have already.
        norms = self._on_all_devices(list(squares.values()), jax.ShapeDtypeStruct((1,), jnp.float32))
        losses = {}
        for number in self._loss_devices:
            parts = (gradients.sums[number].losses,) if self.local[number] else ()
            losses[number] = jax.tree.map(
                lambda s, *x: self._on_all_devices([y.reshape(-1) for y in x], s),
                self.programs[number].sums.losses,
                *parts,
            )
        return self.passes.wait(self._settle(*self._meet((norms, losses)), reports, unreadable))

    def _on_all_devices(self, parts: list[jax.Array], struct: jax.ShapeDtypeStruct) -> jax.Array:
        """Join arrays `[n]`, each replicated on some of the devices, to `[devices * n]`, with zeros on the others.

        struct: of n numbers.
        """
        shards = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
        zeros = np.zeros(struct.size, struct.dtype)
        local = [shards[d] if d in shards else jax.device_put(zeros, d) for d in self.mesh.local_devices]
        return jax.make_array_from_single_device_arrays((self.mesh.size * len(zeros),), self.per_device, local)

    def _settle_step(
        self,
        norms: jax.Array,
        losses: dict[int, Losses],
        reports: ProcessReport,
        unreadable: tuple[jax.Array, jax.Array],
    ) -> tuple[StepReport, jax.Array]:
        """Report the step, and whether it may update. norms: squares `[devices]`; losses: `[devices * n]` each."""
        norm = jnp.sqrt(jnp.sum(norms * self._counts))
        total = Losses()
        images: dict[str, jax.Array] = {}
        for number, device in self._loss_devices.items():
            # Only the devices of the stage that makes them have the losses.
            part = jax.tree.map(
                lambda x, struct, device=device: x.reshape(self.mesh.size, -1)[device].reshape(struct.shape),
                losses[number],
                self.programs[number].sums.losses,
            )
            images |= part.images
            total = part if part.loss is not None else total
        report = report_step(total._replace(images=images), norm, reports, unreadable)
        patches = sum(count for _, count in images.values())
        return report, is_valid(report, total.weight.sum() + patches)

    def _update_stage(
        self, number: int, state: TrainState, gradients: Params, hyper: Hyperparameters, norm: Any, valid: Any
    ) -> tuple[TrainState, Sums]:
        sums = Sums(self._sums[number], self.programs[number].sums.losses)
        clear = partial(zeros_like, sums)
        return self.states[number].update(state, gradients, hyper, lambda norm: (valid, None), clear, norm)[:2]

    def owners(self, batch: StagedBatch) -> np.ndarray:
        """Return every token's sample, of all rows."""
        last = self._losses["llm"]
        # Every process bisects the same rows, so each needs the samples of all.
        owner = batch[last].text.owner
        if not self.local[last]:
            owner = without_shards(owner, tokens_sharding(self.stages[last].mesh, self.rules))
        self._walks += 1
        return np.asarray(self._meet(move_array(owner, replicated(self.mesh), (self._walks, "owners"))))

    def is_finite(
        self,
        state: PipelineState,
        batch: StagedBatch,
        rows: np.ndarray,
        weight: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> bool:
        """Return whether the gradients of these rows, bool `[R]`, are finite; `weigh_batches` returned `batch`."""
        owners = self.owners(batch)
        isolated = tuple(
            isolate_rows(part, owners, rows) if local else part for local, part in zip(self.local, batch, strict=True)
        )
        gradients = self.gradients(state, self.zeros(), [isolated], weight, noise if self.model.is_random else None)
        report, _ = self._settle_gradients(gradients, self.put_report(ProcessReport()), self._none_unreadable())
        return bool(report.finite)

    def _none_unreadable(self) -> tuple[jax.Array, jax.Array]:
        return self.passes.wait(self.merge_unreadable(self._meet(self.put_report(ProcessReport()).unreadable)))

    def compile(self, state: PipelineState, batches: Sequence[Microbatch], hyper: Hyperparameters) -> list[Sums]:
        """Compile all programs ahead, by running the passes of two microbatches of each shape, and the update.

        Returns `zeros()`.
        """
        noise = np.zeros(2, np.uint32) if self.model.is_random else None
        reports = self.put_report(ProcessReport())
        for batch in batches:
            put = self.put(batch)
            # Twice, since sums of a first microbatch and of a later one are two programs.
            weights, weighed, unreadable = self.weigh_batches([put, put], reports)
            gradients = self.gradients(state, self.zeros(), weighed, weights, noise)
        # The update is lowered and not run, which would give the state's buffers away.
        self._settle_gradients(gradients, reports, unreadable)
        for number, (_, _, mesh) in enumerate(self.stages):
            if not self.local[number]:
                continue
            scalars = (jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh)) for dtype in (jnp.float32, jnp.bool))
            self.updates[number].lower(
                state.stages[number], gradients.sums[number].gradients, hyper, *scalars
            ).compile()
        self.parts(state)  # moments in host memory are loaded by programs of their own
        trained = [shared for shared in self.shared if shared.trained]
        for shared in trained:
            if self.local[shared.holder]:
                shared.with_zeros(shared.holder, gradients.sums[shared.holder])
        if trained:
            self._copies(state.stages)
        return self.zeros()


def shardings_of(structs: Any) -> Any:
    """Return where arrays of these shapes lie."""
    return jax.tree.map(lambda x: x.sharding, structs)


def _square_norm(sums: Params) -> jax.Array:
    """Compute the sum of squares of all gradients, float32 `[1]`."""
    return sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(sums)), jnp.float32(0)).reshape(1)
