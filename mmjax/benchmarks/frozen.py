"""Measure how much faster a step is where parts of the model are frozen (MMScale, 7.3.1), against the planner."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import jax

from mmjax.autotune.layer_profile import layer_programs
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.spmd import (
    POLICY,
    SIDE,
    TEXT,
    TIMING,
    EqualSamples,
    check_width,
    make_step,
    predict_step,
    spmd_config,
    take_turns,
)
from mmjax.config import (
    BatchConfig,
    Config,
    DiffusionTransformerConfig,
    FunctionSource,
    PixelLatents,
    Samples,
)
from mmjax.config.model import SETTINGS, frozen_modules, train_only
from mmjax.data.sample import Sample, SampleLengths
from mmjax.planning.flops import executed, needed_gradients

ROWS = 2  # samples of a step on every device, and rows of each module
ALL = "all"


class EqualDrawings(EqualSamples):
    """The same samples with an image behind the text, which is to be made."""

    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""
        return SampleLengths(TEXT, (("vision", (SIDE, SIDE)), ("picture", (SIDE, SIDE))))

    def sample(self, index: int) -> Sample:
        """Return an image, random text, and an image to be made."""
        vision, picture, text = super().sample(index).segments
        return Sample((vision, text, picture))


OPTIONS: Options = TIMING | {
    "--width": option(384, "of all modules, a multiple of 64"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each setting: `faster` is the step with everything trained over the step in the setting.

    `planned`: the same of the planner's seconds, from the times of single layers, which depend on
    what is trained, and the device's rates; `off`: by which part it differs. `flops`: the same of
    executed FLOPs alone. Medians of rounds in which steps and layers took turns.
    """
    check_width(args)
    devices = jax.devices()
    base = _config(args.width, len(devices))
    configs = {ALL: base} | {
        trained: replace(base, model=train_only(base.model, trained)) for trained in SETTINGS
    }
    steps = {name: make_step(config, devices) for name, config in configs.items()}
    shape = steps[ALL].batch.shape
    programs: dict[Hashable, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    # what a tower's layers are timed as in each setting, by tower and the gradients that they
    # compute
    layers = {}
    for name, config in configs.items():
        for tower in shape:
            gradients = needed_gradients(tower, config.model, frozen_modules(config.model))
            layers[name, tower] = tower, gradients
            if (tower, gradients) not in programs:
                timed = layer_programs(config, tower, shape[tower], devices[0])
                programs[tower, gradients] = timed.get(POLICY, timed["forward"])
    turns = take_turns(programs, args)
    typical = turns.seconds
    planned, flops = {}, {}
    for name, step in steps.items():
        times = turns.layer_seconds({tower: layers[name, tower] for tower in shape})
        planned[name] = predict_step(step, times, turns.device).total
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
        data=replace(
            base.data, sources={"equal": FunctionSource("mmjax.benchmarks.frozen:EqualDrawings")}
        ),
        batch=BatchConfig(Samples(ROWS * devices), rows, microbatches=1, shapes=1),
        model=replace(base.model, generators={"picture": picture}),
    )
