"""Measure pipelines: host time of a pass, steps of several processes against the simulator, gains of reordering."""

from __future__ import annotations

import statistics
import threading
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from mmjax.benchmarks.harness import Measurement, Options, option, seconds_of, timed
from mmjax.benchmarks.processes import run_worker, run_workers
from mmjax.benchmarks.synthetic_run import make_executor, opened_data
from mmjax.config import MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.reorder import reorder
from mmjax.planning.schedules import (
    Action,
    Schedule,
    ScheduleName,
    StageGraph,
    make_schedule,
    schedule_name,
    unit_graph,
)
from mmjax.planning.simulate import StageTimes, simulate, total_order
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import Gradients, StagedBatch
from mmjax.runtime.placement import tower_rows
from mmjax.runtime.transfer import links
from mmjax.runtime.units import unit_ranks

DEVICES = 6
UNITS = (
    "units.vision.data=2",
    "units.audio.data=1",
    "units.llm.pipeline=3",
    "batch.microbatches=8",
)
# Of one device each: two encoders side by side before an LLM in two stages; small batches, so that
# programs are short.
STAGES = (
    "units.vision.data=1",
    "units.audio.data=1",
    "units.llm.pipeline=2",
    "model.llm.tied=false",
    "batch.microbatches=8",
    "batch.size.count=16",
)
RELATIVE = (1.0, 0.5, 1.0, 1.0)  # forward passes of `STAGES`; backward passes take twice as long
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "eager")
SPREADS = (0.3, 1.0)  # of the logarithm of an encoder's times
STEPS = 100  # that are reordered of each kind


OPTIONS: Options = {
    "--steps": option(5, "of driving, after one that compiles; 0: none"),
    "--processes": option([2, 4], "that run four stages; 1, 2 or 4", nargs="*"),
    "--repeats": option(3, "of each schedule, with and without the transfers' time", above=0),
    "--microbatches": option(16, above=0),
    "--milliseconds": option(30.0, "of the longest forward pass", above=0),
    "--transfer": option(20.0, "milliseconds added between processes", above=0),
}


def run(args: Namespace) -> Measurement:
    """Drive, simulate and run, and reorder."""
    if wrong := [count for count in args.processes if count not in (1, 2, 4)]:
        raise UserError(
            f"--processes {wrong[0]}: four stages of one device run in 1, 2 or 4 processes"
        )
    figures = _drive(args.steps) if args.steps else {}
    arrays: dict[str, np.ndarray] = {}
    for processes in args.processes:
        measured = _run_stages(args, processes)
        for all_figures, those in ((figures, measured.figures), (arrays, measured.arrays)):
            all_figures |= {f"{name}_{processes}_processes": x for name, x in those.items()}
    return Measurement(figures | _reorder(), arrays)


class Variant(NamedTuple):
    """A schedule, and the seconds that are added to every transfer between processes."""

    schedule: ScheduleName
    delay: float


@dataclass(frozen=True)
class Task:
    """Hold what all processes run."""

    forward: tuple[float, ...]  # seconds by stage
    backward: tuple[float, ...]
    microbatches: int
    variants: tuple[Variant, ...]
    repeats: int


class Pipeline(NamedTuple):
    """Stages with parameters, and the microbatches of a step on their devices."""

    executor: Executor
    state: State
    batches: list[StagedBatch]
    weight: jax.Array

    def gradients(self) -> Gradients:
        """Walk the passes of a step."""
        return self.executor.gradients(
            self.state, self.executor.zeros(), self.batches, self.weight, None
        )


def make_pipeline(words: Sequence[str], devices: Sequence[jax.Device]) -> Pipeline:
    """Make the stages of tiny_omni with these changes, and load its first step."""
    config = load(find_config("tiny_omni"), words)
    data_mesh = make_mesh(MeshConfig(data=1, fsdp=-1), devices)
    with opened_data(config, data_mesh) as data:
        loaded = data.loader(0)
    executor = make_executor(
        config,
        devices,
        sources=data.sources,
        schedule=schedule_name(config),
        rows=tower_rows(config, data.loader.layout, unit_ranks(config, devices)),
    )
    state = executor.init(jax.random.key(0))
    put = [executor.put(batch) for batch in loaded.microbatches]
    batches, weight, *_ = executor.weigh_batches(put)
    return Pipeline(executor, state, batches, weight)


# --------------------------------------------------------------------------------------------------
# host time


def _drive(steps: int) -> dict[str, float]:
    """Time starting a pass and sending what it makes, in CPU seconds of the thread that drives the devices."""
    if len(jax.devices()) < DEVICES:
        raise UserError(
            f"bench pipeline needs {DEVICES} devices; on a CPU set JAX_NUM_CPU_DEVICES={DEVICES}"
        )
    pipeline = make_pipeline(UNITS, jax.devices()[:DEVICES])
    # The first walk compiles every program, slices and joins of transfers included.
    compiling = seconds_of(lambda: jax.block_until_ready(pipeline.gradients().sums))
    seconds: dict[str, list[float]] = defaultdict(list)
    passes = pipeline.executor.passes
    passes.forward = _timed(passes.forward, seconds)
    passes.backward = _timed(passes.backward, seconds)
    passes.synchronous = False  # each pass is waited for here, outside its time
    for _ in range(steps):
        pipeline.gradients()
    figures = {
        "actions_per_step": len(passes.order(len(pipeline.batches))),
        "compile_seconds": compiling,
    }
    return figures | {
        f"{kind}_milliseconds": 1e3 * statistics.median(times) for kind, times in seconds.items()
    }


def _timed(run_pass: Callable[..., None], seconds: dict[str, list[float]]) -> Callable[..., None]:
    """Wrap a pass so that the host's time is added to `seconds`, without that of the devices.

    The threads of a CPU's programs have their own time. A pass that runs no program is left out.
    """

    def timed(run: Gradients, action: Action, *operands: Any) -> None:
        residuals = len(run.residuals)
        began = time.thread_time()
        run_pass(run, action, *operands)
        if action.kind == "forward" or len(run.residuals) < residuals:
            seconds[action.kind].append(time.thread_time() - began)
        jax.block_until_ready((run.sums, dict(run.inputs), run.output_gradients, run.residuals))

    return timed


# ------------------------------------------------------------------------------------------------
# against the simulator


def _run_stages(args: Namespace, processes: int) -> Measurement:
    """Run four stages in so many processes, and compare the seconds of a step with those simulated."""
    forward = tuple(args.milliseconds / 1e3 * relative for relative in RELATIVE)
    variants = tuple(
        Variant(name, delay) for name in SCHEDULES for delay in (0.0, args.transfer / 1e3)
    )
    task = Task(
        forward=forward,
        backward=tuple(2 * seconds for seconds in forward),
        microbatches=args.microbatches,
        variants=variants,
        repeats=args.repeats,
    )
    devices = len(forward) // processes
    measured = run_workers("mmjax.benchmarks.pipeline", task, [()] * processes, devices)
    seconds = step_seconds(measured, len(variants))
    graph = unit_graph(load(find_config("tiny_omni"), STAGES))
    simulated = np.array(
        [simulated_seconds(graph, processes, task, variant) for variant in variants]
    )
    names = [
        f"{variant.schedule}{' with transfers' if variant.delay else ''}" for variant in variants
    ]
    late = np.concatenate([process["late"] for process in measured])
    figures: dict[str, Any] = {
        "wall_over_simulated": _rounded(names, seconds / simulated),
        "step_seconds": _rounded(names, seconds),
    }
    if processes > 1:
        for name, times in (("hidden", seconds), ("simulated_hidden", simulated)):
            figures[name] = _rounded(SCHEDULES, hidden_share(times, task))
    # Passes whose program took longer than it was to take, by how much of the time of all.
    figures["late_share"] = float(
        late.sum() / (args.repeats * len(variants) * sum(forward) * 3 * args.microbatches)
    )
    return Measurement(figures, {"seconds": seconds, "simulated": simulated})


def _rounded(names: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}


def step_seconds(measured: Sequence[Mapping[str, Any]], variants: int) -> np.ndarray:
    """Return each variant's least seconds from the first process's begin to the last one's end, `[variants]`.

    Whatever else runs on the machine only adds to them.
    """
    began = np.min([process["began"] for process in measured], axis=0)
    ended = np.max([process["ended"] for process in measured], axis=0)
    return np.min((ended - began).reshape(-1, variants), axis=0)


def simulated_seconds(graph: StageGraph, processes: int, task: Task, variant: Variant) -> float:
    """Simulate a step in processes of a CPU, each of which waits for every pass of its stages, in the order of all."""
    order: list[Action] = []
    for action in total_order(make_schedule(variant.schedule, graph, task.microbatches)):
        # The last stage's backward pass is one program with its forward pass.
        if action.stage not in graph.sinks:
            order.append(action)
        elif action.kind == "forward":
            order += [action, action._replace(kind="backward")]
    workers = tuple(stage * processes // len(graph.workers) for stage in range(len(graph.workers)))
    orders = tuple(
        tuple(a for a in order if workers[a.stage] == process) for process in range(processes)
    )
    schedule = Schedule(replace(graph, workers=workers), task.microbatches, orders)
    columns = (1, task.microbatches)
    times = [
        np.tile(np.array(seconds)[:, None], columns) for seconds in (task.forward, task.backward)
    ]
    return simulate(schedule, StageTimes(*times, transfer=variant.delay)).makespan


def hidden_share(seconds: np.ndarray, task: Task) -> np.ndarray:
    """Return by schedule which share of an edge's transfers in both directions does not lengthen the step."""
    transfers = 2 * task.microbatches * task.variants[1].delay
    return 1 - np.diff(seconds.reshape(-1, 2))[:, 0] / transfers


# --------------------------------------------------------------------------------------------------
# reordering


def _reorder() -> dict[str, Any]:
    """Simulate what reordering gains before three LLM stages of equal times, and time it on six stages."""
    figures: dict[str, Any] = {}
    for microbatches in (8, 32):
        gains = {}
        for spread in SPREADS:
            rng = np.random.default_rng(0)
            ratios = [
                reorder_gain(chain(4), _encoder_times(rng, 4, microbatches, spread))
                for _ in range(STEPS)
            ]
            gains[str(spread)] = round(float(np.mean(ratios)), 4)
        figures[f"reorder_gain_{microbatches}_microbatches"] = gains
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(STEPS):
        forward = _encoder_times(rng, 6, 32, 1.0)
        arguments = ("1f1b", chain(6), forward, 2 * forward)
        seconds.append(timed(reorder, *arguments, clock=time.process_time)[1])
    return figures | {"reorder_milliseconds": 1e3 * statistics.median(seconds)}


def chain(stages: int, workers: int | None = None) -> StageGraph:
    """Return the graph of stages behind each other, each with a worker of its own or with so many in turns."""
    turns = tuple(stage % (workers or stages) for stage in range(stages))
    return StageGraph(tuple(pairwise(range(stages))), turns)


def _encoder_times(
    rng: np.random.Generator, stages: int, microbatches: int, spread: float
) -> np.ndarray:
    """Draw log-normal times of the first stage's forward passes, whose mean is the time of every other one."""
    forward = np.full((stages, microbatches), 10**6)
    forward[0] = np.rint(1e6 * np.exp(rng.normal(-(spread**2) / 2, spread, microbatches)))
    return forward


def reorder_gain(graph: StageGraph, forward: np.ndarray) -> float:
    """Return how many times as long a step takes as planned. forward: as of `simulated_step`."""
    order = reorder("1f1b", graph, forward, 2 * forward)
    reordered = simulated_step("1f1b", graph, forward[:, order])
    return simulated_step("1f1b", graph, forward) / reordered


def simulated_step(name: ScheduleName, graph: StageGraph, forward: np.ndarray) -> float:
    """Simulate a step of these forward passes `[stages, microbatches]`; backward passes take twice as long."""
    schedule = make_schedule(name, graph, forward.shape[1])
    return simulate(schedule, StageTimes(forward, 2 * forward)).makespan


# -------------------------------------------------------------------------------------------------
# one of the processes


def measure(task: Task) -> dict[str, Any]:
    """Measure when the steps of each variant began and ended here, on a clock that all processes of a host share."""
    pipeline = make_pipeline(STAGES, jax.devices())
    # Equal microbatches: nothing compiles after the first walk.
    pipeline = pipeline._replace(batches=pipeline.batches[:1] * task.microbatches)
    jax.block_until_ready(pipeline.gradients().sums)
    passes = pipeline.executor.passes
    late: list[float] = []
    for program, local, forward, backward in zip(
        passes.programs, passes.local, task.forward, task.backward, strict=True
    ):
        if local:
            program.forward = lengthened(program.forward, forward, late)
            program.backward = lengthened(program.backward, backward, late)
            program.forward_backward = lengthened(
                program.forward_backward, forward + backward, late
            )
    send = links().send
    measured: dict[str, Any] = {"began": [], "ended": []}
    for variant in task.variants * task.repeats:
        passes.order = lru_cache(
            lambda n, name=variant.schedule: total_order(make_schedule(name, passes.graph, n))
        )
        passes.order(task.microbatches)
        links().send = delayed(send, variant.delay)
        coordination.wait_for_all(f"bench/{len(measured['began'])}")
        measured["began"].append(time.monotonic())
        jax.block_until_ready(pipeline.gradients().sums)
        measured["ended"].append(time.monotonic())
    return measured | {"late": late}


def lengthened(run: Callable[..., Any], seconds: float, late: list[float]) -> Callable[..., Any]:
    """Wrap a program so that it takes so many seconds once its operands are there; `late` gets what it exceeds."""

    def lengthened_run(*operands: Any) -> Any:
        jax.block_until_ready(operands)
        began = time.perf_counter()
        result = jax.block_until_ready(run(*operands))
        remaining = began + seconds - time.perf_counter()
        late.append(max(0.0, -remaining))
        time.sleep(max(0.0, remaining))
        return result

    return lengthened_run


def delayed(
    send: Callable[[jax.Array, int], None], seconds: float
) -> Callable[[jax.Array, int], None]:
    """Wrap the sending of a piece so that it is offered later, and the sender goes on meanwhile."""
    if not seconds:
        return send
    return lambda piece, number: threading.Timer(seconds, send, (piece, number)).start()


if __name__ == "__main__":  # of a folder with a task
    run_worker(measure)
