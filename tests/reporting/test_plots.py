"""Pictures of ranks' work and of lengths: whole, small and the same each time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from mmjax.balance.parts import dist_ratio
from mmjax.reporting.drawing import series_colours
from mmjax.reporting.plots import (
    TALLEST,
    fold_ranks,
    plot_lengths,
    plot_work,
)


def said(path: Path) -> str:
    return "\n".join(ElementTree.parse(path).getroot().itertext())


def test_a_rank_is_shown_over_the_fullest_of_its_step() -> None:
    work = np.array([[4, 2, 1], [0, 0, 0]])
    assert np.array_equal(fold_ranks(work), [[1, 0], [0.5, 0], [0.25, 0]])


@pytest.mark.parametrize("ranks", [TALLEST, TALLEST + 1, 10 * TALLEST + 7])
def test_many_ranks_stand_in_several_columns_of_their_step(ranks: int) -> None:
    work = np.arange(1, 3 * ranks + 1).reshape(3, ranks)
    cells = fold_ranks(work)
    rows, columns = cells.shape
    assert rows <= TALLEST
    for step, of in enumerate(np.split(cells, 3, axis=1)):
        assert np.array_equal(of.T.ravel()[:ranks], work[step] / work[step].max())
        assert np.isnan(of.T.ravel()[ranks:]).all()
    assert columns == 3 * -(-ranks // TALLEST)


def test_a_picture_of_thousands_of_ranks_and_many_modules_is_small(tmp_path: Path) -> None:
    rng, names = np.random.default_rng(0), ("llm", "vision", "audio", "depth", "video")
    works = {
        kind: {name: rng.integers(0, 99, (2, 5000)) for name in names} for kind in ("none", "post")
    }
    plot_work(
        tmp_path / "work.svg", works, {"none": "as they come", "post": "balanced"}, "5000 ranks"
    )
    assert (tmp_path / "work.svg").stat().st_size < 400_000
    text = said(tmp_path / "work.svg")
    assert {"rank 0", "63", "step 1", "2"} <= set(text.split("\n"))
    assert "5,000 ranks: every step is 79 columns of 64" in text
    for work in works.values():
        assert all(f"dist ratio {dist_ratio(of).mean():.3f}" in text for of in work.values())


def test_every_module_has_a_colour_of_its_own() -> None:
    modules = ("llm", "depth", "vision", "video", "audio")
    assert len(set(series_colours(modules).values())) == 5


def test_lengths_are_drawn_the_same_each_time_with_every_source_and_measure(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = {
        "text, characters": {
            "photos": rng.integers(0, 900, 400).astype(float),
            "speech": np.full(3, 7.0),
        },
        "clip, seconds": {"speech": np.array([2.5])},
    }
    for name in ("a.svg", "b.svg"):
        plot_lengths(tmp_path / name, "Data of mine", "403 records", lengths)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    for text in (
        "Data of mine",
        "403 records",
        "photos",
        "speech",
        "clip, seconds",
        "median 2.5, largest 2.5",
    ):
        assert text in said(tmp_path / "a.svg")


def test_nothing_to_draw_is_drawn_as_nothing(tmp_path: Path) -> None:
    plot_lengths(tmp_path / "a.svg", "Data of mine", "0 records", {})
    assert "Data of mine" in said(tmp_path / "a.svg")
