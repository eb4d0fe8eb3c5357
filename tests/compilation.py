"""How tests compile: in a third of the time, since what programs compute matters here, not how fast they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

QUICK = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""XLA's older code for fusions, and a program's machine code in one piece."""


def compile_quickly() -> None:
    """For this process, before it asks for a device, and all that it starts: without LLVM's optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # Every operation would carry the hundred frames of Python that made it through all of XLA's
    # passes.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    given = os.environ.get("XLA_FLAGS", "")
    wanted = " ".join((given, *(flag for flag in QUICK if flag not in given))).strip()
    if wanted != given and _known(wanted):
        os.environ["XLA_FLAGS"] = wanted


@contextmanager
def optimized() -> Iterator[None]:
    """As users compile, for what runs longer than it compiles; this process itself stays with `QUICK`."""
    flags = os.environ.get("XLA_FLAGS", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        patch.setenv("XLA_FLAGS", " ".join(flag for flag in flags.split() if flag not in QUICK))
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", True)


def _known(flags: str) -> bool:
    """Whether this XLA has all of them; it aborts a process that names another."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return (
        subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
        ).returncode
        == 0
    )
