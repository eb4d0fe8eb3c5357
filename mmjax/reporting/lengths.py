"""Charts of how long samples are, and how full the rows are that they were packed into; and of every rank's work."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmjax.balance.metrics import dist_ratio
from mmjax.config import AudioConfig
from mmjax.reporting.charts import Figure, histogram
from mmjax.reporting.run import Planned, Run
from mmjax.reporting.training import percent
from mmjax.training.console import count


def length_figures(run: Run, planned: Planned) -> Iterator[Figure]:
    """By module: lengths in the data, and beside them how full rows are."""
    index = planned.loader.index
    for k, module in enumerate(run.modules):
        lengths = index.llm_tokens if k == 0 else index.item_positions[index.item_encoder == k - 1]
        used = np.asarray(lengths[lengths > 0], float)
        if not len(used):
            continue
        least, middle, most = used.min(), np.median(used), used.max()
        span = f"{count(least)} to {count(most)} {'tokens' if k == 0 else 'positions'}"
        title = f"Before: {_whose(run, module)} {span}, half under {count(middle)}"
        told = f"{len(used):,} {'samples' if k == 0 else f'items of {module}'} in the length index."
        yield Figure(title, told, histogram(used, k))
        fills = planned.fills(k)
        lengths_of = sorted({m.shape.lengths[k] for plan in planned.plans for m in plan.microbatches})
        title = f"After: rows of {module} are {percent(fills.mean())} full, the emptiest {percent(fills.min())}"
        told = f"{len(fills):,} rows of {' or '.join(f'{n:,}' for n in lengths_of)} positions, {planned.told}."
        yield Figure(title, told, histogram(fills, k, percent, (0.0, max(1.0, float(fills.max())))))


def _whose(run: Run, module: str) -> str:
    if module == "llm":
        return "samples have"
    clips = isinstance(run.config.model.encoders[module], AudioConfig)
    return f"{'clips' if clips else 'images'} have"


def work_picture(planned: Planned, modules: tuple[str, ...]) -> str:
    """Every rank's work by phase as a data URI, as it ran and without balancing; empty where there is one rank."""
    from mmjax.pictures import MEANINGS, draw_work  # matplotlib looks for fonts when it is first imported

    kind = planned.life.config.batch.balance.kind
    works = {way: dict(zip(modules, planned.work(way != "none"), strict=True)) for way in dict.fromkeys(("none", kind))}
    ranks = next(iter(works["none"].values())).shape[1]
    if ranks == 1:
        return ""
    headings = {way: f"balance {way}: {MEANINGS[way]}" for way in works}
    headings[kind] += " (as it ran)"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.svg"
        draw_work(path, works, headings, f"{ranks} ranks, {planned.told}")
        return data_uri("svg+xml", path.read_bytes())


def work_table(planned: Planned, modules: tuple[str, ...]) -> list[tuple[str, ...]]:
    """How much emptier than the fullest rank the others are on average, a heading first."""
    after, before = planned.work(True), planned.work(False)
    rows = [("1 - mean / fullest rank", "without balancing", "as it ran")]
    for k, module in enumerate(modules):
        rows.append((module, *(percent(float(dist_ratio(of[k]).mean())) for of in (before, after))))
    return rows


def data_uri(kind: str, content: bytes) -> str:
    """An image as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
