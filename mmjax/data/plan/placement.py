"""Where the samples and items of a microbatch are processed: on which rank, in which row, at which offset.

Which samples these are is decided before (`grouping`); here is only decided who computes what, so that ranks wait for
each other as little as possible. OrchMLLM sections 5 to 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from mmjax.balance.parts import LLM, Parts
from mmjax.balance.phase_costs import Costs, costs_of
from mmjax.balance.phases import (
    PhasePlan,
    place_apart,
    place_by_llm,
    place_jointly,
    ranks_in_order,
    usual_widths,
    widest,
)
from mmjax.balance.place import split, to_rows
from mmjax.config import LlmBalance, NoBalance, PostBalance
from mmjax.data.plan.budget import Lengths
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import LengthIndex

Balance = PostBalance | LlmBalance | NoBalance


@dataclass(frozen=True)
class Topology:
    """ranks: how many the rows are spread over. peers: neighbours that send encoder outputs to each other.

    ranks_per_node: neighbours on one host. `peers` and `ranks_per_node` divide the ranks. encoders_per_rank: over how
    many encoder ranks an encoder's rows on a rank are spread.
    """

    ranks: int = 1
    peers: int = 1
    ranks_per_node: int = 1
    encoders_per_rank: int = 1


ONE_RANK = Topology()


class Shape(NamedTuple):
    """One compiled program."""

    lengths: Lengths  # positions of a row of every module
    widths: tuple[int, ...]  # of every encoder: tokens that a rank can send to each of its peers; 0 = nothing travels


@dataclass(frozen=True)
class MicrobatchPlan:
    """Where the parts of one microbatch lie. Parts are in CSR order: each sample's LLM part, then its items."""

    samples: np.ndarray  # int64 [n]: ids in the length index
    part_start: np.ndarray  # int64 [n + 1]
    module: np.ndarray  # int32 [p]: 0 = LLM
    row: np.ndarray  # int32 [p]: rank * rows of the module on a rank + row on the rank
    offset: np.ndarray  # int64 [p]
    length: np.ndarray  # int64 [p]
    shape: Shape
    rows: Lengths  # of each module on one rank
    topology: Topology
    unbalanced: np.ndarray  # int64 [modules, encoder ranks]: as `work` would be with balance `none`

    def work(self) -> np.ndarray:
        """Positions of each rank, int64 `[modules, encoder ranks]`; the LLM's stand at all encoder ranks of a rank."""
        return _work(self.module, self.row, self.length, self.rows, self.topology)

    def rank(self) -> np.ndarray:
        """Where each part is processed, int32 `[p]`."""
        return self.row // np.array(self.rows, np.int32)[self.module]

    def sample_of(self) -> np.ndarray:
        """The sample of each part, as an index into `samples`, int64 `[p]`."""
        return np.repeat(np.arange(len(self.samples)), np.diff(self.part_start))


class _Asked(NamedTuple):
    """What a group's samples ask for."""

    parts: Parts
    tokens: np.ndarray  # int64 [p]: of the LLM
    row: np.ndarray | None  # as in Group

    @property
    def llm(self) -> np.ndarray:
        """Which part is each sample's in the LLM, int64 `[n]`."""
        return self.parts.sample_start[:-1]


class Placed(NamedTuple):
    """A way to place one microbatch. row: int32 `[p]`. needs: int64 `[modules + encoders]`, fullest rows and widths."""

    row: np.ndarray
    needs: np.ndarray


@dataclass(frozen=True)
class Placer:
    """Places microbatches on ranks so that they fit a compiled shape, the cheapest that can be found.

    rows: of each module on one rank. flops: float64 `[modules]`, of one position. price: float64
    `[modules + encoders]`, what one more position of a row, or one more token of width, costs. shapes: the cheapest
    first; the last holds every sample alone.
    """

    index: LengthIndex
    balance: Balance
    topology: Topology
    rows: Lengths
    flops: np.ndarray
    price: np.ndarray
    shapes: tuple[Shape, ...] = ()
    columns: int = 1  # of the rows of grouping: all parts of a sample lie in one

    @property
    def in_columns(self) -> bool:
        """Whether every rank takes whole columns of the rows that grouping has filled: nothing is placed or sent."""
        whole = self.columns > 1 and self.columns % self.topology.ranks == 0
        return whole and self.topology.encoders_per_rank == 1

    def place(self, group: Group) -> list[MicrobatchPlan]:
        """Where the group's parts lie. Where it fits no shape, it becomes several microbatches."""
        asked = self._asked(group)
        # Widths of shapes first, then those by which the shapes were found.
        widths = self._widths(), usual_widths(self._costs(asked))
        for ways in (ways for allowed in widths for ways in self._ways(asked, allowed)):
            choices = [(*rank, placed) for placed in ways if (rank := self._shape(placed)) is not None]
            if choices:
                _, number, placed = min(choices, key=lambda choice: choice[:2])
                return [self._plan(group.samples, asked, placed, self.shapes[number])]
        if len(group.samples) < 2:
            raise AssertionError(f"sample {group.samples[0]} fits no compiled shape")
        half = split(asked.parts.totals(len(self.rows)), 2)
        return [plan for h in (0, 1) for plan in self.place(Group(group.samples[half == h], None))]

    def needs(self, group: Group, lengths: np.ndarray | None = None) -> np.ndarray:
        """What a group needs in each way that its balance asks for, int64 `[ways, modules + encoders]`.

        With `post`, in all ways that do not exceed `lengths` `[modules]`, if there are any.
        """
        asked = self._asked(group)
        tiers = [[way.needs for way in ways] for ways in self._ways(asked, usual_widths(self._costs(asked)))]
        ways = tiers[0]
        if lengths is not None and isinstance(self.balance, PostBalance):
            fitting = [n for tier in tiers for n in tier if np.all(n[: len(lengths)] <= lengths)]
            ways = fitting or ways
        return np.stack(ways)

    def needs_alone(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """What a sample needs if it has a rank for itself, and if its items are spread over the rank's peers."""
        asked = self._asked(Group(np.array([sample]), None))
        return self._at(asked, np.zeros(len(asked.tokens), np.int32)).needs, self._spread(asked).needs

    def _asked(self, group: Group) -> _Asked:
        return _Asked(self.index.parts(group.samples), self.index.tokens(group.samples), group.row)

    # ------------------------------------------------------------------------------------------- ways to place a group

    def _ways(self, asked: _Asked, widths: Sequence[Sequence[int]]) -> Iterator[list[Placed]]:
        """Ways to place these parts: those that the balance asks for, then others for where these do not fit."""
        ranks, peers = self.topology.ranks, self.topology.peers
        yield self._balanced(asked, widths)
        if asked.row is not None and 1 < ranks == peers:  # else what grouping fitted in rows may be on two nodes
            yield [self._in_rows(asked, self._nearest_rows(asked))]
        if len(asked.parts) == 1 and peers > 1:
            yield [self._spread(asked)]

    def _balanced(self, asked: _Asked, widths: Sequence[Sequence[int]]) -> list[Placed]:
        ranks, peers = self.topology.ranks, self.topology.peers
        in_order = self._sample_ranks(asked)
        columns = self.in_columns and asked.row is not None
        if ranks == 1 or len(asked.parts) == 0 or isinstance(self.balance, NoBalance) or columns:
            return [self._in_order(asked, in_order)]
        costs = self._costs(asked)
        if isinstance(self.balance, LlmBalance):
            return [self._by(asked, place_by_llm(costs, ranks))]
        if self.balance.locality == "off":
            return [self._by(asked, place_apart(costs, ranks))]
        plans = [place_jointly(costs, ranks, peers, widths, in_order)]
        if plans[0].width.any():  # whether what it gains is worth an exchange, the shapes say
            plans.append(place_jointly(costs, ranks, peers, None, in_order))
        return [self._by(asked, plan) for plan in plans]

    def _sample_ranks(self, asked: _Asked) -> np.ndarray:
        """The rank of each sample if nothing is balanced, int32 `[n]`: that of its row in the LLM, or in order."""
        if asked.row is None:
            return ranks_in_order(len(asked.parts), self.topology.ranks)
        return asked.row[asked.llm] // np.int32(self.rows[LLM])

    def _in_order(self, asked: _Asked, sample_rank: np.ndarray) -> Placed:
        """Samples on these ranks, in the rows of grouping; items on the rank of their sample."""
        home = sample_rank[asked.parts.sample()]
        if asked.row is None:
            return self._at(asked, home)
        if np.array_equal(self._ranks(asked, asked.row), home):
            return self._in_rows(asked, asked.row)
        row = np.where(asked.parts.module == LLM, asked.row, self._at(asked, home).row)
        return self._in_rows(asked, row)

    def _by(self, asked: _Asked, plan: PhasePlan) -> Placed:
        rank = np.empty(len(asked.tokens), np.int32)
        rank[asked.llm] = plan.sample_rank
        rank[asked.parts.module != LLM] = plan.item_rank
        return self._at(asked, rank)

    def _at(self, asked: _Asked, rank: np.ndarray) -> Placed:
        """Parts on these ranks `[p]`, in the rows of each as evenly as longest first makes it."""
        if max(self.rows) == 1:
            return self._in_rows(asked, rank)
        return self._in_rows(asked, to_rows(asked.parts.module, asked.parts.length, rank, np.array(self.rows))[0])

    def _spread(self, asked: _Asked) -> Placed:
        """One sample on the first rank, its items over all peers."""
        rows = np.array(self.rows) * self.topology.peers
        rows[LLM] = self.rows[LLM]
        group = np.zeros(len(asked.tokens), np.int64)
        return self._in_rows(asked, to_rows(asked.parts.module, asked.parts.length, group, rows)[0])

    def _in_rows(self, asked: _Asked, row: np.ndarray) -> Placed:
        parts, ranks, modules = asked.parts, self.topology.ranks, len(self.rows)
        used = np.zeros((modules, ranks * max(self.rows)), np.int64)
        np.add.at(used, (parts.module, row), parts.length)
        rank = self._ranks(asked, row)
        home = rank[asked.llm][parts.sample()]
        width = np.zeros(modules - 1, np.int64)
        for k in np.unique(parts.module[rank != home]):
            of = np.flatnonzero(parts.module == k)
            width[k - 1] = widest(rank[of], home[of], asked.tokens[of], ranks)
        return Placed(row, np.concatenate([used.max(1), width]))

    def _nearest_rows(self, asked: _Asked) -> np.ndarray:
        """The rows of grouping, those of encoders renumbered so that most of what they hold is with its sample."""
        row, ranks = asked.row, self.topology.ranks
        nearest, home = row.copy(), self._ranks(asked, row)[asked.llm][asked.parts.sample()]
        for k, each in enumerate(self.rows[1:], start=1):
            of = np.flatnonzero(asked.parts.module == k)
            at_home = np.zeros((ranks * each, ranks), np.int64)
            np.add.at(at_home, (row[of], home[of]), asked.tokens[of])
            before, after = linear_sum_assignment(np.repeat(at_home, each, axis=1), maximize=True)
            renumbered = np.empty(ranks * each, np.int32)
            renumbered[before] = after
            nearest[of] = renumbered[row[of]]
        return nearest

    def _ranks(self, asked: _Asked, row: np.ndarray) -> np.ndarray:
        return row // np.array(self.rows, np.int32)[asked.parts.module]

    # ---------------------------------------------------------------------------------------------------------- shapes

    def _shape(self, placed: Placed) -> tuple[bool, int] | None:
        """The cheapest shape that holds this: whether it sends nothing but padding for an encoder, and its number.

        One that does is chosen only where no other shape holds it.
        """
        modules, padded = len(self.rows), None
        for number, shape in enumerate(self.shapes):
            if np.all(placed.needs <= np.array(shape.lengths + shape.widths)):
                if not np.any((placed.needs[modules:] == 0) & (np.array(shape.widths) > 0)):
                    return False, number
                padded = padded or (True, number)
        return padded

    def _widths(self) -> list[tuple[int, ...]]:
        """For each encoder the widths that shapes have, ascending from 0."""
        return [tuple(sorted({0, *of})) for of in zip(*(shape.widths for shape in self.shapes), strict=True)]

    def _costs(self, asked: _Asked) -> Costs:
        """What every part costs. Rows of all modules are packed, so that is the operations of its positions."""
        parts = asked.parts
        items, cost = parts.module != LLM, parts.length * self.flops[parts.module]
        owner, tokens = parts.sample()[items], asked.tokens[items]
        return costs_of(cost[~items], owner, parts.module[items], cost[items], tokens, len(self.rows))

    def _plan(self, samples: np.ndarray, asked: _Asked, placed: Placed, shape: Shape) -> MicrobatchPlan:
        """In every row, parts lie one after the other in the order of the samples."""
        parts = asked.parts
        home = self._sample_ranks(asked)[parts.sample()]
        one_each = self.topology.encoders_per_rank == 1
        before = home * np.array(self.rows)[parts.module] if one_each else self._at(asked, home).row
        return MicrobatchPlan(
            samples,
            parts.sample_start,
            parts.module,
            placed.row,
            _offsets(placed.row.astype(np.int64) * len(self.rows) + parts.module, parts.length),
            parts.length,
            shape,
            self.rows,
            self.topology,
            _work(parts.module, before, parts.length, self.rows, self.topology),
        )


def _work(module: np.ndarray, row: np.ndarray, length: np.ndarray, rows: Lengths, topology: Topology) -> np.ndarray:
    """As in `MicrobatchPlan.work`, of parts in these rows."""
    each, llm = topology.encoders_per_rank, module == LLM
    work = np.zeros((len(rows), topology.ranks * each), np.int64)
    np.add.at(work, (module[~llm], row[~llm] // (np.array(rows) // each)[module[~llm]]), length[~llm])
    work[LLM] = np.repeat(np.bincount(row[llm] // rows[LLM], length[llm], topology.ranks).astype(np.int64), each)
    return work


def _offsets(row: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Where each part begins when those of equal row follow each other, int64."""
    by_row = np.argsort(row, kind="stable")
    before = np.cumsum(length[by_row]) - length[by_row]
    first = np.flatnonzero(np.diff(row[by_row], prepend=-1))
    offset = np.empty(len(row), np.int64)
    offset[by_row] = before - np.repeat(before[first], np.diff(first, append=len(row)))
    return offset
