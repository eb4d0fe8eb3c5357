"""Curves of metrics: few points whatever the run's length, and nothing that a curve shows is lost between them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mmjax.reporting.run import POINTS, Curve, MetricsFollower, read_metrics


def written(path: Path, records: list[dict], torn: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)
    return path


def test_a_short_run_keeps_every_value(tmp_path: Path) -> None:
    path = written(
        tmp_path / "metrics.jsonl", [{"step": s, "time": 0.5, "loss": 1 / s} for s in range(1, 30)]
    )
    metrics = read_metrics(path)
    assert metrics.steps == 29
    assert list(metrics.curves) == ["loss"]
    assert np.array_equal(metrics.curves["loss"].step, range(1, 30))
    assert np.array_equal(metrics.curves["loss"].mean, [1 / s for s in range(1, 30)])


def test_a_long_run_becomes_few_points_whose_mean_is_that_of_all_and_a_single_peak_is_still_there(
    tmp_path: Path,
) -> None:
    steps = 20 * POINTS
    records = [
        {"step": s, "loss": 100.0 if s == 777 else float(s % 7)} for s in range(1, steps + 1)
    ]
    curve = read_metrics(written(tmp_path / "metrics.jsonl", records)).curves["loss"]
    assert len(curve) == POINTS
    assert curve.mean.mean() == pytest.approx(np.mean([r["loss"] for r in records]))
    assert (curve.high.max(), curve.low.min(), curve.step[-1]) == (100, 0, steps)
    thinner = curve.thinned(100)
    assert len(thinner) == 100
    assert (thinner.high.max(), thinner.low.min(), thinner.step[-1]) == (100, 0, steps)
    assert thinner.mean.mean() == pytest.approx(curve.mean.mean())


def test_values_that_are_logged_now_and_then_have_the_steps_at_which_they_were(
    tmp_path: Path,
) -> None:
    records = [{"step": s, "loss": 1.0} for s in range(1, 11)]
    records.insert(5, {"step": 5, "validation/score": 0.25})
    metrics = read_metrics(written(tmp_path / "metrics.jsonl", records))
    (score,) = metrics.with_prefix("validation/").values()
    assert (score.step.tolist(), score.mean.tolist()) == ([5], [0.25])


def test_lines_that_are_torn_or_no_records_are_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}], '[3]\n"x"\nnull\n{"step": 2, "lo'
    )
    metrics = read_metrics(path)
    assert (metrics.steps, len(metrics.curves["loss"])) == (1, 1)
    assert read_metrics(tmp_path / "none.jsonl").curves == {}


def test_numbers_that_are_not_finite_are_counted_and_no_points(tmp_path: Path) -> None:
    records = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": "nan", "gradient_norm": "inf"},
        {"step": 3, "loss": 1.0},
    ]
    metrics = read_metrics(written(tmp_path / "metrics.jsonl", records))
    assert metrics.not_finite == 1
    assert metrics.curves["loss"].step.tolist() == [1, 3]


def test_worst_samples_are_of_the_last_steps_each_once_the_largest_loss_first(
    tmp_path: Path,
) -> None:
    records = [
        {"step": s, "worst": {"a[1]": 9.0 if s < 3 else 1.0, f"b[{s}]": s / 10}}
        for s in range(1, 41)
    ]
    records[-1]["worst"]["c[0]"] = "nan"
    worst = read_metrics(written(tmp_path / "metrics.jsonl", records)).worst
    assert [w.sample for w in worst[:3]] == ["c[0]", "b[40]", "b[39]"]
    assert math.isnan(worst[0].loss)
    (a,) = (w for w in worst if w.sample == "a[1]")
    assert (a.loss, len(worst)) == (1.0, 22)


def test_the_slowest_process_is_counted(tmp_path: Path) -> None:
    slowest = ["process 0 (a)", "process 1 (b)", "process 1 (b)"]
    records = [
        {"step": k + 1, "slowest": who, "seconds/slowest": 2.0} for k, who in enumerate(slowest)
    ]
    metrics = read_metrics(written(tmp_path / "metrics.jsonl", records))
    assert metrics.slowest == {"process 1 (b)": (2, 4.0), "process 0 (a)": (1, 2.0)}


def test_smoothing_is_the_mean_of_the_last_twentieth() -> None:
    values = np.arange(40.0)
    smooth = Curve(values, values, values, values).smoothed()
    assert smooth.tolist() == [0.0, *(values[1:] - 0.5)]


def test_values_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    """Somebody has edited the file: lists, huge numbers, names of another type."""
    odd = {
        "loss": [1],
        "mfu": 10**400,
        "slowest": 3,
        "seconds/slowest": "nan",
        "worst": {"a": [2]},
        "batch": 1,
        "x": None,
    }
    right = {
        "step": 3,
        "loss": 0.5,
        "slowest": "process 1",
        "seconds/slowest": "inf",
        "worst": {"a": "nan"},
    }
    lines = [
        {"step": 1, **odd},
        {"step": True, "loss": 1.0},
        {"step": 2, "loss": "many", "worst": [1]},
        right,
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_metrics(tmp_path / "m.jsonl")
    assert list(found.curves) == ["loss"]
    assert found.curves["loss"].mean.tolist() == [0.5]
    assert (found.steps, found.not_finite) == (3, 0)
    assert [worst.sample for worst in found.worst] == ["a"]
    assert found.slowest["process 1"] == (1, math.inf)


def test_a_file_that_grows_is_followed_to_what_it_is_read_as_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path, max_points=10)
    assert follower.update()
    assert follower.metrics().curves == {}
    text = "".join(
        json.dumps({"step": s, "loss": s / 2, "worst": {"a[1]": s}}) + "\n" for s in range(1, 61)
    )
    for begin in range(0, len(text), 37):
        with path.open("a") as file:
            file.write(text[begin : begin + 37])
        assert follower.update()
        found, whole = follower.metrics(), read_metrics(path, max_points=10)
        assert (found.steps, found.worst) == (whole.steps, whole.worst)
        if found.steps:
            loss = found.curves["loss"]
            assert len(loss) <= 20
            assert (loss.step[-1], loss.low.min(), loss.high.max()) == (
                found.steps,
                0.5,
                found.steps / 2,
            )
    assert found.steps == 60


def test_a_file_in_the_place_of_another_is_read_from_its_start_and_a_long_one_in_parts(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "metrics.jsonl", [{"step": s, "loss": 1.0} for s in range(1, 9)])
    follower = MetricsFollower(path)
    assert not follower.update(seconds=-1)
    assert follower.metrics().steps == 1
    assert follower.update()
    assert follower.metrics().steps == 8
    written(tmp_path / "new", [{"step": s, "loss": 2.0} for s in range(1, 13)]).replace(path)
    assert follower.update()
    assert follower.metrics().curves["loss"].mean.tolist() == [2.0] * 12
    path.unlink()
    assert follower.update()
    assert follower.metrics().steps == 0
