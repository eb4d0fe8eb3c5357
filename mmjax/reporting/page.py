"""Render the page of a report from its template, which escapes every text of the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import jinja2

from mmjax.config.loading import describe
from mmjax.errors import UserError
from mmjax.reporting.charts import Figure
from mmjax.reporting.lengths import length_figures, work_plot, work_table
from mmjax.reporting.records import (
    LAUNCH_HEADINGS,
    LeftOut,
    Rows,
    ShownLaunch,
    facts_of,
    left_out,
    list_launches,
    worst_table,
)
from mmjax.reporting.rows import WORST_LISTED, Shower, ShownRow, ShownSample
from mmjax.reporting.run import Run, plan_again
from mmjax.reporting.training import balance_figures, slowest_table, time_figures, time_table, training_figures

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
    row: ShownRow | None = None
    worst: Rows = field(default_factory=list)
    worst_samples: Sequence[ShownSample] = ()
    missing: str = ""  # why the steps cannot be planned again
    missing_row: str = ""  # why no row can be packed again
    quarantine: LeftOut | None = None
    oversize: LeftOut | None = None
    lives: Sequence[ShownLaunch] = ()
    config: str = ""

    @property
    def left_out(self) -> bool:
        """Return whether samples were left out."""
        return any(samples is not None and samples.total for samples in (self.quarantine, self.oversize))


def page_of(runs: Sequence[Run]) -> str:
    """Render the page as HTML that refers to no other file."""
    parts = [part_of(run, MEDIA // len(runs)) for run in runs]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("mmjax.reporting").joinpath("page.html").read_text())
    return template.render(
        runs=runs,
        parts=parts,
        facts=facts_of(runs),
        figures=list(training_figures(runs)),
        sections=sections_of(parts),
        life_headings=LAUNCH_HEADINGS,
        version=version("mmjax"),
    )


def sections_of(parts: Sequence[RunPart]) -> dict[str, str]:
    """Name the sections that have contents, as titles by id, in the order of the page."""
    shown = {
        "lengths": ("Lengths and rows", any(part.missing or part.lengths for part in parts)),
        "balance": ("Balance", any(part.work or (part.ranks != 1 and part.balance) for part in parts)),
        "time": ("Time", any(part.time for part in parts)),
        "row": ("A packed row", any(part.row or part.missing_row for part in parts)),
        "worst": ("Worst samples", any(part.worst for part in parts)),
        "left-out": ("Left out", any(part.left_out for part in parts)),
        "history": ("History", any(part.lives for part in parts)),
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
        worst=worst_table(run, WORST_LISTED),
        quarantine=left_out(run.folder.quarantine),
        oversize=left_out(run.folder.oversize),
        lives=list_launches(run),
        config=describe(run.config),
    )
    # All above is in the run folder; all below needs the data files too, which may be gone.
    planned, part.missing = _or_reason(lambda: plan_again(run))
    if planned is None:
        part.missing_row = part.missing
        return part
    part.lengths = list(length_figures(run, planned))
    part.ranks = planned.life.layout.topology.ranks
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
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.rename(out)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a file that you may write") from None
