"""Tables of a run's page: its lives and what changed between them, what was left out, and facts at a glance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config_files import differences, from_json
from mmjax.errors import UserError
from mmjax.reporting.run import Run
from mmjax.reporting.training import percent
from mmjax.training.console import count, duration
from mmjax.training.json_lines import whole_lines

LISTED = 40  # samples of a list of those left out
COMPARED = {
    "version": "mmjax",
    "processes": "processes",
    "devices": "devices",
    "samples": "samples",
    "fingerprint": "length index",
}

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class LeftOut:
    """Samples that were left out and why. rows: the first of them."""

    total: int
    reasons: Sequence[tuple[str, int]]
    rows: Rows


@dataclass(frozen=True)
class ShownLife:
    """One start of a run. changed: what differs from the life before."""

    facts: tuple[str, ...]
    mixture: str
    changed: Sequence[str]


LIFE_HEADINGS = ("from step", "began", "mmjax", "processes", "devices", "samples", "length index")


def facts_of(runs: Sequence[Run]) -> Rows:
    """Summarize the runs in a table: one run a line, a heading first."""
    rows: Rows = [("run", "steps", "loss", "tokens/s", "MFU", "a step", "data wait", "began", "scores")]
    for run in runs:
        curves = run.metrics.curves
        loss, speed, mfu, seconds, wait = map(
            curves.get, ("loss", "tokens/s", "mfu", "seconds/step", "data_wait_share")
        )
        rows.append(
            (
                run.name,
                _progress(run),
                f"{loss.smoothed()[-1]:.4g}" if loss else "",
                count(speed.typical()) if speed else "",
                percent(mfu.typical()) if mfu else "",
                duration(seconds.typical()) if seconds else "",
                percent(float(np.mean(wait.mean))) if wait else "",
                str(run.lives[0].get("began", ""))[:16].replace("T", " ") if run.lives else "",
                _scores(run),
            )
        )
    return rows


def _progress(run: Run) -> str:
    """The steps that are done of those the run is to have, or of the epochs."""
    training, epochs = run.config.training, run.metrics.curves.get("epoch")
    if training.steps:
        return f"{run.metrics.steps:,} of {training.steps:,}"
    done = float(epochs.mean[-1]) if epochs else 0.0
    return f"{run.metrics.steps:,}, epoch {done:.2f} of {training.epochs:g}"


def _scores(run: Run) -> str:
    """Format the test scores, or the last validation scores."""
    try:
        told = json.loads(run.folder.scores.read_text())
        split = "test"
    except (OSError, ValueError):
        told = {k: float(c.mean[-1]) for k, c in run.metrics.under("validation/").items()}
        split = "validation"
    found = [
        f"{name.removeprefix('exact_match_')} {percent(value)}"
        for name, value in (told.items() if isinstance(told, dict) else ())
        if name.startswith("exact_match_") and "." not in name and isinstance(value, int | float)
    ]
    return f"{split}: {', '.join(found)}" if found else ""


def lives_of(run: Run) -> list[ShownLife]:
    """Every start that the run's history tells of."""
    befores = [None, *run.lives]
    return [
        ShownLife(_life_facts(life), _mixture(life), _changed(before, life))
        for before, life in zip(befores, run.lives, strict=False)
    ]


def _life_facts(life: dict[str, Any]) -> tuple[str, ...]:
    values = [life.get(key, "") for key in ("began", *COMPARED)]
    told = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return (f"{life['first'] + 1:,}", told[0][:19].replace("T", " "), *told[1:])


def _mixture(life: dict[str, Any]) -> str:
    """Return how often each source is drawn from."""
    files, weights = life.get("files"), life.get("weights")
    if not isinstance(files, dict) or not isinstance(weights, list) or not sum(weights) > 0:
        return ""
    return ", ".join(f"{name} {percent(w / sum(weights))}" for name, w in zip(files, weights, strict=False))


def _changed(before: dict[str, Any] | None, life: dict[str, Any]) -> list[str]:
    if before is None:
        return []
    lines = [
        f"{told}: {before.get(k)} -> {life.get(k)}" for k, told in COMPARED.items() if before.get(k) != life.get(k)
    ]
    try:
        old, new = (from_json(json.dumps(of.get("config"))) for of in (before, life))
    except UserError:
        return [*lines, "the config is of another version of mmjax"]
    return [*lines, *differences(old, new)]


def left_out(path: Path) -> LeftOut:
    """List the samples of a quarantine.jsonl or an oversize.jsonl, read line by line; cut off lines are left out."""
    reasons: Counter[str] = Counter()
    rows: Rows = []
    for told in whole_lines(path):
        if {"sample", "reason"} <= told.keys():
            reasons[str(told["reason"])] += 1
            if len(rows) < LISTED:
                rows.append((str(told["sample"]), str(told["reason"])))
    return LeftOut(reasons.total(), reasons.most_common(8), rows)


def worst_table(run: Run, most: int) -> Rows:
    """The samples with the largest losses of the last steps, a heading first."""
    rows = [(w.sample, f"{w.loss:.4g}", f"{w.step:,}") for w in run.metrics.worst[:most]]
    return [("sample", "loss", "step"), *rows] if rows else []
