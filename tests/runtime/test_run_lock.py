"""Two trainings never write in one folder, and none leaves it locked."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from started import ROOT

from mmjax.errors import UserError
from mmjax.runtime.run_dir import lock_run

HOLDER = """
import multiprocessing, sys, time
from pathlib import Path
from mmjax.runtime.run_dir import lock_run
if __name__ == "__main__":
    with lock_run(Path(sys.argv[1])):
        worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        worker.start()
        print(worker.pid, flush=True)
        time.sleep(600)
"""


def hold(folder: Path, script: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the folder, and its worker's process id."""
    script.write_text(HOLDER)
    command = [sys.executable, str(script), str(folder)]
    holder = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout
    return holder, int(holder.stdout.readline())


def test_a_second_process_is_refused_with_the_firsts_host_and_number(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    holder, _ = hold(run, tmp_path / "holder.py")
    try:
        with (
            pytest.raises(UserError, match="two trainings cannot write in one run") as error,
            lock_run(run),
        ):
            pass
    finally:
        os.killpg(holder.pid, 9)
        holder.wait()
    assert f"{run} is in use by process {holder.pid} on {socket.gethostname()}" in str(error.value)
    assert "run=FOLDER" in str(error.value)


def test_a_killed_process_holds_nothing_though_its_worker_lives_on(tmp_path: Path) -> None:
    holder, worker = hold(tmp_path / "run", tmp_path / "holder.py")
    try:
        holder.kill()
        holder.wait()
        os.kill(worker, 0)
        with lock_run(tmp_path / "run"):
            pass
        os.kill(worker, 0)
    finally:
        os.killpg(holder.pid, 9)


def test_the_folder_may_be_moved_and_deleted_under_the_lock_which_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with lock_run(run):
        run.rename(tmp_path / "aside")
        with pytest.raises(UserError, match="is in use"), lock_run(run):
            pass
        (tmp_path / "aside").rmdir()
    assert list(tmp_path.iterdir()) == []
    with lock_run(run), lock_run(tmp_path / "another"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_that_come_and_go_holds_it_at_a_time(tmp_path: Path) -> None:
    """The file is deleted at every end, so that one may lock what is no longer there."""
    script = tmp_path / "comes_and_goes.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom mmjax.errors import UserError\n"
        "from mmjax.runtime.run_dir import lock_run\nrun, held = Path(sys.argv[1]), 0\n"
        "while held < 300:\n    try:\n        with lock_run(run):\n            held += 1\n"
        "            (run.parent / 'inside').mkdir()\n            (run.parent / 'inside').rmdir()\n"
        "    except UserError:\n        pass\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "run")]
    started = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(3)
    ]
    assert [process.wait(timeout=480) for process in started] == [0, 0, 0]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_a_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run(tmp_path / "run"), lock_run(tmp_path / "run"):
        pass


def test_where_nothing_can_be_written_it_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with lock_run(tmp_path / "file/run"):
        pass
