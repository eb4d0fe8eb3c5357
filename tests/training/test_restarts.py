"""No run is lost: killed, stopped, torn or out of disk, it goes on exactly where it was."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, TINY_DRAWING, run
from restarts import checkpoints, last, losses, records
from started import begin, environment, finish, start, wait_until

from mmjax import train

WORDS = ("schedule.warmup=2", "training.evaluate_every=0", "training.steps=100000")
KILLS = 20


EIGHT = (
    "schedule.warmup=2", "training.evaluate_every=0", "training.checkpoint_every=2", "training.keep=4",
    "training.steps=8",
)  # fmt: skip


def eight_steps(runs: Path, config: str) -> Path:
    """A run that nothing has stopped, with checkpoints at 2, 4, 6 and 8."""
    folder = runs / f"whole_{Path(config).stem}"
    train.main([config, *EIGHT, f"run={folder}"])
    return folder


@pytest.fixture(scope="module")
def whole(runs) -> Path:
    return eight_steps(runs, TINY)


KILLED_IN_A_SAVE = """
import os, signal, sys
from mmjax import train
from mmjax.runtime import checkpoint_commit

make_whole = checkpoint_commit.Commit._publish

def make_whole_until_step_4(commit):
    if commit.step == 4:  # everything is written, and nothing has its final name yet
        os.kill(os.getpid(), signal.SIGKILL)
    make_whole(commit)

checkpoint_commit.Commit._publish = make_whole_until_step_4
train.main(sys.argv[1:])
"""


@pytest.mark.default_cases("tiny")
@pytest.mark.parametrize("config", [TINY, TINY_DRAWING], ids=["tiny", "drawing"])
def test_killed_inside_a_save_the_losses_are_to_the_bit_those_of_a_run_that_was_not(
    config, whole, runs, folder, capsys
):
    whole = whole if config == TINY else eight_steps(runs, config)
    script = folder.with_name("killed_in_a_save.py")
    script.write_text(KILLED_IN_A_SAVE)
    killed = finish(
        begin([sys.executable, str(script), config, *EIGHT, f"run={folder}"], environment(8))
    )
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(folder) == ["2", "4.partial"]
    ended = run(capsys, train.main, config, *EIGHT, f"run={folder}", "--resume")
    assert ended.code == 0, ended.err
    assert f"resumed {folder} at step 2" in ended.out
    assert losses(folder) == losses(whole)
    assert checkpoints(folder) == checkpoints(whole)


@pytest.mark.exhaustive
def test_killed_at_twenty_moments_the_losses_are_to_the_bit_those_of_a_run_that_was_not(folder):
    """Every other step is saved, so that many kills fall into a checkpoint's writing, and some into a start."""
    rng, cut_off, beside = random.Random(7), 0, folder.with_name("not_killed")
    for life in range(KILLS):
        process = start(
            "mmjax.train",
            TINY,
            f"run={folder}",
            *WORDS,
            "training.checkpoint_every=2",
            "--resume=auto",
        )
        before = last(folder)
        if life % 5 == 4:
            time.sleep(rng.uniform(0.5, 6))  # wherever it is then
        else:
            wait_until(lambda: last(folder) > before, process)  # noqa: B023
            time.sleep(rng.uniform(0, 0.7))
        process.kill()
        process.communicate()
        if (folder / "checkpoints").is_dir():
            cut_off += any(name.endswith(".partial") for name in checkpoints(folder))
    assert cut_off > 0
    steps = last(folder)
    assert steps > 2 * KILLS
    process = start("mmjax.train", TINY, f"run={beside}", *WORDS)
    wait_until(lambda: last(beside) >= steps, process)
    process.kill()
    process.communicate()
    whole = losses(beside)
    assert losses(folder) == {step: whole[step] for step in range(1, steps + 1)}
    assert len((folder / "history.jsonl").read_text().splitlines()) > KILLS // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_asked_to_stop_saves_and_ends_with_0(asked, folder):
    process = start("mmjax.train", TINY, f"run={folder}", *WORDS, "data.workers=2")
    wait_until(lambda: last(folder) >= 10, process)
    os.killpg(process.pid, asked)  # as SLURM does: the workers get it too
    os.kill(process.pid, asked)  # and perhaps twice
    ended = finish(process, 60)
    assert ended.code == 0, ended
    step = last(folder)
    assert f"stopped as asked after step {step}, which is saved; go on with --resume" in ended.out
    assert ended.err.startswith(f"{asked.name}: saving after this step, then ending\n")
    assert str(step) in checkpoints(folder)


@pytest.mark.exhaustive
def test_a_running_one_refuses_a_second_start_in_its_folder_and_records_steps_when_asked(
    folder, capsys
):
    process = start("mmjax.train", TINY, f"run={folder}", *WORDS)
    wait_until(lambda: last(folder) >= 1, process)
    for word in ("--resume", "--overwrite"):
        ended = run(capsys, train.main, TINY, f"run={folder}", *WORDS, word)
        assert ended.code == 2
        assert f"{folder} is in use by process {process.pid} on " in ended.err
    before = last(folder)
    wait_until(lambda: last(folder) > before, process)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: list((folder / "traces").rglob("*.xplane.pb")), process)  # of the next steps
    process.kill()
    process.communicate()


@pytest.mark.exhaustive
def test_while_the_disk_is_full_the_run_goes_on_warns_and_keeps_the_last_checkpoint(folder):
    process = start("mmjax.train", TINY, f"run={folder}", *WORDS, "training.checkpoint_every=20")
    wait_until(lambda: (folder / "checkpoints" / "40").is_dir(), process)
    largest = max(
        p.stat().st_size for p in folder.rglob("*") if p.is_file() and "checkpoints" not in p.parts
    )
    # As a full disk does, to checkpoints and metrics alike: no file may grow beyond what the
    # largest is now.
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (min(largest, 4096), resource.RLIM_INFINITY)
    )
    at = last(folder)
    time.sleep(3)
    kept = [name for name in checkpoints(folder) if name.isdecimal()]
    assert kept
    assert last(folder) <= at + 20  # the log stands still as well
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    newest = int(kept[-1])
    wait_until(lambda: any(n.isdecimal() and int(n) > newest for n in checkpoints(folder)), process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 60)
    assert ended.code == 0, ended
    assert "could not be saved: " in ended.out
    assert f"the checkpoint after step {newest} is kept, and the run goes on" in ended.out
    assert (
        "metrics.jsonl cannot be written: File too large; its lines wait until there is room"
        in ended.out
    )
    steps = [r["step"] for r in records(folder)]
    assert steps == list(range(1, steps[-1] + 1))  # none is missing, none is torn
    assert all(name.isdecimal() for name in checkpoints(folder))


@pytest.mark.exhaustive
def test_on_a_disk_that_stays_full_a_run_that_is_stopped_says_what_is_kept(folder):
    process = start("mmjax.train", TINY, f"run={folder}", *WORDS, "training.checkpoint_every=50")
    wait_until(lambda: (folder / "checkpoints" / "50").is_dir(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 60)
    assert ended.code == 2
    assert "error: the last state could not be saved: " in ended.err
    assert "make room, and go on from step " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.exhaustive
def test_on_a_disk_that_is_full_at_the_end_a_run_says_what_is_kept_before_it_writes_scores(folder):
    words = (*WORDS, "training.checkpoint_every=50", "training.steps=1000")
    process = start("mmjax.train", TINY, f"run={folder}", *words)
    wait_until(lambda: (folder / "checkpoints" / "50").is_dir(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    ended = finish(process, 240)
    assert ended.code == 2
    assert "error: the last state could not be saved: " in ended.err
    assert "make room, and go on from step " in ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "test.json").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A folder with a file system of 8 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.exhaustive
def test_a_file_system_that_is_full_costs_the_saves_that_it_has_no_room_for_and_each_is_told(
    small_disk,
):
    words = (
        "model.llm.width=128",
        "model.llm.mlp_width=512",
        "training.steps=8",
        f"run={small_disk / 'run'}",
    )
    ended = finish(start("mmjax.train", TINY, *words), 600)  # a checkpoint takes 5 MB
    assert ended.code == 2
    assert "Traceback" not in ended.out + ended.err
    why, kept = (
        "could not be saved: .*No space left on device.*; ",
        "the checkpoint after step 2 is kept, and the run",
    )
    for step in (4, 6):
        assert re.search(f"WARNING step {step} {why}{kept} goes on", ended.out)
    assert re.search(
        f"error: the last state {why}make room, and go on from step 2, which is kept", ended.err
    )
    assert checkpoints(small_disk / "run") == ["2"]
    subprocess.run(["mount", "-o", "remount,size=60m", small_disk], check=True)
    assert finish(start("mmjax.train", "--resume", small_disk / "run"), 600).code == 0
    assert checkpoints(small_disk / "run")[-1] == "8"


def tear(checkpoint: Path) -> None:
    for path in (checkpoint / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:64])


def test_a_torn_checkpoint_is_set_aside_and_the_one_before_is_gone_on_from(whole, folder, capsys):
    shutil.copytree(whole, folder)
    (folder / "test.json").unlink()
    tear(folder / "checkpoints" / "8")
    shutil.rmtree(folder / "checkpoints" / "6" / "meta")
    (folder / "checkpoints" / "10.partial" / "state").mkdir(parents=True)
    ended = run(capsys, train.main, TINY, *EIGHT, f"run={folder}", "--resume")
    assert ended.code == 0, ended.err
    for step in (8, 6):
        assert f"WARNING checkpoint {folder}/checkpoints/{step} cannot be used: " in ended.out
        assert f"it is set aside as {step}.torn, and the run goes on from step 4" in ended.out
    assert f"resumed {folder} at step 4" in ended.out
    assert losses(folder) == losses(whole)
    # later ones are whole, so those set aside are gone
    assert checkpoints(folder) == ["2", "4", "6", "8"]


@pytest.mark.exhaustive
def test_where_no_checkpoint_can_be_read_nothing_is_touched(folder, capsys):
    words = (TINY, f"run={folder}", "training.evaluate_every=0", "training.checkpoint_every=2")
    assert run(capsys, train.main, *words, "training.steps=4").code == 0
    for step in (2, 4):
        tear(folder / "checkpoints" / str(step))
    ended = run(capsys, train.main, *words, "training.steps=6", "--resume")
    assert ended.code == 2
    assert f"checkpoint {folder}/checkpoints/4 cannot be used: " in ended.err
    assert (
        "; nor can the 1 before it; restore the folder, or start afresh with --overwrite"
        in ended.err
    )
    assert checkpoints(folder) == ["2", "4"]


@pytest.mark.exhaustive
def test_every_so_many_steps_a_checkpoint_stays_for_good(folder, capsys):
    words = (TINY, f"run={folder}", "training.steps=12", "training.checkpoint_every=2")
    more = ("training.evaluate_every=0", "training.keep=1", "training.keep_every=4")
    assert run(capsys, train.main, *words, *more).code == 0
    assert checkpoints(folder) == ["12", "4", "8"]


@pytest.mark.exhaustive
def test_a_supervised_training_is_started_again_where_it_was_until_it_is_done(folder):
    words = (
        "schedule.warmup=2",
        "training.evaluate_every=0",
        "training.steps=600",
        "training.checkpoint_every=20",
    )
    command = ("mmjax.train", TINY, f"run={folder}", *words, "--resume=auto")
    process = start("mmjax.supervise", "--wait", "0", "--", sys.executable, "-m", *command)
    for step in (40, 100):
        wait_until(lambda: last(folder) >= step, process)  # noqa: B023
        lock = folder.with_name(f".{folder.name}.lock")
        os.kill(int(lock.read_text().split()[1]), signal.SIGKILL)
    ended = finish(process, 200)
    assert ended.code == 0, ended
    assert sorted(losses(folder)) == list(range(1, 601))
    assert len((folder / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.exhaustive
def test_memory_and_open_files_stay_flat_over_two_thousand_steps(
    folder, monkeypatch, optimized_programs
):
    """By what is in use: freed blocks are given back at once, of which the allocator else keeps some for later."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**18))
    words = (
        "schedule.warmup=2",
        "training.evaluate_every=0",
        "training.steps=3000",
        "training.checkpoint_every=0",
    )
    ended = finish(start("mmjax.train", TINY, f"run={folder}", *words, "data.workers=1"), 400)
    assert ended.code == 0, ended
    of_steps = records(folder)[1000:]
    steps = np.array([r["step"] for r in of_steps])
    for name, unit in (("memory/host", 1e6), ("open_files", 1)):
        slope = np.polyfit(steps, [r[name] / unit for r in of_steps], 1)[0]
        assert 1000 * slope < 1, name
    lives = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [life["first"] for life in lives] == [0]
