"""`python -m mmjax.bench nodewise`: its figures follow from what it writes, and bad options are told in a line."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.baselines.nodewise import inter_node
from mmjax.data.plan.length_files import omni_corpus

SMALL = ("--ranks=30", "--ranks-per-node=4", "--per-rank=40", "--seed=3")

# No training runs this: by default the examples of docs/balance.md do.
pytestmark = pytest.mark.exhaustive


def measure(capsys, *words) -> dict:
    ended = run(capsys, bench.main, "nodewise", *map(str, words), "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize("method", ["best", "ilp"])
@pytest.mark.parametrize("phase", ["llm_tokens", "audio"])
def test_figures_follow_from_the_written_assignments(capsys, tmp_path, method, phase):
    path, out = tmp_path / "omni.npz", tmp_path / "out.npz"
    np.savez(path, **omni_corpus(3000, 0))
    words = (
        "--lengths",
        path,
        *SMALL,
        "--phase",
        phase,
        "--method",
        method,
        "--time-limit=1",
        "--out",
        out,
    )
    found = measure(capsys, *words)
    with np.load(out) as written:
        sample, source, rank, baseline = (
            written[key] for key in ("sample", "source", "rank", "baseline_rank")
        )
    assert np.array_equal(sample, np.random.default_rng(3).choice(3000, 1200, replace=False))
    assert np.array_equal(source, np.arange(1200) // 40)
    length = omni_corpus(3000, 0)[phase][sample]
    present = length > 0
    assert np.array_equal(rank >= 0, present)
    assert np.array_equal(baseline >= 0, present)

    length, source, rank, baseline = (
        length[present],
        source[present],
        rank[present],
        baseline[present],
    )
    after, before = (inter_node(length, source, to, 30, 4) for to in (rank, baseline))
    assert found["sent_max_reduction"] == pytest.approx(1 - after.sent.max() / before.sent.max())
    assert found["received_max_reduction"] == pytest.approx(
        1 - after.received.max() / before.received.max()
    )
    assert found["total_reduction"] == pytest.approx(1 - after.total / before.total)
    cost = np.bincount(rank, length, 30)
    assert found["after"] == pytest.approx(cost.max() / cost.mean())
    assert found["milliseconds"] > 0
    for key in ("sent_max", "received_max", "total"):
        assert found[f"{key}_reduction"] <= found[f"{key}_bound"]
    if method == "ilp":
        assert isinstance(found["optimal"], bool)
        loads = (np.sort(np.bincount(to, length, 30)) for to in (rank, baseline))
        assert np.array_equal(*loads)  # batches change places, not what they hold
    else:
        assert found["total_reduction"] > 0.85


def test_too_few_samples_are_drawn_twice(capsys, tmp_path):
    out = tmp_path / "out.npz"
    measure(capsys, "--samples=100", *SMALL, "--out", out)
    with np.load(out) as written:
        assert len(written["sample"]) == 1200
        assert written["sample"].max() < 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks=0"], "--ranks 0: give at least 1"),
        (["--per-rank=0"], "--per-rank 0: give at least 1"),
        (["--ranks=8", "--ranks-per-node=8"], "--ranks-per-node 8: give fewer than --ranks"),
        (["--ranks-per-node=0"], "--ranks-per-node 0: give at least 1"),
        (["--seed=-1"], "--seed -1: give at least 0"),
        (["--tolerance=nan"], "--tolerance nan: give at least 0"),
        (["--tolerance=2"], "--tolerance 2.0: give at most 1"),
        (["--time-limit=0"], "--time-limit 0.0: give more than 0"),
        (["--lengths", "nowhere.npz"], "--lengths nowhere.npz: not a readable .npz file"),
        (["--samples=0"], "--samples 0: give at least 1"),
    ],
)
def test_bad_options_are_told_in_one_line(capsys, words, message):
    ended = run(capsys, bench.main, "nodewise", *words)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_phase_that_no_drawn_sample_has_is_told(capsys, tmp_path):
    path = tmp_path / "silent.npz"
    np.savez(path, audio=np.zeros(50, np.int64))
    ended = run(capsys, bench.main, "nodewise", "--lengths", str(path), "--phase=audio", *SMALL)
    assert ended.code == 2
    assert "--phase audio: no drawn sample takes part in it" in ended.err
