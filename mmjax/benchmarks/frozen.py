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
    TIMING,
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
from mmjax.planning.flops import executed, needed_gradients

ROWS = 2  # samples of a step on every device, and rows of each module
ALL = "all"


OPTIONS: Options = TIMING | {"--width": option(384, "of all modules, a multiple of 64")}


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
    # In each setting, what the layers of a tower are timed as: the tower and the gradients that
    # they compute.
    layers: dict[str, dict[str, Hashable]] = {}
    for name, config in configs.items():
        frozen = frozen_modules(config.model)
        layers[name] = {t: (t, needed_gradients(t, config.model, frozen)) for t in shape}
        for tower, key in layers[name].items():
            if key not in programs:
                passes = layer_programs(config, tower, shape[tower], devices[0])
                programs[key] = passes.get(POLICY, passes["forward"])
    turns = take_turns(programs, args)
    planned, flops = {}, {}
    for name, step in steps.items():
        planned[name] = predict_step(step, turns.layer_seconds(layers[name]), turns.device).total
        model = step.prepared.config.model
        flops[name] = sum(f.total for f in executed(model, shape, frozen_modules(model)).values())
    rows = []
    for name in configs:
        seconds = turns.seconds[name]
        faster = turns.seconds[ALL] / seconds
        gain = planned[ALL] / planned[name]
        rows.append(
            {
                "trained": name,
                "seconds": seconds,
                "faster": faster,
                "planned": gain,
                "flops": flops[ALL] / flops[name],
                "off": gain / faster - 1,
            }
        )
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
            base.data,
            sources={
                "equal": FunctionSource("mmjax.benchmarks.spmd:equal_samples", {"pictures": True})
            },
        ),
        batch=BatchConfig(Samples(ROWS * devices), rows, microbatches=1, shapes=1),
        model=replace(base.model, generators={"picture": picture}),
    )
