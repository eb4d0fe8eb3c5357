"""Charts as SVG, drawn by hand: small, sharp, and in the colours of the page, light or dark.

Colours are classes of the page's stylesheet: `c0`, `c1`, ... for what is compared. Texts are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from mmjax.reporting.curves import Curve
from mmjax.training.console import count

WIDE, HALF = 960, 468  # of a chart, in pixels
COLOURS, GREY = 7, 7  # of the stylesheet, c0 to c6; and what things are compared with
LEFT, RIGHT, TOP, BOTTOM = 50, 18, 10, 26  # margins of what is drawn in; the left one grows with its labels
CHARACTER = 6.4  # width of a label's character, about
SMOOTH_FROM = 40  # points, from which on a noisy curve gets a smooth one before it
DIGITS = range(3, 10)  # of a label; more than the first where two of an axis would be the same
# Outliers: of at least FEW values those, of RARE of all at either end, that lie FAR times the span of the others away.
FEW, RARE, FAR = 20, 0.02, 3.0
LEVEL = 0.1  # of a value, or decades: a smaller span is a straight line, from which nothing lies far away

Spell = Callable[..., str]  # of a value, and of the number of digits


@dataclass(frozen=True)
class Figure:
    """A chart with what to see in it. legend: colours by name; narrow: the same for a phone, where `svg` is wide."""

    title: str
    told: str
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
        low, high = self.low, self.high
        if self.logarithmic:
            values, low, high = np.log10(np.maximum(values, self.low)), math.log10(low), math.log10(high)
        return self.begin + (values - low) / ((high - low) or 1) * (self.end - self.begin)

    def ticks(self, about: int) -> list[float]:
        """Round values, about as many as said."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, (last - first) // about)
            steps = (1,) if last - first > 2 else (1, 2, 5)
            found = [s * 10.0**d for d in range(first, last + 1, every) for s in steps]
            inside = [tick for tick in found if self.low <= tick <= self.high]
            if len(inside) > 1:
                return inside
        step = round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not much above."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(s for s in (1, 2, 5, 10) if s * 1.3 >= rough / power)


def line_chart(
    curves: Mapping[str, Curve],
    colours: Mapping[str, int],
    spell: Spell = count,
    marks: Sequence[float] = (),
    logarithmic: bool = False,
    from_zero: bool = False,
    noisy: bool = False,
    width: int = HALF,
    height: int = 190,
) -> str:
    """Curves over steps. marks: steps at which the run was resumed. noisy: smooth curves stand before pale ones."""
    shown = {name: curve.thinned(width - LEFT - RIGHT) for name, curve in curves.items()}
    y, bottom = Scale(*_value_bounds(shown, logarithmic, from_zero), height - BOTTOM, TOP, logarithmic), height - BOTTOM
    x = Scale(*_bounds([c.step for c in shown.values()]), _left(y, spell), width - RIGHT)
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
        parts.append(_curve(name, f"{'pale ' if smooth else ''}line {style}", x(curve.step), within(curve.mean)))
        if smooth:
            parts.append(_curve(name, f"line {style}", x(curve.step), within(curve.smoothed())))
        parts += _outliers(curve.step, curve.mean, x, y, style, spell)
    return _svg(parts, width, height)


def area_chart(
    layers: Mapping[str, np.ndarray],
    step: np.ndarray,
    colours: Mapping[str, int],
    spell: Spell = count,
    marks: Sequence[float] = (),
    width: int = WIDE,
    height: int = 190,
) -> str:
    """Layers `[n]` on top of each other over steps `[n]`."""
    total = np.sum(list(layers.values()), axis=0)
    y = Scale(0, _robust_bounds(total, from_zero=True)[1] * 1.06 or 1, height - BOTTOM, TOP)
    x = Scale(*_bounds([step]), _left(y, spell), width - RIGHT)
    parts, base = [], np.zeros(len(step))
    for name, of in layers.items():
        outline = np.clip(np.concatenate([y(base + of), y(base)[::-1]]), TOP, None)
        over = np.concatenate([x(step), x(step)[::-1]])
        style = f"area {colour_class(colours[name])}"
        parts.append(f'<path class="{style}" d="{path(over, outline)}Z"><title>{escape(name)}</title></path>')
        base = base + of
    parts += [*_marks(x, marks, height), *_outliers(step, total, x, y, colour_class(GREY), spell)]
    return _svg([*parts, _axes(x, y, spell, width, height)], width, height)


def histogram(
    values: np.ndarray,
    colour: int,
    spell: Spell = count,
    bounds: tuple[float, float] | None = None,
    bins: int = 44,
    width: int = HALF,
    height: int = 150,
) -> str:
    """Count the values `[n]` in bins of equal width; between `bounds`, where given. The median is marked."""
    low, high = bounds or (float(values.min()), float(values.max()))
    whole = bounds is None and np.array_equal(values, np.round(values))
    if whole:
        step = max(1.0, math.ceil((high - low + 1) / bins))
        edges = np.arange(low - 0.5, high + step, step)
    else:
        edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    counts = np.histogram(values, edges)[0]
    y = Scale(0, float(counts.max()) * 1.08, height - BOTTOM, TOP)
    x = Scale(float(edges[0]), float(edges[-1]), _left(y, count), width - RIGHT)
    left, right, top = x(edges[:-1]), x(edges[1:]), y(counts)
    style, bottom = f"area {colour_class(colour)}", height - BOTTOM
    bars = [
        f'<path class="{style}" d="M{a + 0.4:.1f} {bottom}V{t:.1f}H{max(b - 0.4, a + 0.8):.1f}V{bottom}Z">'
        f"<title>{spell(e)} to {spell(f)}: {n:,}</title></path>"
        for a, b, t, n, e, f in zip(left, right, top, counts.tolist(), edges[:-1], edges[1:], strict=True)
        if n
    ]
    middle = float(x(float(np.median(values))))
    median = f'<path class="median" d="M{middle:.1f} {TOP}V{bottom}"/>'
    return _svg([_axes(x, y, spell, width, height, count), *bars, median], width, height)


# ---------------------------------------------------------------------------------------------------------------- parts


def colour_class(number: int) -> str:
    """A colour's class in the stylesheet; further ones begin again."""
    return f"c{number if number == GREY else number % COLOURS}"


def path(x: np.ndarray, y: np.ndarray) -> str:
    """Points as an SVG path."""
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _curve(name: str, style: str, x: np.ndarray, y: np.ndarray) -> str:
    if len(x) == 1:
        return (
            f'<circle class="dot {style}" cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="3"><title>{escape(name)}</title></circle>'
        )
    return f'<path class="{style}" d="{path(x, y)}"><title>{escape(name)}</title></path>'


def _labels(ticks: Sequence[float], spell: Spell) -> list[str]:
    """Spell the values of an axis with as few digits as tell them apart."""
    labels = [spell(tick) for tick in ticks]
    for digits in DIGITS:
        if len(set(labels)) == len(labels):
            break
        labels = [spell(tick, digits) for tick in ticks]
    return labels


def _left(y: Scale, spell: Spell) -> float:
    """The left margin that the labels of a vertical axis need."""
    return max(LEFT, 9 + CHARACTER * max(map(len, _labels(y.ticks(4), spell)), default=0))


def _marks(x: Scale, marks: Sequence[float], height: int) -> list[str]:
    """Vertical lines at the steps at which the run was resumed."""
    inside = [float(x(mark)) for mark in marks if x.low <= mark <= x.high]
    return [f'<path class="mark" d="M{at:.1f} {TOP}V{height - BOTTOM}"/>' for at in inside]


def _outliers(step: np.ndarray, values: np.ndarray, x: Scale, y: Scale, style: str, spell: Spell) -> list[str]:
    """Triangles at the edge of a chart where values lie beyond it, the largest with its value."""
    parts = []
    below = (values < y.low) & (values > 0 if y.logarithmic else True)
    for beyond, edge, inwards in ((values > y.high, y.end, 1), (below, y.begin, -1)):
        for at, value, number in zip(x(step[beyond]), values[beyond].tolist(), step[beyond].tolist(), strict=True):
            title = f"step {number:,.0f}: {escape(spell(value))}"
            corners = f"M{at:.1f} {edge:.1f}l-5 {8 * inwards}h10Z"
            parts.append(f'<path class="area outlier {style}" d="{corners}"><title>{title}</title></path>')
    if (above := values > y.high).any():
        most = int(np.argmax(np.where(above, values, -np.inf)))
        label = spell(float(values[most]))
        at = float(x(step[most]))
        left_of_it = at + 8 + CHARACTER * len(label) > x.end
        place = f'x="{at - 8:.1f}" text-anchor="end"' if left_of_it else f'x="{at + 8:.1f}"'
        parts.append(f'<text class="tick" {place} y="{y.end + 9:.1f}">{escape(label)}</text>')
    return parts


def _axes(x: Scale, y: Scale, spell: Spell, width: int, height: int, spell_y: Spell | None = None) -> str:
    """Horizontal lines with their values; steps, or values, below. One spelling is of the values over steps."""
    over, up = (count, spell) if spell_y is None else (spell, spell_y)
    bottom, left = height - BOTTOM, x.begin
    parts = []
    ticks = y.ticks(4)
    for tick, label in zip(ticks, _labels(ticks, up), strict=True):
        at = float(y(tick))
        parts.append(f'<path class="grid" d="M{left:.1f} {at:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{left - 7:.1f}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    ticks = x.ticks(max(2, width // 80))
    for tick, label in zip(ticks, _labels(ticks, over), strict=True):
        half = CHARACTER * len(label) / 2
        at = min(float(x(tick)), width - half)  # else the last one is cut off
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<path class="axis" d="M{left:.1f} {bottom}H{width - RIGHT}"/>')
    return "".join(parts)


def _svg(parts: Sequence[str], width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _bounds(values: Sequence[np.ndarray]) -> tuple[float, float]:
    joined = np.concatenate(values)
    low, high = float(joined.min()), float(joined.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _value_bounds(curves: Mapping[str, Curve], logarithmic: bool, from_zero: bool) -> tuple[float, float]:
    """Return the bounds of the axis; outliers may lie beyond."""
    joined = np.concatenate([curve.mean for curve in curves.values()])
    if logarithmic:
        above = joined[joined > 0]
        if len(above):
            low, high = _robust_bounds(np.log10(above), LEVEL)
            return 10**low / 1.15, 10**high * 1.15
        return 0.1, 1.0
    low, high = _robust_bounds(joined, from_zero=from_zero)
    room = 0.06 * ((high - low) or abs(high) or 1)
    return (low if from_zero and low == 0 else low - room), high + room


def _robust_bounds(values: np.ndarray, level: float = 0.0, from_zero: bool = False) -> tuple[float, float]:
    """The smallest and the largest of the values `[n]` that are no outliers. level: the span of a straight line."""
    of = np.sort(values)
    low = min(float(of[0]), 0.0) if from_zero else float(of[0])
    if len(of) < FEW:
        return low, float(of[-1])
    rare = math.ceil(RARE * len(of))
    usual_low = min(float(of[rare]), 0.0) if from_zero else float(of[rare])
    usual_high = float(of[-1 - rare])
    far = FAR * max(usual_high - usual_low, level or LEVEL * abs(usual_high))
    inside = of[(of >= usual_low - far) & (of <= usual_high + far)]
    return (low if low >= usual_low - far else float(inside[0])), float(inside[-1])
