"""Time a training's start up to the end of its first step: nothing compiled before, everything, and resumed."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.processes import SHORT, train

# what the metrics of a process's first step begin with that are its start's activities
LOGGED = "seconds/start/"


OPTIONS: Options = {
    "config": option("tiny_omni", "its name or file (default: tiny_omni)", nargs="?"),
    "changes": option(None, "changes to it", metavar="a.b=value", nargs="*"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Time every activity of each start, largest first; then their sums.

    Cold: Numba's and XLA's programs are compiled. Warm: a second run of the same config in the same
    folder of runs.
    Resumed: that run goes on from its checkpoint.
    """
    with tempfile.TemporaryDirectory() as name:
        start = partial(_start, Path(name), args)
        starts = {
            "cold s": start("cold"),
            "warm s": start("warm"),
            "resumed s": start("warm", "--resume", steps=2),
        }
    activities = dict.fromkeys(activity for seconds in starts.values() for activity in seconds)
    rows = [
        {"activity": name, **{kind: seconds.get(name, 0.0) for kind, seconds in starts.items()}}
        for name in activities
    ]
    return [
        *rows,
        {"activity": "in all", **{kind: sum(seconds.values()) for kind, seconds in starts.items()}},
    ]


def _start(
    folder: Path, args: Namespace, run: str, *options: str, steps: int = 1
) -> dict[str, float]:
    words = (args.config, *options, *SHORT, f"training.steps={steps}", *args.changes)
    records = train(folder / run, words, {"NUMBA_CACHE_DIR": str(folder / "numba")})
    *_, last_step = (record for record in records if "loss" in record)
    return {
        key.removeprefix(LOGGED): seconds
        for key, seconds in last_step.items()
        if key.startswith(LOGGED)
    }
