"""The options and figures that a benchmark declares, and the clocks that all share.

A benchmark is a module: its docstring is the command's help, `OPTIONS` are its options, and `run`
returns a row for each variant, or one `Measurement`.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmjax.errors import UserError

K = TypeVar("K")


@dataclass(frozen=True)
class Measurement:
    """Hold figures, which `--json` prints, arrays, which `--out` writes, and the figures that the paper published."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)


class Option(NamedTuple):
    """An option as argparse has it, and the values that it may have."""

    settings: dict[str, Any]
    minimum: float | None
    above: float | None
    maximum: float | None = None


Options = Mapping[str, Option]


def option(
    default: Any = None,
    help: str | None = None,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    **settings: Any,
) -> Option:
    """Declare an option whose type is its default's: a flag where that is False, several values where it is a list."""
    if default is False:
        return Option({"action": "store_true", "help": help}, None, None)
    one = default[0] if isinstance(default, list) and default else default
    if one is not None and not isinstance(one, list):
        settings = {"type": type(one)} | settings
    if isinstance(default, list):
        settings = {"nargs": "+"} | settings
    return Option({"default": default, "help": help} | settings, minimum, above, maximum)


def add_options(parser: ArgumentParser, options: Options) -> None:
    """Add these options to a command's."""
    for name, declared in options.items():
        parser.add_argument(name, **declared.settings)


def check_options(args: Namespace, options: Options) -> None:
    """Raise UserError for the first value that its option may not have."""
    for name, (_, minimum, above, maximum) in options.items():
        values = getattr(args, name.removeprefix("--").replace("-", "_"))
        for value in values if isinstance(values, list) else [values]:
            if minimum is not None and value is not None and not value >= minimum:
                raise UserError(f"{name} {value}: give at least {minimum}")
            if above is not None and not value > above:
                raise UserError(f"{name} {value}: give more than {above}")
            if maximum is not None and value is not None and not value <= maximum:
                raise UserError(f"{name} {value}: give at most {maximum}")


def ranks_of_node(per_node: int, ranks: int, usual: int, option: str = "--ranks") -> int:
    """Return how many ranks exchange among themselves. Raises UserError where they do not divide all."""
    per_node = per_node or usual
    if ranks % per_node:
        raise UserError(f"--ranks-per-node {per_node}: choose a divisor of {option} {ranks}")
    return per_node


def median_seconds(run: Callable[[], object], within: float = 10.0) -> float:
    """Time five runs, or fewer where they take longer than `within` seconds in all; return the median."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) <= within:
        seconds.append(seconds_of(run))
    return statistics.median(seconds)


def best_seconds(runs: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """Time runs in turns; return the seconds of the fastest of each."""
    rounds = [{key: seconds_of(run) for key, run in runs.items()} for _ in range(repeats)]
    return {key: min(seconds[key] for seconds in rounds) for key in runs}


def seconds_of(run: Callable[[], object]) -> float:
    """Time one run."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
