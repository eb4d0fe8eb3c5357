"""`python -m mmjax.bench remat`: even ranks compute less again, and as little as the memory allows."""

import json

import pytest
from commands import run

from mmjax import bench

SMALL = (
    "--preset=omni-10b",
    "--samples=4000",
    "--steps=2",
    "--ranks=8",
    "--shards=8",
    "--per-rank=8",
)


def rows(capsys, *words: str) -> dict[str, dict]:
    ended = run(capsys, bench.main, "remat", *SMALL, *words, "--json")
    assert ended.code == 0, ended.err
    return {row["balance"]: row for row in json.loads(ended.out)}


@pytest.mark.exhaustive
def test_balanced_ranks_compute_less_again_and_every_mix_is_the_best_that_fits(capsys):
    found = rows(capsys, "--memory=40")
    for row in found.values():
        assert {name: sum(own.values()) for name, own in row["policies"].items()} == {
            "llm": 28,
            "vision": 36,
            "audio": 32,
        }
        assert 0 < row["recompute_share"] < row["all"]
        assert 0 < row["bound"] <= row["seconds"] * (1 + 1e-9)
        assert row["seconds"] < 1.05 * row["bound"]
        assert row["memory"] <= 40
    assert found["post"]["pflops"] < 0.9 * found["none"]["pflops"]
    assert found["post"]["recompute_share"] < found["none"]["recompute_share"]


@pytest.mark.exhaustive
def test_what_fits_nowhere_is_said_with_what_it_would_need(capsys):
    for row in rows(capsys, "--memory=8").values():
        assert row["policies"] is row["recompute_share"] is row["seconds"] is None
        assert row["memory"] > 8


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--memory=0", "--memory 0.0"),
        ("--shards=0", "--shards 0"),
        ("--host-memory=-1", "--host-memory -1.0"),
    ],
)
def test_bad_options_are_told_in_one_line(capsys, word, said):
    ended = run(capsys, bench.main, "remat", word)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {said}: give ")
