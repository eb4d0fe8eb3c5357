"""Measured times of layers hold between the lengths that were measured."""

from __future__ import annotations

import pytest

from mmjax.planning.hardware import Rates
from mmjax.planning.speed import FORWARD, LayerTimes, Speed, profile_lengths


def quadratic(n: int) -> dict[str, float]:
    return {FORWARD: n + 0.01 * n**2, "none": 3 * (n + 0.01 * n**2), "full": 4 * n + 0.05 * n**2}


TIMES = LayerTimes(2, {n: quadratic(n) for n in (128, 512, 2048)})


@pytest.mark.parametrize("length", [128, 300, 512, 2000])
def test_a_layer_whose_attention_grows_with_the_square_of_its_rows_is_found_exactly(length):
    assert TIMES.interpolate(length) == pytest.approx(quadratic(length))


def test_outside_the_grid_a_position_takes_as_long_as_at_its_end():
    assert TIMES.interpolate(64)["none"] == pytest.approx(TIMES.interpolate(128)["none"] / 2)
    assert TIMES.interpolate(4096)["none"] == pytest.approx(2 * TIMES.interpolate(2048)["none"])


def test_more_rows_take_as_much_longer():
    speed = Speed(Rates(1, 1, 1), {"llm": TIMES})
    assert speed.layer("llm", (6, 512)) == pytest.approx(
        {k: 3 * s for k, s in quadratic(512).items()}
    )
    assert speed.layer("vision", (1, 512)) is None


def test_a_grid_has_both_ends_and_powers_of_two_between():
    assert profile_lengths([120]) == [120]
    assert profile_lengths([4168, 3648, 3792]) == [3648, 4168]
    assert profile_lengths([100, 3000]) == [100, 128, 256, 512, 1024, 2048, 3000]
