"""`python -m mmjax.bench dispatch`: bytes on the wire follow from the plan, and the exchange really runs."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.data.plan.length_files import omni_corpus

HIDDEN = 16


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.npz"
    np.savez(path, **omni_corpus(4000, 0))
    return path


def measure(capsys, out, *words) -> dict:
    words = (*words, "--scale=16", f"--hidden={HIDDEN}", "--json", f"--out={out}")
    ended = run(capsys, bench.main, "dispatch", *words)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_with_many_samples_a_rank_nothing_travels(capsys, tmp_path, lengths):
    found = measure(capsys, tmp_path / "out.npz", f"--lengths={lengths}", "--per-rank=60")
    assert found["useful_bytes"] == found["wire_bytes"] == found["all_to_alls"] == 0
    assert found["allgather_bytes"] == 7 * found["output_bytes"] > found["two_step_bytes"] > 0


def test_phases_balanced_apart_travel_in_one_all_to_all_per_encoder(capsys, tmp_path, lengths):
    out = tmp_path / "out.npz"
    found = measure(capsys, out, f"--lengths={lengths}", "--per-rank=8", "--locality=off")
    assert found["all_to_alls"] == 2
    assert (
        found["output_bytes"] / 2
        < found["useful_bytes"]
        < found["wire_bytes"]
        < found["two_step_bytes"]
    )
    with np.load(out) as file:
        sample, sample_rank, item_rank = (
            file[key] for key in ("sample", "sample_rank", "item_rank")
        )
    data = omni_corpus(4000, 0)
    length = np.stack([data["vision"][sample], data["audio"][sample]], 1)
    owner, encoder = np.nonzero(length)
    tokens = -(-np.maximum(length[owner, encoder] // 16, 1) // 4)
    away = item_rank != sample_rank[owner]
    assert found["useful_bytes"] == 4 * HIDDEN * tokens[away].sum()
    assert found["output_bytes"] == 4 * HIDDEN * tokens.sum()


def test_bad_options_are_told_in_one_line(capsys, lengths):
    for words, said in (
        (["--devices=0"], "--devices 0: give at least 1"),
        (
            ["--devices=8", "--ranks-per-node=3"],
            "--ranks-per-node 3: choose a divisor of --devices 8",
        ),
        (["--devices=16", "--per-rank=8"], "on a CPU set JAX_NUM_CPU_DEVICES=16"),
    ):
        ended = run(capsys, bench.main, "dispatch", f"--lengths={lengths}", "--scale=16", *words)
        assert ended.code == 2
        assert said in ended.err
        assert len(ended.err.splitlines()) == 1
