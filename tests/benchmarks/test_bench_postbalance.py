"""`python -m mmjax.bench postbalance`: its figures follow from what it writes, and bad options are told in a line."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.baselines.postbalance import rank_costs
from mmjax.data.plan.length_files import omni_corpus

SMALL = ("--ranks=16", "--per-rank=30", "--seed=3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "omni.npz"
    np.savez(path, **omni_corpus(3000, 0))
    return path


def measure(capsys, *words) -> dict:
    ended = run(capsys, bench.main, "postbalance", *map(str, words), "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize("method", ["paper", "best"])
@pytest.mark.parametrize("cost", ["packed", "padded", "quadratic", "conv"])
def test_figures_follow_from_the_written_assignment(capsys, corpus, tmp_path, cost, method):
    out = tmp_path / "out.npz"
    found = measure(
        capsys,
        "--lengths",
        corpus,
        "--phase=audio",
        *SMALL,
        f"--cost={cost}",
        f"--method={method}",
        "--out",
        out,
    )
    with np.load(out) as written:
        sample, source, rank = written["sample"], written["source"], written["rank"]
    assert np.array_equal(sample, np.random.default_rng(3).choice(3000, 480, replace=False))
    assert np.array_equal(source, np.arange(480) // 30)
    length = omni_corpus(3000, 0)["audio"][sample]
    present = length > 0
    assert np.array_equal(rank >= 0, present)
    own = length + (1e-4 * length**2.0 if cost in ("quadratic", "conv") else 0)
    mean = own.sum() / 16
    for key, of in (("before", source), ("after", rank)):
        costs = rank_costs(cost, length[present], of[present], 16, 1e-4)
        assert found[key] == pytest.approx(costs.max() / mean)
    assert found["lower_bound"] <= found["after"] <= found["before"]
    if cost == "packed":
        assert found["gap"] == np.bincount(rank[present], length[present]).max() - np.ceil(mean)
        assert 0 <= found["gap_bound"] <= found["gap"]
    else:
        assert found["gap"] is None
    assert found["milliseconds"] > 0
    assert found["sort_milliseconds"] > 0


def test_equal_counts_are_kept(capsys, corpus, tmp_path):
    out = tmp_path / "out.npz"
    found = measure(capsys, "--lengths", corpus, *SMALL, "--equal-counts", "--out", out)
    with np.load(out) as written:
        assert np.all(np.bincount(written["rank"]) == 30)
    assert found["gap"] <= 1


def test_lengths_are_made_without_a_file_and_drawn_twice_where_they_are_few(capsys, tmp_path):
    out = tmp_path / "out.npz"
    measure(capsys, "--samples=100", *SMALL, "--out", out)
    with np.load(out) as written:
        assert len(written["sample"]) == 480
        assert written["sample"].max() < 100


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks=0"], "--ranks 0"),
        (["--per-rank=0"], "--per-rank 0"),
        (["--samples=0"], "--samples 0"),
        (["--seed=-1"], "--seed -1"),
        (["--equal-counts", "--method=paper"], "--equal-counts"),
        (["--tolerance=-1"], "--tolerance -1"),
        (["--lengths", "nowhere.npz"], "--lengths nowhere.npz"),
    ],
)
def test_bad_options_end_with_one_line_that_names_them(capsys, words, told):
    ended = run(capsys, bench.main, "postbalance", *words)
    assert ended.code == 2
    assert told in ended.err
    assert ended.err.count("\n") == 1


def test_a_phase_that_no_drawn_sample_has_is_told(capsys, tmp_path):
    path = tmp_path / "silent.npz"
    np.savez(path, audio=np.zeros(50, int), llm_tokens=np.ones(50, int))
    ended = run(capsys, bench.main, "postbalance", "--lengths", str(path), "--phase=audio", *SMALL)
    assert ended.code == 2
    assert "--phase audio" in ended.err
