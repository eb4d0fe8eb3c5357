"""The options and figures that a benchmark declares, and the clocks that all share.

A benchmark is a module: its docstring is the command's help, `OPTIONS` are its options, and `run`
returns a row for each variant, or one `Measurement`.
"""

from __future__ import annotations

import operator
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmjax.errors import UserError

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Hold figures, which `--json` prints, arrays, which `--out` writes, and the figures that the paper published."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)


class Option(NamedTuple):
    """An option as argparse has it, and the limits of its values by their names in `LIMITS`."""

    settings: dict[str, Any]
    limits: dict[str, float]


Options = Mapping[str, Option]
LIMITS = {
    "minimum": (operator.ge, "at least"),
    "above": (operator.gt, "more than"),
    "maximum": (operator.le, "at most"),
}


def option(default: Any = None, help: str | None = None, **settings: Any) -> Option:
    """Declare an option whose type is its default's: a flag where that is False, several values where it is a list.

    settings: as of argparse, and limits by their names in `LIMITS`.
    """
    limits = {name: settings.pop(name) for name in LIMITS if name in settings}
    if default is False:
        return Option({"action": "store_true", "help": help}, limits)
    one = default[0] if isinstance(default, list) and default else default
    if one is not None and not isinstance(one, list):
        settings = {"type": type(one)} | settings
    if isinstance(default, list):
        settings = {"nargs": "+"} | settings
    return Option({"default": default, "help": help} | settings, limits)


def add_options(parser: ArgumentParser, options: Options) -> None:
    """Add these options to a command's."""
    for name, declared in options.items():
        parser.add_argument(name, **declared.settings)


def check_options(args: Namespace, options: Options) -> None:
    """Raise UserError for the first value that its option may not have."""
    for name, (_, limits) in options.items():
        values = getattr(args, name.removeprefix("--").replace("-", "_"))
        for value in values if isinstance(values, list) else [values]:
            for kind, limit in limits.items():
                holds, words = LIMITS[kind]
                if value is not None and not holds(value, limit):
                    raise UserError(f"{name} {value}: give {words} {limit}")


def ranks_of_node(per_node: int, ranks: int, usual: int, option: str = "--ranks") -> int:
    """Return how many ranks exchange among themselves. Raises UserError where they do not divide all."""
    per_node = per_node or usual
    if ranks % per_node:
        raise UserError(f"--ranks-per-node {per_node}: choose a divisor of {option} {ranks}")
    return per_node


def median_seconds(run: Callable[[], object]) -> float:
    """Time five runs, or fewer where they take longer than 10 seconds in all; return the median."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) <= 10:
        seconds.append(seconds_of(run))
    return statistics.median(seconds)


def best_seconds(runs: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """Time runs in turns; return the seconds of the fastest of each."""
    rounds = [{key: seconds_of(run) for key, run in runs.items()} for _ in range(repeats)]
    return {key: min(seconds[key] for seconds in rounds) for key in runs}


def seconds_of(run: Callable[[], object]) -> float:
    """Time one run."""
    return timed(run)[1]


def timed(
    work: Callable[..., T], *args: Any, clock: Callable[[], float] = time.perf_counter
) -> tuple[T, float]:
    """Do the work; return its result and the seconds that it took. clock: `time.process_time` counts the CPU's."""
    began = clock()
    result = work(*args)
    return result, clock() - began


def named(prefix: str, names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """Return a figure for each value: the prefix and the value's name."""
    return {f"{prefix}{name}": value for name, value in zip(names, values, strict=True)}
