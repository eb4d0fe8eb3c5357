"""Plot each rank's work by phase and lengths of data, and what all plots are drawn with.

Positions are in pixels of a figure that is WIDTH wide, from its upper left corner. The same data
gives the same SVG, byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from mmjax.balance.parts import dist_ratio
from mmjax.console import count

Work = Mapping[str, np.ndarray]  # of each module, [steps, ranks]

# In pixels: the figure's width, its margins, and the gap between panels that are side by side.
WIDTH = 1000
LEFT = 64
RIGHT = 20
GAP = 22
INNER = WIDTH - LEFT - RIGHT
# Heights in pixels.
PANEL = 104
TALLEST = 64  # ranks in one column of a panel
ACROSS = 3  # panels of work side by side
SHADES = 32  # colours from an idle rank to the busiest
HISTOGRAMS = 2  # side by side
BINS = 48
PIXELS = 100  # per inch; a PNG has twice as many

PAPER = "#fbfbf9"
INK = "#222222"
PALE = "#666666"
MODULES = {"llm": "#3d7f4c", "vision": "#2563a8", "audio": "#b4552d"}
OTHERS = ("#7a5c99", "#a8862a", "#2f8f8f", "#a34a6f")  # further encoders
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
def plot_work(
    path: Path, works: Mapping[str, Work], headings: Mapping[str, str], subtitle: str
) -> None:
    """Plot each rank's work in every step. works and headings: by kind of balancing."""
    height = 66 + len(works) * work_height(next(iter(works.values()))) + 34
    figure = new_figure(height, "Work of every rank in every step", subtitle)
    draw_works(figure, 66, works, headings)
    save_figure(figure, path, "Work of every rank in every step, by phase and way of balancing")


@matplotlib.rc_context(STYLE)
def plot_race(
    path: Path,
    rates: Mapping[str, tuple[float, float]],
    losses: Mapping[str, Sequence[tuple[int, float]]],
    case: str,
) -> None:
    """Plot how fast mmjax and transformers' Trainer train, and how they learn (`bench peer`).

    rates: tokens a CPU second of both, by case. losses: of `case` by side, as (tokens trained on,
    loss).
    """
    top = 92
    height = top + 46 * len(rates) + 50
    subtitle = "the same samples and weights, in turns"
    figure = new_figure(height, "mmjax and transformers' Trainer on one CPU core", subtitle)
    colours = {
        "mmjax": MODULES["llm"],
        "Trainer": MODULES["audio"],
        "Trainer, grouped by length": OTHERS[1],
    }
    half = (INNER - LEFT) / 2
    bars = add_axes(figure, LEFT + 78, top, half - 78, 46 * len(rates))
    for k, (name, (ours, theirs)) in enumerate(rates.items()):
        side = "Trainer, grouped by length" if "by length" in name else "Trainer"
        bars.barh(k - 0.2, ours, 0.36, color=colours["mmjax"])
        bars.barh(k + 0.2, theirs, 0.36, color=colours[side])
        bars.text(ours, k - 0.2, f" {ours / theirs:.2f} x", va="center", color=INK)
    bars.set_yticks(range(len(rates)), list(rates))
    bars.set_xlim(0, 1.15 * max(max(pair) for pair in rates.values()))
    bars.invert_yaxis()
    bars.set_xlabel("tokens a CPU second, without padding", color=PALE)
    curves = add_axes(figure, LEFT + half + LEFT, top, half, 46 * len(rates))
    for name, points in losses.items():
        curves.plot(*zip(*points, strict=True), color=colours[name], linewidth=1.3)
    curves.set_xlabel(f"tokens trained on: loss of {case}", color=PALE)
    draw_legend(figure, 62, "", {name: colours[name] for name in losses})
    for axes in (bars, curves):
        _thin_frame(axes)
    save_figure(figure, path, "Tokens a CPU second and losses of mmjax and transformers' Trainer")


@matplotlib.rc_context(STYLE)
def plot_lengths(
    path: Path, title: str, subtitle: str, lengths: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Plot a histogram of each measure. lengths: values `[n]` by measure, then by source."""
    sources = list(dict.fromkeys(source for by_source in lengths.values() for source in by_source))
    palette = (*MODULES.values(), *OTHERS)
    colours = {source: palette[k % len(palette)] for k, source in enumerate(sources)}
    lines = -(-len(lengths) // HISTOGRAMS)
    figure = new_figure(96 + lines * (PANEL + 62), title, subtitle)
    draw_legend(figure, 58, "values of", colours)
    width = (INNER - GAP * (HISTOGRAMS - 1)) / HISTOGRAMS
    for k, (measure, by_source) in enumerate(lengths.items()):
        line, column = divmod(k, HISTOGRAMS)
        top = 112 + line * (PANEL + 62)
        x = LEFT + column * (width + GAP)
        joined = np.concatenate(list(by_source.values()))
        summary = f"median {count(np.median(joined))}, largest {count(joined.max())}"
        write_text(figure, x, top - 6, measure, weight="bold")
        write_text(figure, x + width, top - 6, summary, ha="right", color=PALE)
        _draw_histogram(add_axes(figure, x, top, width, PANEL), by_source, colours)
    save_figure(figure, path, title)


def _draw_histogram(
    axes: Axes, by_source: Mapping[str, np.ndarray], colours: Mapping[str, str]
) -> None:
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


# --------------------------------------------------------------------------------------------------
# work


def draw_works(
    figure: Figure, top: float, works: Mapping[str, Work], headings: Mapping[str, str]
) -> None:
    """Draw a panel for each kind of balancing and module, and below them a legend of the shades."""
    for kind, work in works.items():
        write_text(figure, LEFT, top + 14, headings[kind], weight="bold")
        colours = module_colours(work)
        across = min(ACROSS, len(work))
        width = (INNER - GAP * (across - 1)) / across
        for k, (name, amounts) in enumerate(work.items()):
            line, column = divmod(k, across)
            x = LEFT + column * (width + GAP)
            _draw_panel(
                figure, x, top + 38 + line * (PANEL + 40), width, name, amounts, colours[name]
            )
        top += work_height(work)
    _draw_shade_legend(figure, top + 14, next(iter(works.values())))


def work_height(work: Work) -> float:
    return 38 + -(-len(work) // ACROSS) * (PANEL + 40) - 8


def _draw_panel(
    figure: Figure, x: float, top: float, width: float, name: str, work: np.ndarray, colour: str
) -> None:
    """Draw the work `[steps, ranks]` of a module: steps from left to right, ranks downwards."""
    steps, ranks = work.shape
    cells = fold_ranks(work)
    last_rank = len(cells) - 1  # of the first column
    write_text(figure, x, top - 6, module_name(name), weight="bold", color=colour)
    write_text(figure, x + width, top - 6, f"dist ratio {dist_ratio(work).mean():.3f}", ha="right")
    axes = add_axes(figure, x, top, width, PANEL)
    shades = LinearSegmentedColormap.from_list(name, ["white", colour], SHADES)
    # Cells of several pixels stay sharp in viewers that smooth an image when they enlarge it.
    for axis, pixels in enumerate((2 * PANEL, 2 * width)):
        cells = cells.repeat(max(1, round(pixels / cells.shape[axis])), axis)
    _draw_shades(axes, cells, shades, (0, steps, 0, 1))
    for step in range(1, steps) if ranks > TALLEST else ():
        axes.axvline(step, color=PAPER, linewidth=1.2)
    write_text(figure, x, top + PANEL + 13, "step 1", color=PALE)
    write_text(figure, x + width, top + PANEL + 13, f"{steps}", ha="right", color=PALE)
    if x == LEFT:
        write_text(figure, x - 6, top + 9, "rank 0", ha="right", color=PALE)
        write_text(figure, x - 6, top + PANEL - 1, f"{last_rank}", ha="right", color=PALE)


def _draw_shades(
    axes: Axes,
    shares: np.ndarray,
    shades: LinearSegmentedColormap,
    extent: tuple[float, float, float, float],
) -> None:
    axes.set(xticks=[], yticks=[])
    # The exponent makes colours fall off faster than the work, so that idle ranks stand out.
    axes.imshow(
        shares**1.5, cmap=shades, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="none"
    )
    _thin_frame(axes)


def fold_ranks(work: np.ndarray) -> np.ndarray:
    """Divide the work `[steps, ranks]` by that of each step's busiest rank, and fold ranks into columns.

    Returns `[rows, steps x columns]`. Ranks fill the columns of a step downwards, at most TALLEST
    in each; nan in the last column's empty cells. 100 ranks take 2 columns of 50.
    """
    steps, ranks = work.shape
    columns = -(-ranks // TALLEST)
    rows = -(-ranks // columns)
    cells = np.full((steps, columns * rows), np.nan)
    cells[:, :ranks] = work / np.maximum(work.max(1, keepdims=True), 1)
    return cells.reshape(steps * columns, rows).T


def _draw_shade_legend(figure: Figure, y: float, work: Work) -> None:
    """Draw the scale of the shades, and explain how ranks are folded into columns."""
    write_text(figure, LEFT, y, "work of a rank over that of the step's fullest:", color=PALE)
    write_text(figure, LEFT + 286, y, "0", ha="right", color=PALE)
    axes = add_axes(figure, LEFT + 294, y - 10, 150, 12)
    greys = LinearSegmentedColormap.from_list("greys", ["white", INK], SHADES)
    _draw_shades(axes, np.linspace(0, 1, 600)[None], greys, (0, 1, 0, 1))
    write_text(figure, LEFT + 452, y, "1", color=PALE)
    ranks = next(iter(work.values())).shape[1]
    if (columns := -(-ranks // TALLEST)) > 1:
        text = f"{ranks:,} ranks: every step is {columns} columns of {-(-ranks // columns)}"
        write_text(figure, WIDTH - RIGHT, y, text, ha="right", color=PALE)


# --------------------------------------------------------------------------------------------------
# drawing


def module_name(name: str) -> str:
    """Return the display name of a module."""
    return "LLM" if name == "llm" else f"{name} encoder"


def module_colours(names: Collection[str]) -> dict[str, str]:
    """Choose the colour of each module; those of an omni model have the same in every figure."""
    unknown = [name for name in names if name not in MODULES]
    return {name: MODULES.get(name) or OTHERS[unknown.index(name) % len(OTHERS)] for name in names}


def new_figure(height: float, title: str, subtitle: str) -> Figure:
    figure = Figure((WIDTH / PIXELS, height / PIXELS), dpi=2 * PIXELS, facecolor=PAPER)
    write_text(figure, RIGHT, 28, title, weight="bold", fontsize=11.5)
    write_text(figure, RIGHT, 48, subtitle, color=PALE)
    return figure


def _height(figure: Figure) -> float:
    return float(figure.get_figheight()) * PIXELS


def add_axes(figure: Figure, x: float, top: float, width: float, height: float) -> Axes:
    figure_height = _height(figure)
    box = (x / WIDTH, 1 - (top + height) / figure_height, width / WIDTH, height / figure_height)
    return figure.add_axes(box)


def _thin_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set(color="#999999", linewidth=0.5)


def write_text(figure: Figure, x: float, y: float, text: str, **style: object) -> None:
    """Write text with its baseline at y."""
    figure.text(x / WIDTH, 1 - y / _height(figure), text, va="baseline", **style)


def text_width(text: str) -> float:
    """Estimate the width of a label in pixels."""
    return float(TextPath((0, 0), text, size=8).get_extents().width) * PIXELS / 72


def draw_legend(figure: Figure, top: float, prefix: str, colours: Mapping[str, str]) -> None:
    """Draw a line of coloured squares with their names."""
    write_text(figure, LEFT, top + 12, prefix, color=PALE)
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


def save_figure(figure: Figure, path: Path, title: str) -> None:
    # Without a date and a version, the same data gives the same bytes.
    metadata = {"Title": title} | ({"Date": None, "Creator": None} if path.suffix == ".svg" else {})
    figure.savefig(path, metadata=metadata)
