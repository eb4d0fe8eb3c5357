"""Ctrl-C that Python would drop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Gives a function to call now and then, which raises KeyboardInterrupt if one was dropped since.

    Python cannot raise out of a destructor: a Ctrl-C that arrives in one (a worker's shared memory has such) is printed
    as ignored, and the run would go on.
    """
    dropped, before = False, sys.unraisablehook

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal dropped
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            dropped = True
        else:
            before(unraisable)

    def check() -> None:
        if dropped:
            raise KeyboardInterrupt

    sys.unraisablehook = note
    try:
        yield check
    finally:
        sys.unraisablehook = before
