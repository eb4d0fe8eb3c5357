"""Runs on units, as a user starts them: the losses of a run on one mesh, and checkpoints that either goes on from."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from commands import TINY, TINY_MEDIA, run
from restarts import last, steps_of
from started import Ended, finish, launch, process_of, wait_until

from mmjax import inspect, train
from mmjax.disk import read_sealed, write_sealed
from mmjax.report import report
from mmjax.runtime.run_dir import RunFolder
from mmjax.training.pass_times import read_timelines

STAGES = ("units.llm.pipeline=2", "batch.microbatches=2")
BY_MODULE = (
    "units.vision.data=2",
    "units.audio.data=1",
    "units.llm.pipeline=2",
    "batch.microbatches=2",
)
OTHERS = ("units.encoders.modules=vision,audio", "units.llm.data=2", "batch.microbatches=2")
CONTEXT = (
    "units.encoders.modules=vision,audio",
    "units.llm.context=2",
    "units.llm.pipeline=2",
    "batch.microbatches=2",
)


def assert_same_losses(steps: dict, expected: dict) -> None:
    assert list(steps) == list(expected)
    for step, record in expected.items():
        assert steps[step]["samples"] == record["samples"]
        assert steps[step]["loss"] == pytest.approx(record["loss"], rel=1e-4)
        assert steps[step]["gradient_norm"] == pytest.approx(record["gradient_norm"], rel=1e-3)


def assert_passes_are_timed(folder: Path, stages: int) -> None:
    """The last of the steps 4, 8, 16, .. has every pass, none before what it needs; one worker's do not overlap."""
    timelines = read_timelines(folder / "passes")
    assert timelines.step == 4
    measured = timelines.measured
    assert len(timelines.stages) == stages
    assert set(measured.actions) == set(timelines.planned.actions)
    spans = {
        a: (start, end)
        for a, start, end in zip(measured.actions, measured.start, measured.end, strict=True)
    }
    empty = {action for action, (start, end) in spans.items() if start == end}
    # The last stage's backward passes are in one program with its forward passes.
    assert empty == {
        a for a in spans if a.kind == "backward" and a.stage in measured.schedule.graph.sinks
    }
    for action, (start, _) in spans.items():
        assert all(spans[need][1] <= start for need, _ in measured.schedule.graph.needs(action))
    for order in measured.schedule.orders:
        assert all(spans[before][1] <= spans[after][0] for before, after in pairwise(order))


def go_back(folder, *steps: int) -> None:
    """Forget the newest checkpoints, as if the run had been killed before them."""
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "test.json").unlink(missing_ok=True)


def assert_stages_and_one_mesh_go_on_from_each_other(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    units: Sequence[str],
) -> Path:
    """Runs of four steps have the same losses, and each goes on where the other was after two; returns the staged one.

    words: of both, for one device, or units of three.
    """
    words = (
        *words,
        "training.steps=4",
        "training.checkpoint_every=2",
        "training.keep=3",
        "training.evaluate_every=0",
    )
    words = (*words, "schedule.warmup=0", "batch.microbatches=2", "data.workers=0")
    layouts = {1: (), 3: tuple(units)}

    def train_on(devices: int, folder: Path, *more: str) -> Ended:
        monkeypatch.setattr(
            "mmjax.training.loop.choose_devices", lambda device: jax.devices()[:devices]
        )
        ended = run(capsys, train.main, *words, *layouts[devices], *more, f"run={folder}")
        assert ended.code == 0, ended
        return ended

    folders = {devices: runs / f"on_{devices}" for devices in layouts}
    for devices, folder in folders.items():
        train_on(devices, folder)
    expected = steps_of(folders[1])
    assert list(expected) == [1, 2, 3, 4]
    assert_same_losses(steps_of(folders[3]), expected)
    for other, folder in zip((3, 1), folders.values(), strict=True):
        go_back(folder, 4)
        ended = train_on(other, folder, "--resume", *(["units={}"] if other == 1 else []))
        assert "at step 2" in ended.out
        assert_same_losses(steps_of(folder), expected)
    return folders[3]


def test_a_run_in_stages_gives_the_losses_of_one_mesh_which_goes_on_from_its_checkpoint(
    runs, capsys, monkeypatch
):
    words = (TINY, "training.evaluate_every=0", "training.keep=3", "batch.microbatches=2")
    one, staged = runs / "on_one_mesh", runs / "in_stages"
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:2])
    assert run(capsys, train.main, *words, f"run={one}").code == 0
    ended = run(capsys, train.main, *words, *STAGES, f"run={staged}")
    assert ended.code == 0, ended
    assert "predicted bubble" in ended.out
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(staged), steps_of(one))
    assert_passes_are_timed(staged, 2)
    go_back(staged, 6, 4)
    resumed = run(capsys, train.main, *words, f"run={staged}", "--resume", "units={}")
    assert resumed.code == 0, resumed
    assert "at step 2" in resumed.out
    assert_same_losses(steps_of(staged), steps_of(one))
    assert read_timelines(staged / "passes") is None  # those of the last start
    go_back(one, 6, 4)
    assert run(capsys, train.main, *words, *STAGES, f"run={one}", "--resume").code == 0
    assert_same_losses(steps_of(one), steps_of(staged))


@pytest.mark.exhaustive
def test_units_that_share_experts_and_divide_tokens_give_the_losses_of_one_mesh_which_goes_on(
    runs, capsys
):
    settings = "layers=(0,1)", "count=4", "per_token=2", "width=24", "balance_loss=0.1"
    experts = [f"model.llm.experts.{word}" for word in settings]
    words = (
        TINY_MEDIA,
        *experts,
        "training.steps=6",
        "training.checkpoint_every=2",
        "training.evaluate_every=0",
    )
    words = (*words, "training.keep=3", "batch.microbatches=2")
    # Four devices encode, each rows of its own; four have the LLM, its experts and tokens.
    encoders = [
        f"units.encoders.{word}"
        for word in ("modules=vision,audio", "tensor=2", "context=2", "encoders=data")
    ]
    llm = [f"units.llm.{word}" for word in ("expert=2", "tensor=2", "sequence_parallel=overlap")]
    one, staged = runs / "one_with_experts", runs / "experts_in_units"
    assert run(capsys, train.main, *words, "mesh.expert=4", f"run={one}").code == 0
    ended = run(capsys, train.main, *words, *encoders, *llm, f"run={staged}")
    assert ended.code == 0, ended
    assert "units.llm.sequence_parallel=overlap" in ended.out
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(staged), steps_of(one))
    go_back(staged, 6)
    assert run(capsys, train.main, *words, *encoders, *llm, f"run={staged}", "--resume").code == 0
    assert_same_losses(steps_of(staged), steps_of(one))
    go_back(staged, 6, 4)
    assert (
        run(
            capsys, train.main, *words, "mesh.expert=4", f"run={staged}", "--resume", "units={}"
        ).code
        == 0
    )
    assert_same_losses(steps_of(staged), steps_of(one))


@pytest.mark.exhaustive
def test_reordered_microbatches_give_the_same_losses_and_are_resumed_and_inspected_as_they_ran(
    runs, capsys, monkeypatch
):
    words = (
        TINY,
        *STAGES,
        "training.evaluate_every=0",
        "batch.grouping=none",
        "batch.size.count=24",
        "batch.shapes=4",
    )
    words = (*words, "batch.microbatches=6", "training.keep=3")
    planned, reordered = runs / "as_planned", runs / "reordered"
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:2])
    assert run(capsys, train.main, *words, "pipeline.reorder=false", f"run={planned}").code == 0
    assert run(capsys, train.main, *words, f"run={reordered}").code == 0
    before, after = steps_of(planned), steps_of(reordered)
    assert_same_losses(after, before)
    moved = [step for step in after if after[step]["batch"] != before[step]["batch"]]
    assert moved
    go_back(reordered, 6, 4)
    assert run(capsys, train.main, *words, f"run={reordered}", "--resume").code == 0
    for step, record in steps_of(reordered).items():
        assert [record[key] for key in ("batch", "loss")] == [
            after[step][key] for key in ("batch", "loss")
        ]
    for step in moved:
        shown = run(capsys, inspect.main, reordered, "--step", step)
        assert shown.code == 0, shown.err
        assert "as it was logged" in shown.out


@pytest.mark.exhaustive
def test_resumed_stages_take_over_the_policies_that_the_run_was_started_with(
    runs, capsys, monkeypatch
):
    words = (
        TINY,
        *STAGES,
        "model.llm.layers=3",
        "training.evaluate_every=0",
        f"run={runs / 'staged'}",
    )
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:2])
    assert run(capsys, train.main, *words, "training.steps=4").code == 0
    stored = RunFolder(runs / "staged").memory_plan
    plan = read_sealed(stored)
    assert set(plan["policies"]["llm"]) == {"none"}
    write_sealed(
        stored,
        plan | {"policies": {tower: ["full"] * len(p) for tower, p in plan["policies"].items()}},
    )
    for changes, expected in (((), "full"), (("units.llm.cuts=(1,)",), "none")):
        steps = f"training.steps={6 if not changes else 8}"
        assert run(capsys, train.main, *words, "--resume", steps, *changes).code == 0
        assert set(read_sealed(stored)["policies"]["llm"]) == {expected}


def together(
    processes: int, *words: object, devices: int, monkeypatch: pytest.MonkeyPatch
) -> Ended:
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    return finish(launch(processes, *words, devices=devices))


@pytest.mark.exhaustive
def test_units_over_processes_give_the_losses_of_one_mesh_and_go_on_from_each_others_checkpoints(
    runs, monkeypatch
):
    words = (
        TINY_MEDIA,
        "training.steps=6",
        "training.checkpoint_every=2",
        "training.evaluate_every=0",
        "training.keep=3",
    )
    one, two = runs / "one", runs / "two"
    assert (
        together(
            1, *words, f"run={one}", "batch.microbatches=2", devices=1, monkeypatch=monkeypatch
        ).code
        == 0
    )
    expected = steps_of(one)
    # vision 2, audio 1, LLM 1 + 1 devices: the first process has encoders and the LLM's first
    # layer, or the encoders.
    ended = together(5, *words, *BY_MODULE, f"run={two}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(two), expected)
    assert_passes_are_timed(two, 4)
    page = report([two]).read_text()
    assert all(
        text in page
        for text in (
            "Passes of a step",
            "planned, by assumed rates",
            "measured, step 4",
            "llm[1:2]",
        )
    )
    # On from step 2 with other units in three processes, and from step 4 on one mesh.
    go_back(two, 6, 4)
    ended = together(
        3, *words, *OTHERS, f"run={two}", "--resume", devices=1, monkeypatch=monkeypatch
    )
    assert ended.code == 0, ended
    assert_same_losses(steps_of(two), expected)
    go_back(two, 6)
    words = (*words, "batch.microbatches=2", f"run={two}", "--resume", "units={}")
    assert together(2, *words, devices=2, monkeypatch=monkeypatch).code == 0
    assert_same_losses(steps_of(two), expected)


@pytest.mark.exhaustive
def test_an_llm_with_context_over_processes_gives_the_losses_of_one_mesh_and_goes_on_with_any_context(
    runs, monkeypatch
):
    words = (
        TINY_MEDIA,
        "training.steps=8",
        "training.checkpoint_every=2",
        "training.evaluate_every=0",
        "training.keep=4",
        "model.llm.layers=2",
        "batch.microbatches=2",
    )
    one, five = runs / "one_without_context", runs / "five_with_context"
    assert together(1, *words, f"run={one}", devices=1, monkeypatch=monkeypatch).code == 0
    expected = steps_of(one)
    # Each process one device: the encoders', and two for each of the LLM's stages, which share its
    # rows.
    ended = together(5, *words, *CONTEXT, f"run={five}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(five), expected)
    # On from step 2 on one mesh, from step 4 on one with context, and from step 6 with units again.
    for done, settings, devices in (
        ((8, 6, 4), ("units={}",), 2),
        ((8, 6), ("units={}", "mesh.data=1", "mesh.context=2"), 2),
        ((8,), ("mesh.data=-1", "mesh.context=1", *CONTEXT), 5),
    ):
        go_back(five, *done)
        resume = (*words, f"run={five}", "--resume", *settings)
        ended = together(1, *resume, devices=devices, monkeypatch=monkeypatch)
        assert ended.code == 0, ended
        assert_same_losses(steps_of(five), expected)


KILLS = 6
ROLES = ("units.encoders.modules=vision,audio", "units.llm.data=1")
CUT_ELSEWHERE = (
    "units.vision.data=1",
    "units.audio.data=1",
    "units.llm.pipeline=2",
    "units.llm.cuts=1",
)
CHAIN = (
    "units.all.modules=(vision,audio,llm)",
    "units.all.pipeline=4",
    "units.all.cuts=(vision.1,llm.1,llm.2)",
)
STAGES_OF = {
    ROLES: ("audio + vision", "llm"),
    CHAIN: ("vision[0:1]", "audio + vision[1:2] + llm[0:1]", "llm[1:2]"),
}
PLACES = [  # processes, devices, units
    (2, 1, ROLES),
    (2, 1, ROLES),
    (4, 1, CHAIN),
    (1, 8, ()),
    (1, 1, ()),
    (1, 4, CUT_ELSEWHERE),
]


@pytest.mark.exhaustive
def test_stages_inside_a_deepstack_over_four_processes_give_the_losses_of_one_mesh(
    runs, monkeypatch
):
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
    stages = (
        "units.vision.pipeline=2",
        "units.llm.modules=llm,audio",
        "units.llm.pipeline=2",
        "units.llm.cuts=1",
    )
    one, four = runs / "one_with_deepstack", runs / "four_with_deepstack"
    assert together(1, *words, f"run={one}", devices=1, monkeypatch=monkeypatch).code == 0
    expected = steps_of(one)
    ended = together(4, *words, *stages, f"run={four}", devices=1, monkeypatch=monkeypatch)
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_losses(steps_of(four), expected)
    # The connector's parameters lay on both of the encoder's stages.
    go_back(four, 4)
    ended = together(
        1, *words, f"run={four}", "--resume", "units={}", devices=1, monkeypatch=monkeypatch
    )
    assert ended.code == 0, ended
    assert_same_losses(steps_of(four), expected)


@pytest.mark.exhaustive
def test_a_pipeline_killed_at_random_moments_names_the_process_and_goes_on_exactly_on_any_devices(
    folder,
):
    """To the bit on the same devices, to 1e-4 on others: one mesh of eight or one, stages cut elsewhere, and back."""
    rng, beside = random.Random(3), folder.with_name("not_killed")
    words = (
        TINY_MEDIA,
        "training.evaluate_every=0",
        "training.checkpoint_every=5",
        "training.steps=100000",
    )
    words = (
        *words,
        "batch.microbatches=2",
        "model.llm.layers=3",
        "model.encoders.vision.layers=2",
        "training.keep=3",
    )
    ends = [0]
    for life in range(KILLS):
        processes, devices, units = PLACES[life % len(PLACES)]
        launched = launch(
            processes, *words, *units, f"run={folder}", "--resume=auto", devices=devices
        )
        goal = ends[-1] + rng.randint(3, 8)
        wait_until(lambda: last(folder) >= goal, launched)  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        killed = life % min(processes, 3)
        os.kill(process_of(folder, killed), signal.SIGKILL)
        ended = finish(launched, 120)
        assert ended.code == 137
        if processes > 1:
            assert (
                f"process {killed} of this run's {processes} ({STAGES_OF[units][killed]})"
                in ended.err
            )
            assert "ended or cannot be reached" in ended.err
        ends.append(last(folder))
        if life == 1:
            same_places = steps_of(folder)
    for run_folder, goal in ((folder, ends[-1] + 2), (beside, ends[-1] + 2)):
        launched = launch(2, *words, *ROLES, f"run={run_folder}", "--resume=auto", devices=1)
        wait_until(lambda: last(run_folder) >= goal, launched)  # noqa: B023
        os.killpg(launched.pid, signal.SIGINT)
        finish(launched, 120)
    unbroken, resumed = steps_of(beside), steps_of(folder)
    assert {s: r["loss"] for s, r in same_places.items()} == {
        s: unbroken[s]["loss"] for s in same_places
    }
    assert list(resumed)[: ends[-1]] == list(range(1, ends[-1] + 1))
    for step in range(1, ends[-1] + 1):
        assert set(resumed[step]["worst"]) == set(unbroken[step]["worst"])  # the samples
        assert resumed[step]["loss"] == pytest.approx(unbroken[step]["loss"], rel=1e-4)
