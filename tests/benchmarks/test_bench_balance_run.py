"""`python -m mmjax.bench balance-run`: real processes train the same steps in four ways, and a picture of the plan."""

import json
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.balance_steps import (
    MODEL,
    MODES,
    PHASES,
    make_trial,
    predicted_gain,
    samples_of,
    scaled,
)
from mmjax.benchmarks.planned_steps import positions_per_rank
from mmjax.data.media.patches import item_input
from mmjax.data.plan.length_files import omni_corpus
from mmjax.data.plan.length_index import build_index


@pytest.fixture(scope="module")
def source():
    return samples_of(scaled(omni_corpus(3000, 0), 64))


@pytest.fixture(scope="module")
def index(source):
    return build_index({"lengths": source}, MODEL.encoders)


def test_samples_are_as_long_as_the_lengths_say(source, index):
    found = omni_corpus(3000, 0)
    for sample in range(60):
        facts = source.facts(sample)
        for number, (encoder, _) in enumerate(facts.items):
            prepared = item_input(MODEL.encoders[encoder], source.item(sample, number))
            wanted = max(int(found[encoder][sample]) // 64, 1)
            assert wanted <= prepared.valid.sum() <= wanted + 1
        assert [encoder for encoder, _ in facts.items] == [
            e for e in PHASES[1:] if found[e][sample]
        ]
        assert index.text_tokens[sample] == facts.text_tokens >= 1
        assert index.llm_tokens[sample] >= max(int(found["llm_tokens"][sample]) // 64, 1)


def test_all_modes_have_the_same_samples_in_one_ladder_and_post_is_the_most_even(index, tmp_path):
    trial = make_trial(index, tmp_path / "lengths.npz", 8, 16, 0)
    plans = {mode: trial.plans(mode, 12) for mode in MODES}
    # one more holds any sample alone
    assert all(len(layout.shapes) <= 8 + 1 for layout in trial.layouts.values())
    assert trial.layouts["none"] == trial.layouts["llm"] == trial.layouts["post"]
    waits = {mode: trial.waits(of) for mode, of in plans.items()}
    # dense attention computes whole rows, whatever is in them
    assert all(w.wait == 0 for w in waits.values())
    padding = {mode: w.padding for mode, w in waits.items()}
    assert padding["post"] < 0.15 < 0.25 < padding["llm"] < padding["none"]
    assert predicted_gain(trial, 12) > 1.2
    for step in range(12):
        none = plans["none"][step]
        for mode in MODES:
            plan = plans[mode][step]
            assert np.array_equal(np.sort(none.samples()), np.sort(plan.samples()))
            assert np.array_equal(positions_per_rank(none).sum(1), positions_per_rank(plan).sum(1))
            assert all(m.shape in trial.layouts[mode].shapes for m in plan.microbatches)


def test_the_picture_is_whole_and_small_and_shows_what_was_planned(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    words = ("--samples=3000", "--steps=0", f"--picture={path}", "--picture-steps=20", "--json")
    ended = run(capsys, bench.main, "balance-run", *words)
    assert ended.code == 0, ended.err
    ratios = json.loads(ended.out)
    said = "".join(ElementTree.parse(path).getroot().itertext())
    assert path.stat().st_size < 200_000
    for phase in PHASES:
        none, llm, post = (
            ratios[f"picture_dist_ratio_{mode}_{phase}"] for mode in ("none", "llm", "post")
        )
        assert post < none
        assert phase == "llm" or post < llm
        assert all(f"dist ratio {ratio:.3f}" in said for ratio in (none, llm, post))
    assert "8 ranks" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes=0"], "--processes 0: give at least 1"),
        (["--per-rank=0"], "--per-rank 0: give at least 1"),
        (["--scale=0"], "--scale 0: give at least 1"),
        (["--steps=0"], "--steps 0: give at least 1, or 0 together with --picture"),
        (["--seed=-1"], "--seed -1: give at least 0"),
        (["--picture=a.pdf"], "--picture a.pdf: name a file that ends in .png or .svg"),
        (
            ["--picture=no/such/folder/a.svg"],
            "--picture no/such/folder/a.svg: name a file in a folder that exists",
        ),
        (["--lengths=no_such.npz"], "--lengths no_such.npz: not a readable .npz file"),
    ],
)
def test_bad_options_are_told_in_one_line(capsys, words, said):
    ended = run(capsys, bench.main, "balance-run", *words)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.exhaustive
def test_a_process_that_fails_ends_the_command_with_its_message(capfd, monkeypatch):
    jax.devices()  # of this process, which plans and shall not fail
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=true")
    with pytest.raises(SystemExit) as ended:
        bench.main(["balance-run", "--samples=3000", "--steps=1", "--processes=2"])
    assert ended.value.code == 1
    assert "xla_no_such_flag" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_processes_train_the_same_steps_in_all_modes_and_compile_nothing_meanwhile(
    capsys, tmp_path
):
    out = tmp_path / "out.npz"
    words = (
        "--samples=3000",
        "--steps=3",
        "--per-rank=4",
        "--processes=2",
        "--json",
        f"--out={out}",
    )
    ended = run(capsys, bench.main, "balance-run", *words)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["programs_compiled"] == 0
    assert 1 <= found["shapes"] <= 2 * 9
    with np.load(out) as file:
        seconds, flops, tokens = file["seconds"], file["flops"], file["tokens"]
    assert seconds.shape == flops.shape == (len(MODES), 3)
    for row, mode in enumerate(MODES):
        assert found[f"step_seconds_{mode}"] == pytest.approx(np.median(seconds[row]))
        assert found[f"useful_tokens_per_second_{mode}"] == pytest.approx(
            np.median(tokens / seconds[row])
        )
        assert 0 <= found[f"wait_{mode}"] < 1
        assert 0 <= found[f"padding_{mode}"] < 1
    assert found["gain_post_over_none"] == pytest.approx(np.median(seconds[0] / seconds[3]))
    assert found["predicted_gain_post_over_none"] == pytest.approx(np.median(flops[0] / flops[3]))
    assert found["predicted_gain_64x16"] > found["predicted_gain_8x16"] > 1
