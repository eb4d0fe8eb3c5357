"""Frozen encoders encode each item once: losses are those of a run that stores nothing, whatever it finds stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import TINY_MEDIA, run
from restarts import last, losses, steps_of
from started import finish, kill, launch, start, wait_until

from mmjax import inspect, plan, train

EPOCH = 12  # steps
SETTINGS = (
    *(f"model.encoders.{name}.frozen=true" for name in ("vision", "audio")),
    f"training.steps={2 * EPOCH}", "training.checkpoint_every=4", "training.evaluate_every=0", "schedule.warmup=1",
    "batch.grouping=none",
)  # fmt: skip
ONCE = tuple(f"model.encoders.{name}.encode=once" for name in ("vision", "audio"))


def words(cache: Path, *more: str) -> list[str]:
    return [TINY_MEDIA, *SETTINGS, *ONCE, f"data.cache={cache}", *more]


def encoded(folder: Path) -> dict[int, float]:
    """How many items process 0 encoded for each step."""
    names = ("encoded/vision", "encoded/audio")
    return {
        step: sum(record.get(name, 0) for name in names)
        for step, record in steps_of(folder).items()
    }


@pytest.fixture(scope="module")
def cache(runs) -> Path:
    return runs / "encoded"


@pytest.fixture(scope="module")
def first(runs, cache) -> Path:
    """Two epochs of a run that finds nothing stored."""
    folder = runs / "encoded_first"
    train.main(words(cache, f"run={folder}"))
    return folder


def test_from_the_second_epoch_on_nothing_is_encoded(first):
    counts = encoded(first)
    assert all(counts[step] > 0 for step in range(1, EPOCH + 1))
    assert all(counts[step] == 0 for step in range(EPOCH + 1, 2 * EPOCH + 1))


def test_a_step_that_was_logged_is_that_which_is_looked_at_again(first, capsys):
    ended = run(capsys, inspect.main, first, "--step", EPOCH + 1)
    assert ended.code == 0, ended.err
    assert "as it was logged" in ended.out


def test_losses_are_to_the_bit_those_of_a_run_that_stores_nothing(first, runs, capsys):
    folder = runs / "encoded_never"
    cache = runs / "no_room"
    ended = run(capsys, train.main, *words(cache, f"run={folder}", "data.encoded_space=0.000001"))
    assert ended.code == 0, ended.err
    assert all(count > 0 for count in encoded(folder).values())
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) <= 1000
    assert losses(folder) == losses(first)


@pytest.mark.exhaustive
def test_losses_are_those_of_encoding_in_every_step(first, runs, capsys):
    folder = runs / "encoded_in_steps"
    ended = run(capsys, train.main, TINY_MEDIA, *SETTINGS, f"run={folder}")
    assert ended.code == 0, ended.err
    inside = losses(folder)
    np.testing.assert_allclose(
        list(inside.values()), [losses(first)[step] for step in inside], rtol=2e-6
    )


def test_killed_at_any_moment_a_run_goes_on_to_the_same_losses_with_what_is_stored(
    first, runs, capsys
):
    """Also where the other half of it was damaged meanwhile."""
    folder, cache = runs / "encoded_killed", runs / "killed_cache"
    process = start("mmjax.train", *words(cache, f"run={folder}", "data.workers=1"), devices=8)
    wait_until(lambda: last(folder) >= EPOCH + 3, process)
    kill(process)
    shards = sorted(cache.glob("features/*/*/values.bin"))
    for shard in shards[::2]:
        shard.write_bytes(shard.read_bytes()[:-7])
    ended = run(capsys, train.main, *words(cache, f"run={folder}"), "--resume")
    assert ended.code == 0, ended.err
    assert losses(folder) == losses(first)


def test_another_run_finds_what_is_stored_and_another_encoder_does_not(first, runs, cache, capsys):
    stores = set(cache.glob("features/*/"))
    again = runs / "encoded_again"
    ended = run(capsys, train.main, *words(cache, f"run={again}", f"training.steps={EPOCH}"))
    assert ended.code == 0, ended.err
    assert set(encoded(again).values()) == {0}
    assert set(cache.glob("features/*/")) == stores
    other = runs / "encoded_other"
    ended = run(
        capsys, train.main, *words(cache, f"run={other}", "training.steps=2", "seed=7")
    )  # other weights
    assert ended.code == 0, ended.err
    assert min(encoded(other).values()) > 0
    assert set(cache.glob("features/*/")) > stores


LAYOUTS = {
    "fsdp": ("mesh.fsdp=2",),
    "context": ("mesh.context=2", "batch.alignment=8"),
    "units": ("units.eyes.modules=vision", "units.rest.modules=audio,llm"),
    "beside": ("units.llm.pipeline=2", "units.vision.beside=llm", "units.audio.beside=llm", "batch.microbatches=2"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_on_other_devices_and_units(layout, first, runs, capsys):
    folder = runs / f"encoded_{layout}"
    cache = runs / f"encoded_{layout}_cache"
    process = start("mmjax.train", *words(cache, f"run={folder}", *LAYOUTS[layout]), devices=2)
    ended = finish(process)
    assert ended.code == 0, ended.err
    counts = encoded(folder)
    assert all(counts[step] == 0 for step in range(EPOCH + 1, 2 * EPOCH + 1))
    np.testing.assert_allclose(
        list(losses(folder).values()), list(losses(first).values()), rtol=2e-5
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["fsdp", "units"])
def test_processes_share_what_they_store(layout, first, runs):
    folder = runs / f"encoded_by_two_{layout}"
    cache = runs / f"encoded_by_two_{layout}_cache"
    more = ("mesh.fsdp=2",) if layout == "fsdp" else LAYOUTS["units"]
    for steps in (EPOCH, 2 * EPOCH):
        mode = ["--resume"] * (steps > EPOCH)
        process = launch(
            2, *words(cache, f"run={folder}", *more, f"training.steps={steps}"), *mode, devices=1
        )  # fmt: skip
        ended = finish(process)
        assert ended.code == 0, ended.err
    counts = encoded(folder)
    assert all(counts[step] == 0 for step in range(EPOCH + 1, 2 * EPOCH + 1))


def test_the_plan_says_what_is_stored_and_how_long_steps_take_until_it_is(capsys):
    ended = run(capsys, plan.main, TINY_MEDIA, *SETTINGS, *ONCE, "cluster=h100x1x8")
    assert ended.code == 0, ended.err
    assert "vision encodes once: " in ended.out
    assert "a step in epoch 1" in ended.out
    little = run(
        capsys, plan.main, TINY_MEDIA, *SETTINGS, *ONCE, "cluster=h100x1x8", "data.encoded_space=0.00001"
    )  # fmt: skip
    assert "NOT ALL OF IT IS STORED in data.encoded_space=1e-05 GB" in little.out
    auto = run(capsys, plan.main, TINY_MEDIA, *SETTINGS, *ONCE, "cluster=h100x1x8", "units=auto")
    assert auto.code == 2
    assert "model.encoders.vision.encode=once leaves vision its connector" in auto.err
