"""Chart what the steps of a run were made of: lengths, full rows, the work of ranks, time, and passes of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmjax.balance.parts import dist_ratio
from mmjax.console import count, duration, percent
from mmjax.reporting.charts import HALF, WIDE, Figure, Formatter, area_chart, histogram, line_chart
from mmjax.reporting.drawing import series_colours
from mmjax.reporting.plots import MEANINGS, work_drawing
from mmjax.reporting.run import Curve, Planned, Run
from mmjax.reporting.timeline_plot import timeline_drawing
from mmjax.training.pass_times import StepTimelines


def length_figures(run: Run, planned: Planned) -> Iterator[Figure]:
    """Chart the lengths of each module in the data, and how full its rows are after packing."""
    index = planned.loader.index
    colours = series_colours(run.modules)
    for k, module in enumerate(run.modules):
        lengths = index.llm_tokens if k == 0 else index.item_positions[index.item_encoder == k - 1]
        used = np.asarray(lengths[lengths > 0], float)
        if not len(used):
            continue
        modality = run.config.model.towers[module].modality
        what = {"text": "samples", "image": "images", "audio": "clips"}[modality]
        span = f"{count(used.min())} to {count(used.max())} {'tokens' if k == 0 else 'positions'}"
        title = f"Before: {what} have {span}, half under {count(np.median(used))}"
        caption = (
            f"{len(used):,} {'samples' if k == 0 else f'items of {module}'} in the length index."
        )
        yield Figure(title, caption, histogram(used, colours[module]))
        fills = planned.fills(k)
        row_lengths = sorted(
            {m.shape.lengths[k] for plan in planned.plans for m in plan.microbatches}
        )
        title = f"After: rows of {module} are {percent(fills.mean())} full, the emptiest {percent(fills.min())}"
        caption = f"{len(fills):,} rows of {' or '.join(f'{n:,}' for n in row_lengths)} positions, {planned.span}."
        yield Figure(
            title,
            caption,
            histogram(fills, colours[module], percent, (0.0, max(1.0, float(fills.max())))),
        )


def work_plot(planned: Planned, modules: tuple[str, ...]) -> str:
    """Plot every rank's work, as it ran and without balancing, as SVG; empty where there is one rank."""
    kind = planned.launch.config.batch.balance.kind
    works = {
        way: dict(zip(modules, planned.work(way != "none"), strict=True))
        for way in dict.fromkeys(("none", kind))
    }
    ranks = planned.launch.layout.topology.ranks
    if ranks == 1:
        return ""
    headings = {way: f"balance {way}: {MEANINGS[way]}" for way in works}
    headings[kind] += " (as it ran)"
    return work_drawing(works, headings, f"{ranks} ranks, {planned.span}").svg()


def work_table(planned: Planned, modules: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Tabulate how much less work the mean rank has than the busiest one; the first row is the heading."""
    rows = [("1 - mean / fullest rank", "without balancing", "as it ran")]
    for module, unbalanced, balanced in zip(
        modules, planned.work(False), planned.work(True), strict=True
    ):
        rows.append(
            (module, *(percent(float(dist_ratio(work).mean())) for work in (unbalanced, balanced)))
        )
    return rows


def passes_plot(timelines: StepTimelines) -> str:
    """Plot when a pipeline's passes were planned to run, and when they ran, as SVG."""
    rates = "measured layer times" if timelines.profiled else "assumed rates"
    shown = {f"planned, by {rates}": timelines.planned}
    if timelines.measured is not None:
        shown[f"measured, step {timelines.step:,}"] = timelines.measured
    microbatches = timelines.planned.schedule.microbatches
    subtitle = f"schedule {timelines.schedule}, {microbatches} microbatches"
    return timeline_drawing("Passes of a step", subtitle, shown, timelines.stages).svg()


def balance_figures(run: Run) -> Iterator[Figure]:
    """Chart the busiest rank over the mean one in every phase, as it ran and as without balancing; none of one rank."""
    curves = run.metrics.curves
    # Of one rank the fullest is the mean, in every step.
    if all(
        curve.high.max() <= 1
        for key, curve in curves.items()
        if key.startswith("max_over_mean") and len(curve)
    ):
        return
    for module, colour in series_colours(run.modules).items():
        balanced = curves.get(f"max_over_mean/{module}")
        unbalanced = curves.get(f"max_over_mean_before/{module}")
        if balanced is None or unbalanced is None:
            continue
        ratio, ratio_before = balanced.typical(), unbalanced.typical()
        title = f"{module}: the fullest rank has {ratio:.2f} times the mean, without balancing {ratio_before:.2f}"
        svg, colours = _compare(
            run, balanced, unbalanced, colour, lambda value, digits=3: f"{value:.{digits}g}"
        )
        yield Figure(title, "Typical values of the second half.", svg, colours)
    balanced = curves.get("straggler_wait")
    unbalanced = curves.get("straggler_wait_before")
    if balanced is not None and unbalanced is not None:
        wait, wait_before = percent(balanced.typical()), percent(unbalanced.typical())
        title = f"Ranks wait for each other {wait} of a step"
        if (sheet := curves.get("straggler_wait_sheet")) is not None:
            title += f" ({percent(sheet.typical())} by a data sheet)"
        if (padding := curves.get("padding")) is not None:
            title += f", padding takes {percent(padding.typical())}"
        title += f"; without balancing both would take {wait_before}"
        svg, colours = _compare(run, balanced, unbalanced, "violet", percent, from_zero=True)
        yield Figure(
            title, "By the cost model, attention in every phase of every microbatch.", svg, colours
        )


def _compare(
    run: Run,
    balanced: Curve,
    unbalanced: Curve,
    colour: str,
    spell: Formatter,
    from_zero: bool = False,
) -> tuple[str, dict[str, str]]:
    """Draw a curve over that without balancing. Returns the SVG and its legend."""
    colours = {"without balancing": "grey", "as it ran": colour}
    curves = {"without balancing": unbalanced, "as it ran": balanced}
    return line_chart(curves, colours, spell, run.resumes, from_zero=from_zero), colours


# --------------------------------------------------------------------------------------------------
# time


def time_figures(run: Run) -> Iterator[Figure]:
    """Chart where a step's time goes, and how fast the workers were beside it."""
    curves = run.metrics.curves
    step = curves.get("seconds/step")
    wait = curves.get("seconds/data_wait")
    if step is None or wait is None or len(step) != len(wait):
        return
    share = float(wait.mean.sum() / step.mean.sum())
    layers = {"waiting for data": wait.mean, "all else": np.maximum(step.mean - wait.mean, 0)}
    colours = {"waiting for data": "orange", "all else": "blue"}
    title = f"A step takes {duration(step.typical())}; {percent(share)} of all time was waiting for data"
    caption = "The first step after a start takes longer: it includes the warm-up."
    svg, narrow = (
        area_chart(layers, step.step, colours, duration, run.resumes, width)
        for width in (WIDE, HALF)
    )
    yield Figure(title, caption, svg, colours, narrow)
    if (loading := curves.get("seconds/load")) is not None:
        workers = run.config.data.workers
        processes = f"{workers} worker process{'es' if workers > 1 else ''}"
        loader = processes if workers else "a thread of the training process"
        title = f"A worker loads a step in {duration(loading.typical())}"
        caption = f"Opening, decoding and packing, by {loader}, while the devices compute."
        colours = {"loading": "gold", "the step": "blue"}
        svg = line_chart(
            {"loading": loading, "the step": step}, colours, duration, run.resumes, from_zero=True
        )
        yield Figure(title, caption, svg, colours)
    if (planning := curves.get("plan_ms")) is not None:
        title = f"Planning takes {duration(planning.typical() / 1e3)}"
        caption = (
            "Grouping and placing, in the workers; a peak begins a new chunk of steps. Logarithmic."
        )
        milliseconds: Formatter = lambda value, digits=3: duration(value / 1e3, digits)  # noqa: E731
        svg = line_chart(
            {"planning": planning},
            {"planning": "teal"},
            milliseconds,
            run.resumes,
            logarithmic=True,
        )
        yield Figure(title, caption, svg)


def time_table(run: Run) -> list[tuple[str, ...]]:
    """Tabulate median and largest times of a step's parts; the first row is the heading."""
    measured = {
        "step": ("seconds/step", 1.0),
        "waiting for data": ("seconds/data_wait", 1.0),
        "loading, in a worker": ("seconds/load", 1.0),
        "planning, in a worker": ("plan_ms", 1e-3),
    }
    rows = [("of a step", "median", "largest")]
    for what, (key, unit) in measured.items():
        if (curve := run.metrics.curves.get(key)) is not None:
            rows.append(
                (
                    what,
                    duration(unit * float(np.median(curve.mean))),
                    duration(unit * float(curve.high.max())),
                )
            )
    return rows if len(rows) > 1 else []


def slowest_table(run: Run) -> list[tuple[str, ...]]:
    """Tabulate how often each process finished last, below a heading; empty where there is one process."""
    slowest = run.metrics.slowest
    steps = sum(n for n, _ in slowest.values())
    rows = [
        (name, f"{n:,}", percent(n / steps), duration(s / n)) for name, (n, s) in slowest.items()
    ]
    return [("the slowest process", "steps", "of all", "took, on average"), *rows] if rows else []
