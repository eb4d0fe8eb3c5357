"""Count what XLA compiles, and cache compiled programs on disk."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_events: Counter[str] = Counter()  # since `_listen`


class CompileCounter:
    """Counts the programs that XLA was asked for since this counter was made, and how many the disk cache had."""

    def __init__(self) -> None:
        _listen()
        self._begin = _events.copy()

    @property
    def requested(self) -> int:
        """Return how many programs were not in this process's memory."""
        return _events[_COMPILE] - self._begin[_COMPILE]

    @property
    def from_cache(self) -> int:
        """Return how many of the requested were read from the disk cache."""
        return _events[_HIT] - self._begin[_HIT]

    @property
    def compiled(self) -> int:
        """Return how many of the requested were compiled."""
        return self.requested - self.from_cache


@cache
def _listen() -> None:
    """Count JAX's events from now on; its hooks cannot be removed, so there is one per process and event."""
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _events.update((event,)))
    jax.monitoring.register_event_listener(lambda event, **_: _events.update((event,)))


def enable_compilation_cache(folder: Path) -> None:
    """Cache every compiled program under `folder`; a second start of the same run compiles nothing."""
    if jax.config.jax_compilation_cache_dir != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()  # JAX opens its cache once and would stay with the previous folder
    # JAX's defaults skip programs that compile fast or are small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
