"""The step plan: which samples form step n, where each of their parts lies, and which row shapes are compiled.

A pure function of (config, seed, index, step, row shapes): every process and every worker computes
the same plan, and resuming needs the step number alone. Which samples a step has does not depend on
the row shapes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.phases import EXCHANGE
from mmjax.balance.shapes import choose_shapes
from mmjax.config import Config, NoGrouping
from mmjax.data.plan.budget import Budget, Lengths, position_flops
from mmjax.data.plan.data_change import WHOLE_RUN, Segment
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import Group, StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import ONE_RANK, MicrobatchPlan, Shape, Topology
from mmjax.data.plan.placer import Balance, Placer
from mmjax.planning.reorder import Reordering, make_reordering

DRY_RUN_STEPS = 512
DRY_RUN_SAMPLES = 100_000  # about, and at least 16 steps
OF_OPERATIONS = 0.25  # 1: modules count by their operations; 0: all the same
WIDTH_ALIGNMENT = 8  # at most, of tokens that a rank sends to a peer
WORTH = 0.02  # where grouping fills rows, one more shape must save this share of the cost


@dataclass(frozen=True)
class RankLayout:
    """Decided before step 0 for the devices at hand; another one has the same samples in every step."""

    topology: Topology
    rows: Lengths  # of each module on one rank
    # compiled ahead, the cheapest first; the last holds every sample alone
    shapes: tuple[Shape, ...]

    @property
    def rows_and_lengths(self) -> tuple[list[int], list[Lengths]]:
        """Return the rows of each module on all ranks, and their lengths by shape and module."""
        return [self.topology.ranks * count for count in self.rows], [
            shape.lengths for shape in self.shapes
        ]


def choose_layout(
    grouper: StepGrouper,
    config: Config,
    topology: Topology,
    balances: Sequence[Balance] = (),
    max_steps: int | None = None,
) -> RankLayout:
    """Choose row lengths and exchange widths for these ranks, by how the first steps would be placed.

    balances: to be compared in the same shapes, which serve the steps of them all; default: the
    config's alone.
    max_steps: of these, for a look; a run needs shapes that later steps fit too.
    """
    if config.batch.balance.phases_apart:
        # Each phase by itself sends nearly everything, so all ranks must be able to send to all.
        topology = replace(topology, peers=topology.ranks)
    rows = tuple(
        _rows_of_rank(count, topology, k == LLM) for k, count in enumerate(grouper.budget.rows)
    )
    placer = make_placer(grouper, config, RankLayout(topology, rows, ()))
    placers = [replace(placer, balance=balance) for balance in balances] or [placer]
    return RankLayout(
        topology,
        rows,
        _with_room_for_all(_shapes(grouper, config, placers, max_steps), grouper, placer, config),
    )


def _rows_of_rank(count: int, topology: Topology, llm: bool) -> int:
    """Count the rows on each rank, the same on each rank of an encoder, so that all together hold `count` rows."""
    parts = 1 if llm else topology.encoders_per_rank
    # 10 rows on 4 ranks of 2 encoder ranks each: 2 rows on each of 8, so 4 a rank.
    return -(-count // (topology.ranks * parts)) * parts


def make_placer(grouper: StepGrouper, config: Config, layout: RankLayout) -> Placer:
    """Make the placer of the grouper's microbatches for this layout."""
    stored = grouper.budget.position_flops
    flops = np.array(stored) if stored else position_flops(config)
    price = _price(grouper, flops, layout)
    return Placer(
        index=grouper.index,
        balance=config.batch.balance,
        topology=layout.topology,
        rows=layout.rows,
        flops=flops,
        price=price,
        shapes=layout.shapes,
        columns=grouper.columns,
        compares_llm=grouper.budget.planner > 11,
        prices=grouper.budget.prices,
        text_tokens={
            number: module.text_tokens
            for number, module in enumerate(config.model.towers.values())
            if module.is_generator
        },
    )


def _price(grouper: StepGrouper, flops: np.ndarray, layout: RankLayout) -> np.ndarray:
    """Price one more position in each module's rows, and one more token of each encoder's width.

    By operations alone a small encoder's rows would be left half empty, and its own ranks with
    them: so each module counts between its part of the operations and an equal part.
    """
    ranks = layout.topology.ranks
    index = grouper.index
    samples = grouper.budget.samples_per_step / grouper.batch.microbatches
    rows = ranks * np.array(layout.rows)
    # Mean positions of a row, so that price * need is what a whole row costs.
    need = np.maximum(samples * index.totals.mean(0) / rows, 1)
    # The exponent lies between 0, where all modules' rows cost the same, and 1, their operations.
    price = (rows * flops * need) ** OF_OPERATIONS / need
    sent = max(samples * float(index.item_tokens.sum()) / len(index), 1.0)
    # `EXCHANGE` is the share of a step for sending as many tokens as the encoders make;
    # here for each token of width, which all pairs of peers send.
    width = EXCHANGE * float(price @ need) * ranks * (layout.topology.peers - 1) / sent
    return np.concatenate([price, np.full(len(rows) - 1, width)])


def _shapes(
    grouper: StepGrouper, config: Config, placers: Sequence[Placer], steps: int | None
) -> tuple[Shape, ...]:
    """Choose shapes for the microbatches of the first steps, placed by each of these; all fit the last one."""
    placer = placers[0]
    fixed = not isinstance(config.batch.grouping, NoGrouping)
    modules = len(placer.rows)
    lengths = np.array(grouper.budget.lengths)
    topology = placer.topology
    if (fixed and topology.ranks == topology.encoders_per_rank == 1) or placer.in_columns:
        return (Shape(grouper.budget.lengths, (0,) * (modules - 1)),)
    filled = np.array(placer.rows) * topology.ranks == grouper.budget.rows
    # rows that grouping has filled are not made shorter
    min_lengths = np.where(filled & fixed, lengths, 1)
    groups = _dry_run(grouper, config, steps)
    choices = []
    # Rows as long as grouping filled them may take a wide exchange, or leave others half empty: the
    # cheaper is chosen.
    for limit in (lengths, None) if fixed else (None,):
        needs = _stack([p.needs(group, limit) for group in groups for p in placers])
        needs[:, :, :modules] = np.maximum(needs[:, :, :modules], min_lengths)
        alignments = _alignments(grouper, config, topology.context)
        worth = WORTH if fixed else 0.0
        shapes = choose_shapes(
            needs, placer.price, config.batch.shapes, alignments, worth, modules - 1
        )
        holds = np.all(needs[:, :, None] <= shapes, axis=-1).any(1)
        choices.append(
            (float(np.where(holds, shapes @ placer.price, np.inf).min(1).sum()), shapes.tolist())
        )
    return tuple(Shape(tuple(s[:modules]), tuple(s[modules:])) for s in min(choices)[1])


def _stack(ways: Sequence[np.ndarray]) -> np.ndarray:
    """Stack what steps need, int64 `[steps, ways, columns]`; a step with fewer ways has its last one several times."""
    ways_count = max(map(len, ways))
    return np.stack(
        [
            np.concatenate([needs, np.repeat(needs[-1:], ways_count - len(needs), axis=0)])
            for needs in ways
        ]
    )


def _dry_run(grouper: StepGrouper, config: Config, max_steps: int | None) -> Sequence[Group]:
    """Return the microbatches of the first steps: not of more than a chunk, where finding the next one takes long."""
    some = int(np.clip(DRY_RUN_SAMPLES / grouper.budget.samples_per_step, 16, DRY_RUN_STEPS))
    grouping = config.batch.grouping
    steps = (
        some if isinstance(grouping, NoGrouping) else min(some, max(16, grouping.chunk_steps // 2))
    )
    last = grouper.first + min(steps, max_steps or steps)
    return [group for step in range(grouper.first, last) for group in grouper.step(step)]


def _with_room_for_all(
    shapes: tuple[Shape, ...], grouper: StepGrouper, placer: Placer, config: Config
) -> tuple[Shape, ...]:
    """Enlarge the last shape so that it holds each sample that may come, if need be spread over its node."""
    modules = len(placer.rows)
    rows = np.array(placer.rows)
    alignment = _alignments(grouper, config, placer.topology.context)
    lengths = np.array(shapes[-1].lengths)
    spread = False
    for sample in _wide(grouper, rows, lengths):
        at_home, over_peers = placer.needs_alone(sample)
        if np.all(at_home[:modules] <= lengths):
            continue
        spread = placer.topology.peers > 1
        lengths = np.maximum(lengths, -(-over_peers // alignment)[:modules] * alignment[:modules])
    if not spread:
        return (*shapes[:-1], Shape(tuple(lengths.tolist()), shapes[-1].widths))
    # No rank makes more tokens than its rows hold, or takes more than its samples' items have.
    max_taken = rows[0] * lengths[0] * _tokens_per_token(grouper.index)
    max_width = np.minimum(rows[1:] * lengths[1:] // grouper.index.positions_per_token, max_taken)
    widths = -(-max_width // alignment[modules:]) * alignment[modules:]
    return (*shapes, Shape(tuple(lengths.tolist()), tuple(widths.tolist())))


def _tokens_per_token(index: LengthIndex) -> int:
    """Return the most tokens that encoders make for one of the LLM in any sample: above 1 where images are unpadded."""
    sample = np.repeat(np.arange(len(index)), np.diff(index.item_start))
    encoder_tokens = np.bincount(sample, index.item_tokens, len(index))
    return max(1, math.ceil((encoder_tokens / np.maximum(index.llm_tokens, 1)).max(initial=1)))


def _wide(grouper: StepGrouper, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Find the ids of the samples that may come and might not fit the rows of one rank."""
    index = grouper.index
    longest = np.zeros(len(rows), np.int64)
    np.maximum.at(longest[1:], index.item_encoder, index.item_positions)
    longest[0] = index.llm_tokens.max(initial=0)
    # Longest first fills no row more than the mean of them and the longest part.
    surely = (index.totals <= lengths) | (index.totals / rows + longest <= lengths)
    return np.setdiff1d(np.flatnonzero(~surely.all(1)), grouper.oversize)


def _alignments(grouper: StepGrouper, config: Config, context: int) -> np.ndarray:
    """Return the alignment of every module's rows, which end where an LLM token does, and of every encoder's width.

    Rows may be multiples of a GPU's tiles; a width is sent to each peer, where that would be
    padding. Each of `context` devices gets an aligned part of the LLM's rows.
    """
    per_token = grouper.index.positions_per_token
    alignment = config.batch.alignment
    row_alignment = math.lcm(alignment, *per_token.tolist())
    rows = [math.lcm(row_alignment, alignment * context)] + [row_alignment] * len(per_token)
    return np.array(rows + [min(alignment, WIDTH_ALIGNMENT)] * len(per_token))


@dataclass(frozen=True)
class StepPlan:
    """One optimizer update, before anything is loaded."""

    step: int
    microbatches: tuple[MicrobatchPlan, ...]

    def samples(self) -> np.ndarray:
        """Return the ids of all samples of the step."""
        return np.concatenate([m.samples for m in self.microbatches])

    def digest(self) -> int:
        """Compute a 63-bit hash that processes compare before they update."""
        digest = hashlib.sha256()
        for m in self.microbatches:
            for a in (
                m.samples,
                m.module,
                m.row,
                m.offset,
                np.array(m.shape.lengths + m.shape.widths),
            ):
                digest.update(np.ascontiguousarray(a, np.int64).tobytes())
        # 63 bits, so that it is never negative as an int64.
        return int.from_bytes(digest.digest()[:8], "little") >> 1


@dataclass(frozen=True)
class StepPlanner:
    """Plans steps for one layout."""

    grouper: StepGrouper
    placer: Placer
    reordering: Reordering | None = None  # None: microbatches stay as they were grouped

    def plan(self, step: int) -> StepPlan:
        """Plan step `step`."""
        microbatches = tuple(
            m for group in self.grouper.step(step) for m in self.placer.place(group)
        )
        if self.reordering is not None:
            shapes = [self.placer.shapes.index(m.shape) for m in microbatches]
            fullest = [m.per_rank(m.pairs, m.row).max(1) * m.topology.ranks for m in microbatches]
            order = self.reordering.order(shapes, np.stack(fullest, axis=1))
            microbatches = tuple(microbatches[number] for number in order)
        return StepPlan(step, microbatches)


def make_planner(
    index: LengthIndex,
    config: Config,
    weights: Sequence[float],
    topology: Topology = ONE_RANK,
    budget: Budget | None = None,
    max_steps: int | None = None,
    segment: Segment = WHOLE_RUN,
) -> tuple[StepPlanner, RankLayout]:
    """Make the planner of a mixture of sources on these ranks, and the layout that it plans for.

    budget: that of the run, default: made from the index and the config. max_steps: as in
    `choose_layout`. Raises UserError like `make_budget`.
    """
    budget = make_budget(index, config, weights) if budget is None else budget
    grouper = StepGrouper(
        index,
        config.batch,
        weights,
        config.seed,
        budget,
        first=segment.first,
        due=segment.read_due(),
        epochs_before=segment.epochs,
    )
    layout = choose_layout(grouper, config, topology, max_steps=max_steps)
    return make_step_planner(grouper, config, layout), layout


def make_step_planner(grouper: StepGrouper, config: Config, layout: RankLayout) -> StepPlanner:
    """Make the planner of a layout. Microbatches are reordered where they go through a pipeline."""
    reordering = None
    if config.units and config.pipeline.reorder:
        by_content = grouper.budget.prices is not None
        reordering = make_reordering(config, *layout.rows_and_lengths, by_content=by_content)
    return StepPlanner(grouper, make_placer(grouper, config, layout), reordering)
