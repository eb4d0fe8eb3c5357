"""Train as a pipeline with random delays, and compare every run with the undelayed one, to the bit.

Four processes of one device each run `delayed.py FOLDER STEPS SEEDS`; for a long comparison,
`python tests/runtime/test_pipeline_processes.py 200 3` starts them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_run import tiny_config

from mmjax.config import BatchConfig, Config, Samples, TrainingConfig, Unit
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.distributed import coordination
from mmjax.models.model import Model
from mmjax.planning.schedules import make_schedule, stage_cuts
from mmjax.planning.simulate import total_order
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.executor import Executor
from mmjax.runtime.passes import Passes
from mmjax.runtime.placement import place_stages, tower_rows
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.runtime.transfer import Links
from mmjax.runtime.units import unit_ranks, units_topology

UNITS = {"vision": Unit(), "audio": Unit(), "llm": Unit(pipeline=2)}
SCHEDULES = ("1f1b", "eager", "gpipe")
MOST_SECONDS = 0.02
BATCHES = 6  # different steps, taken in turn


def prepare(folder: Path, steps: int) -> tuple[Config, Executor, list[LoadedStep]]:
    """The pipeline, and what this process loads."""
    batch = BatchConfig(Samples(8), {"llm": 1, "vision": 1, "audio": 1}, microbatches=3, shapes=1)
    config = tiny_config(units=UNITS, batch=batch, training=TrainingConfig(steps=steps))
    folder.mkdir(parents=True)
    index = build_index(open_sources(config, "train", folder), config.model.encoders)
    index.save(folder / "index")
    planner, layout = make_planner(index, config, [1.0], units_topology(UNITS))
    ranks = unit_ranks(config, jax.devices())
    loader = StepLoader(
        config, planner.grouper.budget, layout, folder / "index", folder, **ranks._asdict()
    )
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    executor = Executor(
        model,
        make_optimizer(config.optimizer, model.axes),
        place_stages(config, model, jax.devices()),
        sources=len(config.data.sources),
        rows=tower_rows(config, layout, ranks),
    )
    return config, executor, [loader(step) for step in range(BATCHES)]


def train(
    config: Config,
    executor: Executor,
    first: Any,
    loaded: list[LoadedStep],
    schedule: str,
    steps: int,
) -> list[np.ndarray]:
    """The losses of all steps from the first state, then this process's shards of the last."""
    executor.passes.order = cache(
        lambda count: total_order(make_schedule(schedule, executor.graph, count))
    )
    state, sums = jax.tree.map(copy, first), executor.zeros()
    losses = []
    for step in range(steps):
        now = loaded[step % len(loaded)]
        batches = [executor.put(batch) for batch in now.microbatches]
        hyper = hyperparameters(config, step)
        state, sums, report = executor.step(
            state, sums, batches, hyper, ProcessReport(digest=int(now.digest))
        )
        assert bool(report.agreed & report.finite)
        losses.append(np.asarray(report.losses.loss))
    return losses + [
        np.asarray(s.data) for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards
    ]


def copy(x: jax.Array) -> jax.Array:
    """A copy to give away, of which this process may have no shard."""
    shards = [jnp.copy(shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards, dtype=x.dtype)


def delay(
    cls: type, name: str, rng: np.random.Generator, concerns: Callable[..., bool] = lambda *_: True
) -> Callable:
    """Sleep before every call of a method that concerns this process; the result undoes it."""
    method = getattr(cls, name)

    @wraps(method)
    def slow(self: Any, *arguments: Any) -> Any:
        if concerns(self, *arguments):
            time.sleep(rng.uniform(0, MOST_SECONDS))
        return method(self, *arguments)

    setattr(cls, name, slow)
    return lambda: setattr(cls, name, method)


def is_local(passes: Passes, run: Any, action: Any, *_: Any) -> bool:
    return passes.local[action.stage]


def main(folder: Path, steps: int, seeds: int) -> None:
    config, executor, loaded = prepare(folder / str(jax.process_index()), steps)
    first = executor.init(jax.random.key(0))
    for schedule in SCHEDULES:
        began = time.monotonic()
        expected = train(config, executor, first, loaded, schedule, steps)
        seconds = [time.monotonic() - began]
        for seed in range(seeds):
            rng = np.random.default_rng([seed, jax.process_index()])
            undo = [
                delay(Passes, "forward", rng, is_local),
                delay(Passes, "backward", rng, is_local),
                delay(Links, "send", rng),
                delay(Links, "receive", rng),
            ]
            began = time.monotonic()
            delayed = train(config, executor, first, loaded, schedule, steps)
            seconds.append(time.monotonic() - began)
            assert len(delayed) == len(expected) > steps
            assert all(np.array_equal(a, b) for a, b in zip(delayed, expected, strict=True)), (
                schedule,
                seed,
            )
            for restore in undo:
                restore()
        if coordination.is_leader():
            times = " ".join(f"{s:.0f}" for s in seconds)
            print(
                f"{schedule}: {steps} steps, {seeds} seeds, to the bit; seconds {times}", flush=True
            )


if __name__ == "__main__":
    with coordination.process_group():
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
