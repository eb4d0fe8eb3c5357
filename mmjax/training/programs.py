"""Counts what XLA compiles, and keeps compiled programs from one start to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


@dataclass
class ProgramCounter:
    """Programs that XLA was asked for since the process began, and how many of them came from the persistent cache."""

    requested: int = 0
    from_cache: int = 0
    seconds: float = 0.0

    @property
    def compiled(self) -> int:
        """Programs really compiled."""
        return self.requested - self.from_cache

    def listen(self) -> ProgramCounter:
        """Start counting. There is one process-wide hook in JAX, so call it once."""
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)
        return self

    def _duration(self, event: str, seconds: float, **_: object) -> None:
        if event == _COMPILE:
            self.requested += 1
            self.seconds += seconds

    def _event(self, event: str, **_: object) -> None:
        if event == _HIT:
            self.from_cache += 1


def keep_programs(folder: Path) -> None:
    """Persist every compiled program under `folder`; a second start of the same run compiles nothing."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
