"""`python -m mmjax.rehearse`: what a user reads of a cluster's steps that ran on this machine's one device."""

from __future__ import annotations

import json

import pytest
from commands import TINY, run

from mmjax import rehearse

WORDS = (TINY, "cluster=herex2x1")


@pytest.mark.exhaustive
def test_the_report_sets_steps_and_waits_of_every_balance_beside_the_plan(capsys):
    ended = run(capsys, rehearse.main, *WORDS)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "run    tiny: step 0 of cpux2x1, on one cpu"
    assert lines[1].split("  ")[1:2] == ["balance"]
    assert [line.split()[0] for line in lines[2:5]] == ["none", "llm", "post"]
    assert any(line.startswith("  llm ") and " of 2 " in line for line in lines)
    assert [line[:6].strip() for line in lines if line[0] != " "] == [
        "run",
        "ranks",
        "step",
        "plan",
        "memory",
        "links",
    ]


def test_numbers_are_those_of_every_rank_and_another_device_is_named(capsys):
    words = (TINY, "cluster=a100x2x1", "batch.balance=none")
    ended = run(capsys, rehearse.main, *words, "--json", "--ranks=all")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert list(found) == ["none", "llm", "post"]
    for numbers in found.values():
        assert numbers["ran"] == {"llm": 2}
        assert len(numbers["rank_seconds"]["llm"]) == 2
        assert 0 <= numbers["wait"] < 1
        assert numbers["step_seconds"] == pytest.approx(sum(numbers["causes"].values()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((TINY,), "say on which cluster"),
        ((*WORDS, "--ranks=1"), "--ranks 1: give slowest, all, or a number of at least 2"),
        ((*WORDS, "--ranks=fastest"), "--ranks fastest: give slowest, all, or a number"),
        ((*WORDS, "--steps=0"), "--steps 0: give at least 1"),
        ((*WORDS, "price=2"), "price=2: mmjax.plan says what a run costs"),
        ((TINY, "cluster=herex0"), "there must be at least one node and one device"),
    ],
    ids=["no cluster", "one rank", "unknown ranks", "no steps", "price", "no nodes"],
)
def test_what_cannot_be_rehearsed_is_one_line(words, message, capsys):
    ended = run(capsys, rehearse.main, *words)
    assert ended.code == 2
    assert message in ended.err
