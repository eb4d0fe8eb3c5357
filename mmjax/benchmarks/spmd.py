"""Measure whole steps on one mesh against what the planner predicts from layers that are timed in turns with them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from mmjax.autotune.layer_profile import STACK, layer_programs, typical_seconds
from mmjax.autotune.memory_plan import fit_run
from mmjax.autotune.run_time import StepTime, time_run
from mmjax.autotune.sharded_stages import device_microbatch, on_one_mesh
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.synthetic_run import RandomSamples, make_executor, opened_data
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
from mmjax.data.sample import SampleLengths, Split
from mmjax.errors import UserError
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.hardware import Cluster, Device
from mmjax.planning.memory import DeviceBatch
from mmjax.planning.remat import RunPlan
from mmjax.planning.speed import FORWARD, LayerTimes, Speed
from mmjax.runtime.devices import device_description
from mmjax.runtime.state import hyperparameters

# of every sample: text tokens, and pixels of the side of its image
VOCAB, TEXT, SIDE = 2048, 192, 64
LAYERS = 4  # of each tower
POLICY = "none"  # of all layers


class EqualSamples(RandomSamples):
    """Samples of an image and a text that are as long as those of all others, so that every row has one length."""

    vocab = VOCAB

    def __init__(self, split: Split) -> None:
        pass

    def __len__(self) -> int:
        return 64

    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""
        return SampleLengths(TEXT, (("vision", (SIDE, SIDE)),))


class Step(NamedTuple):
    """A step on a mesh, with what the planner knows of it."""

    config: Config
    mesh: jax.sharding.Mesh
    layout: RankLayout
    plan: RunPlan
    microbatches: list[MicrobatchPlan]
    batch: DeviceBatch  # of each microbatch
    run: Callable[[], Any]


TIMING: Options = {
    "--seconds": option(120.0, "to measure for"),
    "--cpu-time": option(False, "of this process, which should run on one core"),
}
OPTIONS: Options = TIMING | {
    "--microbatches": option([1, 4], "of a step; several are compared", minimum=1),
    "--width": option(256, "of the LLM and the encoder, a multiple of 64"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each number of microbatches, with data parallelism over all devices.

    `measured`: seconds of a step; `predicted`: by the planner, from the times of single layers and
    the device's rates. `layers` and `update`: the parts of `predicted`. Medians of rounds in which
    steps and layers took turns.
    """
    check_width(args)
    devices = jax.devices()
    steps = {
        count: make_step(spmd_config(args.width, len(devices), count), devices)
        for count in args.microbatches
    }
    programs: dict[Hashable, Callable[[], Any]] = {count: step.run for count, step in steps.items()}
    first = next(iter(steps.values()))
    for tower, shape in first.batch.shape.items():
        programs[tower] = layer_programs(first.config, tower, shape, devices[0])[POLICY]
    turns = take_turns(programs, args)
    layers = turns.layer_seconds({tower: tower for tower in first.batch.shape})
    rows = []
    for count, step in steps.items():
        predicted = predict_step(step, layers, turns.device)
        measured = turns.seconds[count]
        row = {
            "devices": len(devices),
            "microbatches": count,
            "measured": measured,
            "predicted": predicted.total,
        }
        row["ratio"] = predicted.total / measured
        rows.append(
            row | {"layers": LAYERS * count * sum(layers.values()), "update": predicted.update}
        )
    return rows


class Turns(NamedTuple):
    """Typical seconds of programs that took turns, and the device by the same clock."""

    seconds: dict[Hashable, float]
    device: Device

    def layer_seconds(self, programs: Mapping[str, Hashable]) -> dict[str, float]:
        """Return the seconds of a tower's layer from its program: as in a profile, devices of a CPU share its cores."""
        devices = jax.devices()
        sharing = len(devices) if devices[0].platform == "cpu" else 1
        return {
            tower: sharing * self.seconds[program] / STACK for tower, program in programs.items()
        }


def take_turns(programs: Mapping[Hashable, Callable[[], Any]], args: Namespace) -> Turns:
    """Time programs in turns."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    return Turns(
        typical_seconds(programs, args.seconds, clock), device_description(jax.devices()[0], clock)
    )


def check_width(args: Namespace) -> None:
    """Raise UserError for a width that has no whole heads."""
    if args.width < 64 or args.width % 64:
        raise UserError("--width must be a multiple of 64")


def spmd_config(width: int, devices: int, microbatches: int) -> Config:
    """Configure an LLM and an encoder of one width, with a row of each on every device."""
    heads = width // 64
    common = {
        "layers": LAYERS,
        "width": width,
        "heads": heads,
        "mlp_width": 4 * width,
        "remat": POLICY,
    }
    llm = DecoderConfig(**common, kv_heads=heads, head_width=64, vocab=VOCAB)
    vision = VisionConfig(
        **common, patch=4, channels=1, connector=ConnectorConfig(merge=2, mlp_width=width)
    )
    return Config(
        name="spmd",
        data=DataConfig({"equal": FunctionSource("mmjax.benchmarks.spmd:EqualSamples")}, workers=0),
        batch=BatchConfig(
            Samples(devices * microbatches),
            {"llm": devices, "vision": devices},
            microbatches=microbatches,
            shapes=1,
        ),
        model=ModelConfig(llm, {"vision": vision}),
        mesh=MeshConfig(data=devices, fsdp=1),
        training=TrainingConfig(steps=100),
    )


def make_step(config: Config, devices: list[jax.Device]) -> Step:
    """Compile a config's step, and load its first batch."""
    mesh = make_mesh(config.mesh, devices)
    with opened_data(config, mesh) as data:
        loaded = data.loader(0)
    layout = data.loader.layout
    plan, _ = fit_run(config, mesh, layout, partial(data.layout_of, mesh=mesh))
    planned = replace(config, model=plan.applied(config.model))
    executor = make_executor(planned, mesh, loss_chunks=plan.loss_chunks)
    hyper = hyperparameters(config, 0)
    batches = [executor.put(batch) for batch in loaded.microbatches]
    state = executor.init(jax.random.key(0))
    accumulated = executor.zeros()

    def run() -> Any:
        nonlocal state, accumulated
        state, accumulated, report = executor.step(
            state, accumulated, batches, hyper, noise=np.zeros(2, np.uint32)
        )
        return state, report

    batch = device_microbatch(config, layout, layout.shapes[0])
    microbatches = data.loader.planner.plan(0).microbatches
    return Step(
        config=config,
        mesh=mesh,
        layout=layout,
        plan=plan,
        microbatches=microbatches,
        batch=batch,
        run=run,
    )


def predict_step(step: Step, layers: Mapping[str, float], device: Device) -> StepTime:
    """Predict the seconds of a step from those of a layer of each tower, with all devices at work."""
    # A microbatch's passes are one program, so that all of a layer's time may stand in its forward
    # pass.
    times = {
        tower: LayerTimes(rows, {length: {POLICY: layers[tower], FORWARD: layers[tower]}})
        for tower, (rows, length) in step.batch.shape.items()
    }
    config = on_one_mesh(
        replace(step.config, model=step.plan.applied(step.config.model)), step.mesh.shape
    )
    speed = Speed(device.rates(config.training.precision), times)
    cluster = Cluster(device, 1, step.mesh.size)
    return time_run(config, step.layout, step.plan, cluster, speed, [step.microbatches]).step
