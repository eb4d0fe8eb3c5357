"""`python -m mmjax.bench NAME`: every benchmark runs, and says what it promises to."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.corpora import visual_corpus
from mmjax.data.plan import step_plan
from mmjax.data.plan.length_files import omni_corpus


def rows(capsys, *words: str) -> list[dict]:
    ended = run(capsys, bench.main, *words, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.exhaustive
def test_recompute_predicts_every_mix_from_layers_timed_alone(capsys):
    found = {
        r["remat"]: r
        for r in rows(
            capsys, "recompute", "--width=256", "--layers=2", "--length=64", "--seconds=0.2"
        )
    }
    assert {"none", "full", "products", "auto"} < set(found)
    assert found["none"]["gained"] == 1
    assert found["full"]["gained"] == 0
    assert min(r["measured"] for r in found.values()) == 0
    room = (found["none"]["activations"] + found["full"]["activations"]) / 2
    assert found["auto"]["activations"] <= room * (1 + 1e-6)


@pytest.mark.exhaustive
def test_pool_trains_on_late_images_from_workers_and_from_a_ray_cluster(capsys):
    found = {
        r["loader"]: r for r in rows(capsys, "pool", "--seconds=0.05", "--tokens=64", "--steps=9")
    }
    assert list(found) == ["no delay", "2 workers", "pool of 8"]
    assert len({r["images/step"] for r in found.values()}) == 1
    assert all(0 <= r["data_wait_share"] <= 1 for r in found.values())


def test_fill_compares_groupings_on_the_same_data(capsys):
    found = {
        r["grouping"]: r
        for r in rows(
            capsys, "fill", "--seeds=1", "--steps=64", "data.sources.embedded.samples=4000"
        )
    }
    assert list(found) == ["pack", "isf", "none", "none, one shape"]
    assert found["pack"]["shapes"] == found["none, one shape"]["shapes"] == 1
    assert 3 <= found["none"]["shapes"] <= 8
    for module in ("llm", "vision", "audio"):
        fill = {name: r[f"fill_{module}"] for name, r in found.items()}
        assert fill["none, one shape"] < fill["none"] < fill["pack"] <= 1


@pytest.fixture
def a_short_dry_run(monkeypatch):
    monkeypatch.setattr(step_plan, "DRY_RUN_STEPS", 16)


def test_fill_compares_balances_on_ranks(capsys, a_short_dry_run):
    data = [
        "--ranks=4",
        "--seeds=1",
        "--steps=16",
        "data.sources.embedded.samples=2000",
        "batch.size.count=64",
    ]
    found = {(r["grouping"], r["balance"]): r for r in rows(capsys, "fill", *data)}
    assert len(found) == 4 * 3
    for grouping in ("pack", "isf", "none", "none, one shape"):
        none, llm, post = (found[grouping, balance] for balance in ("none", "llm", "post"))
        assert none["samples"] == llm["samples"] == post["samples"]
        assert post["dist_ratio_vision"] < none["dist_ratio_vision"]
        assert post["dist_ratio_audio"] < none["dist_ratio_audio"]
    assert found["none", "llm"]["dist_ratio_llm"] < found["none", "none"]["dist_ratio_llm"]
    assert found["none", "post"]["fill_audio"] > found["none", "none"]["fill_audio"]


def test_ranks_make_as_many_patches_of_images_of_many_sizes_and_their_rows_are_full(
    capsys, a_short_dry_run
):
    """1 to 12 images a sample, of 256 to 1,024 pixels a side, 16 samples a rank."""
    config = f"--config={Path(__file__).with_name('text_to_image.py')}"
    samples = "data.sources.sizes.arguments.samples=3000"
    found = {
        (r["grouping"], r["balance"]): r
        for r in rows(capsys, "fill", config, "--ranks=8", "--seeds=1", "--steps=16", samples)
    }
    for grouping in ("pack", "none"):
        assert found[grouping, "post"]["dist_ratio_picture"] <= 0.03
        assert found[grouping, "post"]["fill_picture"] >= 0.9
    assert found["none", "none"]["dist_ratio_picture"] > 0.1


def made_lengths(folder: Path, samples: int = 4000) -> Path:
    np.savez(folder / "made.npz", **omni_corpus(samples, 0))
    return folder / "made.npz"


def test_fill_of_lengths_from_a_file_is_full_in_every_phase_with_pack_or_post(
    capsys, tmp_path, a_short_dry_run
):
    options = [
        "--ranks=8",
        "--per-rank=16",
        "--scale=4",
        "--steps=12",
        f"--lengths={made_lengths(tmp_path)}",
    ]
    found = {(r["grouping"], r["balance"]): r for r in rows(capsys, "fill", *options)}
    assert list(found) == [(g, b) for g in ("pack", "none") for b in ("none", "llm", "post")]
    post = found["pack", "post"]
    assert post["shapes"] == 1
    for module in ("llm", "vision", "audio"):
        assert 0.95 < post[f"aligned_{module}"] <= 1
        assert post[f"fill_{module}"] <= post[f"aligned_{module}"]
        assert found["none", "post"][f"aligned_{module}"] > 0.85
        # in columns all are equal
        assert found["pack", "none"][f"dist_ratio_{module}"] == post[f"dist_ratio_{module}"]
    assert post["width_vision"] == post["width_audio"] == 0
    assert found["none", "none"]["aligned_audio"] < 0.8 * found["none", "post"]["aligned_audio"]
    for grouping in ("pack", "none"):
        assert (
            found[grouping, "none"]["width_vision"] == found[grouping, "llm"]["width_vision"] == 0
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks=0"], "--ranks 0: give at least 1"),
        (["--steps=0"], "--steps 0: give at least 1"),
        (["--scale=0"], "--scale 0: give at least 1"),
        (["--per-rank=0"], "--per-rank 0: give at least 1"),
        (["--ranks=8", "--ranks-per-node=3"], "--ranks-per-node 3: choose a divisor of --ranks 8"),
        (["--lengths=nowhere.npz"], "--lengths nowhere.npz: not a readable .npz file"),
    ],
)
def test_fill_says_which_option_is_wrong(capsys, words, message):
    ended = run(capsys, bench.main, "fill", *words)
    assert ended.code != 0
    assert message in ended.err


def planned(capsys, *words: str) -> dict:
    return rows(capsys, "planning", *words)


def test_planning_with_pack_fills_all_modules_and_sends_nothing(capsys, tmp_path):
    out = tmp_path / "steps.npz"
    lengths = f"--lengths={made_lengths(tmp_path)}"
    found = planned(capsys, lengths, "--per-rank=16", "--steps=4", f"--out={out}")
    assert found["wire_share"] == 0
    assert 0 <= found["longest_wait"] <= 10
    assert found["overdispersion"] is None
    with np.load(out) as written:
        assert found["steps"] == len(written["used"]) == written["step"].max() + 1
        fill = written["used"] / written["room"]
        used, room = written["used"].sum(0), written["room"].sum(0)
        assert len(
            set(zip(written["sample"].tolist(), written["step"].tolist(), strict=True))
        ) == len(written["step"])
    for k, module in enumerate(("llm", "vision", "audio")):
        assert found["fill"][module] == pytest.approx(used[k] / room[k])
        assert found["worst_fill"][module] == pytest.approx(fill[:, k].min())
        assert found["fill"][module] > 0.93
        assert 0 <= found["dist_ratio"][module] < 0.1
    for name in ("grouping_seconds_per_step", "placing_seconds_per_step", "first_step_seconds"):
        assert found[name] > 0


def test_planning_reads_tiles_and_sources_and_balances_what_is_not_packed(
    capsys, tmp_path, a_short_dry_run
):
    np.savez(tmp_path / "tiles.npz", **visual_corpus(3000, 0))
    words = [f"--lengths={tmp_path / 'tiles.npz'}", "--per-rank=8", "--grouping=none", "--steps=4"]
    post, none = (planned(capsys, *words, f"--balance={balance}") for balance in ("post", "none"))
    assert list(post["fill"]) == ["llm", "vision"]
    assert post["overdispersion"] == none["overdispersion"] > 0
    assert post["dist_ratio"]["vision"] < none["dist_ratio"]["vision"]
    assert none["wire_share"] == none["longest_wait"] == 0
    assert post["steps"] == 4


def test_attention_reports_both_backends_against_dense(capsys):
    dense, blockwise, smaller = rows(
        capsys, "attention", "--tokens=512", "--repeats=1", "--blocks", "128", "64"
    )
    assert dense["speedup"] == dense["memory_saving"] == 1
    assert blockwise["memory_saving"] > 1
    assert [row["block"] for row in (dense, blockwise, smaller)] == [None, 128, 64]


def test_headers_are_read_of_local_and_of_late_images_and_of_videos(capsys):
    options = ("--images=40", "--videos=20", "--delay=0.01", "--repeats=1")
    measured = rows(capsys, "headers", *options)
    assert [row["headers"] for row in measured] == ["local", "after 0.01 s", "mp4", "mkv", "webm"]
    for row in measured:
        assert row["files_per_second"] > 0 < row["ratio"]


def test_compile_reports_the_ratio_of_many_layers_to_few(capsys):
    few, many = rows(capsys, "compile", "--layers", "2", "6", "--repeats=1")
    assert many["ratio"] == pytest.approx(many["seconds"] / few["seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--per-rank=0"], "--per-rank 0: give at least 1"),
        (["--ranks-per-node=3"], "--ranks-per-node 3: choose a divisor of --ranks 8"),
        (["--seed=-1"], "--seed -1: give at least 0"),
    ],
)
def test_planning_says_which_option_is_wrong(capsys, tmp_path, words, message):
    ended = run(capsys, bench.main, "planning", f"--lengths={made_lengths(tmp_path)}", *words)
    assert ended.code == 2
    assert message in ended.err


def test_a_table_is_printed_without_json(capsys):
    ended = run(capsys, bench.main, "attention", "--tokens=256", "--repeats=1")
    header = ["backend", "block", "milliseconds", "temporary_mb", "speedup", "memory_saving"]
    assert ended.out.splitlines()[0].split() == header


@pytest.mark.exhaustive
def test_coordination_measures_process_0_with_a_real_client_for_each_process(capsys):
    few, more = rows(capsys, "coordination", "--processes", "4", "32")
    assert (few["processes"], more["processes"]) == (4, 32)
    assert 0 < few["requests_per_second"] < more["requests_per_second"]
    assert more["memory_mb"] > 0
