"""How launchers pass signals on and end, with a few lines of Python for the training and for SLURM's programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TINY_MEDIA
from started import LOCAL, ROOT, begin, environment, finish, free_port, wait_until

SLURM = str(ROOT / "launch" / "slurm.sbatch")

# Notes its start and every signal, saves four steps, and ends with code 0 where it is asked to
# save, else with 130.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
folder, process = Path(sys.argv[-1]), os.environ["MMJAX_PROCESS"]
got = folder / f"got{process}"
def note(number, frame):
    with got.open("a") as file:
        file.write(f"{signal.Signals(number).name} ")
    if number != signal.SIGUSR2:
        os._exit(130 if number == signal.SIGINT else 0)
for name in ("INT", "TERM", "USR1", "USR2"):
    signal.signal(getattr(signal, f"SIG{name}"), note)
starts = folder / f"starts{process}"
with starts.open("a") as file:
    file.write(" ".join(sys.argv[1:-1]) + "\\n")
if process == "0" and "MMJAX_PROGRESS" in os.environ:
    Path(os.environ["MMJAX_PROGRESS"]).write_text("4")
codes = os.environ.get("CODES", "").split()
start = len(starts.read_text().splitlines())
if start <= len(codes):
    sys.exit(int(codes[start - 1]))
time.sleep(600)
"""

# Starts every task with its number, and passes USR1 on to all of them.
SRUN = """#!/usr/bin/env bash
set -m
while [[ $1 == --* ]]; do echo "$1" >>"$SRUN_LOG"; shift; done
trap 'kill -USR1 $(jobs -p)' USR1
trap 'kill -KILL $(jobs -p); exit 143' TERM
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" & done
highest=0
for task in $(jobs -p); do
    while :; do
        wait "$task"
        code=$?
        kill -0 "$task" 2>/dev/null || break
    done
    if ((code == 138)); then # perhaps of the wait that USR1 ended, not of the task
        wait "$task"
        ended=$?
        ((ended == 127)) || code=$ended
    fi
    ((code > highest)) && highest=$code
done
exit "$highest"
"""

SCONTROL = """#!/usr/bin/env bash
case "$*" in
"show hostnames nodes[1-2]") echo node1; echo node2 ;;
"show job 7") echo "JobId=7 PreemptTime=${PREEMPTED:-None}" ;;
*) echo "$*" >>"$SCONTROL_LOG" ;;
esac
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """An environment in which `mmjax.train` and SLURM's programs are those of this file."""
    package = tmp_path / "python" / "mmjax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'mmjax')!r})\n")
    (package / "train.py").write_text(TRAINING)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MMJAX_", "SLURM_"))
    }
    found |= {"PYTHONPATH": str(package.parent), "SCONTROL_LOG": str(tmp_path / "requeued")}
    found |= {"SRUN_LOG": str(tmp_path / "options"), "SLURM_SUBMIT_DIR": str(ROOT)}
    found |= {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return found | {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}


def begun(variables: dict[str, str], folder: Path, *command: str) -> subprocess.Popen[str]:
    return begin([*command, str(folder)], variables, cwd=folder)


def started(folder: Path, times: int = 1) -> Callable[[], bool]:
    """Whether both processes have started as often."""

    def check() -> bool:
        paths = [folder / f"starts{process}" for process in range(2)]
        return all(path.exists() and len(path.read_text().splitlines()) >= times for path in paths)

    return check


def got(folder: Path) -> list[str]:
    return [(folder / f"got{process}").read_text() for process in range(2)]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 0), ("SIGUSR1", 0)])
def test_local_processes_all_get_a_signal_as_what_it_is(
    tmp_path: Path, variables: dict[str, str], name: str, code: int
) -> None:
    launched = begun(variables, tmp_path, LOCAL, "2")
    wait_until(started(tmp_path))
    launched.send_signal(signal.SIGUSR2)
    wait_until(lambda: (tmp_path / "got0").exists() and (tmp_path / "got1").exists())
    launched.send_signal(getattr(signal, name))
    assert finish(launched).code == code
    assert got(tmp_path) == [f"SIGUSR2 {name} "] * 2


def test_a_slurm_job_whose_run_is_done_ends_and_is_not_requeued(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    ended = finish(begun(variables | {"CODES": "0"}, tmp_path, SLURM, "tiny", "seed=1"))
    assert ended.code == 0, ended.err
    assert "start 1 ended with code 0, 4 steps saved; done" in ended.err
    assert (tmp_path / "starts1").read_text() == "--resume=auto tiny seed=1\n"
    assert not (tmp_path / "requeued").exists()


def test_a_slurm_job_in_a_container_has_pyxis_options_and_its_clusters_settings(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    more = {
        "MMJAX_IMAGE": "registry#mmjax:0.1.0",
        "MMJAX_MOUNTS": "/data:/data",
        "MMJAX_CLUSTER": "ethernet",
    }
    (tmp_path / "python" / "mmjax" / "train.py").write_text(
        "import os; print(os.environ['NCCL_IB_DISABLE'])"
    )
    ended = finish(begun(variables | more, tmp_path, SLURM, "tiny"))
    # of both tasks, at the same time perhaps
    assert (ended.code, "".join(ended.out.split())) == (0, "11"), ended.err
    assert (tmp_path / "options").read_text().splitlines() == [
        "--kill-on-bad-exit=1",
        "--container-image=registry#mmjax:0.1.0",
        f"--container-workdir={tmp_path}",
        f"--container-mounts={tmp_path}:{tmp_path},/tmp:/tmp,/data:/data",
    ]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_slurm_job_whose_time_is_up_asks_all_processes_to_save_and_is_requeued(
    tmp_path: Path, variables: dict[str, str], name: str
) -> None:
    job = begun(variables, tmp_path, SLURM, "tiny")
    wait_until(started(tmp_path))
    job.send_signal(getattr(signal, name))  # to the shell alone, as with --signal=B:
    ended = finish(job)
    assert ended.code == 0, ended.err
    assert got(tmp_path) == ["SIGUSR1 "] * 2
    assert (tmp_path / "requeued").read_text() == "requeue Incomplete 7\n"


def test_a_slurm_job_whose_tasks_were_told_of_a_preemption_is_requeued(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """They have saved and ended with 0, and the shell was told nothing."""
    preempted = variables | {"CODES": "0", "PREEMPTED": "2026-11-22T11:28:44"}
    assert finish(begun(preempted, tmp_path, SLURM, "tiny")).code == 0
    assert (tmp_path / "requeued").read_text() == "requeue Incomplete 7\n"


def test_a_slurm_job_restarts_what_failed_and_is_requeued_where_its_time_is_up_meanwhile(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    job = begun(variables | {"CODES": "1"}, tmp_path, SLURM, "tiny")
    assert job.stderr
    while "start 1 ended with code 1, 4 steps saved; restart in 10 s" not in job.stderr.readline():
        pass
    job.send_signal(signal.SIGUSR1)
    assert finish(job).code == 1
    assert (tmp_path / "requeued").read_text() == "requeue Incomplete 7\n"


def test_a_slurm_job_that_a_shell_starts_says_how_it_is_submitted(
    variables: dict[str, str],
) -> None:
    outside = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
    ended = subprocess.run(["bash", SLURM, "tiny"], env=outside, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "error: launch/slurm.sbatch runs in a SLURM job; submit it: sbatch "
    )
    assert ended.stderr.count("\n") == 1


def test_a_slurm_job_of_bad_input_ends_with_its_code(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "python" / "mmjax" / "train.py").write_text("raise SystemExit(2)")
    ended = finish(begun(variables, tmp_path, SLURM, "tiny"))
    assert ended.code == 2
    assert "a restart would not mend it" in ended.err
    assert not (tmp_path / "requeued").exists()


@pytest.mark.exhaustive
def test_the_check_of_two_hosts_compares_whatever_carries_arrays_between_them_with_one_mesh(
    tmp_path,
):
    variables = {"MMJAX_PROCESSES": "2", "MMJAX_COORDINATOR": f"127.0.0.1:{free_port()}"}
    command = [
        str(ROOT / "launch" / "check_units.sh"),
        str(tmp_path),
        "2",
        TINY_MEDIA,
        "batch.microbatches=2",
    ]
    first, second = (
        finish(p)
        for p in [begin(command, environment(2, MMJAX_PROCESS=p, **variables)) for p in "01"]
    )
    assert (first.code, second.code) == (0, 0), first
    said = [line for line in first.out.splitlines() if "of one mesh" in line]
    assert [line.partition(":")[0] for line in said] == ["sockets", "collective"]
    assert all(": 10 of 10 steps, losses within " in line for line in said)
    assert "device: ended with code 2; it cannot be used here" in first.out
    assert (
        "pipeline.carrier=device: CPUs have no transfers of their own; use pipeline.carrier=sockets"
        in first.err
    )
