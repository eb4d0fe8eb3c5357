"""`python -m mmjax.bench grouping`: what it prints follows from what it writes and from the lengths it was given."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.balance.parts import dist_ratio
from mmjax.benchmarks.corpora import internvl_corpus, visual_corpus
from mmjax.benchmarks.grouping import overdispersion, row_correlation


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.npz"
    np.savez(path, **visual_corpus(6000, 0))
    return path


def measure(capsys, tmp_path, *words: str) -> tuple[dict, dict]:
    out = tmp_path / "out.npz"
    ended = run(capsys, bench.main, "grouping", *words, "--json", f"--out={out}")
    assert ended.code == 0, ended.err
    with np.load(out) as file:
        return json.loads(ended.out), {key: file[key] for key in file.files}


@pytest.mark.parametrize("method", ["random", "length", "device", "isf", "pack"])
def test_every_figure_follows_from_the_rows_and_the_lengths(capsys, tmp_path, lengths, method):
    figures, result = measure(
        capsys, tmp_path, f"--lengths={lengths}", f"--method={method}", "--ranks=4"
    )
    data, row = visual_corpus(6000, 0), result["row"]
    assert figures["samples_in"] == figures["samples_grouped"] == 6000
    assert figures["samples_oversize"] == 0
    rows = row.max() + 1
    assert figures["rows"] == rows >= figures["rows_lower_bound"]
    assert figures["samples_per_row"] == pytest.approx(6000 / rows)
    items, tokens = (np.bincount(row, data[key], rows) for key in ("vision_items", "llm_tokens"))
    assert figures["max_items"] == result["max_items"] >= items.max()
    assert figures["max_tokens"] == result["max_tokens"] >= tokens.max()
    assert figures["fill_items"] == pytest.approx(items.mean() / result["max_items"])
    assert figures["fill_tokens"] == pytest.approx(tokens.mean() / result["max_tokens"])
    for name, total in (("items", items), ("tokens", tokens)):
        steps = total[: rows // 4 * 4].reshape(-1, 4)
        assert figures[f"dist_ratio_{name}"] == pytest.approx(dist_ratio(steps).mean())
    assert figures["overdispersion"] == pytest.approx(overdispersion(data["source"], row // 4))
    assert (figures["pad_ratio"] > 0) == (method in ("random", "length", "device"))
    assert ("iterations" in figures) == (method == "isf")


@pytest.mark.exhaustive
def test_rows_are_shuffled_by_the_seed_alone(capsys, tmp_path, lengths):
    first, again, other = (
        measure(capsys, tmp_path, f"--lengths={lengths}", f"--seed={seed}")[1]["row"]
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_oversize_samples_are_listed_and_not_dropped(capsys, tmp_path, lengths):
    for method in ("isf", "pack"):
        figures, result = measure(
            capsys, tmp_path, f"--lengths={lengths}", f"--method={method}", "--max-items=4"
        )
        five = visual_corpus(6000, 0)["vision_items"] == 5
        assert np.array_equal(result["row"] < 0, five)
        assert figures["samples_oversize"] == five.sum()


@pytest.mark.exhaustive
def test_auto_budgets_hold_the_samples_asked_for(capsys, tmp_path, lengths):
    for method in ("isf", "pack"):
        words = (
            f"--method={method}",
            "--max-items=auto",
            "--max-tokens=auto",
            "--samples-per-row=6",
        )
        figures, _ = measure(capsys, tmp_path, f"--lengths={lengths}", *words)
        assert 5.9 <= figures["samples_per_row"] <= 7.1
        assert figures["samples_oversize"] == 0


def test_several_files_are_several_sources(capsys, tmp_path, lengths):
    plain = tmp_path / "plain.npz"
    np.savez(plain, vision_items=np.arange(100) % 5, llm_tokens=np.full(100, 300))
    figures, _ = measure(capsys, tmp_path, "--lengths", str(plain), str(plain))
    assert figures["samples_in"] == 200
    assert figures["overdispersion"] > 0
    assert measure(capsys, tmp_path, f"--lengths={plain}")[0]["overdispersion"] is None


def test_bad_input_is_one_line_that_names_it(capsys, tmp_path, lengths):
    broken = tmp_path / "broken.npz"
    broken.write_text("no")
    unlike, negative, no_text = (
        tmp_path / "unlike.npz",
        tmp_path / "negative.npz",
        tmp_path / "no_text.npz",
    )
    np.savez(unlike, vision_items=np.arange(3), llm_tokens=np.arange(4))
    np.savez(negative, vision_items=np.arange(3), llm_tokens=-np.arange(3))
    np.savez(no_text, vision_items=np.arange(3), llm_tokens=np.arange(3))
    for words, said in (
        ([f"--lengths={tmp_path / 'none.npz'}"], "none.npz"),
        ([f"--lengths={broken}"], "broken.npz: not a readable .npz file"),
        ([f"--lengths={unlike}"], "'llm_tokens' must be integers [3]"),
        ([f"--lengths={negative}"], "no negative length"),
        ([f"--lengths={no_text}"], "sample 0 has no llm_tokens"),
        (["--ranks=0"], "--ranks 0: give at least 1"),
        (["--max-items=0"], "--max-items 0: give a number of at least 1, or auto"),
        ([f"--lengths={lengths}", "--max-tokens=9"], "--max-tokens"),
        (
            ["--samples=50", f"--out={tmp_path / 'no' / 'out.npz'}"],
            "name a file in a folder that exists",
        ),
    ):
        ended = run(capsys, bench.main, "grouping", *words)
        assert ended.code == 2, words
        assert said in ended.err.splitlines()[-1]


def test_the_table_stands_beside_the_papers_figures(capsys, lengths):
    ended = run(capsys, bench.main, "grouping", f"--lengths={lengths}", "--method=isf")
    assert ended.out.splitlines()[0].split() == ["figure", "measured", "published"]
    assert any(
        line.split() == ["dist_ratio_tokens", line.split()[1], "0.14"]
        for line in ended.out.splitlines()
    )


def test_row_correlation_tells_sorted_random_and_complementary_rows_apart():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 3000)
    row = np.arange(3000) // 2
    assert row_correlation(np.repeat(lengths[:1500], 2), row) == pytest.approx(1)
    assert abs(row_correlation(lengths, row)) < 0.06
    assert row_correlation(
        np.stack([lengths[:1500], 100 - lengths[:1500]], 1).ravel(), row
    ) == pytest.approx(-1, abs=0.01)
    assert row_correlation(lengths, np.arange(3000)) == 0
    assert row_correlation(np.array([]), np.array([], int)) == 0


def test_overdispersion_is_one_for_a_shuffle_and_large_for_blocks_of_one_source():
    rng = np.random.default_rng(0)
    source, step = rng.choice(3, 24 * 200, p=[0.6, 0.3, 0.1]), np.repeat(np.arange(200), 24)
    assert 0.8 < overdispersion(source, step) < 1.3
    assert overdispersion(np.sort(source), step) > 15
    alternating = np.tile([0, 0, 1], 8 * 200)
    assert overdispersion(alternating, step) == pytest.approx(0)
    assert overdispersion(np.zeros(48, int), step[:48]) == 0


def test_modelled_lengths_of_internvls_training_set_have_its_means_and_are_the_same_by_a_seed():
    lengths = internvl_corpus(50_000, 3)
    assert lengths["vision_items"].mean() == pytest.approx(1.826, rel=0.01)
    assert lengths["llm_tokens"].mean() == pytest.approx(777, rel=0.01)
    assert lengths["llm_tokens"].min() >= 37
    assert lengths["llm_tokens"].max() == 4096
    assert all(np.array_equal(lengths[key], internvl_corpus(50_000, 3)[key]) for key in lengths)
