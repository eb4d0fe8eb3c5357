"""Measure what recomputing costs: predicted from layers' measured times, and measured in whole steps on this device."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from mmjax.autotune.layer_profile import STACK, layer_programs, time_layer, typical_seconds
from mmjax.batch import Microbatch
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.synthetic_run import make_executor, plan_rows, with_policies
from mmjax.config import (
    Config,
    ConnectorConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    Remat,
    VisionConfig,
)
from mmjax.config.loading import load
from mmjax.cost.trace import tower_batch
from mmjax.errors import UserError
from mmjax.planning.memory import GB, DeviceBatch
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.speed import LayerTimes, Speed
from mmjax.runtime.devices import device_description

AUTO = "auto"
STEP = "step"
MIXES: dict[str, tuple[Remat, Remat]] = {  # of the LLM's layers and of the encoder's
    "none": ("none", "none"),
    "full": ("full", "full"),
    "products": ("products", "products"),
    "attention_mlp": ("attention_mlp", "attention_mlp"),
    "products/full": ("products", "full"),
    "full/products": ("full", "products"),
}
TOKENS = 64  # that the encoder gives to the text


OPTIONS: Options = {
    "--width": option(1536, "of the LLM; the encoder has half of it"),
    "--layers": option(4, "of each tower"),
    "--length": option(256, "positions of the row of each tower"),
    "--seconds": option(150.0, "to measure for"),
    "--room": option(0.5, "for activations in `auto`: 0 is full's, 1 is none's"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each mix of remat policies, and `auto` with the memory for activations cut to `--room`.

    `activations`: GB that it keeps. `step`: seconds of a step's forward and backward pass.
    `measured`: how much longer than that of the fastest mix; `predicted`: the same from layers that
    were timed alone. All are medians of rounds in which they took turns. `off`: by which part they
    differ. `gained`: the time saved against `full`, by what `none` saves.
    """
    if args.width % 256 or min(args.width, args.layers, args.length) < 1 or args.length % 8:
        raise UserError("--width must be a multiple of 256, --length of 8, and --layers at least 1")
    if not 0 <= args.room <= 1:
        raise UserError(f"--room {args.room}: give a part between 0 and 1")
    config = _config(args)
    device = jax.devices()[0]
    batch = DeviceBatch({"llm": (1, args.length), "vision": (1, args.length)}, {"vision": TOKENS})
    speed = _speed(config, batch, device)

    def fit(config: Config, room: float) -> RunPlan:
        return plan_rows(config, batch.shape, {}, speed, MemoryLimit(room), batch.widths)

    fits = {name: fit(_mixed(config, mix), np.inf) for name, mix in MIXES.items()}
    smallest, largest = (fits[name].device for name in ("full", "none"))
    fits[AUTO] = fit(config, smallest + args.room * (largest - smallest))
    states: dict[str, tuple[Any, Any]] = {}
    programs: dict[tuple[str, str], Callable[[], Any]] = {
        (STEP, name): _gradients(replace(config, model=fitted.applied(config.model)), batch, states)
        for name, fitted in fits.items()
    }
    for tower, shape in batch.shape.items():
        timed = layer_programs(config, tower, shape, device)
        programs |= {(tower, policy): run for policy, run in timed.items()}
    typical = typical_seconds(programs, args.seconds)
    steps = {name: typical[STEP, name] for name in fits}
    layers = {
        name: sum(typical[tower, p] for tower, mix in fitted.policies.items() for p in mix) / STACK
        for name, fitted in fits.items()
    }
    first = min(steps, key=lambda name: steps[name])
    rows = []
    for name, seconds in steps.items():
        measured = seconds - steps[first]
        predicted = layers[name] - layers[first]
        rows.append(
            {
                "remat": name,
                "activations": fits[name].fullest.memory["activations"] / GB,
                "step": seconds,
                "measured": measured,
                "predicted": predicted,
                "off": predicted / measured - 1 if measured else 0.0,
                "gained": (steps["full"] - seconds) / (steps["full"] - steps["none"]),
            }
        )
    return rows


def _config(args: Namespace) -> Config:
    width = args.width
    half = width // 2
    llm = DecoderConfig(
        args.layers, width, width // 64, width // 256, 64, mlp_width=4 * width, vocab=512
    )
    connector = ConnectorConfig(mlp_width=half)
    vision = VisionConfig(args.layers, half, half // 64, 4 * half, 14, connector=connector)
    base = load("tiny_omni")
    batch, training = replace(base.batch, microbatches=1), replace(base.training, loss_chunks=1)
    model = ModelConfig(llm, {"vision": vision})
    return replace(base, model=model, mesh=MeshConfig(), batch=batch, training=training)


def _mixed(config: Config, mix: tuple[Remat, Remat]) -> Config:
    return replace(
        config, model=with_policies(config.model, dict(zip(("llm", "vision"), mix, strict=True)))
    )


def _speed(config: Config, batch: DeviceBatch, device: jax.Device) -> Speed:
    times = {
        name: LayerTimes(rows, {length: time_layer(config, name, (rows, length), device)})
        for name, (rows, length) in batch.shape.items()
    }
    return Speed(device_description(device).rates(config.training.precision), times)


def _gradients(
    config: Config, batch: DeviceBatch, states: dict[str, tuple[Any, Any]]
) -> Callable[[], jax.Array]:
    """Build the program of a microbatch's gradients. Models of the same runs of layers share the `states`."""
    executor = make_executor(config, jax.devices()[:1])
    towers = executor.model.runs.items()
    runs = str({tower: [name for run in plan for name in run.parts] for tower, plan in towers})
    if runs not in states:
        states[runs] = executor.states[0].random_parameters()(jax.random.key(0))
    (arrays,) = executor.put(_microbatch(config, batch))
    program = executor.programs[0].forward_backward
    weight = {"llm": np.float32(batch.shape["llm"][1])}

    def step() -> jax.Array:
        return program(*states[runs], None, arrays, weight, None, {})[0].losses.loss

    return step


def _microbatch(config: Config, batch: DeviceBatch) -> Microbatch:
    """Make full rows of one sample each; the encoder's tokens stand at the beginning of the text."""
    zeros = partial(jax.tree.map, lambda x: np.zeros(x.shape, x.dtype))
    text, item = (
        zeros(tower_batch(config.model, name, batch.shape[name])) for name in ("llm", "vision")
    )
    along = np.broadcast_to(np.arange(batch.shape["llm"][1], dtype=np.int32), text.token.shape)
    slots = np.where(along < TOKENS, along, -1)
    sent = np.arange(batch.widths["vision"], dtype=np.int32)[None, None]
    text = text._replace(pos=along, position=along, weight=np.ones_like(text.weight))
    return Microbatch(
        text._replace(slots={"vision": slots}, send={"vision": sent}), {"vision": item}
    )
