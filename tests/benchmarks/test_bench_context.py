"""`python -m mmjax.bench context` measures what it says, for every mask and method."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.baselines.token_blocks import KINDS
from mmjax.benchmarks.context import METHODS

# No training runs this: by default the examples of docs/balance.md do.
pytestmark = pytest.mark.exhaustive

SMALL = ("--tokens=32768", "--ranks=16")


def figures(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    ended = run(capsys, bench.main, "context", *words, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_figures_follow_from_what_out_writes(capsys, tmp_path, mask, method):
    out = tmp_path / "context.npz"
    found = figures(capsys, *SMALL, "--mask", mask, "--method", method, "--out", out)
    with np.load(out) as file:
        rank, work = file["rank"], file["workload"]
    assert rank.shape == work.shape == (256,)
    load, counts = np.bincount(rank, work, 16), np.bincount(rank, minlength=16)
    assert found["excess"] == pytest.approx(load.max() / load.mean() - 1)
    assert (found["counts_min"], found["counts_max"]) == (counts.min(), counts.max())
    assert found["milliseconds"] > 0
    assert found["workload_milliseconds"] > 0


@pytest.mark.parametrize("mask", KINDS)
def test_equal_counts_are_far_evener_than_what_does_not_look_at_the_work(capsys, mask):
    excess = {m: figures(capsys, *SMALL, "--mask", mask, "--method", m)["excess"] for m in METHODS}
    assert excess["equal"] <= 1e-3
    assert excess["equal"] <= excess["lpt"] <= 1e-2
    assert min(excess[m] for m in ("zigzag", "ring", "random")) > 0.05


def test_the_default_row_has_a_million_tokens_and_meets_its_bar(capsys):
    found = figures(capsys)
    assert found["counts_min"] == found["counts_max"] == 128
    assert found["excess"] <= 1e-4


def test_the_table_shows_the_papers_time_beside_ours(capsys):
    ended = run(capsys, bench.main, "context", *SMALL)
    line = next(line for line in ended.out.splitlines() if line.startswith("milliseconds"))
    assert line.endswith("< 1 (Cornstarch 4.3.2)")


@pytest.mark.parametrize("word", ["--tokens=63", "--block=0", "--ranks=0", "--seed=-1"])
def test_values_that_cannot_be_are_refused_in_one_line(capsys, word):
    ended = run(capsys, bench.main, "context", word)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {word.replace('=', ' ')}: give ")
    assert ended.err.count("\n") == 1
