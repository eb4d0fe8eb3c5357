"""Cut a chain of layers into the stages of a pipeline, exactly: the least largest stage, then the least communication.

What a layer takes is its forward and backward pass and what it recomputes, so that frozen layers
count as they are (Cornstarch section 4.2). OmniBal (section 4.2) ranks candidates by the sum of a
variance in ms^2 and a size in MB; an order of criteria needs no such weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from mmjax.planning.schedules import StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, simulate

# Sums of the same times in another order differ by rounding, which must not decide between
# partitions.
ROUNDING = 1e-9

# Of (first layer, end, stage), or bool `[stages, layers, layers + 1]` by stage, first layer and
# end.
Fits = Callable[[int, int, int], bool] | np.ndarray


def partition(
    seconds: Sequence[float] | np.ndarray,
    stages: int,
    cut_bytes: Sequence[int] | np.ndarray | None = None,
    *,
    fits: Fits | None = None,
) -> tuple[int, ...]:
    """Return the first layers of stages 2, 3, ... of the best partition.

    Best has the least largest stage, of these the fewest bytes over all cuts, of these the least
    sum of squares.
    seconds: of a microbatch's forward, backward and recomputation in each layer. cut_bytes:
    `[layers + 1]`, sent where the chain is cut before a layer; the ends are not read. fits(first,
    end, stage): whether that stage's memory holds these layers, with as many microbatches in flight
    as its depth asks for. Raises ValueError where nothing fits, and for more stages than layers.
    """
    return best_partitions(seconds, stages, cut_bytes, fits=fits, count=1)[0]


def best_partitions(
    seconds: Sequence[float] | np.ndarray,
    stages: int,
    cut_bytes: Sequence[int] | np.ndarray | None = None,
    *,
    fits: Fits | None = None,
    count: int,
    slack: float = 0.0,
) -> list[tuple[int, ...]]:
    """List partitions for the simulator to choose from, at most `count`.

    These are the best by bytes, then by the sum of squares, of all whose largest stage is at most
    `1 + slack` times the least possible. Other arguments and errors are those of `partition`.
    """
    layers = len(seconds)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages: every stage has at least one layer"
        )
    prefix = np.concatenate([[0.0], np.cumsum(seconds, dtype=np.float64)])
    cut = np.zeros(layers + 1) if cut_bytes is None else np.asarray(cut_bytes, np.float64)
    allowed = _tabulate(fits, layers, stages)
    largest = _least_largest(prefix, allowed)
    if not np.isfinite(largest):
        raise ValueError(
            f"no partition of {layers} layers into {stages} stages fits the stages' memory"
        )
    best = _fewest_bytes(prefix, cut, allowed, largest * (1 + slack) * (1 + ROUNDING), count)
    return [tuple(cuts) for cuts in best.tolist()]


@dataclass(frozen=True)
class Chain:
    """A model's layers in order, encoders before the LLM, and what a step runs through them."""

    parameters: np.ndarray  # [layers]
    forward: np.ndarray  # seconds of one microbatch, [layers]
    backward: np.ndarray  # recomputation included, [layers]
    cut_bytes: np.ndarray  # sent where the chain is cut before a layer, [layers + 1]
    towers: tuple[int, ...]  # first layer of each tower
    microbatches: int
    bandwidth: float = float("inf")  # bytes per second between stages


def iteration_seconds(chain: Chain, cuts: Sequence[int], *, side_by_side: bool = False) -> float:
    """Simulate a step of 1F1B over the stages that begin with layer 0 and with each of `cuts`.

    side_by_side: encoders have stages of their own that do not wait for each other (modality
    parallelism, Cornstarch section 4.1), so every tower begins a stage.
    """
    begins = (0, *cuts)
    following = {stage: stage + 1 for stage in range(len(cuts))}
    if side_by_side:
        ends = [begins.index(tower) - 1 for tower in chain.towers[1:]]
        following |= dict.fromkeys(ends, begins.index(chain.towers[-1]))
    graph = StageGraph(tuple(following.items()), tuple(range(len(begins))))
    # What a stage sends is what leaves its last layer, wherever it goes.
    sent = {edge: chain.cut_bytes[begins[edge[0] + 1]] / chain.bandwidth for edge in graph.edges}
    forward, backward = (
        np.tile(np.add.reduceat(seconds, begins)[:, None], chain.microbatches)
        for seconds in (chain.forward, chain.backward)
    )
    schedule = make_schedule("1f1b", graph, chain.microbatches)
    return simulate(schedule, StageTimes(forward, backward, sent)).makespan


def fastest_partition(
    chain: Chain, stages: int, *, fits: Fits | None = None, count: int = 64
) -> tuple[int, ...]:
    """Return the partition with the shortest simulated step, of the `count` best ones.

    Where a stage stands and what is sent counts there, beside the largest stage: a quarter of the
    partitions may have one that is up to 5% larger, and send less for it.
    """
    seconds = chain.forward + chain.backward
    candidates = [
        *best_partitions(seconds, stages, chain.cut_bytes, fits=fits, count=count - count // 4),
        *best_partitions(seconds, stages, chain.cut_bytes, fits=fits, count=count // 4, slack=0.05),
    ]
    return min(candidates, key=lambda cuts: iteration_seconds(chain, cuts))


def _tabulate(fits: Fits | None, layers: int, stages: int) -> np.ndarray:
    """Return whether a stage may have the layers from first to end, bool `[stages, layers, layers + 1]`."""
    allowed = np.ones((stages, layers, layers + 1), np.bool_)
    if fits is None:
        return allowed
    if isinstance(fits, np.ndarray):
        return fits
    for stage in range(stages):
        # Every other stage has a layer; the first begins with the first, the last ends with the
        # last.
        for first in range(stage, layers - stages + stage + 1 if stage else 1):
            begin = first + 1 if stage < stages - 1 else layers
            for end in range(begin, layers - stages + stage + 2):
                allowed[stage, first, end] = fits(first, end, stage)
    return allowed


@njit(cache=True)
def _least_largest(prefix, allowed):
    """Return the seconds of the largest stage in the partition where these are least, infinity where none fits."""
    stages, layers = allowed.shape[:2]
    # best[k, j]: of the first j layers in k stages.
    best = np.full((stages + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    for stage in range(stages):
        for end in range(stage + 1, layers - stages + stage + 2):
            for first in range(stage, end):
                if allowed[stage, first, end]:
                    largest = max(best[stage, first], prefix[end] - prefix[first])
                    best[stage + 1, end] = min(best[stage + 1, end], largest)
    return best[stages, layers]


@njit(cache=True)
def _fewest_bytes(prefix, cut, allowed, limit, count):
    """Return the `count` best partitions, int64 `[found, stages - 1]`, of those with no stage above the limit."""
    stages, layers = allowed.shape[:2]
    # Of the first j layers in k stages, the best first: bytes, sum of squares, where the last stage
    # begins, and which of the partitions that end there it continues. One place more than asked for
    # takes what falls out of a full list.
    best = np.zeros((stages + 1, layers + 1, count + 1, 4))
    counts = np.zeros((stages + 1, layers + 1), np.int64)
    counts[0, 0] = 1
    for stage in range(stages):
        for end in range(stage + 1, layers - stages + stage + 2):
            ranked = best[stage + 1, end]
            for first in range(stage, end):
                seconds = prefix[end] - prefix[first]
                if seconds > limit or not allowed[stage, first, end]:
                    continue
                sent = cut[first] if stage else 0.0
                for k in range(counts[stage, first]):
                    size = best[stage, first, k, 0] + sent
                    square = best[stage, first, k, 1] + seconds**2
                    place = counts[stage + 1, end]
                    counts[stage + 1, end] = min(place + 1, count)
                    while place > 0 and (
                        size < ranked[place - 1, 0]
                        or (
                            size == ranked[place - 1, 0]
                            and square < ranked[place - 1, 1] * (1 - ROUNDING)
                        )
                    ):
                        ranked[place] = ranked[place - 1]
                        place -= 1
                    ranked[place, 0], ranked[place, 1] = size, square
                    ranked[place, 2], ranked[place, 3] = first, k
    cuts = np.zeros((counts[stages, layers], stages - 1), np.int64)
    for n in range(len(cuts)):
        end, k = layers, n
        for stage in range(stages - 1, 0, -1):
            origin = best[stage + 1, end, k]
            end, k = int(origin[2]), int(origin[3])
            cuts[n, stage - 1] = end
    return cuts
