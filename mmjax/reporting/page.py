"""Render the page of a report, and the sections of a live one, from templates, which escape every text of the runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jinja2

from mmjax.config.loading import describe
from mmjax.disk import atomic_write
from mmjax.errors import UserError
from mmjax.reporting import efficiency, facts, training
from mmjax.reporting.charts import Figure
from mmjax.reporting.drawing import THEMES
from mmjax.reporting.rows import Shower, ShownRow, ShownSample
from mmjax.reporting.run import Run, plan_again
from mmjax.training.pass_times import read_timelines

MEDIA = 1_200_000  # bytes of a page for images and clips, of all runs together
# Titles of the sections by their ids, in the order of the page.
SECTIONS = {
    "training": "Training",
    "lengths": "Lengths and rows",
    "balance": "Balance",
    "time": "Time",
    "pictures": "Images made",
    "passes": "Pipeline",
    "row": "A packed row",
    "worst": "Worst samples",
    "left-out": "Left out",
    "history": "History",
    "config": "Config",
}
T = TypeVar("T")


@dataclass(frozen=True)
class RunPart:
    """A run, and what is shown of its last steps planned again, which its data files may no longer allow."""

    run: Run
    media: int = 0  # bytes of the page for its images and clips
    missing: str = ""  # why the steps cannot be planned again
    lengths: Sequence[Figure] = ()
    ranks: int = 0  # 0: not known
    work: str = ""  # SVG
    work_table: facts.Rows = ()
    row: ShownRow | None = None
    missing_row: str = ""  # why no row can be packed again
    worst_samples: Sequence[ShownSample] = ()


def page_of(runs: Sequence[Run]) -> str:
    """Render the page as HTML that refers to no other file."""
    return render_page(runs, render_sections([part_of(run, MEDIA // len(runs)) for run in runs]))


def render_page(runs: Sequence[Run], sections: Mapping[str, str], nonce: str = "") -> str:
    """Render a page of sections by their ids. nonce: of the script that makes a page live."""
    template = templates().get_template("page.html")
    return template.render(runs=runs, sections=sections, nonce=nonce, version=version("mmjax"))


def render_sections(
    parts: Sequence[RunPart], names: Collection[str] = tuple(SECTIONS)
) -> dict[str, str]:
    """Render those of these sections that have contents, by their ids."""
    macros = templates().get_template("sections.html").module
    sections = {}
    for name in names:
        macro = getattr(macros, name.replace("-", "_"))
        if name == "training":  # compares the runs in its charts
            bodies = {"": macro([part.run for part in parts])}
        else:
            bodies = {part.run.name: macro(part) for part in parts}
        bodies = {run: body for run, body in bodies.items() if body.strip()}
        if bodies:
            sections[name] = macros.section(name, SECTIONS[name], bodies, len(parts) > 1)
    return sections


def render_macro(name: str, *values: object) -> str:
    """Render a part of a page that is no section."""
    macro = getattr(templates().get_template("parts.html").module, name)
    return str(macro(*values))


@cache
def templates() -> jinja2.Environment:
    """Return the environment of the pages' templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mmjax.reporting", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {
        "describe": describe,
        "efficiency": efficiency,
        "facts": facts,
        "read_timelines": read_timelines,
        "themes": THEMES,
        "titles": SECTIONS,
        "training_figures": training.training_figures,
    }
    return environment


def part_of(run: Run, media: int) -> RunPart:
    """Plan a run's last steps again, and collect what is shown of them within so many bytes of images and clips."""
    planned, missing = _or_reason(lambda: plan_again(run))
    if planned is None:
        return RunPart(run, media, missing=missing, missing_row=missing)
    shower = Shower(planned, media)
    row, missing_row = _or_reason(shower.row)
    return RunPart(
        run=run,
        media=media,
        lengths=list(efficiency.length_figures(run, planned)),
        ranks=planned.launch.layout.topology.ranks,
        work=efficiency.work_plot(planned, run.modules),
        work_table=efficiency.work_table(planned, run.modules),
        row=row,
        missing_row=missing_row,
        worst_samples=[] if missing_row else shower.worst(run.metrics.worst),
    )


def _or_reason(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `make`, or None and its error: files may be gone since the run wrote them."""
    try:
        return make(), ""
    except (UserError, OSError, ValueError) as error:
        return None, " ".join(str(error).split())


def write_page(page: str, out: Path, option: str = "--out") -> None:
    """Write the page, all or nothing. Raises UserError where that is not possible."""
    try:
        with atomic_write(out) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{option} {out}: {error.strerror}; name a file that you may write"
        ) from None
