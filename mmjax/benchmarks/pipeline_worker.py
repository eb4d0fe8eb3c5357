"""Run one process of `pipeline`: ``python -m mmjax.benchmarks.pipeline_worker FOLDER RUN``, started by the command.

It drives the real passes and transfers of tiny_omni's stages, which sleep until they have taken as long as FOLDER's
`task.pickle` says, and writes when each step began and ended to FOLDER's `<process>.json`.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmjax.config import MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.distributed import coordination
from mmjax.errors import exit_process, run_command
from mmjax.models.model import Model
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.schedules import ScheduleName, make_schedule, schedule_name, stage_cuts
from mmjax.planning.simulate import total_order
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import Gradients, StagedBatch
from mmjax.runtime.placement import place_stages, tower_rows
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.state import make_optimizer
from mmjax.runtime.transfer import links
from mmjax.runtime.units import unit_ranks
from mmjax.training.run_data import open_data

# Of one device each: two encoders side by side before an LLM in two stages; small batches, so that programs are short.
STAGES = (
    "units.vision.data=1",
    "units.audio.data=1",
    "units.llm.pipeline=2",
    "model.llm.tied=false",
    "batch.microbatches=8",
    "batch.size.count=16",
)


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
        return self.executor.gradients(self.state, self.executor.zeros(), self.batches, self.weight, None)


def make_pipeline(words: Sequence[str], devices: Sequence[jax.Device], folder: Path) -> Pipeline:
    """Make the stages of tiny_omni with these changes, and load its first step."""
    config = load(find_config("tiny_omni"), words)
    data = open_data(config, RunFolder(folder), 0, NO_CHANGES, make_mesh(MeshConfig(data=1, fsdp=-1), devices))
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    executor = Executor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        place_stages(config, model, devices),
        sources=data.sources,
        schedule=schedule_name(config),
        rows=tower_rows(config, data.loader.layout, unit_ranks(config, devices)),
    )
    state = executor.init(jax.random.key(0))
    put = [executor.put(batch) for batch in data.loader(0).microbatches]
    weight, batches, _ = executor.weigh_batches(put, executor.put_report(ProcessReport()))
    return Pipeline(executor, state, batches, weight)


def main() -> None:
    """Run the command line."""
    folder = Path(sys.argv[1])
    task = pickle.loads((folder / "task.pickle").read_bytes())
    with coordination.process_group():
        pipeline = make_pipeline(STAGES, jax.devices(), Path(sys.argv[2]))
        # Equal microbatches: nothing compiles after the first walk.
        pipeline = pipeline._replace(batches=pipeline.batches[:1] * task.microbatches)
        jax.block_until_ready(pipeline.gradients().sums)
        measured = measure(task, pipeline)
        (folder / f"{coordination.index()}.json").write_text(json.dumps(measured))


def measure(task: Task, pipeline: Pipeline) -> dict[str, Any]:
    """Measure when the steps of each variant began and ended here, on a clock that all processes of a host share."""
    passes = pipeline.executor.passes
    late: list[float] = []
    for program, local, forward, backward in zip(
        passes.programs, passes.local, task.forward, task.backward, strict=True
    ):
        if local:
            program.forward = lengthened(program.forward, forward, late)
            program.backward = lengthened(program.backward, backward, late)
            program.forward_backward = lengthened(program.forward_backward, forward + backward, late)
    send = links().send
    measured: dict[str, Any] = {"began": [], "ended": []}
    for variant in task.variants * task.repeats:
        passes.order = lru_cache(lambda n, name=variant.schedule: total_order(make_schedule(name, passes.graph, n)))
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


def delayed(send: Callable[[jax.Array, int], None], seconds: float) -> Callable[[jax.Array, int], None]:
    """Wrap the sending of a piece so that it is offered later, and the sender goes on meanwhile."""
    if not seconds:
        return send
    return lambda piece, number: threading.Timer(seconds, send, (piece, number)).start()


if __name__ == "__main__":
    exit_process(run_command(main))
