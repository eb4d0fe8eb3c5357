"""Processes that a benchmark starts: their cores and variables, groups of workers, trainings, and how they fail."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mmjax
from mmjax.disk import read_json_lines
from mmjax.errors import UserError, exit_process, run_command

LINES = 40  # of a failed process's log
SHORT = ("schedule.warmup=0", "training.evaluate_every=0", "training.checkpoint_every=0")


def environment(cores: int = 1, devices: int = 1) -> dict[str, str]:
    """Return variables that give a process so many threads for NumPy and torch, and so many CPU devices."""
    path = [str(Path(mmjax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(cores)
    )
    return (
        os.environ
        | threads
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
    )


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """Pin this thread, and so the processes that it starts meanwhile, to these cores; to none: leave it."""
    if not cores:
        yield
        return
    cores_of_thread = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores_of_thread)


def end_with_error(code: int, lines: Sequence[str], ended: str) -> None:
    """End the command as a process did: with its error where it was a user's mistake, else with its last lines."""
    mistakes = [line for line in lines if line.startswith("error: ")]
    if code == 2 and mistakes:
        raise UserError(mistakes[0].removeprefix("error: "))
    print(*lines[-LINES:], ended, sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(1)


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_for_json(*words: str) -> Any:
    """Run `python WORDS`; return the JSON that it prints."""
    command = [sys.executable, *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def train(folder: Path, words: Sequence[str], variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run `mmjax.train` with these words in a folder, without checkpoints and evaluation; return its metrics."""
    command = [sys.executable, "-m", "mmjax.train", *words, f"run={folder}"]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"a training failed: {ended.stderr.strip().splitlines()[-1]}")
    return list(read_json_lines(folder / "metrics.jsonl"))


def run_workers(
    module: str, task: Any, cores: Sequence[Collection[int]], devices: int = 1
) -> list[dict[str, Any]]:
    """Run `python -m MODULE FOLDER` as the processes of one group, each on its cores; return what they measured.

    The module calls `run_worker`. Each process has so many devices and one thread. Where one fails,
    prints its last lines and ends the command with an error.
    """
    one_core = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    variables = environment(devices=devices) | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one_core}".strip(),
        "MMJAX_PROCESSES": str(len(cores)),
        "MMJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    started = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.pickle").write_bytes(pickle.dumps(task))
        try:
            for p, of_process in enumerate(cores):
                with (folder / f"{p}.txt").open("w") as log, pinned(of_process):
                    command = [sys.executable, "-m", module, name]
                    numbered = variables | {"MMJAX_PROCESS": str(p)}
                    started.append(subprocess.Popen(command, env=numbered, stdout=log, stderr=log))
            _wait(started, folder)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads((folder / f"{p}.json").read_text()) for p in range(len(cores))]


def run_worker(measure: Callable[[Any], dict[str, Any]]) -> None:
    """Be one process: measure the task that FOLDER's `task.pickle` holds, write it to FOLDER's `<process>.json`."""

    # imports JAX, which the Trainer's side of `peer` must not load
    from mmjax.distributed import coordination

    def main() -> None:
        folder = Path(sys.argv[1])
        with coordination.process_group():
            measured = measure(pickle.loads((folder / "task.pickle").read_bytes()))
            (folder / f"{coordination.index()}.json").write_text(json.dumps(measured))

    exit_process(run_command(main))


def _wait(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all have ended well. Where one fails, end the command with an error."""
    codes = [process.poll() for process in started]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    if not any(codes):
        return
    first = next(p for p, code in enumerate(codes) if code)
    logs = [
        (folder / f"{p}.txt").read_text(errors="replace").splitlines() for p in range(len(started))
    ]
    # A mistake that all processes find is reported by one of them.
    mistakes = [line for lines in logs for line in lines if line.startswith("error: ")]
    ended = f"process {first} of {len(started)} ended with code {codes[first]}"
    end_with_error(
        codes[first], [*logs[first], *mistakes] if codes[first] == 2 else logs[first], ended
    )
