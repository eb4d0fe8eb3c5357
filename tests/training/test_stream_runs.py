"""A run that reads a stream: killed and gone on with by other numbers of processes, its batches stay the same bytes."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from llava_folder import save_checkpoint, save_questions
from restarts import last, records, steps_of
from started import finish, kill, launch, wait_until

from mmjax.training.run_data import read_launches

pytestmark = pytest.mark.exhaustive

SHARDS, SAMPLES = 12, 12  # shards, and samples of each
WORDS = (
    "training.steps=60", "training.precision=float32", "training.evaluate_every=0", "training.checkpoint_every=10",
    "schedule.warmup=2", "batch.size.count=4", "batch.rows.llm=2", "batch.rows.vision=2", "mesh.fsdp=1",
    "mesh.data=2", "device=cpu", "data.workers=2", "data.sources.chat=webdataset", "data.sources.chat.window=24",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("streams")
    save_checkpoint(place / "checkpoint")
    made = json.loads(save_questions(place / "made", SHARDS * SAMPLES).read_text())
    for number in range(SHARDS):
        with tarfile.open(place / f"{number:02}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for record in made[number * SAMPLES : (number + 1) * SAMPLES]:
                (place / "record.json").write_text(
                    json.dumps({"conversations": record["conversations"]})
                )
                archive.add(place / "record.json", f"{record['id']}.json")
                image = place / "made" / "images" / record["image"]
                archive.add(image, f"{record['id']}{image.suffix}")
    return place


def train(place: Path, processes: int, path: str, run: str, *more: str, cache: str):
    words = (f"checkpoint={place / 'checkpoint'}", f"data={place / 'made' / 'data.json'}", *WORDS)
    paths = (f"data.sources.chat.path={path}", f"data.cache={place / cache}", f"run={place / run}")
    return launch(processes, "llava_style", *words, *paths, *more, devices=2 // processes)


def test_killed_and_by_another_number_of_processes_a_stream_brings_the_batches_of_local_shards(
    place,
):
    local, command = f"{place}/{{00..11}}.tar", f"pipe:sleep 0.5; cat {place}/{{00..11}}.tar"
    assert finish(train(place, 1, local, "local", cache="local_cache")).code == 0
    wanted = steps_of(place / "local")
    # Seven shards; a window has two.
    space = f"data.window_space={7 * (place / '00.tar').stat().st_size / 1e9}"
    for processes in (1, 2, 1):
        process = train(place, processes, command, "stream", "--resume=auto", space, cache="cache")
        before = last(place / "stream")
        wait_until(lambda before=before: last(place / "stream") >= before + 11, process)
        kill(process)
    ended = finish(train(place, 2, command, "stream", "--resume=auto", space, cache="cache"), 1200)
    assert ended.code == 0, ended
    assert [life["processes"] for life in read_launches(place / "stream" / "history.jsonl")] == [
        1,
        2,
        1,
        2,
    ]
    found = steps_of(place / "stream")
    assert list(found) == list(wanted) == list(range(1, 61))
    for step, record in wanted.items():
        assert found[step]["batch"] == record["batch"]
        assert found[step]["samples"] == record["samples"]
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-4)
    assert records(place / "stream")[-1]["epoch"] > 1


def test_a_shard_that_changes_in_mid_run_ends_it_with_one_line_and_restored_nothing_is_lost(place):
    folder = place / "changing"
    folder.mkdir()
    for shard in place.glob("??.tar"):
        os.link(shard, folder / shard.name)
    command = f"pipe:sleep 0.5; cat {folder}/{{00..11}}.tar"
    space = f"data.window_space={7 * (place / '00.tar').stat().st_size / 1e9}"
    process = train(place, 1, command, "torn", space, cache="torn_cache")
    wait_until(lambda: last(place / "torn") >= 10, process)
    for shard in folder.iterdir():
        whole = shard.read_bytes()
        shard.unlink()
        shard.write_bytes(whole[: len(whole) // 2])
    ended = finish(process)
    assert ended.code == 2, ended
    lines = [
        line
        for line in ended.err.splitlines()
        if "has changed since it was indexed, or is cut off" in line
    ]
    assert len(lines) == 1
    assert "--resume" in lines[0]
    for shard in folder.iterdir():
        shard.write_bytes((place / shard.name).read_bytes())
    assert finish(train(place, 1, command, "torn", "--resume", space, cache="torn_cache")).code == 0
    batches = {step: record["batch"] for step, record in steps_of(place / "torn").items()}
    assert batches == {step: record["batch"] for step, record in steps_of(place / "local").items()}
