"""The length index says what every sample needs of every module, is built once, and names what cannot be indexed."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from made import AUDIO, VISION, Made, config, image, index_of, random_samples, random_texts, text

from mmjax.data.media.patches import item_input
from mmjax.data.plan.length_index import LengthIndex, build_index, cached_index
from mmjax.data.sample import Item, SampleLengths
from mmjax.errors import UserError

ENCODERS = {"vision": VISION, "audio": AUDIO}


def test_lengths_are_those_of_the_prepared_items():
    source = random_samples(40, seed=0)
    index = index_of(source, config())
    for i, (_, items) in enumerate(source.samples):
        facts = source.facts(i)
        prepared = [
            item_input(ENCODERS[e], a) for (e, _), a in zip(facts.items, items, strict=True)
        ]
        own = slice(index.item_start[i], index.item_start[i + 1])
        assert index.item_encoder[own].tolist() == [list(ENCODERS).index(e) for e, _ in facts.items]
        assert index.item_positions[own].tolist() == [len(p.values) for p in prepared]
        assert index.item_useful[own].tolist() == [p.valid.sum() for p in prepared]
        tokens = [
            len(p.values) // (4 if e == "vision" else 6)
            for (e, _), p in zip(facts.items, prepared, strict=True)
        ]
        assert index.item_tokens[own].tolist() == tokens
        assert index.llm_tokens[i] == facts.text_tokens + sum(tokens)
        assert index.text_tokens[i] == facts.text_tokens
        for k, encoder in enumerate(ENCODERS):
            of = [
                len(p.values)
                for (e, _), p in zip(facts.items, prepared, strict=True)
                if e == encoder
            ]
            assert index.totals[i, 1 + k] == sum(of)
    assert index.positions_per_token.tolist() == [4, 6]


def test_parts_of_some_samples_are_theirs_among_all_parts():
    index = index_of(random_samples(30, seed=1), config())
    every, chosen = index.parts(), np.array([7, 3, 3, 29, 0])
    expected, got = every.take(chosen), index.parts(chosen)
    for field in fields(got):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(expected, field.name))
    np.testing.assert_array_equal(every.totals(3), index.totals)
    assert len(index.parts(np.zeros(0, np.int64))) == 0


def test_samples_are_numbered_through_all_sources_and_named_by_their_own():
    sources = {"a": random_texts([4, 5]), "none": Made([]), "b": random_texts([6, 7, 8])}
    index = build_index(sources, {})
    assert len(index) == 5
    assert index.source_of(np.arange(5)).tolist() == [0, 0, 2, 2, 2]
    assert [index.name(i) for i in range(5)] == ["a[0]", "a[1]", "b[0]", "b[1]", "b[2]"]
    assert index.llm_tokens.tolist() == [4, 5, 6, 7, 8]


def test_an_index_is_built_once_and_memory_mapped_afterwards(tmp_path):
    source = random_samples(20, seed=2)
    built, path = cached_index({"made": source}, ENCODERS, tmp_path)
    source.measured.clear()
    again, same = cached_index({"made": source}, ENCODERS, tmp_path)
    assert not source.measured
    assert same == path
    assert isinstance(again.item_positions, np.memmap)
    assert again.fingerprint() == built.fingerprint() == index_of(source, config()).fingerprint()
    assert again.name(3) == "made[3]"


@pytest.mark.parametrize("change", ["content", "name", "preprocessing"])
def test_other_data_or_preprocessing_has_another_index(change, tmp_path):
    source = random_samples(20, seed=2)
    _, path = cached_index({"made": source}, ENCODERS, tmp_path)
    name, encoders = "made", ENCODERS
    if change == "content":
        source.fingerprint = lambda: "other"
    elif change == "name":
        name = "renamed"
    else:
        encoders = ENCODERS | {"audio": replace(AUDIO, clips=replace(AUDIO.clips, hop=2))}
    source.measured.clear()
    index, other = cached_index({name: source}, encoders, tmp_path)
    assert other != path
    assert source.measured
    assert index.source_name.tolist() == [name]


def test_why_a_sample_is_bad_changes_no_plan_and_which_one_is_does():
    index = index_of(random_samples(2, seed=0), config())
    one, moved, other = (
        replace(index, bad=np.array([k]), reason=np.array([why])).fingerprint()
        for k, why in (
            (0, "a/d.jsonl:1: is bad"),
            (0, "b/d.jsonl:7: is bad"),
            (1, "a/d.jsonl:1: is bad"),
        )
    )
    assert one == moved != other


def test_two_processes_that_build_the_same_index_leave_one(tmp_path, monkeypatch):
    index = index_of(random_samples(5, seed=3), config())
    index.save(tmp_path / "index")
    index.save(tmp_path / "index")
    there = index_of(random_samples(5, seed=3), config())
    rename = Path.rename

    def after_another(path: Path, to: Path) -> Path:
        if to.name == "index" and not to.exists():
            monkeypatch.setattr(Path, "rename", rename)
            there.save(tmp_path / "index")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", after_another)
    index.save(tmp_path / "index")
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    assert LengthIndex.open(tmp_path / "index").fingerprint() == index.fingerprint()


@pytest.mark.parametrize("name", ["item_positions.npy", "totals.npy", "bad.npy", "sums.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "folder"])
def test_an_index_that_is_not_as_it_was_written_is_built_again_and_that_is_said(
    name, damage, tmp_path, capsys
):
    source = random_samples(20, seed=2)
    built, path = cached_index({"made": source}, ENCODERS, tmp_path)
    wanted = built.fingerprint()
    file, kept = path / name, bytearray((path / name).read_bytes())
    file.unlink()
    kept[-3] ^= 1
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(kept if damage == "changed" else kept[:40])
    again, same = cached_index({"made": source}, ENCODERS, tmp_path)
    assert (again.fingerprint(), same) == (wanted, path)
    told = capsys.readouterr().err
    assert told.startswith(f"note   {path}")
    assert told.endswith("it is made again\n")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


GOOD = ((text(np.random.default_rng(0), 3, first=True),), [])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            SampleLengths(3, (("smell", (4, 4)),)),
            "has an item for module 'smell'; the model's encoders and generators: vision, audio",
        ),
        (SampleLengths(3, (("vision", (4, 0)),)), "(4, 0)"),
        (SampleLengths(3, (("audio", (0,)),)), "(0,)"),
        (SampleLengths(0, ()), "is empty"),
    ],
)
def test_what_cannot_be_indexed_is_named(facts, message):
    class Odd(Made):
        def facts(self, index: int) -> SampleLengths:
            return facts if index == 1 else super().facts(index)

    with pytest.raises(UserError) as error:
        index_of(Odd([GOOD, GOOD]), config())
    assert "made[1]" in str(error.value)
    assert message in str(error.value)


def test_an_image_alone_is_a_sample():
    source = Made([((Item("vision", 0),), [image(np.random.default_rng(0), 5, 4)])])
    index = index_of(source, config())
    assert index.llm_tokens.tolist() == [2]
    assert index.item_positions.tolist() == [8]
    assert index.item_useful.tolist() == [6]


def test_a_sample_that_is_much_longer_than_the_others_is_named():
    sources = {"a": random_texts([4, 5, 4]), "b": random_texts([6, 4000, 5])}
    line = "the longest sample, b[1], has 4,000 LLM tokens, the median 5; data.max_tokens=N leaves out longer ones"
    assert build_index(sources, {}).longest(4000) == line
    assert build_index(sources, {}).longest(3999) == ""  # where it is left out
    assert build_index({"a": random_texts([4, 5, 30])}, {}).longest(4000) == ""
