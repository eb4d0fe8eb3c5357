"""An SVG of each rank's work in every step, by phase: balance `none` above `post`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmjax.balance.metrics import dist_ratio

PHASES = {"llm": ("LLM", "#3d7f4c"), "vision": ("vision encoder", "#2563a8"), "audio": ("audio encoder", "#b4552d")}
BALANCES = {"none": "samples as they come", "post": "placed by the work of all phases"}
SHADES = 20  # from idle to as busy as the step's fullest rank
WIDTH, LEFT, TOP, GAP = 980, 64, 78, 22  # of the picture; to the panels; between those of two phases
PANEL, CAPTION = 104, 64  # heights


@dataclass(frozen=True)
class Panel:
    """One phase with one balance. work: `[steps, ranks]`."""

    work: np.ndarray

    @property
    def dist_ratio(self) -> float:
        """Mean over steps that have any work; OmniBal eq. 2."""
        return float(np.mean([dist_ratio(w) if w.any() else 0.0 for w in self.work]))

    def shade(self) -> np.ndarray:
        """Each rank's work over the step's largest, rounded to 1 / SHADES, int64 `[steps, ranks]`."""
        share = self.work / np.maximum(self.work.max(1, keepdims=True), 1)
        return np.rint(share * SHADES).astype(np.int64)


def draw(panels: Mapping[str, Mapping[str, Panel]], waits: Mapping[str, float], subtitle: str) -> str:
    """The picture as SVG text. panels: by phase and balance. waits: by balance, the straggler wait of a whole step."""
    width = (WIDTH - LEFT - 20 - GAP * (len(panels) - 1)) / len(panels)
    height = TOP + len(BALANCES) * (PANEL + CAPTION) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        "<title>Work of every rank in every step, by phase, with balance none and post</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fbfbf9"/>',
        _text(20, 28, "Work of every rank in every step", 'font-weight="600" font-size="15"'),
        _text(20, 47, subtitle, 'fill="#555"'),
    ]
    for row, (balance, meaning) in enumerate(BALANCES.items()):
        y = TOP + row * (PANEL + CAPTION) + 22
        waited = f"balance {balance}: {meaning}; ranks wait {waits[balance]:.1%} of the step"
        lines.append(_text(20, y - 26, waited, 'font-weight="600"'))
        ranks = next(iter(panels.values()))[balance].work.shape[1]
        lines += [
            _text(LEFT - 6, y + 9, "rank 0", _END),
            _text(LEFT - 6, y + PANEL - 1, f"{ranks - 1}", _END),
        ]
        for column, (phase, of_phase) in enumerate(panels.items()):
            lines += _panel(of_phase[balance], phase, LEFT + column * (width + GAP), y, width)
    return "\n".join([*lines, *_legend(height - 16), "</svg>"]) + "\n"


_END = 'text-anchor="end" fill="#555"'


def _panel(panel: Panel, phase: str, x: float, y: float, width: float) -> list[str]:
    name, colour = PHASES[phase]
    (steps, ranks), shades = panel.work.shape, panel.shade()
    frame = f'width="{width:.1f}" height="{PANEL}"'
    lines = [
        f'<g transform="translate({x:.1f} {y})">',
        _text(0, -5, name, f'font-weight="600" fill="{colour}"'),
        _text(width, -5, f"dist ratio {panel.dist_ratio:.3f}", 'text-anchor="end"'),
        f'<rect {frame} fill="#fff"/>',
        # One unit is one rank in one step.
        f'<g transform="scale({width / steps:.4f} {PANEL / ranks:.4f})" fill="{colour}" shape-rendering="crispEdges">',
    ]
    for shade in range(1, SHADES + 1):
        cells = "".join(f"M{s} {r}h1v1h-1z" for s, r in np.argwhere(shades == shade))
        if cells:
            lines.append(f'<path fill-opacity="{_opacity(shade):.2f}" d="{cells}"/>')
    lines += ["</g>", f'<rect {frame} fill="none" stroke="#888" stroke-width="0.6"/>']
    lines += [_text(0, PANEL + 14, "step 1", 'fill="#555"'), _text(width, PANEL + 14, f"{steps}", _END), "</g>"]
    return lines


def _legend(y: float) -> list[str]:
    """What the shades mean."""
    lines = [_text(LEFT, y, "work of a rank over that of the step's fullest: 0", 'fill="#555"')]
    for shade in range(SHADES + 1):
        opacity = f'fill="#222" fill-opacity="{_opacity(shade):.2f}"'
        lines.append(f'<rect x="{LEFT + 286 + 8 * shade}" y="{y - 10}" width="8" height="12" {opacity}/>')
    frame = f'width="{8 * (SHADES + 1)}" height="12" fill="none" stroke="#888" stroke-width="0.6"'
    lines.append(f'<rect x="{LEFT + 286}" y="{y - 10}" {frame}/>')
    return [*lines, _text(LEFT + 292 + 8 * (SHADES + 1), y, "1 = nobody waits for another", 'fill="#555"')]


def _opacity(shade: int) -> float:
    """Steeper than the work itself, so that the eye finds who waits."""
    return (shade / SHADES) ** 1.5


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{text}</text>'
