"""Run a benchmark in several processes of one core each, and read what each measured."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmjax
from mmjax.errors import UserError

LINES = 40  # of a failed process's log


def run_workers(
    module: str, task: Any, folder: Path, arguments: Sequence[str], devices: int = 1
) -> list[dict[str, Any]]:
    """Run `python -m MODULE FOLDER ARGUMENT` for every argument, as the processes of one group, and wait for them.

    Each finds the task in FOLDER's `task.pickle`, has so many devices, and writes what it measured to `<process>.json`.
    Where one fails, prints its last lines and ends the command with an error.
    """
    (folder / "task.pickle").write_bytes(pickle.dumps(task))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MMJAX_PROCESSES": str(len(arguments)), "MMJAX_COORDINATOR": f"127.0.0.1:{port}"}
    environment = _environment(devices) | group
    started = []
    try:
        for p, argument in enumerate(arguments):
            command = [sys.executable, "-m", module, str(folder), argument]
            with (folder / f"{p}.txt").open("w") as log:
                variables = environment | {"MMJAX_PROCESS": str(p)}
                started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
        _wait(started, folder)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{p}.json").read_text()) for p in range(len(arguments))]


def _environment(devices: int) -> dict[str, str]:
    """Return variables that give a process one core, for JAX and for NumPy."""
    one_core = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    path = [str(Path(mmjax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one_core}".strip(),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _wait(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all have ended well. Where one fails, print its last lines and end the command with an error."""
    codes = [process.poll() for process in started]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    if not any(codes):
        return
    first = next(p for p, code in enumerate(codes) if code)
    logs = {p: (folder / f"{p}.txt").read_text(errors="replace").splitlines() for p in range(len(started))}
    # A mistake that all processes find is reported by one of them.
    mistakes = [line for lines in (logs[first], *logs.values()) for line in lines if line.startswith("error: ")]
    if codes[first] == 2 and mistakes:
        raise UserError(mistakes[0].removeprefix("error: "))
    ended = f"process {first} of {len(started)} ended with code {codes[first]}"
    print(*logs[first][-LINES:], ended, sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(1)
