"""Chart how runs trained: losses, scores, speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mmjax.console import count, percent, size
from mmjax.reporting.charts import WIDE, Figure, Formatter, line_chart
from mmjax.reporting.drawing import SERIES, series_colours
from mmjax.reporting.run import Curve, Run

RUN_COLOURS = ("blue", "orange", "green", *SERIES[3:])
NAMED = 4  # curves named in a title
Summary = Callable[[Mapping[str, Curve], Formatter], str]  # says in a title what curves show


def change(curves: Mapping[str, Curve], spell: Formatter) -> str:
    """Say the first and the last value, or which of several curves is lowest at the end."""
    if len(curves) > 1:
        return f"lowest at the end in {min(curves, key=lambda name: curves[name].smoothed()[-1])}"
    (curve,) = curves.values()
    return f"from {spell(curve.mean[0])} to {spell(curve.smoothed()[-1])}"


def last(curves: Mapping[str, Curve], spell: Formatter) -> str:
    """Say the last value of each curve."""
    values = {name: spell(curve.mean[-1]) for name, curve in list(curves.items())[:NAMED]}
    named = [f"{name} {value}" for name, value in values.items()]
    return f"{', '.join(named if len(curves) > 1 else values.values())} at the end"


def typical(curves: Mapping[str, Curve], spell: Formatter) -> str:
    """Say the typical value of each curve."""
    return f"typically {', '.join(spell(curve.typical()) for curve in curves.values())}"


def maximum(curves: Mapping[str, Curve], spell: Formatter) -> str:
    """Say the largest value of all curves."""
    return f"at most {spell(max(float(curve.high.max()) for curve in curves.values()))}"


@dataclass(frozen=True)
class Chart:
    """Metrics to chart, and the style. A key that ends in / or _ stands for all keys that start with it."""

    key: str
    name: str
    summary: Summary
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


CHARTS = (
    Chart(
        "loss",
        "Loss",
        change,
        "Pale: every step. Bold: moving average over a twentieth.",
        noisy=True,
        wide=True,
    ),
    Chart("loss/", "Loss by source", change, noisy=True),
    Chart("image_loss/", "Loss of images", change, "Squared error of the velocity.", noisy=True),
    Chart("rewards/accuracies", "Chosen answers preferred", last, spell=percent, noisy=True),
    Chart("rewards/margins", "Reward of chosen answers above rejected ones", change, noisy=True),
    Chart("validation/loss", "Validation loss", change),
    Chart(
        "validation/rewards/accuracies", "Validation, chosen answers preferred", last, spell=percent
    ),
    Chart("validation/image_loss/", "Validation loss of images", change),
    Chart(
        "validation/exact_match_", "Validation, exact match", last, spell=percent, from_zero=True
    ),
    Chart(
        "gradient_norm",
        "Gradient norm",
        typical,
        "On a logarithmic scale.",
        logarithmic=True,
        noisy=True,
    ),
    Chart("learning_rate/", "Learning rate", maximum, from_zero=True),
    Chart("tokens/s", "Tokens a second", typical, from_zero=True),
    Chart(
        "mfu", "MFU", typical, "Model FLOPs over what the devices can do.", percent, from_zero=True
    ),
    Chart(
        "fill/",
        "How full rows are",
        typical,
        "Useful positions over all that are computed.",
        percent,
    ),
    Chart(
        "memory/",
        "Memory",
        maximum,
        "Of a device, and of the host's process.",
        size,
        from_zero=True,
    ),
    Chart("open_files", "Open files", maximum, "A leak would rise here.", from_zero=True),
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


def run_colour(run: Run) -> str:
    """Return the colour of a run's curves."""
    return RUN_COLOURS[run.colour % len(RUN_COLOURS)]


def _figure(
    chart: Chart,
    suffix: str,
    curves: Mapping[str, Curve],
    colours: Mapping[str, str],
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
        title=f"{chart.name}{suffix}: {chart.summary(curves, chart.spell)}",
        caption=chart.caption,
        svg=draw(width=WIDE, height=260) if chart.wide else narrow,
        legend=colours if len(curves) > 1 else {},
        narrow=narrow if chart.wide else "",
    )
