"""How full the rows of every module are, by grouping: plans steps, loads nothing."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import Config, IsfGrouping, NoGrouping, PackGrouping
from mmjax.config_files import default_config, find, load
from mmjax.data.budget import make_budget
from mmjax.data.index import LengthIndex, build_index
from mmjax.data.plan import MicrobatchPlan, StepPlanner
from mmjax.data.sources import open_sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", default="", help="a config's file or name (default: tiny_omni)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="changes to the config")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each grouping and seed: shapes in use, fill of each module, longest wait, planning time of a step."""
    config = load(find(args.config) if args.config else default_config(), args.overrides)
    rows = []
    for seed in range(args.seeds):
        index = _index(replace(config, seed=seed))
        for name, grouping, shapes in (
            ("pack", PackGrouping(), config.batch.shapes),
            ("isf", IsfGrouping(), config.batch.shapes),
            ("none", NoGrouping(), config.batch.shapes),
            ("none, one shape", NoGrouping(), 1),
        ):
            batch = replace(config.batch, grouping=grouping, shapes=shapes)
            rows.append(
                {"grouping": name, "seed": seed} | _measure(replace(config, batch=batch, seed=seed), index, args.steps)
            )
    return rows


def _index(config: Config) -> LengthIndex:
    with tempfile.TemporaryDirectory() as nowhere:
        return build_index(open_sources(config, "train", Path(nowhere)), config.model.encoders)


def _measure(config: Config, index: LengthIndex, steps: int) -> dict[str, Any]:
    modules = ("llm", *config.model.encoders)
    weights = [s.weight for s in config.data.sources.values()]
    budget = make_budget(index, config, weights)
    planner = StepPlanner(index, config.batch, weights, config.seed, budget)
    planner.plan(0)  # compiles
    began = time.perf_counter()
    plans = [m for step in range(steps) for m in planner.plan(step).microbatches]
    seconds = time.perf_counter() - began
    useful = np.mean([_useful(m, index, len(modules)) / _room(m, budget.rows) for m in plans], axis=0)
    return {
        "samples": float(np.mean([len(m.samples) for m in plans])),
        "shapes": len({m.shape for m in plans}),
        **{f"fill_{module}": float(x) for module, x in zip(modules, useful, strict=True)},
        "plan_ms": 1e3 * seconds / steps,
    }


def _useful(plan: MicrobatchPlan, index: LengthIndex, modules: int) -> np.ndarray:
    """Positions of each module that hold something; alignment inside an item counts as padding."""
    useful = np.zeros(modules)
    useful[0] = index.llm_tokens[plan.samples].sum()
    for sample in plan.samples:
        items = slice(index.item_start[sample], index.item_start[sample + 1])
        np.add.at(useful, 1 + index.item_encoder[items], index.item_useful[items])
    return useful


def _room(plan: MicrobatchPlan, rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows) * np.array(plan.shape)
