"""Where the tests' time goes: `pytest --cpu-times FOLDER`, then `python tests/cpu_times.py FOLDER` for the tables.

A test's CPU time is its own and that of the processes it has started and waited for. JAX reports
the seconds that it spends tracing, lowering and compiling in the test's own process; what started
processes spend on it is not told apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}


class CpuTimes:
    """The plugin: notes seconds of every test, and writes them into `folder` when this process's session ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests: dict[str, tuple[float, float]] = {}
        self._stages: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: object) -> None:
        if event in STAGES:
            self._stages[STAGES[event]] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        wall, cpu = time.monotonic(), _cpu_seconds()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] = time.monotonic() - wall, _cpu_seconds() - cpu

    def pytest_sessionfinish(self) -> None:
        if self._tests:  # the process that shares them out to others runs none
            self._folder.mkdir(parents=True, exist_ok=True)
            found = {"tests": self._tests, "stages": self._stages, "whole": _cpu_seconds()}
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(found))


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def main(folder: Path) -> None:
    """Print the tables of what the processes of one run have written."""
    processes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not processes:
        sys.exit(f"{folder} holds no times; run pytest --cpu-times {folder} first, to its end")
    tests = {name: seconds for of in processes for name, seconds in of["tests"].items()}
    stages = sum((Counter(of["stages"]) for of in processes), Counter())
    cpu = sum(of["whole"] for of in processes)
    wall = sum(seconds for seconds, _ in tests.values())
    print(
        f"{len(tests)} tests, {wall:.0f} s of test time in {len(processes)} processes, {cpu:.0f} s of CPU time\n"
    )
    print("| test time | s | share |\n|---|---|---|")
    for name, seconds in [*stages.most_common(), ("everything else", wall - sum(stages.values()))]:
        print(f"| {name} | {seconds:.0f} | {seconds / wall:.0%} |")
    by_test = Counter({name: seconds for name, (_, seconds) in tests.items()})
    by_file: Counter[str] = Counter()
    for name, seconds in by_test.items():
        by_file[name.split("::")[0]] += seconds
    for title, counted in (("file", by_file), ("test", by_test)):
        print(f"\n| {title} | CPU s |\n|---|---|")
        for name, seconds in counted.most_common(20):
            print(f"| `{name}` | {seconds:.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
