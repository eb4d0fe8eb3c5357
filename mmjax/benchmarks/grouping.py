"""Measure how full, equal and random the rows of a grouping are, and how long it takes (OmniBal section 5.3)."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.balance import parts
from mmjax.balance.isf import Iteration, choose_bounds, group_leftovers, isf
from mmjax.balance.pack import choose_row_maximum, pack_rows
from mmjax.benchmarks.baselines.bounds import rows_lower_bound
from mmjax.benchmarks.baselines.grouping import device_groups, length_groups, random_groups
from mmjax.benchmarks.corpora import LENGTHS, internvl_corpus
from mmjax.benchmarks.harness import Measurement, Options, median_seconds, option
from mmjax.data.plan.length_files import read_lengths
from mmjax.errors import UserError

BUDGETED = ("isf", "pack")
TOKENS, ITEMS = range(2)  # columns of `lengths`: LLM tokens and vision items of each sample
PAPER_TOLERANCE = np.array([128, 0])  # OmniBal section 5.1: Q'_t = Q_t - 128, Q'_v = Q_v
PUBLISHED = {  # OmniBal table 5: InternVL-Chat-1.2's 1.2M samples, 4 a row
    "random": {"pad_ratio": "0.31", "dist_ratio_items": "0.34", "dist_ratio_tokens": "0.30"},
    "length": {"pad_ratio": "0.20", "dist_ratio_items": "0.26", "dist_ratio_tokens": "0.13"},
    "device": {"pad_ratio": "0.378", "dist_ratio_items": "0.125", "dist_ratio_tokens": "0.15"},
    "isf": {
        "samples_per_row": "4.6",
        "pad_ratio": "0",
        "dist_ratio_items": "0.02",
        "dist_ratio_tokens": "0.14",
        "seconds": "< 60",
    },
}
PUBLISHED["pack"] = {name: f"{value} (ISF)" for name, value in PUBLISHED["isf"].items()}


@dataclass(frozen=True)
class Rows:
    """Hold row, int32 `[n]`, -1 = oversize; maximum `[2]`, tokens and items; what ISF's iterations kept; seconds."""

    row: np.ndarray
    maximum: np.ndarray
    iterations: tuple[Iteration, ...]
    seconds: float


BUDGET = "budget of a row in isf and pack; auto: chosen from the data (default:"
OPTIONS: Options = LENGTHS | {
    "--method": option("pack", choices=("random", "length", "device", *BUDGETED)),
    "--max-items": option("9", f"{BUDGET} 9)", metavar="N|auto"),
    "--max-tokens": option("4096", f"{BUDGET} 4096)", metavar="N|auto"),
    "--samples-per-row": option(4, "mean with auto budgets, at most one more", minimum=1),
    "--ranks": option(8, "rows of a step", minimum=1),
    "--iterations": option(10, "of isf", minimum=1),
}


def run(args: Namespace) -> Measurement:
    """Group all samples, shuffle the rows into an epoch, and measure its steps."""
    if args.lengths:
        data = read_lengths(args.lengths, ("vision_items", "llm_tokens"), optional=("source",))
    else:
        data = internvl_corpus(args.samples, args.seed)
    lengths = np.stack([data["llm_tokens"], data["vision_items"]], axis=1)  # TOKENS, ITEMS
    if lengths[:, TOKENS].min() < 1:
        raise UserError(
            f"sample {int(lengths[:, TOKENS].argmin())} has no llm_tokens; every sample needs at least 1"
        )
    group = _group_by_budget if args.method in BUDGETED else _group_by_count
    grouped = group(lengths, args)
    rng = np.random.default_rng(args.seed)
    figures = {
        **_measure(lengths, data.get("source"), grouped, args),
        "seconds": grouped.seconds,
        "permutation_seconds": median_seconds(lambda: rng.permutation(len(lengths))),
    }
    if args.method == "isf":
        figures["iterations"] = [
            {"rows": i.groups, "samples": i.samples, "fill_items": items, "fill_tokens": tokens}
            for i in grouped.iterations
            for tokens, items in [i.fill]
        ]
    tokens, items = grouped.maximum
    arrays = {"row": grouped.row, "max_items": np.int64(items), "max_tokens": np.int64(tokens)}
    return Measurement(figures, arrays, PUBLISHED[args.method])


def _parse_budget(name: str, text: str) -> int:
    """Parse a row's budget; 0 for `auto`."""
    if text != "auto" and (not text.isdecimal() or int(text) < 1):
        raise UserError(f"{name} {text}: give a number of at least 1, or auto")
    return 0 if text == "auto" else int(text)


def _group_by_budget(lengths: np.ndarray, args: Namespace) -> Rows:
    named_budgets = {"--max-tokens": args.max_tokens, "--max-items": args.max_items}
    budgets = np.array([_parse_budget(name, text) for name, text in named_budgets.items()])
    samples_per_row = (args.samples_per_row, args.samples_per_row + 1)
    try:
        if args.method == "isf":
            bounds = choose_bounds(lengths, samples_per_row, fixed=budgets)
            maximum = bounds.maximum
            minimum = (
                np.maximum(budgets - PAPER_TOLERANCE, 1) if np.all(budgets > 0) else bounds.minimum
            )
        else:
            maximum = choose_row_maximum(lengths, samples_per_row, budgets)
    except ValueError as error:
        raise UserError(f"{error}; raise --max-items or --max-tokens") from None
    fits = np.flatnonzero(np.all(lengths <= maximum, axis=1))
    if len(fits) == 0:
        raise UserError(
            "no sample fits the budgets; raise --max-items and --max-tokens or give auto"
        )

    def group() -> tuple[np.ndarray, tuple[Iteration, ...]]:
        rng = np.random.default_rng(args.seed)
        if args.method == "pack":
            return pack_rows(lengths, maximum, rng.permutation(fits)), ()
        accepted = isf(lengths, maximum, minimum, args.iterations, rng)
        return group_leftovers(lengths, accepted, maximum).group, accepted.iterations

    row, iterations = group()  # compiles
    seconds = median_seconds(group)
    shuffled = np.random.default_rng(args.seed).permutation(row.max() + 1).astype(np.int32)
    row = np.where(row >= 0, shuffled[row], -1).astype(np.int32)
    return Rows(row, maximum, iterations, seconds)


def _group_by_count(lengths: np.ndarray, args: Namespace) -> Rows:
    """Group a fixed number of samples a row, padded to the longest; the budget is what the largest row takes."""

    def group() -> np.ndarray:
        rng = np.random.default_rng(args.seed)
        if args.method == "random":
            return random_groups(len(lengths), args.samples_per_row, rng)
        groups = length_groups if args.method == "length" else device_groups
        return groups(lengths, args.samples_per_row, args.ranks, rng)

    row = group()
    items = int(np.bincount(row, lengths[:, ITEMS]).max())
    tokens = int(lengths[:, TOKENS].max()) * args.samples_per_row
    return Rows(row, np.array([tokens, items]), (), median_seconds(group))


def _measure(
    lengths: np.ndarray, source: np.ndarray | None, grouped: Rows, args: Namespace
) -> dict[str, Any]:
    inside = grouped.row >= 0
    row = grouped.row[inside]
    lengths = lengths[inside]
    rows = int(row.max()) + 1
    total = np.stack([np.bincount(row, column, rows) for column in lengths.T], axis=1)
    steps = rows // args.ranks
    per_step = total[: steps * args.ranks].reshape(steps, args.ranks, 2)
    tokens, items = parts.dist_ratio(per_step.swapaxes(1, 2)).mean(0) if steps else (0.0, 0.0)
    fill_tokens, fill_items = total.sum(0) / (rows * grouped.maximum)
    padded = args.method not in BUDGETED
    return {
        "samples_in": len(inside),
        "samples_grouped": inside.sum(),
        "samples_oversize": (~inside).sum(),
        "rows": rows,
        "rows_lower_bound": rows_lower_bound(lengths, grouped.maximum),
        "samples_per_row": len(row) / rows,
        "fill_items": fill_items,
        "fill_tokens": fill_tokens,
        "pad_ratio": _pad_ratio(lengths[:, TOKENS], row) if padded else 0.0,
        "dist_ratio_items": items,
        "dist_ratio_tokens": tokens,
        "overdispersion": None
        if source is None
        else overdispersion(source[inside], row // args.ranks),
        "row_correlation": row_correlation(lengths[:, TOKENS], row),
        "max_items": grouped.maximum[1],
        "max_tokens": grouped.maximum[0],
    }


def _pad_ratio(length: np.ndarray, row: np.ndarray) -> float:
    """Compute OmniBal eq. 1, meaned over rows, which are full but for the last."""
    order = np.argsort(row, kind="stable")
    per_row = int(np.bincount(row).max())
    full = len(order) // per_row * per_row
    return parts.pad_ratio(length[order][:full].reshape(-1, per_row)).mean()


def row_correlation(lengths: np.ndarray, row: np.ndarray) -> float:
    """Compute the intraclass correlation of sample lengths `[n]` in rows `[n]`: are long samples packed with long ones?

    sum over rows and pairs i != j of (t_i - mean)(t_j - mean) / (number of such pairs * variance).
    About 0 for random rows of free length, 1 for rows of equal samples, below 0 where long ones go
    with short ones; 0 without pairs.
    """
    lengths = np.asarray(lengths, np.float64)
    number = np.unique(np.asarray(row), return_inverse=True)[1]
    away = lengths - lengths.mean() if len(lengths) else lengths
    # Sum over pairs i != j of a_i a_j = (sum a)^2 - sum a^2, in each row.
    pair_sum = np.bincount(number, away) ** 2 - np.bincount(number, away**2)
    count = np.bincount(number)
    pairs = float((count * (count - 1)).sum())
    variance = float((away**2).mean()) if len(lengths) else 0.0
    return float(pair_sum.sum()) / (pairs * variance) if pairs and variance else 0.0


def overdispersion(source: np.ndarray, step: np.ndarray) -> float:
    """Measure how much more a source's share varies from step to step than if samples were drawn independently.

    For source s with share p of all samples, c_t of the n_t samples of step t and T steps: sum_t
    n_t * (c_t / n_t - p)^2 / (p * (1 - p)) / (T - 1). About 1 for a shuffle; the largest over
    sources.
    source, step: int `[n]`. 0 with fewer than two steps or sources.
    """
    sources, source = np.unique(np.asarray(source), return_inverse=True)
    steps, step = np.unique(np.asarray(step), return_inverse=True)
    if len(sources) < 2 or len(steps) < 2:
        return 0.0
    shape = (len(steps), len(sources))
    count = np.bincount(step * shape[1] + source, minlength=shape[0] * shape[1]).reshape(shape)
    size = count.sum(1, keepdims=True)
    share = count.sum(0) / len(source)
    excess = (size * (count / size - share) ** 2).sum(0) / (share * (1 - share))
    return float(excess.max() / (len(steps) - 1))
