"""Compile and run the SPMD programs of a step: accumulate gradients microbatch by microbatch, then update once.

One gradient program per shape and one update program. Microbatches are a Python loop over donated buffers, so the
microbatches of a step may differ in shape and their number compiles nothing. Where steps are planned with one
microbatch, its gradients go straight to the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.batch import Microbatch
from mmjax.config import CrossEntropy, Exchange, LossConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, merge
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import ShardingRules, replicated
from mmjax.runtime.device_batch import (
    ProcessReport,
    bisect_bad,
    isolate_rows,
    merge_unreadable,
    put_local_rows,
    put_report,
)
from mmjax.runtime.devices import check_ram
from mmjax.runtime.losses import Losses
from mmjax.runtime.objectives import TextObjective
from mmjax.runtime.program_cache import CachedProgram
from mmjax.runtime.stage_program import StageProgram, Sums
from mmjax.runtime.stage_state import StageState
from mmjax.runtime.state import Hyperparameters, Optimizer, TrainState, all_parameters

MAX_TRIALS = 64  # of rows of a microbatch whose gradients may not be finite


class StepReport(NamedTuple):
    """Report one update, the same on every process."""

    losses: Losses
    gradient_norm: jax.Array  # float32 []: before clipping
    agreed: jax.Array  # bool []: every process had planned the same step; where not, nothing was updated
    finite: jax.Array  # bool []: loss and gradient are; where not, nothing was updated
    stop: jax.Array  # bool []: some process requests a stop
    content: jax.Array  # uint32 [2]: the hash of all rows, its lower half first
    needed_flops: jax.Array  # float32 []: of all processes' rows
    batch_seconds: jax.Array  # float32 [devices]: of each device's process
    unreadable: jax.Array  # int32 [MAX_UNREADABLE]: ids of the samples that some process could not read, -1 = none
    unreadable_count: jax.Array  # int32 []: where it is more than MAX_UNREADABLE nothing was updated

    @property
    def mean_loss(self) -> float:
        """Return the loss of a token by weight, 0 where there is none; of a report on the host."""
        return float(self.losses.loss.sum() / (self.losses.weight.sum() or 1.0))


def check_updated(step: int, report: StepReport) -> None:
    """Raise UserError where a step has updated nothing: its batch differs by process, or has no loss weight."""
    if not report.agreed:
        raise UserError(
            f"the processes planned different batches for step {step + 1}, so nothing was updated: they do not see "
            "the same data, config or version of mmjax; make them the same and go on with --resume",
            everywhere=True,
        )
    losses = report.losses
    if not losses.weight.sum() > 0 and not any(patches > 0 for _, patches in losses.images.values()):
        raise UserError(
            f"no token of step {step + 1} has a loss weight, so there is nothing to learn from; give the answers "
            "in its samples a weight above 0 (Text.weights)",
            everywhere=True,
        )


def loss_weights(model: ModelConfig, llm: Any, patches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the divisors of a step's losses: the LLM's weight, and generators' patches (default: as many)."""
    return {"llm": llm} | {name: llm if patches is None else patches[name] for name in model.generators}


class Runner:
    """Run the steps of a model whose state lies by stage: what both executors have in common.

    States, gradient sums and batches on devices are an executor's own types.
    """

    synchronous = False  # whether `step` returns when it is done

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        mesh: Mesh,
        rules: ShardingRules,
        states: Sequence[StageState],
    ) -> None:
        """mesh: of all devices."""
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.rules = rules
        self.states = tuple(states)
        self.per_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.merge_unreadable = jax.jit(merge_unreadable, out_shardings=replicated(mesh))

    @property
    def abstract_parts(self) -> tuple[TrainState, ...]:
        """Return shapes, dtypes and shardings of `parts`."""
        return tuple(state.abstract for state in self.states)

    @property
    def parameter_shardings(self) -> Params:
        """Return the sharding of every parameter, on its stage's mesh."""
        return reduce(merge, (all_parameters(state.shardings) for state in self.states))

    def init(self, key: jax.Array, params: Params | None = None) -> Any:
        """Make the state of step 0. params: those that are not drawn, which lie as `parameter_shardings` says."""
        return self.from_parts([state.init(key, params or {}) for state in self.states])

    def put_report(self, report: ProcessReport) -> ProcessReport:
        """Put this process's report on each of its devices: every field becomes an array `[devices, ...]`."""
        return put_report(report, self.mesh)

    def find_bad(
        self, state: Any, batches: Sequence[Any], noise: np.ndarray | None, unreadable: Sequence[int]
    ) -> list[int]:
        """Return the ids of the samples in rows whose gradient is not finite; empty where no rows alone have such.

        batches: as `put` made them. unreadable: samples of the step that were left out.
        """
        reports = self.put_report(ProcessReport(unreadable=unreadable))
        weights, batches, _ = self.weigh_batches(batches, reports)
        samples: list[int] = []
        for batch in batches:
            owner = self.owners(batch)
            numbers = np.arange(len(owner))

            def bad(rows: list[int], batch: Any = batch, numbers: np.ndarray = numbers) -> bool:
                return not self.is_finite(state, batch, np.isin(numbers, rows), weights, noise)

            rows = bisect_bad(numbers.tolist(), bad, MAX_TRIALS)
            samples += np.unique(owner[rows][owner[rows] >= 0]).tolist()
        return samples


def report_step(
    losses: Losses, norm: jax.Array, reports: ProcessReport, unreadable: tuple[jax.Array, jax.Array]
) -> StepReport:
    """Report a step from its losses, the gradient norm, and what every process reports of it."""
    digests = reports.digest
    return StepReport(
        losses=losses,
        gradient_norm=norm,
        agreed=jnp.all(digests.min(0) == digests.max(0)),
        finite=jnp.isfinite(norm) & jnp.isfinite(losses.loss).all(),
        stop=reports.stop.any(),
        content=reports.content.sum(0, dtype=jnp.uint32),
        needed_flops=reports.needed_flops.sum(),
        batch_seconds=reports.batch_seconds,
        unreadable=unreadable[0],
        unreadable_count=unreadable[1],
    )


def is_valid(report: StepReport, weight: jax.Array) -> jax.Array:
    """Return whether a step may update the parameters. weight: of its losses."""
    return report.agreed & (weight > 0) & report.finite


class Executor(Runner):
    """Runs a model on one mesh: init, gradient and update programs with explicit shardings."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        sources: int,
        exchange: Exchange = "padded",
        loss_chunks: int = 1,
        loss: LossConfig = CrossEntropy(),
        accumulates: bool = True,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        """accumulates: False where steps are planned with one microbatch, so that no gradients are kept between them.

        A step that must have more all the same adds them up in the precision of the computation, for want of memory.
        """
        self.sources = sources
        self.exchange = exchange
        self.objective = TextObjective.of(model, loss, loss_chunks)
        self.program = program = StageProgram(
            Stage.whole(model), mesh, rules, self.objective, sources=sources, exchange=exchange, reduces_once=False
        )
        closed_over = (model.description, optimizer.config, rules, sources, exchange, loss, loss_chunks, accumulates)
        context = None if None in closed_over[:2] else repr(closed_over)
        self.state = StageState(program, optimizer, context=context)
        super().__init__(model, optimizer, mesh, rules, [self.state])
        self.abstract, self.shardings = self.state.abstract, self.state.shardings
        self.zero_sums, self.sums_shardings = program.zero_sums, program.sums_shardings
        self.accumulates = accumulates
        self.zeros = program.zeros if accumulates else lambda: None
        # Shapes of a step's gradients: of one microbatch alone, in the precision of the computation.
        sums = jax.eval_shape(partial(self.zero_sums, jnp.float32 if accumulates else model.dtype))
        self.sums: Sums = jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), sums, self.sums_shardings
        )
        self.accumulated = self.sums if accumulates else None  # of those that a microbatch's are added to
        jit = partial(CachedProgram, context, mesh, compiler_options=compiler_options or None)
        self.accumulate = jit(self._accumulate, out_shardings=self.sums_shardings, donate_argnums=2)
        # Of rows whose gradients are looked for after a step that was not finite.
        self._replicate = jax.jit(lambda x: x, out_shardings=replicated(mesh))
        self._are_finite = jax.jit(are_finite, out_shardings=replicated(mesh))
        cleared = self.sums_shardings if accumulates else None
        donated = (0, 1) if accumulates else 0  # gradients of one microbatch take the place of no output
        outputs = self.shardings, cleared, replicated(mesh)
        self.update = jit(self._update, out_shardings=outputs, donate_argnums=donated)

    def _accumulate(
        self,
        trainable: Params,
        frozen: Params,
        accumulated: Sums | None,
        batch: Microbatch,
        weights: Mapping[str, jax.Array],
        noise: jax.Array | None = None,
    ) -> Sums:
        return self.program.add_gradients(trainable, frozen, accumulated, batch, weights, noise)[0]

    def _update(
        self,
        state: TrainState,
        accumulated: Sums,
        hyper: Hyperparameters,
        weights: Mapping[str, jax.Array],
        reports: ProcessReport,
        unreadable: tuple[jax.Array, jax.Array],
    ) -> tuple[TrainState, Sums | None, StepReport]:
        def settle(norm: jax.Array) -> tuple[jax.Array, StepReport]:
            report = report_step(accumulated.losses, norm, reports, unreadable)
            return is_valid(report, sum(weights.values())), report

        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), accumulated.gradients)
        clear = partial(jax.tree.map, jnp.zeros_like, accumulated if self.accumulates else None)
        return self.state.update(state, gradients, hyper, settle, clear)

    def put(self, batch: Microbatch) -> Microbatch:
        """Bring a packed microbatch to the devices: the rows of this process's ranks, as many for each rank."""
        return put_local_rows(batch, self.mesh, self.rules)

    def step(
        self,
        state: TrainState,
        accumulated: Sums | None,
        batches: Sequence[Microbatch],
        hyper: Hyperparameters,
        process_report: ProcessReport | None = None,
        noise: np.ndarray | None = None,
    ) -> tuple[TrainState, Sums | None, StepReport]:
        """Update once from microbatches that lie on the devices. `accumulated` is `zeros()` before and after.

        process_report: of this process, for the others. noise: uint32 (seed, step) of dropout; None: none is. Nothing
        is updated, and the step does not count, where processes differ in the digest of its plan, where loss or
        gradient are not finite, where no token of the step has a loss weight, or where more samples are unreadable than
        may be left out.
        """
        reports = self.put_report(process_report or ProcessReport())
        weight, batches, unreadable = self.weigh_batches(batches, reports)
        for batch in batches:
            accumulated = self.accumulate(
                state.trainable, state.frozen, accumulated, batch, weight, noise if self.model.is_random else None
            )
        return self.update(state, accumulated, hyper, weight, reports, unreadable)

    def weigh_batches(
        self, batches: Sequence[Microbatch], reports: ProcessReport
    ) -> tuple[dict[str, jax.Array], list[Microbatch], tuple[jax.Array, jax.Array]]:
        """Return the weights of a step's losses, and its microbatches with weight 0 where a sample is unreadable.

        The weights are of the LLM's tokens, and by name of generators' patches. Also returns the ids and the number of
        the samples that any process could not read. reports: of all processes, on the devices.
        """
        unreadable = self.merge_unreadable(reports.unreadable)
        totals = loss_weights(self.model.config, np.float32(0))
        weighed = []
        for batch in batches:
            totals, batch = self.program.weigh(totals, batch, unreadable)
            weighed.append(batch)
        return totals, weighed, unreadable

    def parts(self, state: TrainState) -> tuple[TrainState, ...]:
        """Return the state by mesh, on the devices, with names of its own in every part: here there is one."""
        return (state._replace(optimizer=self.optimizer.load(state.optimizer)),)

    def from_parts(self, parts: Sequence[TrainState]) -> TrainState:
        """Return the state of these parts."""
        (state,) = parts
        return state._replace(optimizer=self.optimizer.store(state.optimizer, self.shardings.optimizer))

    def parameters(self, state: TrainState) -> Params:
        """Return all parameters on the mesh, to evaluate with."""
        return all_parameters(state)

    def owners(self, batch: Microbatch) -> np.ndarray:
        """Return every token's sample, of all rows on all processes."""
        return np.asarray(self._replicate(batch.text.owner))

    def is_finite(
        self,
        state: TrainState,
        batch: Microbatch,
        rows: np.ndarray,
        weight: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> bool:
        """Return whether the gradients of these rows, bool `[R]`, are finite; `weigh_batches` returned `batch`."""
        isolated = isolate_rows(batch, batch.text.owner, rows)
        noise = noise if self.model.is_random else None
        sums = self.accumulate(state.trainable, state.frozen, self.zeros(), isolated, weight, noise)
        return bool(self._are_finite(sums.gradients))

    def compile(self, state: TrainState, batches: Sequence[Microbatch], hyper: Hyperparameters) -> Sums | None:
        """Compile the gradient program of each batch's shape and the update, ahead of the first step.

        Returns `zeros()`.
        """
        # A model that drops nothing takes no noise: there is then one program, whether a step is given any or not.
        noise = np.zeros(2, np.uint32) if self.model.is_random else None
        reports = self.put_report(ProcessReport())
        for batch in batches:
            put = self.put(batch)
            # Twice, since the first total is a number and each later one an array: two programs of `weigh`.
            weight, (put, _), unreadable = self.weigh_batches([put, put], reports)
            program = self.accumulate.compile(state.trainable, state.frozen, self.accumulated, put, weight, noise)
            check_ram(program, self.mesh.local_devices[0])
        self.update.compile(state, self.sums, hyper, weight, reports, unreadable)
        self.parts(state)  # moments in host memory are loaded by programs of their own
        return self.zeros()


def are_finite(gradients: Params) -> jax.Array:
    """Return whether all gradients are finite."""
    return jnp.isfinite(optax.tree.norm(gradients))
