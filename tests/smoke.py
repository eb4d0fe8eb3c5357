"""The smoke tier, `pytest -m smoke`: tests that neither compile nor start a process, and cheap ones of planted faults.

A light file reaches no import of JAX or PyTorch, through whatever it imports, and neither it nor
the helpers that it imports start processes. Its default tests belong to the tier without a word;
`smoke.txt` names those that are left out, and what is taken beside them. A test that got in and
compiles or starts a process fails by `allow_no_program_and_no_process`, in any tier.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import pytest
from import_graph import closure, imports_of, modules_of, modules_of_tests, with_packages

FOLDER = Path(__file__).parent
TABLE = FOLDER / "smoke.txt"
COMPILING = {"diffusers", "flax", "jax", "optax", "orbax", "peft", "torch", "transformers"}
STARTING = {"asyncio", "commands", "concurrent", "multiprocessing", "started", "subprocess"}


class Smoke(NamedTuple):
    """What belongs to the tier; tests as `tests/FILE.py::NAME`."""

    light_files: frozenset[str]
    left_out: frozenset[str]
    taken: frozenset[str]

    def has_file(self, path: Path) -> bool:
        """Whether the tier may have tests of a file."""
        file = path.relative_to(FOLDER.parent).as_posix()
        return file in self.light_files or any(test.startswith(f"{file}::") for test in self.taken)


@cache
def smoke() -> Smoke:
    """Read which tests belong to the tier."""
    tests = modules_of_tests(FOLDER)
    modules = modules_of(FOLDER.parent / "mmjax") | tests
    imports = {
        name: with_packages(imports_of(name, path, modules)) for name, path in modules.items()
    }
    lines = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    left_out = frozenset(test for sign, test in lines if sign == "-")
    light = []
    for name in tests:
        reached = closure([name], imports)
        starting = any(imports[module] & STARTING for module in reached & set(tests))
        if name.startswith("test_") and not starting and not reached & COMPILING:
            light.append(name)
    return Smoke(
        light_files=frozenset(tests[name].relative_to(FOLDER.parent).as_posix() for name in light)
        - left_out,
        left_out=left_out,
        taken=frozenset(test for sign, test in lines if sign == "+"),
    )


def assign_smoke(items: list[pytest.Item]) -> None:
    """Mark the default tests that belong to the tier; after those of the exhaustive tier are marked."""
    for item in items:
        file, test = _file_and_name(item)
        light = file in smoke().light_files and test not in smoke().left_out
        if (light or test in smoke().taken) and not item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.smoke)


def must_be_light(item: pytest.Item) -> bool:
    """Whether a test may neither compile nor start a process."""
    return (
        item.get_closest_marker("smoke") is not None
        and _file_and_name(item)[1] not in smoke().taken
    )


def _file_and_name(item: pytest.Item) -> tuple[str, str]:
    file = item.path.relative_to(FOLDER.parent).as_posix()
    return file, f"{file}::{getattr(item, 'originalname', item.name)}"


_watched = False


@contextmanager
def allow_no_program_and_no_process() -> Iterator[None]:
    """Fail the test that runs where it does either."""
    global _watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", lambda *_, **__: _refuse("starts a process"))
        patch.setattr(BaseProcess, "start", lambda _: _refuse("starts a process"))
        _watched = True
        try:
            yield
        finally:
            _watched = False


def _refuse_to_compile(event: str, _: float, **__: object) -> None:
    if _watched and event == "/jax/core/compile/backend_compile_duration":
        _refuse("compiles a JAX program")


def _refuse(what: str) -> NoReturn:
    pytest.fail(
        f"a test of the smoke tier {what}: leave it out with a line `- tests/FILE.py` in tests/smoke.txt"
    )


jax.monitoring.register_event_duration_secs_listener(_refuse_to_compile)
