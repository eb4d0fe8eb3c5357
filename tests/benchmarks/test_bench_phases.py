"""`python -m mmjax.bench phases`: ways of placing the same samples, side by side."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.phases import wait_bound


def rows(capsys, *words: str) -> dict[str, dict]:
    ended = run(capsys, bench.main, "phases", "--samples=4000", "--steps=10", *words, "--json")
    assert ended.code == 0, ended.err
    return {row["balance"]: row for row in json.loads(ended.out)}


def test_placing_jointly_makes_every_phase_even_and_moves_nothing_with_many_samples(capsys):
    found = rows(capsys, "--per-rank=60")
    order, llm, apart, jointly, bound = found.values()
    assert list(found)[-1] == "bound"
    for phase in ("llm", "vision", "audio"):
        assert jointly[f"worst_{phase}"] <= 0.01 < order[f"mean_{phase}"]
        assert (
            bound[f"mean_{phase}"] <= min(jointly[f"mean_{phase}"], apart[f"mean_{phase}"]) + 1e-9
        )
    assert llm["mean_llm"] <= 0.01 < llm["mean_vision"]
    assert (
        order["wire_share"] == llm["wire_share"] == jointly["wire_share"] == 0 < apart["wire_share"]
    )


def test_nodes_exchange_among_themselves(capsys):
    found = rows(capsys, "--per-rank=8", "--ranks=12", "--ranks-per-node=4")
    assert 0 < found["post"]["wire_share"] < found["apart"]["wire_share"]


@pytest.mark.parametrize(
    ("word", "said"), [("--ranks=0", "--ranks 0"), ("--ranks-per-node=-1", "--ranks-per-node -1")]
)
def test_bad_options_are_told_in_one_line(capsys, word, said):
    ended = run(capsys, bench.main, "phases", word)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {said}: give at least ")


def test_the_bound_of_waiting_is_that_of_the_fullest_possible_rank():
    # A rank's rows take 6; one sample of 8 outweighs the share of 5 that two ranks have of 8 + 2.
    assert wait_bound(6.0, np.array([[8.0], [2.0]]), 2) == pytest.approx(1 - 11 / 14)
