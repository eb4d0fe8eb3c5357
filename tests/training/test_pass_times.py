"""Recorded passes of a pipeline: of all processes together, whatever was cut off or damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmjax.disk import append_json_lines, with_checksum, write_sealed
from mmjax.planning.schedules import Action
from mmjax.training.pass_times import read_timelines

FORWARD, BACKWARD = (0.1, 0.2, 0.3), (0.2, 0.4, 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a plan of an encoder and an LLM of two stages, for two microbatches."""
    plan = {
        "schedule": "1f1b",
        "microbatches": 2,
        "edges": [[0, 1], [1, 2]],
        "workers": [0, 1, 2],
        "profiled": False,
    }
    stages = {
        "stages": ["vision", "llm[0:2]", "llm[2:4]"],
        "forward": FORWARD,
        "backward": BACKWARD,
    }
    write_sealed(tmp_path / "planned.json", plan | stages)
    return tmp_path


def record(folder: Path, process: int, step: int, *passes: tuple[Action, float, float]) -> None:
    lines = [
        with_checksum(
            {"step": step, "passes": [(*action, start, end) for action, start, end in passes]}
        )
    ]
    append_json_lines(folder / f"{process}.jsonl", lines)


def record_all(folder: Path, step: int, began: float, microbatches: int = 2) -> None:
    """The encoder in the first process and the LLM in the second; a pass takes its stage's number and one."""
    by_process: dict[int, list[tuple[Action, float, float]]] = {0: [], 1: []}
    for microbatch in range(microbatches):
        for stage in range(3):
            start = began + 10 * microbatch + stage
            by_process[min(stage, 1)] += [
                (Action("forward", stage, microbatch), start, start + stage + 1),
                (Action("backward", stage, microbatch), start + 5, start + 6 + stage),
            ]
    for process, passes in by_process.items():
        record(folder, process, step, *passes)


def test_a_plan_alone_is_simulated(folder: Path) -> None:
    timelines = read_timelines(folder)
    assert timelines is not None
    assert (timelines.measured, timelines.schedule, timelines.stages[0]) == (None, "1f1b", "vision")
    seconds = dict(
        zip(timelines.planned.actions, timelines.planned.end - timelines.planned.start, strict=True)
    )
    for action, length in seconds.items():
        assert length == pytest.approx(
            {"forward": FORWARD, "backward": BACKWARD}[action.kind][action.stage]
        )
    assert len(seconds) == 12


def test_the_last_step_that_all_processes_have_recorded_is_shown_from_its_first_pass_on(
    folder: Path,
) -> None:
    record_all(folder, 4, 1000.0)
    record_all(folder, 8, 2000.0, microbatches=3)
    # the other process has not got there
    record(folder, 0, 16, (Action("forward", 0, 0), 3000.0, 3001.0))
    timelines = read_timelines(folder)
    assert timelines is not None
    assert timelines.step == 8
    measured = timelines.measured
    assert measured is not None
    assert measured.schedule.microbatches == 3
    assert len(measured.actions) == 18
    assert (np.diff(measured.start) >= 0).all()
    spans = {
        a: (start, end)
        for a, start, end in zip(measured.actions, measured.start, measured.end, strict=True)
    }
    assert spans[Action("forward", 0, 0)] == (0, 1)
    assert spans[Action("backward", 2, 2)] == (27, 30)
    assert measured.makespan == 30


def test_a_pass_of_several_processes_lasts_from_the_last_start_to_the_last_end(
    folder: Path,
) -> None:
    record_all(folder, 4, 1000.0)
    record(folder, 2, 4, (Action("forward", 1, 0), 1000.5, 1002.0))
    record(folder, 3, 4, (Action("forward", 1, 0), 1001.5, 1004.5))
    timelines = read_timelines(folder)
    assert timelines is not None
    assert timelines.measured is not None
    number = timelines.measured.actions.index(Action("forward", 1, 0))
    assert (timelines.measured.start[number], timelines.measured.end[number]) == (1.5, 4.5)


def test_damaged_lines_are_left_out(folder: Path) -> None:
    record_all(folder, 4, 1000.0)
    record_all(folder, 8, 2000.0)
    path = folder / "1.jsonl"
    path.write_text(path.read_text().replace("2005.0", "2006.0", 1) + '{"step": 16, "passes": [[')
    timelines = read_timelines(folder)
    assert timelines is not None
    assert timelines.step == 4
    (folder / "planned.json").write_text("{}")
    assert read_timelines(folder) is None
