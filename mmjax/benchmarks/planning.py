"""Measure how long planning steps takes, how full and equal they are, and what travels, as in a training run."""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mmjax.balance.parts import fill
from mmjax.balance.waits import mean_waits
from mmjax.benchmarks.corpora import LENGTHS, TILES, index_of_samples
from mmjax.benchmarks.grouping import overdispersion
from mmjax.benchmarks.harness import Measurement, Options, named, option, ranks_of_node, timed
from mmjax.benchmarks.planned_steps import measure_steps
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
from mmjax.data.plan.length_files import omni_corpus, read_lengths
from mmjax.data.plan.placement import (
    Topology,
)
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

_timed = partial(timed, clock=time.process_time)


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
    _plan(Namespace(**vars(args) | _COMPILED), read, encoders)
    placer, plans, figures = _plan(args, read, encoders)
    measured = measure_steps(plans, placer.prices, placer.index)
    mean = mean_waits(measured.waits)
    samples = [plan.samples() for plan in plans]
    sample = np.concatenate(samples)
    step = np.repeat(np.arange(len(plans)), list(map(len, samples)))
    source = read.get("source")
    random = None if source is None else overdispersion(source[sample % len(source)], step)
    modules = ("llm", *encoders)
    worst = (measured.used / measured.room).min(0)
    figures |= {
        "fill": named("", modules, fill(measured.used, measured.room).tolist()),
        "worst_fill": named("", modules, worst.tolist()),
        "dist_ratio": named("", modules, measured.dist_ratio.mean(0).tolist()),
        "wait": mean.wait,
        "worst_wait": max(w.wait for w in measured.waits),
        "wait_bound": mean.bound,
        "padding": mean.padding,
        "wire_share": measured.wire_share,
        "overdispersion": random,
        "steps": len(plans),
    }
    arrays = {"used": measured.used, "room": measured.room, "dist_ratio": measured.dist_ratio}
    return Measurement(figures, {"sample": sample, "step": step} | arrays)


def _plan(
    args: Namespace, read: Mapping[str, np.ndarray], encoders: Mapping[str, str]
) -> tuple[Placer, list[StepPlan], dict[str, Any]]:
    """Plan steps one after the other; return also the figures of the CPU seconds that this took."""
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

    planner, first_seconds = _timed(first_step)
    grouper = replace(planner.grouper, first_steps=[0])  # without the chunks that are in memory
    grouping: list[float] = []
    placing: list[float] = []
    plans: list[StepPlan] = []
    longest_wait = number = 0
    while number < args.steps or number not in grouper.first_steps:  # chunks are grouped as a whole
        groups, seconds = _timed(grouper.step, number)
        grouping.append(seconds)
        # without grouping the end of a chunk is as its beginning
        if args.grouping == "pack" or number < args.steps:
            placed, seconds = _timed(lambda groups=groups: [*map(planner.placer.place, groups)])
            placing.append(seconds)
            plans.append(StepPlan(number, tuple(m for group in placed for m in group)))
            longest_wait = max(longest_wait, grouper.longest_wait(number))
        number += 1
    figures = {
        "grouping_seconds_per_step": statistics.fmean(grouping),
        "placing_seconds_per_step": statistics.fmean(placing),
        "first_step_seconds": first_seconds,
        "longest_wait": longest_wait,
    }
    return planner.placer, plans, figures


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
