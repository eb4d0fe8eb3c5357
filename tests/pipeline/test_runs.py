"""Runs on units, as a user starts them: the losses of a run on one mesh, and checkpoints that either goes on from."""

from __future__ import annotations

import os
import shutil
import signal

import jax
import pytest
from commands import TINY, TINY_MEDIA, run
from restarts import checkpoints, last, steps_of
from started import Ended, finish, launch, process_of, wait_until

from mmjax import train

STAGES = ("units.llm.pipeline=2", "batch.microbatches=2")
BY_MODULE = ("units.vision.data=2", "units.audio.data=1", "units.llm.pipeline=2", "batch.microbatches=2")
OTHERS = ("units.encoders.modules=vision,audio", "units.llm.data=2", "batch.microbatches=2")


def assert_same_losses(steps: dict, expected: dict) -> None:
    assert list(steps) == list(expected)
    for step, record in expected.items():
        assert steps[step]["samples"] == record["samples"]
        assert steps[step]["loss"] == pytest.approx(record["loss"], rel=1e-4)
        assert steps[step]["gradient_norm"] == pytest.approx(record["gradient_norm"], rel=1e-3)


def go_back(folder, *steps: int) -> None:
    """Forget the newest checkpoints, as if the run had been killed before them."""
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "test.json").unlink(missing_ok=True)


def test_a_run_in_stages_gives_the_losses_of_one_mesh_which_goes_on_from_its_checkpoint(runs, capsys, monkeypatch):
    words = (TINY, "training.evaluate_every=0", "training.keep=3", "batch.microbatches=2")
    one, staged = runs / "on_one_mesh", runs / "in_stages"
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:2])
    assert run(capsys, train.main, *words, f"run={one}").code == 0
    ended = run(capsys, train.main, *words, *STAGES, f"run={staged}")
    assert ended.code == 0, ended
    assert "predicted bubble" in ended.out
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(staged), steps_of(one))
    go_back(staged, 6, 4)
    resumed = run(capsys, train.main, *words, f"run={staged}", "--resume", "units={}")
    assert resumed.code == 0, resumed
    assert "at step 2" in resumed.out
    assert_same_losses(steps_of(staged), steps_of(one))
    go_back(one, 6, 4)
    assert run(capsys, train.main, *words, *STAGES, f"run={one}", "--resume").code == 0
    assert_same_losses(steps_of(one), steps_of(staged))


def together(processes: int, *words: object, devices: int, monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    return finish(launch(processes, *words, devices=devices))


@pytest.mark.exhaustive
def test_units_over_processes_give_the_losses_of_one_mesh_and_go_on_from_each_others_checkpoints(runs, monkeypatch):
    words = (
        TINY_MEDIA,
        "training.steps=6",
        "training.checkpoint_every=2",
        "training.evaluate_every=0",
        "training.keep=3",
    )
    one, two = runs / "one", runs / "two"
    assert together(1, *words, f"run={one}", "batch.microbatches=2", devices=1, monkeypatch=monkeypatch).code == 0
    expected = steps_of(one)
    # vision 2, audio 1, LLM 1 + 1 devices: the first process has encoders and the LLM's first layer, or the encoders.
    ended = together(5, *words, *BY_MODULE, f"run={two}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(two), expected)
    # On from step 2 with other units in three processes, and from step 4 on one mesh.
    go_back(two, 6, 4)
    ended = together(3, *words, *OTHERS, f"run={two}", "--resume", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert_same_losses(steps_of(two), expected)
    go_back(two, 6)
    words = (*words, "batch.microbatches=2", f"run={two}", "--resume", "units={}")
    assert together(2, *words, devices=2, monkeypatch=monkeypatch).code == 0
    assert_same_losses(steps_of(two), expected)


@pytest.mark.exhaustive
def test_stages_inside_a_deepstack_over_four_processes_give_the_losses_of_one_mesh(runs, monkeypatch):
    words = (
        TINY_MEDIA,
        "training.steps=4",
        "training.checkpoint_every=2",
        "training.evaluate_every=0",
        "training.keep=3",
        "batch.microbatches=2",
        "model.encoders.vision.layers=2",
        "model.encoders.vision.deepstack=0,1",
    )
    stages = ("units.vision.pipeline=2", "units.llm.modules=llm,audio", "units.llm.pipeline=2", "units.llm.cuts=1")
    one, four = runs / "one_with_deepstack", runs / "four_with_deepstack"
    assert together(1, *words, f"run={one}", devices=1, monkeypatch=monkeypatch).code == 0
    expected = steps_of(one)
    ended = together(4, *words, *stages, f"run={four}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(four), expected)
    # The connector's parameters lay on both of the encoder's stages.
    go_back(four, 4)
    ended = together(1, *words, f"run={four}", "--resume", "units={}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert_same_losses(steps_of(four), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_of_a_pipeline_is_named_and_the_run_goes_on_exactly(killed, folder, monkeypatch):
    words = (TINY_MEDIA, "training.evaluate_every=0", "training.checkpoint_every=5", "training.steps=100000")
    launched = launch(2, *words, "units.encoders.modules=vision,audio", "units.llm.data=1", f"run={folder}", devices=1)
    wait_until(lambda: last(folder) > 7)
    os.kill(process_of(folder, killed), signal.SIGKILL)
    ended = finish(launched, 120)
    assert ended.code == 137
    assert "ended or cannot be reached" in ended.err
    assert f"process {killed} of this run's 2" in ended.err
    before = steps_of(folder)
    saved = max(int(name) for name in checkpoints(folder) if name.isdecimal())
    again = launch(1, *words, f"run={folder}", "--resume", "units={}", devices=2)
    wait_until(lambda: last(folder) >= max(before) + 2)
    os.killpg(again.pid, signal.SIGINT)
    finish(again, 120)
    after = steps_of(folder)
    for step in range(saved + 1, max(before) + 1):
        assert after[step]["samples"] == before[step]["samples"]
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=1e-4)
