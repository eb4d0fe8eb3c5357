import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from started import heed_interrupts

from mmjax import __version__, startup


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No activity of another test."""
    monkeypatch.setattr(startup, "_stack", [])
    monkeypatch.setattr(startup, "_seconds", {})


def test_a_command_says_that_it_starts_before_it_imports_what_takes_long() -> None:
    """The line must be there though what is imported next does not exist."""
    code = (
        "from mmjax.startup import start_clock; start_clock('train'); import nothing_of_this_name"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.startswith(f"mmjax {__version__}  train: loading libraries\nTraceback")
    loaded = "import sys; from mmjax import startup; print([name for name in sys.modules if name in ('jax', 'numpy')])"
    assert (
        subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout
        == "[]\n"
    )


def test_processes_that_a_command_spawns_do_not_import_it():
    code = (
        "import importlib.util, sys; from multiprocessing.spawn import get_preparation_data\n"
        "main = sys.modules['__main__']; main.__spec__ = importlib.util.find_spec('mmjax.train'); main.__file__ = 'f'\n"
        "from mmjax.startup import start_clock\n"
        "def named(): return [key for key in get_preparation_data('worker') if 'main' in key]\n"
        "before = named(); start_clock('train'); print(before, named())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "['init_main_from_name'] []\n", ended.stderr


def test_an_interrupt_while_libraries_are_loaded_is_one_line_and_code_130() -> None:
    code = "from mmjax.startup import start_clock; start_clock('train'); import signal; signal.raise_signal(2)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=heed_interrupts
    )
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (130, ["interrupted"])


@pytest.mark.skipif(
    not startup.HUGE_PAGES.exists() or "[madvise]" not in startup.HUGE_PAGES.read_text(),
    reason="Linux grants no huge pages on request",
)
def test_a_program_begins_again_with_huge_pages_in_the_same_process_with_its_arguments_and_other_settings() -> (
    None
):
    code = "import os, sys; print(os.getpid(), flush=True); "
    code += "from mmjax.startup import use_huge_pages; use_huge_pages(); "
    code += "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:])"
    variables = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    ended = subprocess.run(
        [sys.executable, "-c", code, "a b"], env=variables, capture_output=True, text=True
    )
    first, again, last = ended.stdout.splitlines()
    assert first == again
    assert last == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1 ['a b']"


def test_an_activity_that_takes_long_is_named_with_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("QUIET_SECONDS", "REPEAT_SECONDS"):
        monkeypatch.setattr(startup, name, 0.0)
    before = signal.getsignal(signal.SIGINT)
    startup.start_clock("train")
    signal.signal(signal.SIGINT, before)
    startup.end_loading()
    with startup.activity("opening"), startup.activity("indexing samples", 2000) as counted:
        counted.done = 1000
        printed = ""
        while "indexing" not in printed:
            printed += capfd.readouterr().err
            time.sleep(0.01)
    assert "       indexing samples 1,000 of 2,000 ... " in printed
    assert set(startup.seconds()) == {
        "loading libraries",
        "opening",
        "indexing samples",
        "everything else",
    }


def test_seconds_of_an_activity_are_without_those_of_activities_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock)
    monkeypatch.setattr(startup, "_started", 0.0)
    startup._stack.append(startup.Activity("loading libraries"))
    clock = 2.0
    startup.end_loading()
    with startup.activity("opening"):
        clock = 3.0
        with startup.activity("indexing"):
            clock = 7.0
        clock = 9.0
    clock = 10.0
    assert startup.seconds() == {
        "indexing": 4.0,
        "opening": 3.0,
        "loading libraries": 2.0,
        "everything else": 1.0,
    }


def test_garbage_is_collected_rarely_while_a_run_starts_and_then_as_before() -> None:
    before = gc.get_threshold()
    with startup.rare_collection():
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before
