"""Predict the pipeline tables of Cornstarch, OmniBal and MMScale with one simulator and one set of constants."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mmjax.benchmarks.harness import Measurement, Options, option
from mmjax.benchmarks.papers_cornstarch import (
    backward_rows,
    end_to_end_rows,
    frozen_rows,
    modality_rows,
)
from mmjax.benchmarks.papers_omnibal import (
    ENCODER_RATE,
    MAIN_MODEL,
    TABLE_6,
    omnibal_chain,
    omnibal_exact,
    omnibal_model_rows,
    omnibal_partition_rows,
    stage_sizes,
)
from mmjax.benchmarks.papers_row import SAME_LAYERS, Row
from mmjax.benchmarks.pipeline import chain, reorder_gain, simulated_step
from mmjax.benchmarks.processes import run_for_json
from mmjax.planning.partition import partition
from mmjax.planning.schedules import ScheduleName, StageGraph

REORDER_SIGMA = 0.6  # of the logarithm of an encoder's times
# Other values of SAME_LAYERS and ENCODER_RATE, to see what the share of right directions owes to
# these.
SENSITIVITY = (
    (SAME_LAYERS, ENCODER_RATE),
    *((factor, ENCODER_RATE) for factor in (1.8, 2.0, np.inf)),
    *((SAME_LAYERS, rate) for rate in (0.72, 0.75, 1.0)),
)


def reordering_rows() -> list[Row]:
    """Predict what reordering gains where an encoder's times are lognormal, before three equal LLM stages."""
    gains = []
    for seed in range(12):
        forward = np.full((4, 24), 10**6)
        drawn = np.random.default_rng(seed).lognormal(0, REORDER_SIGMA, 24)
        forward[0] = 1e6 * drawn / drawn.mean()
        gains.append(reorder_gain(chain(4), forward))
    return [
        Row(
            source="MMScale section 7.2.2",
            case="reordering microbatches: throughput",
            reported=1.07,
            predicted=statistics.mean(gains),
            note="1.03 to 1.11, which the paper calls percents",
        )
    ]


# --------------------------------------------------------------------------------------------------
# whole trainings


class TextFigure(NamedTuple):
    """A figure of a whole training, which `mmjax.plan` predicts for a shipped config like the paper's.

    over: kind of balance that the figure is a ratio to, of MFUs or of GPU days; empty: the MFU
    itself.
    """

    source: str
    low: float  # reported, a range
    high: float
    config: str
    cluster: str
    over: str = ""


ORCHMLLM = "omni_84b", "h100x320x8"
MMSCALE = "mllm_72b", "a800x120x8"
OMNIBAL = "internvl_26b", "a100x8x8"
TEXT_FIGURES = (
    TextFigure("OrchMLLM figure 8: MFU of 84B", 0.416, 0.416, *ORCHMLLM),
    TextFigure("OrchMLLM figure 8: MFU over that without balance", 1.5, 2.0, *ORCHMLLM, "none"),
    TextFigure("MMScale figure 15: MFU of 72B, there on 1,172 GPUs", 0.518, 0.547, *MMSCALE),
    TextFigure(
        "OmniBal table 2: GPU days without balance", 38.9 / 25.3, 38.9 / 25.3, *OMNIBAL, "none"
    ),
)


def planned_figures() -> list[dict[str, Any]]:
    """Plan the configs of `TEXT_FIGURES`. The error: from the nearer end of the range."""

    figures = []
    for figure in TEXT_FIGURES:
        planned = _plan(figure.config, figure.cluster)
        mfu = planned["ways"][planned["balance"]]["mfu"]
        predicted = mfu / planned["ways"][figure.over]["mfu"] if figure.over else mfu
        low, high = figure.low, figure.high
        figures.append(
            {
                "source": figure.source,
                "reported": low if low == high else f"{low:.4g} to {high:.4g}",
                "predicted": predicted,
                "error": abs(predicted / min(max(predicted, low), high) - 1),
                "plan": f"{figure.config} cluster={figure.cluster}",
            }
        )
    return figures


@cache
def _plan(config: str, cluster: str) -> dict[str, Any]:
    return run_for_json("-m", "mmjax.plan", config, f"cluster={cluster}", "--json")


# --------------------------------------------------------------------------------------------------
# all

ROW_MAKERS: tuple[Callable[[], list[Row]], ...] = (
    frozen_rows,
    modality_rows,
    end_to_end_rows,
    backward_rows,
    omnibal_model_rows,
    omnibal_partition_rows,
    reordering_rows,
)

NOT_MODELLED = {
    "Cornstarch figures 9, 10, 13, 14, 15": "the values are pictures",
    "Cornstarch table 4": "times of attention kernels; `mmjax.bench context` has the balance of their work",
    "OmniBal tables 2, 3, 5, appendix 2 to 9": "data, model and memory balance together, over a partition not given",
    "OmniBal table 7": "free memory of a framework, without the model's states and buffers",
    "MMScale figures 15 to 17, 19 to 22": "the values are pictures, and no time of a module is given",
    "MMScale tables 2, 3": "run times on another machine",
    "OrchMLLM": "balance between ranks; `mmjax.bench postbalance`, `nodewise` and `phases`",
}


def anchors() -> dict[str, tuple[float, float]]:
    """Simulate textbook schedules, forward 2 and backward 4; return each with its closed form."""

    def step(name: ScheduleName, graph: StageGraph, microbatches: int, chunks: int = 1) -> float:
        forward = np.full((len(graph.workers), microbatches), 2 / chunks)
        return simulated_step(name, graph, forward)

    modalities = StageGraph(((0, 2), (1, 2), (2, 3), (3, 4)), (0, 1, 2, 3, 4))
    return {
        "gpipe": (step("gpipe", chain(4), 8), (8 + 4 - 1) * (2 + 4)),
        "1f1b": (step("1f1b", chain(4), 8), (8 + 4 - 1) * (2 + 4)),
        "interleaved": (step("interleaved", chain(8, 4), 8, chunks=2), (8 + (4 - 1) / 2) * (2 + 4)),
        "encoders side by side": (step("1f1b", modalities, 16), (16 + 4 - 1) * (2 + 4)),
        "encoders in a chain": (step("1f1b", chain(5), 16), (16 + 5 - 1) * (2 + 4)),
    }


def _directions(rows: Sequence[Row], same_layers: float = SAME_LAYERS) -> list[bool]:
    """Return of each row that counts and has a better side whether that is predicted."""
    return [row.direction for row in rows if row.counts(same_layers) and row.direction is not None]


def sensitivity(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Count the directions that are right with other values of the two constants that they depend on."""
    fixed = [row for row in rows if row.source != TABLE_6]
    figures = []
    for same_layers, encoder_rate in SENSITIVITY:
        directions = _directions([*fixed, *omnibal_partition_rows(encoder_rate)], same_layers)
        figures.append(
            {
                "same_layers": same_layers if np.isfinite(same_layers) else None,  # any
                "encoder_rate": encoder_rate,
                "direction_right": sum(directions),
                "direction_rows": len(directions),
            }
        )
    return figures


OPTIONS: Options = {"--plans": option(False, "plan whole trainings too, which takes minutes")}


def run(args: Namespace) -> Measurement:
    """Predict all rows."""
    rows = [row for make in ROW_MAKERS for row in make()]
    counted = [row for row in rows if row.counts()]
    directions = _directions(rows)
    contradictory = [r.direction for r in rows if not r.counts() and r.direction is not None]
    by_flops = omnibal_chain(MAIN_MODEL, encoder_rate=1.0)
    figures = {
        "all_rows": len(rows),
        "direction_share": statistics.fmean(directions),
        "direction_rows": len(directions),
        "direction_share_of_contradictory": statistics.fmean(contradictory),
        "median_error": statistics.median(row.error for row in counted),
        "error_rows": len(counted),
        "anchors_exact": all(simulated == exact for simulated, exact in anchors().values()),
        "omnibal_22_23_24_24": omnibal_exact(),
        "omnibal_by_flops": stage_sizes(
            by_flops, partition(by_flops.forward, 4, by_flops.cut_bytes)
        ),
        "ours_never_slower": all(
            speedup >= 1 - 1e-9 for row in rows for speedup in row.ours.values()
        ),
        "sensitivity": sensitivity(rows),
        "text_figures": len(TEXT_FIGURES),
        "planned": planned_figures() if args.plans else [],
        "rows": [_to_dict(row) for row in rows],
        "not_modelled": [
            {"source": source, "reason": reason} for source, reason in NOT_MODELLED.items()
        ],
    }
    arrays = {
        "reported": np.array([row.reported for row in counted]),
        "predicted": np.array([row.predicted for row in counted]),
    }
    return Measurement(figures, arrays)


def _to_dict(row: Row) -> dict[str, Any]:
    names = ("source", "case", "reported", "predicted", "error", "direction", "ours", "note")
    return {name: getattr(row, name) for name in names} | {"contradiction": row.conflict()}
