"""What reads and writes of checkpoints would print that end when nobody waits for them any more."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from functools import cache

_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")  # with which what TensorStore raises begins: "OUT_OF_RANGE: Error writing"


@cache
def drop_late_ends() -> None:
    """Let nothing be printed, from now on, about reads and writes that end when nobody waits for them any more.

    When one array of many cannot be read or written, Orbax gives up and closes its event loop. The others end later, in
    threads of TensorStore, also after the run has said why it stops; each would print a traceback of its own.
    """
    heard = sys.unraisablehook

    def hear(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed or (isinstance(error, Exception) and _of_storage(error))):
            heard(unraisable)

    def of_others(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or "was never retrieved" not in record.getMessage() or not _of_storage(error)

    sys.unraisablehook = hear
    logging.getLogger("asyncio").addFilter(of_others)


def _of_storage(error: BaseException) -> bool:
    """Whether it came through Orbax, or is TensorStore's own, which has no traceback."""
    if error.__traceback__ is None:
        return bool(_STATUS.match(str(error)))
    through = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("orbax.") for name in through)
