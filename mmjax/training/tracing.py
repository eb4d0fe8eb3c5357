"""Record a profiler trace of a few steps on request."""

from __future__ import annotations

from pathlib import Path

import jax

from mmjax.training.console import print_note

STEPS = 3


class ProfilerTrace:
    """Records what this process's devices do in the steps after a request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until: int | None = None

    def before(self, step: int, requested: bool) -> bool:
        """Start or stop recording before step `step`; return whether a recording was started."""
        if self._until is not None and step >= self._until:
            self.close()
        if not requested or self._until is not None:
            return False
        self._until = step + STEPS
        self._path = self._folder / f"step-{step + 1}"
        jax.profiler.start_trace(str(self._path))
        return True

    def close(self) -> None:
        """Stop recording, if one is under way."""
        if self._until is None:
            return
        self._until = None
        jax.profiler.stop_trace()
        print_note(f"{STEPS} steps are recorded in {self._path}; open them with xprof or ui.perfetto.dev")
