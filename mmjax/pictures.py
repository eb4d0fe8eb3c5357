"""Pictures of what was planned: each rank's work by phase, and the memory and time that a run will take.

Places are in pixels of a picture that is WIDTH wide, from its upper left corner. The same data gives the same SVG, byte
by byte.
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

from mmjax.balance.metrics import dist_ratio
from mmjax.planning.cost import parameters
from mmjax.training.console import count, duration, size
from mmjax.training.outlook import Outlook, Way

Work = Mapping[str, np.ndarray]  # of each module, [steps, ranks]

WIDTH, LEFT, RIGHT, GAP = 1000, 64, 20, 22  # of the picture, its margins, between panels that are side by side
PANEL, BAR, HEADING, TALLEST = 104, 26, 22, 64  # heights: of a panel, a bar, a heading; ranks in one column
ACROSS, SHADES = 3, 32  # panels side by side; from an idle rank to the fullest
SPREADS, BINS = 2, 48  # panels of lengths side by side; bars in each
PIXELS = 100  # of an inch, in the units above; a PNG has twice as many

PAPER, INK, PALE, ALARM = "#fbfbf9", "#222222", "#666666", "#b3261e"
MODULES = {"llm": "#3d7f4c", "vision": "#2563a8", "audio": "#b4552d"}
OTHERS = ("#7a5c99", "#a8862a", "#2f8f8f", "#a34a6f")  # of further encoders
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
BEHIND = 1.2  # an axis over its longest bar: there is room for what is told behind it
UNSEEN = 0.002  # of an axis: a part that is shorter in all bars is not in the legend
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
def draw_work(path: Path, works: Mapping[str, Work], headings: Mapping[str, str], subtitle: str) -> None:
    """Write a picture of each rank's work, by way of balancing and module; `headings` by way as well."""
    height = 66 + len(works) * _work_height(next(iter(works.values()))) + 34
    figure = _figure(height, "Work of every rank in every step", subtitle)
    _works(figure, 66, works, headings)
    _save(figure, path, "Work of every rank in every step, by phase and way of balancing")


@matplotlib.rc_context(STYLE)
def draw_plan(path: Path, outlook: Outlook) -> None:
    """Write a picture of a run: memory and time of a step by way of balancing, and ranks' work, unbalanced and not."""
    config, chosen = outlook.config, outlook.chosen
    kinds = ["none", config.batch.balance.kind if config.batch.balance.kind != "none" else "post"]
    works = {kind: outlook.ways[kind].work for kind in kinds}
    bars = BAR * len(outlook.ways)
    tops = np.cumsum([66, HEADING + bars + 66, HEADING + bars + 50])
    axes = " x ".join(f"{axis} {n}" for axis, n in outlook.mesh.items() if n > 1) or "one device"
    title = f"{config.name} on {outlook.cluster}: {duration(chosen.time.total)} a step, MFU {outlook.mfu(chosen):.1%}"
    subtitle = (
        f"{count(sum(parameters(config.model).values()))} parameters, {config.training.precision}, mesh {axes}, "
        f"{outlook.samples:,.0f} samples and {count(outlook.tokens)} LLM tokens a step, "
        f"balance {config.batch.balance.kind}"
    )
    figure = _figure(tops[2] + len(works) * _work_height(chosen.work) + 34, title, subtitle)
    _memory(figure, tops[0], outlook)
    _time(figure, tops[1], outlook)
    headings = {
        kind: f"Work of {'each encoder rank' if chosen.layout.topology.encoders_per_rank > 1 else 'each rank'}, "
        f"balance {kind}: {MEANINGS[kind]}"
        for kind in works
    }
    _works(figure, tops[2], works, headings)
    _save(figure, path, f"Plan of {title}")


@matplotlib.rc_context(STYLE)
def draw_lengths(path: Path, title: str, subtitle: str, lengths: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write a picture of how values spread; lengths: `[n]` by what is measured, then by where it was."""
    names = list(dict.fromkeys(name for of in lengths.values() for name in of))
    shades = (*MODULES.values(), *OTHERS)
    colours = {name: shades[k % len(shades)] for k, name in enumerate(names)}
    lines = -(-len(lengths) // SPREADS)
    figure = _figure(96 + lines * (PANEL + 62), title, subtitle)
    _legend(figure, 58, "values of", colours)
    width = (WIDTH - LEFT - RIGHT - GAP * (SPREADS - 1)) / SPREADS
    for k, (measured, of) in enumerate(lengths.items()):
        line, column = divmod(k, SPREADS)
        top, left = 112 + line * (PANEL + 62), LEFT + column * (width + GAP)
        joined = np.concatenate(list(of.values()))
        median, most = np.median(joined), joined.max()
        _text(figure, left, top - 6, measured, weight="bold")
        _text(figure, left + width, top - 6, f"median {count(median)}, largest {count(most)}", ha="right", color=PALE)
        _spread(_axes(figure, left, top, width, PANEL), of, colours)
    _save(figure, path, title)


def _spread(axes: Axes, of: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Draw a histogram of values on a logarithmic axis, without zeros."""
    joined = np.concatenate(list(of.values()))
    above = joined[joined > 0]
    bounds = np.geomspace(above.min() / 1.05, above.max() * 1.05, BINS + 1)
    for name, values in of.items():
        counts = np.histogram(values, bounds)[0]
        axes.stairs(counts, bounds, fill=True, color=colours[name], alpha=0.35)
        axes.stairs(counts, bounds, color=colours[name], linewidth=1.1)
    axes.set(xscale="log", yticks=[], facecolor=PAPER, xlim=(bounds[0], bounds[-1]), ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.tick_params(labelsize=8, color="#999999", labelcolor=PALE, which="both")
    for side in axes.spines.values():
        side.set(color="#999999", linewidth=0.5)


# ------------------------------------------------------------------------------------------------------ memory and time


def _memory(figure: Figure, top: float, outlook: Outlook) -> None:
    """Bytes of a device by kind, against its room."""
    colours = module_colours(outlook.chosen.work)
    found = {kind: way.fitted.fixed for kind, way in outlook.ways.items()}
    kept = {kind: way.fitted.activations for kind, way in outlook.ways.items()}
    room, fullest = outlook.chosen.fitted.room.device, max(way.fitted.device for way in outlook.ways.values())
    seen = room < 4 * fullest  # else bars would be too short to read beside it
    axes = _bars(figure, top, outlook, BEHIND * max(fullest, room if seen else 0))
    _text(figure, LEFT, top + 14, "Memory of a device", weight="bold")
    for row, (kind, way) in enumerate(outlook.ways.items()):
        segments = [(name, found[kind][name], colour) for name, colour in KINDS.items()]
        segments += [(module_name(name), kept[kind][name], colours[name]) for name in colours]
        verdict, colour_told = ("", INK) if way.fitted.fits else (": too large", ALARM)
        _stack(axes, row, segments, size, size(way.fitted.device) + verdict, colour_told, room if seen else 0.0)
    if seen:
        axes.axvline(room, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        place = LEFT + (WIDTH - LEFT - RIGHT) * room / axes.get_xlim()[1]
        _text(figure, max(place, LEFT + 190), top + 14, f"room {size(room)}", ha="center")  # never in the heading
    else:
        _text(figure, WIDTH - RIGHT, top + 14, f"room {size(room)}, beyond this picture", ha="right", color=PALE)
    below = top + HEADING + BAR * len(outlook.ways) + 8
    shown = {kind: c for kind, c in KINDS.items() if max(of[kind] for of in found.values()) > UNSEEN * fullest}
    _legend(figure, below, "always there", shown)
    _legend(figure, below + 19, "activations of", {module_name(name): colour for name, colour in colours.items()})


def _time(figure: Figure, top: float, outlook: Outlook) -> None:
    """Seconds of a step by what they go to; of gathering shards, those that computing does not hide."""
    slowest = max(way.time.total for way in outlook.ways.values())
    axes = _bars(figure, top, outlook, BEHIND * slowest)
    _text(figure, LEFT, top + 14, "Time of a step", weight="bold")
    found = [time_parts(way) for way in outlook.ways.values()]
    parts = [part for part in PARTS if max(of[part] for of in found) > UNSEEN * slowest]
    for row, way in enumerate(outlook.ways.values()):
        segments = [(part, found[row][part], colour) for part, colour in PARTS.items()]
        _stack(axes, row, segments, duration, f"{duration(way.time.total)}, MFU {outlook.mfu(way):.1%}")
    names = {("shards, not hidden" if part == "shards" else part): PARTS[part] for part in parts}
    _legend(figure, top + HEADING + BAR * len(outlook.ways) + 8, "spent on", names)


def time_parts(way: Way) -> dict[str, float]:
    """Seconds by part, which add up to the whole step. What computing again saves is taken off computing."""
    time = way.time
    parts = {part: getattr(time, part) for part in PARTS}
    parts |= {"compute": time.compute + min(time.recompute, 0.0), "recompute": max(time.recompute, 0.0)}
    return parts | {"shards": max(0.0, time.shards - time.compute - time.recompute)}


def _bars(figure: Figure, top: float, outlook: Outlook, limit: float) -> Axes:
    """Room for one bar for each way of balancing, under a heading."""
    axes = _axes(figure, LEFT, top + HEADING, WIDTH - LEFT - RIGHT, BAR * len(outlook.ways))
    axes.set_xlim(0, limit)
    axes.set_ylim(len(outlook.ways) - 0.5, -0.5)
    axes.axis("off")
    for row, kind in enumerate(outlook.ways):
        chosen = kind == outlook.config.batch.balance.kind
        y = top + HEADING + BAR * (row + 0.5) + 4
        _text(figure, LEFT - 8, y, kind, ha="right", weight="bold" if chosen else "normal")
    return axes


def _stack(
    axes: Axes,
    row: int,
    segments: Sequence[tuple[str, float, str]],
    spell: Callable[[float], str],
    told: str,
    colour_told: str = INK,
    beyond: float = 0.0,
) -> None:
    """One bar of named and coloured segments, each with as much of its name and amount as it has room for.

    told: of the whole bar, behind it and behind `beyond`.
    """
    limit, start = axes.get_xlim()[1], 0.0
    for name, amount, colour in segments:
        axes.barh(row, amount, left=start, height=0.72, color=colour, edgecolor=PAPER, linewidth=0.6)
        room = (WIDTH - LEFT - RIGHT) * amount / limit - 8
        label = next((text for text in (f"{name} {spell(amount)}", spell(amount)) if _length(text) < room), "")
        white = np.dot(matplotlib.colors.to_rgb(colour), (0.3, 0.59, 0.11)) < 0.6
        middle = {"ha": "center", "va": "center_baseline"}
        axes.text(start + amount / 2, row, label, color="white" if white else INK, fontsize=8, **middle)
        start += amount
    place = max(start, beyond) + 0.008 * limit
    axes.text(place, row, told, va="center_baseline", weight="bold", color=colour_told)


# ----------------------------------------------------------------------------------------------------------------- work


def _works(figure: Figure, top: float, works: Mapping[str, Work], headings: Mapping[str, str]) -> None:
    """A panel for each way of balancing and module, and below what their shades mean."""
    for kind, work in works.items():
        _text(figure, LEFT, top + 14, headings[kind], weight="bold")
        colours, across = module_colours(work), min(ACROSS, len(work))
        width = (WIDTH - LEFT - RIGHT - GAP * (across - 1)) / across
        for k, (name, of) in enumerate(work.items()):
            line, column = divmod(k, across)
            _panel(figure, LEFT + column * (width + GAP), top + 38 + line * (PANEL + 40), width, name, of, colours)
        top += _work_height(work)
    _shades(figure, top + 14, next(iter(works.values())))


def _work_height(work: Work) -> float:
    return 38 + -(-len(work) // ACROSS) * (PANEL + 40) - 8


def _panel(
    figure: Figure, left: float, top: float, width: float, name: str, work: np.ndarray, colours: Mapping[str, str]
) -> None:
    """Steps from left to right, ranks downwards; where there are many, in several columns of one step."""
    (steps, ranks), cells = work.shape, folded(work)
    last = len(cells) - 1
    _text(figure, left, top - 6, module_name(name), weight="bold", color=colours[name])
    _text(figure, left + width, top - 6, f"dist ratio {dist_ratio(work).mean():.3f}", ha="right")
    axes = _axes(figure, left, top, width, PANEL)
    shades = LinearSegmentedColormap.from_list(name, ["white", colours[name]], SHADES)
    # Of several pixels, a cell stays sharp where a viewer smooths what it enlarges.
    for axis, pixels in enumerate((2 * PANEL, 2 * width)):
        cells = cells.repeat(max(1, round(pixels / cells.shape[axis])), axis)
    _shade(axes, cells, shades, (0, steps, 0, 1))
    for step in range(1, steps) if ranks > TALLEST else ():
        axes.axvline(step, color=PAPER, linewidth=1.2)
    _text(figure, left, top + PANEL + 13, "step 1", color=PALE)
    _text(figure, left + width, top + PANEL + 13, f"{steps}", ha="right", color=PALE)
    if left == LEFT:
        _text(figure, left - 6, top + 9, "rank 0", ha="right", color=PALE)
        _text(figure, left - 6, top + PANEL - 1, f"{last}", ha="right", color=PALE)


def _shade(
    axes: Axes, shares: np.ndarray, shades: LinearSegmentedColormap, extent: tuple[float, float, float, float]
) -> None:
    """Steeper than the work itself, so that the eye finds who waits."""
    axes.set(xticks=[], yticks=[])
    axes.imshow(shares**1.5, cmap=shades, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="none")
    for side in axes.spines.values():
        side.set(color="#999999", linewidth=0.5)


def folded(work: np.ndarray) -> np.ndarray:
    """Each rank's work over that of its step's fullest, `[rows, steps x columns]`.

    work: `[steps, ranks]`. Ranks fill columns downwards, at most TALLEST in each; nan where the last has none left.
    """
    steps, ranks = work.shape
    columns = -(-ranks // TALLEST)
    rows = -(-ranks // columns)
    cells = np.full((steps, columns * rows), np.nan)
    cells[:, :ranks] = work / np.maximum(work.max(1, keepdims=True), 1)
    return cells.reshape(steps * columns, rows).T


def _shades(figure: Figure, y: float, work: Work) -> None:
    """Draw the legend of phases and the balance of the ranks."""
    _text(figure, LEFT, y, "work of a rank over that of the step's fullest:", color=PALE)
    _text(figure, LEFT + 286, y, "0", ha="right", color=PALE)
    axes = _axes(figure, LEFT + 294, y - 10, 150, 12)
    greys = LinearSegmentedColormap.from_list("greys", ["white", INK], SHADES)
    _shade(axes, np.linspace(0, 1, 600)[None], greys, (0, 1, 0, 1))
    _text(figure, LEFT + 452, y, "1", color=PALE)
    ranks = next(iter(work.values())).shape[1]
    if (columns := -(-ranks // TALLEST)) > 1:
        told = f"{ranks:,} ranks: every step is {columns} columns of {-(-ranks // columns)}"
        _text(figure, WIDTH - RIGHT, y, told, ha="right", color=PALE)


# -------------------------------------------------------------------------------------------------------------- drawing


def module_name(name: str) -> str:
    """Return the display name of a module."""
    return "LLM" if name == "llm" else f"{name} encoder"


def module_colours(work: Work) -> dict[str, str]:
    """The colour of each module, the same in every picture for those of an omni model."""
    others = [name for name in work if name not in MODULES]
    return {name: MODULES.get(name) or OTHERS[others.index(name) % len(OTHERS)] for name in work}


def _figure(height: float, title: str, subtitle: str) -> Figure:
    figure = Figure((WIDTH / PIXELS, height / PIXELS), dpi=2 * PIXELS, facecolor=PAPER)
    _text(figure, RIGHT, 28, title, weight="bold", fontsize=11.5)
    _text(figure, RIGHT, 48, subtitle, color=PALE)
    return figure


def _height(figure: Figure) -> float:
    return float(figure.get_figheight()) * PIXELS


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    whole = _height(figure)
    return figure.add_axes((left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole))


def _text(figure: Figure, x: float, y: float, text: str, **style: object) -> None:
    """y: of the baseline."""
    figure.text(x / WIDTH, 1 - y / _height(figure), text, va="baseline", **style)


def _length(text: str) -> float:
    """Estimate the width of a label in pixels."""
    return float(TextPath((0, 0), text, size=8).get_extents().width) * PIXELS / 72


def _legend(figure: Figure, top: float, prefix: str, colours: Mapping[str, str]) -> None:
    """One line of coloured squares with their names."""
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
    made = {"Date": None, "Creator": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata={"Title": title} | made)
