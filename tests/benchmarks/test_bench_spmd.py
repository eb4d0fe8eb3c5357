"""`python -m mmjax.bench spmd`: whole steps beside what the planner predicts of them."""

from __future__ import annotations

import json

import pytest
from commands import run

from mmjax import bench


@pytest.mark.exhaustive
def test_spmd_compares_steps_of_every_number_of_microbatches_with_their_prediction(capsys):
    ended = run(
        capsys,
        bench.main,
        "spmd",
        "--width=64",
        "--microbatches",
        "1",
        "2",
        "--seconds=0",
        "--json",
    )
    assert ended.code == 0, ended.err
    one, two = json.loads(ended.out)
    assert [(row["devices"], row["microbatches"]) for row in (one, two)] == [(8, 1), (8, 2)]
    for row in (one, two):
        assert row["ratio"] == pytest.approx(row["predicted"] / row["measured"])
        assert 0 < row["layers"] + row["update"] < row["predicted"]
    assert two["layers"] == pytest.approx(2 * one["layers"])
    assert two["update"] == one["update"]


def test_spmd_says_which_option_is_wrong(capsys):
    ended = run(capsys, bench.main, "spmd", "--width=100")
    assert ended.code == 2
    assert "--width must be a multiple of 64" in ended.err
