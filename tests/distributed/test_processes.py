"""Several processes as one run, as a user starts them: real processes, gloo between them, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import TINY, TINY_DRAWING, TINY_MEDIA, run
from restarts import last, steps_of
from started import (
    LOCAL,
    Ended,
    begin,
    environment,
    finish,
    free_port,
    launch,
    process_of,
    wait_until,
)

from mmjax import train
from mmjax.distributed import coordination
from mmjax.errors import UserError


def together(processes: int, *words: object, devices: int) -> Ended:
    return finish(launch(processes, *words, devices=devices))


def test_two_processes_give_the_losses_of_one_which_goes_on_from_their_checkpoint(runs, capsys):
    words = (TINY, "training.evaluate_every=0", "training.keep=3", "batch.shapes=1")
    one, two = runs / "one_process", runs / "two_processes"
    assert run(capsys, train.main, *words, f"run={one}").code == 0
    ended = together(2, *words, f"run={two}", devices=4)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    wanted, found = steps_of(one), steps_of(two)
    assert list(found) == list(wanted) == list(range(1, 7))
    for step in (6, 4):
        shutil.rmtree(two / "checkpoints" / str(step))
    (two / "test.json").unlink()
    resumed = run(capsys, train.main, *words, f"run={two}", "--resume")
    assert resumed.code == 0, resumed
    assert "at step 2" in resumed.out
    again = steps_of(two)
    assert list(again) == list(wanted)
    for step, record in wanted.items():
        for other in (found[step], again[step]):
            assert other["samples"] == record["samples"]
            assert other["loss"] == pytest.approx(record["loss"], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "modules"),
    [(TINY_MEDIA, ("vision", "audio")), (TINY_DRAWING, ("vision", "picture"))],
    ids=["seeing and hearing", "seeing and drawing"],
)
def test_ten_steps_and_a_resume_give_the_losses_of_one_process_whatever_their_number(
    config, modules, runs, tmp_path
):
    words = (
        "training.steps=10",
        "schedule.warmup=2",
        "training.checkpoint_every=5",
        "training.evaluate_every=0",
    )
    one, two = (runs / f"{number}_{modules[-1]}" for number in ("one", "two"))
    assert together(1, config, f"run={one}", *words, devices=8).code == 0
    ended = together(2, config, f"run={two}", *words, devices=4)
    assert ended.code == 0, ended
    assert ended.out.count("programs compiled after the start") == 1  # one process speaks for all
    assert "; 0 programs compiled after the start" in ended.out
    wanted, found = steps_of(one), steps_of(two)
    assert list(wanted) == list(found) == list(range(1, 11))
    same = (
        "samples",
        "fill/llm",
        *(f"fill/{module}" for module in modules),
        "dist_ratio/llm",
        "straggler_wait",
    )
    kinds = ("loss", "image_loss/picture") if "picture" in modules else ("loss",)
    for step, record in wanted.items():
        assert [found[step][kind] for kind in kinds] == pytest.approx(
            [record[kind] for kind in kinds], rel=1e-4
        )
        assert {key: found[step][key] for key in same} == {key: record[key] for key in same}

    # Half of it again, from the first half's checkpoint, by another number of processes.
    (two / "checkpoints" / "10").rename(tmp_path / "10")
    (two / "test.json").unlink()
    ended = together(4, config, f"run={two}", "--resume", *words, devices=2)
    assert ended.code == 0, ended
    assert "at step 5" in ended.out
    again = steps_of(two)
    assert list(again) == list(range(1, 11))
    for step, record in wanted.items():
        assert again[step]["samples"] == record["samples"]
        assert [again[step][kind] for kind in kinds] == pytest.approx(
            [record[kind] for kind in kinds], rel=1e-4
        )


@pytest.mark.exhaustive
def test_rows_over_the_devices_of_two_processes_give_the_losses_of_one_device_and_go_on_over_fewer(
    runs, tmp_path
):
    words = (
        "training.steps=12",
        "schedule.warmup=2",
        "training.checkpoint_every=4",
        "training.keep=9",
    )
    words += ("training.evaluate_every=0", "mesh.data=1")
    one, shared = runs / "whole_rows", runs / "shared_rows"
    assert together(1, TINY_MEDIA, f"run={one}", *words, devices=1).code == 0
    ended = together(2, TINY_MEDIA, f"run={shared}", *words, "mesh.context=8", devices=4)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    wanted = steps_of(one)
    for context, since in ((8, 0), (2, 4), (1, 8)):
        if since:
            for step in range(since + 4, 13, 4):
                shutil.rmtree(shared / "checkpoints" / str(step), ignore_errors=True)
            (shared / "test.json").unlink()
            ended = together(
                1,
                TINY_MEDIA,
                f"run={shared}",
                "--resume",
                *words,
                f"mesh.context={context}",
                devices=context,
            )
            assert ended.code == 0, ended
            assert f"at step {since}" in ended.out
        found = steps_of(shared)
        assert list(found) == list(wanted) == list(range(1, 13))
        for step, record in wanted.items():
            assert found[step]["samples"] == record["samples"]
            assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-4)


@pytest.mark.exhaustive
def test_a_process_killed_in_a_balanced_step_is_named_and_the_run_goes_on_exactly_with_others(
    folder,
):
    """Every phase balanced by itself, so that all steps wait for each other in all-to-alls."""
    words = ("training.evaluate_every=0", "training.checkpoint_every=10", "training.steps=100000")
    words += (
        "batch.balance.locality=off",
        *(f"batch.rows.{m}=4" for m in ("llm", "vision", "audio")),
    )
    launched = launch(4, TINY_MEDIA, f"run={folder}", *words, devices=1)
    wait_until(lambda: last(folder) > 10 and 3 <= last(folder) % 10 < 9)
    os.kill(process_of(folder, 1), signal.SIGKILL)
    began = time.monotonic()
    ended = finish(launched, 90)
    assert time.monotonic() - began < 60
    assert ended.code == 137
    assert "process 1 of 4 ended first, with code 137" in ended.err
    for other in (0, 2, 3):
        assert (
            f"process 1 of this run's 4 ended or cannot be reached; process {other} ends too"
            in ended.err
        )
    before = steps_of(folder)
    assert all(record["all_to_all_bytes/vision"] > 0 for record in before.values())

    saved = max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())
    again = launch(2, TINY_MEDIA, f"run={folder}", "--resume", *words, devices=1)
    wait_until(lambda: last(folder) >= max(before) + 3)
    os.killpg(again.pid, signal.SIGINT)
    assert finish(again, 120).code == 130
    after, repeated = steps_of(folder), range(saved + 1, max(before) + 1)
    assert repeated
    for step in repeated:
        assert after[step]["samples"] == before[step]["samples"]
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=1e-4)


SLOW = """
import time
from dataclasses import replace
from mmjax.config.loading import sibling

tiny = sibling(__file__, "tiny")

class Slow(tiny.Few):
    def sample(self, index):
        time.sleep(0.1)
        return super().sample(index)

def slow(split, modalities, samples=96, seed=2):
    return Slow(tiny.EmbeddedSource(modalities=tuple(modalities.split()), samples=samples, questions=2), split, seed)

def config():
    base = tiny.config()
    source = replace(base.data.sources["few"], function="config:slow")
    return replace(base, data=replace(base.data, sources={"few": source}))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "victim", "then"), [("in a collective", 1, 1), ("waiting for data", 0, 4)]
)
def test_when_one_of_two_is_killed_the_other_ends_and_the_run_goes_on_exactly(
    where, victim, then, folder, tmp_path
):
    """Where a sample takes a tenth of a second they wait for data; where one is stopped, the other waits for it."""
    config = tmp_path / "slow.py"
    config.write_text(SLOW)
    shutil.copy(TINY, tmp_path)
    config = TINY if where == "in a collective" else config
    words = ("training.evaluate_every=0", "training.checkpoint_every=5", "training.steps=100000")
    launched = launch(2, config, f"run={folder}", *words, devices=1)
    wait_until(lambda: last(folder) > 11)
    process = process_of(folder, victim)
    if where == "in a collective":
        os.kill(process, signal.SIGSTOP)
        time.sleep(1.5)
    os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    ended = finish(launched, 90)
    assert time.monotonic() - began < 60
    assert ended.code == 137
    assert f"process {victim} of 2 ended first, with code 137" in ended.err
    assert f"process {victim} of this run's 2" in ended.err
    assert f"process {1 - victim} ends too" in ended.err
    before = steps_of(folder)

    saved = max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal())
    again = launch(then, config, f"run={folder}", "--resume", *words, devices=1)
    wait_until(lambda: last(folder) >= max(before) + 3 and saved + 1 in steps_of(folder))
    os.killpg(again.pid, signal.SIGINT)
    assert finish(again, 120).code == 130
    after = steps_of(folder)
    for step in range(saved + 1, max(before) + 1):
        assert set(after[step]["worst"]) == set(before[step]["worst"])  # the samples
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=1e-4)


@pytest.mark.exhaustive
def test_one_process_that_is_asked_to_stop_stops_all_after_the_same_step(folder):
    words = ("training.evaluate_every=0", "training.steps=100000", "training.checkpoint_every=0")
    launched = launch(2, TINY, f"run={folder}", *words, devices=1)
    wait_until(lambda: last(folder) > 5)
    os.kill(process_of(folder, 1), signal.SIGTERM)
    ended = finish(launched, 90)
    assert ended.code == 0, ended
    step = last(folder)
    assert f"stopped as asked after step {step}, which is saved" in ended.out
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [str(step)]


@pytest.mark.exhaustive
def test_ctrl_c_ends_all_processes(folder):
    words = ("training.steps=100000", "training.evaluate_every=0", "training.checkpoint_every=10")
    launched = launch(2, TINY, f"run={folder}", *words, devices=1)
    wait_until((folder / "checkpoints" / "10").is_dir)
    os.killpg(launched.pid, signal.SIGINT)  # as a terminal does
    ended = finish(launched, 60)
    assert ended.code == 130
    assert ended.err.count("interrupted") >= 1


@pytest.mark.exhaustive
def test_processes_with_other_data_update_nothing_and_say_so(folder):
    """As where two machines have two versions of a config."""
    port = free_port()
    started = [
        begin(
            [
                sys.executable,
                "-m",
                "mmjax.train",
                TINY,
                f"run={folder}",
                "training.evaluate_every=0",
                f"seed={p}",
            ],
            environment(
                1, MMJAX_PROCESSES="2", MMJAX_PROCESS=str(p), MMJAX_COORDINATOR=f"127.0.0.1:{port}"
            ),
        )
        for p in range(2)
    ]
    ended = [finish(p) for p in started]
    assert [e.code for e in ended] == [2, 2]
    assert (
        "the processes planned different batches for step 1, so nothing was updated" in ended[0].err
    )
    assert steps_of(folder) == {}


@pytest.mark.exhaustive
def test_a_mistake_is_said_once_and_nothing_is_lost(folder):
    words = (
        TINY,
        f"run={folder}",
        "training.steps=2",
        "schedule.warmup=1",
        "training.evaluate_every=0",
    )
    assert together(2, *words, devices=1).code == 0
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ended = together(2, *words, devices=1)
    assert ended.code == 2
    assert ended.err.count("already holds a run; continue it with --resume") == 1
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_the_launcher_says_how_it_is_used():
    for words in ([], ["two", TINY], ["0", TINY]):
        ended = subprocess.run([LOCAL, *words], env=environment(1), capture_output=True, text=True)
        assert ended.returncode == 2
        assert ended.stderr == "usage: launch/local.sh N [CONFIG] [a.b=value ...]\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MMJAX_PROCESSES": "two"}, "MMJAX_PROCESSES='two' is not a number"),
        ({"MMJAX_PROCESSES": "2", "MMJAX_PROCESS": "1"}, "MMJAX_COORDINATOR is not"),
        (
            {"MMJAX_PROCESSES": "2", "MMJAX_COORDINATOR": "node7", "MMJAX_PROCESS": "1"},
            "'node7' is not HOST:PORT",
        ),
        (
            {"MMJAX_PROCESSES": "2", "MMJAX_COORDINATOR": "node7:1"},
            "MMJAX_PROCESS='' is not one of the 2 processes",
        ),
        (
            {"MMJAX_PROCESSES": "2", "MMJAX_COORDINATOR": "node7:1", "MMJAX_PROCESS": "2"},
            "MMJAX_PROCESS='2' is not one of the 2 processes of MMJAX_PROCESSES; number them from 0 to 1",
        ),
    ],
)
def test_variables_that_name_no_process_are_refused_before_anything_is_waited_for(
    monkeypatch, variables, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(expected)), coordination.process_group():
        pass


def test_a_port_that_another_program_has_is_named_with_what_to_do_at_every_start(monkeypatch):
    for family, address in [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")] * 10:
        with socket.create_server((address, 0), family=family) as other:
            coordinator = f"127.0.0.1:{other.getsockname()[1]}"
            for name, value in {
                "PROCESSES": "2",
                "PROCESS": "0",
                "COORDINATOR": coordinator,
            }.items():
                monkeypatch.setenv(f"MMJAX_{name}", value)
            expected = f"process 0 cannot listen at {coordinator}: Address already in use; choose another port in MMJ"
            with pytest.raises(UserError, match=re.escape(expected)), coordination.process_group():
                pass


JOINING = """
import os, signal, sys, threading
from mmjax.distributed import coordination
coordination._START_SECONDS = int(sys.argv[1])
if len(sys.argv) > 2:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
with coordination.process_group():
    pass
"""


def joining(process: int, port: int, *words: str) -> Ended:
    """How a process ends that waits for the others at the port of process 0, so many seconds."""
    variables = {
        "MMJAX_PROCESSES": "2",
        "MMJAX_PROCESS": str(process),
        "MMJAX_COORDINATOR": f"127.0.0.1:{port}",
    }
    return finish(begin([sys.executable, "-c", JOINING, *words], environment(1, **variables)), 60)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (0, "not all have come in 1 s; see that all of them run with the same MMJAX_COORDINATOR"),
        (
            1,
            "no connection in 1 s (Connection refused); see that process 0 runs, that this is its host",
        ),
    ],
)
def test_a_process_whose_others_do_not_come_says_what_to_look_at_and_ends(process, expected):
    port = free_port()
    ended = joining(process, port, "1")
    assert ended.code == 2
    line = f"error: process {process} of 2 cannot reach the others at 127.0.0.1:{port}: {expected}, and that its"
    assert [x.startswith(line) for x in ended.err.splitlines() if "error: " in x] == [True], (
        ended.err
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", [0, 1])
def test_ctrl_c_ends_a_process_that_waits_for_the_others(process):
    ended = joining(process, free_port(), "300", "interrupted after a second")
    assert (ended.code, ended.err.splitlines()[-1]) == (130, "interrupted")
