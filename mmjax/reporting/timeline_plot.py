"""Plot the passes of a pipeline's step over time: a row for each worker, with what it computes and when it idles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from mmjax.console import duration
from mmjax.planning.simulate import Timeline
from mmjax.reporting.plots import (
    INK,
    LEFT,
    PALE,
    PIXELS,
    RIGHT,
    STYLE,
    WIDTH,
    add_axes,
    draw_legend,
    module_colours,
    module_name,
    new_figure,
    save_figure,
    text_width,
    write_text,
)

# In pixels: a worker's row, the room above the first and below the last, and two columns to the
# right of them.
ROW = 20
HEADING = 28
AXIS = 40
IDLE_COLUMN = 46
FLIGHT_COLUMN = 62
TOP = 66
LEGEND = 53
GAP = 1  # between passes, where they are wide enough
# Passes have the numbers of their microbatches where a row has not more of them than this, and
# digits have room.
NUMBERED = 40
DIGIT = 6
LIGHT = 0.6  # of white in the colour of a forward pass
DARK = 0.35  # of ink in that of every second chunk of layers that a worker has of a tower
IDLE = "#e9e7e0"
# Top and bottom of a bar in its row; of a pass that is forward and backward in one, of either part.
WHOLE = (0.08, 0.92)
UPPER = (0.08, 0.3)
LOWER = (0.3, 0.92)


@matplotlib.rc_context(STYLE)
def plot_timelines(
    path: Path, title: str, subtitle: str, timelines: Mapping[str, Timeline], names: Sequence[str]
) -> None:
    """Plot timelines one below the other, each with a time axis of its own.

    timelines: by heading, such as planned and measured. names: of the stages, a tower's with its
    layers in brackets.
    """
    figure = new_figure(
        TOP + sum(map(timeline_height, timelines.values())) + LEGEND, title, subtitle
    )
    top = TOP
    for heading, timeline in timelines.items():
        draw_timeline(figure, top, heading, timeline, names)
        top += timeline_height(timeline)
    draw_timeline_legend(figure, top, names)
    save_figure(figure, path, title)


def timeline_height(timeline: Timeline) -> int:
    """Return the height that `draw_timeline` takes, in pixels."""
    return HEADING + ROW * len(timeline.schedule.orders) + AXIS


def draw_timeline(
    figure: Figure, top: float, heading: str, timeline: Timeline, names: Sequence[str]
) -> None:
    """Draw a row for each worker: its forward passes light, its backward passes dark, and idle time grey.

    A bar is half and half where the last stage runs both passes of a microbatch in one program.
    """
    workers = _stages_of_workers(timeline)
    labels = [", ".join(names[stage] for stage in stages) for stages in workers]
    left_edge = max(LEFT, *(28 + 1.1 * text_width(label) for label in labels))
    right = WIDTH - RIGHT - IDLE_COLUMN - FLIGHT_COLUMN
    write_text(figure, RIGHT, top + 14, heading, weight="bold")
    summary = f"{duration(timeline.makespan)}, bubble {timeline.bubble:.1%}"
    write_text(figure, right, top + 14, summary, ha="right", weight="bold")
    for text, x in (("idle", right + IDLE_COLUMN), ("in flight", WIDTH - RIGHT)):
        write_text(figure, x, top + 14, text, ha="right", color=PALE)
    busy = np.bincount(
        [action.stage for action in timeline.actions], timeline.end - timeline.start, len(names)
    )
    for row, (label, stages) in enumerate(zip(labels, workers, strict=True)):
        y = top + HEADING + ROW * (row + 0.5) + 4
        idle = 1 - busy[stages].sum() / timeline.makespan
        in_flight = ", ".join(dict.fromkeys(str(timeline.in_flight[stage]) for stage in stages))
        write_text(figure, left_edge - 8, y, label, ha="right")
        write_text(figure, right + IDLE_COLUMN, y, f"{idle:.0%}", ha="right", color=PALE)
        write_text(figure, WIDTH - RIGHT, y, in_flight, ha="right", color=PALE)
    axes = add_axes(figure, left_edge, top + HEADING, right - left_edge, ROW * len(workers))
    axes.set(xlim=(0, timeline.makespan), ylim=(len(workers), 0), yticks=[])
    unit, name = (1.0, "s") if timeline.makespan > 1 else (1e3, "ms")
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.xaxis.set_major_formatter(lambda value, _: f"{unit * value:g} {name}" if value else "0")
    axes.tick_params(labelsize=8, color="#999999", labelcolor=PALE)
    for side in axes.spines.values():
        side.set_visible(False)
    _draw_passes(axes, (right - left_edge) / timeline.makespan, timeline, names)


def draw_timeline_legend(figure: Figure, top: float, names: Sequence[str]) -> None:
    """Draw the colours of towers and the shades of passes, in LEGEND pixels."""
    draw_legend(
        figure,
        top,
        "passes of",
        {module_name(tower): x for tower, x in _tower_colours(names).items()},
    )
    # Shown, not told: a page in dark mode turns light into dark.
    shades = {"forward": _mix(PALE, "white", LIGHT), "backward": PALE, "idle": IDLE}
    draw_legend(figure, top + 19, "in shades", shades)
    write_text(figure, WIDTH - RIGHT, top + 31, "numbers are microbatches", ha="right", color=PALE)


def _stages_of_workers(timeline: Timeline) -> list[list[int]]:
    workers = timeline.schedule.graph.workers
    return [
        [stage for stage, n in enumerate(workers) if n == worker]
        for worker in range(max(workers) + 1)
    ]


def _draw_passes(
    axes: Axes, pixels_per_second: float, timeline: Timeline, names: Sequence[str]
) -> None:
    """Draw the passes of every worker over its idle time. pixels_per_second: of the axes' width."""
    graph = timeline.schedule.graph
    shades = _stage_shades(timeline, names)
    seconds = dict(zip(timeline.actions, (timeline.end - timeline.start).tolist(), strict=True))
    rows = len(timeline.schedule.orders)
    numbered = len(seconds) <= NUMBERED * rows
    # Bars (from, to, row) by colour, and by top and bottom in the row.
    bars = {(IDLE, WHOLE): [(0.0, timeline.makespan, row) for row in range(rows)]}
    for action, start in zip(timeline.actions, timeline.start.tolist(), strict=True):
        if not seconds[action]:
            continue  # a stage without a backward pass has empty ones
        both = action.stage in graph.sinks and not seconds[action._replace(kind="backward")]
        parts = [("forward", UPPER), ("backward", LOWER)] if both else [(action.kind, WHOLE)]
        end = start + seconds[action] - min(GAP / pixels_per_second, 0.15 * seconds[action])
        for kind, height in parts:
            bars.setdefault((shades[action.stage][kind], height), []).append(
                (start, end, graph.workers[action.stage])
            )
        kind, (upper, lower) = parts[-1]
        if numbered and (end - start) * pixels_per_second > DIGIT * len(str(action.microbatch)):
            y = graph.workers[action.stage] + (upper + lower) / 2
            style = {"ha": "center", "va": "center_baseline", "fontsize": 6.5}
            colour = "white" if kind == "backward" else INK
            axes.text((start + end) / 2, y, str(action.microbatch), color=colour, **style)
    for (colour, height), colour_bars in bars.items():
        _draw_bars(axes, colour, height, colour_bars)


def _draw_bars(
    axes: Axes, colour: str, height: tuple[float, float], bars: Sequence[tuple[float, float, int]]
) -> None:
    """Draw bars (from, to, row) of one colour as one thick dashed line, so that thousands make a small file."""
    middle = sum(height) / 2
    points = [(x, row + middle) for start, end, row in bars for x in (start, end)]
    codes = [Outline.MOVETO, Outline.LINETO] * len(bars)
    thickness = ROW * (height[1] - height[0]) * 72 / PIXELS
    style = {"color": colour, "linewidth": thickness, "capstyle": "butt", "fill": False}
    axes.add_patch(PathPatch(Outline(points, codes), **style))


def _tower_colours(names: Sequence[str]) -> dict[str, str]:
    return module_colours(dict.fromkeys(name.partition("[")[0] for name in names))


def _stage_shades(timeline: Timeline, names: Sequence[str]) -> list[dict[str, str]]:
    """Choose the colours of every stage's passes, forward and backward.

    Where a worker has several stages of a tower, as in interleaved schedules, every second one is
    darker.
    """
    colours = _tower_colours(names)
    chunks: Counter[tuple[int, str]] = Counter()
    shades = []
    for name, worker in zip(names, timeline.schedule.graph.workers, strict=True):
        tower = name.partition("[")[0]
        colour = _mix(colours[tower], INK, DARK * (chunks[worker, tower] % 2))
        chunks[worker, tower] += 1
        shades.append({"forward": _mix(colour, "white", LIGHT), "backward": colour})
    return shades


def _mix(colour: str, background: str, share: float) -> str:
    """Mix a colour with a share of another one."""
    return to_hex((1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(background)))
