"""Pictures of a pipeline's step: every pass where and as long as it was, small and the same each time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from mmjax.planning.schedules import ScheduleName, StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.reporting.drawing import Drawing, Shape
from mmjax.reporting.timeline_plot import HEADING, ROW, draw_timeline, plot_timelines

OMNI = StageGraph(((0, 2), (1, 2), (2, 3)), (0, 1, 2, 3))
NAMES = ("vision", "audio", "llm[0:2]", "llm[2:4]")


def timeline(
    schedule: ScheduleName = "1f1b", graph: StageGraph = OMNI, microbatches: int = 4, **zero: int
) -> Timeline:
    """Of stages whose forward passes take a second and backward passes two. zero: a stage without the latter."""
    forward = np.ones((len(graph.workers), microbatches))
    backward = 2 * forward
    backward[list(zero.values())] = 0
    return simulate(make_schedule(schedule, graph, microbatches), StageTimes(forward, backward))


def drawn(
    of: Timeline, names: tuple[str, ...] = NAMES
) -> dict[str, list[tuple[int, float, float]]]:
    """The bars of every colour, idle time first: row, from, to."""
    drawing = Drawing(1000, 500)
    draw_timeline(drawing, 0, "planned", of, names)
    shapes = [part for part in drawing.parts if isinstance(part, Shape) and part.fill]
    corners = {shape.fill: np.stack(shape.outlines) for shape in shapes}
    left, right = (pick(corners["faint"][..., 0]) for pick in (np.min, np.max))
    return {
        colour: [
            (int((box[:, 1].mean() - HEADING) / ROW), *seconds(box[[0, 2], 0], left, right, of))
            for box in boxes
        ]
        for colour, boxes in corners.items()
    }


def seconds(x: np.ndarray, left: float, right: float, of: Timeline) -> list[float]:
    """Where pixels are in time."""
    return ((x - left) / (right - left) * of.makespan).round(6).tolist()


def said(path: Path) -> set[str]:
    return set("\n".join(ElementTree.parse(path).getroot().itertext()).split("\n"))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_pass_is_a_bar_in_its_workers_row_where_it_was_simulated(
    schedule: ScheduleName,
) -> None:
    of = timeline(schedule)
    passes = [bar for bars in list(drawn(of).values())[1:] for bar in bars]
    assert len(passes) == len(of.actions) == 32
    expected = sorted(
        (action.stage, start, end)
        for action, start, end in zip(of.actions, of.start, of.end, strict=True)
    )
    for (row, start, end), (stage, begun, ended) in zip(sorted(passes), expected, strict=True):
        assert (row, start) == (stage, begun)
        assert ended - 0.05 < end < ended  # with a gap before the next


def test_towers_have_colours_of_their_own_and_two_shades_and_chunks_differ() -> None:
    assert len(drawn(timeline())) == 1 + 2 * 3
    virtual = StageGraph(((0, 1), (1, 2), (2, 3), (3, 4)), (0, 1, 2, 1, 2))
    names = ("vision", "llm[0:1]", "llm[1:2]", "llm[2:3]", "llm[3:4]")
    bars = drawn(timeline("interleaved", virtual), names)
    assert len(bars) == 1 + 2 + 2 * 2
    assert {row for by_colour in list(bars.values())[1:] for row, _, _ in by_colour} == {0, 1, 2}


def test_a_frozen_stage_has_no_backward_bars_and_a_last_stage_with_both_in_one_has_bars_of_two_shades() -> (
    None
):
    frozen = drawn(timeline(frozen=0))
    assert sum(row == 0 for bars in list(frozen.values())[1:] for row, _, _ in bars) == 4
    both = drawn(timeline(last=3))
    last = [bar for bars in list(both.values())[1:] for bar in bars if bar[0] == 3]
    assert len(last) == 8
    assert len(set(last)) == 4


def test_a_picture_tells_seconds_and_bubble_idle_time_and_microbatches_in_flight(
    tmp_path: Path,
) -> None:
    of = timeline()
    for name in ("a.svg", "b.svg"):
        plot_timelines(tmp_path / name, "Passes", "1f1b", {"planned": of, "measured": of}, NAMES)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = said(tmp_path / "a.svg")
    # 18 s for 4 microbatches of 3 s: a third is idle. Depth + 1 in flight.
    expected = {
        "Passes",
        "1f1b",
        "planned",
        "measured",
        "18.00 s, bubble 33.3%",
        "33%",
        "3",
        "2",
        "1",
        *NAMES,
    }
    assert expected <= texts


def test_a_picture_of_sixteen_stages_and_many_microbatches_is_small(tmp_path: Path) -> None:
    chain = StageGraph(tuple((n, n + 1) for n in range(15)), tuple(range(16)))
    names = tuple(f"llm[{n}:{n + 1}]" for n in range(16))
    plot_timelines(
        tmp_path / "a.svg", "Passes", "1f1b", {"planned": timeline("1f1b", chain, 64)}, names
    )
    assert (tmp_path / "a.svg").stat().st_size < 150_000
    assert set(names) <= said(tmp_path / "a.svg")
