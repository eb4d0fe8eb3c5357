"""Plot a plan: the memory and time that a run is predicted to take, and each rank's work, by kind of balancing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmjax.autotune.forecast import Forecast, RunForecast
from mmjax.console import count, duration, size
from mmjax.cost.table import parameters
from mmjax.reporting.charts import Scale
from mmjax.reporting.drawing import Drawing, literal, rgb, series_colours, text_width
from mmjax.reporting.plots import (
    INNER,
    LEFT,
    MEANINGS,
    RIGHT,
    TITLE,
    WIDTH,
    draw_works,
    module_name,
    new_sheet,
    work_height,
)

# Heights in pixels.
BAR = 26
HEADING = 22

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
    "encoding": "#bdae8c",
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
SEEN = 0.2  # pixels; a shorter part of a bar is not drawn
INVISIBLE = 0.002  # share of an axis; a part that is shorter in all bars is left out of the legend


def plot_plan(path: Path, forecast: RunForecast) -> None:
    """Plot a run's plan: memory and time of a step by kind of balancing, and ranks' work with and without it."""
    chosen = forecast.chosen
    config = chosen.config
    kinds = ["none", config.batch.balance.kind if config.batch.balance.kind != "none" else "post"]
    works = {kind: forecast.by_balance[kind].work for kind in kinds}
    bars = BAR * len(forecast.by_balance)
    time_top = TITLE + HEADING + bars + 66
    work_top = time_top + HEADING + bars + 50
    axes = " x ".join(f"{axis} {n}" for axis, n in chosen.mesh.items() if n > 1) or "one device"
    speed = f"{duration(chosen.seconds)} a step, MFU {chosen.mfu:.1%} ({chosen.basis})"
    title = f"{config.name} on {chosen.cluster}: {speed}"
    subtitle = (
        f"{count(sum(parameters(config.model).values()))} parameters, {config.training.precision}, mesh {axes}, "
        f"{chosen.samples:,.0f} samples and {count(chosen.tokens)} LLM tokens a step, "
        f"balance {config.batch.balance.kind}"
    )
    height = work_top + len(works) * work_height(chosen.work) + 34
    drawing = new_sheet(height, title, subtitle)
    _draw_memory(drawing, TITLE, forecast)
    _draw_time(drawing, time_top, forecast)
    rank = "encoder rank" if chosen.layout.topology.encoders_per_rank > 1 else "rank"
    headings = {kind: f"Work of each {rank}, balance {kind}: {MEANINGS[kind]}" for kind in works}
    draw_works(drawing, work_top, works, headings)
    drawing.save(path)


def _draw_memory(drawing: Drawing, top: float, forecast: RunForecast) -> None:
    """Draw a device's memory by what it is for, a bar for each kind of balancing, and its capacity."""
    colours = {
        module_name(name): colour for name, colour in series_colours(forecast.chosen.work).items()
    }
    plans = {kind: balanced.plan for kind, balanced in forecast.by_balance.items()}
    limit = forecast.chosen.plan.limit.device
    largest = max(plan.device for plan in plans.values())
    limit_visible = limit < 4 * largest  # else the bars would be too short to read
    x = Scale(0, LABEL_ROOM * max(largest, limit * limit_visible), LEFT, LEFT + INNER)
    bars = {}
    for kind, plan in plans.items():
        activations = {
            module_name(name): amount for name, amount in plan.fullest.activations.items()
        }
        label = size(plan.device) + ("" if plan.fits else ": too large")
        bars[kind] = Bar({**plan.fullest.fixed, **activations}, label, alarming=not plan.fits)
    label_from = float(x(limit)) if limit_visible else 0.0
    bottom = _draw_bars(drawing, top, forecast, x, bars, KINDS | colours, size, label_from)
    drawing.heading(LEFT, top + 14, "Memory of a device")
    room = f"room {size(limit)}"
    if limit_visible:
        drawing.line(label_from, [top + HEADING, bottom], "ink", width=1.1, dashed=True)
        # right of the heading
        x_of_room = max(label_from, LEFT + 190)
        drawing.label(x_of_room, top + 14, room, anchor="middle", colour="ink")
    else:
        text = f"{room}, beyond this picture"
        drawing.label(WIDTH - RIGHT, top + 14, text, anchor="end")
    fixed = _visible(bars.values(), KINDS, INVISIBLE * largest)
    drawing.legend(LEFT, bottom + 20, "always there", fixed)
    drawing.legend(LEFT, bottom + 39, "activations of", colours)


def _draw_time(drawing: Drawing, top: float, forecast: RunForecast) -> None:
    """Draw the time of a step by its parts, a bar for each kind of balancing."""
    slowest = max(balanced.seconds for balanced in forecast.by_balance.values())
    bars = {
        kind: Bar(time_parts(balanced), f"{duration(balanced.seconds)}, MFU {balanced.mfu:.1%}")
        for kind, balanced in forecast.by_balance.items()
    }
    x = Scale(0, LABEL_ROOM * slowest, LEFT, LEFT + INNER)
    bottom = _draw_bars(drawing, top, forecast, x, bars, PARTS, duration)
    drawing.heading(LEFT, top + 14, "Time of a step")
    visible = _visible(bars.values(), PARTS, INVISIBLE * slowest)
    drawing.legend(LEFT, bottom + 20, "spent on", visible)


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


@dataclass(frozen=True)
class Bar:
    """Amounts by name, one behind the other, and a label behind them."""

    amounts: Mapping[str, float]
    label: str
    alarming: bool = False


def _visible(bars: Collection[Bar], colours: Mapping[str, str], least: float) -> dict[str, str]:
    """Select the colours of the amounts that are larger than this in any bar."""
    return {
        name: colour
        for name, colour in colours.items()
        if max(bar.amounts[name] for bar in bars) > least
    }


def _draw_bars(
    drawing: Drawing,
    top: float,
    forecast: RunForecast,
    x: Scale,
    bars: Mapping[str, Bar],
    colours: Mapping[str, str],
    spell: Callable[[float], str],
    label_from: float = 0.0,
) -> float:
    """Draw a bar for each kind of balancing, each amount labelled as far as it has room; return their bottom.

    label_from: where the labels behind the bars stand at the earliest.
    """
    middle = top + HEADING + BAR / 2
    for kind, bar in bars.items():
        chosen = kind == forecast.chosen.config.batch.balance.kind
        drawing.label(LEFT - 8, middle + 4, kind, anchor="end", colour="ink", bold=chosen)
        amounts = [bar.amounts[name] for name in colours]
        ends = x(np.cumsum([0, *amounts])).tolist()
        for (name, colour), amount, left, right in zip(
            colours.items(), amounts, ends, ends[1:], strict=False
        ):
            if right - left < SEEN:
                continue
            drawing.bars(
                [(left, middle - 9.5, right - min(0.6, (right - left) / 4), middle + 9.5)], colour
            )
            texts = (f"{name} {spell(amount)}", spell(amount))
            text = next((text for text in texts if text_width(text) < right - left - 8), "")
            # Luma of ITU-R BT.601: light text on dark colours.
            dark = np.dot(rgb(literal(colour)), (0.3, 0.59, 0.11)) < 0.6 * 255
            ink = "card" if dark else "ink"
            drawing.label((left + right) / 2, middle + 4, text, anchor="middle", colour=ink)
        colour = "alarm" if bar.alarming else "ink"
        label_x = max(ends[-1], label_from) + 8
        drawing.label(label_x, middle + 4, bar.label, colour=colour, bold=True)
        middle += BAR
    return middle - BAR / 2
