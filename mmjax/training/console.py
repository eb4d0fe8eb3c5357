"""Print a run's lines, tables and progress."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mmjax.startup import spoke

PLAIN_EVERY_SECONDS = 5.0

_muted = False


def note(line: str) -> None:
    """A line beside the output, on standard error."""
    print(line, file=sys.stderr, flush=True)


def mute() -> None:
    """Say nothing from now on: another process speaks for all."""
    global _muted
    _muted = True


def say(*lines: str) -> None:
    """Print lines at once, also into a pipe. Where its reader has left, as `head` does, the command ends."""
    if _muted:
        return
    spoke()
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at the exit
        raise SystemExit(128 + signal.SIGPIPE) from None


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Rows as aligned columns; all but the last column padded."""
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(max(map(len, rows)))]
    return [indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]


def count(n: float, digits: int = 3) -> str:
    """1234567 as 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{digits}g}{unit}"
    return f"{n:.{digits}g}"


def size(n: float, digits: int = 3) -> str:
    """Bytes: 1234567 as 1.2 MB."""
    return f"{n / 1e9:.{digits - 2}f} GB" if n >= 1e8 else f"{n / 1e6:.{digits - 2}f} MB"


def duration(seconds: float, digits: int = 3) -> str:
    """0.0123 as 12.3 ms."""
    return f"{seconds:.{digits - 1}f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.{digits}g} ms"


class ProgressLine:
    """A bar on a terminal; a plain line every five seconds elsewhere."""

    def __init__(self, first: int, steps: int, unit: str = "step") -> None:
        self._steps, self._unit = steps, unit
        self._last_line = time.monotonic()
        self._means: dict[str, float] = {}
        self._bar: Progress | None = None
        if sys.stdout.isatty() and not _muted:
            # On a narrow terminal the description is cut, and nothing else.
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}", table_column=Column(min_width=2 * len(str(steps)) + 1)),
                BarColumn(10, table_column=Column(min_width=10)),
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                TextColumn("ETA", table_column=Column(min_width=3)),
                TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
                console=Console(),
                refresh_per_second=4,
                expand=True,
            )
            self._task = self._bar.add_task("", total=steps, completed=first)

    def update(self, done: int, scalars: Mapping[str, float]) -> None:
        """Show the state after `done` steps: means of the last ones, since single steps differ much."""
        for key, value in scalars.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._means[key] = value if key not in self._means else 0.9 * self._means[key] + 0.1 * value
        self.show(done, lambda: _describe(self._means | {"epoch": scalars["epoch"]}))

    def show(self, done: int, described: Callable[[], str]) -> None:
        """Show that so much is done, and what there is to say of it."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=described())
        elif now - self._last_line >= PLAIN_EVERY_SECONDS or done == self._steps:
            self._last_line = now
            say(f"{self._unit} {done}/{self._steps}  {described()}")

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar standing where it is, and give the terminal its cursor back."""
        if self._bar is not None:
            self._bar.stop()


def _describe(scalars: Mapping[str, float]) -> str:
    fills = " ".join(f"{k.removeprefix('fill/')} {_short(v)}" for k, v in scalars.items() if k.startswith("fill/"))
    line = (
        f"epoch {scalars['epoch']:.2f}  loss {scalars.get('loss', math.nan):.4f}  {count(scalars['tokens/s'])} tok/s  "
    )
    line += f"MFU {scalars['mfu']:.1%}  fill {fills}  "
    if (before := scalars["straggler_wait_before"]) > 1e-6:  # else there is one rank
        line += f"ranks wait {scalars['straggler_wait']:.1%} (unbalanced {before:.0%})  "
    return line + f"data wait {scalars['data_wait_share']:.1%}"


def _short(share: float) -> str:
    return f"{share:.2f}".lstrip("0")
