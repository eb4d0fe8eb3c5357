"""Time a training's start up to the end of its first step, with nothing compiled before and with everything."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmjax.errors import UserError, exit_process, run_command
from mmjax.startup import end_loading, start_clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("config", nargs="?", default="tiny_omni", help="its name or file (default: tiny_omni)")
    parser.add_argument("changes", nargs="*", metavar="a.b=value", help="changes to it")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every activity, cold and warm, largest first; then their sums.

    Cold: Numba's and XLA's programs are compiled. Warm: a second run of the same config in the same folder of runs.
    """
    with tempfile.TemporaryDirectory() as name:
        cold, warm = (_start(Path(name), run, args.config, args.changes) for run in ("cold", "warm"))
    rows = [{"activity": k, "cold s": cold.get(k, 0.0), "warm s": warm.get(k, 0.0)} for k in cold | warm]
    return [*rows, {"activity": "in all", "cold s": sum(cold.values()), "warm s": sum(warm.values())}]


def _start(folder: Path, run: str, config: str, changes: list[str]) -> dict[str, float]:
    short = "training.steps=1", "schedule.warmup=0", "training.evaluate_every=0", "training.checkpoint_every=0"
    command = [sys.executable, "-m", "mmjax.benchmarks.start", config, f"run={folder / run}", *short, *changes]
    variables = os.environ | {"NUMBA_CACHE_DIR": str(folder / "numba")}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"the run did not start: {ended.stderr.strip().splitlines()[-1]}")
    return json.loads(ended.stdout.splitlines()[-1])


def _train() -> None:
    """Train as `CONFIG [a.b=value ...]` says and print the seconds of the start's activities as JSON."""
    from mmjax.config.loading import find_config, load
    from mmjax.training.loop import train

    end_loading()
    path = find_config(sys.argv[1])
    print(json.dumps(train(load(path, sys.argv[2:]), path).start_seconds))


if __name__ == "__main__":  # a start in a process of its own; its imports are part of what is timed
    start_clock("train")
    exit_process(run_command(_train))
