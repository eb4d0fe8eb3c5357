"""Plot each rank's work by phase, lengths of data, and a race; and the sheet that all plots of files are drawn on.

Positions are in pixels of a sheet that is WIDTH wide, from its upper left corner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.balance.parts import dist_ratio
from mmjax.console import count
from mmjax.reporting.charts import Scale, draw_axes, draw_horizontal_axis
from mmjax.reporting.drawing import SERIES, Drawing, literal, rgb, series_colours

Work = Mapping[str, np.ndarray]  # of each module, [steps, ranks]

# In pixels: the width of a sheet, its margins, and the gap between panels that are side by side.
WIDTH = 1000
LEFT = 64
RIGHT = 20
GAP = 22
INNER = WIDTH - LEFT - RIGHT
# Heights in pixels.
TITLE = 66
PANEL = 104
TALLEST = 64  # ranks in one column of a panel
ACROSS = 3  # panels of work side by side
SHADES = 32  # from an idle rank to the busiest
HISTOGRAMS = 2  # side by side
BINS = 48
PAIR = 46  # height of the two bars of a race's case

MEANINGS = {
    "none": "samples as they come",
    "llm": "placed by the work of the LLM",
    "post": "placed by the work of all phases",
}


def new_sheet(height: float, title: str, subtitle: str) -> Drawing:
    """Return a drawing with a title."""
    drawing = Drawing(WIDTH, height, title)
    drawing.heading(RIGHT, 28, title, size=16)
    drawing.label(RIGHT, 48, subtitle)
    return drawing


def module_name(name: str) -> str:
    """Return the display name of a module."""
    return "LLM" if name == "llm" else f"{name} encoder"


# --------------------------------------------------------------------------------------------------
# work


def plot_work(
    path: Path, works: Mapping[str, Work], headings: Mapping[str, str], subtitle: str
) -> None:
    """Plot each rank's work, as `work_drawing` draws it, into an SVG or PNG file."""
    work_drawing(works, headings, subtitle).save(path)


def work_drawing(works: Mapping[str, Work], headings: Mapping[str, str], subtitle: str) -> Drawing:
    """Draw each rank's work in every step. works and headings: by kind of balancing."""
    height = TITLE + len(works) * work_height(next(iter(works.values()))) + 34
    drawing = new_sheet(height, "Work of every rank in every step", subtitle)
    draw_works(drawing, TITLE, works, headings)
    return drawing


def draw_works(
    drawing: Drawing, top: float, works: Mapping[str, Work], headings: Mapping[str, str]
) -> None:
    """Draw a panel for each kind of balancing and module, and below them a legend of the shades."""
    for kind, work in works.items():
        drawing.heading(LEFT, top + 14, headings[kind])
        colours = series_colours(work)
        across = min(ACROSS, len(work))
        width = (INNER - GAP * (across - 1)) / across
        for k, (name, amounts) in enumerate(work.items()):
            line, column = divmod(k, across)
            x = LEFT + column * (width + GAP)
            y = top + 38 + line * (PANEL + 40)
            _draw_panel(drawing, x, y, width, name, amounts, colours[name])
        top += work_height(work)
    _draw_shade_legend(drawing, top + 14, next(iter(works.values())))


def work_height(work: Work) -> float:
    """Return the height that the panels of one kind of balancing take."""
    return 38 + -(-len(work) // ACROSS) * (PANEL + 40) - 8


def _draw_panel(
    drawing: Drawing, x: float, top: float, width: float, name: str, work: np.ndarray, colour: str
) -> None:
    """Draw the work `[steps, ranks]` of a module: steps from left to right, ranks downwards."""
    steps, ranks = work.shape
    cells = fold_ranks(work)
    last_rank = len(cells) - 1  # of the first column
    right = x + width
    bottom = top + PANEL
    drawing.label(x, top - 6, module_name(name), colour=colour, bold=True)
    ratio = f"dist ratio {dist_ratio(work).mean():.3f}"
    drawing.label(right, top - 6, ratio, anchor="end", colour="ink")
    # Cells of several pixels stay sharp in viewers that smooth an image when they enlarge it.
    for axis, pixels in enumerate((2 * PANEL, 2 * width)):
        cells = cells.repeat(max(1, round(pixels / cells.shape[axis])), axis)
    drawing.picture(x, top, width, PANEL, image=_shade_image(cells, colour))
    for step in range(1, steps) if ranks > TALLEST else ():
        drawing.line(x + width * step / steps, [top, bottom], "paper", width=1.2)
    drawing.frame(x, top, right, bottom)
    drawing.label(x, bottom + 13, "step 1")
    drawing.label(right, bottom + 13, f"{steps}", anchor="end")
    if x == LEFT:
        drawing.label(x - 6, top + 9, "rank 0", anchor="end")
        drawing.label(x - 6, bottom - 1, f"{last_rank}", anchor="end")


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


def _shade_image(shares: np.ndarray, colour: str) -> Image.Image:
    """Make an image of shares `[rows, columns]`: of a colour, from nothing to all of it; nothing for nan."""
    # The exponent makes colours fall off faster than the work, so that idle ranks stand out.
    shades = np.nan_to_num(shares) ** 1.5 * (SHADES - 1)
    image = Image.fromarray(shades.round().astype(np.uint8))
    image.putpalette(rgb(literal(colour)) * SHADES)
    image.info["transparency"] = bytes(round(255 * k / (SHADES - 1)) for k in range(SHADES))
    return image


def _draw_shade_legend(drawing: Drawing, y: float, work: Work) -> None:
    """Draw the scale of the shades, and explain how ranks are folded into columns."""
    drawing.label(LEFT, y, "work of a rank over that of the step's fullest:")
    drawing.label(LEFT + 286, y, "0", anchor="end")
    scale = _shade_image(np.linspace(0, 1, 600)[None], "pale")
    drawing.picture(LEFT + 294, y - 10, 150, 12, image=scale)
    drawing.frame(LEFT + 294, y - 10, LEFT + 444, y + 2)
    drawing.label(LEFT + 452, y, "1")
    ranks = next(iter(work.values())).shape[1]
    if (columns := -(-ranks // TALLEST)) > 1:
        text = f"{ranks:,} ranks: every step is {columns} columns of {-(-ranks // columns)}"
        drawing.label(WIDTH - RIGHT, y, text, anchor="end")


# --------------------------------------------------------------------------------------------------
# lengths and races


def plot_lengths(
    path: Path, title: str, subtitle: str, lengths: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Plot a histogram of each measure. lengths: values `[n]` by measure, then by source."""
    sources = list(dict.fromkeys(source for by_source in lengths.values() for source in by_source))
    colours = {source: SERIES[k % len(SERIES)] for k, source in enumerate(sources)}
    lines = -(-len(lengths) // HISTOGRAMS)
    drawing = new_sheet(96 + lines * (PANEL + 62), title, subtitle)
    drawing.legend(LEFT, 70, "values of", colours)
    width = (INNER - GAP * (HISTOGRAMS - 1)) / HISTOGRAMS
    for k, (measure, by_source) in enumerate(lengths.items()):
        line, column = divmod(k, HISTOGRAMS)
        top = 112 + line * (PANEL + 62)
        x = LEFT + column * (width + GAP)
        joined = np.concatenate(list(by_source.values()))
        summary = f"median {count(np.median(joined))}, largest {count(joined.max())}"
        drawing.heading(x, top - 6, measure)
        drawing.label(x + width, top - 6, summary, anchor="end")
        _draw_histograms(drawing, x, top, width, by_source, colours)
    drawing.save(path)


def _draw_histograms(
    drawing: Drawing,
    x: float,
    top: float,
    width: float,
    by_source: Mapping[str, np.ndarray],
    colours: Mapping[str, str],
) -> None:
    """Draw the histograms of several sources over each other on a logarithmic axis, without zeros."""
    joined = np.concatenate(list(by_source.values()))
    positive = joined[joined > 0]
    bounds = np.geomspace(positive.min() / 1.05, positive.max() * 1.05, BINS + 1)
    counts = {name: np.histogram(values, bounds)[0] for name, values in by_source.items()}
    bottom = top + PANEL
    across = Scale(bounds[0], bounds[-1], x, x + width, logarithmic=True)
    up = Scale(0, 1.05 * max(c.max() for c in counts.values()), bottom, top)
    for name, values in counts.items():
        # Two points at each bound make stairs.
        stairs_x = across(bounds).repeat(2)
        stairs_y = np.concatenate([[bottom], up(values).repeat(2), [bottom]])
        drawing.area(stairs_x, stairs_y, colours[name], opacity=0.35)
        drawing.line(stairs_x, stairs_y, colours[name])
    draw_horizontal_axis(drawing, across, bottom, count)


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
    bottom = 92 + PAIR * len(rates)
    title = "mmjax and transformers' Trainer on one CPU core"
    drawing = new_sheet(bottom + 50, title, "the same samples and weights, in turns")
    colours = {"mmjax": "green", "Trainer": "orange", "Trainer, grouped by length": "gold"}
    drawing.legend(LEFT, 74, "", {name: colours[name] for name in losses})
    middle = LEFT + INNER / 2
    largest = 1.15 * max(max(pair) for pair in rates.values())
    x = Scale(0, largest, LEFT + 78, middle - LEFT / 2)
    for k, (name, (ours, theirs)) in enumerate(rates.items()):
        side = "Trainer, grouped by length" if "by length" in name else "Trainer"
        y = 92 + PAIR * (k + 0.5)
        ends = x(np.array([ours, theirs])).tolist()
        drawing.bars([(x.begin, y - 17, ends[0], y - 1)], colours["mmjax"])
        drawing.bars([(x.begin, y + 1, ends[1], y + 17)], colours[side])
        drawing.label(ends[0] + 4, y - 5, f"{ours / theirs:.2f} x", colour="ink")
        drawing.label(x.begin - 7, y + 4, name, anchor="end")
    draw_horizontal_axis(drawing, x, bottom, count)
    drawing.label(x.begin, bottom + 38, "tokens a CPU second, without padding")
    points = {name: np.array(pairs, float).T for name, pairs in losses.items()}
    tokens, values = np.concatenate(list(points.values()), axis=1)
    x = Scale(0, tokens.max(), middle + LEFT / 2, WIDTH - RIGHT)
    pad = 0.05 * (values.max() - values.min())
    y = Scale(values.min() - pad, values.max() + pad, bottom, 92)
    draw_axes(drawing, x, y, count, count)
    for name, (across, up) in points.items():
        drawing.line(x(across), y(up), colours[name], width=1.3)
    drawing.label(x.begin, bottom + 38, f"tokens trained on: loss of {case}")
    drawing.save(path)
