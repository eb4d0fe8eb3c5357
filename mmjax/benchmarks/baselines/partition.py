"""Partitions as others make them, by name, for comparison with the exact one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from mmjax.planning.partition import Chain, iteration_seconds, partition


def by_parameters(chain: Chain, stages: int) -> tuple[int, ...]:
    """Make the stage with most parameters as small as possible."""
    return partition(chain.parameters, stages)


def by_layers(chain: Chain, stages: int) -> tuple[int, ...]:
    """Give every stage as many layers, as DeepSpeed's `uniform` does."""
    return cut_evenly(len(chain.forward), stages)


def cut_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Cut so many layers into stages of as many each, the first ones with one more where it does not come out even."""
    even, rest = divmod(layers, stages)
    return tuple(accumulate(even + (stage < rest) for stage in range(stages - 1)))


def by_profile(chain: Chain, stages: int) -> tuple[int, ...]:
    """Make the stage with the longest forward pass as short as possible, whatever its backward pass takes."""
    return partition(chain.forward, stages)


def omnibal(chain: Chain, stages: int) -> tuple[int, ...]:
    """Move each cut of a greedy anchor by at most one layer so that VAR + SUM(comm) is least (OmniBal section 4.2).

    VAR is in ms^2 (equation 4) and SUM in MB (equation 5), added up as in the paper. Of its
    3^(stages - 1) candidates this is the first by that rank, found by dynamic programming since
    both are sums over stages.
    """
    prefix = np.concatenate([[0.0], np.cumsum(chain.forward)]) * 1e3
    mean = prefix[-1] / stages
    layers = len(chain.forward)
    anchor = [0]
    for stage in range(1, stages):
        # Greedy: as close as possible to its share of the whole, with one layer at least for itself
        # and those behind.
        closest = int(np.argmin(np.abs(prefix - mean * stage)))
        anchor.append(min(max(closest, anchor[-1] + 1), layers - stages + stage))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the last cut
    for cut in anchor[1:]:
        best = {
            end: min(
                (
                    value + (prefix[end] - prefix[first] - mean) ** 2 + chain.cut_bytes[end] / 1e6,
                    (*cuts, end),
                )
                for first, (value, cuts) in best.items()
                if first < end
            )
            for end in range(cut - 1, cut + 2)
            if 0 < end < layers and min(best) < end
        }
    return min(
        (value + (prefix[-1] - prefix[end] - mean) ** 2, cuts)
        for end, (value, cuts) in best.items()
    )[1]


def cornstarch(chain: Chain, stages: int) -> tuple[int, ...]:
    """Cut the LLM into every number of stages, and encoders into stages that take as long (Cornstarch, algorithm 1).

    Encoders get the fewest stages of which none takes longer than the LLM's longest, or as many as
    there are. Of the combinations with at most `stages` in all, the one with the shortest iteration
    is kept; encoders run side by side.
    """
    *encoders, llm = np.split(chain.forward + chain.backward, chain.towers[1:])
    options = []
    for llm_stages in range(1, min(stages - len(encoders), len(llm)) + 1):
        llm_cuts = partition(llm, llm_stages)
        target = _longest(llm, llm_cuts)
        spare = stages - llm_stages - len(encoders)  # beside one stage for each encoder
        cuts = []
        for seconds in encoders:
            cuts.append(_cut_to_target(seconds, target, spare + 1))
            spare -= len(cuts[-1])
        begins = [
            start + cut
            for start, tower in zip(chain.towers, [*cuts, llm_cuts], strict=True)
            for cut in (0, *tower)
        ]
        options.append(tuple(begins[1:]))
    return min(options, key=lambda cuts: iteration_seconds(chain, cuts, side_by_side=True))


def _cut_to_target(seconds: np.ndarray, target: float, max_stages: int) -> tuple[int, ...]:
    """Cut a tower into the fewest stages of which none takes longer than `target`, but into `max_stages` at most."""
    cuts: tuple[int, ...] = ()
    for stages in range(2, min(max_stages, len(seconds)) + 1):
        if _longest(seconds, cuts) <= target:
            break
        cuts = partition(seconds, stages)
    return cuts


def _longest(seconds: np.ndarray, cuts: Sequence[int]) -> float:
    return float(np.add.reduceat(seconds, (0, *cuts)).max())


BASELINES: dict[str, Callable[[Chain, int], tuple[int, ...]]] = {
    "parameters": by_parameters,
    "layers": by_layers,
    "profile": by_profile,
    "omnibal": omnibal,
    "cornstarch": cornstarch,
}
