"""List the ways to run each tower of a model on some devices that fit in memory, with their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.config import Layout
from mmjax.planning.exchange_time import collective_seconds
from mmjax.planning.hardware import Cluster
from mmjax.planning.partition import partition

ENCODER_STAGES = 8  # at most: an encoder that is too slow gets more ranks
LLM_STAGES = 64  # at most
# that are tried with context, expert and virtual parallelism
FEW_STAGES = tuple(2**k for k in range(6))
SHORT_ROWS = 8  # parts of a row at most, of which so many in one row are looked at


class RowLengths(NamedTuple):
    """Lengths of the samples or items in a tower's rows, as shares of a step's work in the tower."""

    shares: np.ndarray  # of drawn ones, rising
    count: float  # in a step

    def row_share(self, microbatches: int, rows: np.ndarray) -> np.ndarray:
        """Return the share of a step's work that each row of a microbatch takes, padding included.

        All are as long as the fullest. That holds the longest part; and of a part more than there
        are rows two lie in one row, of a part more than twice as many three, so it holds two or
        three times the shortest of these.
        """
        return _fullest_rows(
            self.shares, self.count / microbatches, microbatches, np.asarray(rows, np.float64)
        )

    def longest(self, microbatches: int) -> float:
        """Return the share of the longest part of a microbatch, as expected."""
        return _quantile(self.shares, _of_longest(self.count / microbatches))


@njit(cache=True)
def _quantile(rising, share):
    return rising[int(np.rint(share * (len(rising) - 1)))]


@njit(cache=True)
def _of_longest(parts):
    """Return the expected quantile of the longest of n lengths: 1 - 1 / (n + 1)."""
    return 1 - 1 / (parts + 1)


# A microbatch's parts (its samples) in `number` rows: with 10 parts in 4 rows, some row holds at
# least 3 of the 9 longest. Of the parts sorted from the longest, part 8 is the shortest of these,
# so the fullest row has 3 times that at least; likewise 2 times part 4, and once the longest.
@njit(cache=True)
def _fullest_rows(rising, parts, microbatches, rows):
    shares = np.empty(rows.size)
    for place, number in enumerate(rows.flat):
        share = max(1 / (microbatches * number), _quantile(rising, _of_longest(parts)))
        for n in range(1, SHORT_ROWS):
            if n * number < parts:
                share = max(share, (n + 1) * _quantile(rising, 1 - n * number / parts))
        shares[place] = share
    return shares.reshape(rows.shape)


@dataclass(frozen=True, eq=False)
class TowerCosts:
    """Costs of a tower's layers on the devices of one rank.

    Seconds and bytes of a microbatch are those of a step's whole work: a rank has a share of it in
    each microbatch. Arrays have an entry for each layer; the first and last have what comes before
    and behind the layers.
    """

    # tensor and context parallelism of a rank's devices, and expert parallelism of its ranks
    layout: Layout
    # of the layers, which a number of shards divides: others would leave parameters whole
    width: int
    forward: np.ndarray  # seconds
    backward: np.ndarray  # seconds without recomputation; 0 where no gradient is wanted
    lengths: RowLengths
    # seconds of a layer's forward and backward pass, however little it computes
    launch: tuple[float, float]
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
    experts: float = 0.0  # share of the parameters that are experts

    @property
    def devices(self) -> int:
        """Count the devices of a rank."""
        return self.layout.tensor * self.layout.context

    @cached_property
    def prefix_sums(self) -> np.ndarray:
        """Return the sums of the fields in SUMMED over the layers before every layer, and over all of them."""
        return np.stack([np.append(0.0, np.cumsum(getattr(self, name))) for name in SUMMED])


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

    # of the LLM, encoders and generators, with each layout
    towers: Mapping[str, Sequence[TowerCosts]]
    cluster: Cluster
    room: float  # bytes of a device
    # numbers of ranks that a tower may have, such as the divisors of a step's samples
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    samples: float = np.inf  # of a step; every rank has one in each microbatch
    generators: tuple[str, ...] = ()  # towers that stand behind the LLM
    # long ones, for which there is room in what a rank sends to each other
    exchanged_items: int = 1
    # numbers of parts that an LLM's layers on each stage's devices may have
    virtual: tuple[int, ...] = (1,)
    one_stage: tuple[str, ...] = ()  # towers that are not cut, beside generators

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the towers before the LLM."""
        return tuple(name for name in self.towers if name not in ("llm", *self.generators))


class TowerOptions(NamedTuple):
    """Ways to run a tower in one number of stages, all of which fit in memory: `[options]` or `[options, stages]`.

    With virtual stages, `stages` are all parts, of which the devices of a stage have every
    `workers`-th.
    """

    costs: TowerCosts
    cuts: tuple[int, ...]
    virtual: int
    in_flight: int  # microbatches in its first stage, of as many as there may be
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
        return self.data * self.fsdp * self.costs.layout.expert

    @property
    def item_ranks(self) -> np.ndarray:
        """Return the numbers of ranks over which items lie."""
        return self.ranks * self.costs.layout.context

    @property
    def workers(self) -> int:
        """Count the groups of devices."""
        return (len(self.cuts) + 1) // self.virtual

    @property
    def devices(self) -> np.ndarray:
        """Return the numbers of devices."""
        return self.costs.devices * self.ranks * self.workers

    @property
    def passes(self) -> np.ndarray:
        """Return the seconds of a microbatch's passes through each stage."""
        return self.forward + self.backward

    def by_worker(self, values: np.ndarray) -> np.ndarray:
        """Add up values of stages by the devices that have them."""
        return fold(values, self.virtual)


Choice = tuple[TowerOptions, int]  # one of the options


def fold(values: np.ndarray, virtual: int) -> np.ndarray:
    """Add up values of stages, the last axis, by the devices that have them."""
    if virtual == 1:
        return values
    return values.reshape(*values.shape[:-1], virtual, values.shape[-1] // virtual).sum(-2)


@lru_cache(maxsize=512)
def interleaved_in_flight(
    workers: int, virtual: int, microbatches: int, stages_after: int
) -> np.ndarray:
    """Return how many microbatches are in flight in each virtual stage, with so many other stages behind the last."""
    # With 2 workers, 2 parts of each and 4 microbatches, a worker's forward passes are of parts
    # 0 0 1 1 0 0 1 1, and its backward passes of parts 1 1 0 0 1 1 0 0.
    total = microbatches * virtual
    part = np.arange(total) % (workers * virtual) // workers  # of each of a worker's forward passes
    # passes of each part before each, forward and backward
    ran = np.zeros((2, total + 1, virtual), np.int64)
    ran[0, 1:] = (part[:, None] == np.arange(virtual)).cumsum(0)
    ran[1, 1:] = ran[0, 1:, ::-1]
    in_flight = np.zeros((virtual, workers), np.int64)
    for worker in range(workers):
        # The warm-up of Megatron-LM, then passes in turn: before each backward pass most are in
        # flight.
        warmup = min(total, 2 * (workers - worker - 1) + (virtual - 1) * workers + stages_after)
        in_turn = ran[0, warmup + 1 :] - ran[1, : total - warmup]
        in_flight[:, worker] = np.maximum(ran[0, warmup], in_turn.max(0, initial=0))
    return in_flight.ravel()


def first_padded_rows(problem: Problem, microbatches: int) -> float:
    """Return the least number of ranks for which an encoder's rows have padding; infinity where none has."""
    ranks = np.array(problem.ranks)
    padded = np.zeros(len(ranks), np.bool_)
    for name, ways in problem.towers.items():
        if name != "llm":
            full = 1 / (microbatches * ranks) * (1 + 1e-9)
            padded |= ways[0].lengths.row_share(microbatches, ranks) > full
    return float(ranks[padded].min(initial=np.iinfo(np.int64).max))


def list_options(
    problem: Problem, tower: str, microbatches: int, stages_after: int = 0, rows: int = 1
) -> list[TowerOptions]:
    """List the ways to run a tower that fit, by layout, number of stages and of virtual ones.

    stages_after: microbatches in flight in the LLM's first stage, behind an encoder. rows: that an
    encoder has in a microbatch at least, the LLM's ranks. Behind the LLM are the generators, behind
    which there is nothing.
    """
    if tower == "llm":
        stages_after = int(bool(problem.generators))  # each is one stage
    elif tower in problem.generators:
        stages_after = 0
    all_options = []
    for costs in problem.towers[tower]:
        max_stages = min(LLM_STAGES if tower == "llm" else ENCODER_STAGES, len(costs.forward))
        max_stages = 1 if tower in (*problem.generators, *problem.one_stage) else max_stages
        max_stages = min(max_stages, problem.cluster.devices // costs.devices)
        beside = costs.layout.context * costs.layout.expert
        for stages, virtual in product(
            range(1, max_stages + 1), problem.virtual if tower == "llm" else (1,)
        ):
            if beside * virtual > 1 and stages not in FEW_STAGES:
                continue
            divides = microbatches % stages == 0 and stages * virtual <= len(costs.forward)
            if virtual > 1 and (stages == 1 or beside > 1 or not divides):
                continue
            options = stage_options(
                problem, costs, stages, microbatches, stages_after, rows, virtual
            )
            if len(options.data):
                all_options.append(options)
    return all_options


class StageWork(NamedTuple):
    """Seconds and bytes of a rank's device in stages, `[..., stages]`, of one microbatch or of a step's end."""

    forward: np.ndarray
    backward: np.ndarray  # 0 where there is none
    gathered: np.ndarray  # seconds of gathering parameters
    scattered: np.ndarray  # seconds of scattering gradients
    state: np.ndarray  # bytes
    reduced: np.ndarray  # seconds of adding gradients over replicas, at a step's end
    updated: np.ndarray  # seconds of the update

    def passes(self, again: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of both passes, behind which gathering and scattering hide. again: of recomputation."""
        backward = np.maximum(self.backward + again, self.gathered + self.scattered) * (
            self.backward > 0
        )
        return np.maximum(self.forward, self.gathered), backward

    def tail(self, virtual: int = 1) -> np.ndarray:
        """Return the seconds behind a step's last pass."""
        return fold(self.reduced, virtual).max(-1) + fold(self.updated, virtual).max(-1)


def stage_work(
    costs: TowerCosts,
    ends: np.ndarray,
    share: np.ndarray,
    shards: np.ndarray,
    gather: np.ndarray,
    reduce: np.ndarray,
) -> StageWork:
    """Add up the costs of a tower's layers in stages, of which one ends where the next begins.

    share: of a step's work, for each way to split ranks. shards: of parameters. gather, reduce: as
    `link_seconds` returns them. Returns `[ways, stages]`.
    """
    return StageWork._make(
        _stage_work(costs.prefix_sums, np.array(costs.launch), ends, share, shards, gather, reduce)
    )


@njit(cache=True)
def _stage_work(prefix_sums, launch, ends, share, shards, gather, reduce):
    ways = len(share)
    stages = len(ends) - 1
    forward, backward, gathered, scattered, state, reduced, updated = np.zeros((7, ways, stages))
    for stage in range(stages):
        layers = ends[stage + 1] - ends[stage]
        # In the order of SUMMED.
        of_stage = prefix_sums[:, ends[stage + 1]] - prefix_sums[:, ends[stage]]
        for way in range(ways):
            forward[way, stage] = (
                share[way] * of_stage[0] + layers * launch[0] + of_stage[2] / shards[way]
            )
            if of_stage[1] > 0:
                backward[way, stage] = (
                    share[way] * of_stage[1] + layers * launch[1] + of_stage[3] / shards[way]
                )
            state[way, stage] = of_stage[4] / shards[way]
            gathered[way, stage] = gather[way] * of_stage[5]
            scattered[way, stage] = gather[way] * of_stage[6]
            reduced[way, stage] = 2 * reduce[way] * of_stage[7] / shards[way]
            updated[way, stage] = of_stage[8] / shards[way]
    return forward, backward, gathered, scattered, state, reduced, updated


@lru_cache(maxsize=4096)
def _cut(costs: TowerCosts, stages: int) -> np.ndarray:
    """Cut a tower by time; return where its stages begin, and where the last ends."""
    return np.array((0, *partition(costs.forward + costs.backward, stages), len(costs.forward)))


def stage_options(
    problem: Problem,
    costs: TowerCosts,
    stages: int,
    microbatches: int,
    stages_after: int = 0,
    rows: int = 1,
    virtual: int = 1,
) -> TowerOptions:
    """List the ways to run a tower in so many stages that fit and that no other dominates; as `list_options`."""
    splits = list_splits(problem.cluster, costs.layout, problem.ranks, costs.width, costs.experts)
    ranks = splits[:, 0] * splits[:, 1] * costs.layout.expert
    usable = (costs.devices * ranks * stages <= problem.cluster.devices) & (
        ranks * microbatches <= problem.samples
    )
    splits = splits[usable]
    ranks = ranks[usable]
    ends = _cut(costs, stages * virtual)
    most_rows = np.maximum(rows, ranks)
    share = costs.lengths.row_share(microbatches, most_rows) * most_rows / ranks
    if virtual > 1:
        in_flight = interleaved_in_flight(stages, virtual, microbatches, stages_after)
    else:  # as many microbatches as stages follow, and one
        in_flight = stages_after + np.arange(stages, 0, -1)
    first = int(in_flight[0])
    in_flight = np.minimum(microbatches, in_flight)
    data, fsdp, gather, reduce = splits.T
    work = stage_work(
        costs, ends, share, fsdp * (costs.layout.expert * costs.layout.context), gather, reduce
    )
    of_layers = (
        np.array(costs.peak),
        costs.passed,
        costs.saved[::-1].copy(),
        costs.again[::-1].copy(),
    )
    again, fits = _recompute_what_is_over(
        work.state, share, ends, in_flight, problem.room, *of_layers, virtual
    )
    if not fits.all():
        work = StageWork._make(column[fits] for column in work)
        again, share, data, fsdp = again[fits], share[fits], data[fits], fsdp[fits]
    forward, backward = work.passes(again)
    tail = work.tail(virtual)
    edge = share * costs.passed / link_bandwidth(problem.cluster)
    stays = _undominated(np.concatenate([forward, backward, tail[:, None]], axis=1), data * fsdp)
    return TowerOptions(
        costs=costs,
        cuts=tuple(ends[1:-1].tolist()),
        virtual=virtual,
        in_flight=first,
        data=data[stays].astype(np.int64),
        fsdp=fsdp[stays].astype(np.int64),
        share=share[stays],
        edge=edge[stays],
        forward=forward[stays],
        backward=backward[stays],
        tail=tail[stays],
    )


@njit(cache=True)
def _recompute_what_is_over(
    state, share, ends, in_flight, room, peak, passed, saved, again, virtual
):
    """Return the seconds of recomputation with which ways to split ranks fit, `[ways, stages]`, and which do.

    saved, again: by remat policy, bytes rising. Of virtual stages the devices have every
    `workers`-th.
    """
    ways, stages = state.shape
    workers = stages // virtual
    seconds = np.zeros((ways, stages))
    fits = np.ones(ways, np.bool_)
    for way in range(ways):
        for worker in range(workers):
            fixed = share[way] * peak[1 if worker == workers - 1 else 0]
            layers = 0
            for stage in range(worker, stages, workers):
                fixed += state[way, stage] + share[way] * 2 * in_flight[stage] * passed
                layers += in_flight[stage] * (ends[stage + 1] - ends[stage])
            per_layer = (room - fixed) / (share[way] * layers)
            if not per_layer >= saved[0]:
                fits[way] = False
                break
            # Between two policies, layers of both are mixed: their seconds lie on the line between.
            of_layer = again[-1]  # with all that a layer may keep
            for n in range(len(saved) - 1):
                if saved[n] <= per_layer < saved[n + 1]:
                    part = (per_layer - saved[n]) / (saved[n + 1] - saved[n])
                    of_layer = again[n] + part * (again[n + 1] - again[n])
            for stage in range(worker, stages, workers):
                seconds[way, stage] = share[way] * (ends[stage + 1] - ends[stage]) * of_layer
    return seconds, fits


def link_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second between stages: links of a node count only where the cluster is one node."""
    return cluster.device.link_rate if cluster.nodes == 1 else cluster.device.network_rate


@lru_cache
def list_splits(
    cluster: Cluster, layout: Layout, ranks: tuple[int, ...], width: int, experts: float = 0.0
) -> np.ndarray:
    """List the ways to split ranks into replicas and shards, float64 `[ways, 4]`.

    Columns: data, fsdp, and the seconds to gather a byte over the shards and to scatter it over the
    replicas. Expert and context parallelism shard parameters too; `experts`, a share of them, are
    not gathered along the first.
    """
    expert = layout.expert
    shards = [
        2**k
        for k in range(max(ranks).bit_length())
        if width % (2**k * expert * layout.context) == 0
    ]
    ways = [
        (n // (fsdp * expert), fsdp) for n in ranks for fsdp in shards if n % (fsdp * expert) == 0
    ]
    links = [
        link_seconds(cluster, replace(layout, data=data, fsdp=fsdp), experts) for data, fsdp in ways
    ]
    return np.array(
        [(*way, *link) for way, link in zip(ways, links, strict=True)], np.float64
    ).reshape(-1, 4)


def link_seconds(cluster: Cluster, layout: Layout, experts: float) -> tuple[float, float]:
    """Return the seconds to gather a byte of parameters over the shards and to scatter it over the replicas."""
    tensor = layout.tensor
    shards = layout.fsdp * layout.context
    gather = (1 - experts) * collective_seconds(1.0, shards * layout.expert, tensor, cluster)
    gather += experts * collective_seconds(
        1.0 / layout.expert, shards, tensor * layout.expert, cluster
    )
    return gather, collective_seconds(1.0, layout.data, tensor * shards * layout.expert, cluster)


@njit(cache=True)
def _undominated(seconds: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the options that no other with as many ranks beats in every pass and behind the last; bool `[options]`.

    seconds: float64 `[options, 2 * stages + 1]`; options of as many ranks are neighbours. Of equals
    the first stays.
    """
    stays = np.ones(len(ranks), np.bool_)
    first = 0
    for n in range(len(ranks)):
        if ranks[n] != ranks[first]:
            first = n
        second = first
        while stays[n] and second < len(ranks) and ranks[second] == ranks[n]:
            worse = second != n
            equal = True
            for k in range(seconds.shape[1]):
                if not worse or seconds[second, k] > seconds[n, k]:
                    worse = False
                    break
                equal = equal and seconds[second, k] == seconds[n, k]
            if worse and not (equal and second > n):
                stays[n] = False
            second += 1
    return stays
