"""Measure how full every module's rows are, and how equal the ranks, by grouping and balance: plans, loads nothing."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.balance.parts import fill
from mmjax.balance.waits import mean_waits
from mmjax.benchmarks.corpora import index_of_samples
from mmjax.benchmarks.harness import Options, named, option, ranks_of_node, timed
from mmjax.benchmarks.planned_steps import measure_steps
from mmjax.config import (
    BatchConfig,
    Config,
    IsfGrouping,
    LlmBalance,
    NoBalance,
    NoGrouping,
    PackGrouping,
    PostBalance,
    Samples,
)
from mmjax.config.loading import copy_config, default_config, find_config, load
from mmjax.data.plan.budget import prices_of
from mmjax.data.plan.length_files import read_lengths
from mmjax.data.plan.length_index import LengthIndex, build_index
from mmjax.data.plan.placement import MicrobatchPlan, Topology
from mmjax.data.plan.sampler import mixture_weights
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources

PACK = ("pack", PackGrouping())
ISF = ("isf", IsfGrouping())
NONE = ("none", NoGrouping())
BALANCES = (NoBalance(), LlmBalance(), PostBalance())


OPTIONS: Options = {
    "--config": option("", "a config's file or name (default: tiny_omni)"),
    "overrides": option(None, "changes to the config", metavar="a.b=value", nargs="*"),
    "--steps": option(300, minimum=1),
    "--epochs": option(0.0, "in place of steps", minimum=0),
    "--seeds": option(None, "how many (default: 3, with --lengths 1)", type=int, minimum=1),
    "--ranks": option(1, minimum=1),
    "--ranks-per-node": option(0, "that exchange among themselves (default: all)", minimum=0),
    "--lengths": option(
        [], "of samples, in place of the config's data", metavar="F.npz", type=Path
    ),
    "--samples": option(0, "use this many of them (default: all)", minimum=0),
    "--scale": option(1, "divide these lengths by this, to at least 1", minimum=1),
    "--per-rank": option(60, "of these samples in a step, for each rank", minimum=1),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each grouping, balance (where there are ranks) and seed.

    shapes: those in use; fill_*: useful positions / budget, alignment inside items is padding;
    aligned_*: it is none; dist_ratio_*: over ranks, OmniBal eq. 2; width_*: tokens that a rank may
    send to each peer, mean of microbatches;
    wait, wait_bound, padding: as in `Waits`, mean of steps;
    wire_share: tokens that leave their rank, padding included, as a part of all that encoders make;
    idle_exchanges: those that send nothing but padding, as a part of all that encoders could have;
    split_steps: those that needed more microbatches than the config has; plan_ms: of a step.
    """
    args.seeds = args.seeds if args.seeds is not None else 1 if args.lengths else 3
    path = find_config(args.config) if args.config else default_config()
    config = load(path, args.overrides)
    per_node = ranks_of_node(args.ranks_per_node, args.ranks, args.ranks)
    topology = Topology(args.ranks, per_node, per_node)
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        config = replace(config, seed=seed)
        if args.lengths:
            encoders = tuple(config.model.encoders)
            read = read_lengths(args.lengths, ("llm_tokens", *encoders))
            samples = args.samples or len(read["llm_tokens"])
            index = index_of_samples(read, encoders, samples, args.scale, config.model)
            weights = [1.0]
        else:
            index, weights = _index_sources(config, path)
        for name, batch in _variants(config, args):
            measured = _measure(replace(config, batch=batch), index, weights, topology, args)
            rows.append({"grouping": name, "balance": batch.balance.kind, "seed": seed} | measured)
    return rows


def _variants(config: Config, args: Namespace) -> list[tuple[str, BatchConfig]]:
    batch = config.batch
    balances = BALANCES if args.ranks > 1 else BALANCES[:1]
    groupings = [(*grouping, batch.shapes) for grouping in (PACK, ISF, NONE)] + [
        ("none, one shape", NONE[1], 1)
    ]
    if args.lengths:
        rows = dict.fromkeys(("llm", *config.model.encoders), args.ranks)
        batch = replace(
            batch, size=Samples(args.ranks * args.per_rank), rows=rows, microbatches=1, alignment=1
        )
        groupings = [(*PACK, 1), (*NONE, 8)]
    return [
        (name, replace(batch, grouping=grouping, shapes=shapes, balance=balance))
        for name, grouping, shapes in groupings
        for balance in balances
    ]


def _index_sources(config: Config, path: Path) -> tuple[LengthIndex, list[float]]:
    """Build the index of the data of the config in `path`; return it and the weights of its sources."""
    with tempfile.TemporaryDirectory() as folder:
        copy_config(path, Path(folder))  # where a FunctionSource looks its function up
        model = config.model
        index = build_index(
            open_sources(config, "train", Path(folder)), model.item_modules, model.llm
        )
    return index, mixture_weights(config.data, index)


def _measure(
    config: Config,
    index: LengthIndex,
    weights: Sequence[float],
    topology: Topology,
    args: Namespace,
) -> dict[str, Any]:
    modules = ("llm", *config.model.item_modules)
    planner, _ = make_planner(index, config, weights, topology)
    planner.plan(0)  # compiles
    steps = planner.grouper.steps_for_epochs(args.epochs) if args.epochs else args.steps
    plans, seconds = timed(lambda: [planner.plan(step) for step in range(steps)])
    measured = measure_steps(plans, prices_of(config, planner.grouper.budget), index)
    waits = mean_waits(measured.waits)
    microbatches = [m for plan in plans for m in plan.microbatches]
    aligned = np.array([np.bincount(m.module, m.length, len(modules)) for m in microbatches])
    widths = np.array([m.shape.widths for m in microbatches])
    idle = [
        (np.array(m.shape.widths) > 0) & (_count_moved_items(m, len(modules)) == 0)
        for m in microbatches
    ]
    return {
        "steps": steps,
        "wait": waits.wait,
        "wait_bound": waits.bound,
        "padding": waits.padding,
        "samples": np.mean([len(m.samples) for m in microbatches]),
        "shapes": len({m.shape for m in microbatches}),
        **named("fill_", modules, fill(measured.used, measured.room)),
        **named("aligned_", modules, aligned.sum(0) / measured.room.sum(0)),
        **named("dist_ratio_", modules, measured.dist_ratio.mean(0)),
        **named("width_", modules[1:], widths.mean(0)),
        "wire_share": measured.wire_share,
        "idle_exchanges": float(np.mean(idle)) if modules[1:] else 0.0,
        "split_steps": sum(len(plan.microbatches) > config.batch.microbatches for plan in plans),
        "plan_ms": 1e3 * seconds / steps,
    }


def _count_moved_items(microbatch: MicrobatchPlan, modules: int) -> np.ndarray:
    """Count the items of each encoder that run on another rank than their sample, int64 `[encoders]`."""
    rank = microbatch.rank()
    sample_rank = rank[microbatch.part_start[:-1]][microbatch.sample_of()]
    return np.bincount(microbatch.module[rank != sample_rank], minlength=modules)[1:]
