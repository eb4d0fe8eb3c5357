"""Show the samples with which a training would begin: prepared, tokenized and packed, on one page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from mmjax.config import Config
from mmjax.reporting.page import templates
from mmjax.reporting.rows import Shower, ShownRow
from mmjax.reporting.run import Planned
from mmjax.training.run_data import RunData, open_first_data

MEDIA = 6_000_000  # bytes of the page for images and clips
TOKENS = 400  # listed of a sample


def samples_page(config: Config, source: Path, samples: int) -> str:
    """Render the first samples of a training as HTML that refers to no other file.

    source: the config's file. samples: how many, at most; by the config's seed they are the same
    each time. Rows are those of one device. Raises UserError where the data cannot be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = open_first_data(config, source, Path(folder))
        rows = list(_rows(data, samples))
    return (
        templates()
        .get_template("samples.html")
        .render(
            name=config.name,
            seed=config.seed,
            rows=rows,
            shown=len({sample.name for row in rows for sample in row.samples}),
            samples=len(data.index) - len(data.index.bad),
            version=version("mmjax"),
        )
    )


def _rows(data: RunData, samples: int) -> Iterator[ShownRow]:
    """Show the rows of the first steps until so many samples are shown, or all that there are."""
    remaining, media = min(samples, len(data.index)), MEDIA
    for step in range(remaining):
        planned = Planned(data.launch, data.loader, step, [data.loader.plan(step)])
        shower = Shower(planned, media, TOKENS)
        for row in shower.replayed.rows():
            if remaining <= 0:
                return
            yield shower.shown_row(row, remaining)
            remaining -= len(row.samples)
        media = shower.image_budget
