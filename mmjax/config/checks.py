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


def listed(values: Sequence[int]) -> str:
    """Format values as in an override."""
    return ",".join(map(str, values)) or "()"
