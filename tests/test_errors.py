import subprocess
import sys

import pytest

from mmjax.errors import UserError, run_command


def test_a_command_that_ends_well_returns_0_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: None) == 0
    assert capsys.readouterr() == ("", "")


def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("unknown key 'batch.row': did you mean 'batch.rows'?")

    assert run_command(main) == 2
    assert capsys.readouterr() == ("", "error: unknown key 'batch.row': did you mean 'batch.rows'?\n")


def test_an_interrupt_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    assert run_command(main) == 130
    assert "Traceback" not in capsys.readouterr().err


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
        "from mmjax.errors import leave\n"
        "atexit.register(lambda: print('at the end', end=''))\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('a thread'))).start()\n"
        "threading.Thread(target=lambda: time.sleep(100), daemon=True).start()\n"
        "leave(130)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=480)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "a thread\nat the end", "")
