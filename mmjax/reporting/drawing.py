"""Draw lines, areas, texts and images once; write them as SVG of a page, or as an SVG or PNG file.

Positions are in pixels from a drawing's upper left corner. Colours are those of `THEMES` by name: in a
page an SVG has the page's, light or dark, in a file the light ones; or they are literal, `#a0b1c2`.
SVG is written by hand because Matplotlib's has fixed colours, no titles to hover over, and three
times the size. Matplotlib paints PNG files. The same data gives the same SVG, byte for byte.
All texts are escaped here.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = np.ndarray | Sequence[float] | float
Box = tuple[float, float, float, float]  # left, top, right and bottom

PIXELS = 100  # per inch; a PNG has twice as many
FONT = "DejaVu Sans"
FONTS = f"{FONT}, Verdana, sans-serif"  # Verdana, elsewhere, is as wide
CHARACTER = 6.4  # average width of a character of SIZE, in pixels
SIZE = 11.0  # of letters, in pixels

LIGHT = {
    "paper": "#fbfbf9",
    "ink": "#222222",
    "pale": "#6b6b6b",
    "faint": "#e4e3dd",
    "card": "#ffffff",
    "mark": "#ffe9a8",
    "alarm": "#b3261e",
    "grey": "#a5a59f",
    "green": "#3d7f4c",
    "blue": "#2563a8",
    "orange": "#b4552d",
    "violet": "#7a5c99",
    "gold": "#a8862a",
    "teal": "#2f8f8f",
    "rose": "#a34a6f",
}
DARK = {
    "paper": "#17181a",
    "ink": "#e4e4e0",
    "pale": "#9a9a96",
    "faint": "#303236",
    "card": "#1e2023",
    "mark": "#5c4a12",
    "alarm": "#ff8a80",
    "grey": "#77797c",
    "green": "#6fb980",
    "blue": "#6ba3e6",
    "orange": "#e58a61",
    "violet": "#b095d3",
    "gold": "#d8b65a",
    "teal": "#5fc4c4",
    "rose": "#dc82a8",
}
SERIES = ("green", "blue", "orange", "violet", "gold", "teal", "rose")
# Shares that the shades of SERIES have of paper or ink.
PAPER_SHARE = 0.6
INK_SHARE = 0.35
# Colours of modules and of their modalities; other names have those behind the third in turn.
KNOWN = {"llm": "green", "text": "green", "vision": "blue", "image": "blue", "audio": "orange"}


def series_colours(names: Collection[str]) -> dict[str, str]:
    """Choose the colours of series; a module and its modality have the same in every figure."""
    unnamed = SERIES[3:]
    unknown = [name for name in names if name not in KNOWN]
    return {
        name: KNOWN[name] if name in KNOWN else unnamed[unknown.index(name) % len(unnamed)]
        for name in names
    }


def mix(colour: str, other: str, share: float) -> str:
    """Mix two literal colours, with this share of the other one."""
    amounts = (1 - share) * np.array(rgb(colour)) + share * np.array(rgb(other))
    return "#" + "".join(f"{round(amount):02x}" for amount in amounts.tolist())


def rgb(colour: str) -> tuple[int, ...]:
    """Return the red, green and blue of a literal colour, 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


def with_shades(colours: Mapping[str, str]) -> dict[str, str]:
    """Add shades of each colour of SERIES to a theme: `green-light`, `green-deep` and `green-deep-light`."""
    shaded = dict(colours)
    for name in SERIES:
        deep = mix(colours[name], colours["ink"], INK_SHARE)
        shaded[f"{name}-light"] = mix(colours[name], colours["paper"], PAPER_SHARE)
        shaded[f"{name}-deep"] = deep
        shaded[f"{name}-deep-light"] = mix(deep, colours["paper"], PAPER_SHARE)
    return shaded


THEMES = {"light": with_shades(LIGHT), "dark": with_shades(DARK)}


def literal(colour: str) -> str:
    """Return a colour of a file, by its name or as it is."""
    return colour if colour.startswith("#") else THEMES["light"][colour]


def _themed(colour: str) -> str:
    """Name a colour as an SVG of a page does; empty: none."""
    return f"var(--{colour})" if colour and not colour.startswith("#") else colour or "none"


def data_uri(kind: str, content: bytes) -> str:
    """Encode an image as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def png_uri(image: Image.Image) -> str:
    """Encode an image as the data URI of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return data_uri("png", file.getvalue())


def text_width(text: str) -> float:
    """Estimate the width of a label in pixels."""
    return CHARACTER * len(text)


@dataclass(frozen=True)
class Shape:
    """Lines or areas of one look. outlines: points `[n, 2]` of each; width: of the stroke, in pixels."""

    outlines: Sequence[np.ndarray]
    fill: str = ""  # a colour; empty: not filled
    stroke: str = ""
    width: float = 1.0
    dashed: bool = False
    opacity: float = 1.0
    title: str = ""  # shown where the mouse is

    def svg(self) -> str:
        """Write it as an element."""
        style = f'fill="{_themed(self.fill)}"'
        if self.stroke:
            style += f' stroke="{_themed(self.stroke)}" stroke-width="{self.width:g}"'
        if self.dashed:
            style += ' stroke-dasharray="4 3"'
        if self.opacity < 1:
            style += f' opacity="{self.opacity:g}"'
        end = "Z" if self.fill else ""
        data = "".join(_path(outline) + end for outline in self.outlines)
        title = f"<title>{escape(self.title)}</title>" if self.title else ""
        return f'<path {style} d="{data}">{title}</path>'

    def paint(self, axes: Axes, order: int) -> None:
        """Paint it on axes whose units are pixels, over what has a smaller order."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        # Matplotlib takes the last point of a closed path for a repetition of the first.
        outlines = [
            Outline(np.concatenate([points, points[:1]]), closed=True)
            if self.fill
            else Outline(points)
            for points in self.outlines
        ]
        patch = PathPatch(
            Outline.make_compound_path(*outlines),
            facecolor=literal(self.fill) if self.fill else "none",
            edgecolor=literal(self.stroke) if self.stroke else "none",
            linewidth=self.width * 72 / PIXELS if self.stroke else 0,
            linestyle=(0, (3, 2)) if self.dashed else "-",
            alpha=self.opacity,
            zorder=order,
        )
        axes.add_patch(patch)


def _path(points: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points.tolist())


@dataclass(frozen=True)
class Label:
    """Text with its baseline at y, from, to or around x."""

    x: float
    y: float
    text: str
    anchor: str = "start"  # or middle, end
    colour: str = "pale"
    size: float = SIZE
    bold: bool = False

    def svg(self) -> str:
        """Write it as an element; the defaults are those of the drawing."""
        style = f'x="{self.x:.1f}" y="{self.y:.1f}" text-anchor="{self.anchor}"'
        if self.colour != "pale":
            style += f' fill="{_themed(self.colour)}"'
        if self.size != SIZE:
            style += f' font-size="{self.size:g}"'
        if self.bold:
            style += ' font-weight="bold"'
        return f"<text {style}>{escape(self.text)}</text>"

    def paint(self, axes: Axes, order: int) -> None:
        """Paint it on axes whose units are pixels, over what has a smaller order."""
        alignment = {"start": "left", "middle": "center", "end": "right"}[self.anchor]
        axes.text(
            self.x,
            self.y,
            self.text,
            ha=alignment,
            va="baseline",
            color=literal(self.colour),
            fontsize=self.size * 72 / PIXELS,
            fontweight="bold" if self.bold else "normal",
            fontfamily=FONT,
            parse_math=False,
            zorder=order,
        )


@dataclass(frozen=True)
class Picture:
    """An image that fills a rectangle; its pixels stay sharp."""

    x: float
    y: float
    width: float
    height: float
    image: Image.Image
    style: str = ""  # its class of the page's stylesheet

    def svg(self) -> str:
        """Write it as an element."""
        style = 'style="image-rendering: pixelated" preserveAspectRatio="none"'
        if self.style:
            style += f' class="{self.style}"'
        size = f'width="{self.width:.1f}" height="{self.height:.1f}"'
        return f'<image x="{self.x:.1f}" y="{self.y:.1f}" {size} {style} href="{png_uri(self.image)}"/>'

    def paint(self, axes: Axes, order: int) -> None:
        """Paint it on axes whose units are pixels, over what has a smaller order."""
        extent = (self.x, self.x + self.width, self.y + self.height, self.y)
        pixels = np.asarray(self.image.convert("RGBA"))
        axes.imshow(pixels, extent=extent, aspect="auto", interpolation="none", zorder=order)


class Drawing:
    """Shapes, labels and pictures on a sheet, in the order in which they cover each other."""

    def __init__(self, width: float, height: float, name: str = "") -> None:
        self.width = width
        self.height = height
        self.name = name  # for who cannot see it
        self.parts: list[Shape | Label | Picture] = []

    def line(self, x: Points, y: Points, colour: str, **look: Any) -> None:
        """Draw a line through points. look: as of `Shape`."""
        points = np.stack(np.broadcast_arrays(x, y), axis=-1)
        self.parts.append(Shape([points], stroke=colour, **look))

    def area(self, x: Points, y: Points, colour: str, **look: Any) -> None:
        """Fill the area within points. look: as of `Shape`."""
        points = np.stack(np.broadcast_arrays(x, y), axis=-1)
        self.parts.append(Shape([points], fill=colour, **look))

    def bars(self, boxes: Sequence[Box], colour: str, **look: Any) -> None:
        """Fill rectangles. look: as of `Shape`."""
        outlines = [
            np.array([(left, top), (left, bottom), (right, bottom), (right, top)])
            for left, top, right, bottom in boxes
        ]
        self.parts.append(Shape(outlines, fill=colour, **look))

    def label(self, x: float, y: float, text: str, **look: Any) -> None:
        """Write text with its baseline at y. look: as of `Label`."""
        self.parts.append(Label(x, y, text, **look))

    def heading(self, x: float, y: float, text: str, **look: Any) -> None:
        """Write bold text with its baseline at y. look: as of `Label`."""
        self.label(x, y, text, colour="ink", bold=True, **look)

    def frame(self, left: float, top: float, right: float, bottom: float) -> None:
        """Draw a thin frame."""
        x = [left, right, right, left, left]
        self.line(x, [top, top, bottom, bottom, top], "grey", width=0.7)

    def picture(self, *place: float, image: Image.Image, **look: Any) -> None:
        """Fill a rectangle (x, y, width, height) with an image. look: as of `Picture`."""
        self.parts.append(Picture(*place, image=image, **look))

    def legend(self, x: float, y: float, prefix: str, colours: Mapping[str, str]) -> None:
        """Draw a line of coloured squares with their names behind a prefix, with its baseline at y."""
        self.label(x, y, prefix)
        x += 92 if prefix else 0
        for name, colour in colours.items():
            self.bars([(x, y - 9, x + 10, y + 1)], colour)
            self.label(x + 15, y, name, colour="ink")
            x += 34 + text_width(name)

    def svg(self, style: str = "") -> str:
        """Write it as an element of a page. style: its class of the page's stylesheet."""
        place = (
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-size="{SIZE:g}" fill="var(--pale)"'
        )
        name = f'role="img" aria-label="{escape(self.name)}" class="{style}"'
        parts = "".join(part.svg() for part in self.parts)
        return f"<svg {place} {name}>{parts}</svg>"

    def save(self, path: Path) -> None:
        """Write it as an SVG file, or as a PNG file of twice the size, on paper."""
        sheet = Drawing(self.width, self.height, self.name)
        sheet.bars([(0, 0, self.width, self.height)], "paper")
        sheet.parts += self.parts
        if path.suffix == ".svg":
            size = f'width="{self.width:g}" height="{self.height:g}" font-family="{FONTS}"'
            svg = sheet.svg().replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" {size}', 1)
            svg = re.sub(r"var\(--([\w-]+)\)", lambda name: literal(name[1]), svg)
            path.write_text(svg + "\n", encoding="utf-8")
            return
        from matplotlib.figure import Figure  # it looks for fonts when it is first imported

        figure = Figure((self.width / PIXELS, self.height / PIXELS), dpi=2 * PIXELS)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for order, part in enumerate(sheet.parts):
            part.paint(axes, order)
        figure.savefig(path, metadata={"Title": self.name})
