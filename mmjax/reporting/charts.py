"""Chart curves, layers and histograms of a page, over axes with round labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mmjax.console import count
from mmjax.reporting.drawing import Drawing, text_width
from mmjax.reporting.run import Curve

# Widths of charts, in pixels.
WIDE = 960
HALF = 468
# Margins around the plot, in pixels; the left one grows with its labels.
LEFT = 50
RIGHT = 18
TOP = 10
BOTTOM = 26
BOLD = 1.8  # of a curve, in pixels
AREA = 0.85  # opacity of areas
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
    legend: Mapping[str, str] = field(default_factory=dict)
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


def round_step(rough: float) -> float:
    """Round to 1, 2 or 5 times a power of ten: the smallest that is at least 1 / 1.3 of the value."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(s for s in (1, 2, 5, 10) if s * 1.3 >= rough / power)


def line_chart(
    curves: Mapping[str, Curve],
    colours: Mapping[str, str],
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
    drawing = Drawing(width, height)
    bottom = height - BOTTOM
    low, high = _value_bounds(shown, logarithmic, from_zero)
    y = Scale(low, high, bottom, TOP, logarithmic)
    x = _step_scale([curve.step for curve in shown.values()], y, spell, width)
    draw_axes(drawing, x, y, count, spell)
    _draw_marks(drawing, x, y, marks)

    def within(values: np.ndarray) -> np.ndarray:
        return np.clip(y(values), TOP, bottom)

    for name, curve in shown.items():
        colour = colours[name]
        steps = x(curve.step)
        smooth = noisy and len(curve) >= SMOOTH_FROM
        if noisy and (curve.high > curve.low).any():
            drawing.area(*_band(steps, within(curve.low), within(curve.high)), colour, opacity=0.15)
        if len(curve) == 1:
            drawing.area(*_dot(steps, within(curve.mean)), colour, title=name)
        elif smooth:
            drawing.line(steps, within(curve.mean), colour, opacity=0.38, title=name)
            drawing.line(steps, within(curve.smoothed()), colour, width=BOLD, title=name)
        else:
            drawing.line(steps, within(curve.mean), colour, width=BOLD, title=name)
        _draw_outliers(drawing, curve.step, curve.mean, x, y, colour, spell)
    return drawing.svg()


def area_chart(
    layers: Mapping[str, np.ndarray],
    step: np.ndarray,
    colours: Mapping[str, str],
    spell: Formatter = count,
    marks: Sequence[float] = (),
    width: int = WIDE,
    height: int = 190,
) -> str:
    """Draw values `[n]` stacked on top of each other over steps `[n]`. Other arguments are as of `line_chart`."""
    drawing = Drawing(width, height)
    total = np.sum(list(layers.values()), axis=0)
    y = Scale(0, _robust_bounds(total, from_zero=True)[1] * 1.06 or 1, height - BOTTOM, TOP)
    x = _step_scale([step], y, spell, width)
    base = np.zeros(len(step))
    for name, values in layers.items():
        over, outline = _band(x(step), y(base), y(base + values))
        drawing.area(over, np.clip(outline, TOP, None), colours[name], opacity=AREA, title=name)
        base = base + values
    _draw_marks(drawing, x, y, marks)
    _draw_outliers(drawing, step, total, x, y, "grey", spell)
    draw_axes(drawing, x, y, count, spell)
    return drawing.svg()


def histogram(
    values: np.ndarray,
    colour: str,
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
    drawing = Drawing(width, height)
    bottom = height - BOTTOM
    y = Scale(0, float(counts.max()) * 1.08, bottom, TOP)
    x = Scale(float(edges[0]), float(edges[-1]), _left_margin(y, count), width - RIGHT)
    draw_axes(drawing, x, y, spell, count)
    spans = zip(pairwise(x(edges)), pairwise(edges), y(counts), counts.tolist(), strict=True)
    for (left, right), (low, high), top, n in spans:
        if n:
            bar = (left + 0.4, top, max(right - 0.4, left + 0.8), bottom)
            title = f"{spell(low)} to {spell(high)}: {n:,}"
            drawing.bars([bar], colour, opacity=AREA, title=title)
    drawing.line(x(np.median(values)), [TOP, bottom], "ink", width=1.2, dashed=True)
    return drawing.svg()


# --------------------------------------------------------------------------------------------------
# parts


def draw_axes(drawing: Drawing, x: Scale, y: Scale, spell_x: Formatter, spell_y: Formatter) -> None:
    """Draw both axes and the grid of the vertical one."""
    ticks = y.ticks(4)
    for tick, label in zip(ticks, _labels(ticks, spell_y), strict=True):
        tick_y = float(y(tick))
        drawing.line([x.begin, x.end], tick_y, "faint")
        drawing.label(x.begin - 7, tick_y + 4, label, anchor="end")
    draw_horizontal_axis(drawing, x, y.begin, spell_x)


def draw_horizontal_axis(drawing: Drawing, x: Scale, y: float, spell: Formatter) -> None:
    """Draw a horizontal axis with its labels below it."""
    ticks = x.ticks(max(2, round(x.end - x.begin) // 80))
    for tick, label in zip(ticks, _labels(ticks, spell), strict=True):
        # else the last label is cut off
        tick_x = min(float(x(tick)), drawing.width - text_width(label) / 2)
        drawing.label(tick_x, y + 17, label, anchor="middle")
    drawing.line([x.begin, x.end], y, "grey")


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
    return max(LEFT, 9 + max(map(text_width, _labels(y.ticks(4), spell)), default=0))


def _step_scale(steps: Sequence[np.ndarray], y: Scale, spell: Formatter, width: int) -> Scale:
    """Make the horizontal scale of a chart over steps."""
    joined = np.concatenate(steps)
    low, high = float(joined.min()), float(joined.max())
    pad = 0.5 if low == high else 0.0
    return Scale(low - pad, high + pad, _left_margin(y, spell), width - RIGHT)


def _band(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outline of what is between two lines."""
    return np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])


def _dot(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outline of a dot."""
    turns = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    return x + 3 * np.cos(turns), y + 3 * np.sin(turns)


def _draw_marks(drawing: Drawing, x: Scale, y: Scale, marks: Sequence[float]) -> None:
    """Draw vertical lines at the steps at which the run resumed."""
    for mark in marks:
        if x.low <= mark <= x.high:
            drawing.line(x(mark), [y.end, y.begin], "pale", dashed=True)


def _draw_outliers(
    drawing: Drawing,
    step: np.ndarray,
    values: np.ndarray,
    x: Scale,
    y: Scale,
    colour: str,
    spell: Formatter,
) -> None:
    """Draw triangles at the edge of a chart where values lie beyond it, and label the largest."""
    below = (values < y.low) & (values > 0 if y.logarithmic else True)
    for beyond, edge, inwards in ((values > y.high, y.end, 1), (below, y.begin, -1)):
        for number, value in zip(step[beyond].tolist(), values[beyond].tolist(), strict=True):
            tip = x(number) + np.array([0, -5, 5])
            sides = edge + np.array([0, 8, 8]) * inwards
            drawing.area(tip, sides, colour, title=f"step {number:,.0f}: {spell(value)}")
    if (above := values > y.high).any():
        largest = int(np.argmax(np.where(above, values, -np.inf)))
        label = spell(float(values[largest]))
        tip = float(x(step[largest]))
        if tip + 8 + text_width(label) > x.end:
            drawing.label(tip - 8, y.end + 9, label, anchor="end")
        else:
            drawing.label(tip + 8, y.end + 9, label)


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
