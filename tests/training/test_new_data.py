"""More data in mid-run, killed and gone on with by other numbers of processes; and its steps made again."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import jax
import pytest
from commands import TINY_MEDIA, media_run, run
from llava_folder import save_checkpoint, save_questions
from restarts import last, losses, records
from started import finish, kill, launch, wait_until

from mmjax import inspect, train
from mmjax.config import (
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LlavaSource,
    Samples,
    TrainingConfig,
)
from mmjax.config.loading import load
from mmjax.data.loading.replay import Replayed
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.parallel.sharding import make_mesh
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder, claim, run_folder_of
from mmjax.training.run_data import (
    append_launch,
    launch_of_step,
    loader_of,
    open_data,
    read_launches,
)

WORDS = (
    "schedule.warmup=2", "training.evaluate_every=0", "training.steps=100000", "training.checkpoint_every=50",
    "batch.grouping.chunk_steps=8", "data.workers=1",
)  # fmt: skip
BEFORE, AFTER = 500, 700  # samples; eight to a step: the 50th is in the first epoch


def train_on(samples: int, folder: Path, processes: int, *more: str) -> subprocess.Popen[str]:
    arguments = f"data.sources.few.arguments.samples={samples}"
    return launch(processes, TINY_MEDIA, f"run={folder}", arguments, *WORDS, *more, devices=2)


def replayed(folder: RunFolder, step: int, loaders: dict) -> Replayed:
    """A step, counted from 0, by a loader that is opened once for each life."""
    life = launch_of_step(folder.history, step, folder.due_samples)
    return Replayed(loaders.setdefault(life.first, loader_of(life, folder)), step)


@pytest.mark.exhaustive
def test_new_data_at_step_50_comes_once_an_epoch_like_the_old_though_killed_and_by_other_processes(
    runs,
):
    path = runs / "new-data"
    folder = RunFolder(path)
    process = train_on(BEFORE, path, 1)
    wait_until(lambda: (path / "checkpoints" / "50").is_dir(), process)
    kill(process)
    refused = finish(train_on(AFTER, path, 2, "--resume=auto"))
    assert refused.code == 2
    assert "data.sources.few.arguments.samples: 500 -> 700" in refused.err
    assert "that they shall change: --new-data;" in refused.err
    for processes in (2, 1):  # killed, and the same line again
        process = train_on(AFTER, path, processes, "--resume=auto", "--new-data")
        at = last(path)
        wait_until(lambda at=at: last(path) >= max(at + 5, 60), process)
        kill(process)
    process = train_on(AFTER, path, 2, "--resume=auto", "--new-data")
    wait_until(lambda: last(path) >= 120, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 240)
    assert ended.code == 0, ended
    lives = read_launches(folder.history)
    first = lives[1]["first"]
    assert first == 50
    assert [life["segment"]["first"] for life in lives] == [0, *[first] * (len(lives) - 1)]
    assert [life["samples"] for life in lives] == [BEFORE, *[AFTER] * (len(lives) - 1)]

    # Every sample once, of the old data and of what joined it, up to the step with which the epoch
    # ends.
    loaders: dict = {}
    ids = Counter(
        int(k) for step in range(first) for k in replayed(folder, step, loaders).plan.samples()
    )
    assert max(ids.values()) == 1
    assert 0 < sum(ids.values()) < BEFORE
    usable = set(range(AFTER)) - set(
        replayed(folder, first, loaders).loader.planner.grouper.oversize.tolist()
    )
    step = first
    while sum(ids.values()) < len(usable):
        ids.update(replayed(folder, step, loaders).plan.samples().tolist())
        step += 1
    assert set(ids) == usable
    assert max(ids.values()) == 1
    assert step < last(path)  # all this was trained on
    assert {r["step"]: r["epoch"] for r in records(path)}[step] == 1

    # What is made again is what was trained on, by whatever number of processes.
    logged = {r["step"]: r["batch"] for r in records(path)}
    assert sorted(logged) == list(range(1, last(path) + 1))
    for number in random.Random(0).sample(sorted(logged), 50):
        assert replayed(folder, number - 1, loaders).content == logged[number]


@pytest.mark.exhaustive
def test_another_batch_is_gone_on_with_where_it_is_named(runs, capsys):
    path = runs / "another-batch"
    words = (TINY_MEDIA, f"run={path}", "training.evaluate_every=0", "schedule.warmup=2")
    assert run(capsys, train.main, *words, "training.steps=10").code == 0
    more = ("training.steps=14", "batch.size.count=12", "optimizer.learning_rate=1e-4", "--resume")
    ended = run(
        capsys,
        train.main,
        *words,
        *more,
        "--change",
        "batch.size",
        "--change",
        "optimizer.learning_rate",
    )
    assert ended.code == 0, ended.err
    for line in (
        "training.steps: 10 -> 14",
        "batch.size.count: 8 -> 12",
        "optimizer.learning_rate: 0.001 -> 0.0001",
    ):
        assert f"changed {line}\n" in ended.out
    assert sorted(losses(path)) == list(range(1, 15))
    assert [life["segment"]["first"] for life in read_launches(path / "history.jsonl")] == [0, 10]


@pytest.fixture(scope="module")
def shown(runs) -> Path:
    return media_run(runs)[0]


def test_a_step_is_shown_with_its_samples_texts_items_and_hash(shown, capsys, tmp_path):
    path = shown
    ended = run(capsys, inspect.main, path, "--step", 2, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    logged = {r["step"]: r for r in records(path)}[2]
    assert f"batch {logged['batch']}, as it was logged; loss {logged['loss']}" in ended.out
    assert "[[" in ended.out  # what is trained on
    told = json.loads(run(capsys, inspect.main, path, "--step", 2, "--json").out)
    assert told["batch"] == told["logged"] == logged["batch"]
    assert len(told["samples"]) == logged["samples"]
    samples = [s for row in told["rows"] for s in row["samples"]]
    assert sorted(s["sample"] for s in samples) == sorted(told["samples"])
    items = [item for s in samples for item in s["items"]]
    assert {item["encoder"] for item in items} == {"vision", "audio"}
    written = {p.suffix for p in (tmp_path / "out").iterdir()}
    assert written == {".png", ".wav"}
    alone = json.loads(run(capsys, inspect.main, path, "--step", 2, "--rank", 1, "--json").out)[
        "rows"
    ]
    assert alone == [row for row in told["rows"] if row["rank"] == 1]
    steps = max(r["step"] for r in records(path))
    for words, error in (
        (["--step", 0], f"--step 0: {path} has logged {steps} steps; give 1 to {steps}"),
        (["--step", steps + 1], f"give 1 to {steps}"),
        (["--step", 10**12], f"give 1 to {steps}"),
        (["--step", 2, "--rank", 8], "had 8 ranks; give 0 to 7"),
        (["--ids", f"2:{steps + 1}"], f"give FIRST:LAST within 1:{steps}"),
        (["--ids", "two"], f"give FIRST:LAST within 1:{steps}"),
    ):
        refused = run(capsys, inspect.main, path, *words)
        assert refused.code == 2
        assert error in refused.err


def test_the_samples_of_every_step_are_listed(shown, capsys):
    path, logged = shown, {r["step"]: r for r in records(shown)}
    ids = json.loads(run(capsys, inspect.main, path, "--ids", "--json").out)
    assert list(ids) == [str(step) for step in sorted(logged)]
    assert [len(of) for of in ids.values()] == [
        record["samples"] for _, record in sorted(logged.items())
    ]
    assert sorted(ids["2"]) == sorted(
        json.loads(run(capsys, inspect.main, path, "--step", 2, "--json").out)["samples"]
    )
    assert json.loads(run(capsys, inspect.main, path, "--ids", "2:3", "--json").out) == {
        k: ids[k] for k in ("2", "3")
    }
    assert run(capsys, inspect.main, path, "--ids", "2").out == f"2: {' '.join(ids['2'])}\n"


def test_epochs_become_the_steps_that_hold_every_sample_as_often(tmp_path):
    config = load(
        TINY_MEDIA, [f"run={tmp_path / 'run'}", "training.epochs=2", "training.evaluate_every=0"]
    )
    assert (config.training.steps, config.training.epochs) == (0, 2)
    with claim(config, Path(TINY_MEDIA), "new"):
        pass
    data = open_data(
        config, run_folder_of(config), 0, NO_CHANGES, make_mesh(config.mesh, jax.devices()[:1])
    )
    steps, grouper = data.launch.config.training.steps, data.loader.planner.grouper
    ids = Counter(int(k) for step in range(steps) for k in data.loader.plan(step).samples())
    assert set(ids.values()) == {2}
    assert len(ids) == grouper.epoch_samples
    assert grouper.epochs_after(steps - 1) == 2


@pytest.mark.exhaustive
def test_a_run_of_one_epoch_goes_on_to_two(runs, capsys):
    path = runs / "epochs"
    words = (TINY_MEDIA, f"run={path}", "training.evaluate_every=0", "schedule.warmup=2")
    assert run(capsys, train.main, *words, "training.epochs=1").code == 0
    one = Counter(
        itertools.chain(
            *json.loads(run(capsys, inspect.main, path, "--ids", "--json").out).values()
        )
    )
    assert set(one.values()) == {1}
    assert records(path)[-1]["epoch"] == 1
    ended = run(capsys, train.main, *words, "training.epochs=2", "--resume")
    assert ended.code == 0, ended.err
    assert "changed training.epochs: 1.0 -> 2.0" in ended.out
    two = Counter(
        itertools.chain(
            *json.loads(run(capsys, inspect.main, path, "--ids", "--json").out).values()
        )
    )
    assert two == Counter(dict.fromkeys(one, 2))


@pytest.mark.exhaustive
def test_a_step_whose_data_has_changed_since_is_refused(shown, capsys):
    path = shown
    kept = (
        (path / "tiny.py").read_text()
        if (path / "tiny.py").exists()
        else (path / "config.py").read_text()
    )
    name = "tiny.py" if (path / "tiny.py").exists() else "config.py"
    (path / name).write_text(kept.replace("seed=2", "seed=3"))
    try:
        refused = run(capsys, inspect.main, path, "--step", 2)
    finally:
        (path / name).write_text(kept)
    assert refused.code == 2
    assert "the data has changed since" in refused.err


def test_a_text_replaced_by_one_of_the_same_length_is_new_data_to_a_resumed_run_and_a_copy_is_not(
    tmp_path,
):
    path = save_questions(tmp_path, 24)
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    chat = ChatFormat(str(checkpoint))
    source = LlavaSource(str(path), images=str(tmp_path / "images"))
    config = Config(
        "chat",
        DataConfig({"chat": source}, chat=chat, cache=str(tmp_path / "cache")),
        BatchConfig(Samples(8), {"llm": 2, "vision": 2}),
        from_hf(checkpoint),
        TrainingConfig(100),
        run=str(tmp_path / "run"),
    )
    folder, mesh = run_folder_of(config), make_mesh(config.mesh, jax.devices()[:1])
    folder.path.mkdir()
    append_launch(folder.history, open_data(config, folder, 0, NO_CHANGES, mesh).launch)
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)
    assert open_data(config, folder, 2, NO_CHANGES, mesh).launch.segment.first == 0
    path.write_bytes(copy.replace(b"What colour", b"Whet colour"))
    with pytest.raises(
        UserError,
        match=r"was trained on other data: its files have changed since; .* by --new-data",
    ):
        open_data(config, folder, 2, NO_CHANGES, mesh)
    assert (
        open_data(config, folder, 2, AllowedChanges(new_data=True), mesh).launch.segment.first == 2
    )
