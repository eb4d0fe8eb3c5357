"""Plot each rank's work by phase, the memory and time that a run is predicted to take, and lengths of data.

Positions are in pixels of a figure that is WIDTH wide, from its upper left corner. The same data gives the same SVG,
byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from mmjax.autotune.forecast import BalanceForecast, RunForecast
from mmjax.balance.parts import dist_ratio
from mmjax.console import count, duration, size
from mmjax.planning.flops import parameters

Work = Mapping[str, np.ndarray]  # of each module, [steps, ranks]

# In pixels: the figure's width, its margins, and the gap between panels that are side by side.
WIDTH = 1000
LEFT = 64
RIGHT = 20
GAP = 22
INNER = WIDTH - LEFT - RIGHT
# Heights in pixels.
PANEL = 104
BAR = 26
HEADING = 22
TALLEST = 64  # ranks in one column of a panel
ACROSS = 3  # panels of work side by side
SHADES = 32  # colours from an idle rank to the busiest
HISTOGRAMS = 2  # side by side
BINS = 48
PIXELS = 100  # per inch; a PNG has twice as many

PAPER = "#fbfbf9"
INK = "#222222"
PALE = "#666666"
ALARM = "#b3261e"
MODULES = {"llm": "#3d7f4c", "vision": "#2563a8", "audio": "#b4552d"}
OTHERS = ("#7a5c99", "#a8862a", "#2f8f8f", "#a34a6f")  # further encoders
KINDS = {
    "parameters": "#3f4756",
    "gradients": "#667085",
    "optimizer": "#8f98a8",
    "copies": "#b9bfca",
    "batch": "#efe8d8",
    "tokens": "#ddd3bc",
    "exchange": "#c8bb9d",
    "transient": "#ad9e7c",
}
PARTS = {
    "compute": "#44546a",
    "recompute": "#93a5bd",
    "shards": "#d9a441",
    "tensor": "#c4704f",
    "exchange": "#7a5c99",
    "update": "#a3a8a0",
}
LABEL_ROOM = 1.2  # an axis is so many times its longest bar, which leaves room for the label behind that
INVISIBLE = 0.002  # share of an axis; a part that is shorter in all bars is left out of the legend
MEANINGS = {
    "none": "samples as they come",
    "llm": "placed by the work of the LLM",
    "post": "placed by the work of all phases",
}
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # Verdana, elsewhere, is as wide
    "font.size": 8.6,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "mmjax",
}


@matplotlib.rc_context(STYLE)
def plot_work(path: Path, works: Mapping[str, Work], headings: Mapping[str, str], subtitle: str) -> None:
    """Plot each rank's work in every step. works and headings: by kind of balancing."""
    height = 66 + len(works) * _work_height(next(iter(works.values()))) + 34
    figure = _new_figure(height, "Work of every rank in every step", subtitle)
    _draw_works(figure, 66, works, headings)
    _save(figure, path, "Work of every rank in every step, by phase and way of balancing")


@matplotlib.rc_context(STYLE)
def plot_plan(path: Path, outlook: RunForecast) -> None:
    """Plot a run's plan: memory and time of a step by kind of balancing, and ranks' work with and without it."""
    config = outlook.config
    chosen = outlook.chosen
    kinds = ["none", config.batch.balance.kind if config.batch.balance.kind != "none" else "post"]
    works = {kind: outlook.by_balance[kind].work for kind in kinds}
    bars = BAR * len(outlook.by_balance)
    memory_top, time_top, work_top = np.cumsum([66, HEADING + bars + 66, HEADING + bars + 50])
    axes = " x ".join(f"{axis} {n}" for axis, n in outlook.mesh.items() if n > 1) or "one device"
    speed = f"{duration(chosen.time.total)} a step, MFU {outlook.mfu(chosen):.1%} ({outlook.basis})"
    title = f"{config.name} on {outlook.cluster}: {speed}"
    subtitle = (
        f"{count(sum(parameters(config.model).values()))} parameters, {config.training.precision}, mesh {axes}, "
        f"{outlook.samples:,.0f} samples and {count(outlook.tokens)} LLM tokens a step, "
        f"balance {config.batch.balance.kind}"
    )
    figure = _new_figure(work_top + len(works) * _work_height(chosen.work) + 34, title, subtitle)
    _draw_memory(figure, memory_top, outlook)
    _draw_time(figure, time_top, outlook)
    rank = "encoder rank" if chosen.layout.topology.encoders_per_rank > 1 else "rank"
    headings = {kind: f"Work of each {rank}, balance {kind}: {MEANINGS[kind]}" for kind in works}
    _draw_works(figure, work_top, works, headings)
    _save(figure, path, f"Plan of {title}")


@matplotlib.rc_context(STYLE)
def plot_lengths(path: Path, title: str, subtitle: str, lengths: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Plot a histogram of each measure. lengths: values `[n]` by measure, then by source."""
    sources = list(dict.fromkeys(source for by_source in lengths.values() for source in by_source))
    palette = (*MODULES.values(), *OTHERS)
    colours = {source: palette[k % len(palette)] for k, source in enumerate(sources)}
    lines = -(-len(lengths) // HISTOGRAMS)
    figure = _new_figure(96 + lines * (PANEL + 62), title, subtitle)
    _legend(figure, 58, "values of", colours)
    width = (INNER - GAP * (HISTOGRAMS - 1)) / HISTOGRAMS
    for k, (measure, by_source) in enumerate(lengths.items()):
        line, column = divmod(k, HISTOGRAMS)
        top = 112 + line * (PANEL + 62)
        x = LEFT + column * (width + GAP)
        joined = np.concatenate(list(by_source.values()))
        summary = f"median {count(np.median(joined))}, largest {count(joined.max())}"
        _text(figure, x, top - 6, measure, weight="bold")
        _text(figure, x + width, top - 6, summary, ha="right", color=PALE)
        _draw_histogram(_add_axes(figure, x, top, width, PANEL), by_source, colours)
    _save(figure, path, title)


def _draw_histogram(axes: Axes, by_source: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Draw the histograms of several sources over each other on a logarithmic axis, without zeros."""
    joined = np.concatenate(list(by_source.values()))
    positive = joined[joined > 0]
    bounds = np.geomspace(positive.min() / 1.05, positive.max() * 1.05, BINS + 1)
    for name, values in by_source.items():
        counts = np.histogram(values, bounds)[0]
        axes.stairs(counts, bounds, fill=True, color=colours[name], alpha=0.35)
        axes.stairs(counts, bounds, color=colours[name], linewidth=1.1)
    axes.set(xscale="log", yticks=[], facecolor=PAPER, xlim=(bounds[0], bounds[-1]), ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.tick_params(labelsize=8, color="#999999", labelcolor=PALE, which="both")
    _thin_frame(axes)


# ------------------------------------------------------------------------------------------------------ memory and time


def _draw_memory(figure: Figure, top: float, outlook: RunForecast) -> None:
    """Draw a device's memory by what it is for, a bar for each kind of balancing, and its capacity."""
    colours = module_colours(outlook.chosen.work)
    limit = outlook.chosen.fitted.limit.device
    largest = max(way.fitted.device for way in outlook.by_balance.values())
    limit_visible = limit < 4 * largest  # else the bars would be too short to read
    axes = _bar_axes(figure, top, outlook, LABEL_ROOM * max(largest, limit if limit_visible else 0))
    _text(figure, LEFT, top + 14, "Memory of a device", weight="bold")
    for row, way in enumerate(outlook.by_balance.values()):
        memory = way.fitted
        segments = [(kind, memory.fixed[kind], colour) for kind, colour in KINDS.items()]
        segments += [(module_name(name), memory.activations[name], colour) for name, colour in colours.items()]
        label = size(memory.device) + ("" if memory.fits else ": too large")
        label_colour = INK if memory.fits else ALARM
        _draw_bar(axes, row, segments, size, label, label_colour, limit if limit_visible else 0.0)
    if limit_visible:
        axes.axvline(limit, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        x = LEFT + INNER * limit / axes.get_xlim()[1]
        _text(figure, max(x, LEFT + 190), top + 14, f"room {size(limit)}", ha="center")  # right of the heading
    else:
        _text(figure, WIDTH - RIGHT, top + 14, f"room {size(limit)}, beyond this picture", ha="right", color=PALE)
    bottom = top + HEADING + BAR * len(outlook.by_balance) + 8
    maximum = {kind: max(way.fitted.fixed[kind] for way in outlook.by_balance.values()) for kind in KINDS}
    visible = {kind: colour for kind, colour in KINDS.items() if maximum[kind] > INVISIBLE * largest}
    _legend(figure, bottom, "always there", visible)
    _legend(figure, bottom + 19, "activations of", {module_name(name): colour for name, colour in colours.items()})


def _draw_time(figure: Figure, top: float, outlook: RunForecast) -> None:
    """Draw the time of a step by its parts, a bar for each kind of balancing."""
    slowest = max(way.time.total for way in outlook.by_balance.values())
    axes = _bar_axes(figure, top, outlook, LABEL_ROOM * slowest)
    _text(figure, LEFT, top + 14, "Time of a step", weight="bold")
    times = [time_parts(way) for way in outlook.by_balance.values()]
    for row, (way, seconds) in enumerate(zip(outlook.by_balance.values(), times, strict=True)):
        segments = [(part, seconds[part], colour) for part, colour in PARTS.items()]
        _draw_bar(axes, row, segments, duration, f"{duration(way.time.total)}, MFU {outlook.mfu(way):.1%}")
    visible = [part for part in PARTS if max(seconds[part] for seconds in times) > INVISIBLE * slowest]
    names = {("shards, not hidden" if part == "shards" else part): PARTS[part] for part in visible}
    _legend(figure, top + HEADING + BAR * len(outlook.by_balance) + 8, "spent on", names)


def time_parts(way: BalanceForecast) -> dict[str, float]:
    """Split the time of a step into parts that add up to it.

    Gathering shards counts as far as computing does not hide it. `recompute` may be negative, where a layer is faster
    with remat than without; it is then subtracted from computing.
    """
    time = way.time
    parts = {part: getattr(time, part) for part in PARTS}
    parts |= {"compute": time.compute + min(time.recompute, 0.0), "recompute": max(time.recompute, 0.0)}
    return parts | {"shards": max(0.0, time.shards - time.compute - time.recompute)}


def _bar_axes(figure: Figure, top: float, outlook: RunForecast, limit: float) -> Axes:
    """Add axes with room for a horizontal bar for each kind of balancing, under a heading."""
    axes = _add_axes(figure, LEFT, top + HEADING, INNER, BAR * len(outlook.by_balance))
    axes.set_xlim(0, limit)
    axes.set_ylim(len(outlook.by_balance) - 0.5, -0.5)
    axes.axis("off")
    for row, kind in enumerate(outlook.by_balance):
        chosen = kind == outlook.config.batch.balance.kind
        y = top + HEADING + BAR * (row + 0.5) + 4
        _text(figure, LEFT - 8, y, kind, ha="right", weight="bold" if chosen else "normal")
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
        axes.barh(row, amount, left=start, height=0.72, color=colour, edgecolor=PAPER, linewidth=0.6)
        width = INNER * amount / limit - 8
        candidates = (f"{name} {format_amount(amount)}", format_amount(amount))
        text = next((text for text in candidates if _text_width(text) < width), "")
        # Luma of ITU-R BT.601: white text on dark colours.
        dark = np.dot(matplotlib.colors.to_rgb(colour), (0.3, 0.59, 0.11)) < 0.6
        centred = {"ha": "center", "va": "center_baseline"}
        axes.text(start + amount / 2, row, text, color="white" if dark else INK, fontsize=8, **centred)
        start += amount
    x = max(start, label_from) + 0.008 * limit
    axes.text(x, row, label, va="center_baseline", weight="bold", color=label_colour)


# ----------------------------------------------------------------------------------------------------------------- work


def _draw_works(figure: Figure, top: float, works: Mapping[str, Work], headings: Mapping[str, str]) -> None:
    """Draw a panel for each kind of balancing and module, and below them a legend of the shades."""
    for kind, work in works.items():
        _text(figure, LEFT, top + 14, headings[kind], weight="bold")
        colours = module_colours(work)
        across = min(ACROSS, len(work))
        width = (INNER - GAP * (across - 1)) / across
        for k, (name, amounts) in enumerate(work.items()):
            line, column = divmod(k, across)
            x = LEFT + column * (width + GAP)
            _draw_panel(figure, x, top + 38 + line * (PANEL + 40), width, name, amounts, colours[name])
        top += _work_height(work)
    _draw_shade_legend(figure, top + 14, next(iter(works.values())))


def _work_height(work: Work) -> float:
    return 38 + -(-len(work) // ACROSS) * (PANEL + 40) - 8


def _draw_panel(figure: Figure, x: float, top: float, width: float, name: str, work: np.ndarray, colour: str) -> None:
    """Draw the work `[steps, ranks]` of a module: steps from left to right, ranks downwards."""
    steps, ranks = work.shape
    cells = fold_ranks(work)
    last_rank = len(cells) - 1  # of the first column
    _text(figure, x, top - 6, module_name(name), weight="bold", color=colour)
    _text(figure, x + width, top - 6, f"dist ratio {dist_ratio(work).mean():.3f}", ha="right")
    axes = _add_axes(figure, x, top, width, PANEL)
    shades = LinearSegmentedColormap.from_list(name, ["white", colour], SHADES)
    # Cells of several pixels stay sharp in viewers that smooth an image when they enlarge it.
    for axis, pixels in enumerate((2 * PANEL, 2 * width)):
        cells = cells.repeat(max(1, round(pixels / cells.shape[axis])), axis)
    _draw_shades(axes, cells, shades, (0, steps, 0, 1))
    for step in range(1, steps) if ranks > TALLEST else ():
        axes.axvline(step, color=PAPER, linewidth=1.2)
    _text(figure, x, top + PANEL + 13, "step 1", color=PALE)
    _text(figure, x + width, top + PANEL + 13, f"{steps}", ha="right", color=PALE)
    if x == LEFT:
        _text(figure, x - 6, top + 9, "rank 0", ha="right", color=PALE)
        _text(figure, x - 6, top + PANEL - 1, f"{last_rank}", ha="right", color=PALE)


def _draw_shades(
    axes: Axes, shares: np.ndarray, shades: LinearSegmentedColormap, extent: tuple[float, float, float, float]
) -> None:
    axes.set(xticks=[], yticks=[])
    # The exponent makes colours fall off faster than the work, so that idle ranks stand out.
    axes.imshow(shares**1.5, cmap=shades, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="none")
    _thin_frame(axes)


def fold_ranks(work: np.ndarray) -> np.ndarray:
    """Divide the work `[steps, ranks]` by that of each step's busiest rank, and fold ranks into columns.

    Returns `[rows, steps x columns]`. Ranks fill the columns of a step downwards, at most TALLEST in each; nan in the
    last column's empty cells. 100 ranks take 2 columns of 50.
    """
    steps, ranks = work.shape
    columns = -(-ranks // TALLEST)
    rows = -(-ranks // columns)
    cells = np.full((steps, columns * rows), np.nan)
    cells[:, :ranks] = work / np.maximum(work.max(1, keepdims=True), 1)
    return cells.reshape(steps * columns, rows).T


def _draw_shade_legend(figure: Figure, y: float, work: Work) -> None:
    """Draw the scale of the shades, and explain how ranks are folded into columns."""
    _text(figure, LEFT, y, "work of a rank over that of the step's fullest:", color=PALE)
    _text(figure, LEFT + 286, y, "0", ha="right", color=PALE)
    axes = _add_axes(figure, LEFT + 294, y - 10, 150, 12)
    greys = LinearSegmentedColormap.from_list("greys", ["white", INK], SHADES)
    _draw_shades(axes, np.linspace(0, 1, 600)[None], greys, (0, 1, 0, 1))
    _text(figure, LEFT + 452, y, "1", color=PALE)
    ranks = next(iter(work.values())).shape[1]
    if (columns := -(-ranks // TALLEST)) > 1:
        text = f"{ranks:,} ranks: every step is {columns} columns of {-(-ranks // columns)}"
        _text(figure, WIDTH - RIGHT, y, text, ha="right", color=PALE)


# -------------------------------------------------------------------------------------------------------------- drawing


def module_name(name: str) -> str:
    """Return the display name of a module."""
    return "LLM" if name == "llm" else f"{name} encoder"


def module_colours(work: Work) -> dict[str, str]:
    """Choose the colour of each module; those of an omni model have the same in every figure."""
    unknown = [name for name in work if name not in MODULES]
    return {name: MODULES.get(name) or OTHERS[unknown.index(name) % len(OTHERS)] for name in work}


def _new_figure(height: float, title: str, subtitle: str) -> Figure:
    figure = Figure((WIDTH / PIXELS, height / PIXELS), dpi=2 * PIXELS, facecolor=PAPER)
    _text(figure, RIGHT, 28, title, weight="bold", fontsize=11.5)
    _text(figure, RIGHT, 48, subtitle, color=PALE)
    return figure


def _height(figure: Figure) -> float:
    return float(figure.get_figheight()) * PIXELS


def _add_axes(figure: Figure, x: float, top: float, width: float, height: float) -> Axes:
    figure_height = _height(figure)
    box = (x / WIDTH, 1 - (top + height) / figure_height, width / WIDTH, height / figure_height)
    return figure.add_axes(box)


def _thin_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set(color="#999999", linewidth=0.5)


def _text(figure: Figure, x: float, y: float, text: str, **style: object) -> None:
    """Write text with its baseline at y."""
    figure.text(x / WIDTH, 1 - y / _height(figure), text, va="baseline", **style)


def _text_width(text: str) -> float:
    """Estimate the width of a label in pixels."""
    return float(TextPath((0, 0), text, size=8).get_extents().width) * PIXELS / 72


def _legend(figure: Figure, top: float, prefix: str, colours: Mapping[str, str]) -> None:
    """Draw a line of coloured squares with their names."""
    _text(figure, LEFT, top + 12, prefix, color=PALE)
    figure.legend(
        [Patch(color=colour) for colour in colours.values()],
        list(colours),
        loc="upper left",
        bbox_to_anchor=((LEFT + 92) / WIDTH, 1 - top / _height(figure)),
        ncols=len(colours),
        frameon=False,
        borderpad=0.2,
        borderaxespad=0,
        handlelength=1,
        handleheight=1,
        handletextpad=0.5,
        columnspacing=1.4,
    )


def _save(figure: Figure, path: Path, title: str) -> None:
    # Without a date and a version, the same data gives the same bytes.
    metadata = {"Title": title} | ({"Date": None, "Creator": None} if path.suffix == ".svg" else {})
    figure.savefig(path, metadata=metadata)
