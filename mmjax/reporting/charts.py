"""Draw charts as SVG whose colours follow the page's stylesheet, light or dark.

Written by hand because Matplotlib's SVG has fixed colours, no titles to hover over, and three times
the size. Colours are classes of the page's stylesheet, `c0`, `c1`, ... All texts are escaped here.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

import numpy as np

from mmjax.console import count
from mmjax.reporting.run import Curve

# Widths of charts, in pixels.
WIDE = 960
HALF = 468
COLOURS = 7  # of the stylesheet, c0 to c6
GREY = 7  # c7, the colour of a baseline
# Margins around the plot, in pixels; the left one grows with its labels.
LEFT = 50
RIGHT = 18
TOP = 10
BOTTOM = 26
CHARACTER = 6.4  # average width of a character of a label
SMOOTH_FROM = 40  # points, from which on a noisy curve is drawn smoothed too
# of a label; more than the first where two labels of an axis would be the same
DIGITS = range(3, 10)
# Outliers are looked for among FEW values or more: those, up to the share RARE at either end, that
# are further from the others than FAR times the span of these.
FEW = 20
RARE = 0.02
FAR = 3.0
# of a value, or in decades: a smaller span counts as this, so that a level line has no outliers
LEVEL = 0.1

Formatter = Callable[..., str]  # formats a value with a number of digits


@dataclass(frozen=True)
class Figure:
    """A chart and its caption. legend: colours by name; narrow: the chart for phones, where `svg` is wide."""

    title: str
    caption: str
    svg: str
    legend: Mapping[str, int] = field(default_factory=dict)
    narrow: str = ""


@dataclass(frozen=True)
class Scale:
    """Map values to pixels."""

    low: float
    high: float
    begin: float  # pixels
    end: float
    logarithmic: bool = False

    def __call__(self, value: np.ndarray | float) -> np.ndarray:
        values = np.asarray(value, float)
        bounds = np.array([self.low, self.high], float)
        if self.logarithmic:
            values = np.log10(np.maximum(values, self.low))
            bounds = np.log10(bounds)
        low, high = bounds.tolist()
        return self.begin + (values - low) / ((high - low) or 1) * (self.end - self.begin)

    def ticks(self, about: int) -> list[float]:
        """Choose round values to label, about as many as given."""
        if self.logarithmic:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            decades = range(first, last + 1, max(1, (last - first) // about))
            factors = (1,) if last - first > 2 else (1, 2, 5)
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(inside) > 1:
                return inside
        step = round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def data_uri(kind: str, content: bytes) -> str:
    """Encode an image as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def round_step(rough: float) -> float:
    """Round to 1, 2 or 5 times a power of ten: the smallest that is at least 1 / 1.3 of the value."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(s for s in (1, 2, 5, 10) if s * 1.3 >= rough / power)


def line_chart(
    curves: Mapping[str, Curve],
    colours: Mapping[str, int],
    spell: Formatter = count,
    marks: Sequence[float] = (),
    logarithmic: bool = False,
    from_zero: bool = False,
    noisy: bool = False,
    width: int = HALF,
    height: int = 190,
) -> str:
    """Draw curves over steps. marks: steps at which the run resumed. noisy: draws smoothed curves over pale ones.

    spell: formats values.
    """
    shown = {name: curve.thinned(width - LEFT - RIGHT) for name, curve in curves.items()}
    bottom = height - BOTTOM
    low, high = _value_bounds(shown, logarithmic, from_zero)
    y = Scale(low, high, bottom, TOP, logarithmic)
    x = _step_scale([curve.step for curve in shown.values()], y, spell, width)
    parts = [_axes(x, y, spell, width, height), *_marks(x, marks, height)]

    def within(values: np.ndarray) -> np.ndarray:
        return np.clip(y(values), TOP, bottom)

    for name, curve in shown.items():
        smooth = noisy and len(curve) >= SMOOTH_FROM
        style = colour_class(colours[name])
        if noisy and (curve.high > curve.low).any():
            outline = np.concatenate([within(curve.high), within(curve.low)[::-1]])
            over = np.concatenate([x(curve.step), x(curve.step)[::-1]])
            parts.append(f'<path class="band {style}" d="{path(over, outline)}Z"/>')
        parts.append(
            _curve(
                name, f"{'pale ' if smooth else ''}line {style}", x(curve.step), within(curve.mean)
            )
        )
        if smooth:
            parts.append(_curve(name, f"line {style}", x(curve.step), within(curve.smoothed())))
        parts += _outliers(curve.step, curve.mean, x, y, style, spell)
    return _svg(parts, width, height)


def area_chart(
    layers: Mapping[str, np.ndarray],
    step: np.ndarray,
    colours: Mapping[str, int],
    spell: Formatter = count,
    marks: Sequence[float] = (),
    width: int = WIDE,
    height: int = 190,
) -> str:
    """Draw values `[n]` stacked on top of each other over steps `[n]`. Other arguments are as of `line_chart`."""
    total = np.sum(list(layers.values()), axis=0)
    y = Scale(0, _robust_bounds(total, from_zero=True)[1] * 1.06 or 1, height - BOTTOM, TOP)
    x = _step_scale([step], y, spell, width)
    parts = []
    base = np.zeros(len(step))
    for name, values in layers.items():
        outline = np.clip(np.concatenate([y(base + values), y(base)[::-1]]), TOP, None)
        over = np.concatenate([x(step), x(step)[::-1]])
        style = f"area {colour_class(colours[name])}"
        parts.append(
            f'<path class="{style}" d="{path(over, outline)}Z"><title>{escape(name)}</title></path>'
        )
        base = base + values
    parts += [*_marks(x, marks, height), *_outliers(step, total, x, y, colour_class(GREY), spell)]
    return _svg([*parts, _axes(x, y, spell, width, height)], width, height)


def histogram(
    values: np.ndarray,
    colour: int,
    spell: Formatter = count,
    bounds: tuple[float, float] | None = None,
    bins: int = 44,
    width: int = HALF,
    height: int = 150,
) -> str:
    """Draw a histogram of values `[n]` with bins of equal width and the median marked. bounds: of the bins."""
    low, high = bounds or (float(values.min()), float(values.max()))
    if bounds is None and np.array_equal(values, np.round(values)):
        # Bins of the same number of integers each: others would alternate between n and n + 1, and
        # look like a comb.
        step = max(1.0, math.ceil((high - low + 1) / bins))
        edges = np.arange(low - 0.5, high + step, step)
    else:
        edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    counts = np.histogram(values, edges)[0]
    y = Scale(0, float(counts.max()) * 1.08, height - BOTTOM, TOP)
    x = Scale(float(edges[0]), float(edges[-1]), _left_margin(y, count), width - RIGHT)
    style = f"area {colour_class(colour)}"
    bottom = height - BOTTOM
    bars = []
    spans = zip(pairwise(x(edges)), pairwise(edges), y(counts), counts.tolist(), strict=True)
    for (a, b), (low, high), top, n in spans:
        if n:
            outline = f"M{a + 0.4:.1f} {bottom}V{top:.1f}H{max(b - 0.4, a + 0.8):.1f}V{bottom}Z"
            title = f"<title>{spell(low)} to {spell(high)}: {n:,}</title>"
            bars.append(f'<path class="{style}" d="{outline}">{title}</path>')
    median = f'<path class="median" d="M{float(x(np.median(values))):.1f} {TOP}V{bottom}"/>'
    return _svg([_axes(x, y, spell, width, height, count), *bars, median], width, height)


# --------------------------------------------------------------------------------------------------
# parts


def colour_class(number: int) -> str:
    """Name the stylesheet's class of a colour; numbers beyond the last colour start again."""
    return f"c{number if number == GREY else number % COLOURS}"


def path(x: np.ndarray, y: np.ndarray) -> str:
    """Format points as an SVG path."""
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _curve(name: str, style: str, x: np.ndarray, y: np.ndarray) -> str:
    if len(x) == 1:
        place = f'cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="3"'
        return f'<circle class="dot {style}" {place}><title>{escape(name)}</title></circle>'
    return f'<path class="{style}" d="{path(x, y)}"><title>{escape(name)}</title></path>'


def _labels(ticks: Sequence[float], spell: Formatter) -> list[str]:
    """Format the values of an axis with as few digits as tell them apart."""
    labels = [spell(tick) for tick in ticks]
    for digits in DIGITS:
        if len(set(labels)) == len(labels):
            break
        labels = [spell(tick, digits) for tick in ticks]
    return labels


def _left_margin(y: Scale, spell: Formatter) -> float:
    """Compute the left margin that the labels of a vertical axis need."""
    return max(LEFT, 9 + CHARACTER * max(map(len, _labels(y.ticks(4), spell)), default=0))


def _step_scale(steps: Sequence[np.ndarray], y: Scale, spell: Formatter, width: int) -> Scale:
    """Make the horizontal scale of a chart over steps."""
    joined = np.concatenate(steps)
    low, high = float(joined.min()), float(joined.max())
    pad = 0.5 if low == high else 0.0
    return Scale(low - pad, high + pad, _left_margin(y, spell), width - RIGHT)


def _marks(x: Scale, marks: Sequence[float], height: int) -> list[str]:
    """Draw vertical lines at the steps at which the run resumed."""
    inside = [float(x(mark)) for mark in marks if x.low <= mark <= x.high]
    return [f'<path class="mark" d="M{mark_x:.1f} {TOP}V{height - BOTTOM}"/>' for mark_x in inside]


def _outliers(
    step: np.ndarray, values: np.ndarray, x: Scale, y: Scale, style: str, spell: Formatter
) -> list[str]:
    """Draw triangles at the edge of a chart where values lie beyond it, and label the largest."""
    parts = []
    below = (values < y.low) & (values > 0 if y.logarithmic else True)
    for beyond, edge, inwards in ((values > y.high, y.end, 1), (below, y.begin, -1)):
        for number, value in zip(step[beyond].tolist(), values[beyond].tolist(), strict=True):
            title = f"step {number:,.0f}: {escape(spell(value))}"
            triangle = f"M{float(x(number)):.1f} {edge:.1f}l-5 {8 * inwards}h10Z"
            parts.append(
                f'<path class="area outlier {style}" d="{triangle}"><title>{title}</title></path>'
            )
    if (above := values > y.high).any():
        largest = int(np.argmax(np.where(above, values, -np.inf)))
        label = spell(float(values[largest]))
        tip = float(x(step[largest]))
        overflows = tip + 8 + CHARACTER * len(label) > x.end
        place = f'x="{tip - 8:.1f}" text-anchor="end"' if overflows else f'x="{tip + 8:.1f}"'
        parts.append(f'<text class="tick" {place} y="{y.end + 9:.1f}">{escape(label)}</text>')
    return parts


def _axes(
    x: Scale, y: Scale, spell: Formatter, width: int, height: int, spell_y: Formatter | None = None
) -> str:
    """Draw both axes and the grid. spell: formats y over steps, or x where y has a format of its own."""
    spell_x, spell_y = (count, spell) if spell_y is None else (spell, spell_y)
    bottom = height - BOTTOM
    start = x.begin
    parts = []
    ticks = y.ticks(4)
    for tick, label in zip(ticks, _labels(ticks, spell_y), strict=True):
        tick_y = float(y(tick))
        text_place = f'x="{start - 7:.1f}" y="{tick_y + 4:.1f}" text-anchor="end"'
        parts.append(f'<path class="grid" d="M{start:.1f} {tick_y:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="tick" {text_place}>{escape(label)}</text>')
    ticks = x.ticks(max(2, width // 80))
    for tick, label in zip(ticks, _labels(ticks, spell_x), strict=True):
        # else the last label is cut off
        tick_x = min(float(x(tick)), width - CHARACTER * len(label) / 2)
        text_place = f'x="{tick_x:.1f}" y="{bottom + 17}" text-anchor="middle"'
        parts.append(f'<text class="tick" {text_place}>{escape(label)}</text>')
    parts.append(f'<path class="axis" d="M{start:.1f} {bottom}H{width - RIGHT}"/>')
    return "".join(parts)


def _svg(parts: Sequence[str], width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _value_bounds(
    curves: Mapping[str, Curve], logarithmic: bool, from_zero: bool
) -> tuple[float, float]:
    """Compute the bounds of the vertical axis; outliers may lie beyond."""
    joined = np.concatenate([curve.mean for curve in curves.values()])
    if logarithmic:
        positive = joined[joined > 0]
        if not len(positive):
            return 0.1, 1.0
        low, high = _robust_bounds(np.log10(positive), LEVEL)
        return 10**low / 1.15, 10**high * 1.15
    low, high = _robust_bounds(joined, from_zero=from_zero)
    pad = 0.06 * ((high - low) or abs(high) or 1)
    return (low if from_zero and low == 0 else low - pad), high + pad


def _robust_bounds(
    values: np.ndarray, level: float = 0.0, from_zero: bool = False
) -> tuple[float, float]:
    """Compute the smallest and the largest value that is no outlier. level: the least span to measure them by."""
    ordered = np.sort(values)
    low = min(float(ordered[0]), 0.0) if from_zero else float(ordered[0])
    if len(ordered) < FEW:
        return low, float(ordered[-1])
    rare = math.ceil(RARE * len(ordered))
    usual_low = min(float(ordered[rare]), 0.0) if from_zero else float(ordered[rare])
    usual_high = float(ordered[-1 - rare])
    far = FAR * max(usual_high - usual_low, level or LEVEL * abs(usual_high))
    inside = ordered[(ordered >= usual_low - far) & (ordered <= usual_high + far)]
    return (low if low >= usual_low - far else float(inside[0])), float(inside[-1])
