"""What a run leaves out of its data before its first step: what cannot be used, and what is too long."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from commands import run
from llava_folder import save_checkpoint, save_questions

from mmjax import train
from mmjax.config import Config
from mmjax.config.loading import load
from mmjax.errors import UserError
from mmjax.parallel.sharding import make_mesh
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder, changes_of
from mmjax.training.run_data import RunData, append_launch, open_data

COUNT = 20
LONG = 7  # a record of some thousand tokens
OTHER = AllowedChanges(keys=("data.max_tokens",))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    save_checkpoint(folder / "checkpoint")
    save_questions(folder / "data", COUNT)
    records = json.loads((folder / "data" / "data.json").read_text())
    records[LONG]["conversations"][1]["value"] = "red " * 3000
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def words(place: Path, *more: object) -> list[str]:
    given = (
        f"checkpoint={place}/checkpoint",
        f"data={place}/data.jsonl",
        f"images={place}/data/images",
    )
    size = () if "batch.size=tokens" in more else ("batch.size.count=10",)
    return [*given, f"data.cache={place}/cache", *size, "device=cpu", *map(str, more)]


def opened(
    config: Config, folder: Path, step: int = 0, permitted: AllowedChanges = NO_CHANGES
) -> RunData:
    folder.mkdir(exist_ok=True)
    return open_data(
        config, RunFolder(folder), step, permitted, make_mesh(config.mesh, jax.devices()[:1])
    )


def oversize(folder: Path) -> dict[str, str]:
    lines = map(json.loads, (folder / "oversize.jsonl").read_text().splitlines())
    return {line["sample"]: line["reason"] for line in lines}


def test_a_run_of_few_samples_with_a_bad_one_names_it_its_line_and_the_key_and_no_file_that_is_gone(
    place, tmp_path, capsys
):
    text = (place / "data.jsonl").read_text()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text.replace('"3.png"', '"none.png"'))
    ended = run(
        capsys, train.main, "llava_style", *words(place, f"data={bad}", f"run={tmp_path}/run")
    )
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: 1 of {COUNT} samples cannot be used; the first, chat[3]: {bad}:4: "
    )
    assert "allow so many with data.max_bad=1; python -m mmjax.index lists all of them" in line
    assert str(tmp_path / "run") not in line
    assert not (tmp_path / "run").exists()


def test_longer_samples_than_max_tokens_are_left_out_and_listed_and_rows_are_shorter_for_it(
    place, tmp_path
):
    whole = opened(load("llava_style", words(place)), tmp_path / "whole").loader
    config = load("llava_style", words(place, "data.max_tokens=100"))
    capped = opened(config, tmp_path / "capped").loader
    assert capped.planner.grouper.oversize.tolist() == [LONG]
    assert capped.layout.shapes[0].lengths[0] < whole.layout.shapes[0].lengths[0] / 10
    tokens = int(capped.index.llm_tokens[LONG])
    assert oversize(tmp_path / "capped") == {
        f"chat[{LONG}]": f"{tokens:,} LLM tokens, beyond data.max_tokens=100"
    }
    assert oversize(tmp_path / "whole") == {}
    drawn = {sample for step in range(4) for sample in capped.plan(step).samples().tolist()}
    assert drawn == set(range(COUNT)) - {LONG}
    with pytest.raises(
        UserError, match=r"none of its 20 samples fits .* raise data\.max_tokens=5, or set"
    ):
        opened(load("llava_style", words(place, "data.max_tokens=5")), tmp_path / "none")


def test_a_run_goes_on_with_another_max_tokens_only_where_that_is_permitted(place, tmp_path):
    folder = RunFolder(tmp_path / "run")
    config, other = (
        load("llava_style", words(place, f"data.max_tokens={n}")) for n in (100, 10_000)
    )
    append_launch(folder.history, opened(config, folder.path).launch)
    folder.write_config(config)
    with pytest.raises(UserError, match=r"data\.max_tokens.*--change data\.max_tokens"):
        changes_of(folder, other)
    with pytest.raises(UserError, match="was trained on other data"):
        opened(other, folder.path, 1)
    changed = opened(other, folder.path, 1, OTHER)
    assert changed.launch.segment.first == 1
    assert len(changed.loader.planner.grouper.oversize) == 0


def test_samples_that_fit_no_budget_are_fatal_where_the_config_says_so_and_named(place, tmp_path):
    tokens = ("batch.size=tokens", "batch.size.count=1000", "data.on_oversize=raise")
    with pytest.raises(
        UserError, match=rf"1 samples fit no budget .*: chat\[{LONG}\]: [\d,]+ LLM tokens, fits no"
    ):
        opened(load("llava_style", words(place, *tokens)), tmp_path / "run")
    opened(load("llava_style", words(place, *tokens, "data.max_tokens=1000")), tmp_path / "run")
    assert list(oversize(tmp_path / "run")) == [f"chat[{LONG}]"]


@pytest.mark.parametrize("count", [10, 5, 7])
def test_an_epoch_of_few_samples_has_as_many_steps_as_the_batch_size_says(count, place, tmp_path):
    config = load("llava_style", words(place, f"batch.size.count={count}", "data.max_tokens=100"))
    grouper = opened(config, tmp_path / "run").loader.planner.grouper
    steps = -(-(COUNT - 1) // count)
    assert [grouper.steps_in(epoch) for epoch in range(3)] == [steps] * 3
    assert grouper.samples_per_step == (COUNT - 1) / steps
    (note,) = grouper.epoch_notes()
    assert note.startswith(f"all {COUNT - 1} samples of chat come once in {steps} steps")
