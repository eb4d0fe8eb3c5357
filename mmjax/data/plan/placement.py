"""Define where the parts of a microbatch lie: on which rank, in which row and at which offset each is processed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.waits import (
    Prices,
    Waits,
    least_fullest,
    padding_share,
    rank_seconds,
    wait_share,
)
from mmjax.data.plan.budget import Lengths
from mmjax.data.plan.length_index import LengthIndex


@dataclass(frozen=True)
class Topology:
    """ranks: how many the rows are spread over. peers: neighbours that send encoder outputs to each other.

    ranks_per_node: neighbours on one host. `peers` and `ranks_per_node` divide the ranks.
    encoders_per_rank: over how many encoder ranks an encoder's rows on a rank are spread. context:
    devices that share the tokens of a rank's rows, each with as many of its encoder ranks.
    """

    ranks: int = 1
    peers: int = 1
    ranks_per_node: int = 1
    encoders_per_rank: int = 1
    context: int = 1


ONE_RANK = Topology()


class Shape(NamedTuple):
    """One compiled program."""

    lengths: Lengths  # positions of a row of every module
    # of every encoder: tokens that a rank can send to each of its peers; 0 = nothing travels
    widths: tuple[int, ...]


@dataclass(frozen=True)
class MicrobatchPlan:
    """The placement of the parts of one microbatch. Parts are in CSR order: each sample's LLM part, then its items."""

    samples: np.ndarray  # int64 [n]: ids in the length index
    part_start: np.ndarray  # int64 [n + 1]
    module: np.ndarray  # int32 [p]: 0 = LLM
    row: np.ndarray  # int32 [p]: rank * rows of the module on a rank + row on the rank
    offset: np.ndarray  # int64 [p]
    length: np.ndarray  # int64 [p]
    pairs: np.ndarray  # int64 [p], of attention
    shape: Shape
    rows: Lengths  # of each module on one rank
    topology: Topology
    # int [p]: as `row` would be with balance `none`, on the same ranks at least
    unbalanced_row: np.ndarray

    def work(self) -> np.ndarray:
        """Count ranks' positions, int64 `[modules, encoder ranks]`; the LLM's stand at all encoder ranks of a rank."""
        return self.per_rank(self.length, self.row)

    @property
    def unbalanced(self) -> np.ndarray:
        """Count ranks' positions with balance `none`, as `work` does."""
        return self.per_rank(self.length, self.unbalanced_row)

    def per_rank(self, amount: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Sum an amount of each part `[p]` in these rows over ranks, int64 `[modules, encoder ranks]`, as `work`."""
        return _work(self.module, row, amount, self.rows, self.topology)

    def seconds(self, prices: Prices) -> np.ndarray:
        """Compute the seconds of each phase on each encoder rank, float64 `[modules, encoder ranks]`.

        All encoder ranks of a rank have an equal part of its LLM.
        """
        parts = self.topology.encoders_per_rank
        positions = np.multiply(self.rows, self.shape.lengths) / parts
        pairs = self.per_rank(self.pairs, self.row).astype(np.float64)
        pairs[LLM] /= parts
        return rank_seconds(prices, positions, pairs)

    def sample_pairs(self) -> np.ndarray:
        """Sum each sample's pairs by module, int64 `[n, modules]`."""
        modules = len(self.rows)
        flat = np.bincount(
            self.sample_of() * modules + self.module, self.pairs, len(self.samples) * modules
        )
        return np.rint(flat).astype(np.int64).reshape(-1, modules)

    def rank(self) -> np.ndarray:
        """Return the rank that processes each part, int32 `[p]`."""
        return self.row // np.array(self.rows, np.int32)[self.module]

    def home_rank(self) -> np.ndarray:
        """Return the rank of each part's sample, which is that of its LLM part, int32 `[p]`."""
        return self.rank()[self.part_start[:-1]][self.sample_of()]

    def sample_of(self) -> np.ndarray:
        """Return the sample of each part, as an index into `samples`, int64 `[p]`."""
        return np.repeat(np.arange(len(self.samples)), np.diff(self.part_start))


def waits_of(plans: Sequence[MicrobatchPlan], prices: Prices, index: LengthIndex) -> Waits:
    """Compute how long ranks wait in a step of these microbatches."""
    seconds = [m.seconds(prices) for m in plans]
    bound = total = 0.0
    for m, by_rank in zip(plans, seconds, strict=True):
        parts = m.topology.encoders_per_rank
        rows = prices.position * np.multiply(m.rows, m.shape.lengths)
        fullest = least_fullest(m.sample_pairs(), m.topology.ranks)
        bound += float((rows + prices.pair * fullest).sum()) / parts
        total += float(by_rank.mean(1).sum())
    room, useful = zip(*(room_and_use(m, index) for m in plans), strict=True)
    return Waits(
        wait=wait_share(np.concatenate(seconds)),
        bound=max(0.0, 1 - total / max(bound, np.finfo(float).tiny)),
        padding=padding_share(prices, np.array(useful), np.array(room)),
    )


def room_and_use(m: MicrobatchPlan, index: LengthIndex) -> tuple[np.ndarray, np.ndarray]:
    """Count positions that all ranks compute of each module, and those that hold something, int64 `[modules]` each."""
    room = m.topology.ranks * np.multiply(m.rows, m.shape.lengths)
    return room, np.bincount(m.module, index.useful(m.samples), len(m.rows)).astype(np.int64)


def _work(
    module: np.ndarray, row: np.ndarray, length: np.ndarray, rows: Lengths, topology: Topology
) -> np.ndarray:
    """Count the positions of each rank as `MicrobatchPlan.work` does, of parts in these rows.

    Two ranks of two encoder ranks each, with one row of the LLM and four of an encoder on a rank:

        encoder rank       0      1      2      3
        rows of encoder    0 1    2 3    4 5    6 7
        rows of LLM        0      0      1      1       whose work counts for both

    >>> two = Topology(ranks=2, encoders_per_rank=2)
    >>> _work(np.array([0, 1, 1]), np.array([1, 5, 0]), np.array([10, 6, 4]), (1, 4), two).tolist()
    [[0, 0, 10, 10], [4, 0, 6, 0]]
    """
    parts = topology.encoders_per_rank
    llm = module == LLM
    work = np.zeros((len(rows), topology.ranks * parts), np.int64)
    encoder_rank = row[~llm] // (np.array(rows) // parts)[module[~llm]]
    np.add.at(work, (module[~llm], encoder_rank), length[~llm])
    of_llm = np.bincount(row[llm] // rows[LLM], length[llm], topology.ranks)
    work[LLM] = np.repeat(of_llm.astype(np.int64), parts)
    return work
