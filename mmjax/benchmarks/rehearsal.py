"""Compare a rehearsal on one device with four processes that run the same steps: CPU seconds of every rank."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax.autotune.compile_run import accumulates, build_model, make_executor
from mmjax.autotune.forecast import Forecast, forecast_run
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.autotune.rehearsal import rehearse
from mmjax.benchmarks.corpora import divided
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.processes import run_worker, run_workers
from mmjax.benchmarks.synthetic_run import Trainer
from mmjax.config import (
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    LogMel,
    MeshConfig,
    ModelConfig,
    NoBalance,
    NoGrouping,
    Samples,
    TrainingConfig,
    Unit,
    VisionConfig,
)
from mmjax.data.loading.made_samples import made_samples
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.length_files import index_of_lengths, omni_corpus
from mmjax.data.plan.length_index import LengthIndex
from mmjax.distributed import coordination
from mmjax.parallel.sharding import local_ranks
from mmjax.planning.hardware import Cluster
from mmjax.runtime.devices import device_description
from mmjax.runtime.placement import place_stages, tower_rows
from mmjax.runtime.units import unit_ranks

PROCESSES = 4
SCALE = 2  # by which lengths are divided
# Layers are narrow and items long, so that what a rank's attention visits makes most of its time.
TOWER = {"width": 64, "heads": 2, "mlp_width": 128, "attention": "blockwise"}
CONNECTOR = ConnectorConfig(merge=2)
MODEL = ModelConfig(
    DecoderConfig(**TOWER, layers=4, kv_heads=2, head_width=32, vocab=256),
    {
        "vision": VisionConfig(**TOWER, layers=3, patch=4, channels=1, connector=CONNECTOR),
        "audio": AudioConfig(
            **TOWER,
            layers=3,
            clips=LogMel(mels=16, sample_rate=4000, window=64, hop=32),
            connector=CONNECTOR,
        ),
    },
)
UNITS = {"llm": Unit(data=2), "vision": Unit(), "audio": Unit()}
LAYOUTS = {
    "data 4": {},
    "fsdp 4": {"mesh": MeshConfig(fsdp=PROCESSES)},
    "llm 2, vision 1, audio 1": {"units": UNITS},
}
OPTIONS: Options = {
    "--samples": option(8, "of a microbatch", minimum=PROCESSES),
    "--seed": option(0, minimum=0),
    "--rounds": option(7, "of a step, the fastest of which counts", minimum=1),
}


@dataclass(frozen=True)
class Task:
    """Hold what a process does: run its part of a step, or rehearse all of it."""

    forecast: Forecast
    index: Path
    rounds: int
    rehearses: bool


def run(args: Namespace) -> list[Mapping[str, Any]]:
    """Run and rehearse one step with rows of unequal samples on one mesh and in units."""
    lengths = {key: divided(of_key, SCALE) for key, of_key in omni_corpus(2000, args.seed).items()}
    index = index_of_lengths(lengths, MODEL.item_modules, MODEL.llm)
    with tempfile.TemporaryDirectory() as name:
        index.save(Path(name))
        return [
            {"layout": layout} | _compare(_config(args, changes), index, Path(name), args.rounds)
            for layout, changes in LAYOUTS.items()
        ]


def _config(args: Namespace, changes: Mapping[str, Any]) -> Config:
    microbatches = 2 if "units" in changes else 1
    config = Config(
        name="rehearsal",
        data=DataConfig(),
        batch=BatchConfig(
            Samples(args.samples * microbatches),
            dict.fromkeys(MODEL.towers, PROCESSES),
            balance=NoBalance(),
            grouping=NoGrouping(),
            microbatches=microbatches,
        ),
        model=MODEL,
        training=TrainingConfig(steps=1000),
        seed=args.seed,
    )
    return replace(config, **changes)


def _compare(config: Config, index: LengthIndex, folder: Path, rounds: int) -> dict[str, Any]:
    """Run a step in processes, then rehearse it in one; return the CPU seconds that each rank computes."""
    cluster = Cluster(device_description(jax.devices()[0]), PROCESSES, 1)
    forecast = forecast_run(config, cluster, index, [1.0]).chosen
    tasks = [Task(forecast, folder, rounds, rehearses) for rehearses in (False, True)]
    # All on one core, so that no process slows another one by what it computes beside it.
    core = sorted(os.sched_getaffinity(0))[:1] if hasattr(os, "sched_getaffinity") else []
    processes = run_workers(__name__, tasks[0], [core] * PROCESSES)
    (rehearsed,) = run_workers(__name__, tasks[1], [core])
    ran = np.array([process["seconds"] for process in processes])
    alone = np.array(rehearsed["seconds"])
    return {
        "ran": ran.tolist(),
        "rehearsed": alone.tolist(),
        "slowest_ran": int(ran.argmax()),
        "slowest_rehearsed": int(alone.argmax()),
        "slowest_off": float(alone.max() / ran.max() - 1),
        "most_off": float(np.abs(alone / ran - 1).max()),
    }


def measure(task: Task) -> dict[str, Any]:
    """Measure the CPU seconds of this process's passes, or rehearse those of all."""
    index = LengthIndex.open(task.index)
    plan = task.forecast.plan
    config = apply_memory_plan(task.forecast.config, plan.policies, plan.loss_chunks)
    reader = made_samples(index, config.model)
    if task.rehearses:
        rehearsal = rehearse(task.forecast, reader, jax.devices()[0], 1, None, time.process_time)
        # In units, processes have a tower each, in this order.
        of_units = [seconds for name in UNITS for seconds in rehearsal.by_rank[name]]
        return {"seconds": of_units if config.units else rehearsal.of_all.tolist()}
    model = build_model(config)
    devices = jax.devices()
    executor = make_executor(
        config, model, place_stages(config, model, devices), accumulates(config)
    )
    ranks, encoder_ranks = local_ranks(executor.mesh), None
    if config.units:
        of_units = unit_ranks(config, devices)
        executor.rows = tower_rows(config, task.forecast.layout, of_units)
        ranks, encoder_ranks = of_units.ranks, of_units.encoder_ranks
    layout = BatchLayout.of_config(config)
    step = task.forecast.steps[0]
    batches = [
        executor.put(pack_microbatch(m, layout, reader, ranks, encoder_ranks), n)
        for n, m in enumerate(step.microbatches)
    ]
    trainer = Trainer.start(config, executor)
    executor.passes.clock = time.process_time
    executor.passes.synchronous = True
    seconds = []
    for number in range(task.rounds + 1):
        executor.passes.times = []
        coordination.wait_for_all(f"bench/{number}")
        trainer.step(batches)
        seconds.append(sum(end - start for _, start, end in executor.passes.times))
    return {"seconds": float(np.min(seconds[1:]))}


if __name__ == "__main__":  # of a folder with a task
    run_worker(measure)
