"""Charts by hand: places, ticks, and names that are only names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from mmjax.console import count, duration, percent, size
from mmjax.reporting.charts import HALF, Formatter, Scale, area_chart, histogram, line_chart
from mmjax.reporting.run import Curve


def curve(*values: float) -> Curve:
    of = np.array(values, float)
    return Curve(np.arange(1.0, len(of) + 1), of, of, of)


def paths(svg: str, **look: str) -> list[ElementTree.Element]:
    """The paths with these attributes."""
    look = {name.replace("_", "-"): value for name, value in look.items()}
    drawn = ElementTree.fromstring(svg).iter("path")
    return [path for path in drawn if look.items() <= path.attrib.items()]


def points(svg: str, **look: str) -> list[tuple[float, float]]:
    """The points of the first path with these attributes."""
    data = paths(svg, **look)[0].get("d", "").strip("MZ")
    return [tuple(map(float, pair.split())) for pair in data.split("L")]


def titles(svg: str, **look: str) -> list[str]:
    """The titles of the paths with these attributes."""
    return [title.text or "" for path in paths(svg, **look) for title in path.iter("title")]


GREEN = {"stroke": "var(--green)"}  # a line
FILLED = {"fill": "var(--green)"}


def test_a_curve_goes_from_edge_to_edge_and_up_where_values_rise() -> None:
    drawn = points(line_chart({"a": curve(1, 2, 4)}, {"a": "green"}), **GREEN)
    assert [x for x, _ in drawn] == [50.0, 250.0, 450.0]
    ys = [y for _, y in drawn]
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.2)


def test_a_logarithmic_axis_gives_factors_the_same_height() -> None:
    ys = [
        y
        for _, y in points(
            line_chart({"a": curve(1, 10, 100)}, {"a": "green"}, logarithmic=True), **GREEN
        )
    ]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-9, 1e-9], [-3.0, 4.0], [0.0, 1e12]])
def test_any_values_are_drawn_within_the_chart(values: list[float]) -> None:
    for logarithmic in (False, True):
        svg = line_chart(
            {"a": curve(*values)}, {"a": "green"}, logarithmic=logarithmic, marks=[1], noisy=True
        )
        numbers = [
            float(n) for d in re.findall(r' d="([^"]*)"', svg) for n in re.findall(r"-?[\d.]+", d)
        ]
        assert all(0 <= n <= 468 for n in numbers)


def test_a_shade_that_is_wider_than_its_curve_stays_within_the_chart() -> None:
    of = curve(1, 2, 3)
    svg = line_chart(
        {"a": Curve(of.step, of.mean, of.mean - 99, of.mean + 99)}, {"a": "green"}, noisy=True
    )
    ys = [y for _, y in points(svg, opacity="0.15")]
    assert (min(ys), max(ys)) == (10, 164)


def test_marks_stand_where_their_steps_are_and_not_outside() -> None:
    svg = line_chart({"a": curve(1, 2, 3)}, {"a": "green"}, marks=[2, 9])
    (mark,) = paths(svg, stroke_dasharray="4 3")
    assert mark.get("d", "").startswith("M250.0 ")


def test_ticks_are_round_and_within_the_axis() -> None:
    assert Scale(0, 1, 0, 100).ticks(4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Scale(3, 97, 0, 100).ticks(4) == [20, 40, 60, 80]
    assert Scale(0.5, 2e4, 0, 100, True).ticks(4) == [1, 10, 100, 1000, 10000]


def test_a_histogram_counts_every_value_once() -> None:
    svg = histogram(np.array([1.0, 1, 1, 2, 9]), "blue")
    assert re.findall(r"<title>[^:]*: (\d+)<", svg) == ["3", "1", "1"]


def test_layers_stand_on_each_other() -> None:
    svg = area_chart(
        {"a": np.ones(3), "b": np.ones(3)}, np.arange(3.0), {"a": "green", "b": "blue"}
    )
    tops = [min(y for _, y in points(svg, fill=f"var(--{k})")) for k in ("green", "blue")]
    assert tops[0] > tops[1]


def test_names_cannot_become_markup() -> None:
    svg = line_chart(
        {"<script>x</script>": curve(1, 2)},
        {"<script>x</script>": "green"},
        lambda v: f"<b>{count(v)}",
    )
    ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert "<b>" not in svg


def ticks(svg: str) -> list[tuple[float, str, str]]:
    """Of each label its place from the left, how it is anchored, and what it says."""
    found = ElementTree.fromstring(svg).iter("text")
    return [(float(e.get("x", 0)), e.get("text-anchor", "start"), e.text or "") for e in found]


NEEDLE = [2.0 + 0.1 * (k % 7) for k in range(60)]
NEEDLE[41] = 5000.0


@pytest.mark.parametrize("how", [{}, {"logarithmic": True}, {"from_zero": True}, {"noisy": True}])
def test_one_needle_is_marked_with_its_step_and_value_and_leaves_the_axis_to_the_others(
    how: dict[str, bool],
) -> None:
    svg = line_chart({"a": curve(*NEEDLE)}, {"a": "green"}, **how)
    assert titles(svg, **FILLED) == ["step 42: 5k"]
    assert points(svg, **FILLED)[0] == (328.0, 10.0)
    ys = [y for _, y in points(svg, **GREEN)]
    usual = [y for y in ys if y > 10]
    assert len(usual) >= 59
    if "from_zero" not in how:
        assert max(usual) - min(usual) > 70  # of 154 pixels
    assert "5k" in [text for _, _, text in ticks(svg)]


def test_layers_leave_out_a_needle_too() -> None:
    svg = area_chart({"a": np.array(NEEDLE)}, np.arange(60.0), {"a": "green"})
    assert "step 41: 5k" in svg
    assert max(y for _, y in points(svg, **FILLED)[:60]) < 60


@pytest.mark.parametrize(
    "values", [range(1, 61), [10.0 / k for k in range(1, 61)], [5.0] * 59 + [6.0], [0.0] * 60]
)
def test_what_rises_falls_or_hardly_moves_has_no_outliers(values: list[float]) -> None:
    for how in ({}, {"logarithmic": True}, {"from_zero": True}):
        svg = line_chart({"a": curve(*values)}, {"a": "green"}, **how)
        assert "step" not in "".join(titles(svg))


@pytest.mark.parametrize("spell", [count, duration, size, percent])
def test_labels_of_close_values_have_digits_enough_to_differ(spell: Formatter) -> None:
    for values in (
        ((2e9, 2.0001e9), (3e8, 97e8))
        if spell is size
        else ((200.01, 200.05), (2e9, 2.0001e9), (3.0, 97.0))
    ):
        svg = line_chart({"a": curve(*values)}, {"a": "green"}, spell)
        labels = [text for _, anchor, text in ticks(svg) if anchor == "end"]
        assert len(labels) >= 3
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("steps", [[1.0, 2.0], [999_998.0, 1_000_000.0], [0.0, 1e12]])
def test_no_label_is_cut_off_at_an_edge(steps: list[float]) -> None:
    of = np.array([123_456_789.25, 123_456_789.75])
    for svg in (
        line_chart({"a": Curve(np.array(steps), of, of, of)}, {"a": "green"}, size),
        area_chart({"a": of}, np.array(steps), {"a": "green"}, duration, width=HALF),
        histogram(np.array([*steps, 1e9]), "green"),
    ):
        width = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])
        for x, anchor, text in ticks(svg):
            long = 6 * len(text)
            start = x - {"end": long, "middle": long / 2, "start": 0}[anchor]
            assert 0 <= start <= start + long <= width
