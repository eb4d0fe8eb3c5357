"""Shapes for ranks: few, large enough for what was seen, and the budget's where grouping has filled the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made import DRY_RUN_STEPS, Made, config, index_of, text
from planned import (
    BALANCE_KINDS,
    BALANCES,
    GROUPINGS,
    KINDS,
    SPREAD,
    TOPOLOGIES,
    laid_out,
    one_of_all,
)

from mmjax.config import NoBalance, NoGrouping, PackGrouping, PostBalance, Samples
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import make_planner

EIGHT = Topology(8, 8, 8)
ROWS = {"llm": 8, "vision": 8, "audio": 8}


@pytest.mark.covering(1)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_shapes_are_few_and_the_steps_that_they_were_found_by_need_no_more_microbatches(
    grouping, balance, topology, microbatches
):
    planned, layout = one_of_all(grouping, balance, topology, microbatches)
    assert 1 <= len(layout.shapes) <= 8 + (layout.topology.peers > 1)
    parts = np.array([1, topology.encoders_per_rank, topology.encoders_per_rank])
    needed = -(-np.array(planned.grouper.budget.rows) // (topology.ranks * parts))
    assert layout.rows == tuple(needed * parts)
    for shape in layout.shapes:
        assert all(length % 12 == 0 for length in shape.lengths), "a row ends where no token does"
        assert all(width % 4 == 0 for width in shape.widths)
    for step in range(DRY_RUN_STEPS):
        assert len(planned.plan(step).microbatches) == microbatches


def test_rows_may_be_whole_tiles_of_a_gpu_and_widths_are_no_longer_for_it():
    everywhere = PostBalance(locality="off")
    _, layout = laid_out(
        balance=everywhere, topology=EIGHT, size=Samples(96), rows=ROWS, alignment=128
    )
    # and of 12, a token
    assert all(length % 384 == 0 for shape in layout.shapes for length in shape.lengths)
    widths = {width for shape in layout.shapes for width in shape.widths}
    assert all(width % 8 == 0 for width in widths)
    assert 0 < min(widths) < 128


def test_a_step_that_a_shapes_width_leads_astray_is_placed_as_it_was_when_the_shape_was_found():
    planned, _ = laid_out(
        grouping=PackGrouping(chunk_steps=12), topology=EIGHT, size=Samples(96), rows=ROWS
    )
    assert {len(planned.plan(step).microbatches) for step in range(DRY_RUN_STEPS)} == {1}


@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_shapes_come_cheapest_first(balance, topology):
    planned, layout = one_of_all(GROUPINGS[2], balance, topology, 1)
    price = [
        planned.placer.price @ np.array(shape.lengths + shape.widths) for shape in layout.shapes
    ]
    assert price == sorted(price)
    assert planned.placer.shapes == layout.shapes


@pytest.mark.parametrize(
    "topology",
    [Topology(), Topology(2, 2, 2), Topology(4, 4, 4), EIGHT],
    ids=lambda t: str(t.ranks),
)
def test_packed_rows_have_the_budgets_lengths_under_post_or_little_more_where_an_exchange_would_cost_more(
    topology,
):
    changes = {
        "grouping": PackGrouping(chunk_steps=12),
        "balance": PostBalance(),
        "size": Samples(48),
        "rows": ROWS,
    }
    planned, layout = laid_out(topology=topology, **changes)
    assert planned.grouper.budget.rows == (8, 8, 8)
    assert layout.rows == (8 // topology.ranks,) * 3
    for shape in layout.shapes:
        longer = np.array(shape.lengths) - planned.grouper.budget.lengths
        assert np.all(longer >= 0)
        assert np.all(longer <= 12), "one unit of alignment"
    assert topology.ranks > 1 or {shape.lengths for shape in layout.shapes} == {
        planned.grouper.budget.lengths
    }


def test_rows_that_do_not_divide_by_the_ranks_leave_no_rank_without_items_under_post():
    """Grouping fills two rows of vision; on four ranks all four get as much, not two of them everything."""
    rows = {"llm": 8, "vision": 2, "audio": 3}
    changes = {
        "grouping": PackGrouping(chunk_steps=12),
        "size": Samples(64),
        "rows": rows,
        "topology": Topology(4, 4, 4),
    }
    planned, layout = laid_out(balance=PostBalance(), **changes)
    assert planned.grouper.budget.rows == (8, 2, 3)
    for step in range(DRY_RUN_STEPS):
        for m in planned.plan(step).microbatches:
            by_rank = np.zeros((3, 4))
            np.add.at(by_rank, (m.module, m.rank()), m.length)
            assert np.all(by_rank.max(1) < 1.3 * by_rank.mean(1))
            assert np.all(by_rank.sum(1) > 0.7 * 4 * np.multiply(layout.rows, m.shape.lengths))


def test_an_encoders_rows_are_equally_full_on_all_encoder_ranks_under_post():
    changes = {"grouping": NoGrouping(chunk_steps=12), "size": Samples(96), "rows": ROWS}
    planned, layout = laid_out(balance=PostBalance(), topology=Topology(2, 2, 2, 2), **changes)
    assert layout.rows == (4, 4, 4)
    for step in range(DRY_RUN_STEPS):
        for m in planned.plan(step).microbatches:
            work = m.work()
            assert work.shape == (3, 4)
            assert np.all(work.max(1) < 1.15 * work.mean(1))
            assert work[0, 0] == work[0, 1]
            assert work[1].sum() == m.length[m.module == 1].sum()


def test_without_grouping_eight_shapes_waste_less_than_one():
    changes = {
        "grouping": NoGrouping(chunk_steps=12),
        "topology": EIGHT,
        "size": Samples(48),
        "rows": ROWS,
    }
    spent = []
    for shapes in (8, 1):
        planned, layout = laid_out(shapes=shapes, **changes)
        assert len(layout.shapes) == shapes
        used = [m.shape for step in range(DRY_RUN_STEPS) for m in planned.plan(step).microbatches]
        spent.append(
            np.sum(
                [planned.placer.price @ np.array(shape.lengths + shape.widths) for shape in used]
            )
        )
    assert spent[0] < 0.95 * spent[1]


@pytest.mark.parametrize("per_rank", [4, 16])
def test_no_step_sends_padding_where_nothing_moves(per_rank):
    changes = {"grouping": NoGrouping(chunk_steps=12), "size": Samples(8 * per_rank), "rows": ROWS}
    planned, _ = laid_out(balance=PostBalance(), topology=EIGHT, **changes)
    exchanges = 0
    for step in range(2 * DRY_RUN_STEPS):
        for m in planned.plan(step).microbatches:
            home = m.rank()[m.part_start[:-1]][m.sample_of()]
            moved = np.bincount(m.module[m.rank() != home], minlength=3)[1:]
            assert np.all((moved > 0) | (np.array(m.shape.widths) == 0))
            exchanges += int(moved.sum())
    assert exchanges > 0 or per_rank > 4


def test_locality_off_exchanges_among_all_ranks_and_on_among_peers():
    changes = {"grouping": NoGrouping(chunk_steps=12), "topology": Topology(8, 4, 4)}
    on, off = (
        laid_out(balance=PostBalance(locality=way), **changes)[1].topology for way in ("on", "off")
    )
    assert on == Topology(8, 4, 4)
    assert off == Topology(8, 8, 4)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_model_without_encoders_has_shapes_without_widths(ranks):
    rng = np.random.default_rng(0)
    made = config(size=Samples(16), rows={"llm": 8})
    made = replace(made, model=replace(made.model, encoders={}))
    index = index_of(
        Made([((text(rng, int(n), first=True),), []) for n in rng.integers(2, 30, 200)]), made
    )
    planned, layout = make_planner(index, made, [1.0], Topology(ranks, ranks, ranks))
    assert all(len(shape.lengths) == 1 and shape.widths == () for shape in layout.shapes)
    assert {m.shape for m in planned.plan(0).microbatches} <= set(layout.shapes)


def test_rows_and_widths_end_where_the_tokens_of_every_encoder_do():
    _, layout = laid_out(
        topology=EIGHT,
        size=Samples(16),
        grouping=NoGrouping(chunk_steps=12),
        rows=ROWS,
        alignment=5,
    )
    for shape in layout.shapes:
        assert all(length % 60 == 0 for length in shape.lengths)
        assert all(width % 5 == 0 for width in shape.widths)


def test_a_layout_is_a_pure_function_of_what_the_config_and_the_index_say():
    changes = {
        "grouping": NoGrouping(chunk_steps=12),
        "balance": PostBalance(),
        "topology": Topology(8, 4, 4),
    }
    assert laid_out(**changes)[1] == laid_out(**changes)[1]
    assert laid_out(**changes)[1] != laid_out(**changes | {"balance": NoBalance()})[1]
