"""Bad samples are named once, with their reason, and stop a run where they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmjax.config import DataConfig
from mmjax.data.sources.chat_source import BadSampleEntry, Quarantine
from mmjax.errors import UserError

SKIP, FATAL = DataConfig(max_bad_share=0.02), DataConfig(on_bad_sample="raise")


def named(path: Path) -> list[tuple[str, str]]:
    return [
        (line["sample"], line["reason"]) for line in map(json.loads, path.read_text().splitlines())
    ]


def test_each_bad_sample_has_one_line_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    first, second = BadSampleEntry("a[1]", "is cut off"), BadSampleEntry("b[7]", "é is missing")
    quarantine = Quarantine(path, SKIP, 1000)
    assert quarantine.add([first, first]) == [first]
    assert quarantine.add([first]) == []
    again = Quarantine(path, SKIP, 1000)
    assert again.add([first, second]) == [first, second]
    assert named(path) == [("a[1]", "is cut off"), ("b[7]", "é is missing")]


def test_bytes_that_are_no_text_stay_and_the_list_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(b"\xff\xfe half a line")
    Quarantine(path, SKIP, 1000).add([BadSampleEntry("a[1]", "is cut off")])
    assert (
        path.read_bytes() == b'\xff\xfe half a line\n{"sample": "a[1]", "reason": "is cut off"}\n'
    )


def test_a_folder_in_the_place_of_the_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").mkdir()
    with pytest.raises(UserError, match=r"quarantine\.jsonl is a folder.*remove it"):
        Quarantine(tmp_path / "quarantine.jsonl", SKIP, 1000).add(
            [BadSampleEntry("a[1]", "is cut off")]
        )


def test_what_was_mended_before_a_restart_counts_no_more(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    Quarantine(path, SKIP, 100).add([BadSampleEntry("a[1]", "x"), BadSampleEntry("a[2]", "x")])
    again = Quarantine(path, SKIP, 100)
    again.add([BadSampleEntry("a[3]", "x"), BadSampleEntry("a[4]", "x")])
    assert len(again) == 2
    assert len(named(path)) == 4


def test_a_line_that_a_killed_run_left_half_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"sample": "a[1]", "reason": "x"}\n{"sample": "b[')
    Quarantine(path, SKIP, 1000).add([BadSampleEntry("c[3]", "y")])
    assert path.read_text().splitlines()[2] == '{"sample": "c[3]", "reason": "y"}'


def test_nothing_bad_writes_no_file(tmp_path: Path) -> None:
    for data in (SKIP, FATAL):
        assert Quarantine(tmp_path / "quarantine.jsonl", data, 10).add([]) == []
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_a_fatal_sample_is_named_before_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    with pytest.raises(UserError, match=r"a\[1\]: is cut off.*data\.on_bad_sample=skip"):
        Quarantine(path, FATAL, 1000).add([BadSampleEntry("a[1]", "is cut off")])
    assert named(path) == [("a[1]", "is cut off")]


def test_more_than_the_share_is_fatal_and_just_as_many_is_not(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", SKIP, 100)
    quarantine.add([BadSampleEntry("a[1]", "x"), BadSampleEntry("a[2]", "x")])
    with pytest.raises(UserError, match=r"3 of 100 samples.*data\.max_bad_share=0\.02"):
        quarantine.add([BadSampleEntry("a[3]", "x")])
    assert len(named(tmp_path / "quarantine.jsonl")) == 3


def test_a_count_may_be_allowed_instead_of_a_share_and_the_error_says_so_with_the_names(
    tmp_path: Path,
) -> None:
    bad = [BadSampleEntry(f"a[{k}]", "is cut off") for k in range(8)]
    with pytest.raises(UserError) as refused:
        Quarantine(tmp_path / "share.jsonl", DataConfig(), 20).add(bad, starting=True)
    assert str(refused.value) == (
        "8 of 20 samples cannot be used; the first, a[0]: is cut off; the others: a[1], a[2], a[3], a[4], a[5] and 2 "
        "more. That is more than data.max_bad_share=0.01 allows, which is 0; mend them, or allow so many with "
        "data.max_bad=8; python -m mmjax.index lists all of them"
    )
    assert len(Quarantine(tmp_path / "count.jsonl", DataConfig(max_bad=8), 20).add(bad)) == 8
    with pytest.raises(
        UserError, match=r"more than data\.max_bad=7 allows, which is 7; .*all are in .*less\.jsonl"
    ):
        Quarantine(tmp_path / "less.jsonl", DataConfig(max_bad=7), 10_000).add(bad)
