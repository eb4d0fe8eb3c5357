"""Compare a rehearsal on one device with four processes that run the same steps: CPU seconds of every rank."""

from __future__ import annotations

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
SCALE = 8  # by which lengths are divided
WIDTH = {"width": 192, "heads": 6, "mlp_width": 512}
CONNECTOR = ConnectorConfig(merge=2)
MODEL = ModelConfig(
    DecoderConfig(**WIDTH, layers=6, kv_heads=3, head_width=32, vocab=512),
    {
        "vision": VisionConfig(**WIDTH, layers=4, patch=4, channels=1, connector=CONNECTOR),
        "audio": AudioConfig(
            **WIDTH,
            layers=4,
            clips=LogMel(mels=16, sample_rate=4000, window=64, hop=32),
            connector=CONNECTOR,
        ),
    },
)
UNITS = {"llm": Unit(data=2), "vision": Unit(), "audio": Unit()}  # of the four processes
OPTIONS: Options = {
    "--samples": option(24, "of a step", minimum=PROCESSES),
    "--rounds": option(7, "of every step, of which the median counts", minimum=1),
}


@dataclass(frozen=True)
class Task:
    """What a process does: run its part of a step, or rehearse all of it."""

    forecast: Forecast
    index: Path
    rounds: int
    rehearses: bool


def run(args: Namespace) -> list[Mapping[str, Any]]:
    """Run and rehearse one step with rows of unequal samples on one mesh and in units."""
    rows = []
    lengths = {key: divided(of_key, SCALE) for key, of_key in omni_corpus(2000, args.seed).items()}
    index = index_of_lengths(lengths, MODEL.item_modules, MODEL.llm)
    with tempfile.TemporaryDirectory() as name:
        index.save(Path(name))
        for layout, changes in (
            ("data 4", {}),
            ("fsdp 4", {"mesh": MeshConfig(fsdp=4)}),
            ("units", {"units": UNITS}),
        ):
            config = Config(
                name="rehearsal",
                data=DataConfig(),
                batch=BatchConfig(
                    Samples(args.samples),
                    dict.fromkeys(MODEL.towers, PROCESSES),
                    balance=NoBalance(),
                    grouping=NoGrouping(),
                    microbatches=2 if "units" in changes else 1,
                ),
                model=MODEL,
                training=TrainingConfig(steps=1000),
                seed=args.seed,
            )
            config = replace(config, **changes)
            rows.append({"layout": layout} | _compare(config, index, Path(name), args.rounds))
    return rows


def _compare(config: Config, index: LengthIndex, folder: Path, rounds: int) -> dict[str, Any]:
    cluster = Cluster(device_description(jax.devices()[0]), PROCESSES, 1)
    forecast = forecast_run(config, cluster, index, [1.0]).chosen
    tasks = [Task(forecast, folder, rounds, rehearses) for rehearses in (False, True)]
    real = run_workers(__name__, tasks[0], [()] * PROCESSES)
    (rehearsed,) = run_workers(__name__, tasks[1], [()])
    passes = np.array([process["passes"] for process in real])
    ranks = np.array(rehearsed["ranks"])
    return {
        "ran": np.round(passes, 3).tolist(),
        "rehearsed": np.round(ranks, 3).tolist(),
        "off": float(np.abs(ranks / passes - 1).max()),
        "slowest_is_right": bool(passes.argmax() == ranks.argmax()),
        "whole": [process["step"] for process in real],
    }


def measure(task: Task) -> dict[str, Any]:
    """Measure the CPU seconds of this process's passes, or rehearse those of all."""
    index = LengthIndex.open(task.index)
    plan = task.forecast.plan
    config = apply_memory_plan(task.forecast.config, plan.policies, plan.loss_chunks)
    reader = made_samples(index, config.model)
    if task.rehearses:
        rehearsal = rehearse(task.forecast, reader, jax.devices()[0], 1, None, time.process_time)
        by_rank = rehearsal.by_rank
        if config.units:
            return {"ranks": [*by_rank["llm"], *by_rank["vision"], *by_rank["audio"]]}
        return {"ranks": sum(by_rank.values()).tolist()}
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
    passes, whole = [], []
    for number in range(task.rounds + 1):
        coordination.wait_for_all(f"bench/{number}")
        began = time.process_time()
        weighed = executor.weigh_batches(batches)
        jax.block_until_ready(weighed.weights)
        weighing = time.process_time()
        run = executor.gradients(
            trainer.state, trainer.sums, weighed.batches, weighed.weights, None
        )
        jax.block_until_ready([x.gradients for x in run.sums])
        computed = time.process_time()
        trainer.state, trainer.sums, report = executor._update(
            trainer.state, run, trainer.hyper, weighed
        )
        jax.block_until_ready((trainer.state, trainer.sums, report))
        passes.append(computed - weighing)
        whole.append(time.process_time() - began)
    return {"passes": float(np.median(passes[1:])), "step": float(np.median(whole[1:]))}


if __name__ == "__main__":  # of a folder with a task
    run_worker(measure)
