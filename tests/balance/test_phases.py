import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance import phases
from mmjax.balance.parts import dist_ratio
from mmjax.balance.phases import (
    Costs,
    PhasePlan,
    cost_per_rank,
    costs_of,
    place_by_llm,
    place_each_phase,
    place_in_order,
    place_jointly,
    step_time,
    wire,
)
from mmjax.data.plan.length_files import omni_corpus

WIDTHS = [(0, 128, 256, 512, 1024, 2048)] * 2


def from_lengths(lengths: np.ndarray, lam: float = 0.0) -> Costs:
    """Costs of lengths `[3, n]`, LLM, vision and audio: at most one item of each encoder in a sample."""
    phase, sample = np.nonzero(lengths[1:])
    length = lengths[1:][phase, sample]
    cost = lengths + lam * lengths.astype(np.float64) ** 2
    return costs_of(cost[0], sample, phase + 1, cost[1:][phase, sample], -(-length // 4), 3)


def omni(n: int, seed: int = 0) -> np.ndarray:
    """Lengths `[3, n]` of which half the samples have images, a third audio and some both."""
    made = omni_corpus(n, seed)
    return np.stack([np.maximum(made["llm_tokens"], 1), made["vision"], made["audio"]])


def ratios(costs: Costs, plan: PhasePlan, ranks: int) -> np.ndarray:
    return dist_ratio(cost_per_rank(costs, plan, ranks).T)


def travelling(costs: Costs, plan: PhasePlan, ranks: int) -> np.ndarray:
    """Tokens from each rank to each other one, per encoder: [phases - 1, ranks, ranks]."""
    volume = np.zeros((costs.phases - 1, ranks, ranks), np.int64)
    source = plan.sample_rank[costs.item_sample]
    away = source != plan.item_rank
    np.add.at(
        volume,
        (costs.item_phase[away] - 1, source[away], plan.item_rank[away]),
        costs.item_tokens[away],
    )
    return volume


@st.composite
def made_costs(draw, most_samples: int = 40, most_phases: int = 4) -> Costs:
    phases, n = draw(st.integers(1, most_phases)), draw(st.integers(0, most_samples))
    llm = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    item = st.tuples(
        st.integers(0, max(n - 1, 0)), st.integers(1, max(phases - 1, 1)), st.integers(0, 60)
    )
    items = draw(st.lists(item, max_size=2 * n)) if phases > 1 and n else []
    sample, phase, length = np.array(items, np.int64).reshape(-1, 3).T
    return costs_of(np.array(llm, np.float64), sample, phase, length * 0.7, -(-length // 4), phases)


@st.composite
def problems(draw):
    costs, ranks = draw(made_costs()), draw(st.integers(1, 9))
    allowed = draw(st.sampled_from([(0,), (0, 3), (0, 2, 8, 30)]))
    return costs, ranks, draw(st.sampled_from([None, 1, 2, 4])), [allowed] * (costs.phases - 1)


@settings(max_examples=300)
@given(problems())
def test_each_sample_gets_a_rank_and_its_items_stay_in_the_node_within_the_width(problem):
    costs, ranks, ranks_per_node, widths = problem
    plan = place_jointly(costs, ranks, ranks_per_node, widths)
    assert plan.sample_rank.dtype == plan.item_rank.dtype == np.int32
    assert plan.sample_rank.shape == (len(costs),)
    assert plan.item_rank.shape == costs.item_sample.shape
    assert np.all((plan.sample_rank >= 0) & (plan.sample_rank < ranks))
    assert np.all((plan.item_rank >= 0) & (plan.item_rank < ranks))
    each = ranks_per_node or ranks
    assert np.array_equal(plan.item_rank // each, plan.sample_rank[costs.item_sample] // each)
    assert all(width in allowed for width, allowed in zip(plan.width, widths, strict=True))
    assert np.all(travelling(costs, plan, ranks).max((1, 2)) <= plan.width)
    np.testing.assert_allclose(cost_per_rank(costs, plan, ranks).sum(0), costs.sample.sum(0))
    again = place_jointly(costs, ranks, ranks_per_node, widths)
    assert np.array_equal(again.sample_rank, plan.sample_rank)
    assert np.array_equal(again.item_rank, plan.item_rank)
    assert np.array_equal(again.width, plan.width)


@settings(max_examples=100)
@given(problems(), st.data())
def test_the_start_is_kept_unless_the_plan_is_worth_it(problem, data):
    costs, ranks, ranks_per_node, widths = problem
    n = len(costs)
    start = np.array(
        data.draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n)), np.int32
    )
    free = place_jointly(costs, ranks, ranks_per_node, widths)
    with mock.patch.object(phases, "MIN_GAIN", 0.05):
        plan = place_jointly(costs, ranks, ranks_per_node, widths, start)
    kept = PhasePlan(start, start[costs.item_sample], np.zeros(costs.phases - 1, np.int64))
    before, after = (step_time(costs, at, ranks, ranks_per_node) for at in (kept, free))
    expected = free if after <= 0.95 * before else kept
    assert np.array_equal(plan.sample_rank, expected.sample_rank)
    assert np.array_equal(plan.item_rank, expected.item_rank)
    assert np.array_equal(plan.width, expected.width)


def best_time(costs: Costs, ranks: int, move: bool) -> float:
    """The least time over all samples' ranks, and over all items' ranks if they may move for nothing."""
    best = np.inf
    none = np.zeros(costs.phases - 1, np.int64)
    for samples in itertools.product(range(ranks), repeat=len(costs)):
        at = np.array(samples, np.int32)
        if not move:
            best = min(
                best,
                step_time(costs, PhasePlan(at, at[costs.item_sample], none), ranks),
            )
        else:
            for items in itertools.product(range(ranks), repeat=len(costs.item_sample)):
                plan = PhasePlan(at, np.array(items, np.int32), none)
                best = min(best, step_time(costs, plan, ranks))
    return best


@settings(max_examples=60)
@given(made_costs(most_samples=6, most_phases=3), st.integers(1, 3))
def test_few_samples_take_at_most_a_third_longer_than_the_best_assignment(costs, ranks):
    plan = place_jointly(costs, ranks)
    assert step_time(costs, plan, ranks) <= 4 / 3 * best_time(costs, ranks, move=False) + 1e-9


@settings(max_examples=30)
@given(made_costs(most_samples=3, most_phases=3), st.integers(1, 2))
def test_few_items_that_move_freely_take_at_most_a_third_longer_than_the_best_assignment(
    costs, ranks
):
    with mock.patch.object(phases, "EXCHANGE", 0.0):
        plan = place_jointly(costs, ranks, None, [(0, 10_000)] * (costs.phases - 1))
        best = best_time(costs, ranks, move=True)
        assert step_time(costs, plan, ranks) <= 4 / 3 * best + 1e-9


@pytest.mark.parametrize("lam", [0.0, 1e-4])
def test_sixty_samples_a_rank_are_within_one_percent_in_every_phase_and_nothing_travels(lam):
    lengths = omni(20 * 480)
    for step in np.split(lengths, 20, axis=1):
        costs = from_lengths(step, lam)
        plan = place_jointly(costs, 8, None, WIDTHS)
        assert ratios(costs, plan, 8).max() <= 0.01
        assert plan.width.tolist() == [0, 0]
        assert ratios(costs, place_by_llm(costs, 8), 8)[1:].min() > 0.03


def test_sixteen_samples_a_rank_are_within_three_percent_and_little_travels():
    sent, apart = [], []
    for step in np.split(omni(30 * 128), 30, axis=1):
        costs = from_lengths(step)
        plan = place_jointly(costs, 8, None, WIDTHS)
        assert ratios(costs, plan, 8).max() <= 0.03
        total = costs.item_tokens.sum()
        sent.append(wire(plan.width, 8).sum() / total)
        apart.append(wire(place_each_phase(costs, 8).width, 8).sum() / total)
    assert np.mean(sent) <= 0.5
    assert np.mean(sent) <= 0.25 * np.mean(apart)


@pytest.mark.parametrize("per_rank", [4, 8])
def test_few_samples_a_rank_are_as_equal_as_if_each_phase_were_balanced_alone(per_rank):
    joint, apart = [], []
    for step in np.split(omni(40 * 8 * per_rank), 40, axis=1):
        costs = from_lengths(step)
        joint.append(ratios(costs, place_jointly(costs, 8, None, WIDTHS), 8))
        apart.append(ratios(costs, place_each_phase(costs, 8), 8))
    assert np.all(np.mean(joint, axis=0) <= np.mean(apart, axis=0) + 0.005)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(64, 8), (60, 8), (20, 3), (64, None)])
def test_ranks_of_all_nodes_are_equal_and_no_node_is_left(ranks, ranks_per_node):
    costs = from_lengths(omni(60 * ranks))
    plan = place_jointly(costs, ranks, ranks_per_node, WIDTHS)
    assert ratios(costs, plan, ranks).max() <= 0.01
    assert plan.width.tolist() == [0, 0]
    assert np.array_equal(plan.item_rank, plan.sample_rank[costs.item_sample])


def test_a_rank_with_one_long_text_has_its_images_encoded_by_others():
    """Four ranks: one text is all that a rank may hold of the LLM, so its images must come from other ranks."""
    llm = np.array([90.0] + [10.0] * 27)
    costs = costs_of(llm, np.arange(1, 28), np.ones(27, int), np.full(27, 8.0), np.full(27, 4), 2)
    with mock.patch.object(phases, "EXCHANGE", 0.001):
        plan = place_jointly(costs, 4, None, [(0, 4, 8, 16)])
    load = cost_per_rank(costs, plan, 4)
    assert load[:, 0].max() == 90
    assert load[:, 1].max() == 56
    assert 0 < plan.width[0] <= 8
    at_home = place_jointly(costs, 4)
    assert at_home.width.tolist() == [0]
    assert np.array_equal(at_home.item_rank, at_home.sample_rank[costs.item_sample])
    assert step_time(costs, plan, 4) < step_time(costs, at_home, 4)


def test_images_of_one_sample_are_shared_out_where_they_are_too_many_for_a_rank():
    costs = costs_of(
        np.full(8, 5.0), np.zeros(16, int), np.ones(16, int), np.ones(16), np.ones(16, int), 2
    )
    with mock.patch.object(phases, "EXCHANGE", 0.001):
        plan = place_jointly(costs, 4, None, [(0, 2, 4, 8)])
    assert cost_per_rank(costs, plan, 4).max(0).tolist() == [10, 4]
    assert plan.width.tolist() == [4]


@settings(max_examples=100)
@given(made_costs(), st.integers(1, 9))
def test_the_other_modes_lose_nothing_and_do_what_they_say(costs, ranks):
    in_order, by_llm, apart = (
        place_in_order(costs, ranks),
        place_by_llm(costs, ranks),
        place_each_phase(costs, ranks),
    )
    for plan in (in_order, by_llm, apart):
        assert np.all((plan.sample_rank >= 0) & (plan.sample_rank < ranks))
        np.testing.assert_allclose(cost_per_rank(costs, plan, ranks).sum(0), costs.sample.sum(0))
    for plan in (in_order, by_llm):
        assert np.array_equal(plan.item_rank, plan.sample_rank[costs.item_sample])
        assert not plan.width.any()
    assert np.all(np.diff(in_order.sample_rank) >= 0)
    assert np.ptp(np.bincount(in_order.sample_rank, minlength=ranks)) <= 1
    assert np.array_equal(travelling(costs, apart, ranks).max((1, 2), initial=0), apart.width)
    bound = cost_per_rank(costs, apart, ranks).mean(0) * 4 / 3
    longest = np.array([costs.sample[:, 0].max(initial=0)] + [0.0] * (costs.phases - 1))
    np.maximum.at(longest, costs.item_phase, costs.item_cost)
    assert np.all(
        cost_per_rank(costs, apart, ranks).max(0)
        <= np.maximum(bound, bound * 0.75 + longest) + 1e-9
    )


def test_time_is_one_for_equal_ranks_and_counts_what_is_sent():
    costs = costs_of(
        np.full(4, 3.0), np.arange(4), np.ones(4, int), np.full(4, 1.0), np.full(4, 10), 2
    )
    home = place_in_order(costs, 2)
    assert step_time(costs, home, 2) == pytest.approx(1.0)
    sent = PhasePlan(home.sample_rank, home.item_rank[::-1].copy(), np.array([20]))
    assert wire(sent.width, 2).tolist() == [40]
    assert step_time(costs, sent, 2) == pytest.approx(1.01)
    lopsided = PhasePlan(home.sample_rank, np.zeros(4, np.int32), np.array([0]))
    assert step_time(costs, lopsided, 2) == pytest.approx(0.75 + 2 * 0.25)


def test_what_makes_no_sense_is_refused():
    one = costs_of(np.ones(2), np.array([1]), np.array([1]), np.ones(1), np.ones(1), 2)
    with pytest.raises(ValueError, match="at least one"):
        place_jointly(one, 0)
    with pytest.raises(ValueError, match="at least one"):
        place_jointly(one, 4, 0)
    with pytest.raises(ValueError, match="ascend from 0"):
        place_jointly(one, 2, None, [(4, 8)])
    with pytest.raises(ValueError, match="2 encoders, there are 1"):
        place_jointly(one, 2, None, [(0,), (0,)])
    none = np.zeros(0, np.int64)
    for sample, items, match in [
        (np.ones(2), [none] * 4, "first column"),
        (np.ones((2, 2)), [none, none, none, np.zeros(1)], "one sample, phase"),
        (np.ones((2, 2)), [np.array([2]), np.array([1]), np.ones(1), np.ones(1)], "outside of 0"),
        (np.ones((2, 2)), [np.array([0]), np.array([2]), np.ones(1), np.ones(1)], "outside of 1"),
        (np.full((2, 2), np.nan), [none] * 4, "not finite"),
    ]:
        with pytest.raises(ValueError, match=match):
            Costs(sample, *items)


@pytest.mark.parametrize(
    ("ranks", "per_rank", "steps"), [(8, 16, 30), (64, 16, 6), (8, 60, 10), (64, 60, 2)]
)
def test_no_phase_is_less_even_than_balanced_alone_and_little_travels(ranks, per_rank, steps):
    joint, apart, sent = [], [], []
    for step in np.split(omni(steps * ranks * per_rank), steps, axis=1):
        costs = from_lengths(step)
        plan = place_jointly(costs, ranks, 8, WIDTHS)
        joint.append(ratios(costs, plan, ranks))
        apart.append(ratios(costs, place_each_phase(costs, ranks), ranks))
        sent.append(wire(plan.width, ranks, 8).sum() / costs.item_tokens.sum())
    assert np.all(np.mean(joint, axis=0) <= np.mean(apart, axis=0) + 0.001)
    assert np.mean(sent) <= 0.15


def test_long_texts_leave_room_for_images_on_ranks_of_other_nodes():
    """Two of 32 ranks have a text that fills nine tenths: what they lack in images is spread over all others."""
    llm = np.concatenate([[90.0, 90.0], np.full(30 * 10, 10.0), np.full(2, 10.0)])
    vision = np.concatenate([[0.0, 0.0], np.full(302, 8.0)])
    costs = costs_of(llm, np.arange(2, 304), np.ones(302, int), vision[2:], np.full(302, 2), 2)
    load = cost_per_rank(costs, place_jointly(costs, 32, 8), 32)
    assert load[:, 0].max() == 100
    assert load[:, 1].max() <= 88


@pytest.mark.exhaustive
def test_fifty_thousand_heavy_tailed_samples_are_placed():
    rng = np.random.default_rng(0)
    vision = np.where(rng.random(50_000) < 0.6, 100 * (rng.pareto(1.3, 50_000) + 1), 0).astype(
        np.int64
    )
    llm = (50 * (rng.pareto(1.3, 50_000) + 1)).astype(np.int64) + vision // 4
    sample = np.flatnonzero(vision)
    costs = costs_of(
        llm, sample, np.ones(len(sample), int), vision[sample], -(-vision[sample] // 4), 2
    )
    plan = place_jointly(costs, 8, None, [(0, 1000, 100_000)])
    assert np.all(ratios(costs, plan, 8) <= ratios(costs, place_each_phase(costs, 8), 8) + 0.005)
