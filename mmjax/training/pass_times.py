"""Record when a pipeline's passes are planned to run and when they ran, in a folder of the run, for its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.disk import (
    append_json_lines,
    read_json_lines,
    read_sealed,
    remove_path,
    verify_checksum,
    with_checksum,
    write_sealed,
)
from mmjax.distributed import coordination
from mmjax.planning.remat import StagePlan
from mmjax.planning.schedules import Action, Schedule, StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.runtime.executor import Executor

PLANNED = "planned.json"
FIRST_TIMED = 4  # steps after a start: the first ones are slower


def write_planned(
    folder: Path, executor: Executor, stages: Sequence[StagePlan], microbatches: int, profiled: bool
) -> None:
    """Write the planned times of every stage's passes; what an earlier start of the run recorded is removed.

    profiled: whether they come from measured times of layers.
    """
    remove_path(folder)
    if not stages:
        return
    folder.mkdir()
    planned = {
        "schedule": executor.schedule,
        "microbatches": microbatches,
        "edges": executor.graph.edges,
        "workers": executor.graph.workers,
        "copies": executor.graph.copies,
        "times": executor.graph.times,
        "stages": [stage.name for stage in stages],
        "forward": [stage.forward for stage in stages],
        "backward": [stage.backward for stage in stages],
        "profiled": profiled,
    }
    write_sealed(folder / PLANNED, planned)


@contextmanager
def time_passes(folder: Path, executor: Executor, done: int, first_step: int) -> Iterator[None]:
    """Record when this process's passes run in the step that the body runs: in steps 4, 8, 16, ... after a start.

    Only on CPUs, which wait for every pass anyway. Elsewhere passes are queued, and a host knows no
    more than when.
    done: steps of the run after this one. first_step: of this start.
    """
    steps = done - first_step
    due = steps >= FIRST_TIMED and steps & (steps - 1) == 0
    if not (due and executor.synchronous):
        yield
        return
    times = executor.passes.times = []
    try:
        yield
    finally:
        executor.passes.times = None
    folder.mkdir(parents=True, exist_ok=True)
    record = {"step": done, "passes": [(*action, start, end) for action, start, end in times]}
    append_json_lines(folder / f"{coordination.index()}.jsonl", [with_checksum(record)])


class StepTimelines(NamedTuple):
    """The passes of a step as planned, and as they ran."""

    schedule: str
    stages: tuple[str, ...]
    profiled: bool
    planned: Timeline
    measured: Timeline | None
    step: int  # that was measured


def read_timelines(folder: Path) -> StepTimelines | None:
    """Read what is planned, and the last step whose passes all processes have recorded. None without units."""
    plan = read_sealed(folder / PLANNED)
    if plan is None:
        return None
    linked = {key: tuple(map(tuple, plan.get(key, ()))) for key in ("edges", "copies", "times")}
    graph = StageGraph(workers=tuple(plan["workers"]), **linked)
    microbatches = plan["microbatches"]
    forward, backward = (
        np.repeat(np.array(plan[kind])[:, None], microbatches, 1)
        for kind in ("forward", "backward")
    )
    planned = simulate(
        make_schedule(plan["schedule"], graph, microbatches), StageTimes(forward, backward)
    )
    measured = None
    step = 0
    for number, times in sorted(_read_times(folder).items()):
        # Steps may have any number of microbatches.
        schedule = make_schedule(
            plan["schedule"], graph, 1 + max(action.microbatch for action in times)
        )
        if times.keys() >= {action for order in schedule.orders for action in order}:
            step = number
            measured = _timeline(schedule, times)
    return StepTimelines(
        schedule=plan["schedule"],
        stages=tuple(plan["stages"]),
        profiled=plan["profiled"],
        planned=planned,
        measured=measured,
        step=step,
    )


def _read_times(folder: Path) -> dict[int, dict[Action, tuple[float, float]]]:
    """Read start and end of the passes of every step, of all processes.

    A pass of several processes lasts from the last start, before which some still wait, to the last
    end. So those of one worker never overlap.
    """
    steps: dict[int, dict[Action, tuple[float, float]]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_json_lines(path):
            with suppress(ValueError):  # damaged
                record = verify_checksum(line)
                times = steps[record["step"]]
                for *action, start, end in record["passes"]:
                    timed = times.get(Action._make(action), (start, end))
                    times[Action._make(action)] = (max(timed[0], start), max(timed[1], end))
    return steps


def _timeline(schedule: Schedule, times: Mapping[Action, tuple[float, float]]) -> Timeline:
    """Return measured passes as a timeline that starts with the first of them."""
    actions = tuple(sorted(times, key=times.__getitem__))
    seconds = np.array([times[action] for action in actions])
    start, end = (seconds - seconds.min()).T
    stages = range(len(schedule.graph.workers))
    in_flight = np.array([schedule.in_flight_bound(stage) for stage in stages])
    return Timeline(schedule=schedule, actions=actions, start=start, end=end, in_flight=in_flight)
