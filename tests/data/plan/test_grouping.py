"""Which samples a step has: every sample once, the same for everybody, and nothing that fits no budget."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from made import Made, config, image, index_of, random_texts
from planned import GROUPINGS, KINDS, grouper, samples_of, some_index, steps_of_chunks

from mmjax.balance.parts import LLM
from mmjax.config import IsfGrouping, NoGrouping, PackGrouping, Samples, Tokens
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.fit_budget import long_samples, make_budget
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.sample import Item


def assert_same(one: list[Group], two: list[Group]) -> None:
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.samples, b.samples)
        assert (a.row is None) == (b.row is None)
        if a.row is not None:
            np.testing.assert_array_equal(a.row, b.row)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_sample_of_finished_chunks_is_used_exactly_once(grouping, microbatches):
    steps, order = steps_of_chunks(grouper(grouping=grouping, microbatches=microbatches), 3)
    assert {len(step) for step in steps} == {microbatches}
    assert Counter(np.concatenate([samples_of(step) for step in steps]).tolist()) == Counter(
        order.tolist()
    )


@cache
def index_of_size(samples: int) -> LengthIndex:
    """Samples whose lengths are those of some made ones."""
    made, chosen = (
        some_index(),
        np.random.default_rng(samples).integers(len(some_index()), size=samples),
    )
    of_items = np.concatenate([np.arange(*made.item_start[k : k + 2]) for k in chosen])
    return replace(
        made,
        source_start=np.array([0, samples]),
        text_tokens=made.text_tokens[chosen],
        totals=made.totals[chosen],
        pairs=made.pairs[chosen],
        item_start=np.concatenate([[0], np.cumsum(np.diff(made.item_start)[chosen])]),
        **{
            f"item_{key}": getattr(made, f"item_{key}")[of_items]
            for key in ("encoder", "positions", "useful", "tokens", "pairs")
        },
    )


@pytest.mark.default_cases("pack-362", "isf-100", "none-362", "none-5000")
@pytest.mark.parametrize("samples", [100, 362, 5000, 200_000])
@pytest.mark.parametrize("grouping", [PackGrouping(), IsfGrouping(), NoGrouping()], ids=KINDS)
def test_an_epoch_holds_every_sample_once_and_no_step_holds_one_twice(grouping, samples):
    grouped = grouper(index_of_size(samples), grouping=grouping, size=Samples(40))
    usable = set(range(samples)) - set(grouped.oversize.tolist())
    epochs = 3 if samples <= 5000 else 1
    ends = [0, *(grouped.steps_for_epochs(epoch) for epoch in range(1, epochs + 1))]
    assert ends[1] >= 0.9 * len(usable) / grouped.budget.samples_per_step - 1
    for first, last in itertools.pairwise(ends):
        epoch = [samples_of(grouped.step(step)).tolist() for step in range(first, last)]
        assert all(epoch)
        assert sorted(itertools.chain(*epoch)) == sorted(usable)
    assert grouped.epochs_after(ends[-1] - 1) == epochs


def test_steps_of_part_of_an_epoch_and_back():
    grouped = grouper(index_of_size(362), grouping=NoGrouping(), size=Samples(40))
    assert [grouped.steps_for_epochs(x) for x in (0.01, 0.5, 1, 1.3)] == [1, 5, 10, 14]
    assert grouped.epochs_after(4) == pytest.approx(0.5)


def test_a_source_with_fewer_samples_than_a_step_takes_comes_once_in_it_and_that_is_said():
    index = replace(
        index_of_size(100),
        source_name=np.array(["few", "many"]),
        source_start=np.array([0, 10, 100]),
    )
    grouped = grouper(index, weights=(1.0, 1.0), grouping=NoGrouping(), size=Samples(40))
    steps = [samples_of(grouped.step(step)) for step in range(18)]
    assert all(len(set(step.tolist())) == len(step) == 20 for step in steps)
    assert Counter(np.concatenate(steps).tolist()) == Counter(
        [*range(10)] * 18 + [*range(10, 100)] * 2
    )
    assert grouped.samples_per_step == 20 < grouped.budget.samples_per_step
    (note,) = grouped.epoch_notes()
    assert note.startswith(
        "all 10 samples of few come once in 1 step, and never twice in one: steps have at most 20"
    )
    assert note.endswith("lower data.sources.few.weight")
    assert not grouper(index_of_size(362), grouping=NoGrouping(), size=Samples(40)).epoch_notes()


@pytest.mark.parametrize("grouping", GROUPINGS[:2], ids=KINDS[:2])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_a_group_puts_in_a_row_fits_it(grouping, microbatches):
    grouped = grouper(grouping=grouping, microbatches=microbatches)
    for group in (g for step in steps_of_chunks(grouped, 2)[0] for g in step):
        parts = grouped.index.parts(group.samples)
        assert np.all((group.row >= 0) & (group.row < np.array(grouped.budget.rows)[parts.module]))
        used = np.zeros((3, max(grouped.budget.rows)), np.int64)
        np.add.at(used, (parts.module, group.row), parts.length)
        assert np.all(used.max(1) <= grouped.budget.lengths)


def test_packing_lets_no_sample_wait_longer_than_ten_steps():
    grouped = grouper(grouping=PackGrouping(chunk_steps=64))
    steps, order = steps_of_chunks(grouped, 1)
    step_of = {int(s): number for number, step in enumerate(steps) for s in samples_of(step)}
    assert len(step_of) == len(order), "a chunk longer than an epoch says nothing here"
    due = np.arange(len(order)) / grouped.budget.samples_per_step
    late = np.array([step_of[int(s)] for s in order]) - due
    assert late.max() < 11


# ------------------------------------------------------------------------------------------------ a
# pure function


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_a_step_is_grouped_the_same_in_any_order_and_by_anybody(grouping):
    one, other = grouper(grouping=grouping), grouper(grouping=grouping)
    forward = [one.step(step) for step in range(0, 40, 7)]
    for step, expected in zip(range(35, -1, -7), forward[::-1], strict=True):
        assert_same(other.step(step), expected)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_another_seed_has_other_steps(grouping):
    budget = grouper(grouping=grouping).budget
    one, two = (
        samples_of(grouper(grouping=grouping, seed=seed, budget=budget).step(0)) for seed in (0, 1)
    )
    assert set(one.tolist()) != set(two.tolist())


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_a_late_step_is_found_from_known_chunk_starts_without_replaying(grouping):
    walked = grouper(grouping=grouping)
    expected = walked.step(300)
    known = grouper(grouping=grouping)
    known.first_steps = list(walked.first_steps)
    assert_same(known.step(300), expected)
    assert known._chunk.cache_info().misses == 1


@pytest.mark.parametrize("grouping", [PackGrouping(), NoGrouping()], ids=["pack", "none"])
def test_a_late_step_groups_one_chunk_alone(grouping):
    late = grouper(index_of_size(5000), grouping=grouping, size=Samples(40))
    late.step(2000)
    assert late._chunk.cache_info().misses == 1
    walked = grouper(index_of_size(5000), grouping=grouping, size=Samples(40))
    for step in range(0, 2000, 100):
        walked.step(step)
    assert_same(late.step(2000), walked.step(2000))


# --------------------------------------------------------------------------------------------------
# groupings


def test_an_isf_group_fills_one_row_of_every_module_and_leftovers_are_counted():
    grouped = grouper(grouping=IsfGrouping(iterations=2, chunk_steps=12), size=Samples(12))
    (note,) = [n for n in grouped.budget.notes if n.startswith("isf leaves")]
    assert "groups" in note
    for group in (g for step in steps_of_chunks(grouped, 1)[0] for g in step):
        sample = grouped.index.parts(group.samples).sample()
        assert all(len(set(group.row[sample == s])) == 1 for s in range(len(group.samples)))


def test_isf_steps_are_about_equally_full():
    grouped = grouper(grouping=IsfGrouping(chunk_steps=12), size=Samples(40))
    rows = []
    for group in (g for step in steps_of_chunks(grouped, 2)[0] for g in step):
        rows.append(len(set(group.row[grouped.index.parts(group.samples).module == LLM])))
    assert grouped.budget.rows[0] > 1
    assert max(rows) - min(rows) <= 1


def test_without_grouping_every_step_has_the_same_number_of_samples_in_the_order_of_the_shuffle():
    steps, order = steps_of_chunks(grouper(grouping=NoGrouping(chunk_steps=12)), 2)
    for step, expected in zip(steps, order.reshape(-1, 6), strict=True):
        assert sorted(samples_of(step).tolist()) == sorted(expected.tolist())
        assert all(group.row is None for group in step)


# --------------------------------------------------------------------------------------------------
# over-long


def test_samples_over_the_budget_are_listed_and_never_grouped():
    index = index_of(random_texts([10, 12, 500, 14, 11, 9, 600, 13]), config())
    for grouping in GROUPINGS:
        grouped = grouper(index, size=Tokens(120), grouping=grouping)
        assert grouped.oversize.tolist() == [2, 6]
        assert grouped.budget.lengths[0] < 200
        steps, _ = steps_of_chunks(grouped, 2)
        assert set(np.concatenate([samples_of(step) for step in steps]).tolist()) == {
            0,
            1,
            3,
            4,
            5,
            7,
        }


def test_the_longest_sample_of_a_budget_in_samples_is_used():
    index = index_of(random_texts([10, 12, 500, 14, 11, 9, 600, 13]), config())
    for grouping in GROUPINGS:
        grouped = grouper(index, size=Samples(4), grouping=grouping)
        assert not len(grouped.oversize)
        steps, _ = steps_of_chunks(grouped, 3)
        assert set(np.concatenate([samples_of(step) for step in steps]).tolist()) == set(range(8))


def test_a_sample_whose_items_cannot_be_laid_into_the_rows_is_over_long():
    rng = np.random.default_rng(0)
    segments = tuple(Item("vision", n) for n in range(3))
    # 64 patches each, and two rows of less than 128
    three = (segments, [image(rng, 16, 16) for _ in range(3)])
    source = Made([three, *[((Item("vision", 0),), [image(rng, 16, 16)]) for _ in range(9)]])
    grouped = grouper(
        index_of(source, config()), budget=Budget((3, 2, 1), (96, 100, 12), 6.0, 10**6)
    )
    assert grouped.oversize.tolist() == [0]
    assert 0 not in np.concatenate([samples_of(grouped.step(step)) for step in range(10)])


def test_every_sources_share_and_own_epochs_are_said_and_counted():
    two = some_index()
    large = len(two) - 20
    index = replace(
        two, source_name=np.array(["big", "small"]), source_start=np.array([0, large, len(two)])
    )
    grouped = grouper(index, weights=(1.0, 1.0), size=Samples(8))
    big, small = grouped.source_shares(30)
    assert (big[:3], small[:3]) == (("big", large, 0.5), ("small", 20, 0.5))
    assert small[3] / big[3] == pytest.approx(large / 20)
    drawn = np.zeros(2)
    for step in range(30):
        for group in grouped.step(step):
            drawn += np.bincount(index.source_of(group.samples), minlength=2)
        np.testing.assert_allclose(grouped.source_epochs_after(step), drawn / [large, 20])


def test_the_few_samples_that_make_rows_long_are_found_with_what_leaving_them_out_saves():
    lengths = [20 + k % 9 for k in range(60)]
    texts = lambda *more: index_of(random_texts([*lengths, *more]), made)  # noqa: E731
    made = config(size=Samples(4), rows={"llm": 4, "vision": 4, "audio": 4})
    weights = (1.0,)
    for more in ((), (30,)):
        index = texts(*more)
        assert long_samples(index, made, weights, make_budget(index, made, weights)) is None
    index = texts(900, 800)
    found = long_samples(index, made, weights, make_budget(index, made, weights))
    assert (found.module, found.samples.tolist()) == ("llm", [60, 61])
    assert (found.positions, found.largest_other) == (900, 28)
    without = make_budget(texts(), made, weights)
    assert found.row_without == (without.rows[LLM], without.lengths[LLM])
    assert found.room > found.room_without
    assert found.samples_per_step > 2 * found.samples_per_step_without
