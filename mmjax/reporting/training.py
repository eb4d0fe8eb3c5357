"""Chart how runs trained: losses, scores, speed and memory; and the lengths, fill and work of their steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.balance.parts import dist_ratio
from mmjax.console import count, duration, size
from mmjax.reporting.charts import (
    GREY,
    HALF,
    WIDE,
    Figure,
    Formatter,
    area_chart,
    data_uri,
    histogram,
    line_chart,
)
from mmjax.reporting.run import Curve, Planned, Run
from mmjax.training.pass_times import StepTimelines


def length_figures(run: Run, planned: Planned) -> Iterator[Figure]:
    """Chart the lengths of each module in the data, and how full its rows are after packing."""
    index = planned.loader.index
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
        yield Figure(title, caption, histogram(used, k))
        fills = planned.fills(k)
        row_lengths = sorted(
            {m.shape.lengths[k] for plan in planned.plans for m in plan.microbatches}
        )
        title = f"After: rows of {module} are {percent(fills.mean())} full, the emptiest {percent(fills.min())}"
        caption = f"{len(fills):,} rows of {' or '.join(f'{n:,}' for n in row_lengths)} positions, {planned.span}."
        yield Figure(
            title, caption, histogram(fills, k, percent, (0.0, max(1.0, float(fills.max()))))
        )


def work_plot(planned: Planned, modules: tuple[str, ...]) -> str:
    """Plot every rank's work, as it ran and without balancing, as a data URI; empty where there is one rank."""
    # matplotlib looks for fonts when it is first imported
    from mmjax.reporting.plots import MEANINGS, plot_work

    kind = planned.launch.config.batch.balance.kind
    works = {
        way: dict(zip(modules, planned.work(way != "none"), strict=True))
        for way in dict.fromkeys(("none", kind))
    }
    ranks = next(iter(works["none"].values())).shape[1]
    if ranks == 1:
        return ""
    headings = {way: f"balance {way}: {MEANINGS[way]}" for way in works}
    headings[kind] += " (as it ran)"
    return _plot_uri(
        lambda path: plot_work(path, works, headings, f"{ranks} ranks, {planned.span}")
    )


def _plot_uri(plot: Callable[[Path], None]) -> str:
    """Return what is plotted to an SVG file as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.svg"
        plot(path)
        return data_uri("svg+xml", path.read_bytes())


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


def timeline_plot(timelines: StepTimelines) -> str:
    """Plot when a pipeline's passes were planned to run, and when they ran, as a data URI."""
    from mmjax.reporting.timeline_plot import plot_timelines

    shown = {
        f"planned, by {'measured layer times' if timelines.profiled else 'assumed rates'}": timelines.planned
    }
    if timelines.measured is not None:
        shown[f"measured, step {timelines.step:,}"] = timelines.measured
    title = "Passes of a step"
    subtitle = (
        f"schedule {timelines.schedule}, {timelines.planned.schedule.microbatches} microbatches"
    )
    return _plot_uri(lambda path: plot_timelines(path, title, subtitle, shown, timelines.stages))


RUN_COLOURS = (1, 2, 0, 3, 4, 5, 6)  # blue first, then orange
NAMED = 4  # curves named in a title
# Colours of modules and of their modalities.
KNOWN = {"llm": 0, "text": 0, "vision": 1, "image": 1, "audio": 2}


def percent(share: float, digits: int = 3) -> str:
    """Format 0.123 as 12.3%."""
    return f"{100 * share:.{digits}g}%"


# of a suffix, such as a source's name, and the curves
Title = Callable[[str, Mapping[str, Curve]], str]


@dataclass(frozen=True)
class Chart:
    """Metrics to chart, and the style. A key that ends in / or _ stands for all keys that start with it."""

    key: str
    title: Title
    caption: str = ""
    spell: Formatter = count
    logarithmic: bool = False
    from_zero: bool = False
    noisy: bool = False
    wide: bool = False

    def curves(self, run: Run) -> dict[str, Curve]:
        """Select the curves of a run, by their names in a legend."""
        if self.key.endswith(("/", "_")):
            return run.metrics.with_prefix(self.key)
        return {self.key: run.metrics.curves[self.key]} if self.key in run.metrics.curves else {}


def _change(what: str) -> Title:
    """Make a title with the first and the last value, or with the best of several curves."""

    def title(suffix: str, curves: Mapping[str, Curve]) -> str:
        if len(curves) > 1:
            best = min(curves, key=lambda name: curves[name].smoothed()[-1])
            return f"{what}{suffix}: lowest at the end in {best}"
        (curve,) = curves.values()
        return f"{what}{suffix}: from {count(curve.mean[0])} to {count(curve.smoothed()[-1])}"

    return title


def _last(what: str, spell: Formatter) -> Title:
    """Make a title with the last value of each curve."""

    def title(suffix: str, curves: Mapping[str, Curve]) -> str:
        values = {name: spell(curve.mean[-1]) for name, curve in list(curves.items())[:NAMED]}
        texts = (
            [f"{name} {value}" for name, value in values.items()]
            if len(curves) > 1
            else values.values()
        )
        return f"{what}{suffix}: {', '.join(texts)} at the end"

    return title


def _typical(what: str, spell: Formatter) -> Title:
    """Make a title with the typical value of each curve."""
    return lambda suffix, curves: (
        f"{what}{suffix}: typically {', '.join(spell(curve.typical()) for curve in curves.values())}"
    )


def _maximum(what: str, spell: Formatter) -> Title:
    """Make a title with the largest value of all curves."""
    return lambda suffix, curves: (
        f"{what}{suffix}: at most {spell(max(float(curve.high.max()) for curve in curves.values()))}"
    )


CHARTS = (
    Chart(
        "loss",
        _change("Loss"),
        "Pale: every step. Bold: moving average over a twentieth.",
        noisy=True,
        wide=True,
    ),
    Chart("loss/", _change("Loss by source"), noisy=True),
    Chart("image_loss/", _change("Loss of images"), "Squared error of the velocity.", noisy=True),
    Chart(
        "rewards/accuracies", _last("Chosen answers preferred", percent), spell=percent, noisy=True
    ),
    Chart("rewards/margins", _change("Reward of chosen answers above rejected ones"), noisy=True),
    Chart("validation/loss", _change("Validation loss")),
    Chart(
        "validation/rewards/accuracies",
        _last("Validation, chosen answers preferred", percent),
        spell=percent,
    ),
    Chart("validation/image_loss/", _change("Validation loss of images")),
    Chart(
        "validation/exact_match_",
        _last("Validation, exact match", percent),
        spell=percent,
        from_zero=True,
    ),
    Chart(
        "gradient_norm",
        _typical("Gradient norm", count),
        "On a logarithmic scale.",
        logarithmic=True,
        noisy=True,
    ),
    Chart("learning_rate/", _maximum("Learning rate", count), from_zero=True),
    Chart("tokens/s", _typical("Tokens a second", count), from_zero=True),
    Chart(
        "mfu",
        _typical("MFU", percent),
        "Model FLOPs over what the devices can do.",
        percent,
        from_zero=True,
    ),
    Chart(
        "fill/",
        _typical("How full rows are", percent),
        "Useful positions over all that are computed.",
        percent,
    ),
    Chart(
        "memory/",
        _maximum("Memory", size),
        "Of a device, and of the host's process.",
        size,
        from_zero=True,
    ),
    Chart("open_files", _maximum("Open files", count), "A leak would rise here.", from_zero=True),
)


def training_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Chart all metrics that any of the runs has logged; for several runs, one chart per source, rate and score."""
    for chart in CHARTS:
        by_run = {run.name: _select(chart, chart.curves(run)) for run in runs}
        names = list(dict.fromkeys(name for curves in by_run.values() for name in curves))
        if chart.key == "loss/" and len(names) < 2:
            continue  # the loss of the only source is the loss of the run
        if len(runs) == 1 and names:
            run = runs[0]
            colours = {names[0]: run_colour(run)} if len(names) == 1 else series_colours(names)
            yield _figure(chart, "", by_run[run.name], colours, run.resumes)
            continue
        for name in names:
            curves = {
                run_name: curves[name] for run_name, curves in by_run.items() if name in curves
            }
            colours = {run.name: run_colour(run) for run in runs if run.name in curves}
            suffix = "" if name == chart.key else f" {name}"
            yield _figure(
                chart, suffix, curves, colours, [step for run in runs for step in run.resumes]
            )


def _select(chart: Chart, curves: dict[str, Curve]) -> dict[str, Curve]:
    """Select scores of families instead of single tasks, and one of several learning rates that are the same."""
    if chart.key.startswith("validation/"):
        families = {name: curve for name, curve in curves.items() if "." not in name}
        return families or curves
    return _merge_equal(curves) if chart.key == "learning_rate/" else curves


def _merge_equal(curves: dict[str, Curve]) -> dict[str, Curve]:
    """Merge equal curves into one, named after the first and the number of others."""
    equal: dict[bytes, list[str]] = {}
    for name, curve in curves.items():
        equal.setdefault(curve.mean.tobytes(), []).append(name)
    return {
        f"{first} and {len(rest)} more" if rest else first: curves[first]
        for first, *rest in equal.values()
    }


def series_colours(names: Sequence[str]) -> dict[str, int]:
    """Choose colours for the curves of one run; a module and its modality have the same in all charts."""
    unknown = [name for name in names if name not in KNOWN]
    return {name: KNOWN[name] if name in KNOWN else 3 + unknown.index(name) % 4 for name in names}


def run_colour(run: Run) -> int:
    """Return the colour of a run's curves."""
    return RUN_COLOURS[run.colour % len(RUN_COLOURS)]


def _figure(
    chart: Chart,
    suffix: str,
    curves: Mapping[str, Curve],
    colours: Mapping[str, int],
    resumes: Sequence[int],
) -> Figure:
    draw = partial(
        line_chart,
        curves,
        colours,
        spell=chart.spell,
        marks=resumes,
        logarithmic=chart.logarithmic,
        from_zero=chart.from_zero,
        noisy=chart.noisy,
    )
    narrow = draw()
    return Figure(
        title=chart.title(suffix, curves),
        caption=chart.caption,
        svg=draw(width=WIDE, height=260) if chart.wide else narrow,
        legend=colours if len(curves) > 1 else {},
        narrow=narrow if chart.wide else "",
    )


# --------------------------------------------------------------------------------------------------
# balance


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
    for k, module in enumerate(run.modules):
        balanced = curves.get(f"max_over_mean/{module}")
        unbalanced = curves.get(f"max_over_mean_before/{module}")
        if balanced is None or unbalanced is None:
            continue
        ratio, ratio_before = balanced.typical(), unbalanced.typical()
        title = f"{module}: the fullest rank has {ratio:.2f} times the mean, without balancing {ratio_before:.2f}"
        svg, colours = _compare(
            run, balanced, unbalanced, k, lambda value, digits=3: f"{value:.{digits}g}"
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
        svg, colours = _compare(run, balanced, unbalanced, 3, percent, from_zero=True)
        yield Figure(
            title, "By the cost model, attention in every phase of every microbatch.", svg, colours
        )


def _compare(
    run: Run,
    balanced: Curve,
    unbalanced: Curve,
    colour: int,
    spell: Formatter,
    from_zero: bool = False,
) -> tuple[str, dict[str, int]]:
    """Draw a curve over that without balancing. Returns the SVG and its legend."""
    colours = {"without balancing": GREY, "as it ran": colour}
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
    colours = {"waiting for data": 2, "all else": 1}
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
        colours = {"loading": 4, "the step": 1}
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
            {"planning": planning}, {"planning": 5}, milliseconds, run.resumes, logarithmic=True
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
