import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from mmjax.data.sample import BadSample
from mmjax.errors import BadMedia, UserError, run_command


def test_a_command_that_ends_well_returns_0_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(lambda: None) == 0
    assert capsys.readouterr() == ("", "")


def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise UserError("unknown key 'batch.row': did you mean 'batch.rows'?")

    assert run_command(main) == 2
    assert capsys.readouterr() == (
        "",
        "error: unknown key 'batch.row': did you mean 'batch.rows'?\n",
    )


@pytest.mark.parametrize("kind", [UserError, BadMedia, BadSample])
def test_a_message_is_one_line_that_a_terminal_obeys_in_nothing_whatever_it_quotes(
    kind: type[Exception],
) -> None:
    message = str(kind("media/a\r\n\x1b[2J\u202eb\ud800 is missing; set data.path"))
    assert message == r"media/a\r\n\x1b[2J\u202eb\ud800 is missing; set data.path"
    assert str(kind("ein schöner Ölfleck 図 is missing")) == "ein schöner Ölfleck 図 is missing"


@pytest.mark.parametrize("kind", [UserError, BadMedia, BadSample])
def test_a_very_long_message_keeps_the_place_and_the_remedy(kind: type[Exception]) -> None:
    message = str(kind(f"data.jsonl:3: unknown role {'x' * 100_000!r}; known: user, assistant"))
    assert message.startswith("data.jsonl:3: unknown role 'xxx")
    assert message.endswith("xxx'; known: user, assistant")
    assert "characters]" in message
    assert len(message) < 1200


def test_an_interrupt_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    assert run_command(main) == 130
    assert "Traceback" not in capsys.readouterr().err


class Interrupted:
    """An object whose destructor is interrupted, as JAX's callback of the garbage collector may be."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C as Python does, whatever the shell that started the tests has said."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_python_drops_is_raised_again(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        Interrupted()
        threading.Event().wait(480)
        pytest.fail("the command went on")

    assert run_command(main) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.usefixtures("interruptible")
def test_further_interrupts_do_not_end_what_the_first_tidies_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tidied = []

    def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for _ in range(4):
                signal.raise_signal(signal.SIGINT)
            tidied.append("whole")

    assert run_command(main) == 130
    assert tidied == ["whole"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("interrupted already: tidying up") for line in lines] == [True] * 4 + [
        False
    ]
    assert lines[-1] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_other_errors_in_destructors_are_reported_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Raises:
        def __del__(self) -> None:
            raise ValueError("something else")

    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    assert run_command(lambda: Raises() and None) == 0
    assert [of.exc_type for of in reported] == [ValueError]


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    def main() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_command(main)


def test_an_exit_that_a_command_asks_for_is_left_alone() -> None:
    def main() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run_command(main)


def test_leaving_waits_for_threads_runs_what_is_to_run_at_the_end_and_says_all() -> None:
    program = (
        "import atexit, threading, time\n"
        "from mmjax.errors import exit_process\n"
        "atexit.register(lambda: print('at the end', end=''))\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('a thread'))).start()\n"
        "threading.Thread(target=lambda: time.sleep(100), daemon=True).start()\n"
        "exit_process(130)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=480
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "a thread\nat the end", "")


@pytest.mark.parametrize(
    ("devices", "said", "used"),
    [("1", None, None), ("64", None, "256"), ("64", "3", "3"), ("many", None, None)],
)
def test_commands_give_several_cpu_devices_threads_for_all_their_collectives(
    devices, said, used, monkeypatch
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
    monkeypatch.setenv("NPROC", said or "")
    if said is None:
        monkeypatch.delenv("NPROC")
    run_command(lambda: None)
    assert os.environ.get("NPROC") == used


def test_memory_that_is_exhausted_anywhere_is_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(lambda: jnp.zeros((1 << 44,), jnp.float32).block_until_ready() and None) == 2
    out, err = capsys.readouterr()
    assert err.startswith(
        "error: a device is out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 7036874417766"
    )
    assert "; lower batch.rows or batch.size, leave out the longest samples" in err
    assert (out, err.count("\n")) == ("", 1)


FILE_LIMIT = """
import resource, sys
from mmjax.errors import check_file_limit, run_command

def main():
    check_file_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
sys.exit(run_command(main))
"""


def test_a_command_may_open_as_many_files_as_the_hard_limit_allows_and_says_where_that_is_too_few():
    enough, too_few = (
        subprocess.run([sys.executable, "-c", FILE_LIMIT, hard], capture_output=True, text=True)
        for hard in ("1000", "64")
    )
    assert (enough.returncode, enough.stdout, enough.stderr) == (0, "1000\n", "")
    assert (too_few.returncode, too_few.stdout) == (2, "")
    assert too_few.stderr.startswith(
        "error: this process may open 64 files at once, and needs 256; allow more with ul"
    )
