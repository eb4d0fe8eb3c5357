"""Charts of how runs trained: losses, scores, rates, speed and memory, of several runs in one chart each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.reporting.charts import GREY, HALF, WIDE, Figure, Spell, area_chart, line_chart
from mmjax.reporting.curves import Curve
from mmjax.reporting.run import Run
from mmjax.training.console import count, duration, size

RUN_COLOURS = (1, 2, 0, 3, 4, 5, 6)  # blue first, then orange
NAMED = 4  # curves in a title
KNOWN = {"llm": 0, "text": 0, "vision": 1, "image": 1, "audio": 2}


def percent(share: float, digits: int = 3) -> str:
    """0.123 as 12.3%."""
    return f"{100 * share:.{digits}g}%"


@dataclass(frozen=True)
class Chart:
    """The contents of one chart: a key of the metrics, or all keys that begin with it where it ends in / or _."""

    key: str
    title: Callable[[str, Mapping[str, Curve]], str]
    told: str = ""
    spell: Spell = count
    logarithmic: bool = False
    from_zero: bool = False
    noisy: bool = False
    wide: bool = False

    def curves(self, run: Run) -> dict[str, Curve]:
        """By what they are called in a legend."""
        if self.key[-1] in "/_":
            return run.metrics.under(self.key)
        return {self.key: run.metrics.curves[self.key]} if self.key in run.metrics.curves else {}


def _change(what: str, spell: Spell = count) -> Callable[[str, Mapping[str, Curve]], str]:
    """Describe the change from the first value to the last."""

    def title(of: str, curves: Mapping[str, Curve]) -> str:
        if len(curves) > 1:
            best = min(curves, key=lambda name: curves[name].smoothed()[-1])
            return f"{what}{of}: lowest at the end in {best}"
        (curve,) = curves.values()
        smooth = curve.smoothed()
        return f"{what}{of}: from {spell(curve.mean[0])} to {spell(smooth[-1])}"

    return title


def _last(what: str, spell: Spell) -> Callable[[str, Mapping[str, Curve]], str]:
    def title(of: str, curves: Mapping[str, Curve]) -> str:
        told = [f"{name} {spell(curve.mean[-1])}" for name, curve in list(curves.items())[:NAMED]]
        alone = spell(next(iter(curves.values())).mean[-1])
        return f"{what}{of}: {', '.join(told) if len(curves) > 1 else alone} at the end"

    return title


def _typical(what: str, spell: Spell) -> Callable[[str, Mapping[str, Curve]], str]:
    def title(of: str, curves: Mapping[str, Curve]) -> str:
        told = ", ".join(spell(curve.typical()) for curve in curves.values())
        return f"{what}{of}: typically {told}"

    return title


def _most(what: str, spell: Spell) -> Callable[[str, Mapping[str, Curve]], str]:
    def title(of: str, curves: Mapping[str, Curve]) -> str:
        return f"{what}{of}: at most {spell(max(float(curve.high.max()) for curve in curves.values()))}"

    return title


CHARTS = (
    Chart(
        "loss",
        _change("Loss"),
        "Every step, pale, and the mean of the last twentieth of the run.",
        noisy=True,
        wide=True,
    ),
    Chart("loss/", _change("Loss by source"), noisy=True),
    Chart("validation/loss", _change("Validation loss")),
    Chart("validation/exact_match_", _last("Validation, exact match", percent), spell=percent, from_zero=True),
    Chart("gradient_norm", _typical("Gradient norm", count), "On a logarithmic scale.", logarithmic=True, noisy=True),
    Chart("learning_rate/", _most("Learning rate", count), spell=count, from_zero=True),
    Chart("tokens/s", _typical("Tokens a second", count), from_zero=True),
    Chart("mfu", _typical("MFU", percent), "Model FLOPs over what the devices can do.", percent, from_zero=True),
    Chart("fill/", _typical("How full rows are", percent), "Useful positions over all that are computed.", percent),
    Chart("memory/", _most("Memory", size), "Of a device, and of the host's process.", size, from_zero=True),
    Chart("open_files", _most("Open files", count), "A leak would rise here.", from_zero=True),
)


def training_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """A chart for each thing that any of the runs has logged; of several runs, one for each source, rate and score."""
    for chart in CHARTS:
        of_runs = {run.name: _worth_showing(chart, chart.curves(run)) for run in runs}
        names = list(dict.fromkeys(name for curves in of_runs.values() for name in curves))
        if chart.key == "loss/" and len(names) < 2:
            continue  # one source alone: the loss itself
        if len(runs) == 1 and names:
            (run,), (curves,) = runs, of_runs.values()
            colours = {names[0]: run_colour(run)} if len(names) == 1 else series_colours(names)
            yield _figure(chart, "", curves, colours, run.resumes)
            continue
        for name in names:
            curves = {run: of[name] for run, of in of_runs.items() if name in of}
            colours = {run.name: run_colour(run) for run in runs if run.name in curves}
            of = f" {name}" if chart.key[-1] in "/_" else ""
            yield _figure(chart, of, curves, colours, [step for run in runs for step in run.resumes])


def _worth_showing(chart: Chart, curves: dict[str, Curve]) -> dict[str, Curve]:
    """Keep scores by family and not by task, and one of rates that are the same."""
    if chart.key.startswith("validation/"):
        families = {name: curve for name, curve in curves.items() if "." not in name}
        return families or curves
    return _same_as_one(curves) if chart.key == "learning_rate/" else curves


def _same_as_one(curves: dict[str, Curve]) -> dict[str, Curve]:
    """Each of different curves once, named after the first that is like it."""
    alike: dict[bytes, list[str]] = {}
    for name, curve in curves.items():
        alike.setdefault(curve.mean.tobytes(), []).append(name)
    named = {names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""): names[0] for names in alike.values()}
    return {told: curves[name] for told, name in named.items()}


def series_colours(names: Sequence[str]) -> dict[str, int]:
    """Colour the curves of one run: a module and its modality have the same colour in all charts."""
    others = [name for name in names if name not in KNOWN]
    return {name: KNOWN[name] if name in KNOWN else 3 + others.index(name) % 4 for name in names}


def run_colour(run: Run) -> int:
    """Return the colour of a run's curves."""
    return RUN_COLOURS[run.colour % len(RUN_COLOURS)]


def _figure(
    chart: Chart, of: str, curves: Mapping[str, Curve], colours: Mapping[str, int], resumes: Sequence[int]
) -> Figure:
    how = chart.spell, resumes, chart.logarithmic, chart.from_zero, chart.noisy
    narrow = line_chart(curves, colours, *how)
    svg = line_chart(curves, colours, *how, width=WIDE, height=260) if chart.wide else narrow
    legend = colours if len(curves) > 1 else {}
    return Figure(chart.title(of, curves), chart.told, svg, legend, narrow if chart.wide else "")


# ------------------------------------------------------------------------------------------------------------- balance


def balance_figures(run: Run) -> Iterator[Figure]:
    """The fullest rank over the mean one in every phase, as it ran and as it would have without balancing."""
    curves = run.metrics.curves
    for k, module in enumerate(run.modules):
        after, before = curves.get(f"max_over_mean/{module}"), curves.get(f"max_over_mean_before/{module}")
        if after is None or before is None:
            continue
        shown = {"without balancing": before, "as it ran": after}
        colours = {"without balancing": GREY, "as it ran": k}
        times = after.typical(), before.typical()
        title = f"{module}: the fullest rank has {times[0]:.2f} times the mean, without balancing {times[1]:.2f}"
        yield Figure(
            title, "Typical values of the second half.", line_chart(shown, colours, _times, run.resumes), colours
        )
    after, before = curves.get("straggler_wait"), curves.get("straggler_wait_before")
    if after is not None and before is not None:
        waits = percent(after.typical()), percent(before.typical())
        title = f"Ranks wait for each other {waits[0]} of a step, without balancing {waits[1]}"
        shown = {"without balancing": before, "as it ran": after}
        colours = {"without balancing": GREY, "as it ran": 3}
        svg = line_chart(shown, colours, percent, run.resumes, from_zero=True)
        yield Figure(title, "By the cost model, over all phases.", svg, colours)


def _times(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}"


def _milliseconds(value: float, digits: int = 3) -> str:
    return duration(value / 1e3, digits)


# ---------------------------------------------------------------------------------------------------------------- time


def time_figures(run: Run) -> Iterator[Figure]:
    """Chart where a step's time goes, and how fast the workers were beside it."""
    curves = run.metrics.curves
    whole, waited = curves.get("seconds/step"), curves.get("seconds/data_wait")
    if whole is None or waited is None or len(whole) != len(waited):
        return
    share = float(waited.mean.sum() / whole.mean.sum())
    layers = {"waiting for data": waited.mean, "all else": np.maximum(whole.mean - waited.mean, 0)}
    colours = {"waiting for data": 2, "all else": 1}
    title = f"A step takes {duration(whole.typical())}; {percent(share)} of all time was waiting for data"
    told = "The first step after a start is longer: what it began with is in it."
    svg, narrow = (area_chart(layers, whole.step, colours, duration, run.resumes, width) for width in (WIDE, HALF))
    yield Figure(title, told, svg, colours, narrow)
    loading, workers = curves.get("seconds/load"), run.config.data.workers
    if loading is not None:
        shown, colours = {"loading": loading, "the step": whole}, {"loading": 4, "the step": 1}
        who = (
            f"{workers} worker process{'es' if workers > 1 else ''}"
            if workers
            else "one thread of the training process"
        )
        title = f"A worker loads a step in {duration(loading.typical())}"
        told = f"Opening, decoding and packing, by {who}, beside the step."
        yield Figure(title, told, line_chart(shown, colours, duration, run.resumes, from_zero=True), colours)
    if (planning := curves.get("plan_ms")) is not None:
        title = f"Planning takes {duration(planning.typical() / 1e3)}"
        told = "Grouping and placing, in the workers; a peak begins a new chunk of steps. Logarithmic."
        svg = line_chart({"planning": planning}, {"planning": 5}, _milliseconds, run.resumes, True)
        yield Figure(title, told, svg)


def time_table(run: Run) -> list[tuple[str, ...]]:
    """Median and largest seconds of what is measured in a step, a heading first."""
    measured = {
        "step": ("seconds/step", 1.0),
        "waiting for data": ("seconds/data_wait", 1.0),
        "loading, in a worker": ("seconds/load", 1.0),
        "planning, in a worker": ("plan_ms", 1e-3),
    }
    rows = [("of a step", "median", "largest")]
    for what, (key, unit) in measured.items():
        if (curve := run.metrics.curves.get(key)) is not None:
            rows.append((what, duration(unit * float(np.median(curve.mean))), duration(unit * float(curve.high.max()))))
    return rows if len(rows) > 1 else []


def slowest_table(run: Run) -> list[tuple[str, ...]]:
    """Count how often each process was the last to be ready, a heading first; nothing where there is one process."""
    slowest = run.metrics.slowest
    steps = sum(n for n, _ in slowest.values())
    rows = [(name, f"{n:,}", percent(n / steps), duration(s / n)) for name, (n, s) in slowest.items()]
    return [("the slowest process", "steps", "of all", "took, on average"), *rows] if rows else []
