"""A profiler trace of a few steps, when one is asked for."""

from __future__ import annotations

from pathlib import Path

import jax

from mmjax.training.console import note

STEPS = 3


class Tracer:
    """Records what this process's devices do in the steps after it was asked to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until: int | None = None

    def before(self, step: int, asked: bool) -> bool:
        """Begin or end a recording where step `step` begins. Whether one was begun."""
        if self._until is not None and step >= self._until:
            self.close()
        if not asked or self._until is not None:
            return False
        self._until = step + STEPS
        self._into = self._folder / f"step-{step + 1}"
        jax.profiler.start_trace(str(self._into))
        return True

    def close(self) -> None:
        """End a recording, if there is one."""
        if self._until is None:
            return
        self._until = None
        jax.profiler.stop_trace()
        note(f"{STEPS} steps are recorded in {self._into}; open them with xprof or ui.perfetto.dev")
