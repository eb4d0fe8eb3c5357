"""Checks of single values of a config, which name the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mmjax.config.codec import did_you_mean
from mmjax.errors import UserError

MAX_DIVISOR = 4096  # larger ones are not suggested


def check(condition: bool, message: str) -> None:
    """Raise the message as a UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def at_least(minimum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are at least the minimum."""
    for name in names:
        value = getattr(section, name)
        check(value >= minimum, f"{where}.{name}={value}: must be at least {minimum}")


def at_most(maximum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are at most the maximum."""
    for name in names:
        value = getattr(section, name)
        check(value <= maximum, f"{where}.{name}={value}: must be at most {maximum}")


def above_zero(where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are more than 0."""
    for name in names:
        value = getattr(section, name)
        check(value > 0, f"{where}.{name}={value}: must be more than 0")


def ordered(where: str, section: Any, low: str, high: str) -> None:
    """Check that the field `low` of a section is no more than its field `high`."""
    minimum = getattr(section, low)
    maximum = getattr(section, high)
    check(minimum <= maximum, f"{where}.{high}={maximum}: must be at least {low}={minimum}")


def modules_of_model(where: str, names: Iterable[str], modules: Sequence[str]) -> None:
    """Check that these are names of modules."""
    for name in names:
        check(
            name in modules,
            f"{where}.{name}: there is no module {name!r}{did_you_mean(name, modules)}",
        )


def divides(where: str, number: int, number_name: str, divisor: int, divisor_name: str) -> None:
    """Check that one value is a multiple of another."""
    if number % divisor:
        divisors = ", ".join(
            str(d) for d in range(1, min(number, MAX_DIVISOR) + 1) if number % d == 0
        )
        raise UserError(
            f"{where}: {number_name}={number} does not divide by {divisor_name}={divisor}; choose {divisor_name} from "
            f"{divisors}"
        )


def is_size(sides: Sequence[int]) -> bool:
    """Return whether the values are a height and a width."""
    return len(sides) == 2 and min(sides) > 0


def check_color(where: str, color: Sequence[int]) -> None:
    """Check that the values are a colour, or none."""
    valid = len(color) in (0, 3) and all(0 <= part <= 255 for part in color)
    check(valid, f"{where}={listed(color)}: give red, green and blue, each 0 to 255")


def check_size(where: str, section: Any, name: str, optional: bool = False) -> None:
    """Check that the value of a section is a height and a width, or nothing where that is allowed."""
    value = getattr(section, name)
    wanted = "height and width, or nothing" if optional else "height and width"
    check(
        is_size(value) or (optional and not value), f"{where}.{name}={listed(value)}: give {wanted}"
    )


def listed(values: Sequence[int]) -> str:
    """Format values as in an override."""
    return ",".join(map(str, values)) or "()"
