"""Measure what driving a pipeline costs the host: starting one pass of a stage, and sending what it makes."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.benchmarks.measurement import Measurement
from mmjax.config import MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import make_mesh
from mmjax.pipeline.executor import PipelineExecutor
from mmjax.pipeline.passes import Gradients
from mmjax.pipeline.units import place_stages
from mmjax.planning.schedules import Action, schedule_name, stage_cuts
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.state import make_optimizer
from mmjax.runtime.step import ProcessReport
from mmjax.training.run_data import open_data

DEVICES = 6
UNITS = ("units.vision.data=2", "units.audio.data=1", "units.llm.pipeline=3", "batch.microbatches=8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that compiles")


def run(args: argparse.Namespace) -> Measurement:
    """Run the passes of tiny_omni on six devices; nothing else computes while a pass is being started."""
    if len(jax.devices()) < DEVICES:
        raise UserError(f"bench pipeline needs {DEVICES} devices; on a CPU set JAX_NUM_CPU_DEVICES={DEVICES}")
    config = load(find_config("tiny_omni"), UNITS)
    devices = jax.devices()[:DEVICES]
    with tempfile.TemporaryDirectory() as path:
        mesh = make_mesh(MeshConfig(data=1, fsdp=-1), devices)
        data = open_data(config, RunFolder(Path(path)), 0, NO_CHANGES, mesh)
        loaded = data.loader(0)
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    executor = PipelineExecutor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        place_stages(config, model, devices),
        sources=data.sources,
        schedule=schedule_name(config),
    )
    state = executor.init(jax.random.key(0))
    put = [executor.put(batch) for batch in loaded.microbatches]
    weight, batches, _ = executor.weigh_batches(put, executor.put_report(ProcessReport()))

    def gradients() -> Gradients:
        return executor.gradients(state, executor.zeros(), batches, weight, None)

    # The first walk compiles every program, slices and joins of transfers included.
    began = time.perf_counter()
    jax.block_until_ready(gradients().sums)
    compiling = time.perf_counter() - began
    seconds: dict[str, list[float]] = defaultdict(list)
    passes = executor.passes
    passes.forward = _timed(passes.forward, seconds)
    passes.backward = _timed(passes.backward, seconds)
    passes.synchronous = False  # each pass is waited for here, outside its time
    for _ in range(args.steps):
        gradients()
    return Measurement(
        figures={
            "actions_per_step": len(passes.order(len(batches))),
            "compile_seconds": compiling,
            **{f"{kind}_milliseconds": 1e3 * statistics.median(times) for kind, times in seconds.items()},
        },
        arrays={},
    )


def _timed(run_pass: Callable[..., None], seconds: dict[str, list[float]]) -> Callable[..., None]:
    """Wrap a pass so that the host's time is added to `seconds`, without that of the devices."""

    def timed(run: Gradients, action: Action, *operands: Any) -> None:
        began = time.perf_counter()
        run_pass(run, action, *operands)
        seconds[action.kind].append(time.perf_counter() - began)
        jax.block_until_ready((run.sums, dict(run.inputs), run.output_gradients, run.residuals))

    return timed
