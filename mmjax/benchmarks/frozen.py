"""Measure how much faster a step is where parts of the model are frozen (MMScale, 7.3.1), against the planner."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from mmjax.autotune.layer_profile import STACK, layer_programs, typical_seconds
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.spmd import POLICY, SIDE, EqualSamples, make_step, predict_step, spmd_config
from mmjax.config import (
    BatchConfig,
    Config,
    DiffusionTransformerConfig,
    FunctionSource,
    ModelConfig,
    PixelLatents,
    Samples,
)
from mmjax.data.sample import Item, Sample, SampleLengths
from mmjax.errors import UserError
from mmjax.planning.flops import executed, frozen_modules, needed_gradients
from mmjax.runtime.devices import device_description

ROWS = 2  # samples of a step on every device, and rows of each module
ALL = "all"


class EqualDrawings(EqualSamples):
    """The same samples with an image behind the text, which is to be made."""

    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""
        facts = super().facts(index)
        return replace(facts, items=(*facts.items, ("picture", (SIDE, SIDE))))

    def sample(self, index: int) -> Sample:
        """Return an image, random text, and an image to be made."""
        return Sample((*super().sample(index).segments, Item("picture", 1)))


OPTIONS: Options = {
    "--width": option(384, "of all modules, a multiple of 64"),
    "--seconds": option(120.0, "to measure for"),
    "--cpu-time": option(False, "of this process, which should run on one core"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each setting: `faster` is the step with everything trained over the step in the setting.

    `planned`: the same of the planner's seconds, from the times of single layers, which depend on what is trained, and
    the device's rates; `off`: by which part it differs. `flops`: the same of executed FLOPs alone. Medians of rounds in
    which steps and layers took turns.
    """
    if args.width < 64 or args.width % 64:
        raise UserError("--width must be a multiple of 64")
    devices = jax.devices()
    base = _config(args.width, len(devices))
    configs = {ALL: base} | {trained: replace(base, model=train_only(base.model, trained)) for trained in SETTINGS}
    steps = {name: make_step(config, devices) for name, config in configs.items()}
    shape = steps[ALL].batch.shape
    programs: dict[Any, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    layers = {}  # what a tower's layers are timed as in each setting, by tower and the gradients that they compute
    for name, config in configs.items():
        for tower in shape:
            gradients = needed_gradients(tower, config.model, frozen_modules(config.model))
            layers[name, tower] = tower, gradients
            if (tower, gradients) not in programs:
                timed = layer_programs(config, tower, shape[tower], devices[0])
                programs[tower, gradients] = timed.get(POLICY, timed["forward"])
    clock = time.process_time if args.cpu_time else time.perf_counter
    typical = typical_seconds(programs, args.seconds, clock)
    device = device_description(devices[0], clock)
    sharing = len(devices) if devices[0].platform == "cpu" else 1
    planned, flops = {}, {}
    for name, step in steps.items():
        times = {tower: sharing * typical[layers[name, tower]] / STACK for tower in shape}
        planned[name] = predict_step(step, times, device).total
        model = step.config.model
        flops[name] = sum(f.total for f in executed(model, shape, frozen_modules(model)).values())
    rows = []
    for name in configs:
        row = {"trained": name, "seconds": typical[name], "faster": typical[ALL] / typical[name]}
        row |= {"planned": planned[ALL] / planned[name], "flops": flops[ALL] / flops[name]}
        rows.append(row | {"off": row["planned"] / row["faster"] - 1})
    return rows


def _config(width: int, devices: int) -> Config:
    base = spmd_config(width, devices, 1)
    llm = base.model.llm
    picture = DiffusionTransformerConfig(
        layers=llm.layers,
        width=width,
        heads=llm.heads,
        mlp_width=llm.mlp_width,
        condition_width=width,
        patch=4,
        latents=PixelLatents(channels=1),
        min_patches=16,
        remat=POLICY,
    )
    rows = dict.fromkeys(("llm", "vision", "picture"), ROWS * devices)
    return replace(
        base,
        name="frozen",
        data=replace(base.data, sources={"equal": FunctionSource("mmjax.benchmarks.frozen:EqualDrawings")}),
        batch=BatchConfig(Samples(ROWS * devices), rows, microbatches=1, shapes=1),
        model=replace(base.model, generators={"picture": picture}),
    )


SETTINGS = ("projectors", "encoder", "llm", "generator")  # of frozen training, by what is trained (MMScale, 7.3.1)


def train_only(model: ModelConfig, trained: str) -> ModelConfig:
    """Freeze all but connectors, queries and one kind of module, which `trained` names; "projectors": no other.

    Raises UserError for a name that is not in SETTINGS.
    """
    if trained not in SETTINGS:
        raise UserError(f"trained={trained}: choose one of {', '.join(SETTINGS)}")
    return replace(
        model,
        llm=replace(model.llm, frozen=trained != "llm"),
        encoders={name: replace(c, frozen=trained != "encoder") for name, c in model.encoders.items()},
        generators={name: replace(c, frozen=trained != "generator") for name, c in model.generators.items()},
    )
