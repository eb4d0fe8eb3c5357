"""Measure whole steps on one mesh against what the planner predicts from layers that are timed in turns with them."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.layer_profile import STACK, layer_programs, typical_seconds
from mmjax.autotune.memory_plan import fit_run
from mmjax.autotune.run_time import StepTime, time_run
from mmjax.autotune.sharded_stages import device_microbatch, on_one_mesh
from mmjax.benchmarks.harness import Options, option
from mmjax.config import (
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    MeshConfig,
    ModelConfig,
    Samples,
    TrainingConfig,
    VisionConfig,
)
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.plan.step_plan import RankLayout
from mmjax.data.sample import Item, Sample, SampleLengths, Split, Text
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.planning.hardware import Cluster, Device
from mmjax.planning.memory import DeviceBatch
from mmjax.planning.remat import RunPlan
from mmjax.planning.speed import FORWARD, LayerTimes, Speed
from mmjax.runtime.devices import device_description
from mmjax.runtime.executor import Executor
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.training.run_data import open_data

VOCAB, TEXT, SIDE = 2048, 192, 64  # of every sample: text tokens, and pixels of the side of its image
LAYERS = 4  # of each tower
POLICY = "none"  # of all layers


class EqualSamples:
    """Samples of an image and a text that are as long as those of all others, so that every row has one length."""

    def __init__(self, split: Split) -> None:
        pass

    def __len__(self) -> int:
        return 64

    def fingerprint(self) -> str:
        """Return no fingerprint: nothing keeps an index of these."""
        return ""

    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""
        return SampleLengths(TEXT, (("vision", (SIDE, SIDE)),))

    def sample(self, index: int) -> Sample:
        """Return an image and then random text."""
        tokens = np.random.default_rng(index).integers(0, VOCAB, TEXT).astype(np.int32)
        return Sample((Item("vision", 0), Text(tokens, np.ones(TEXT, np.float32))))

    def item(self, index: int, number: int) -> np.ndarray:
        """Return an image of noise."""
        return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 1), np.uint8)


class Step(NamedTuple):
    """A step on a mesh, with what the planner knows of it."""

    config: Config
    mesh: jax.sharding.Mesh
    layout: RankLayout
    plan: RunPlan
    microbatches: list[MicrobatchPlan]
    batch: DeviceBatch  # of each microbatch
    run: Callable[[], Any]


OPTIONS: Options = {
    "--microbatches": option([1, 4], "of a step; several are compared"),
    "--width": option(256, "of the LLM and the encoder, a multiple of 64"),
    "--seconds": option(120.0, "to measure for"),
    "--cpu-time": option(False, "of this process, which should run on one core"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each number of microbatches, with data parallelism over all devices.

    `measured`: seconds of a step; `predicted`: by the planner, from the times of single layers and the device's rates.
    `layers` and `update`: the parts of `predicted`. Medians of rounds in which steps and layers took turns.
    """
    if args.width < 64 or args.width % 64 or min(args.microbatches) < 1:
        raise UserError("--width must be a multiple of 64, and --microbatches at least 1")
    devices = jax.devices()
    steps = {count: make_step(spmd_config(args.width, len(devices), count), devices) for count in args.microbatches}
    programs: dict[int | str, Callable[[], Any]] = {count: step.run for count, step in steps.items()}
    first = next(iter(steps.values()))
    for tower, shape in first.batch.shape.items():
        programs[tower] = layer_programs(first.config, tower, shape, devices[0])[POLICY]
    clock = time.process_time if args.cpu_time else time.perf_counter
    typical = typical_seconds(programs, args.seconds, clock)
    # As a profile does: devices of one CPU share its cores.
    sharing = len(devices) if devices[0].platform == "cpu" else 1
    layers = {tower: sharing * typical[tower] / STACK for tower in first.batch.shape}
    rows = []
    for count, step in steps.items():
        predicted = predict_step(step, layers, device_description(devices[0], clock))
        row = {"devices": len(devices), "microbatches": count, "measured": typical[count], "predicted": predicted.total}
        row["ratio"] = predicted.total / typical[count]
        rows.append(row | {"layers": LAYERS * count * sum(layers.values()), "update": predicted.update})
    return rows


def spmd_config(width: int, devices: int, microbatches: int) -> Config:
    """Configure an LLM and an encoder of one width, with a row of each on every device."""
    heads = width // 64
    common = {"layers": LAYERS, "width": width, "heads": heads, "mlp_width": 4 * width, "remat": POLICY}
    llm = DecoderConfig(**common, kv_heads=heads, head_width=64, vocab=VOCAB)
    vision = VisionConfig(**common, patch=4, channels=1, connector=ConnectorConfig(merge=2, mlp_width=width))
    return Config(
        name="spmd",
        data=DataConfig({"equal": FunctionSource("mmjax.benchmarks.spmd:EqualSamples")}, workers=0),
        batch=BatchConfig(
            Samples(devices * microbatches), {"llm": devices, "vision": devices}, microbatches=microbatches, shapes=1
        ),
        model=ModelConfig(llm, {"vision": vision}),
        mesh=MeshConfig(data=devices, fsdp=1),
        training=TrainingConfig(steps=100),
    )


def make_step(config: Config, devices: list[jax.Device]) -> Step:
    """Compile a config's step, and load its first batch."""
    mesh = make_mesh(config.mesh, devices)
    with tempfile.TemporaryDirectory() as path:
        data = open_data(config, RunFolder(Path(path)), 0, NO_CHANGES, mesh)
        loaded = data.loader(0)
    layout = data.loader.layout
    plan, _ = fit_run(config, mesh, layout, partial(data.layout_of, mesh=mesh))
    model = Model.build(plan.applied(config.model), jnp.dtype(config.training.precision))
    executor = Executor.on_mesh(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        mesh,
        ShardingRules.of(config.mesh),
        sources=1,
        loss_chunks=plan.loss_chunks,
        accumulates=config.batch.microbatches > 1,
    )
    hyper = hyperparameters(config, 0)
    batches = [executor.put(batch) for batch in loaded.microbatches]
    state = executor.init(jax.random.key(0))
    accumulated = executor.zeros()

    def run() -> Any:
        nonlocal state, accumulated
        state, accumulated, report = executor.step(state, accumulated, batches, hyper, noise=np.zeros(2, np.uint32))
        return state, report

    batch = device_microbatch(config, layout, layout.shapes[0])
    microbatches = data.loader.planner.plan(0).microbatches
    return Step(config=config, mesh=mesh, layout=layout, plan=plan, microbatches=microbatches, batch=batch, run=run)


def predict_step(step: Step, layers: Mapping[str, float], device: Device) -> StepTime:
    """Predict the seconds of a step from those of a layer of each tower, with all devices at work."""
    # A microbatch's passes are one program, so that all of a layer's time may stand in its forward pass.
    times = {
        tower: LayerTimes(rows, {length: {POLICY: layers[tower], FORWARD: layers[tower]}})
        for tower, (rows, length) in step.batch.shape.items()
    }
    config = on_one_mesh(replace(step.config, model=step.plan.applied(step.config.model)), step.mesh.shape)
    speed = Speed(device.rates(config.training.precision), times)
    cluster = Cluster(device, 1, step.mesh.size)
    return time_run(config, step.layout, step.plan, cluster, speed, [step.microbatches]).step
