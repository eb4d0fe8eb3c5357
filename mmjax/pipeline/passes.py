"""Run the passes of a step's microbatches through the stages, in one order that all processes walk.

Each process runs the passes of its own stages and takes part in the transfers that they need; of the others it knows
shapes alone.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import Exchange, LossConfig
from mmjax.models.layer_stacks import Params
from mmjax.models.model import merge, modules_of, partition
from mmjax.models.stage import Activations, Stage
from mmjax.parallel.sharding import ShardingRules, replicated
from mmjax.pipeline.stages import LossSums, Report, Residuals, StageProgram
from mmjax.pipeline.transfer import move_array, without_shards
from mmjax.planning.schedules import Action, ScheduleName, StageGraph, make_schedule
from mmjax.planning.simulate import total_order
from mmjax.runtime.losses import highest_losses


class PlacedStage(NamedTuple):
    """A stage on its devices. Stages of one worker share a mesh."""

    name: str
    stage: Stage
    mesh: Mesh


StagedBatch = tuple[TextBatch | ItemBatch, ...]  # by stage; of shapes alone where the stage is of other processes


def stage_graph(stages: Sequence[PlacedStage]) -> StageGraph:
    """Link every stage to those that take what it makes."""
    meshes = list(dict.fromkeys(placed.mesh for placed in stages))
    consumers = {name: number for number, placed in enumerate(stages) for name in placed.stage.inputs}
    produced = ((number, name) for number, placed in enumerate(stages) for name in placed.stage.outputs)
    # Of a deepstack, several arrays may go from one stage to another.
    edges = dict.fromkeys((number, consumers[name]) for number, name in produced if name in consumers)
    return StageGraph(tuple(edges), tuple(meshes.index(placed.mesh) for placed in stages))


def trained_activations(stages: Sequence[Stage]) -> frozenset[str]:
    """Name the activations that something trainable has part in: only of these a gradient is sent.

    stages: each behind those whose activations it takes.
    """
    trained: set[str] = set()
    for stage in stages:
        abstract = stage.select(stage.model.abstract)
        trainable = partition(abstract, stage.model.frozen & modules_of(abstract))[0]
        # A connector's tokens go to the LLM: what goes into the encoder's next layer is none of its making.
        connector = trainable.pop("connectors", {}) if stage.tower != "llm" else {}
        layers = bool(jax.tree.leaves(trainable))
        if stage.generates:
            # Layers attend the condition; what time makes of images depends on the generator alone.
            x, images, condition = stage.passed(stage.stop)
            condition_mlp = "condition_mlp" in trainable.get("generators", {}).get(stage.tower, {})
            conditioned = connector or condition_mlp or not trained.isdisjoint((stage.tower, stage.inputs[-1]))
            outputs = {x: layers or conditioned, images: layers, condition: conditioned}
            trained |= {name for name, is_trained in outputs.items() if is_trained}
        else:
            reached = layers or not trained.isdisjoint(stage.inputs)
            trained |= {name for name in stage.outputs if reached or (connector and name != stage.layers_output)}
    return frozenset(trained)


class Gradients:
    """One step's gradients on their way: what has arrived at every stage, and what is kept for backward."""

    def __init__(self, sums: Sequence[Params], step: int) -> None:
        self.sums = list(sums)  # by stage, float32
        self.step = step
        self.inputs: dict[tuple[int, int], Activations] = defaultdict(dict)  # by stage and microbatch, as the others
        self.input_shapes: dict[tuple[int, int], dict[str, tuple[tuple[int, ...], Any]]] = {}  # and dtypes
        self.output_gradients: dict[tuple[int, int], Activations] = defaultdict(dict)
        self.residuals: dict[tuple[int, int], Residuals] = {}
        self.reports: dict[int, Any] = {}  # of the losses, by the stage that makes each
        self.in_flight: Counter[int] = Counter()  # by stage: the most residuals at a time


class Passes:
    """The programs of all stages, and the order in which a step runs them."""

    def __init__(
        self,
        stages: Sequence[PlacedStage],
        schedule: ScheduleName,
        rules: ShardingRules,
        *,
        sources: int,
        exchange: Exchange,
        loss: LossConfig,
        loss_chunks: int,
        compiler_options: Mapping[str, bool | int | float | str] | None,
    ) -> None:
        self.stages = tuple(stages)
        self.graph = stage_graph(stages)
        self.order = lru_cache(lambda count: total_order(make_schedule(schedule, self.graph, count)))
        self.local = [any(d.process_index == jax.process_index() for d in s.mesh.devices.flat) for s in stages]
        self.synchronous = stages[0].mesh.devices.flat[0].platform == "cpu"
        # The one stage that takes an array, and the one that makes it, by the array's name.
        self.consumer = {name: n for n, placed in enumerate(stages) for name in placed.stage.inputs}
        self.producer = {name: n for n, placed in enumerate(stages) for name in placed.stage.outputs}
        trained = trained_activations([stages[number].stage for number in self.graph.topological])
        self.programs = [
            StageProgram(
                placed.stage,
                placed.mesh,
                rules,
                trained=trained,
                sources=sources,
                exchange=exchange,
                loss=loss,
                loss_chunks=loss_chunks,
                compiler_options=compiler_options,
            )
            for placed in stages
        ]
        self._merge_reports = {
            n: jax.jit(_merge_reports, out_shardings=replicated(placed.mesh), donate_argnums=0)
            for n, placed in enumerate(stages)
            if placed.stage.makes_loss
        }
        self._structs: dict[Any, dict[str, jax.ShapeDtypeStruct]] = {}  # of outputs by stage and shapes of inputs
        # This process's passes with the seconds of the wall clock at their start and end, where somebody wants them.
        self.times: list[tuple[Action, float, float]] | None = None
        self._waited = 0.0  # when arrays were last waited for
        # The pass at which this process is, its number in the step, and what it takes; for the watchdog.
        self._position: tuple[int, Action | None, Activations] = (0, None, {})

    def wait(self, x: Any) -> Any:
        """Wait for arrays on a CPU; elsewhere programs and transfers are queued.

        A CPU's programs have a pool of as many threads as there are devices, in no order: those on several meshes may
        each hold threads that another waits for. Goes when XLA's CPU client runs each device's programs in order.
        """
        if self.synchronous:
            jax.block_until_ready(x)
        self._waited = time.time()
        return x

    def run(
        self,
        parameters: Sequence[tuple[Params, Params]],
        sums: Sequence[Params],
        batches: Sequence[StagedBatch],
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
        step: int,
    ) -> Gradients:
        """Add up the gradients of a step's microbatches; donates `sums`.

        parameters: trainable and frozen ones, by stage. weights: of the step's losses, by tower, on the stage that
        makes each. step: names the step's transfers, by the same number in all processes.
        """
        run = Gradients(sums, step)
        for position, action in enumerate(self.order(len(batches))):
            number, batch = action.stage, batches[action.microbatch]
            arrivals = self._arrivals(run, action)
            self._position = (position, action, arrivals)
            timed = self.times is not None and self.local[number]
            if timed:
                self.wait(arrivals)  # a pass starts when it has its inputs
            start = self._waited
            if action.kind == "forward":
                self.forward(run, action, parameters[number], batch[number], weights, noise)
            else:
                self.backward(run, action, parameters[number], batch[number])
            if timed:
                self.times.append((action, start, self._waited))
        self._position = (len(self.order(len(batches))), None, {})
        for number, program in enumerate(self.programs):
            if self.local[number] and program.sums_by_rank:
                run.sums[number] = self.wait(program.reduce(run.sums[number]))
        return run

    def _arrivals(self, run: Gradients, action: Action) -> Activations:
        """Return what a pass takes of other stages."""
        kind, number, microbatch = action
        arrays = run.inputs if kind == "forward" else run.output_gradients
        return dict(arrays.get((number, microbatch), {}))

    def progress(self) -> tuple[int, str]:
        """Return how many passes of its step this process has walked, and what it runs or waits for."""
        position, action, arrivals = self._position
        if action is None:
            return position, ""
        kind, number, microbatch = action
        if not self.local[number]:
            return position, self._describe_wait(kind, number, microbatch)  # for what it makes: a checked transfer
        where = f"in the {kind} pass of {self.stages[number].name}"
        sender = self.producer if kind == "forward" else self.consumer
        senders = dict.fromkeys(sender[name] for name, x in arrivals.items() if not x.is_ready())
        waits = [self._describe_wait(kind, stage, microbatch) for stage in senders]
        return position, ", ".join([where, *waits] if waits else [where, f"microbatch {microbatch}"])

    def _describe_wait(self, kind: str, sender: int, microbatch: int) -> str:
        name, _, mesh = self.stages[sender]
        processes = ", ".join(map(str, sorted({device.process_index for device in mesh.devices.flat})))
        what = "activations" if kind == "forward" else "gradients"
        return f"waiting for the {what} of {name}, microbatch {microbatch}, from process {processes}"

    @cached_property
    def roles(self) -> dict[int, str]:
        """Name the stages of every process."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, _, mesh in self.stages:
            for process in sorted({device.process_index for device in mesh.devices.flat}):
                names[process].append(name)
        return {process: ", ".join(stages) for process, stages in names.items()}

    def forward(
        self,
        run: Gradients,
        action: Action,
        parameters: tuple[Params, Params],
        batch: TextBatch | ItemBatch,
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> None:
        """Run a stage's forward pass, if it is here, and send its output; the last stage's backward pass is with it."""
        _, number, microbatch = action
        program = self.programs[number]
        # Popped: an array that was sent or used up is dropped as soon as the devices are done with it.
        inputs = run.inputs.pop((number, microbatch), {})
        run.input_shapes[number, microbatch] = {name: (x.shape, x.dtype) for name, x in inputs.items()}
        placed = self.stages[number].stage
        weight = weights[placed.tower] if placed.makes_loss else None
        if program.is_sink:
            gradients: Activations = {}
            if self.local[number]:
                run.sums[number], gradients, report = self.wait(
                    program.forward_backward(*parameters, run.sums[number], inputs, batch, noise, weight)
                )
                self._add_report(run, number, report)
            self._send_gradients(run, action, gradients)
            return
        # Of what a stage of other processes makes only the shape is known here, and a transfer is planned by that.
        if not self.local[number]:
            structs = self._output_structs(number, parameters, inputs, batch, noise, weight)
            outputs = {name: without_shards(x.shape, x.dtype, program.layouts[name]) for name, x in structs.items()}
        elif program.has_backward:
            outputs, residuals, report = self.wait(program.forward(*parameters, inputs, batch, noise, weight))
            self._add_report(run, number, report)
            run.residuals[number, microbatch] = residuals
            count = sum(stage == number for stage, _ in run.residuals)
            run.in_flight[number] = max(run.in_flight[number], count)
        else:
            outputs, report = self.wait(program.forward_only(merge(*parameters), inputs, batch, noise, weight))
            self._add_report(run, number, report)
        for name in self.stages[number].stage.outputs:
            consumer = self.consumer[name]
            arrived = move_array(outputs[name], self.programs[consumer].layouts[name], (run.step, *action, name))
            run.inputs[consumer, microbatch][name] = arrived

    def _add_report(self, run: Gradients, number: int, report: Report) -> None:
        """Add a microbatch's report of a loss, if the stage makes one, to those before."""
        if report is not None:
            total = run.reports.get(number)
            run.reports[number] = report if total is None else self._merge_reports[number](total, report)

    def _output_structs(
        self,
        number: int,
        parameters: tuple[Params, Params],
        inputs: Activations,
        batch: Any,
        noise: np.ndarray | None,
        weight: jax.Array | None,
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of what a stage of other processes makes."""
        operands = (merge(*parameters), inputs, batch, noise, weight)
        key = (number, tuple(x.shape for x in jax.tree.leaves((inputs, batch))))
        if key not in self._structs:
            self._structs[key] = self.programs[number].forward_only.eval_shape(*operands)[0]
        return self._structs[key]

    def backward(
        self, run: Gradients, action: Action, parameters: tuple[Params, Params], batch: TextBatch | ItemBatch
    ) -> None:
        """Run a stage's backward pass, if it has one and is here, and send the gradients of its inputs."""
        _, number, microbatch = action
        program = self.programs[number]
        if program.is_sink or not program.has_backward:
            return  # done with the forward pass, or nothing to do
        # The residuals are gone after this: what a stage holds is what its schedule has in flight.
        gradients: Activations = {}
        output_gradients = run.output_gradients.pop((number, microbatch))
        if self.local[number]:
            residuals = run.residuals.pop((number, microbatch))
            run.sums[number], gradients = self.wait(
                program.backward(*parameters, run.sums[number], batch, residuals, output_gradients)
            )
        self._send_gradients(run, action, gradients)

    def _send_gradients(self, run: Gradients, action: Action, gradients: Activations) -> None:
        """Send a stage's input gradients to the stages that made the inputs."""
        _, number, microbatch = action
        shapes = run.input_shapes.pop((number, microbatch))
        for name in self.stages[number].stage.inputs:
            if name in self.programs[number].gradient_inputs:
                gradient = gradients.get(name)
                # A gradient has the shape of what it is the gradient of.
                if gradient is None:
                    gradient = without_shards(*shapes[name], self.programs[number].layouts[name])
                producer = self.producer[name]
                arrived = move_array(gradient, self.programs[producer].layouts[name], (run.step, *action, name))
                # Every array has one consumer: where a stage made several, its backward pass adds up their gradients.
                run.output_gradients[producer, microbatch][name] = arrived


def _merge_reports(total: LossSums | jax.Array, loss: LossSums | jax.Array) -> LossSums | jax.Array:
    if not isinstance(total, LossSums):
        return total + loss
    worst = highest_losses(
        jnp.concatenate([total.worst_samples, loss.worst_samples]),
        jnp.concatenate([total.worst_losses, loss.worst_losses]),
    )
    return LossSums(
        loss=total.loss + loss.loss,
        weight=total.weight + loss.weight,
        worst_samples=worst[0],
        worst_losses=worst[1],
        not_finite=total.not_finite + loss.not_finite,
        measures=jax.tree.map(jnp.add, total.measures, loss.measures),
    )
