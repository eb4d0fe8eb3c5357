"""Time a training's start up to the end of its first step, with nothing compiled before and with everything."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmjax.disk import read_json_lines
from mmjax.errors import UserError

LOGGED = "seconds/start/"  # what the metrics of a process's first step begin with that are its start's activities


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
    command = [sys.executable, "-m", "mmjax.train", config, f"run={folder / run}", *short, *changes]
    variables = os.environ | {"NUMBA_CACHE_DIR": str(folder / "numba")}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"the run did not start: {ended.stderr.strip().splitlines()[-1]}")
    first_step = next(read_json_lines(folder / run / "metrics.jsonl"))
    return {key.removeprefix(LOGGED): seconds for key, seconds in first_step.items() if key.startswith(LOGGED)}
