"""Run one process of `balance-run`: ``python -m mmjax.benchmarks.balance_worker FOLDER CORE``, started by the command.

It trains the steps that FOLDER's `task.pickle` names in every mode, one mode after the other within each step, and
writes how long they took to FOLDER's `<process>.json`.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.placement import Shape
from mmjax.distributed import coordination
from mmjax.errors import exit_process, run_command
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, local_ranks, make_mesh, replicated
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import CompileCounter
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import StagedBatch
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import Hyperparameters, hyperparameters, make_optimizer

CORES_LEFT = -1  # in place of a core's number: do not pin


@dataclass(frozen=True)
class Task:
    """Hold what all processes do. loaders: by mode; they load the same samples for each step."""

    loaders: dict[str, StepLoader]
    steps: int


class Prepared(NamedTuple):
    """Hold one step of one mode, on the devices."""

    arrays: tuple[StagedBatch, ...]
    loaded: LoadedStep


@dataclass
class Trainer:
    """Hold an executor and the state that it trains."""

    executor: Executor
    state: State
    accumulated: list[Sums | None]
    hyper: Hyperparameters

    def step(self, step: Prepared) -> bool:
        """Run one update to its end; return whether all processes had planned the same."""
        report = ProcessReport(int(step.loaded.digest), needed_flops=float(step.loaded.needed_flops))
        self.state, self.accumulated, outcome = self.executor.step(
            self.state, self.accumulated, step.arrays, self.hyper, report
        )
        jax.block_until_ready((self.state, self.accumulated, outcome))
        return bool(outcome.agreed)


def main() -> None:
    """Run the command line."""
    folder = Path(sys.argv[1])
    core = int(sys.argv[2])
    if core != CORES_LEFT:
        os.sched_setaffinity(0, {core})  # before JAX starts its threads, which inherit it
    with coordination.process_group():
        measured = measure(pickle.loads((folder / "task.pickle").read_bytes()))
        (folder / f"{coordination.index()}.json").write_text(json.dumps(measured))


def measure(task: Task) -> dict[str, object]:
    """Measure seconds of each step by mode, and count the programs compiled while they ran."""
    trainer = _make_trainer(next(iter(task.loaders.values())).config)
    barrier = _make_barrier(trainer.executor)
    steps = [_prepare(task, trainer.executor, step) for step in range(task.steps)]
    _warm_up(trainer, steps, barrier)
    programs = CompileCounter()
    modes = list(task.loaders)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    busy: dict[str, list[float]] = {mode: [] for mode in modes}
    for number, step in enumerate(steps):
        # Step 0 runs modes 0 1 2 3, step 1 modes 1 2 3 0: whatever drifts meanwhile meets all modes alike.
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
            barrier()
            began = time.perf_counter()
            busy_before = time.process_time()
            agreed = trainer.step(step[mode])
            seconds[mode].append(time.perf_counter() - began)
            busy[mode].append(time.process_time() - busy_before)
            if not agreed:
                raise AssertionError(f"step {number}, mode {mode}: the processes planned different batches")
    return {"seconds": seconds, "busy": busy, "compiled": programs.requested}


def _make_trainer(config: Config) -> Trainer:
    """Build a trainer with all ranks along the data axis: every process has the model whole."""
    mesh = make_mesh(config.mesh, jax.devices())
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    optimizer = make_optimizer(config.optimizer, model.axes, model.dtype)
    accumulates = config.batch.microbatches > 1
    executor = Executor.on_mesh(model, optimizer, mesh, ShardingRules(), sources=1, accumulates=accumulates)
    state = executor.init(jax.random.key(config.seed))
    return Trainer(executor, state, executor.zeros(), hyperparameters(config, 0))


def _make_barrier(executor: Executor) -> Callable[[], None]:
    """Make a barrier: it returns when all processes' devices have come to it."""
    ones = jax.make_array_from_process_local_data(
        executor.per_device, np.ones(len(executor.mesh.local_devices), np.float32)
    )
    total = jax.jit(jnp.sum, out_shardings=replicated(executor.mesh))
    return lambda: jax.block_until_ready(total(ones))


def _prepare(task: Task, executor: Executor, step: int) -> dict[str, Prepared]:
    """Pack and put every mode's batches of one step before any clock runs. Raises where they hold other samples."""
    prepared = {}
    for mode, loader in task.loaders.items():
        loaded = replace(loader, ranks=local_ranks(executor.mesh))(step)
        prepared[mode] = Prepared(tuple(executor.put(b) for b in loaded.microbatches), loaded)
    first, *rest = (np.sort(p.loaded.samples) for p in prepared.values())
    if not all(np.array_equal(first, samples) for samples in rest):
        raise AssertionError(f"step {step} has different samples by mode")
    return prepared


def _warm_up(trainer: Trainer, steps: list[dict[str, Prepared]], barrier: Callable[[], None]) -> None:
    """Compile everything, and run a step with each shape: first runs also allocate."""
    barrier()
    shapes: dict[Shape, tuple[Microbatch, Prepared]] = {}
    for step in steps:
        for prepared in step.values():
            loaded = prepared.loaded
            for lengths, widths, batch in zip(loaded.lengths, loaded.widths, loaded.microbatches, strict=True):
                shape = Shape(tuple(lengths.tolist()), tuple(widths.tolist()))
                shapes.setdefault(shape, (batch, prepared))
    examples = list(shapes.values())
    trainer.executor.compile(trainer.state, [batch for batch, _ in examples], trainer.hyper)
    for _, prepared in examples:
        trainer.step(prepared)


if __name__ == "__main__":
    exit_process(run_command(main))
