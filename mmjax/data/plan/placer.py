"""Place the samples and items of a microbatch: on which rank, in which row, at which offset each is processed.

Which samples these are is decided before (`grouping`); here is only decided who computes what, so
that ranks wait for each other as little as possible. OrchMLLM sections 5 to 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmjax.balance.level import level
from mmjax.balance.lpt import split, to_rows
from mmjax.balance.parts import LLM, Parts, offsets_by_key
from mmjax.balance.phases import (
    Costs,
    PhasePlan,
    candidate_widths,
    costs_of,
    largest_transfer,
    place_by_llm,
    place_each_phase,
    place_jointly,
    ranks_in_order,
)
from mmjax.balance.waits import Prices
from mmjax.config import LlmBalance, NoBalance, PostBalance
from mmjax.data.plan.budget import Lengths
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology

Balance = PostBalance | LlmBalance | NoBalance


class _Inputs(NamedTuple):
    """The parts to place of a group's samples, and how many of the LLM's tokens travel where they are apart."""

    parts: Parts
    tokens: np.ndarray  # int64 [p]: those that an encoder makes or a generator reads
    row: np.ndarray | None  # as in Group

    @property
    def llm(self) -> np.ndarray:
        """Return the index of each sample's LLM part, int64 `[n]`."""
        return self.parts.sample_start[:-1]


class _Placed(NamedTuple):
    """A way to place one microbatch. row: int32 `[p]`. needs: int64 `[modules + encoders]`, fullest rows and widths."""

    row: np.ndarray
    needs: np.ndarray


@dataclass(frozen=True)
class Placer:
    """Places microbatches on ranks so that they fit a compiled shape, the cheapest that can be found.

    rows: of each module on one rank. flops: float64 `[modules]`, of one position. price: float64
    `[modules + encoders]`, what one more position of a row, or one more token of width, costs.
    shapes: the cheapest first; the last holds every sample alone.
    """

    index: LengthIndex
    balance: Balance
    topology: Topology
    rows: Lengths
    flops: np.ndarray
    price: np.ndarray
    shapes: tuple[Shape, ...] = ()
    columns: int = 1  # of the rows of grouping: all parts of a sample lie in one
    compares_llm: bool = True  # whether `post` places as `llm` does where that needs less
    prices: Prices | None = None  # by which ranks are levelled; None: they are not
    # By the number of a generator, whose conditions go from rank to rank: tokens of text before
    # each image that do too.
    text_tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def in_columns(self) -> bool:
        """Tell whether every rank takes whole columns of the rows that grouping filled: nothing is placed or sent."""
        divides = self.columns > 1 and self.columns % self.topology.ranks == 0
        return divides and self.topology.encoders_per_rank == 1

    def place(self, group: Group) -> list[MicrobatchPlan]:
        """Place the group's parts. Where it fits no shape, it becomes several microbatches."""
        inputs = self._inputs(group)
        # Widths of shapes first, then those by which the shapes were found.
        # First widths that are compiled already.
        widths = self._widths(), candidate_widths(self._costs(inputs))
        for ways in (ways for allowed in widths for ways in self._ways(inputs, allowed)):
            choices = [
                (*rank, placed) for placed in ways if (rank := self._shape(placed)) is not None
            ]
            if choices:
                _, number, placed = min(choices, key=lambda choice: choice[:2])
                shape = self.shapes[number]
                return [
                    self._plan(group.samples, inputs, self._level(inputs, placed, shape), shape)
                ]
        if len(group.samples) < 2:
            raise AssertionError(f"sample {group.samples[0]} fits no compiled shape")
        # Two microbatches of half the samples each, and so on: a lone sample fits the last shape.
        half = split(inputs.parts.totals(len(self.rows)), 2)
        return [plan for h in (0, 1) for plan in self.place(Group(group.samples[half == h], None))]

    def needs(self, group: Group, lengths: np.ndarray | None = None) -> np.ndarray:
        """Measure what a group needs in each way that its balance asks for, int64 `[ways, modules + encoders]`.

        With `post`, in all ways that do not exceed `lengths` `[modules]`, if there are any.
        """
        inputs = self._inputs(group)
        tiers = [
            [way.needs for way in ways]
            for ways in self._ways(inputs, candidate_widths(self._costs(inputs)))
        ]
        ways = tiers[0]
        if lengths is not None and isinstance(self.balance, PostBalance):
            fitting = [n for tier in tiers for n in tier if np.all(n[: len(lengths)] <= lengths)]
            ways = fitting or ways
        return np.stack(ways)

    def needs_alone(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Measure what a sample needs with a rank for itself, and with its items spread over the rank's peers."""
        inputs = self._inputs(Group(np.array([sample]), None))
        return self._place_on_ranks(
            inputs, np.zeros(len(inputs.tokens), np.int32)
        ).needs, self._spread(inputs).needs

    def _inputs(self, group: Group) -> _Inputs:
        parts = self.index.parts(group.samples)
        tokens = self.index.tokens(group.samples)
        for number, text_tokens in self.text_tokens.items():
            tokens = tokens + text_tokens * (parts.module == number)
        return _Inputs(parts, tokens, group.row)

    # -------------------------------------------------------------------------------------------
    # ways to place a group

    def _ways(self, inputs: _Inputs, widths: Sequence[Sequence[int]]) -> Iterator[list[_Placed]]:
        """Yield ways to place these parts: those that the balance asks for, then others for where these do not fit."""
        topology = self.topology
        yield self._balanced(inputs, widths)
        if (
            inputs.row is not None and 1 < topology.ranks == topology.peers
        ):  # else what grouping fitted in rows may be on two nodes
            yield [self._in_rows(inputs, self._nearest_rows(inputs))]
        if len(inputs.parts) == 1 and topology.peers > 1:
            yield [self._spread(inputs)]

    def _balanced(self, inputs: _Inputs, widths: Sequence[Sequence[int]]) -> list[_Placed]:
        ranks = self.topology.ranks
        in_order = self._sample_ranks(inputs)
        columns = self.in_columns and inputs.row is not None
        if ranks == 1 or len(inputs.parts) == 0 or not self.balance.moves_samples or columns:
            return [self._in_order(inputs, in_order)]
        costs = self._costs(inputs)
        if isinstance(self.balance, LlmBalance):
            return [self._place_phases(inputs, place_by_llm(costs, ranks))]
        if self.balance.phases_apart:
            return [self._place_phases(inputs, place_each_phase(costs, ranks))]
        plans = [place_jointly(costs, ranks, self.topology.peers, widths, in_order)]
        if plans[0].width.any():  # whether what it gains is worth an exchange, the shapes say
            plans.append(place_jointly(costs, ranks, self.topology.peers, None, in_order))
        # jointly placed, equal ranks may have unequal rows
        if self.compares_llm and max(self.rows) > 1:
            plans.append(place_by_llm(costs, ranks))
        return [self._place_phases(inputs, plan) for plan in plans]

    def _sample_ranks(self, inputs: _Inputs) -> np.ndarray:
        """Return each sample's rank if nothing is balanced, int32 `[n]`: that of its row in the LLM, or in order."""
        if inputs.row is None:
            return ranks_in_order(len(inputs.parts), self.topology.ranks)
        return inputs.row[inputs.llm] // np.int32(self.rows[LLM])

    def _in_order(self, inputs: _Inputs, sample_rank: np.ndarray) -> _Placed:
        """Place samples on these ranks, in the rows of grouping; items on the rank of their sample."""
        home_rank = sample_rank[inputs.parts.sample()]
        if inputs.row is None:
            return self._place_on_ranks(inputs, home_rank)
        if self.topology.encoders_per_rank == 1 and np.array_equal(
            self._ranks(inputs, inputs.row), home_rank
        ):
            return self._in_rows(inputs, inputs.row)
        row = np.where(
            inputs.parts.module == LLM, inputs.row, self._place_on_ranks(inputs, home_rank).row
        )
        return self._in_rows(inputs, row)

    def _place_phases(self, inputs: _Inputs, plan: PhasePlan) -> _Placed:
        rank = np.empty(len(inputs.tokens), np.int32)
        rank[inputs.llm] = plan.sample_rank
        # Parts are in CSR order, items in that of `Costs`: both go sample by sample, so they line
        # up.
        rank[inputs.parts.module != LLM] = plan.item_rank
        return self._place_on_ranks(
            inputs, self._level_apart(inputs, rank) if self.balance.phases_apart else rank
        )

    def _place_on_ranks(self, inputs: _Inputs, rank: np.ndarray) -> _Placed:
        """Place parts on these ranks `[p]`, in the rows of each as evenly as longest first makes it."""
        if max(self.rows) == 1:
            return self._in_rows(inputs, rank)
        return self._in_rows(
            inputs, to_rows(inputs.parts.module, inputs.parts.length, rank, np.array(self.rows))[0]
        )

    def _level(self, inputs: _Inputs, placed: _Placed, shape: Shape) -> _Placed:
        """Exchange samples between ranks so that their attention is as equal as can be in rows of this shape."""
        settled = self.in_columns and inputs.row is not None  # grouping has levelled the columns
        if (
            self.prices is None
            or settled
            or not self.balance.moves_samples
            or self.balance.phases_apart
        ):
            return placed
        rank = self._ranks(inputs, placed.row)
        # Parts stay together with their sample.
        levelled = level(
            inputs.parts,
            rank,
            self.topology.ranks,
            np.array(self.rows),
            np.array(shape.lengths),
            self.prices,
        )
        if levelled is rank:
            return placed
        changed = np.isin(
            levelled, np.concatenate([rank[levelled != rank], levelled[levelled != rank]])
        )
        row = placed.row.copy()
        module, length = inputs.parts.module[changed], inputs.parts.length[changed]
        row[changed], _ = to_rows(module, length, levelled[changed], np.array(self.rows))
        exchanged = self._in_rows(inputs, row)
        return (
            exchanged
            if np.all(exchanged.needs <= np.array(shape.lengths + shape.widths))
            else placed
        )

    def _level_apart(self, inputs: _Inputs, rank: np.ndarray) -> np.ndarray:
        """Level the attention of every phase by itself, where no rank gets more positions than the fullest has."""
        if self.prices is None:
            return rank
        parts = inputs.parts
        levelled = rank.copy()
        for k, rows in enumerate(self.rows):
            chosen = np.flatnonzero(parts.module == k)
            fullest = np.bincount(rank[chosen], parts.length[chosen]).max(initial=0)
            if self.shapes:
                fullest = max(fullest, rows * self.shapes[0].lengths[k])
            start = np.arange(len(chosen) + 1)
            phase = Parts(
                start, np.zeros(len(chosen), np.int32), parts.length[chosen], parts.pairs[chosen]
            )
            prices = Prices(self.prices.position[k : k + 1], self.prices.pair[k : k + 1])
            room = np.array([-(-int(fullest) // rows)])
            levelled[chosen] = level(
                phase, rank[chosen], self.topology.ranks, np.array([rows]), room, prices
            )
        return levelled

    def _spread(self, inputs: _Inputs) -> _Placed:
        """Place one sample on the first rank, its items over all peers."""
        # Encoders' rows of all peers, the LLM's of the first rank alone.
        rows = np.array(self.rows) * self.topology.peers
        rows[LLM] = self.rows[LLM]
        group = np.zeros(len(inputs.tokens), np.int64)
        return self._in_rows(
            inputs, to_rows(inputs.parts.module, inputs.parts.length, group, rows)[0]
        )

    def _in_rows(self, inputs: _Inputs, row: np.ndarray) -> _Placed:
        parts = inputs.parts
        ranks = self.topology.ranks
        modules = len(self.rows)
        # Rows that a module lacks stay 0.
        used = np.zeros((modules, ranks * max(self.rows)), np.int64)
        np.add.at(used, (parts.module, row), parts.length)
        rank = self._ranks(inputs, row)
        home_rank = rank[inputs.llm][parts.sample()]
        # Only an encoder with an item away from its sample's rank needs an exchange; the others
        # keep width 0.
        width = np.zeros(modules - 1, np.int64)
        for k in np.unique(parts.module[rank != home_rank]):
            items = np.flatnonzero(parts.module == k)
            # Devices that share a rank's rows exchange with those of their own number, but for
            # conditions.
            context = 1 if int(k) in self.text_tokens else self.topology.context
            number = row[items] % self.rows[k] // (self.rows[k] // context) * ranks
            width[k - 1] = largest_transfer(
                number + rank[items],
                number + home_rank[items],
                inputs.tokens[items],
                ranks * context,
            )
        return _Placed(row, np.concatenate([used.max(1), width]))

    def _nearest_rows(self, inputs: _Inputs) -> np.ndarray:
        """Renumber grouping's rows of encoders so that most of what they hold is with its sample."""
        nearest = inputs.row.copy()
        home_rank = self._ranks(inputs, inputs.row)[inputs.llm][inputs.parts.sample()]
        for k, rows in enumerate(self.rows[1:], start=1):
            items = np.flatnonzero(inputs.parts.module == k)
            nearest[items] = _renumber_rows(
                inputs.row[items],
                home_rank[items],
                inputs.tokens[items],
                np.repeat(np.arange(self.topology.ranks), rows),
            )
        return nearest

    def _ranks(self, inputs: _Inputs, row: np.ndarray) -> np.ndarray:
        return row // np.array(self.rows, np.int32)[inputs.parts.module]

    # ----------------------------------------------------------------------------------------------
    # shapes

    def _shape(self, placed: _Placed) -> tuple[bool, int] | None:
        """Find the cheapest shape that holds this: whether it sends nothing but padding for an encoder, and its number.

        One that does is chosen only where no other shape holds it.
        """
        modules = len(self.rows)
        padded = None
        for number, shape in enumerate(self.shapes):
            if np.all(placed.needs <= np.array(shape.lengths + shape.widths)):
                if not np.any((placed.needs[modules:] == 0) & (np.array(shape.widths) > 0)):
                    return False, number
                padded = padded or (True, number)
        return padded

    def _widths(self) -> list[tuple[int, ...]]:
        """List for each encoder the widths that shapes have, ascending from 0."""
        return [
            tuple(sorted({0, *widths}))
            for widths in zip(*(shape.widths for shape in self.shapes), strict=True)
        ]

    def _costs(self, inputs: _Inputs) -> Costs:
        """Compute what every part costs. Rows of all modules are packed, so that is its positions' operations."""
        parts = inputs.parts
        items = parts.module != LLM
        cost = parts.length * self.flops[parts.module]
        owner = parts.sample()[items]
        return costs_of(
            cost[~items],
            owner,
            parts.module[items],
            cost[items],
            inputs.tokens[items],
            len(self.rows),
        )

    def _plan(
        self, samples: np.ndarray, inputs: _Inputs, placed: _Placed, shape: Shape
    ) -> MicrobatchPlan:
        """Lay out every row's parts one after the other, in the order of the samples."""
        parts = inputs.parts
        home_rank = self._sample_ranks(inputs)[parts.sample()]
        one_each = self.topology.encoders_per_rank == 1
        unbalanced_row = (
            home_rank * np.array(self.rows)[parts.module]
            if one_each
            else self._place_on_ranks(inputs, home_rank).row
        )
        return MicrobatchPlan(
            samples=samples,
            part_start=parts.sample_start,
            module=parts.module,
            row=placed.row,
            offset=offsets_by_key(
                parts.length, placed.row.astype(np.int64) * len(self.rows) + parts.module
            ),
            length=parts.length,
            pairs=parts.pairs,
            shape=shape,
            rows=self.rows,
            topology=self.topology,
            unbalanced_row=unbalanced_row,
        )


def _renumber_rows(
    row: np.ndarray, home_rank: np.ndarray, tokens: np.ndarray, rank_of_row: np.ndarray
) -> np.ndarray:
    """Give full rows to ranks so that most of their tokens are on the rank of their sample: the row of each item.

    row, home_rank, tokens: int `[m]`, of items. rank_of_row: int `[rows]`. The rows are only
    numbered anew, so the fit that grouping found stays:

        row 0   5 tokens of rank 1                       becomes row 1
        row 1   3 tokens of rank 0, 1 token of rank 1    becomes row 0

    >>> one_row_each = np.array([0, 1])
    >>> _renumber_rows(np.array([0, 1, 1]), np.array([1, 0, 1]), np.array([5, 3, 1]), one_row_each)
    array([1, 0, 0], dtype=int32)
    """
    from scipy.optimize import linear_sum_assignment  # a quarter of a second

    at_home = np.zeros((len(rank_of_row), rank_of_row[-1] + 1), np.int64)
    np.add.at(at_home, (row, home_rank), tokens)
    old_row, new_row = linear_sum_assignment(at_home[:, rank_of_row], maximize=True)
    renumbered = np.empty(len(rank_of_row), np.int32)
    renumbered[old_row] = new_row
    return renumbered[row]
