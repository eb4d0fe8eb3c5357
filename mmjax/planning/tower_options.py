"""List the ways to run each tower of a model on some devices that fit in memory, with their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.planning.hardware import Cluster
from mmjax.planning.partition import partition
from mmjax.planning.step_time import collective_seconds

TENSOR = (1, 2, 4, 8)
ENCODER_STAGES = 8  # at most: an encoder that is too slow gets more ranks
LLM_STAGES = 64  # at most


@dataclass(frozen=True, eq=False)
class TowerCosts:
    """Costs of a tower's layers at one degree of tensor parallelism, on one group of so many devices.

    Seconds and bytes of a microbatch are those of a step's whole work: a rank has a share of it in each microbatch.
    Arrays have an entry for each layer; the first and last have what comes before and behind the layers.
    """

    tensor: int
    width: int  # of the layers, which a number of shards divides: others would leave parameters whole
    forward: np.ndarray  # seconds
    backward: np.ndarray  # seconds without recomputation; 0 where no gradient is wanted
    # Share of the step's work in the smallest row that holds the longest sample or item of a microbatch, by how many
    # microbatches there are.
    smallest: Mapping[int, float]
    launch: tuple[float, float]  # seconds of a layer's forward and backward pass, however little it computes
    cast_forward: np.ndarray  # seconds of casting weights, unsharded
    cast_backward: np.ndarray  # and of adding gradients
    state: np.ndarray  # bytes of parameters, gradients and moments, unsharded
    gathered: np.ndarray  # bytes of parameters in the precision of the computation, unsharded
    scattered: np.ndarray  # bytes of gradients in that precision, unsharded
    gradients: np.ndarray  # bytes of float32 gradients, unsharded
    update: np.ndarray  # seconds, unsharded
    saved: np.ndarray  # bytes that a layer saves, by remat policy, falling
    again: np.ndarray  # seconds of a layer's recomputation, by remat policy, rising and convex
    peak: tuple[float, float]  # bytes of temporaries of a stage, and of the last one
    passed: float  # bytes of activations between layers, or of what leaves the tower
    tokens: float  # bytes that an encoder sends to the LLM; 0 for the LLM


SUMMED = (
    "forward",
    "backward",
    "cast_forward",
    "cast_backward",
    "state",
    "gathered",
    "scattered",
    "gradients",
    "update",
)  # fields of which a stage has the sum over its layers


class Problem(NamedTuple):
    """Costs of a model's towers, and the cluster whose devices are allocated to them."""

    towers: Mapping[str, Sequence[TowerCosts]]  # of the LLM and encoders, at each degree of tensor parallelism
    cluster: Cluster
    room: float  # bytes of a device
    ranks: tuple[int, ...]  # numbers of ranks that a tower may have, such as the divisors of a step's samples
    microbatches: tuple[int, ...]
    samples: float = np.inf  # of a step; every rank has one in each microbatch
    generator: str = ""  # the tower that stands behind the LLM, if there is one
    exchanged_items: int = 1  # long ones, for which there is room in what a rank sends to each other


class TowerOptions(NamedTuple):
    """Ways to run a tower in one number of stages, all of which fit in memory: `[options]` or `[options, stages]`."""

    costs: TowerCosts
    cuts: tuple[int, ...]
    data: np.ndarray
    fsdp: np.ndarray
    share: np.ndarray  # of the step's work, of a rank in a microbatch
    edge: np.ndarray  # seconds of a transfer between its stages
    forward: np.ndarray  # seconds
    backward: np.ndarray
    tail: np.ndarray  # seconds behind the last pass: the gradients' reduction and the update

    @property
    def ranks(self) -> np.ndarray:
        """Return the numbers of ranks."""
        return self.data * self.fsdp

    @property
    def devices(self) -> np.ndarray:
        """Return the numbers of devices."""
        return self.costs.tensor * self.ranks * (len(self.cuts) + 1)

    @property
    def passes(self) -> np.ndarray:
        """Return the seconds of a microbatch's passes through each stage."""
        return self.forward + self.backward


Choice = tuple[TowerOptions, int]  # one of the options


def list_options(problem: Problem, tower: str, microbatches: int, behind: int = 0, rows: int = 1) -> list[TowerOptions]:
    """List the ways to run a tower that fit, by degree of tensor parallelism and number of stages.

    behind: the LLM's stages behind an encoder, for each of which a microbatch more is in flight. rows: that an encoder
    has in a microbatch at least, the LLM's ranks. Behind the LLM is the generator, behind which there is nothing.
    """
    if tower == problem.generator:
        behind = 0
    elif problem.generator:
        behind += 1  # a generator is one stage
    all_options = []
    for costs in problem.towers[tower]:
        if problem.cluster.per_node % costs.tensor:  # a group lies within a node
            continue
        most = min(LLM_STAGES if tower == "llm" else ENCODER_STAGES, len(costs.forward))
        most = 1 if tower == problem.generator else most
        for stages in range(1, min(most, problem.cluster.devices // costs.tensor) + 1):
            options = stage_options(problem, costs, stages, microbatches, behind, rows)
            if len(options.data):
                all_options.append(options)
    return all_options


@lru_cache(maxsize=2048)
def _cut(costs: TowerCosts, stages: int) -> tuple[tuple[int, ...], np.ndarray, dict[str, np.ndarray]]:
    """Cut a tower by time; return the cuts, the stages' layers, and their sums of the fields in SUMMED."""
    cuts = partition(costs.forward + costs.backward, stages)
    begins = np.array((0, *cuts))
    sums = {name: np.add.reduceat(getattr(costs, name), begins) for name in SUMMED}
    return cuts, np.diff((*begins, len(costs.forward))), sums


def stage_options(
    problem: Problem, costs: TowerCosts, stages: int, microbatches: int, behind: int = 0, rows: int = 1
) -> TowerOptions:
    """List the ways to run a tower in so many stages that fit, without those that others beat; as `list_options`."""
    t = costs.tensor
    splits = list_splits(problem.cluster, t, problem.ranks, costs.width)
    ranks = splits[:, 0] * splits[:, 1]
    splits = splits[(t * ranks * stages <= problem.cluster.devices) & (ranks * microbatches <= problem.samples)]
    cuts, layers, total = _cut(costs, stages)
    # A microbatch's rows are as long as its longest sample or item, padding included.
    ranks = splits[:, :1] * splits[:, 1:2]
    share = np.maximum(1 / (microbatches * ranks), costs.smallest[microbatches] * np.maximum(1, rows / ranks))
    # As many microbatches as stages follow, and one.
    in_flight = np.minimum(microbatches, behind + np.arange(stages, 0, -1))
    peak = np.full(stages, costs.peak[0])
    peak[-1] = costs.peak[1]
    fixed = total["state"] / splits[:, 1:2] + share * (peak + 2 * in_flight * costs.passed)
    per_layer = (problem.room - fixed) / (in_flight * share * layers)
    fits = (per_layer >= costs.saved[-1]).all(1)
    splits, share, per_layer = splits[fits], share[fits], per_layer[fits]
    data, fsdp, gather, reduce = (column.reshape(-1, 1) for column in splits.T)
    again = share * layers * np.interp(per_layer, costs.saved[::-1], costs.again[::-1])
    forward = share * total["forward"] + layers * costs.launch[0] + total["cast_forward"] / fsdp
    forward = np.maximum(forward, gather * total["gathered"])
    backward = share * total["backward"] + again + layers * costs.launch[1] + total["cast_backward"] / fsdp
    backward = np.maximum(backward, gather * (total["gathered"] + total["scattered"])) * (total["backward"] > 0)
    tail = (2 * reduce * total["gradients"] / fsdp).max(1) + (total["update"] / fsdp).max(1)
    edge = share[:, 0] * costs.passed / link_bandwidth(problem.cluster)
    stays = _undominated(np.concatenate([forward, backward, tail[:, None]], axis=1), (data * fsdp)[:, 0])
    ways = (column[stays, 0].astype(np.int64) for column in (data, fsdp))
    return TowerOptions(costs, cuts, *ways, share[stays, 0], edge[stays], forward[stays], backward[stays], tail[stays])


def link_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second between stages: links of a node count only where the cluster is one node."""
    return cluster.device.link_rate if cluster.nodes == 1 else cluster.device.network_rate


@lru_cache
def list_splits(cluster: Cluster, tensor: int, ranks: tuple[int, ...], width: int) -> np.ndarray:
    """List the ways to split ranks into replicas and shards, float64 `[ways, 4]`.

    Columns: data, fsdp, and the seconds to gather a byte over the shards and to scatter it over the replicas.
    """
    shards = [2**k for k in range(max(ranks).bit_length()) if width % 2**k == 0]
    ways = [(n // fsdp, fsdp) for n in ranks for fsdp in shards if n % fsdp == 0]
    links = [
        (collective_seconds(1.0, fsdp, tensor, cluster), collective_seconds(1.0, data, tensor * fsdp, cluster))
        for data, fsdp in ways
    ]
    return np.column_stack([np.array(ways, np.float64), np.array(links)])


@njit(cache=True)
def _undominated(seconds: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the options that no other with as many ranks beats in every pass and behind the last; bool `[options]`.

    seconds: float64 `[options, 2 * stages + 1]`; options of as many ranks are neighbours. Of equals the first stays.
    """
    stays = np.ones(len(ranks), np.bool_)
    first = 0
    for n in range(len(ranks)):
        if ranks[n] != ranks[first]:
            first = n
        other = first
        while stays[n] and other < len(ranks) and ranks[other] == ranks[n]:
            worse = other != n
            equal = True
            for k in range(seconds.shape[1]):
                if not worse or seconds[other, k] > seconds[n, k]:
                    worse = False
                    break
                equal = equal and seconds[other, k] == seconds[n, k]
            if worse and not (equal and other > n):
                stays[n] = False
            other += 1
    return stays
