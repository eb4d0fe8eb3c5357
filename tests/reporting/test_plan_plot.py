"""Pictures of a plan: what is drawn is what was planned, whole, small and the same each time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmjax.autotune.forecast import RunForecast, forecast_run
from mmjax.autotune.run_time import StepTime
from mmjax.balance.parts import dist_ratio
from mmjax.config.loading import find_config, load
from mmjax.data.plan.length_files import index_of_lengths
from mmjax.planning.hardware import parse_cluster
from mmjax.reporting.plan_plot import KINDS, PARTS, plot_plan, time_parts


@pytest.fixture(scope="module")
def forecast() -> RunForecast:
    """Of samples of a few tokens on 4 absent A100s, with encoders on twice as many ranks as the LLM."""
    rng, samples = np.random.default_rng(0), 400
    lengths = {name: rng.integers(1, 40, samples) for name in ("vision", "audio")}
    lengths["llm_tokens"] = lengths["vision"] + lengths["audio"] + rng.integers(1, 20, samples)
    words = ["batch.grouping=none", "batch.size.count=32", "mesh.tensor=2", "mesh.encoders=data"]
    config = load(find_config("tiny_omni"), words)
    return forecast_run(
        config, parse_cluster("a100x1x4"), index_of_lengths(lengths, config.model.encoders), [1.0]
    )


def said(path: Path) -> str:
    return "\n".join(ElementTree.parse(path).getroot().itertext())


@pytest.mark.exhaustive
def test_a_plan_is_drawn_the_same_each_time_and_twice_as_fine_in_png(
    forecast: RunForecast, tmp_path: Path
) -> None:
    for name in ("a.svg", "b.svg", "c.png"):
        plot_plan(tmp_path / name, forecast)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert Image.open(tmp_path / "c.png").width == 2000
    assert "Work of each encoder rank, balance none" in said(tmp_path / "a.svg")


def test_work_has_a_row_for_every_encoder_rank_and_the_ratios_are_of_it(
    forecast: RunForecast,
) -> None:
    for chosen in forecast.by_balance.values():
        assert chosen.work.keys() == chosen.dist_ratio.keys() == {"llm", "vision", "audio"}
        for name, work in chosen.work.items():
            assert work.shape[1] == 4
            assert chosen.dist_ratio[name] == pytest.approx(dist_ratio(work).mean())
        assert np.array_equal(chosen.work["llm"][:, ::2], chosen.work["llm"][:, 1::2])


def test_bars_hold_every_kind_of_memory_and_every_part_of_the_time(forecast: RunForecast) -> None:
    assert list(PARTS) == [f.name for f in fields(StepTime)]
    for chosen in forecast.by_balance.values():
        assert list(KINDS) == list(chosen.plan.fullest.fixed)
        assert sum(time_parts(chosen).values()) == pytest.approx(chosen.time.total)
