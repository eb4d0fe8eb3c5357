"""A file that turns out corrupt when it is decoded: its sample is left out by every process, named, or fatal."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from commands import TINY, TINY_MEDIA, run
from test_processes import steps_of, together

from mmjax import train

TORN = """
from dataclasses import replace

from mmjax.config import FunctionSource
from mmjax.config.loading import sibling
from mmjax.data.sample import Sample, Text
from mmjax.errors import BadMedia

media = sibling(__file__, "tiny_media")


class Torn:
    def __init__(self, source, silent):
        self.source, self.silent = source, silent

    def __len__(self):
        return len(self.source)

    def __getattr__(self, name):
        return getattr(self.source, name)

    def bad(self, index):
        return index % 40 == 7

    def sample(self, index):
        found = self.source.sample(index)
        if not (self.silent and self.bad(index)):
            return found
        quiet = lambda s: replace(s, weights=0 * s.weights) if isinstance(s, Text) else s
        return Sample(tuple(map(quiet, found.segments)))

    def item(self, index, number):
        if self.bad(index) and not self.silent:
            raise BadMedia("image file is truncated")
        return self.source.item(index, number)


def few(split, modalities, silent):
    source = media.few(split, modalities)
    return Torn(source, silent) if split == "train" else source


def config():
    base = media.config()
    source = FunctionSource("config:few", {"modalities": "image", "silent": False})
    seeing = {"vision": base.model.encoders["vision"]}
    return replace(
        base,
        name="torn",
        data=replace(base.data, sources={"few": source}, max_bad_share=0.2),
        model=replace(base.model, encoders=seeing),
        batch=replace(base.batch, rows={"llm": 4, "vision": 1}),
    )
"""
WORDS = (
    "training.steps=6",
    "schedule.warmup=1",
    "training.evaluate_every=0",
    "batch.microbatches=2",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torn")
    for name in (TINY, TINY_MEDIA):
        shutil.copy(name, folder)
    (folder / "torn.py").write_text(TORN)
    return folder / "torn.py"


def quarantined(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in steps_of(folder).values()]


@pytest.fixture(scope="module")
def wanted(config) -> list[float]:
    """The losses where these samples are whole and have no loss weight."""
    folder = config.parent / "silent"
    train.main([str(config), f"run={folder}", *WORDS, "data.sources.few.arguments.silent=true"])
    return losses(folder)


@pytest.fixture(scope="module")
def torn(config) -> tuple[Path, str]:
    """The run that meets them, and what it printed."""
    folder = config.parent / "torn"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.main([str(config), f"run={folder}", *WORDS])
    return folder, out.getvalue()


def test_a_sample_that_cannot_be_decoded_is_left_out_and_named_and_the_others_train_as_ever(
    torn, wanted
):
    folder, out = torn
    assert losses(folder) == pytest.approx(wanted, rel=1e-6)
    found = quarantined(folder)
    assert found
    for line in found:
        assert int(line["sample"].removeprefix("few[").removesuffix("]")) % 40 == 7
        assert line["reason"].endswith("image file is truncated")
        assert f"left out {line['sample']}, which cannot be used: {line['reason']}" in out
    assert len({line["sample"] for line in found}) == len(found)
    assert "; 0 programs compiled after the start" in out


def test_where_bad_samples_are_fatal_the_run_ends_with_its_name(config, capsys):
    folder = config.parent / "fatal"
    ended = run(capsys, train.main, config, f"run={folder}", *WORDS, "data.on_bad_sample=raise")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    (found,) = quarantined(folder)[:1]
    assert f"the first, {found['sample']}: {found['reason']}" in line
    assert "skip them with data.on_bad_sample=skip" in line


@pytest.mark.exhaustive
def test_more_than_the_share_that_may_be_bad_ends_the_run(config, capsys):
    ended = run(
        capsys,
        train.main,
        config,
        f"run={config.parent / 'many'}",
        *WORDS,
        "data.max_bad_share=0.0001",
    )
    assert ended.code == 2
    assert "That is more than data.max_bad_share=0.0001 allows" in ended.err


@pytest.mark.exhaustive
def test_every_process_leaves_out_the_same_whichever_could_not_read_it(config, torn, wanted):
    folder = config.parent / "two"
    two = together(2, config, f"run={folder}", *WORDS, devices=4)
    assert two.code == 0, two
    assert losses(folder) == pytest.approx(wanted, rel=1e-4)
    found = quarantined(folder)
    assert {line["reason"].split(": ")[-1] for line in found} == {"image file is truncated"}
    assert sorted(line["sample"] for line in found) == sorted(
        line["sample"] for line in quarantined(torn[0])
    )
    fatal = together(
        2,
        config,
        f"run={config.parent / 'two_fatal'}",
        *WORDS,
        "data.on_bad_sample=raise",
        devices=4,
    )
    assert fatal.code == 2
    assert fatal.err.count("samples cannot be used; the first, few[") == 1
