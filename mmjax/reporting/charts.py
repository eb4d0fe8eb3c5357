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
LEFT, RIGHT, TOP, BOTTOM = 50, 18, 10, 26  # margins of what is drawn in
SMOOTH_FROM = 40  # points, from which on a noisy curve gets a smooth one before it

Spell = Callable[[float], str]


@dataclass(frozen=True)
class Figure:
    """A chart with what to see in it. legend: colours by name; marks: whether there are some to be told of."""

    title: str
    told: str
    svg: str
    legend: Mapping[str, int] = field(default_factory=dict)
    wide: bool = False


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

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
            return [tick for tick in found if self.low <= tick <= self.high]
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
    x = Scale(*_bounds([c.step for c in shown.values()]), LEFT, width - RIGHT)
    low, high = _value_bounds(shown, logarithmic, from_zero)
    y = Scale(low, high, height - BOTTOM, TOP, logarithmic)
    parts = [_axes(x, y, spell, width, height)]
    parts += [
        f'<path class="mark" d="M{float(x(m)):.1f} {TOP}V{height - BOTTOM}"/>' for m in marks if x.low <= m <= x.high
    ]
    for name, curve in shown.items():
        smooth = noisy and len(curve) >= SMOOTH_FROM
        style = colour_class(colours[name])
        if noisy and (curve.high > curve.low).any():
            outline = np.clip(np.concatenate([y(curve.high), y(curve.low)[::-1]]), TOP, height - BOTTOM)
            over = np.concatenate([x(curve.step), x(curve.step)[::-1]])
            parts.append(f'<path class="band {style}" d="{path(over, outline)}Z"/>')
        parts.append(_curve(name, f"{'pale ' if smooth else ''}line {style}", x(curve.step), y(curve.mean)))
        if smooth:
            parts.append(_curve(name, f"line {style}", x(curve.step), y(curve.smoothed())))
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
    x = Scale(*_bounds([step]), LEFT, width - RIGHT)
    total = np.sum(list(layers.values()), axis=0)
    y = Scale(0, min(float(total.max()), 3 * float(np.quantile(total, 0.98))) * 1.06 or 1, height - BOTTOM, TOP)
    parts, base = [], np.zeros(len(step))
    for name, of in layers.items():
        outline = np.clip(np.concatenate([y(base + of), y(base)[::-1]]), TOP, None)
        over = np.concatenate([x(step), x(step)[::-1]])
        style = f"area {colour_class(colours[name])}"
        parts.append(f'<path class="{style}" d="{path(over, outline)}Z"><title>{escape(name)}</title></path>')
        base = base + of
    parts += [
        f'<path class="mark" d="M{float(x(m)):.1f} {TOP}V{height - BOTTOM}"/>' for m in marks if x.low <= m <= x.high
    ]
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
    """How many of the values `[n]` are about as large; between `bounds`, where given. The median is marked."""
    low, high = bounds or (float(values.min()), float(values.max()))
    whole = bounds is None and np.array_equal(values, np.round(values))
    if whole:
        step = max(1.0, math.ceil((high - low + 1) / bins))
        edges = np.arange(low - 0.5, high + step, step)
    else:
        edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    counts = np.histogram(values, edges)[0]
    x = Scale(float(edges[0]), float(edges[-1]), LEFT, width - RIGHT)
    y = Scale(0, float(counts.max()) * 1.08, height - BOTTOM, TOP)
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


def _axes(x: Scale, y: Scale, spell: Spell, width: int, height: int, spell_y: Spell | None = None) -> str:
    """Horizontal lines with their values; steps, or values, below. One spelling is of the values over steps."""
    over, up = (count, spell) if spell_y is None else (spell, spell_y)
    bottom = height - BOTTOM
    parts = []
    for tick in y.ticks(4):
        at = float(y(tick))
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(up(tick))}</text>')
    for tick in x.ticks(max(2, width // 80)):
        at = float(x(tick))
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(over(tick))}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{width - RIGHT}"/>')
    return "".join(parts)


def _svg(parts: Sequence[str], width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _bounds(values: Sequence[np.ndarray]) -> tuple[float, float]:
    joined = np.concatenate(values)
    low, high = float(joined.min()), float(joined.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _value_bounds(curves: Mapping[str, Curve], logarithmic: bool, from_zero: bool) -> tuple[float, float]:
    """What the axis spans."""
    joined = np.concatenate([curve.mean for curve in curves.values()])
    if logarithmic:
        above = joined[joined > 0]
        if len(above):
            return float(above.min()) / 1.15, float(above.max()) * 1.15
        return 0.1, 1.0
    low, high = float(joined.min()), float(joined.max())
    if from_zero:
        low = min(low, 0.0)
    room = 0.06 * ((high - low) or abs(high) or 1)
    return (low if from_zero and low == 0 else low - room), high + room
