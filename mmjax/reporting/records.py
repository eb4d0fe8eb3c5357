"""Tabulate a run's launches with what changed between them, its skipped samples, and its key figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config.loading import differences, from_json
from mmjax.console import count, duration
from mmjax.errors import UserError
from mmjax.reporting.run import Run
from mmjax.reporting.training import percent
from mmjax.runtime.run_dir import read_json_lines

LISTED = 40  # samples that were left out
# Keys of the history that are compared between launches, with their headings.
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
    """Samples that were left out, and why."""

    total: int
    reasons: Sequence[tuple[str, int]]  # the most frequent, with their counts
    rows: Rows  # name and reason of the first samples


@dataclass(frozen=True)
class ShownLaunch:
    """One launch of a run."""

    facts: tuple[str, ...]  # under LIFE_HEADINGS
    mixture: str
    changed: Sequence[str]  # since the launch before


LAUNCH_HEADINGS = ("from step", "began", "mmjax", "processes", "devices", "samples", "length index")


def facts_of(runs: Sequence[Run]) -> Rows:
    """Summarise each run in a row; the first row is the heading."""
    rows: Rows = [("run", "steps", "loss", "tokens/s", "MFU", "a step", "data wait", "began", "scores")]
    for run in runs:
        curves = run.metrics.curves
        keys = ("loss", "tokens/s", "mfu", "seconds/step", "data_wait_share")
        loss, speed, mfu, seconds, wait = (curves.get(key) for key in keys)
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
    """Format the steps that are done, and the steps or epochs of the whole run."""
    training = run.config.training
    if training.steps:
        return f"{run.metrics.steps:,} of {training.steps:,}"
    epochs = run.metrics.curves.get("epoch")
    done = float(epochs.mean[-1]) if epochs else 0.0
    return f"{run.metrics.steps:,}, epoch {done:.2f} of {training.epochs:g}"


def _scores(run: Run) -> str:
    """Format the test scores, or the last validation scores."""
    try:
        scores = json.loads(run.folder.scores.read_text())
        split = "test"
    except (OSError, ValueError):
        scores = {name: float(curve.mean[-1]) for name, curve in run.metrics.under("validation/").items()}
        split = "validation"
    texts = [
        f"{name.removeprefix('exact_match_')} {percent(value)}"
        for name, value in (scores.items() if isinstance(scores, dict) else ())
        if name.startswith("exact_match_") and "." not in name and isinstance(value, int | float)
    ]
    return f"{split}: {', '.join(texts)}" if texts else ""


def list_launches(run: Run) -> list[ShownLaunch]:
    """List the launches in a run's history, each compared with the one before."""
    return [
        ShownLaunch(_life_facts(life), _mixture(life), _changed(previous, life) if previous else [])
        for previous, life in zip([None, *run.lives], run.lives, strict=False)
    ]


def _life_facts(life: dict[str, Any]) -> tuple[str, ...]:
    """Format a launch as a row under LIFE_HEADINGS."""
    began = str(life.get("began", ""))[:19].replace("T", " ")
    values = [life.get(key, "") for key in COMPARED]
    cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return (f"{life['first'] + 1:,}", began, *cells)


def _mixture(life: dict[str, Any]) -> str:
    """Format the share of each source in the samples."""
    files = life.get("files")
    weights = life.get("weights")
    if not isinstance(files, dict) or not isinstance(weights, list) or not sum(weights) > 0:
        return ""
    return ", ".join(f"{name} {percent(w / sum(weights))}" for name, w in zip(files, weights, strict=False))


def _changed(previous: dict[str, Any], life: dict[str, Any]) -> list[str]:
    """List what differs between two launches, in the environment and in the config."""
    lines = [
        f"{heading}: {previous.get(key)} -> {life.get(key)}"
        for key, heading in COMPARED.items()
        if previous.get(key) != life.get(key)
    ]
    try:
        old, new = (from_json(json.dumps(launch.get("config"))) for launch in (previous, life))
    except UserError:
        return [*lines, "the config is of another version of mmjax"]
    return [*lines, *differences(old, new)]


def left_out(path: Path) -> LeftOut:
    """Read a quarantine.jsonl or an oversize.jsonl line by line; lines that are cut off are skipped."""
    reasons: Counter[str] = Counter()
    rows: Rows = []
    for record in read_json_lines(path):
        if {"sample", "reason"} <= record.keys():
            reasons[str(record["reason"])] += 1
            if len(rows) < LISTED:
                rows.append((str(record["sample"]), str(record["reason"])))
    return LeftOut(reasons.total(), reasons.most_common(8), rows)


def worst_table(run: Run, limit: int) -> Rows:
    """Tabulate the samples with the largest losses of the last steps; the first row is the heading."""
    rows = [(worst.sample, f"{worst.loss:.4g}", f"{worst.step:,}") for worst in run.metrics.worst[:limit]]
    return [("sample", "loss", "step"), *rows] if rows else []
