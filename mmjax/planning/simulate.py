"""Simulate a pipeline: when every pass of every microbatch starts and ends, how long workers idle, what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmjax.planning.schedules import Action, Schedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds of every stage's passes and of the transfers between stages."""

    forward: np.ndarray  # [stages, microbatches]
    backward: np.ndarray  # [stages, microbatches]; 0 where a stage has no backward pass
    transfer: Mapping[tuple[int, int], float] | float = 0.0  # by edge, the same both ways
    # whether a worker waits until what it sends has arrived, everywhere at the same time
    blocking: bool = False


@dataclass(frozen=True)
class Timeline:
    """The passes of one step in time."""

    schedule: Schedule
    actions: tuple[Action, ...]  # by start; every one behind those that it needs
    start: np.ndarray  # seconds [actions]
    end: np.ndarray
    in_flight: np.ndarray  # int [stages]: most microbatches between their forward and backward pass

    @property
    def makespan(self) -> float:
        """Return the seconds from the first start to the last end."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """Return the share of all workers' time in which they compute nothing."""
        workers = len(set(self.schedule.graph.workers))
        return 1 - float((self.end - self.start).sum()) / (workers * self.makespan)


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """Start every action as soon as its worker is free and its inputs have arrived.

    Raises ValueError where workers wait for each other, which no schedule of `make_schedule` does.
    """
    graph = schedule.graph
    seconds = {
        "forward": np.asarray(times.forward).tolist(),
        "backward": np.asarray(times.backward).tolist(),
    }
    delay = (
        times.transfer
        if isinstance(times.transfer, Mapping)
        else dict.fromkeys(graph.edges, times.transfer)
    )
    ends: dict[Action, float] = {}
    starts: dict[Action, float] = {}
    position = [0] * len(schedule.orders)
    free = [0.0] * len(schedule.orders)
    # A worker that waits for an action is looked at again when that has ended.
    waiting: dict[Action, list[int]] = {}
    ready = [worker for worker, order in enumerate(schedule.orders) if order]
    while ready:
        worker = ready.pop()
        order = schedule.orders[worker]
        while position[worker] < len(order):
            action = order[position[worker]]
            needs = graph.needs(action)
            if missing := next((need for need, _ in needs if need not in ends), None):
                waiting.setdefault(missing, []).append(worker)
                break
            # Between stages of one worker nothing is sent.
            arrivals = (
                ends[need]
                + (
                    delay[edge]
                    if edge and graph.workers[edge[0]] != graph.workers[edge[1]]
                    else 0.0
                )
                for need, edge in needs
            )
            starts[action] = max(free[worker], *arrivals) if needs else free[worker]
            ends[action] = starts[action] + seconds[action.kind][action.stage][action.microbatch]
            free[worker] = ends[action]
            if times.blocking:
                free[worker] += max(
                    (delay[edge] for edge in _outputs(schedule, action)), default=0.0
                )
            position[worker] += 1
            ready += waiting.pop(action, ())
    # Where nothing is ready any more and something is left, the orders contradict each other.
    if unfinished := [
        order[n] for order, n in zip(schedule.orders, position, strict=True) if n < len(order)
    ]:
        raise ValueError(
            f"the workers wait for each other in a circle: {', '.join(map(_spell, unfinished))}"
        )
    # Sorting is stable and `starts` in an order that runs, so that of equal starts the needed one
    # stays first.
    actions = tuple(sorted(starts, key=starts.__getitem__))
    flights = [schedule.in_flight_bound(stage) for stage in range(len(graph.workers))]
    return Timeline(
        schedule=schedule,
        actions=actions,
        start=np.array([starts[action] for action in actions]),
        end=np.array([ends[action] for action in actions]),
        in_flight=np.array(flights),
    )


def total_order(schedule: Schedule) -> tuple[Action, ...]:
    """Put the actions of all workers into one order that respects every dependency.

    All processes walk it, each running what is local, so that they issue transfers and collectives
    in the same order and none can wait for another that waits for it. It follows the time at which
    actions would start if all stages took as long: a receive then stands close to where its data is
    sent. Raises ValueError as `simulate` does.
    """
    # Backward passes take twice as long as forward passes, as without recomputation.
    shape = (len(schedule.graph.workers), schedule.microbatches)
    return simulate(schedule, StageTimes(np.ones(shape), np.full(shape, 2.0))).actions


def _outputs(schedule: Schedule, action: Action) -> list[tuple[int, int]]:
    """List the edges between workers over which the results of an action are sent."""
    graph = schedule.graph
    stage = action.stage
    if action.kind == "forward":
        edges = [(stage, consumer) for consumer in graph.consumers[stage]]
    else:
        edges = [(p, stage) for p in graph.producers[stage] if graph.runs(p, action.microbatch)]
    return [edge for edge in edges if graph.workers[edge[0]] != graph.workers[edge[1]]]


def _spell(action: Action) -> str:
    return f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
