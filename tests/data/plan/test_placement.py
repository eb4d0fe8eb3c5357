"""Where parts lie: each once, inside a compiled shape, on ranks that the balance and the exchange allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made import ONE_RANK, Made, config, image, index_of, random_texts, text
from planned import (
    BALANCE_KINDS,
    BALANCES,
    GROUPINGS,
    KINDS,
    SPREAD,
    TOPOLOGIES,
    laid_out,
    one_of_all,
    planner,
    samples_of,
    some_index,
    with_shapes,
)

from mmjax.balance.parts import LLM
from mmjax.balance.phases import largest_transfer
from mmjax.config import LlmBalance, NoBalance, NoGrouping, PackGrouping, PostBalance, Samples
from mmjax.config.loading import find_config, load
from mmjax.data.plan.budget import PLANNER
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_files import index_of_lengths, interleaved_corpus
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.plan.placer import Placer
from mmjax.data.plan.step_plan import StepPlanner, make_planner
from mmjax.data.sample import Item

EIGHT = Topology(8, 8, 8)


def check(m: MicrobatchPlan, index: LengthIndex, shapes: tuple[Shape, ...]) -> None:
    """Everything that holds for any placement."""
    parts = index.parts(m.samples)
    np.testing.assert_array_equal(m.part_start, parts.sample_start)
    np.testing.assert_array_equal(m.module, parts.module)
    np.testing.assert_array_equal(m.length, parts.length)
    assert m.shape in shapes
    assert np.all((m.row >= 0) & (m.row < m.topology.ranks * np.array(m.rows)[m.module]))
    assert np.all((m.offset >= 0) & (m.offset + m.length <= np.array(m.shape.lengths)[m.module]))
    order = np.lexsort((m.offset, m.row, m.module))
    follows = (np.diff(m.module[order]) == 0) & (np.diff(m.row[order]) == 0)
    assert np.all((m.offset + m.length)[order][:-1][follows] <= m.offset[order][1:][follows]), (
        "parts overlap"
    )
    # the LLM's part stands at each of them
    each = np.array([m.topology.encoders_per_rank] + [1] * (len(m.rows) - 1))
    for work in (m.work(), m.unbalanced):
        assert work.sum(1).tolist() == (each * parts.totals(len(m.rows)).sum(0)).tolist()
    rank, home = m.rank(), m.rank()[m.part_start[:-1]][m.sample_of()]
    assert np.array_equal(rank // m.topology.peers, home // m.topology.peers), (
        "an item leaves its sample's peers"
    )
    tokens = m.length // np.array([1, *index.positions_per_token])[m.module]
    for k, width in enumerate(m.shape.widths, start=1):
        of = m.module == k
        assert largest_transfer(rank[of], home[of], tokens[of], m.topology.ranks) <= width


@pytest.mark.covering(2)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_every_part_lies_once_in_a_row_and_items_are_away_only_where_the_width_allows(
    grouping, balance, topology, microbatches
):
    planned, layout = one_of_all(grouping, balance, topology, microbatches)
    for step in range(6):
        for m in planned.plan(step).microbatches:
            check(m, some_index(), layout.shapes)
            assert (m.rows, m.topology) == (layout.rows, layout.topology)


@pytest.mark.covering(2)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_a_step_has_the_same_samples_with_every_balance_on_any_ranks(
    grouping, balance, topology, microbatches
):
    grouped = one_of_all(grouping, NoBalance(), ONE_RANK, microbatches)[0].grouper
    planned, _ = one_of_all(grouping, balance, topology, microbatches)
    for step in range(6):
        groups, got = grouped.step(step), planned.plan(step).microbatches
        assert len(got) >= len(groups)
        if len(got) == len(groups):
            for m, group in zip(got, groups, strict=True):
                np.testing.assert_array_equal(m.samples, group.samples)
        assert sorted(samples_of(got).tolist()) == sorted(samples_of(groups).tolist())


@pytest.mark.parametrize("grouping", GROUPINGS[:2], ids=KINDS[:2])
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_on_one_rank_parts_lie_in_the_rows_that_grouping_gave_them(grouping, balance):
    planned, layout = laid_out(grouping=grouping, balance=balance, microbatches=2)
    assert [shape.lengths for shape in layout.shapes] == [planned.grouper.budget.lengths]
    for step in range(12):
        groups, plan = planned.grouper.step(step), planned.plan(step)
        for group, m in zip(groups, plan.microbatches, strict=True):
            np.testing.assert_array_equal(m.samples, group.samples)
            np.testing.assert_array_equal(m.row, group.row)


# --------------------------------------------------------------------------------------------------
# balances


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
@pytest.mark.parametrize("balance", BALANCES[:2], ids=BALANCE_KINDS[:2])
def test_without_post_items_are_encoded_where_their_sample_is_and_nothing_is_exchanged(
    grouping, balance
):
    planned, layout = laid_out(grouping=grouping, balance=balance, topology=EIGHT, size=Samples(16))
    usual = [shape for shape in layout.shapes if not any(shape.widths)]
    assert len(layout.shapes) - len(usual) <= 1, (
        "only what holds a sample that has to be spread sends anything"
    )
    for step in range(8):
        for m in planned.plan(step).microbatches:
            assert m.shape in usual
            rank = m.rank()
            np.testing.assert_array_equal(rank, rank[m.part_start[:-1]][m.sample_of()])


def fullest_over_mean(planned: StepPlanner, steps: int = 12) -> np.ndarray:
    """Per module, mean of steps."""
    found = []
    for step in range(steps):
        for m in planned.plan(step).microbatches:
            by_rank = np.zeros((3, m.topology.ranks))
            np.add.at(by_rank, (m.module, m.rank()), m.length)
            found.append(by_rank.max(1) / by_rank.mean(1))
    return np.mean(found, axis=0)


def test_llm_equals_the_llm_and_post_every_module():
    changes = {"grouping": NoGrouping(chunk_steps=12), "topology": EIGHT, "size": Samples(128)}
    none, llm, post, apart = (
        fullest_over_mean(planner(balance=balance, **changes)) for balance in BALANCES
    )
    assert llm[LLM] < 1.02 < none[LLM]
    assert post.max() < 1.05
    assert apart.max() < 1.05
    assert min(none[1:].min(), llm[1:].min()) > 1.1


def test_with_several_rows_a_rank_post_needs_no_more_than_llm_does_but_in_a_run_of_an_earlier_planner():
    base = load(find_config("tiny_draw"))
    modules = base.model.item_modules
    rows = dict.fromkeys(("llm", *modules), 120)
    made = replace(
        base, batch=replace(base.batch, rows=rows, size=Samples(240), grouping=NoGrouping())
    )
    index = index_of_lengths(interleaved_corpus(4000, 0, modules), modules, base.model.llm)
    budget = make_budget(index, made, [1.0])
    planned, earlier = (
        make_planner(index, made, [1.0], EIGHT, replace(budget, planner=number), 4)[0]
        for number in (PLANNER, 11)
    )
    llm = replace(planned.placer, balance=LlmBalance())

    def cheapest(placer: Placer, step: int) -> float:
        return sum(
            float((placer.needs(group) @ placer.price).min())
            for group in planned.grouper.step(step)
        )

    for step in range(3):
        post = cheapest(planned.placer, step)
        assert post <= cheapest(llm, step) * (1 + 1e-9)
        assert post <= cheapest(earlier.placer, step) * (1 + 1e-9)
    assert cheapest(planned.placer, 0) < 0.98 * cheapest(earlier.placer, 0)


def test_unbalanced_is_what_balance_none_does_whatever_the_balance():
    changes = {"grouping": NoGrouping(chunk_steps=12), "topology": EIGHT, "size": Samples(48)}
    none, post = (planner(balance=balance, **changes) for balance in (NoBalance(), PostBalance()))
    for step in range(6):
        (a,), (b,) = none.plan(step).microbatches, post.plan(step).microbatches
        by_rank = np.zeros((3, 8), np.int64)
        np.add.at(by_rank, (a.module, a.rank()), a.length)
        np.testing.assert_array_equal(a.unbalanced, by_rank)
        np.testing.assert_array_equal(b.unbalanced, by_rank)


def test_the_cheapest_shape_that_holds_a_microbatch_is_taken():
    planned, layout = laid_out(
        grouping=NoGrouping(chunk_steps=12), balance=NoBalance(), topology=Topology(2, 2, 2)
    )
    assert len(layout.shapes) > 2
    for step in range(12):
        for m in planned.plan(step).microbatches:
            used = np.zeros((3, 8 * max(m.rows)), np.int64)
            np.add.at(used, (m.module, m.row), m.length)
            holds = [shape for shape in layout.shapes if np.all(used.max(1) <= shape.lengths)]
            assert m.shape == holds[0]


# ---------------------------------------------------------------------------------------------
# where nothing fits


@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_fits_no_shape_runs_in_more_microbatches_with_the_same_samples(
    microbatches, balance, topology
):
    # Enough samples a rank that half of the largest sample's rows do not hold them.
    size, rows = (
        Samples(12 * microbatches * topology.ranks),
        dict.fromkeys(("llm", "vision", "audio"), 3),
    )
    rows = dict.fromkeys(rows, 3 * topology.ranks)
    changes = {
        "grouping": NoGrouping(chunk_steps=12),
        "microbatches": microbatches,
        "size": size,
        "rows": rows,
    }
    roomy, layout = laid_out(balance=balance, topology=topology, **changes)
    largest = tuple(int(n) for n in some_index().parts().largest(3) // 12 * 12 + 12)
    widths = tuple(n if layout.topology.peers > 1 else 0 for n in (64, 64))
    shapes = Shape(tuple(n // 2 for n in largest), (0, 0)), Shape(largest, widths)
    tight = with_shapes(roomy, *shapes)
    assert not len(tight.grouper.oversize)
    counts = Counter()
    for step in range(6):
        a, b = roomy.plan(step), tight.plan(step)
        assert sorted(a.samples().tolist()) == sorted(b.samples().tolist())
        counts[len(b.microbatches)] += 1
        for m in b.microbatches:
            check(m, some_index(), shapes)
    assert max(counts) > microbatches
    assert min(counts) >= microbatches


def with_one_wide_sample(
    topology: Topology, images: int = 12, **changes
) -> tuple[LengthIndex, int]:
    """Texts and single images, and a sample of many images, that comes after the steps which shapes are found by."""
    rng = np.random.default_rng(0)
    made = [
        ((text(rng, 4, first=True), Item("vision", 0)), [image(rng, 16, 16)]) for _ in range(600)
    ]
    plain = index_of(Made(made), config())
    grouped = planner(plain, topology=topology, **changes).grouper
    early = set(np.concatenate([samples_of(grouped.step(step)) for step in range(30)]).tolist())
    wide = next(sample for sample in range(600) if sample not in early)
    items = tuple(Item("vision", n) for n in range(images))
    made[wide] = ((text(rng, 4, first=True), *items), [image(rng, 16, 16) for _ in items])
    return index_of(Made(made), config()), wide


@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", TOPOLOGIES[1:], ids=SPREAD[1:])
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_a_sample_larger_than_the_rows_of_a_rank_is_spread_over_its_peers(balance, topology):
    rows = {"llm": topology.ranks, "vision": topology.ranks, "audio": topology.ranks}
    changes = {
        "grouping": NoGrouping(chunk_steps=12),
        "size": Samples(16),
        "rows": rows,
        "balance": balance,
    }
    index, wide = with_one_wide_sample(topology, **changes)
    planned, layout = laid_out(index, topology=topology, **changes)
    assert not len(planned.grouper.oversize)
    others = [sample for sample in range(16) if sample != wide][:15]
    group = Group(np.array([*others[:8], wide, *others[8:]]), None)
    plans = planned.placer.place(group)
    assert sorted(samples_of(plans).tolist()) == sorted(group.samples.tolist())
    for m in plans:
        check(m, index, layout.shapes)
    (m,) = [m for m in plans if wide in m.samples]
    of_wide = m.samples[m.sample_of()] == wide
    ranks = set(m.rank()[of_wide & (m.module == 1)].tolist())
    if layout.topology.peers == 1:
        assert len(ranks) == 1
        assert len(layout.shapes) <= 8
    else:
        assert len(ranks) > 1
        assert m.shape == layout.shapes[-1]
        assert m.shape.lengths[1] < 12 * 64


@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_few_or_no_samples_or_items_leave_ranks_empty(balance, topology):
    rng = np.random.default_rng(0)
    words = random_texts([5, 9, 14, 7, 3, 11, 8, 6] * 20).samples
    pictures = [
        ((text(rng, 4, first=True), Item("vision", 0)), [image(rng, 8, 8)]) for _ in range(20)
    ]
    index = index_of(Made([*words, *pictures]), config())
    for grouping in GROUPINGS:
        changes = {"grouping": grouping, "size": Samples(16), "balance": balance}
        planned, layout = laid_out(index, topology=topology, **changes)
        groups = {
            "nothing": np.zeros(0, np.int64),
            "fewer samples than ranks": np.array([3]),
            "text alone": np.arange(12),
            "one picture": np.array([*range(9), 165]),
        }
        for name, samples in groups.items():
            (m,) = planned.placer.place(Group(samples, None))
            np.testing.assert_array_equal(m.samples, samples, err_msg=name)
            check(m, index, layout.shapes)


def test_a_loader_asked_for_more_microbatches_than_samples_has_empty_ones():
    planned, layout = laid_out(
        grouping=NoGrouping(chunk_steps=12),
        size=Samples(2),
        microbatches=8,
        topology=Topology(2, 2, 2),
    )
    plan = planned.plan(0)
    assert Counter(len(m.samples) for m in plan.microbatches) == {0: 6, 1: 2}
    for m in plan.microbatches:
        check(m, some_index(), layout.shapes)


def test_a_sample_that_fits_no_shape_at_all_is_a_bug_that_is_named():
    planned = planner(grouping=PackGrouping(chunk_steps=12))
    tiny = with_shapes(planned, Shape((4, 4, 12), (0, 0)))
    with pytest.raises(AssertionError, match=r"sample \d+ fits no compiled shape"):
        tiny.plan(0)


def test_items_cross_ranks_only_within_the_peers_of_the_topology():
    changes = {
        "grouping": NoGrouping(chunk_steps=12),
        "size": Samples(24),
        "balance": PostBalance(),
    }
    moved = Counter()
    for topology in (EIGHT, Topology(8, 4, 4), Topology(8, 4, 8)):
        planned, layout = laid_out(topology=topology, **changes)
        wide = layout.shapes[-1]._replace(widths=(64, 64))
        planned = with_shapes(planned, wide)
        for step in range(8):
            for m in planned.plan(step).microbatches:
                check(m, some_index(), (wide,))
                moved[topology.peers] += int(
                    (m.rank() != m.rank()[m.part_start[:-1]][m.sample_of()]).sum()
                )
    assert min(moved[4], moved[8]) > 0
