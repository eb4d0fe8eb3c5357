"""`python -m mmjax.bench gpu`: every section runs in small on a CPU, and a second run goes on."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.batch import allowed
from mmjax.benchmarks import gpu_kernels, peer
from mmjax.benchmarks.gpu import SECTIONS, markdown
from mmjax.benchmarks.gpu_kernels import (
    TINY,
    delta_net,
    image_mask,
    text_mask,
)
from mmjax.benchmarks.gpu_peer import measure_race, race_figures
from mmjax.benchmarks.gpu_steps import (
    KINDS,
    MODELS,
    measure_products,
    product_forms,
    row_lengths,
    samples_of,
    step_products,
    top_kernels,
)
from mmjax.benchmarks.peer_data import DATA
from mmjax.cost.table import parameters


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch):
    """For the processes of sections."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_without_a_gpu_it_is_one_line(capsys, tmp_path):
    ended = run(capsys, bench.main, "gpu", f"--results={tmp_path / 'gpu.json'}")
    assert ended.code == 2
    assert ended.err.startswith(
        "error: bench gpu: JAX finds no GPU here, only cpu; install it with: pip install "
    )
    assert ended.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_section_that_is_done_is_not_run_again_and_one_that_failed_is(capsys, tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"decoder": {"done": 1.0}, "products": {"error": "out of memory"}}))
    ended = run(
        capsys,
        bench.main,
        "gpu",
        "--tiny",
        "--sections=products,decoder",
        f"--results={path}",
        "--json",
    )
    assert ended.code == 0, ended.err
    found = json.loads(path.read_text())
    assert found["decoder"] == {"done": 1.0}
    assert found["products"]["all of a step bfloat16, nothing recomputed, s"] > 0
    assert "error" not in found["products"]
    assert {"section": "decoder", "figure": "done", "value": 1.0} in json.loads(ended.out)
    assert "| decoder | done | 1 |" in path.with_suffix(".md").read_text().splitlines()
    path.write_text(json.dumps(found | {"device": found["device"] | {"sizes": "full"}}))
    ended = run(capsys, bench.main, "gpu", "--tiny", f"--results={path}")
    assert (ended.code, ended.err) == (
        2,
        f"error: --results {path} holds full sizes on cpu; name another file\n",
    )


@pytest.mark.exhaustive
def test_every_section_runs_in_small(capsys, tmp_path):
    path = tmp_path / "gpu.json"
    ended = run(capsys, bench.main, "gpu", "--tiny", f"--results={path}")
    assert ended.code == 0, ended.err
    found = json.loads(path.read_text())
    assert list(found) == ["device", *SECTIONS]
    assert {name: figures["error"] for name, figures in found.items() if "error" in figures} == {}
    assert found["exactness"]["repeatable to the bit"]
    assert all(
        error < 1e-5 for figure, error in found["exactness"].items() if "float32, error" in figure
    )
    assert found["step_7b"]["layers of the LLM"] == "2 of 2"
    assert found["step_7b"]["MFU"] > 0
    assert len([figure for figure in found["step_7b"] if figure.lstrip()[0].isdigit()]) == 20
    assert "cuDNN" in "".join(found["text_attention"])
    races = [figures for name, figures in found.items() if name.startswith("peer_")]
    assert len(races) == 4
    for race in races:
        assert len([name for name in race if name.endswith("at once, sdpa, tokens/s")]) == 4
        assert race["mmjax / best of the Trainer, tokens/s"] > 0
        ours = race["mmjax, loss of its first samples"]
        assert race["Trainer, loss of mmjax's first samples"] == pytest.approx(ours, rel=1e-3)
    assert found["rows"]["probe of one sample, ms"] > 0
    assert "all: median error" in found["rows"] or "predicted" in found["rows"]


def test_products_of_noise_have_a_rate_in_all_forms():
    figures = measure_products(TINY)
    rates = [str(figure).split(" / ") for name, figure in figures.items() if "TFLOP/s" in name]
    assert len(rates) == 14  # seven products in bfloat16 and in FP8
    assert all(len(forms) == 3 and min(map(float, forms)) > 0 for forms in rates)
    assert figures["all of a step FP8, nothing recomputed, s"] > 0


def test_forms_of_a_product_are_its_output_and_the_gradients_of_rows_and_weights():
    x, weight, d_out = (
        np.random.default_rng(0).normal(size=size) for size in ((5, 3), (3, 4), (5, 4))
    )
    found = [form(x, weight, d_out) for form in product_forms(jnp.matmul)]
    for result, expected in zip(found, (x @ weight, d_out @ weight.T, x.T @ d_out), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_products_of_a_step_are_those_of_all_parameters():
    model = MODELS["7b"]
    channels = {
        name: count * inputs * outputs
        for name, (_, inputs, outputs, count) in step_products(model, 1, 1).items()
    }
    vision = sum(size for name, size in channels.items() if name.startswith("vision"))
    llm = sum(channels.values()) - vision + model.llm.vocab * model.llm.width  # the embedding
    counted = parameters(model)
    assert llm == pytest.approx(counted["llm"], rel=1e-3)
    assert vision == pytest.approx(counted["vision"], rel=0.01)  # its MLP is padded by 1 %


@pytest.mark.exhaustive
def test_a_delta_rule_is_compared_with_a_loop_over_tokens_and_one_that_leaks_is_seen(monkeypatch):
    exact = {name: value for name, value in delta_net(TINY).items() if "error" in name}
    assert len(exact) == 24
    assert max(value for name, value in exact.items() if "float32" in name) < 1e-3
    assert exact["float32, repeated tokens, error of output"] < 1e-5
    assert 1e-4 < exact["bfloat16, error of output"] < 0.01  # its outputs are rounded
    rule = gpu_kernels.gated_delta_rule
    monkeypatch.setattr(gpu_kernels, "gated_delta_rule", lambda *x: rule(*x[:5], 0 * x[5]))
    leaking = delta_net(TINY)
    assert leaking["float32, repeated tokens, error of output"] > 1e-3
    assert leaking["float32, repeated tokens, error of v"] > 1e-3


def replies(tokens: int, seconds: float, turns: int = 3, **form: Any) -> list[dict[str, Any]]:
    """Of a training whose last turn has so many tokens and takes so long."""
    counted = {"samples": 8, "tokens": tokens, "positions": 2 * tokens, "loss": 9.0, "GB": 50.0}
    clocks = (0.0, 30.0, 40.0, 40.0 + seconds)
    return [counted | form | {"clock": clock} for clock in clocks[: 1 + turns]]


@pytest.mark.exhaustive
def test_a_rank_of_8_is_measured_where_there_are_8_devices_and_else_it_says_so(monkeypatch):
    command = [sys.executable, "-m", "mmjax.benchmarks.gpu", "rank_of_8", "--tiny"]

    def measured(devices: int) -> dict[str, Any]:
        variables = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return json.loads(ended.stdout.splitlines()[-1])

    step = measured(8)
    assert step["MFU"] > 0
    assert step["rows"] == "llm 256"
    assert "mocks no ranks here: 1 devices" in measured(1)["skipped"]


def test_the_rival_is_the_best_of_the_trainers_forms_and_one_that_had_no_room_is_none():
    def form(strategy: str, checkpointing: bool, batch: int) -> dict[str, Any]:
        return {
            "strategy": strategy,
            "checkpointing": checkpointing,
            "batch": batch,
            "attention": "sdpa",
        }

    no_room = form("group_by_length", False, 16)
    theirs = [
        replies(1000, 1.0, **no_room)[0],
        {"loss": 9.5, "tokens": 700} | no_room,
        *replies(1000, 1.0, turns=1, **no_room),
        *replies(1000, 4.0, **form("group_by_length", False, 8)),
        *replies(1000, 2.5, **form("group_by_length", True, 16)),
        *replies(1000, 5.0, **form("random", False, 8)),
    ]
    figures = race_figures(replies(1000, 2.0), theirs, [])
    best = "Trainer, grouped by length, checkpointing, 16 at once, sdpa"
    assert figures["best of the Trainer"] == best
    assert figures["mmjax / best of the Trainer, tokens/s"] == pytest.approx(1.25)
    assert figures["Trainer, loss of mmjax's first samples"] == 9.5
    assert figures[f"{best}, padding"] == 0.5
    assert figures[f"{best}, first step, s"] == 30
    assert "mmjax again, tokens/s" not in figures
    assert not any("no checkpointing, 16" in name for name in figures)
    assert race_figures(replies(1000, 2.0), [], [])["Trainer"].startswith("made no step")


def test_a_race_without_the_trainers_libraries_says_what_to_install(monkeypatch):
    monkeypatch.setattr(peer, "LIBRARIES", ("a_library_that_nobody_has",))
    figures = measure_race(TINY, "3b large-uneven full", ())
    assert figures == {"skipped": f"needs a_library_that_nobody_has; install with: {peer.INSTALL}"}


def test_sets_for_gpus_have_large_images_and_long_texts():
    rng = np.random.default_rng(0)
    uneven = [DATA["large-uneven"](rng) for _ in range(300)]
    sides = np.concatenate([sides.ravel() for sides, _ in uneven])
    assert 224 <= sides.min() < 300
    assert 1280 < sides.max() <= 1344
    assert {len(sides) for sides, _ in uneven} == {0, 1, 2, 3}
    assert max(words for _, words in uneven) == 2000
    assert not any(len(DATA["large-text"](rng)[0]) for _ in range(20))


def test_pairs_are_those_that_the_masks_allow():
    for mask, pairs in (
        text_mask(96, TINY.samples),
        text_mask(96, (96, 96)),
        image_mask(96, TINY.image),
        image_mask(96, TINY.image, TINY.window),
    ):
        assert int(allowed(mask, mask).sum()) == pairs


def test_a_trace_of_a_gpu_is_summed_over_its_streams_alone(tmp_path: Path):
    """Its line of XLA's operations names the same time once more, and the host's threads are no kernels."""

    def named(what: str, pid: int, tid: int, name: str) -> dict:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    def event(pid: int, tid: int, name: str, us: float) -> dict:
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 0, "dur": us}

    events = [
        named("process_name", 1, 0, "/device:GPU:0 NVIDIA H100 80GB HBM3"),
        named("process_name", 7, 0, "/host:CPU"),
        named("thread_name", 1, 13, "Stream #13(Compute)"),
        named("thread_name", 1, 20, "XLA Ops"),
        named("thread_name", 7, 20, "python"),
        event(1, 13, "gemm", 3000.0),
        event(1, 13, "gemm", 1000.0),
        event(1, 13, "flash_attention_forward", 1000.0),
        event(1, 20, "dot.3", 4000.0),
        event(7, 20, "wait", 9000.0),
    ]
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events, "metadata": {}}, file)
    assert top_kernels(tmp_path) == {
        "all kernels, ms": 5.0,
        "launches": 3,
        " 1 gemm": "4.00 ms, 80.0%, 2 launches",
        " 2 flash_attention_forward": "1.00 ms, 20.0%, 1 launches",
    }


def test_rows_of_every_kind_are_full_but_those_of_one_sample():
    rng = np.random.default_rng(1)
    for kind in KINDS:
        samples = [samples_of(row_lengths(kind, number, 256, rng), 256) for number in range(15)]
        assert {row.shape for row in samples} == {(1, 256)}
        empty = [int((row < 0).sum()) for row in samples]
        assert (max(empty) > 50) if kind == "1" else not any(empty)
        assert all((np.diff(row[0][row[0] >= 0]) >= 0).all() for row in samples)


def test_the_table_has_a_row_for_every_figure():
    assert markdown({"products": {"TFLOP/s": 812.345}, "torch": {"skipped": "a | b"}}).splitlines()[
        2:
    ] == ["| products | TFLOP/s | 812.3 |", "| torch | skipped | a / b |"]
