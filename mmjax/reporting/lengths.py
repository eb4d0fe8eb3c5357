"""Chart the lengths of samples, the fill of the rows that they were packed into, and every rank's work."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmjax.balance.metrics import dist_ratio
from mmjax.config import AudioConfig
from mmjax.console import count
from mmjax.reporting.charts import Figure, histogram
from mmjax.reporting.run import Planned, Run
from mmjax.reporting.training import percent


def length_figures(run: Run, planned: Planned) -> Iterator[Figure]:
    """Chart the lengths of each module in the data, and how full its rows are after packing."""
    index = planned.loader.index
    for k, module in enumerate(run.modules):
        lengths = index.llm_tokens if k == 0 else index.item_positions[index.item_encoder == k - 1]
        used = np.asarray(lengths[lengths > 0], float)
        if not len(used):
            continue
        if k == 0:
            what = "samples"
        else:
            what = "clips" if isinstance(run.config.model.encoders[module], AudioConfig) else "images"
        span = f"{count(used.min())} to {count(used.max())} {'tokens' if k == 0 else 'positions'}"
        title = f"Before: {what} have {span}, half under {count(np.median(used))}"
        caption = f"{len(used):,} {'samples' if k == 0 else f'items of {module}'} in the length index."
        yield Figure(title, caption, histogram(used, k))
        fills = planned.fills(k)
        row_lengths = sorted({m.shape.lengths[k] for plan in planned.plans for m in plan.microbatches})
        title = f"After: rows of {module} are {percent(fills.mean())} full, the emptiest {percent(fills.min())}"
        caption = f"{len(fills):,} rows of {' or '.join(f'{n:,}' for n in row_lengths)} positions, {planned.span}."
        yield Figure(title, caption, histogram(fills, k, percent, (0.0, max(1.0, float(fills.max())))))


def work_plot(planned: Planned, modules: tuple[str, ...]) -> str:
    """Plot every rank's work, as it ran and without balancing, as a data URI; empty where there is one rank."""
    from mmjax.reporting.plots import MEANINGS, plot_work  # matplotlib looks for fonts when it is first imported

    kind = planned.life.config.batch.balance.kind
    works = {way: dict(zip(modules, planned.work(way != "none"), strict=True)) for way in dict.fromkeys(("none", kind))}
    ranks = next(iter(works["none"].values())).shape[1]
    if ranks == 1:
        return ""
    headings = {way: f"balance {way}: {MEANINGS[way]}" for way in works}
    headings[kind] += " (as it ran)"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.svg"
        plot_work(path, works, headings, f"{ranks} ranks, {planned.span}")
        return data_uri("svg+xml", path.read_bytes())


def work_table(planned: Planned, modules: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Tabulate how much less work the mean rank has than the busiest one; the first row is the heading."""
    rows = [("1 - mean / fullest rank", "without balancing", "as it ran")]
    for module, unbalanced, balanced in zip(modules, planned.work(False), planned.work(True), strict=True):
        rows.append((module, *(percent(float(dist_ratio(work).mean())) for work in (unbalanced, balanced))))
    return rows


def data_uri(kind: str, content: bytes) -> str:
    """Encode an image as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
