"""Measure how long planning steps takes, how full and equal they are, and what travels, as in a training run."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from mmjax.balance.parts import fill
from mmjax.balance.waits import mean_waits
from mmjax.benchmarks.corpora import LENGTHS, TILES, index_of_samples
from mmjax.benchmarks.fill import rank_dist_ratios, wire_share
from mmjax.benchmarks.grouping import overdispersion
from mmjax.benchmarks.harness import Measurement, Options, option, ranks_of_node
from mmjax.config import (
    Config,
    LlmBalance,
    NoBalance,
    NoGrouping,
    PackGrouping,
    PostBalance,
    Samples,
)
from mmjax.config.loading import default_config, find_config, load
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_files import omni_corpus, read_lengths
from mmjax.data.plan.placement import MicrobatchPlan, Topology, room_and_use, waits_of
from mmjax.data.plan.placer import Balance, Placer
from mmjax.data.plan.step_plan import StepPlan, StepPlanner, make_planner
from mmjax.errors import UserError

GROUPINGS = {"pack": PackGrouping(), "none": NoGrouping()}
BALANCES: dict[str, Balance] = {
    "post": PostBalance(),
    "off": PostBalance(locality="off"),
    "llm": LlmBalance(),
    "none": NoBalance(),
}
PRICED = "mllm_9b", "omni_10b"  # configs without and with audio
RANKS_PER_NODE = 8
# planned before timing
_COMPILED = {"ranks": 2 * RANKS_PER_NODE, "per_rank": 16, "ranks_per_node": 0, "steps": 2}

T = TypeVar("T")


OPTIONS: Options = LENGTHS | {
    "--ranks": option(8, "each with one row of every module", minimum=1),
    "--per-rank": option(16, "samples of a step, for each rank", minimum=1),
    "--ranks-per-node": option(0, "that exchange among themselves (default: 8)", minimum=0),
    "--grouping": option("pack", choices=tuple(GROUPINGS)),
    "--balance": option("post", "off: post with locality=off", choices=tuple(BALANCES)),
    "--steps": option(16, "with pack raised to whole chunks (default: 16)", minimum=1),
    "--microbatches": option(1, "of a step, which has so many times --per-rank", minimum=1),
    "--config": option(
        "", "whose model's positions and pairs are priced (default: mllm_9b, omni_10b with audio)"
    ),
}


def run(args: Namespace) -> Measurement:
    """Plan steps of these samples, used as often as needed. Seconds are CPU time, Numba's compilation excluded.

    grouping: drawing samples and choosing those of each step; placing: ranks, rows and offsets of
    their parts.
    first_step: from lengths in memory to the plan of the first step, row lengths and shapes
    included. By module: fill, useful positions / those that all ranks compute, of all steps and of
    the worst; dist_ratio, OmniBal eq. 2 over ranks, mean of steps. wait, wait_bound, padding: as in
    `Waits`, with attention, mean of steps; worst_wait: of one.
    longest_wait: steps. wire_share: tokens sent, padding included / tokens that encoders make.
    overdispersion: of the sources that the file names, about 1 for a shuffle.
    """
    keys = {"vision": "vision", TILES: "vision", "audio": "audio"}
    if args.lengths:
        read = read_lengths(args.lengths, ("llm_tokens",), optional=(*keys, "source"))
    else:
        read = omni_corpus(args.samples, args.seed)
    encoders = {name: key for key, name in keys.items() if key in read}
    if not encoders:
        raise UserError(
            f"--lengths {args.lengths[0]}: no lengths of an encoder; give vision, audio or {TILES}"
        )
    small = Namespace(**vars(args) | _COMPILED)
    _plan(small, read, encoders)
    return _measurement(_plan(args, read, encoders), read.get("source"))


@dataclass
class _Planned:
    """Hold steps planned one after the other, and the CPU seconds that this took."""

    encoders: Sequence[str]
    planner: StepPlanner
    first_step_seconds: float
    plans: list[StepPlan] = field(default_factory=list)
    grouped: int = 0  # steps, of which those of `plans` were also placed
    longest_wait: int = 0
    grouping_seconds: float = 0.0
    placing_seconds: float = 0.0


def _plan(args: Namespace, read: Mapping[str, np.ndarray], encoders: Mapping[str, str]) -> _Planned:
    available = len(read["llm_tokens"])
    step = args.ranks * args.per_rank * getattr(args, "microbatches", 1)
    # whole chunks may be more than these steps
    samples = -(-2 * args.steps * step // available) * available
    config = _config(args, tuple(encoders))
    index = index_of_samples(read, tuple(encoders.values()), samples, 1, config.model)
    per_node = ranks_of_node(args.ranks_per_node, args.ranks, math.gcd(RANKS_PER_NODE, args.ranks))

    def first_step() -> StepPlanner:
        planner, _ = make_planner(index, config, [1.0], Topology(args.ranks, per_node, per_node))
        planner.plan(0)
        return planner

    planner, seconds = _cpu_seconds(first_step)
    planned = _Planned(tuple(encoders), planner, first_step_seconds=seconds)
    grouper = replace(planner.grouper, first_steps=[0])  # without the chunks that are in memory
    number = 0
    while number < args.steps or number not in grouper.first_steps:  # chunks are grouped as a whole
        groups, seconds = _cpu_seconds(grouper.step, number)
        planned.grouping_seconds += seconds
        # without grouping the end of a chunk is as its beginning
        if args.grouping == "pack" or number < args.steps:
            microbatches, seconds = _cpu_seconds(_place, planner.placer, groups)
            planned.placing_seconds += seconds
            planned.plans.append(StepPlan(number, tuple(microbatches)))
            planned.longest_wait = max(planned.longest_wait, grouper.longest_wait(number))
        number += 1
    planned.grouped = number
    return planned


def _place(placer: Placer, groups: Sequence[Group]) -> list[MicrobatchPlan]:
    return [m for group in groups for m in placer.place(group)]


def _config(args: Namespace, encoders: Sequence[str]) -> Config:
    """Build the config of a run with these encoders: of its model only what it costs matters."""
    config = load(default_config(), ())
    priced = load(find_config(getattr(args, "config", "") or PRICED["audio" in encoders]), ()).model
    if missing := [name for name in encoders if name not in priced.encoders]:
        raise UserError(
            f"--config {args.config}: the lengths are of {missing[0]}, which its model has not"
        )
    towers = {name: priced.encoders[name] for name in encoders}
    model = replace(config.model, llm=priced.llm, encoders=towers, generators={})
    microbatches = getattr(args, "microbatches", 1)
    batch = replace(
        config.batch,
        size=Samples(args.ranks * args.per_rank * microbatches),
        rows=dict.fromkeys(("llm", *encoders), args.ranks),
        microbatches=microbatches,
        alignment=1,
        grouping=GROUPINGS[args.grouping],
        balance=BALANCES[args.balance],
    )
    return replace(config, model=model, batch=batch, seed=args.seed)


def _measurement(planned: _Planned, source: np.ndarray | None) -> Measurement:
    index = planned.planner.placer.index
    steps = len(planned.plans)
    step_room: list[np.ndarray] = []
    step_use: list[np.ndarray] = []
    for plan in planned.plans:
        room, use = zip(*(room_and_use(m, index) for m in plan.microbatches), strict=True)
        step_room.append(sum(room))
        step_use.append(sum(use))
    used = np.array(step_use)
    room = np.array(step_room)
    prices = planned.planner.placer.prices
    waits = [waits_of(plan.microbatches, prices, index) for plan in planned.plans]
    mean = mean_waits(waits)
    dist_ratio = np.array([rank_dist_ratios(plan.microbatches) for plan in planned.plans])
    sample = np.concatenate([plan.samples() for plan in planned.plans])
    step = np.repeat(np.arange(steps), [len(plan.samples()) for plan in planned.plans])
    modules = ("llm", *planned.encoders)
    figures = {
        "grouping_seconds_per_step": planned.grouping_seconds / planned.grouped,
        "placing_seconds_per_step": planned.placing_seconds / steps,
        "first_step_seconds": planned.first_step_seconds,
        "fill": _by_module(modules, fill(used, room)),
        "worst_fill": _by_module(modules, (used / room).min(0)),
        "longest_wait": planned.longest_wait,
        "dist_ratio": _by_module(modules, dist_ratio.mean(0)),
        "wait": mean.wait,
        "worst_wait": max(w.wait for w in waits),
        "wait_bound": mean.bound,
        "padding": mean.padding,
        "wire_share": wire_share([m for plan in planned.plans for m in plan.microbatches], index),
        "overdispersion": None
        if source is None
        else overdispersion(source[sample % len(source)], step),
        "steps": steps,
    }
    return Measurement(
        figures,
        {"sample": sample, "step": step, "used": used, "room": room, "dist_ratio": dist_ratio},
    )


def _by_module(modules: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return dict(zip(modules, values.tolist(), strict=True))


def _cpu_seconds(work: Callable[..., T], *args: Any) -> tuple[T, float]:
    """Do the work; return its result and the CPU seconds of this process that it took."""
    began = time.process_time()
    result = work(*args)
    return result, time.process_time() - began
