"""Ranges of single values of a config, written in the types of their fields, and the walk that checks them.

A field of the type `Annotated[int, at_least(1), at_most(4096)]` has that range. Only this module
sees it: to JSON, overrides and help, which read types by `mmjax.config.codec.field_hints`, it is an
int.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from mmjax.config.checks import check, listed
from mmjax.config.codec import Hint, annotated_hints, join, union_members


class Limit(NamedTuple):
    """A condition on the value of a field, and what to tell whoever gives another value."""

    allows: Callable[[Any], bool]
    remedy: str

    def check(self, where: str, value: Any) -> None:
        """Raise UserError, naming the key `where`, for a value beyond the limit."""
        shown = listed(value) if isinstance(value, tuple) else value
        check(self.allows(value), f"{where}={shown}: {self.remedy}")


def at_least(minimum: float, remedy: str = "") -> Limit:
    """Limit a number from below."""
    return Limit(lambda value: value >= minimum, remedy or f"must be at least {minimum}")


def at_most(maximum: float, remedy: str = "") -> Limit:
    """Limit a number from above."""
    return Limit(lambda value: value <= maximum, remedy or f"must be at most {maximum}")


def above_zero(remedy: str = "must be more than 0") -> Limit:
    """Limit a number to those above 0."""
    return Limit(lambda value: value > 0, remedy)


def _is_size(sides: Sequence[int]) -> bool:
    return len(sides) == 2 and min(sides) > 0


def _is_color(parts: Sequence[int]) -> bool:
    return len(parts) in (0, 3) and all(0 <= part <= 255 for part in parts)


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above_zero()]
NonNegativeFloat = Annotated[float, at_least(0)]
Gigabytes = Annotated[float, above_zero("it is in GB, and must be above 0")]
Fraction = Annotated[float, Limit(lambda part: 0 <= part < 1, "choose at least 0 and less than 1")]
Size = Annotated[tuple[int, ...], Limit(_is_size, "give height and width")]
OptionalSize = Annotated[
    tuple[int, ...],
    Limit(lambda sides: not sides or _is_size(sides), "give height and width, or nothing"),
]
Color = Annotated[
    tuple[int, ...], Limit(_is_color, "give red, green and blue, each 0 to 255")
]  # or nothing


def check_section(section: Any, where: str) -> None:
    """Check the values of a dataclass and of all that are in it, each by itself and then together.

    What the values of one dataclass must agree on is in its method `check`, which may rely on their
    ranges. Raises UserError, naming the key under `where`.
    """
    for name, hint in annotated_hints(type(section)).items():
        _check_value(hint, getattr(section, name), join(where, name))
    if hasattr(section, "check"):
        section.check(where)


def _check_value(hint: Hint, value: Any, where: str) -> None:
    if dataclasses.is_dataclass(value):
        check_section(value, where)
    for member in union_members(hint):
        origin, args = get_origin(member), get_args(member)
        if origin is Annotated and value is not None:
            for limit in args[1:]:
                limit.check(where, value)
        elif origin is dict:
            for name, entry in value.items():
                _check_value(args[1], entry, join(where, name))
        elif origin is tuple and isinstance(value, tuple):
            for number, item in enumerate(value):
                _check_value(args[0], item, f"{where}[{number}]")
