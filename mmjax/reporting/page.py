"""Render the page of a report from its template, which escapes every text of the runs, with its tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from PIL import Image

from mmjax.config.loading import describe, differences, from_json
from mmjax.console import count, duration
from mmjax.disk import atomic_write, read_json_lines
from mmjax.errors import UserError
from mmjax.reporting.charts import Figure
from mmjax.reporting.rows import WORST_LISTED, Shower, ShownRow, ShownSample, image_picture
from mmjax.reporting.run import Run, plan_again
from mmjax.reporting.training import (
    balance_figures,
    length_figures,
    percent,
    slowest_table,
    time_figures,
    time_table,
    timeline_plot,
    training_figures,
    work_plot,
    work_table,
)
from mmjax.training.pass_times import StepTimelines, read_timelines

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

Rows = list[tuple[str, ...]]


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


@dataclass(frozen=True)
class ShownLaunch:
    """One launch of a run."""

    facts: tuple[str, ...]  # under LIFE_HEADINGS
    mixture: str
    changed: Sequence[str]  # since the launch before


LAUNCH_HEADINGS = ("from step", "began", "mmjax", "processes", "devices", "samples", "length index")


def facts_of(runs: Sequence[Run]) -> Rows:
    """Summarise each run in a row; the first row is the heading."""
    rows: Rows = [
        ("run", "steps", "loss", "tokens/s", "MFU", "a step", "data wait", "began", "scores")
    ]
    for run in runs:
        curves = run.metrics.curves
        keys = ("loss", "tokens/s", "mfu", "seconds/step", "seconds/data_wait")
        loss, speed, mfu, seconds, wait = (curves.get(key) for key in keys)
        rows.append(
            (
                run.name,
                _progress(run),
                f"{loss.smoothed()[-1]:.4g}" if loss else "",
                count(speed.typical()) if speed else "",
                percent(mfu.typical()) if mfu else "",
                duration(seconds.typical()) if seconds else "",
                percent(float(np.mean(wait.mean) / np.mean(seconds.mean)))
                if wait and seconds
                else "",
                str(run.launches[0].get("began", ""))[:16].replace("T", " ")
                if run.launches
                else "",
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


def list_launches(run: Run) -> list[ShownLaunch]:
    """List the launches in a run's history, each compared with the one before."""
    return [
        ShownLaunch(
            _launch_facts(launch), _mixture(launch), _changed(previous, launch) if previous else []
        )
        for previous, launch in zip([None, *run.launches], run.launches, strict=False)
    ]


def _launch_facts(launch: dict[str, Any]) -> tuple[str, ...]:
    """Format a launch as a row under LIFE_HEADINGS."""
    began = str(launch.get("began", ""))[:19].replace("T", " ")
    values = [launch.get(key, "") for key in COMPARED]
    cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return (f"{launch['first'] + 1:,}", began, *cells)


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


def worst_table(run: Run, limit: int) -> Rows:
    """Tabulate the samples with the largest losses of the last steps; the first row is the heading."""
    rows = [
        (worst.sample, f"{worst.loss:.4g}", f"{worst.step:,}")
        for worst in run.metrics.worst[:limit]
    ]
    return [("sample", "loss", "step"), *rows] if rows else []


MEDIA = 1_200_000  # bytes of a page for images and clips, of all runs together

T = TypeVar("T")


@dataclass
class RunPart:
    """One run's part of the page."""

    run: Run
    lengths: Sequence[Figure] = ()
    work: str = ""  # a data URI
    work_table: Rows = field(default_factory=list)
    ranks: int = 0  # 0: not known, since the steps cannot be planned again
    balance: Sequence[Figure] = ()
    time: Sequence[Figure] = ()
    time_table: Rows = field(default_factory=list)
    slowest: Rows = field(default_factory=list)
    sheets: Sequence[ShownSheet] = ()
    timelines: StepTimelines | None = None  # of a pipeline
    passes: str = ""  # a data URI
    row: ShownRow | None = None
    worst: Rows = field(default_factory=list)
    worst_samples: Sequence[ShownSample] = ()
    missing: str = ""  # why the steps cannot be planned again
    missing_row: str = ""  # why no row can be packed again
    quarantine: LeftOut | None = None
    oversize: LeftOut | None = None
    launches: Sequence[ShownLaunch] = ()
    config: str = ""

    @property
    def left_out(self) -> bool:
        """Return whether samples were left out."""
        return any(
            samples is not None and samples.total for samples in (self.quarantine, self.oversize)
        )


@cache
def templates() -> jinja2.Environment:
    """Return the environment of the pages' templates."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("mmjax.reporting", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def page_of(runs: Sequence[Run]) -> str:
    """Render the page as HTML that refers to no other file."""
    parts = [part_of(run, MEDIA // len(runs)) for run in runs]
    return (
        templates()
        .get_template("page.html")
        .render(
            runs=runs,
            parts=parts,
            facts=facts_of(runs),
            figures=list(training_figures(runs)),
            sections=sections_of(parts),
            life_headings=LAUNCH_HEADINGS,
            version=version("mmjax"),
        )
    )


def live_parts(run: Run) -> dict[str, str]:
    """Render what changes while a run trains, its progress, curves and times, by the part of the page."""
    parts = templates().get_template("parts.html").module
    figures = [*training_figures([run]), *balance_figures(run), *time_figures(run)]
    tables = [time_table(run), slowest_table(run), worst_table(run, WORST_LISTED)]
    progress = parts.progress(progress_of(run), run.metrics.not_finite)
    return {"progress": progress, "curves": parts.curves(figures, tables)}


@dataclass(frozen=True)
class RunProgress:
    """A run's progress. share: of its steps, 0 to 1; numbers: the newest, by name."""

    share: float
    numbers: Mapping[str, str]


def progress_of(run: Run) -> RunProgress:
    """Summarise how far a run is and how fast it is just now: moving averages, unlike the report's medians."""
    curves = run.metrics.curves
    keys = ("loss", "tokens/s", "mfu", "seconds/step", "seconds/data_wait")
    loss, speed, mfu, seconds, wait = (
        float(curves[key].smoothed()[-1]) if key in curves else None for key in keys
    )
    training = run.config.training
    epochs = float(curves["epoch"].mean[-1]) if "epoch" in curves else 0.0
    share = min(
        1.0, run.metrics.steps / training.steps if training.steps else epochs / training.epochs
    )
    remaining = run.metrics.steps * (1 / share - 1) if share else None
    shown = {
        "step": _progress(run),
        "remaining": clock(remaining * seconds) if seconds and remaining else "",
        "loss": "" if loss is None else f"{loss:.4g}",
        "tokens/s": "" if speed is None else count(speed),
        "MFU": "" if mfu is None else percent(mfu),
        "a step": "" if seconds is None else duration(seconds),
        "data wait": "" if wait is None or not seconds else percent(wait / seconds),
        "scores": _scores(run),
    }
    return RunProgress(share, {name: value for name, value in shown.items() if value})


def clock(seconds: float) -> str:
    """Format 3723 as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def sections_of(parts: Sequence[RunPart]) -> dict[str, str]:
    """Name the sections that have contents, as titles by id, in the order of the page."""
    shown = {
        "lengths": ("Lengths and rows", any(part.missing or part.lengths for part in parts)),
        "balance": (
            "Balance",
            any(part.work or (part.ranks != 1 and part.balance) for part in parts),
        ),
        "time": ("Time", any(part.time for part in parts)),
        "pictures": ("Images made", any(part.sheets for part in parts)),
        "passes": ("Pipeline", any(part.timelines for part in parts)),
        "row": ("A packed row", any(part.row or part.missing_row for part in parts)),
        "worst": ("Worst samples", any(part.worst for part in parts)),
        "left-out": ("Left out", any(part.left_out for part in parts)),
        "history": ("History", any(part.launches for part in parts)),
    }
    titles = {name: title for name, (title, has_content) in shown.items() if has_content}
    return {"training": "Training", **titles, "config": "Config"}


def part_of(run: Run, media: int) -> RunPart:
    """Collect the contents of a run's part of the page."""
    part = RunPart(
        run,
        balance=list(balance_figures(run)),
        time=list(time_figures(run)),
        time_table=time_table(run),
        slowest=slowest_table(run),
        sheets=sheets_of(run.folder.pictures, media // 2),
        timelines=read_timelines(run.folder.passes),
        worst=worst_table(run, WORST_LISTED),
        quarantine=left_out(run.folder.quarantine),
        oversize=left_out(run.folder.oversize),
        launches=list_launches(run),
        config=describe(run.config),
    )
    if part.timelines is not None:
        part.passes = timeline_plot(part.timelines)
    # All above is in the run folder; all below needs the data files too, which may be gone.
    planned, part.missing = _or_reason(lambda: plan_again(run))
    if planned is None:
        part.missing_row = part.missing
        return part
    part.lengths = list(length_figures(run, planned))
    part.ranks = planned.launch.layout.topology.ranks
    part.work = work_plot(planned, run.modules)
    part.work_table = work_table(planned, run.modules)
    shower = Shower(planned, media)
    part.row, part.missing_row = _or_reason(shower.row)
    if not part.missing_row:
        part.worst_samples = shower.worst(run.metrics.worst)
    return part


def _or_reason(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `make`, or None and its error: files may be gone since the run wrote them."""
    try:
        return make(), ""
    except (UserError, OSError, ValueError) as error:
        return None, " ".join(str(error).split())


def write_page(page: str, out: Path) -> None:
    """Write the page, all or nothing. Raises UserError where that is not possible."""
    try:
        with atomic_write(out) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a file that you may write") from None
