"""Measure whole steps on one mesh against what the planner predicts from layers that are timed in turns with them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from mmjax.autotune.layer_profile import STACK, layer_programs, typical_seconds
from mmjax.autotune.run_time import StepTime, time_run
from mmjax.autotune.sharded_stages import device_microbatch, on_one_mesh
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.synthetic_run import Prepared, RandomSamples, Trainer, prepare
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
from mmjax.data.sample import SampleLengths, Split
from mmjax.errors import UserError
from mmjax.planning.hardware import Cluster, Device
from mmjax.planning.memory import DeviceBatch
from mmjax.planning.speed import FORWARD, LayerTimes, Speed
from mmjax.runtime.devices import device_description

# of every sample: text tokens, and pixels of the side of its image
VOCAB, TEXT, SIDE = 2048, 192, 64
LAYERS = 4  # of each tower
POLICY = "none"  # of all layers


def equal_samples(split: Split, pictures: bool = False) -> RandomSamples:
    """Make samples of an image and a text, all as long, so that every row has one length.

    pictures: also an image behind the text, which is to be made.
    """
    del split
    items = (("vision", (SIDE, SIDE)),) + (("picture", (SIDE, SIDE)),) * pictures
    return RandomSamples([SampleLengths(TEXT, items)] * 64, VOCAB, behind=("picture",))


class Step(NamedTuple):
    """A step on a mesh, with what the planner knows of it."""

    prepared: Prepared
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
        programs[tower] = layer_programs(first.prepared.config, tower, shape, devices[0])[POLICY]
    turns = take_turns(programs, args)
    layers = turns.layer_seconds({tower: tower for tower in first.batch.shape})
    rows = []
    for count, step in steps.items():
        predicted = predict_step(step, layers, turns.device)
        measured = turns.seconds[count]
        rows.append(
            {
                "devices": len(devices),
                "microbatches": count,
                "measured": measured,
                "predicted": predicted.total,
                "ratio": predicted.total / measured,
                "layers": LAYERS * count * sum(layers.values()),
                "update": predicted.update,
            }
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
        data=DataConfig(
            {"equal": FunctionSource("mmjax.benchmarks.spmd:equal_samples")}, workers=0
        ),
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
    prepared = prepare(config, devices, 1)
    trainer = Trainer.start(config, prepared.executor)
    batches = [prepared.executor.put(batch) for batch in prepared.steps[0].microbatches]
    layout = prepared.loader.layout
    batch = device_microbatch(config, layout, layout.shapes[0])
    return Step(prepared, batch, lambda: trainer.step(batches))


def predict_step(step: Step, layers: Mapping[str, float], device: Device) -> StepTime:
    """Predict the seconds of a step from those of a layer of each tower, with all devices at work."""
    # A microbatch's passes are one program, so that all of a layer's time may stand in its forward
    # pass.
    times = {
        tower: LayerTimes(rows, {length: {POLICY: layers[tower], FORWARD: layers[tower]}})
        for tower, (rows, length) in step.batch.shape.items()
    }
    config, plan, loader, executor, _ = step.prepared
    mesh = executor.mesh
    planned = on_one_mesh(replace(config, model=plan.applied(config.model)), mesh.shape)
    speed = Speed(device.rates(config.training.precision), times)
    cluster = Cluster(device, 1, mesh.size)
    microbatches = loader.planner.plan(0).microbatches
    return time_run(planned, loader.layout, plan, cluster, speed, [microbatches]).step
