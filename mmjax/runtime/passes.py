"""Run the passes of a step's microbatches through the stages, in one order that all processes walk.

Each process runs the passes of its own stages and takes part in the transfers that they need; of
the others it knows shapes alone.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.losses.objective import TextObjective
from mmjax.models.layer_stacks import Params
from mmjax.models.model import merge, modules_of, partition
from mmjax.models.piece import Activations, Piece
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import ShardingRules, without_shards
from mmjax.planning.schedules import Action, ScheduleName, StageGraph, make_schedule
from mmjax.planning.simulate import total_order
from mmjax.runtime.stage_program import Residuals, StageProgram, Sums
from mmjax.runtime.transfer import move_array


class PlacedStage(NamedTuple):
    """A stage on its devices. Stages of one worker share a mesh."""

    name: str
    stage: Stage
    mesh: Mesh
    rules: ShardingRules = ShardingRules()
    copy: tuple[int, int] = (0, 1)  # its number and the count of copies, as in `StageGraph`


# By stage; of shapes alone where the stage is of other processes, empty where another copy has the
# microbatch.
StagedBatch = tuple[Microbatch, ...]


def stage_graph(
    stages: Sequence[PlacedStage], times: tuple[tuple[int, int], ...] = ()
) -> StageGraph:
    """Link every stage to the consumers of its outputs. times: as in `StageGraph`."""
    meshes = list(dict.fromkeys(placed.mesh for placed in stages))
    consumers = _stages_by_name(placed.stage.inputs for placed in stages)
    # Of a deepstack, several arrays may go from one stage to another. What a copy makes it takes
    # itself, or the LLM.
    edges = dict.fromkeys(
        (producer, consumer)
        for producer, placed in enumerate(stages)
        for name in placed.stage.outputs
        for consumer in consumers.get(name, ())
        if stages[consumer].copy in (placed.copy, (0, 1))
    )
    return StageGraph(
        edges=tuple(edges),
        workers=tuple(meshes.index(placed.mesh) for placed in stages),
        copies=tuple(placed.copy for placed in stages),
        times=times,
    )


def _stages_by_name(names: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    """List, for every array name, the numbers of the stages that list it."""
    stages: dict[str, list[int]] = defaultdict(list)
    for number, of_stage in enumerate(names):
        for name in of_stage:
            stages[name].append(number)
    return dict(stages)


def trained_activations(stages: Sequence[Stage]) -> frozenset[str]:
    """Name the activations that depend on trainable parameters: only their gradients are sent.

    stages: each behind those whose activations it takes.
    """
    trained: set[str] = set()
    for stage in stages:
        model = stage.model
        for piece in stage.pieces:
            abstract = piece.select(model.abstract, model.runs[piece.tower])
            trainable = partition(abstract, model.frozen & modules_of(abstract))[0]
            trained |= _trained_outputs(piece, trainable, trained)
    return frozenset(trained)


def _trained_outputs(piece: Piece, trainable: Params, trained: Set[str]) -> set[str]:
    """Name the outputs of a piece that depend on its own or earlier trainable parameters."""
    # A connector's tokens go to the LLM: what goes into the encoder's next layer is none of its
    # making.
    connector = trainable.pop("connectors", {}) if piece.tower != "llm" else {}
    layers = bool(jax.tree.leaves(trainable))
    if piece.generates and not piece.last:
        # Layers attend the condition; what time makes of images depends on the generator alone. A
        # VAE is frozen.
        x, images, condition = piece.passed(piece.stop)
        condition_mlp = "condition_mlp" in trainable.get("generators", {}).get(piece.tower, {})
        conditioned = (
            connector or condition_mlp or not trained.isdisjoint((piece.tower, piece.inputs[-1]))
        )
        outputs = {x: layers or conditioned, images: layers, condition: conditioned}
        return {name for name, is_trained in outputs.items() if is_trained}
    reached = layers or not trained.isdisjoint(piece.inputs)
    return {
        name for name in piece.outputs if reached or (connector and name != piece.layers_output)
    }


class Gradients:
    """State of one step's passes: arrived activations and gradients by stage, and residuals kept for backward."""

    def __init__(self, sums: Sequence[Sums], step: int) -> None:
        self.sums = list(sums)  # by stage
        self.step = step
        # by stage and microbatch, as the others
        self.inputs: dict[tuple[int, int], Activations] = defaultdict(dict)
        self.input_structs: dict[tuple[int, int], dict[str, jax.ShapeDtypeStruct]] = {}
        self.output_gradients: dict[tuple[int, int], Activations] = defaultdict(dict)
        self.residuals: dict[tuple[int, int], Residuals] = {}
        self.in_flight: Counter[int] = Counter()  # by stage: the most residuals at a time


class Passes:
    """The programs of all stages, and the order in which a step runs them."""

    def __init__(
        self,
        stages: Sequence[PlacedStage],
        schedule: ScheduleName,
        *,
        sources: int,
        objective: TextObjective,
        context: str | None = None,
        compiler_options: Mapping[str, bool | int | float | str] | None,
        times: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """times: of stages, as in `StageGraph`."""
        self.stages = tuple(stages)
        self.graph = stage_graph(stages, times)
        name = schedule if len(stages) > 1 else "1f1b"  # of one stage all are the same
        self.order = lru_cache(lambda count: total_order(make_schedule(name, self.graph, count)))
        self.local = [
            any(d.process_index == jax.process_index() for d in s.mesh.devices.flat) for s in stages
        ]
        self.synchronous = len(stages) > 1 and stages[0].mesh.devices.flat[0].platform == "cpu"
        # The stages that take an array, and those that make it, by the array's name: of copies one
        # has a microbatch.
        self.consumers = _stages_by_name(placed.stage.inputs for placed in stages)
        self.producers = _stages_by_name(placed.stage.outputs for placed in stages)
        trained = trained_activations([stages[number].stage for number in self.graph.topological])
        self.programs = [
            StageProgram(
                placed.stage,
                placed.mesh,
                placed.rules,
                objective,
                trained=trained,
                sources=sources,
                reduces_once=len(stages) > 1,
                context=context,
                compiler_options=compiler_options,
            )
            for placed in stages
        ]
        # of outputs by stage and shapes of inputs
        self._structs: dict[Any, dict[str, jax.ShapeDtypeStruct]] = {}
        # This process's passes with the seconds at their start and end, where somebody wants them.
        self.times: list[tuple[Action, float, float]] | None = None
        self.clock = time.time  # of these
        self._waited = 0.0  # when arrays were last waited for
        # The pass at which this process is, its number in the step, and what it takes; for the
        # watchdog.
        self._position: tuple[int, Action | None, Activations] = (0, None, {})

    def wait(self, x: Any) -> Any:
        """Wait for arrays on a CPU; elsewhere programs and transfers are queued.

        A CPU's programs have a pool of as many threads as there are devices, in no order: those on
        several meshes may each hold threads that another waits for. Goes when XLA's CPU client runs
        each device's programs in order.
        """
        if self.synchronous:
            jax.block_until_ready(x)
        self._waited = self.clock()
        return x

    def run(
        self,
        parameters: Sequence[tuple[Params, Params]],
        sums: Sequence[Sums],
        batches: Sequence[StagedBatch | None],
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
        step: int,
    ) -> Gradients:
        """Add up the gradients of a step's microbatches; donates `sums`. None stands for one that is left out.

        parameters: trainable and frozen ones, by stage. weights: of the step's losses, by tower, on
        the stage that makes each. step: names the step's transfers, by the same number in all
        processes.
        """
        run = Gradients(sums, step)
        for position, action in enumerate(self.order(len(batches))):
            number = action.stage
            batch = batches[action.microbatch]
            if batch is None:
                continue
            arrays = run.inputs if action.kind == "forward" else run.output_gradients
            arrivals = dict(arrays.get((number, action.microbatch), {}))
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
                gradients = self.wait(program.reduce(run.sums[number].gradients))
                run.sums[number] = run.sums[number]._replace(gradients=gradients)
        return run

    def progress(self) -> tuple[int, str]:
        """Return the number of passes that this process has walked in its step, and what it runs or waits for."""
        position, action, arrivals = self._position
        if action is None:
            return position, ""
        kind, number, microbatch = action
        if not self.local[number]:
            # for what it makes: a checked transfer
            return position, self._describe_wait(kind, number, microbatch)
        where = f"in the {kind} pass of {self.stages[number].name}"
        find = self.find_producer if kind == "forward" else self.find_consumer
        senders = dict.fromkeys(
            find(name, microbatch) for name, x in arrivals.items() if not x.is_ready()
        )
        waits = [self._describe_wait(kind, stage, microbatch) for stage in senders]
        return position, ", ".join(
            [where, *waits] if waits else [where, f"microbatch {microbatch}"]
        )

    def find_consumer(self, name: str, microbatch: int) -> int:
        """Return the one stage that takes an array of a microbatch."""
        return next(stage for stage in self.consumers[name] if self.graph.runs(stage, microbatch))

    def find_producer(self, name: str, microbatch: int) -> int:
        """Return the one stage that makes an array of a microbatch."""
        return next(stage for stage in self.producers[name] if self.graph.runs(stage, microbatch))

    def _describe_wait(self, kind: str, sender: int, microbatch: int) -> str:
        name = self.stages[sender].name
        devices = self.stages[sender].mesh.devices.flat
        processes = ", ".join(map(str, sorted({device.process_index for device in devices})))
        what = "activations" if kind == "forward" else "gradients"
        return (
            f"waiting for the {what} of {name}, microbatch {microbatch}, from process {processes}"
        )

    @cached_property
    def roles(self) -> dict[int, str]:
        """Name the stages of every process."""
        names: dict[int, list[str]] = defaultdict(list)
        for placed in self.stages:
            for process in sorted({device.process_index for device in placed.mesh.devices.flat}):
                names[process].append(placed.name)
        return {process: ", ".join(stages) for process, stages in names.items()}

    def forward(
        self,
        run: Gradients,
        action: Action,
        parameters: tuple[Params, Params],
        batch: Microbatch,
        weights: Mapping[str, jax.Array],
        noise: np.ndarray | None,
    ) -> None:
        """Run a stage's forward pass, if it is here, and send its output; the last stage's backward pass is with it."""
        _, number, microbatch = action
        program = self.programs[number]
        # Popped: an array that was sent or used up is dropped as soon as the devices are done with
        # it.
        inputs = run.inputs.pop((number, microbatch), {})
        run.input_structs[number, microbatch] = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inputs.items()
        }
        weights = {tower: weights[tower] for tower in self.stages[number].stage.losses}
        if program.is_sink:
            gradients: Activations = {}
            if self.local[number]:
                run.sums[number], gradients = self.wait(
                    program.forward_backward(
                        *parameters, run.sums[number], batch, weights, noise, inputs
                    )
                )
            self._send_gradients(run, action, gradients)
            return
        # Of what a stage of other processes makes only the shape is known here, and a transfer is
        # planned by that.
        if not self.local[number]:
            structs = self._output_structs(number, parameters, inputs, batch, noise, weights)
            outputs = {
                name: without_shards(x, program.layouts[name]) for name, x in structs.items()
            }
        else:
            losses = run.sums[number].losses
            if program.has_backward:
                outputs, residuals, losses = self.wait(
                    program.forward(*parameters, inputs, batch, noise, weights, losses)
                )
                run.residuals[number, microbatch] = residuals
                count = sum(stage == number for stage, _ in run.residuals)
                run.in_flight[number] = max(run.in_flight[number], count)
            else:
                outputs, losses = self.wait(
                    program.forward_only(merge(*parameters), inputs, batch, noise, weights, losses)
                )
            run.sums[number] = run.sums[number]._replace(losses=losses)
        for name in self.stages[number].stage.outputs:
            consumer = self.find_consumer(name, microbatch)
            arrived = move_array(
                outputs[name], self.programs[consumer].layouts[name], (run.step, *action, name)
            )
            run.inputs[consumer, microbatch][name] = arrived

    def _output_structs(
        self,
        number: int,
        parameters: tuple[Params, Params],
        inputs: Activations,
        batch: Any,
        noise: np.ndarray | None,
        weights: Mapping[str, jax.Array],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the outputs of a stage of other processes."""
        operands = (
            merge(*parameters),
            inputs,
            batch,
            noise,
            weights,
            self.programs[number].sums.losses,
        )
        key = (number, tuple(x.shape for x in jax.tree.leaves((inputs, batch))))
        if key not in self._structs:
            self._structs[key] = self.programs[number].forward_only.eval_shape(*operands)[0]
        return self._structs[key]

    def backward(
        self, run: Gradients, action: Action, parameters: tuple[Params, Params], batch: Microbatch
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
            sums, gradients = self.wait(
                program.backward(
                    *parameters, run.sums[number].gradients, batch, residuals, output_gradients
                )
            )
            run.sums[number] = run.sums[number]._replace(gradients=sums)
        self._send_gradients(run, action, gradients)

    def _send_gradients(self, run: Gradients, action: Action, gradients: Activations) -> None:
        """Send a stage's input gradients to the stages that made the inputs."""
        _, number, microbatch = action
        structs = run.input_structs.pop((number, microbatch))
        for name in self.stages[number].stage.inputs:
            if name in self.programs[number].gradient_inputs:
                gradient = gradients.get(name)
                # A gradient has the shape of what it is the gradient of.
                if gradient is None:
                    gradient = without_shards(structs[name], self.programs[number].layouts[name])
                producer = self.find_producer(name, microbatch)
                arrived = move_array(
                    gradient, self.programs[producer].layouts[name], (run.step, *action, name)
                )
                # Every array has one consumer: where a stage made several, its backward pass adds
                # up their gradients.
                run.output_gradients[producer, microbatch][name] = arrived
