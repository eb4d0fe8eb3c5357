"""Silence tracebacks of Orbax and TensorStore I/O that finishes after a failed save or restore."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from functools import cache

# TensorStore's errors begin with a status code: "OUT_OF_RANGE: Error writing ..".
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


@cache
def silence_late_io_errors() -> None:
    """Install the filters, once per process.

    When one array of many cannot be read or written, Orbax gives up and closes its event loop. The others finish later
    in threads of TensorStore, some after the run has printed its own error; each would print a traceback.
    """
    previous_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        # Writes that finish after Orbax has closed its event loop.
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed or (isinstance(error, Exception) and _from_storage(error))):
            previous_hook(unraisable)

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or "was never retrieved" not in record.getMessage() or not _from_storage(error)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(keep)


def _from_storage(error: BaseException) -> bool:
    """Return whether an error was raised by Orbax, or by TensorStore, whose errors have no traceback."""
    if error.__traceback__ is None:
        return bool(_STATUS.match(str(error)))
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("orbax.") for name in modules)
