"""Validate the preprocessing of images and clips."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mmjax.config import (
    AnyRes,
    AudioPreparation,
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    LogMel,
    MediaLimits,
    SmartResize,
)
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
        check(name in modules, f"{where}.{name}: there is no module {name!r}{did_you_mean(name, modules)}")


def divides(where: str, number: int, number_name: str, divisor: int, divisor_name: str) -> None:
    """Check that one value is a multiple of another."""
    if number % divisor:
        divisors = ", ".join(str(d) for d in range(1, min(number, MAX_DIVISOR) + 1) if number % d == 0)
        raise UserError(
            f"{where}: {number_name}={number} does not divide by {divisor_name}={divisor}; choose {divisor_name} from "
            f"{divisors}"
        )


def is_size(sides: Sequence[int]) -> bool:
    """Return whether the values are a height and a width."""
    return len(sides) == 2 and min(sides) > 0


def listed(values: Sequence[int]) -> str:
    """Format values as in an override."""
    return ",".join(map(str, values)) or "()"


def check_images(where: str, how: ImagePreparation) -> None:
    """Raises UserError, naming the key under `where`, for settings that no image can be preprocessed with."""
    if isinstance(how, FixedSize):
        _check_color(f"{where}.square", how.square)
        setting = f"{where}.resize={listed(how.resize)}"
        check(len(how.resize) <= 2, f"{setting}: give the shortest edge, or height and width, or nothing")
        check(min(how.resize, default=1) > 0, f"{setting}: must be more than 0")
        check(not how.crop or is_size(how.crop), f"{where}.crop={listed(how.crop)}: give height and width, or nothing")
    elif isinstance(how, SmartResize):
        at_least(1, where, how, ("patch", "merge", "min_pixels"))
        ordered(where, how, "min_pixels", "max_pixels")
    elif isinstance(how, DynamicTiles):
        check(is_size(how.tile), f"{where}.tile={listed(how.tile)}: give height and width")
        at_least(1, where, how, ("min_tiles",))
        ordered(where, how, "min_tiles", "max_tiles")
    elif isinstance(how, AnyRes):
        at_least(1, where, how, ("tile",))
        at_least(0, where, how, ("most_tiles",))
        by_rows = how.order == "rows" or not how.most_tiles
        check(by_rows, f"{where}.most_tiles={how.most_tiles}: it is rows that are interpolated; choose order=rows")
        _check_color(f"{where}.background", how.background)
        check(bool(how.pinpoints), f"{where}.pinpoints is empty; name some, such as {2 * how.tile}x{how.tile}")
        for pinpoint in how.pinpoints:
            sides = [int(side) for side in pinpoint.split("x") if re.fullmatch("[0-9]+", side)]
            fits = is_size(sides) and not any(side % how.tile for side in sides) and pinpoint.count("x") == 1
            check(fits, f"{where}.pinpoints: {pinpoint!r} is no HEIGHTxWIDTH in multiples of tile={how.tile}")


def check_audio(where: str, how: AudioPreparation) -> None:
    """Raises UserError, naming the key under `where`, for settings that no clip can be preprocessed with."""
    at_least(1, where, how, ("mels", "sample_rate", "hop"))
    if not isinstance(how, LogMel):
        at_least(1, where, how, ("seconds",))
        check(how.window >= 2 and how.window % 2 == 0, f"{where}.window={how.window}: must be even, and at least 2")
        return
    at_least(2, where, how, ("window",))
    check(
        how.hop <= how.window,
        f"{where}.hop={how.hop} is longer than window={how.window}: samples would be skipped; make hop smaller",
    )
    bins = how.window // 2 + 1  # of a real FFT
    check(
        how.mels <= bins,
        f"{where}.mels={how.mels}: window={how.window} has only {bins} frequencies; make mels at most that",
    )


def check_limits(where: str, limits: MediaLimits) -> None:
    """Raises UserError, naming the key under `where`, for limits that no image or clip can be within."""
    at_least(1, where, limits, ("pixels", "min_side", "aspect"))
    above_zero(where, limits, ("seconds",))
    ordered(where, limits, "min_side", "max_side")


def _check_color(where: str, color: Sequence[int]) -> None:
    valid = len(color) in (0, 3) and all(0 <= part <= 255 for part in color)
    check(valid, f"{where}={listed(color)}: give red, green and blue, each 0 to 255")
