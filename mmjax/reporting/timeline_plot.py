"""Plot the passes of a pipeline's step over time: a row for each worker, with what it computes and when it idles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmjax.console import duration
from mmjax.planning.simulate import Timeline
from mmjax.reporting.charts import Scale, draw_horizontal_axis
from mmjax.reporting.drawing import Box, Drawing, series_colours, text_width
from mmjax.reporting.plots import LEFT, RIGHT, TITLE, WIDTH, module_name, new_sheet

# In pixels: a worker's row, the room above the first and below the last, and two columns to the
# right of them.
ROW = 20
HEADING = 28
AXIS = 40
IDLE_COLUMN = 46
FLIGHT_COLUMN = 62
LEGEND = 53
GAP = 1  # between passes, where they are wide enough
# Passes have the numbers of their microbatches where a row has not more of them than this, and
# digits have room.
NUMBERED = 40
DIGIT = 6
# Top and bottom of a bar in its row; of a pass that is forward and backward in one, of either part.
WHOLE = (0.08, 0.92)
UPPER = (0.08, 0.3)
LOWER = (0.3, 0.92)


def plot_timelines(
    path: Path, title: str, subtitle: str, timelines: Mapping[str, Timeline], names: Sequence[str]
) -> None:
    """Plot timelines one below the other, as `timeline_drawing` draws them, into an SVG or PNG file."""
    timeline_drawing(title, subtitle, timelines, names).save(path)


def timeline_drawing(
    title: str, subtitle: str, timelines: Mapping[str, Timeline], names: Sequence[str]
) -> Drawing:
    """Draw timelines one below the other, each with a time axis of its own.

    timelines: by heading, such as planned and measured. names: of the stages, a tower's with its
    layers in brackets.
    """
    heights = [HEADING + ROW * len(t.schedule.orders) + AXIS for t in timelines.values()]
    drawing = new_sheet(TITLE + sum(heights) + LEGEND, title, subtitle)
    top = TITLE
    for (heading, timeline), height in zip(timelines.items(), heights, strict=True):
        draw_timeline(drawing, top, heading, timeline, names)
        top += height
    colours = _tower_colours(names)
    towers = {module_name(tower): colour for tower, colour in colours.items()}
    drawing.legend(LEFT, top + 12, "passes of", towers)
    colour = next(iter(colours.values()))
    shades = {"forward": f"{colour}-light", "backward": colour, "idle": "faint"}
    drawing.legend(LEFT, top + 31, "in shades", shades)
    drawing.label(WIDTH - RIGHT, top + 31, "numbers are microbatches", anchor="end")
    return drawing


def draw_timeline(
    drawing: Drawing, top: float, heading: str, timeline: Timeline, names: Sequence[str]
) -> None:
    """Draw a row for each worker: its forward passes light, its backward passes dark, and idle time grey.

    A bar is half and half where the last stage runs both passes of a microbatch in one program.
    """
    workers = _stages_of_workers(timeline)
    labels = [", ".join(names[stage] for stage in stages) for stages in workers]
    left = max(LEFT, *(28 + text_width(label) for label in labels))
    right = WIDTH - RIGHT - IDLE_COLUMN - FLIGHT_COLUMN
    summary = f"{duration(timeline.makespan)}, bubble {timeline.bubble:.1%}"
    drawing.heading(RIGHT, top + 14, heading)
    drawing.heading(right, top + 14, summary, anchor="end")
    drawing.label(right + IDLE_COLUMN, top + 14, "idle", anchor="end")
    drawing.label(WIDTH - RIGHT, top + 14, "in flight", anchor="end")
    busy = np.bincount(
        [action.stage for action in timeline.actions], timeline.end - timeline.start, len(names)
    )
    for row, (label, stages) in enumerate(zip(labels, workers, strict=True)):
        y = top + HEADING + ROW * (row + 0.5) + 4
        idle = 1 - busy[stages].sum() / timeline.makespan
        in_flight = ", ".join(dict.fromkeys(str(timeline.in_flight[stage]) for stage in stages))
        drawing.label(left - 8, y, label, anchor="end", colour="ink")
        drawing.label(right + IDLE_COLUMN, y, f"{idle:.0%}", anchor="end")
        drawing.label(WIDTH - RIGHT, y, in_flight, anchor="end")
    x = Scale(0, timeline.makespan, left, right)
    _draw_passes(drawing, top + HEADING, x, timeline, names)
    unit, name = (1.0, "s") if timeline.makespan > 1 else (1e3, "ms")
    bottom = top + HEADING + ROW * len(workers)
    draw_horizontal_axis(
        drawing, x, bottom, lambda value, digits=6: f"{unit * value:.{digits}g} {name}"
    )


def _stages_of_workers(timeline: Timeline) -> list[list[int]]:
    workers = timeline.schedule.graph.workers
    return [
        [stage for stage, n in enumerate(workers) if n == worker]
        for worker in range(max(workers) + 1)
    ]


def _draw_passes(
    drawing: Drawing, top: float, x: Scale, timeline: Timeline, names: Sequence[str]
) -> None:
    """Draw the passes of every worker over its idle time."""
    graph = timeline.schedule.graph
    shades = _stage_shades(timeline, names)
    seconds = dict(zip(timeline.actions, (timeline.end - timeline.start).tolist(), strict=True))
    rows = len(timeline.schedule.orders)
    numbered = len(seconds) <= NUMBERED * rows
    heads = [top + ROW * row for row in range(rows)]
    upper, lower = WHOLE
    idle = [(x.begin, head + ROW * upper, x.end, head + ROW * lower) for head in heads]
    drawing.bars(idle, "faint")
    boxes: dict[str, list[Box]] = defaultdict(list)  # by colour
    numbers = []
    for action, start in zip(timeline.actions, timeline.start.tolist(), strict=True):
        if not seconds[action]:
            continue  # a stage without a backward pass has empty ones
        head = heads[graph.workers[action.stage]]
        left, right = x(np.array([start, start + seconds[action]])).tolist()
        right -= min(GAP, 0.15 * (right - left))
        both = action.stage in graph.sinks and not seconds[action._replace(kind="backward")]
        parts = [("forward", UPPER), ("backward", LOWER)] if both else [(action.kind, WHOLE)]
        for kind, (upper, lower) in parts:
            box = (left, head + ROW * upper, right, head + ROW * lower)
            boxes[shades[action.stage][kind]].append(box)
        number = str(action.microbatch)
        if numbered and right - left > DIGIT * len(number):
            colour = "paper" if kind == "backward" else "ink"
            numbers.append(
                ((left + right) / 2, head + ROW * (upper + lower) / 2 + 3, number, colour)
            )
    for colour, colour_boxes in boxes.items():
        drawing.bars(colour_boxes, colour)
    for middle, y, number, colour in numbers:
        drawing.label(middle, y, number, anchor="middle", colour=colour, size=9)


def _tower_colours(names: Sequence[str]) -> dict[str, str]:
    return series_colours(list(dict.fromkeys(name.partition("[")[0] for name in names)))


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
        colour = colours[tower] + ("-deep" if chunks[worker, tower] % 2 else "")
        chunks[worker, tower] += 1
        shades.append({"forward": f"{colour}-light", "backward": colour})
    return shades
