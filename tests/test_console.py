"""What commands print: lines of progress."""

from __future__ import annotations

from mmjax.console import ProgressLine

STEP = {"epoch": 0.5, "loss": 1.0, "tokens/s": 1e3, "mfu": 0.1, "straggler_wait_before": 0.0}


def test_the_share_of_waiting_is_that_of_the_time_and_not_the_mean_of_the_steps(capsys):
    """One step of 1 s waits for nothing, the next of 9 s for 8 s of them; moving averages are 1.8 s and 0.8 s."""
    with ProgressLine(0, 2) as line:
        line.update(1, STEP | {"seconds/step": 1.0, "seconds/data_wait": 0.0})
        line.update(2, STEP | {"seconds/step": 9.0, "seconds/data_wait": 8.0})
    assert "data wait 44.4%" in capsys.readouterr().out
