"""Measure what balancing gains: processes of one core each train equal steps with balance none, llm, off and post."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.balance.parts import dist_ratio
from mmjax.benchmarks.balance_steps import (
    MODEL,
    MODES,
    PHASES,
    Task,
    Trial,
    executed_flops,
    make_trial,
    predicted_gain,
    samples_of,
    scaled,
)
from mmjax.benchmarks.corpora import LENGTHS, read_phases
from mmjax.benchmarks.harness import Measurement, Options, option
from mmjax.benchmarks.planned_steps import positions_per_rank
from mmjax.benchmarks.processes import run_workers
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import LengthIndex, build_index
from mmjax.errors import PLOT_SUFFIXES, UserError, check_output

PREDICTED = ((8, 16), (64, 16))  # ranks x samples of each
PAPER = {"gain_post_over_none": "1.4-1.9 (OrchMLLM 8.1: throughput on 2560 GPUs)"}


OPTIONS: Options = LENGTHS | {
    "--scale": option(64, "divide all lengths by this, to at least 1", minimum=1),
    "--per-rank": option(4, "samples of a step for each rank", minimum=1),
    "--steps": option(40, "that are measured; 0: run nothing, with --picture"),
    "--processes": option(2, "ranks, each a process on a core of its own", minimum=1),
    "--picture": option(None, "draw each rank's work by phase", metavar="F.png|svg", type=Path),
    "--picture-ranks": option(8, minimum=1),
    "--picture-per-rank": option(16, minimum=1),
    "--picture-steps": option(50, minimum=1),
}


def run(args: Namespace) -> Measurement:
    """Plan, draw, run; return medians over all steps, where a step takes as long as its slowest process."""
    _check(args)
    lengths = scaled(read_phases(args), args.scale)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = _write_samples(lengths, folder)
        figures: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        if args.steps:
            trial = make_trial(
                index, folder / "lengths.npz", args.processes, args.per_rank, args.seed
            )
            loaders = {
                mode: StepLoader(
                    config, trial.budget, trial.layouts[mode], folder / "index", folder
                )
                for mode, config in trial.configs.items()
            }
            measured = _run_processes(Task(loaders, args.steps), args.processes)
            figures, arrays = _compute_figures(trial, measured, index, args.steps)
            for ranks, per_rank in PREDICTED:
                predicted = make_trial(index, folder / "lengths.npz", ranks, per_rank, args.seed)
                figures[f"predicted_gain_{ranks}x{per_rank}"] = predicted_gain(
                    predicted, args.steps
                )
        if args.picture is not None:
            figures |= _draw_picture(args, index, folder)
    return Measurement(figures, arrays, PAPER if args.steps else {})


def _check(args: Namespace) -> None:
    if args.steps < 0 or (args.steps == 0 and args.picture is None):
        raise UserError(f"--steps {args.steps}: give at least 1, or 0 together with --picture")
    if args.picture is not None:
        check_output("--picture", args.picture, PLOT_SUFFIXES)


def _write_samples(lengths: Mapping[str, np.ndarray], folder: Path) -> LengthIndex:
    """Write the samples and their index where processes find them."""
    np.savez(folder / "lengths.npz", **lengths)
    index = build_index({"lengths": samples_of(lengths)}, MODEL.encoders)
    index.save(folder / "index")
    return index


def _run_processes(task: Task, count: int) -> list[dict[str, Any]]:
    """Run the processes, each on a core of its own, and read what each measured."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if count > (available := len(cores) or os.cpu_count() or 1):
        print(
            f"warning: {count} processes share {available} cores: their times say little",
            file=sys.stderr,
            flush=True,
        )
    pinned = [cores[p % len(cores) :][:1] if cores else [] for p in range(count)]
    return run_workers("mmjax.benchmarks.balance_steps", task, pinned)


# --------------------------------------------------------------------------------------------------
# figures


def _compute_figures(
    trial: Trial, measured: Sequence[Mapping[str, Any]], index: LengthIndex, steps: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Compute what `--json` prints and `--out` writes: seconds and operations of every step, `[modes, steps]`."""
    plans = {mode: trial.plans(mode, steps) for mode in MODES}
    tokens = np.array([index.llm_tokens[plan.samples()].sum() for plan in plans["none"]])
    flops = {mode: np.array(list(map(executed_flops, plans[mode]))) for mode in MODES}
    seconds, busy = (
        {m: np.max([p[key][m] for p in measured], axis=0) for m in MODES}
        for key in ("seconds", "busy")
    )
    figures: dict[str, Any] = {}
    for mode in MODES:
        waits = trial.waits(plans[mode])
        figures |= {
            f"useful_tokens_per_second_{mode}": np.median(tokens / seconds[mode]),
            f"step_seconds_{mode}": np.median(seconds[mode]),
            f"core_seconds_{mode}": np.median(busy[mode]),
            f"wait_{mode}": waits.wait,
            f"padding_{mode}": waits.padding,
        }
    for mode in ("none", "llm", "off"):
        figures |= {
            f"gain_post_over_{mode}": np.median(seconds[mode] / seconds["post"]),
            f"predicted_gain_post_over_{mode}": np.median(flops[mode] / flops["post"]),
            f"mean_gain_post_over_{mode}": seconds[mode].sum() / seconds["post"].sum(),
            f"predicted_mean_gain_post_over_{mode}": flops[mode].sum() / flops["post"].sum(),
            f"core_gain_post_over_{mode}": np.median(busy[mode] / busy["post"]),
        }
    figures["shapes"] = len(
        {m.shape for planned in plans.values() for plan in planned for m in plan.microbatches}
    )
    figures["programs_compiled"] = max(p["compiled"] for p in measured)
    arrays = {"seconds": seconds, "core_seconds": busy, "flops": flops}
    stacked = {name: np.stack([by_mode[m] for m in MODES]) for name, by_mode in arrays.items()}
    return figures, stacked | {"tokens": tokens}


def _draw_picture(args: Namespace, index: LengthIndex, folder: Path) -> dict[str, float]:
    """Draw, and return each panel's mean dist ratio."""
    # matplotlib looks for fonts when it is first imported
    from mmjax.reporting.plots import MEANINGS, plot_work

    trial = make_trial(
        index, folder / "lengths.npz", args.picture_ranks, args.picture_per_rank, args.seed
    )
    planned = {m: trial.plans(m, args.picture_steps) for m in ("none", "llm", "post")}
    works = {
        m: dict(
            zip(PHASES, np.stack([positions_per_rank(plan) for plan in plans], axis=1), strict=True)
        )
        for m, plans in planned.items()
    }
    headings = {}
    for m, plans in planned.items():
        waits = trial.waits(plans)
        headings[m] = (
            f"balance {m}: {MEANINGS[m]}; ranks wait {waits.wait:.1%}, padding {waits.padding:.1%}"
        )
    title = f"{args.picture_ranks} ranks, {args.picture_per_rank} samples each, {args.picture_steps} steps"
    plot_work(args.picture, works, headings, title)
    return {
        f"picture_dist_ratio_{m}_{p}": dist_ratio(w).mean()
        for m, work in works.items()
        for p, w in work.items()
    }
