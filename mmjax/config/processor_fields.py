"""The fields of a processor of transformers, as its JSON file has them, refused with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mmjax.errors import UserError

# Pillow's, by its number
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
EXTENTS = (("shortest_edge",), ("height", "width"))
FILTERS: tuple[Filter, ...] = get_args(Filter)


@dataclass(frozen=True)
class ProcessorFields:
    """The fields of one processor. `where` names it in messages: the file, and the key inside."""

    values: Mapping[str, Any]
    where: str
    name: str = ""  # of its class
    caller: ProcessorFields | None = None  # the processor around that of one modality

    def over(self, defaults: Mapping[str, Any]) -> ProcessorFields:
        """Fill in what is missing, or null, from the defaults of a class of transformers."""
        present = {name: value for name, value in self.values.items() if value is not None}
        return replace(self, values={**defaults, **present})

    def value(self, name: str, null: Any = None) -> Any:
        """Return a field. null: what a missing one, or JSON's null, stands for."""
        value = self.values.get(name)
        return null if value is None else value

    def refused(self, name: str, remedy: str) -> UserError:
        """Make the error for the value of a field."""
        return UserError(f"{self.where}: {name}={self.value(name)!r}: {remedy}")

    def check_resizes(self) -> None:
        """Raise UserError where images keep sizes that are no whole tokens."""
        if not self.flag("do_resize"):
            raise self.refused(
                "do_resize", "images that are not whole tokens cannot be patched; set it to true"
            )

    def flag(self, name: str) -> bool:
        """Read a truth value; a missing one is false."""
        value = self.value(name, null=False)
        if type(value) is not bool:
            raise self.refused(name, "give true or false")
        return value

    def count(self, name: str, null: int | None = None) -> int:
        """Read a whole number above 0. null: what a missing one stands for."""
        value = self.value(name, null)
        if not is_count(value):
            raise self.refused(name, "give a whole number above 0")
        return value

    def number(self, name: str, null: float | None = None) -> float:
        """Read a number. null: what a missing one stands for."""
        value = self.value(name, null)
        if type(value) not in (int, float):
            raise self.refused(name, "give a number")
        return float(value)

    def text(self, name: str) -> str:
        """Read a text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name}={value!r} is no str")
        return value

    def channels(self, name: str) -> tuple[float, ...]:
        """Read a number for each of red, green and blue, or one for all."""
        value = self.value(name)
        values = tuple(value) if isinstance(value, list | tuple) else (value,) * 3
        if len(values) != 3 or any(type(v) not in (int, float) for v in values):
            raise self.refused(name, "give three numbers: red, green, blue")
        return tuple(map(float, values))

    def extent(self, name: str) -> tuple[int, ...]:
        """Read (shortest edge,) or (height, width)."""
        value = self.value(name)
        if isinstance(value, dict):
            given = {key: side for key, side in value.items() if side is not None}
            order = next((keys for keys in EXTENTS if set(keys) == set(given)), ())
            sides: tuple[Any, ...] = tuple(given[key] for key in order)
        elif isinstance(value, list):
            sides = tuple(value) if len(value) == 2 else ()
        else:
            sides = (
                (value, value)
                if self.flag("default_to_square") or name == "crop_size"
                else (value,)
            )
        if not sides or not all(map(is_count, sides)):
            raise self.refused(name, "give height and width, or shortest_edge alone")
        return sides

    def height_and_width(self, name: str) -> tuple[int, int]:
        """Read (height, width)."""
        sides = self.extent(name)
        if len(sides) != 2:
            raise self.refused(name, "give height and width")
        return sides[0], sides[1]

    def longest_edge(self, name: str) -> Any:
        """Return the longest edge that a size gives; None where it gives none."""
        size = self.value(name)
        return size.get("longest_edge") if isinstance(size, dict) else None

    def background(self) -> tuple[int, ...]:
        """Return the mean colour of the images that the tower was trained on, 0 to 255."""
        return tuple(int(mean * 255) for mean in self.channels("image_mean"))

    def filter(self) -> Filter:
        """Read the filter of resizing."""
        number = self.value("resample")
        if type(number) is not int or not 0 <= number < len(FILTERS):
            raise self.refused("resample", f"give Pillow's number, 0 to {len(FILTERS) - 1}")
        return FILTERS[number]

    def pixel_bounds(self) -> dict[str, int]:
        """Read min_pixels and max_pixels of what Qwen-VL's resizing makes."""
        size = self.value("size")
        if not isinstance(size, dict):
            raise self.refused(
                "size", "give shortest_edge and longest_edge, in pixels of the image"
            )
        bounds = {}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            # Three spellings over the years; the one at the top level wins, as in transformers.
            candidates = [
                value
                for value in (self.value(name), size.get(edge), size.get(name))
                if value is not None
            ]
            if not candidates or not is_count(candidates[0]):
                raise self.refused("size", f"give {edge}, in pixels of the image")
            bounds[name] = candidates[0]
        return bounds


def is_count(value: object) -> bool:
    """Return whether a value is a whole number above 0."""
    return type(value) is int and value > 0
