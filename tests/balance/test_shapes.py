from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import corpus

from mmjax.balance.lpt import to_rows
from mmjax.balance.shapes import assign, choose_shapes


def cost_of_steps(needs: np.ndarray, shapes: np.ndarray, cost: np.ndarray) -> float:
    """Each step with the cheapest shape that holds it."""
    holds = np.all(needs[:, None] <= shapes[None], axis=-1)
    return float(np.where(holds, shapes @ cost, np.inf).min(1).sum())


def steps_of_24(seed: int, steps: int = 300, wide: bool = False) -> np.ndarray:
    parts = corpus(24 * steps, seed, wide)
    rows = np.array([8, 2, 3])
    step = np.repeat(np.arange(steps), 24)[parts.sample()]
    one = np.zeros(len(step), np.int64)
    return np.array(
        [to_rows(parts.module[of], parts.length[of], one[of], rows)[1] for of in each(step, steps)]
    )


def each(step: np.ndarray, steps: int) -> list[np.ndarray]:
    return [np.flatnonzero(step == i) for i in range(steps)]


COST = np.array([8.0, 1.0, 1.0])


@pytest.mark.parametrize("limit", [2, 3])
def test_shapes_are_the_best_or_nearly_so_on_tiny_problems(limit):
    ratios = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        needs, cost = rng.integers(1, 7, (7, 2)), rng.uniform(0.5, 2, 2)
        tuples = list(product(*[np.unique(column) for column in needs.T]))
        best = min(
            cost_of_steps(needs, np.array([*inner, needs.max(0)]), cost)
            for inner in combinations_with_replacement(tuples, limit - 1)
        )
        shapes = choose_shapes(needs, cost, limit, alignment=1)
        assert len(shapes) <= limit
        ratios.append(cost_of_steps(needs, shapes, cost) / best)
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.05


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_shapes_cover_every_need_and_cost_no_more_than_a_ladder(wide, limit):
    needs = steps_of_24(0, wide=wide)
    shapes = choose_shapes(needs, COST, limit, alignment=8)
    assert len(shapes) <= limit
    assert np.all(shapes % 8 == 0)
    assert np.all(needs <= shapes[-1])
    assert np.all(np.diff(shapes @ COST) > 0)
    largest = -(-needs.max(0) // 8) * 8
    ladder = np.array([np.ceil(largest / 1.125**j / 8) * 8 for j in range(limit)])
    assert cost_of_steps(needs, shapes, COST) <= cost_of_steps(needs, ladder, COST)


def test_eight_shapes_leave_at_most_half_of_what_one_wastes():
    needs = steps_of_24(1, wide=True)
    used = float((needs @ COST).sum())
    wasted = [
        cost_of_steps(needs, choose_shapes(needs, COST, limit), COST) - used for limit in (1, 8)
    ]
    assert wasted[1] < 0.5 * wasted[0]


def cost_of_ways(needs: np.ndarray, shapes: np.ndarray, cost: np.ndarray) -> float:
    """Each step in its cheapest way; the last column is a width, of which a need of 0 takes nothing."""
    holds = np.all(needs[:, :, None] <= shapes, axis=-1)
    holds &= (needs[:, :, None, -1] > 0) | (shapes[:, -1] == 0)
    return float(np.where(holds, shapes @ cost, np.inf).min((1, 2)).sum())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_step_takes_a_shape_that_sends_mere_padding_and_shapes_are_nearly_the_best_of_those(
    limit,
):
    ratios, exchanging = [], 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        rest = np.stack([rng.integers(3, 9, 7), np.zeros(7, np.int64)], axis=1)
        move = np.stack([rng.integers(1, rest[:, 0] + 1), rng.integers(1, 4, 7)], axis=1)
        needs, cost = np.stack([rest, move], axis=1), rng.uniform(0.5, 2, 2)
        tuples = list(product(np.unique(needs[:, :, 0]), np.unique(needs[:, :, 1])))
        best = min(
            cost_of_ways(needs, np.array([*inner, rest.max(0)]), cost)
            for inner in combinations_with_replacement(tuples, limit - 1)
        )
        shapes = choose_shapes(needs, cost, limit, alignment=1, widths=1)
        assert shapes[-1].tolist() == rest.max(0).tolist()
        exchanging += int((shapes[:, -1] > 0).sum())
        ratios.append(cost_of_ways(needs, shapes, cost) / best)
    assert (exchanging > 0) == (limit > 1)
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.1


def test_a_step_is_assigned_the_cheapest_shape_that_holds_it():
    needs = steps_of_24(2)
    shapes = choose_shapes(needs, COST, 8)
    for need in needs:
        held = [j for j, shape in enumerate(shapes) if np.all(need <= shape)]
        assert assign(need, shapes) == min(held, key=lambda j: shapes[j] @ COST)
    assert assign(shapes[-1] + np.array([0, 1, 0]), shapes) == -1


def test_equal_needs_make_one_shape_and_what_nobody_needs_stays_zero():
    assert choose_shapes(np.array([[9, 0], [10, 0]]), np.ones(2), 8, alignment=8).tolist() == [
        [16, 0]
    ]


@settings(max_examples=50)
@given(
    needs=st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=25),
    alignment=st.tuples(*[st.integers(1, 16)] * 3),
    limit=st.integers(1, 4),
    worth=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_each_length_is_a_multiple_of_its_own_alignment_and_no_longer_than_somebody_needs(
    needs, alignment, limit, worth
):
    needs, alignment = np.array(needs), np.array(alignment)
    shapes = choose_shapes(needs, COST, limit, alignment, worth)
    assert 1 <= len(shapes) <= limit
    assert np.all(shapes % alignment == 0)
    assert np.array_equal(shapes[-1], -(-needs.max(0) // alignment) * alignment)
    aligned = -(-needs // alignment) * alignment
    assert all(
        set(column.tolist()) <= set(of.tolist())
        for column, of in zip(shapes.T, aligned.T, strict=True)
    )
    assert np.array_equal(shapes, choose_shapes(needs, COST, limit, alignment, worth))


@pytest.mark.parametrize("worth", [0.002, 0.02, 0.1])
def test_only_as_many_shapes_are_chosen_as_are_worth_it(worth):
    needs = steps_of_24(3, wide=True)
    every = [choose_shapes(needs, COST, limit) for limit in range(1, 9)]
    cost = [cost_of_steps(needs, shapes, COST) for shapes in every]
    chosen = choose_shapes(needs, COST, 8, worth=worth)
    number = next(k for k, c in enumerate(cost) if c <= (1 + worth) * min(cost))
    assert np.array_equal(chosen, every[number])


def test_more_needs_than_can_be_compared_in_pairs_are_still_covered():
    rng = np.random.default_rng(0)
    needs = rng.integers(100, 2000, (3000, 3))
    shapes = choose_shapes(needs, COST, 4, alignment=64)
    assert np.all(needs <= shapes[-1])
    largest = -(-needs.max(0) // 64) * 64
    ladder = np.array([np.ceil(largest / 1.125**j / 64) * 64 for j in range(4)])
    assert cost_of_steps(needs, shapes, COST) <= cost_of_steps(needs, ladder, COST)


def test_no_needs_are_refused():
    with pytest.raises(ValueError, match="at least one step"):
        choose_shapes(np.zeros((0, 3)), COST)
