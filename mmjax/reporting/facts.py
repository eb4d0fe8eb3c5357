"""Summarise runs in words and numbers: facts, progress, launches, images made, samples left out and worst samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.config.loading import differences, from_json
from mmjax.console import count, duration, percent
from mmjax.disk import read_json_lines
from mmjax.errors import UserError
from mmjax.reporting.rows import WORST_LISTED, image_picture
from mmjax.reporting.run import Run

LISTED = 40  # samples that were left out
SHEET = 800  # largest side of a sheet of images in pixels
# Keys of the history that are compared between launches, with their headings.
COMPARED = {
    "version": "mmjax",
    "processes": "processes",
    "devices": "devices",
    "samples": "samples",
    "fingerprint": "length index",
}

KEYS = ("loss", "tokens/s", "mfu", "seconds/step", "seconds/data_wait")  # of the metrics

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class LeftOut:
    """Samples that were left out, and why."""

    total: int
    reasons: Sequence[tuple[str, int]]  # the most frequent, with their counts
    rows: Rows  # name and reason of the first samples


@dataclass(frozen=True)
class ShownSheet:
    """Images that generators made of the samples of a source, on one sheet."""

    caption: str
    picture: str  # a data URI; empty: left out
    width: int  # on the page, in pixels
    prompts: Sequence[str]


def facts_of(runs: Sequence[Run]) -> Rows:
    """Summarise each run in a row; the first row is the heading."""
    rows = [("run", "steps", "loss", "tokens/s", "MFU", "a step", "data wait", "began", "scores")]
    for run in runs:
        curves = run.metrics.curves
        typical = {key: curves[key].typical() for key in KEYS if key in curves}
        if "loss" in curves:
            typical["loss"] = float(curves["loss"].smoothed()[-1])
        if "seconds/step" in typical and "seconds/data_wait" in typical:
            # of all time, not of typical steps
            mean = {key: np.mean(curves[key].mean) for key in ("seconds/step", "seconds/data_wait")}
            wait = float(mean["seconds/data_wait"] / mean["seconds/step"])
            typical["seconds/data_wait"] = wait * typical["seconds/step"]
        began = str(run.launches[0].get("began", ""))[:16] if run.launches else ""
        numbers = _numbers(typical).values()
        rows.append((run.name, _progress(run), *numbers, began.replace("T", " "), _scores(run)))
    return rows


def _numbers(values: Mapping[str, float]) -> dict[str, str]:
    """Format values of the metrics of KEYS; empty where there is none."""
    seconds, wait = values.get("seconds/step"), values.get("seconds/data_wait")
    return {
        "loss": f"{values['loss']:.4g}" if "loss" in values else "",
        "tokens/s": count(values["tokens/s"]) if "tokens/s" in values else "",
        "MFU": percent(values["mfu"]) if "mfu" in values else "",
        "a step": duration(seconds) if seconds is not None else "",
        "data wait": percent(wait / seconds) if seconds and wait is not None else "",
    }


def _progress(run: Run) -> str:
    """Format the steps that are done, and the steps or epochs of the whole run."""
    training = run.config.training
    if training.steps:
        return f"{run.metrics.steps:,} of {training.steps:,}"
    return f"{run.metrics.steps:,}, epoch {_epochs(run):.2f} of {training.epochs:g}"


def _epochs(run: Run) -> float:
    """Return the epochs that are done."""
    curve = run.metrics.curves.get("epoch")
    return float(curve.mean[-1]) if curve else 0.0


def _scores(run: Run) -> str:
    """Format the test scores, or the last validation scores."""
    try:
        scores = json.loads(run.folder.scores.read_text())
        split = "test"
    except (OSError, ValueError):
        scores = {
            name: float(curve.mean[-1])
            for name, curve in run.metrics.with_prefix("validation/").items()
        }
        split = "validation"
    texts = [
        f"{name.removeprefix('exact_match_')} {percent(value)}"
        for name, value in (scores.items() if isinstance(scores, dict) else ())
        if name.startswith("exact_match_") and "." not in name and isinstance(value, int | float)
    ]
    return f"{split}: {', '.join(texts)}" if texts else ""


def launches_table(run: Run) -> Rows:
    """Tabulate the launches in a run's history; the first row is the heading."""
    rows = [("from step", "began", *COMPARED.values(), "mixture")]
    for launch in run.launches:
        began = str(launch.get("began", ""))[:19].replace("T", " ")
        values = [launch.get(key, "") for key in COMPARED]
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        rows.append((f"{launch['first'] + 1:,}", began, *cells, _mixture(launch)))
    return rows if len(rows) > 1 else []


def list_changes(run: Run) -> dict[int, Sequence[str]]:
    """List what each launch changed since the one before, by its first step."""
    changes = {
        launch["first"] + 1: _changed(previous, launch)
        for previous, launch in pairwise(run.launches)
    }
    return {step: lines for step, lines in changes.items() if lines}


def _mixture(launch: dict[str, Any]) -> str:
    """Format the share of each source in the samples."""
    files = launch.get("files")
    weights = launch.get("weights")
    if not isinstance(files, dict) or not isinstance(weights, list) or not sum(weights) > 0:
        return ""
    return ", ".join(
        f"{name} {percent(w / sum(weights))}" for name, w in zip(files, weights, strict=False)
    )


def _changed(previous: dict[str, Any], launch: dict[str, Any]) -> list[str]:
    """List what differs between two launches, in the environment and in the config."""
    lines = [
        f"{heading}: {previous.get(key)} -> {launch.get(key)}"
        for key, heading in COMPARED.items()
        if previous.get(key) != launch.get(key)
    ]
    try:
        old, new = (from_json(json.dumps(start.get("config"))) for start in (previous, launch))
    except UserError:
        return [*lines, "the config is of another version of mmjax"]
    return [*lines, *differences(old, new)]


def read_left_out(path: Path) -> LeftOut:
    """Read a quarantine.jsonl or an oversize.jsonl line by line; lines that are cut off are skipped."""
    reasons: Counter[str] = Counter()
    rows = []
    for record in read_json_lines(path):
        if {"sample", "reason"} <= record.keys():
            reasons[str(record["reason"])] += 1
            if len(rows) < LISTED:
                rows.append((str(record["sample"]), str(record["reason"])))
    return LeftOut(reasons.total(), reasons.most_common(8), rows)


def sheets_of(folder: Path, budget: int) -> list[ShownSheet]:
    """Read the newest sheet of every source, up to `budget` bytes; what an evaluation is still writing is skipped."""
    newest: dict[str, tuple[int, Path, dict[str, Any]]] = {}
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):
            sheet = json.loads(path.read_text())
            entry = (int(sheet["step"]), path.with_suffix(".png"), sheet)
            newest[sheet["source"]] = max(
                newest.get(sheet["source"], entry), entry, key=itemgetter(0)
            )
    shown = []
    for source, (step, path, sheet) in sorted(newest.items()):
        with suppress(OSError):
            picture, width = image_picture(np.asarray(Image.open(path)), SHEET, SHEET**2)
            share = sheet.get("drawn_as_asked")
            judged = "" if share is None else f", {percent(share)} drawn as asked"
            caption = f"{source} after step {step:,}: {len(sheet['prompts'])} images{judged}"
            budget -= len(picture)
            width *= max(1, SHEET // width)
            shown.append(
                ShownSheet(caption, picture if budget >= 0 else "", width, sheet["prompts"])
            )
    return shown


def worst_table(run: Run) -> Rows:
    """Tabulate the samples with the largest losses of the last steps; the first row is the heading."""
    rows = [
        (worst.sample, f"{worst.loss:.4g}", f"{worst.step:,}")
        for worst in run.metrics.worst[:WORST_LISTED]
    ]
    return [("sample", "loss", "step"), *rows] if rows else []


@dataclass(frozen=True)
class RunProgress:
    """A run's progress. share: of its steps, 0 to 1; numbers: the newest, by name."""

    share: float
    numbers: Mapping[str, str]


def progress_of(run: Run) -> RunProgress:
    """Summarise how far a run is and how fast it is just now: moving averages, unlike the report's medians."""
    curves = run.metrics.curves
    newest = {key: float(curves[key].smoothed()[-1]) for key in KEYS if key in curves}
    training = run.config.training
    done = run.metrics.steps / training.steps if training.steps else _epochs(run) / training.epochs
    share = min(1.0, done)
    remaining = run.metrics.steps * (1 / share - 1) * newest.get("seconds/step", 0) if share else 0
    shown = {
        "step": _progress(run),
        "remaining": clock(remaining) if remaining else "",
        **_numbers(newest),
        "scores": _scores(run),
    }
    return RunProgress(share, {name: value for name, value in shown.items() if value})


def clock(seconds: float) -> str:
    """Format 3723 as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
