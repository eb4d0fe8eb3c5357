"""What commands print: lines of progress."""

from __future__ import annotations

import pytest

from mmjax import console
from mmjax.console import ProgressLine, time_left

STEP = {
    "epoch": 0.5,
    "loss": 1.0,
    "tokens/s": 1e3,
    "mfu": 0.1,
    "straggler_wait_before": 0.0,
    "padding": 0.1,
}


def test_the_share_of_waiting_is_that_of_the_time_and_not_the_mean_of_the_steps(capsys):
    """One step of 1 s waits for nothing, the next of 9 s for 8 s of them; moving averages are 1.8 s and 0.8 s."""
    with ProgressLine(0, 2) as line:
        line.update(1, STEP | {"seconds/step": 1.0, "seconds/data_wait": 0.0})
        line.update(2, STEP | {"seconds/step": 9.0, "seconds/data_wait": 8.0})
    assert "data wait 44.4%" in capsys.readouterr().out


def test_a_step_says_the_learning_rate_the_gradient_norm_and_the_time_left(capsys):
    rates = {"learning_rate/llm/matrix": 0.02, "learning_rate/llm/other": 0.003}
    with ProgressLine(0, 100) as line:
        line._interval = 0.0
        for done, factor in ((1, 1.0), (40, 0.5)):
            scalars = STEP | {key: factor * rate for key, rate in rates.items()}
            line.update(
                done,
                scalars | {"gradient_norm": 0.531, "seconds/step": 90.0, "seconds/data_wait": 0.0},
            )
    first, later = capsys.readouterr().out.splitlines()
    assert "loss 1.0000  learning rate 0.02  gradient norm 0.531  1k tok/s" in first
    assert first.endswith("  2 h 28 min left")
    assert "learning rate 0.01 " in later
    assert later.endswith("  1 h 30 min left")


def test_a_wait_by_measured_rates_has_that_of_the_data_sheet_beside_it(capsys):
    scalars = STEP | {"seconds/step": 1.0, "seconds/data_wait": 0.0, "straggler_wait": 0.044}
    scalars |= {"straggler_wait_before": 0.14}
    for sheet in ({}, {"straggler_wait_sheet": 0.039}):
        with ProgressLine(0, 1) as line:
            line.update(1, scalars | sheet)
    assumed, measured = capsys.readouterr().out.splitlines()
    assert "ranks wait 4.4%, padding 10.0% (unbalanced 14%)" in assumed
    assert "ranks wait 4.4% (sheet 3.9%), padding 10.0% (unbalanced 14%)" in measured


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3725, "1 h 2 min"),
        (93_784, "1 d 2 h"),
        (7200, "2 h"),
    ],
)
def test_a_time_is_said_in_its_two_largest_units(seconds, text):
    assert time_left(seconds) == text


def test_a_run_of_an_hour_writes_about_a_line_a_minute_into_a_file(capsys, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: clock)
    with ProgressLine(0, 3601) as line:
        for second in range(1, 3601):
            clock = float(second)
            line.show(second, lambda: "")
    steps = [
        int(line.partition("/")[0].split()[1]) for line in capsys.readouterr().out.splitlines()
    ]
    assert steps[:6] == [4, 12, 28, 60, 120, 180]
    assert len(steps) == 63
