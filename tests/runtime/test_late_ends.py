import asyncio
import contextlib
import gc
import logging
import subprocess
import sys

from mmjax.errors import silence_storage


def test_of_writes_that_end_late_nothing_is_printed_and_of_anything_else_all(monkeypatch, caplog):
    gc.collect()  # what tests before have left
    caplog.clear()
    told, log = [], logging.getLogger("asyncio")
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(logging.getLogger("absl"), "level", logging.NOTSET)
    silence_storage.__wrapped__()
    loop = asyncio.new_event_loop()

    class Late:
        def __init__(self, tell):
            self.tell = tell

        def __del__(self):
            self.tell()

    torn = RuntimeError("Encountered error while reading array index")
    with contextlib.suppress(RuntimeError):  # as where Orbax raises
        exec("raise torn", {"__name__": "orbax.checkpoint", "torn": torn})
    for error in (
        ValueError("OUT_OF_RANGE: Error writing local file"),
        torn,
        ValueError("of a user's own"),
    ):
        loop.create_future().set_exception(error)
        gc.collect()
    loop.close()
    Late(lambda: loop.call_soon_threadsafe(print))
    Late(lambda: exec("raise torn", {"__name__": "orbax.checkpoint", "torn": torn}))
    Late(lambda: {}["of a user's own"])
    assert [of.exc_type for of in told] == [KeyError]
    assert [str(record.exc_info[1]) for record in caplog.records] == ["of a user's own"]


LIBRARIES = """
import logging, signal, sys
import absl.logging, grain, jax, orbax.checkpoint

def hooks():
    loggers = [logging.getLogger(name) for name in ("", "absl", "asyncio", "jax")]
    return (
        [sys.unraisablehook, sys.excepthook, sys.displayhook],
        [signal.getsignal(n) for n in signal.valid_signals()],
        [(log.level, list(log.filters), list(log.handlers)) for log in loggers],
        [name for name, module in sys.modules.items() if module is None],
    )

before = hooks()
import mmjax.training.loop, mmjax.runtime.saved_parameters, mmjax.inference.evaluation
sys.exit(before != hooks())
"""


def test_importing_the_library_leaves_the_hooks_of_a_process_as_they_are():
    subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
