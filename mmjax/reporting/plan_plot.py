"""Plot a plan: the memory and time that a run is predicted to take, and each rank's work, by kind of balancing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmjax.autotune.forecast import Forecast, RunForecast
from mmjax.console import count, duration, size
from mmjax.cost.table import parameters
from mmjax.reporting.plots import (
    INK,
    INNER,
    LEFT,
    MEANINGS,
    PALE,
    PAPER,
    RIGHT,
    STYLE,
    WIDTH,
    add_axes,
    draw_legend,
    draw_works,
    module_colours,
    module_name,
    new_figure,
    save_figure,
    text_width,
    work_height,
    write_text,
)

# Heights in pixels.
BAR = 26
HEADING = 22

ALARM = "#b3261e"
KINDS = {
    "parameters": "#3f4756",
    "gradients": "#667085",
    "optimizer": "#8f98a8",
    "copies": "#b9bfca",
    "batch": "#efe8d8",
    "messages": "#e6ddca",
    "tokens": "#ddd3bc",
    "images": "#d2c6ac",
    "exchange": "#c8bb9d",
    "transient": "#ad9e7c",
}
PARTS = {
    "compute": "#44546a",
    "recompute": "#93a5bd",
    "shards": "#d9a441",
    "tensor": "#c4704f",
    "exchange": "#7a5c99",
    "context": "#5f9e8f",
    "transfers": "#8c6d46",
    "idle": "#d8d4cb",
    "reduction": "#6f8f72",
    "update": "#a3a8a0",
}
# an axis is so many times its longest bar, which leaves room for the label behind that
LABEL_ROOM = 1.2
INVISIBLE = 0.002  # share of an axis; a part that is shorter in all bars is left out of the legend


@matplotlib.rc_context(STYLE)
def plot_plan(path: Path, forecast: RunForecast) -> None:
    """Plot a run's plan: memory and time of a step by kind of balancing, and ranks' work with and without it."""
    chosen = forecast.chosen
    config = chosen.config
    kinds = ["none", config.batch.balance.kind if config.batch.balance.kind != "none" else "post"]
    works = {kind: forecast.by_balance[kind].work for kind in kinds}
    bars = BAR * len(forecast.by_balance)
    memory_top, time_top, work_top = np.cumsum([66, HEADING + bars + 66, HEADING + bars + 50])
    axes = " x ".join(f"{axis} {n}" for axis, n in chosen.mesh.items() if n > 1) or "one device"
    speed = f"{duration(chosen.seconds)} a step, MFU {chosen.mfu:.1%} ({chosen.basis})"
    title = f"{config.name} on {chosen.cluster}: {speed}"
    subtitle = (
        f"{count(sum(parameters(config.model).values()))} parameters, {config.training.precision}, mesh {axes}, "
        f"{chosen.samples:,.0f} samples and {count(chosen.tokens)} LLM tokens a step, "
        f"balance {config.batch.balance.kind}"
    )
    figure = new_figure(work_top + len(works) * work_height(chosen.work) + 34, title, subtitle)
    _draw_memory(figure, memory_top, forecast)
    _draw_time(figure, time_top, forecast)
    rank = "encoder rank" if chosen.layout.topology.encoders_per_rank > 1 else "rank"
    headings = {kind: f"Work of each {rank}, balance {kind}: {MEANINGS[kind]}" for kind in works}
    draw_works(figure, work_top, works, headings)
    save_figure(figure, path, f"Plan of {title}")


def _draw_memory(figure: Figure, top: float, forecast: RunForecast) -> None:
    """Draw a device's memory by what it is for, a bar for each kind of balancing, and its capacity."""
    colours = module_colours(forecast.chosen.work)
    limit = forecast.chosen.plan.limit.device
    largest = max(balanced.plan.device for balanced in forecast.by_balance.values())
    limit_visible = limit < 4 * largest  # else the bars would be too short to read
    axes = _bar_axes(
        figure, top, forecast, LABEL_ROOM * max(largest, limit if limit_visible else 0)
    )
    write_text(figure, LEFT, top + 14, "Memory of a device", weight="bold")
    for row, balanced in enumerate(forecast.by_balance.values()):
        memory = balanced.plan
        segments = [(kind, memory.fullest.fixed[kind], colour) for kind, colour in KINDS.items()]
        segments += [
            (module_name(name), memory.fullest.activations[name], colour)
            for name, colour in colours.items()
        ]
        label = size(memory.device) + ("" if memory.fits else ": too large")
        label_colour = INK if memory.fits else ALARM
        _draw_bar(axes, row, segments, size, label, label_colour, limit if limit_visible else 0.0)
    if limit_visible:
        axes.axvline(limit, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        x = LEFT + INNER * limit / axes.get_xlim()[1]
        # right of the heading
        write_text(figure, max(x, LEFT + 190), top + 14, f"room {size(limit)}", ha="center")
    else:
        write_text(
            figure,
            WIDTH - RIGHT,
            top + 14,
            f"room {size(limit)}, beyond this picture",
            ha="right",
            color=PALE,
        )
    bottom = top + HEADING + BAR * len(forecast.by_balance) + 8
    maximum = {
        kind: max(balanced.plan.fullest.fixed[kind] for balanced in forecast.by_balance.values())
        for kind in KINDS
    }
    visible = {
        kind: colour for kind, colour in KINDS.items() if maximum[kind] > INVISIBLE * largest
    }
    draw_legend(figure, bottom, "always there", visible)
    draw_legend(
        figure,
        bottom + 19,
        "activations of",
        {module_name(name): colour for name, colour in colours.items()},
    )


def _draw_time(figure: Figure, top: float, forecast: RunForecast) -> None:
    """Draw the time of a step by its parts, a bar for each kind of balancing."""
    slowest = max(balanced.seconds for balanced in forecast.by_balance.values())
    axes = _bar_axes(figure, top, forecast, LABEL_ROOM * slowest)
    write_text(figure, LEFT, top + 14, "Time of a step", weight="bold")
    times = [time_parts(balanced) for balanced in forecast.by_balance.values()]
    for row, (balanced, seconds) in enumerate(
        zip(forecast.by_balance.values(), times, strict=True)
    ):
        segments = [(part, seconds[part], colour) for part, colour in PARTS.items()]
        _draw_bar(
            axes, row, segments, duration, f"{duration(balanced.seconds)}, MFU {balanced.mfu:.1%}"
        )
    visible = [
        part for part in PARTS if max(seconds[part] for seconds in times) > INVISIBLE * slowest
    ]
    names = {part: PARTS[part] for part in visible}
    draw_legend(figure, top + HEADING + BAR * len(forecast.by_balance) + 8, "spent on", names)


def time_parts(forecast: Forecast) -> dict[str, float]:
    """Split the time of a step into parts that add up to it.

    `recompute` may be negative, where a layer is faster with remat than without; it is then
    subtracted from computing.
    """
    time = forecast.time
    parts = {part: getattr(time, part) for part in PARTS}
    return parts | {
        "compute": time.compute + min(time.recompute, 0.0),
        "recompute": max(time.recompute, 0.0),
    }


def _bar_axes(figure: Figure, top: float, forecast: RunForecast, limit: float) -> Axes:
    """Add axes with room for a horizontal bar for each kind of balancing, under a heading."""
    axes = add_axes(figure, LEFT, top + HEADING, INNER, BAR * len(forecast.by_balance))
    axes.set_xlim(0, limit)
    axes.set_ylim(len(forecast.by_balance) - 0.5, -0.5)
    axes.axis("off")
    for row, kind in enumerate(forecast.by_balance):
        chosen = kind == forecast.chosen.config.batch.balance.kind
        y = top + HEADING + BAR * (row + 0.5) + 4
        write_text(figure, LEFT - 8, y, kind, ha="right", weight="bold" if chosen else "normal")
    return axes


def _draw_bar(
    axes: Axes,
    row: int,
    segments: Sequence[tuple[str, float, str]],
    format_amount: Callable[[float], str],
    label: str,
    label_colour: str = INK,
    label_from: float = 0.0,
) -> None:
    """Draw a bar of segments (name, amount, colour), each labelled as far as it has room, and a label behind the bar.

    label_from: an amount that the bar's label must not stand before.
    """
    limit = axes.get_xlim()[1]
    start = 0.0
    for name, amount, colour in segments:
        axes.barh(
            row, amount, left=start, height=0.72, color=colour, edgecolor=PAPER, linewidth=0.6
        )
        width = INNER * amount / limit - 8
        candidates = (f"{name} {format_amount(amount)}", format_amount(amount))
        text = next((text for text in candidates if text_width(text) < width), "")
        # Luma of ITU-R BT.601: white text on dark colours.
        dark = np.dot(matplotlib.colors.to_rgb(colour), (0.3, 0.59, 0.11)) < 0.6
        centred = {"ha": "center", "va": "center_baseline"}
        axes.text(
            start + amount / 2, row, text, color="white" if dark else INK, fontsize=8, **centred
        )
        start += amount
    x = max(start, label_from) + 0.008 * limit
    axes.text(x, row, label, va="center_baseline", weight="bold", color=label_colour)
