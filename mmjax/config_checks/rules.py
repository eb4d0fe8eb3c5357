"""What checks of a config are made of: each raises UserError with the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mmjax.config_values import did_you_mean
from mmjax.errors import UserError

MOST_DIVISOR = 4096  # of those that are named


def check(holds: bool, message: str) -> None:
    """Raise the message as a UserError unless it holds."""
    if not holds:
        raise UserError(message)


def at_least(minimum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """That these values of a section are no less."""
    for name in names:
        value = getattr(section, name)
        check(value >= minimum, f"{where}.{name}={value}: must be at least {minimum}")


def at_most(maximum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """That these values of a section are no more."""
    for name in names:
        value = getattr(section, name)
        check(value <= maximum, f"{where}.{name}={value}: must be at most {maximum}")


def above_zero(where: str, section: Any, names: Sequence[str]) -> None:
    """That these values of a section are more than 0."""
    for name in names:
        value = getattr(section, name)
        check(value > 0, f"{where}.{name}={value}: must be more than 0")


def modules_of_model(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """That these are names of modules."""
    for name in given:
        check(name in known, f"{where}.{name}: there is no module {name!r}{did_you_mean(name, known)}")


def divides(where: str, whole: int, whole_name: str, part: int, part_name: str) -> None:
    """That one value divides by another."""
    if whole % part == 0:
        return
    divisors = ", ".join(str(d) for d in range(1, min(whole, MOST_DIVISOR) + 1) if whole % d == 0)
    check(
        False,
        f"{where}: {whole_name}={whole} does not divide by {part_name}={part}; choose {part_name} from {divisors}",
    )


def is_size(sides: Sequence[int]) -> bool:
    """Whether it is (height, width)."""
    return len(sides) == 2 and min(sides) > 0


def listed(values: Sequence[int]) -> str:
    """Values as they are said in a config."""
    return ",".join(map(str, values)) or "()"
