"""Run trainings in turns: each in a process on the same core, which takes steps on request and else is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmjax.benchmarks.processes import end_with_error, environment, pinned

END_SECONDS = 30.0  # that a process may take to end


@dataclass(frozen=True)
class Task:
    """Describe what one side trains."""

    folder: str  # for what it writes
    checkpoint: str
    data: str  # folder of the records
    tune: str  # full or lora
    precision: str  # float32 or bfloat16
    batch: int  # samples
    seed: int
    strategy: str = "random"  # of transformers' Trainer: how it draws samples
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    b2: float = 0.999
    rank: int = 8  # of LoRA
    alpha: float = 16.0
    steps: int = 1000  # that the training has in all; fewer are run
    changes: Sequence[str] = ()  # to mmjax's config
    # requests that are not read from standard input: see `Gate.plan`
    requests: Sequence[dict[str, Any]] = ()


# ------------------------------------------------------------------------------------------------
# inside the process


class Gate:
    """Stands before every step of a training: takes requests from standard input, replies on standard output.

    A request is a line of JSON. {"steps": n} lets n steps pass and is replied to when they are
    done; any other one is given to `answer`. What the training prints goes to standard error.
    Every reply has the time, `clock`.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.answer = answer
        self.plan(map(json.loads, sys.stdin))

    def plan(self, requests: Iterable[dict[str, Any]], **labels: Any) -> None:
        """Take these requests instead, behind which a training ends by SystemExit. labels: of its replies."""
        self._requests = iter(requests)
        self._labels = labels
        self._remaining = 0
        self._counts = {"samples": 0, "tokens": 0, "positions": 0}

    def before_step(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Let a step pass. describe: waits for the steps before it, and returns what to reply about the last one."""
        while self._remaining == 0:
            self._reply(self._counts | describe())
            self._counts = dict.fromkeys(self._counts, 0)
            request = self._receive()
            while "steps" not in request:
                self._reply(self.answer(request))
                request = self._receive()
            self._remaining = request["steps"]
        self._remaining -= 1

    def count(self, samples: int, tokens: int, positions: int) -> None:
        """Count a step's samples, its tokens in the LLM's rows, and the positions of these rows."""
        for name, value in (("samples", samples), ("tokens", tokens), ("positions", positions)):
            self._counts[name] += int(value)

    def _receive(self) -> dict[str, Any]:
        request = next(self._requests, None)
        if request is None:
            raise SystemExit(0)  # the race is over
        return request

    def _reply(self, reply: Mapping[str, Any]) -> None:
        reply = self._labels | reply | {"clock": time.time()}
        print(json.dumps(reply), file=self._replies, flush=True)


# ----------------------------------------------------------------------------------------------
# around the processes


def environment_of_side(cores: int) -> dict[str, str]:
    """Return the variables of a side. Those with huge pages are mmjax's own, which takes them by itself."""
    variables = environment(cores) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    variables.pop("GLIBC_TUNABLES", None)
    return variables


class Side:
    """One training in a process group of its own, which is stopped whenever it has no request to work on."""

    def __init__(
        self, module: str, task: Task, cores: set[int], variables: Mapping[str, str]
    ) -> None:
        """Start `python -m MODULE TASK` and wait until it is before its first step. variables: besides the usual."""
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        self.name = module
        self._log = folder / "log.txt"
        began = time.perf_counter()
        with pinned(cores), self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder / "task.json")],
                env=environment_of_side(len(cores)) | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        # A stopped process would outlive this one for ever where this one is killed: the shell
        # reads to the end of its input, which comes then too, and kills the group.
        kill = f"cat > /dev/null; kill -s KILL -- -{self.process.pid}"
        self._killer = subprocess.Popen(
            ["sh", "-c", kill],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._read()
            self.start_seconds = time.perf_counter() - began
        except BaseException:
            self.close()
            raise

    def request(self, **request: Any) -> dict[str, Any]:
        """Wake the side, have it do something, and stop it; return its reply with `wall`, `cpu` and `workers` seconds.

        cpu: CPU seconds of all its processes. workers: of these, those of processes that it has
        started.
        """
        os.killpg(self.process.pid, signal.SIGCONT)
        cpu_before = self._cpu_seconds()
        began = time.perf_counter()
        self._write(json.dumps(request) + "\n")
        reply = self._read()
        wall = time.perf_counter() - began
        spent = {
            pid: seconds - cpu_before.get(pid, 0.0) for pid, seconds in self._cpu_seconds().items()
        }
        cpu = sum(spent.values())
        return reply | {"wall": wall, "cpu": cpu, "workers": cpu - spent[self.process.pid]}

    def peak_memory(self) -> int:
        """Return the peak resident bytes of the training process; data workers are others."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(
            1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
        )

    def close(self) -> None:
        """End the training: between two steps it ends by itself when its input does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._killer.stdin.close()
        self._killer.wait()
        self.process.wait()
        self.process.stdout.close()

    def _write(self, line: str) -> None:
        with suppress(BrokenPipeError):  # that it has ended is said when its reply is read
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        """Read a reply and stop all processes. Where it has ended instead, print its last lines and end the command."""
        line = self.process.stdout.readline()
        if line:
            os.killpg(self.process.pid, signal.SIGSTOP)
            return json.loads(line)
        code = self.process.wait()
        lines = self._log.read_text(errors="replace").splitlines()
        return end_with_error(code, lines, f"{self.name} ended with code {code}")

    def _cpu_seconds(self) -> dict[int, float]:
        """Return the CPU seconds of its processes by their numbers, to the nanosecond."""
        seconds = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                # Behind the name in parentheses: state, parent, group.
                if int(path.read_text().rpartition(")")[2].split()[2]) == self.process.pid:
                    pid = int(path.parent.name)
                    seconds[pid] = time.clock_gettime(_cpu_clock(pid))
        return seconds


def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, as clock_getcpuclockid does on Linux."""
    return (~pid << 3) | 2
