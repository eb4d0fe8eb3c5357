"""Print a run's lines, tables and progress."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mmjax.startup import record_output

# Between the lines of a file or a pipe: 4 s after the first, then twice as long each time, up to a
# minute.
FIRST_SECONDS = 4.0
LONGEST_SECONDS = 60.0

_muted = False


def print_note(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def mute() -> None:
    """Print nothing from now on: process 0 prints for all."""
    global _muted
    _muted = True


def print_lines(*lines: str) -> None:
    """Print lines without buffering. Where the reader of a pipe has left, as `head` does, the command ends."""
    if _muted:
        return
    record_output()
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        # Else Python's flush of standard output at exit would fail again, with a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Format rows as aligned columns; rows may have fewer cells than the widest."""
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(max(map(len, rows)))]
    return [
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def count(n: float, digits: int = 3) -> str:
    """Format a number with a unit: 1234567 as 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{digits}g}{unit}"
    return f"{n:.{digits}g}"


def size(n: float, digits: int = 3) -> str:
    """Format bytes: 1234567 as 1.2 MB."""
    return f"{n / 1e9:.{digits - 2}f} GB" if n >= 1e8 else f"{n / 1e6:.{digits - 2}f} MB"


def duration(seconds: float, digits: int = 3) -> str:
    """Format seconds: 0.0123 as 12.3 ms."""
    return f"{seconds:.{digits - 1}f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.{digits}g} ms"


def percent(share: float, digits: int = 3) -> str:
    """Format 0.123 as 12.3%."""
    return f"{100 * share:.{digits}g}%"


def time_left(seconds: float) -> str:
    """Format the time that is left: 93784 as 1 d 2 h, 3725 as 1 h 2 min."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for (unit, length), (smaller, part) in pairwise(units):
        if seconds >= length:
            rest = int(seconds % length / part)
            return f"{int(seconds / length)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.0f} s"


class ProgressLine:
    """Progress bar on a terminal; elsewhere plain lines, ever less often up to one a minute."""

    def __init__(self, first: int, steps: int, unit: str = "step") -> None:
        self._steps = steps
        self._unit = unit
        self._last_line = time.monotonic()
        self._interval = FIRST_SECONDS
        self._means: dict[str, float] = {}
        self._bar: Progress | None = None
        if sys.stdout.isatty() and not _muted:
            # On a narrow terminal the description is cut, and nothing else.
            self._bar = Progress(
                TextColumn(
                    "{task.completed}/{task.total}",
                    table_column=Column(min_width=2 * len(str(steps)) + 1),
                ),
                BarColumn(10, table_column=Column(min_width=10)),
                TextColumn(
                    "{task.description}",
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
                TextColumn("ETA", table_column=Column(min_width=3)),
                TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
                console=Console(),
                refresh_per_second=4,
                expand=True,
            )
            self._task = self._bar.add_task("", total=steps, completed=first)

    def update(self, done: int, scalars: Mapping[str, float]) -> None:
        """Show moving averages of the numbers after `done` steps, since single steps vary much."""
        for key, value in scalars.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._means[key] = (
                    value if key not in self._means else 0.9 * self._means[key] + 0.1 * value
                )
        rates = {key: value for key, value in scalars.items() if key.startswith("learning_rate/")}
        remaining = (self._steps - done) * self._means["seconds/step"]

        def describe() -> str:
            text = _summary(self._means | rates | {"epoch": scalars["epoch"]})
            # The bar has its own.
            return (
                text
                if self._bar is not None or not remaining
                else f"{text}  {time_left(remaining)} left"
            )

        self.show(done, describe)

    def show(self, done: int, describe: Callable[[], str]) -> None:
        """Show that `done` steps are done, with a description that is made only where it is shown."""
        time_now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=describe())
        elif time_now - self._last_line >= self._interval or done == self._steps:
            self._last_line = time_now
            self._interval = min(2 * self._interval, LONGEST_SECONDS)
            print_lines(f"{self._unit} {done}/{self._steps}  {describe()}")

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the bar where it is, and give the terminal its cursor back."""
        if self._bar is not None:
            self._bar.stop()


def _summary(scalars: Mapping[str, float]) -> str:
    """Format the main numbers of a step on one line."""
    modules = {k.removeprefix("fill/"): v for k, v in scalars.items() if k.startswith("fill/")}
    fills = " ".join(f"{name} {share:.2f}".replace(" 0.", " .") for name, share in modules.items())
    rates = [value for key, value in scalars.items() if key.startswith("learning_rate/")]
    parts = [
        f"epoch {scalars['epoch']:.2f}",
        f"loss {scalars.get('loss', math.nan):.4f}",
        *([f"learning rate {max(rates):.3g}"] if rates else []),
        *(
            [f"gradient norm {norm:.3g}"]
            if (norm := scalars.get("gradient_norm")) is not None
            else []
        ),
        f"{count(scalars['tokens/s'])} tok/s",
        f"MFU {scalars['mfu']:.1%}",
        f"fill {fills}",
    ]
    if (unbalanced := scalars["straggler_wait_before"]) > 1e-6:  # 0 where there is only one rank
        sheet = scalars.get("straggler_wait_sheet")  # None: nothing else is measured
        by_sheet = "" if sheet is None else f" (sheet {sheet:.1%})"
        lost = f"ranks wait {scalars['straggler_wait']:.1%}{by_sheet}, padding {scalars['padding']:.1%}"
        parts.append(f"{lost} (unbalanced {unbalanced:.0%})")
    # Of the seconds, not of each step's share: a step that waits long is longer than others.
    return "  ".join(
        [*parts, f"data wait {scalars['seconds/data_wait'] / scalars['seconds/step']:.1%}"]
    )
