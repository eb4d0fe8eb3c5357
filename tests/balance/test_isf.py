import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import corpus

import mmjax.balance.isf as isf_module
from mmjax.balance.isf import Bounds, choose_bounds, group_leftovers, isf


def paper_isf(
    lengths: np.ndarray, maximum: list[int], minimum: list[int], iterations: int, seed: int
) -> np.ndarray:
    """Algorithms 1 and 2 of OmniBal, line by line."""
    rng = np.random.default_rng(seed)
    group, groups, data = np.full(len(lengths), -1), 0, list(range(len(lengths)))
    for _ in range(iterations):
        candidates, current = [], []
        for i in rng.permutation(data).astype(int):
            current.append(i)
            if any(lengths[current].sum(0) > maximum):
                current.pop()
                candidates.append(current)
                current = [i]
        data = []
        for candidate in candidates:
            if not all(lengths[candidate].sum(0) < minimum):
                group[candidate] = groups
                groups += 1
            else:
                data += candidate
        data += current
    return group


def test_groups_are_those_of_the_papers_algorithms():
    rng = np.random.default_rng(0)
    lengths = np.stack([rng.integers(0, 6, 300), rng.integers(1, 90, 300)], axis=1)
    for seed in range(3):
        got = isf(lengths, np.array([9, 256]), np.array([9, 240]), 4, np.random.default_rng(seed))
        assert np.array_equal(got.group, paper_isf(lengths, [9, 256], [9, 240], 4, seed))


problems = st.integers(1, 4).flatmap(
    lambda d: st.tuples(
        st.lists(st.lists(st.integers(0, 30), min_size=d, max_size=d), max_size=60),
        st.lists(st.integers(5, 60), min_size=d, max_size=d),
        st.integers(0, 99),
    )
)


@settings(max_examples=100)
@given(problems)
def test_every_sample_is_in_one_group_within_bounds_or_returned_as_above_them(problem):
    lengths, maximum, seed = (
        np.array(problem[0]).reshape(-1, len(problem[1])),
        np.array(problem[1]),
        problem[2],
    )
    minimum = np.maximum(maximum - 4, 1)
    accepted = isf(lengths, maximum, minimum, 5, np.random.default_rng(seed))
    grouping = group_leftovers(lengths, accepted, maximum)

    assert np.array_equal(grouping.oversize, np.flatnonzero(np.any(lengths > maximum, axis=1)))
    assert np.array_equal(np.flatnonzero(grouping.group < 0), grouping.oversize)
    assert np.array_equal(grouping.group[accepted.group >= 0], accepted.group[accepted.group >= 0])
    groups = grouping.groups + grouping.leftover_groups
    assert np.array_equal(np.unique(grouping.group[grouping.group >= 0]), np.arange(groups))
    total = np.zeros((groups, len(maximum)), np.int64)
    np.add.at(total, grouping.group[grouping.group >= 0], lengths[grouping.group >= 0])
    assert np.all(total <= maximum)
    assert np.all(np.any(total[: grouping.groups] >= minimum, axis=1))
    again = isf(lengths, maximum, minimum, 5, np.random.default_rng(seed))
    assert np.array_equal(again.group, accepted.group)


def test_iterations_tell_what_they_kept():
    lengths = corpus(2000, 0).totals(3)
    bounds = choose_bounds(lengths, (5, 7), 8)
    grouping = isf(lengths, bounds.maximum, bounds.minimum, 10, np.random.default_rng(0))
    assert sum(i.groups for i in grouping.iterations) == grouping.groups
    assert sum(i.samples for i in grouping.iterations) == (grouping.group >= 0).sum()
    assert len(grouping.iterations) == 10
    first = np.flatnonzero((grouping.group >= 0) & (grouping.group < grouping.iterations[0].groups))
    expected = lengths[first].sum(0) / (grouping.iterations[0].groups * bounds.maximum)
    np.testing.assert_allclose(grouping.iterations[0].fill, expected)


def test_a_shuffle_by_buckets_makes_every_order_as_often(monkeypatch):
    monkeypatch.setattr(isf_module, "_CACHED", 1)
    rng = np.random.default_rng(0)
    number, length = np.arange(4, dtype=np.int32), np.arange(8, dtype=np.int32).reshape(4, 2)
    samples, shuffled = (
        isf_module._Samples(number, length),
        isf_module._Samples(number.copy(), length.copy()),
    )
    orders = np.zeros(256, int)
    for _ in range(4800):
        isf_module._shuffle(samples, shuffled, rng)
        assert np.array_equal(shuffled.length, length[shuffled.number])
        orders[shuffled.number @ [64, 16, 4, 1]] += 1
    assert np.count_nonzero(orders) == 24
    assert np.abs(orders[orders > 0] - 200).max() < 75  # five standard deviations


def test_many_samples_are_grouped_by_buckets_with_nothing_lost(monkeypatch):
    monkeypatch.setattr(isf_module, "_CACHED", 16)
    lengths = np.concatenate([corpus(500, 4).totals(3), [[999, 0, 0]]])
    maximum, minimum = np.array([200, 90, 160]), np.array([190, 85, 150])
    grouping = group_leftovers(
        lengths, isf(lengths, maximum, minimum, 5, np.random.default_rng(0)), maximum
    )
    assert grouping.oversize.tolist() == np.flatnonzero(np.any(lengths > maximum, axis=1)).tolist()
    assert np.array_equal(np.flatnonzero(grouping.group < 0), grouping.oversize)
    inside = grouping.group >= 0
    for column, most in zip(lengths.T, maximum, strict=True):
        assert np.bincount(grouping.group[inside], column[inside]).max() <= most


def test_more_iterations_leave_fewer_samples_over():
    lengths = corpus(2000, 1).totals(3)
    bounds = choose_bounds(lengths, (5, 7), 8)
    left = [
        (
            isf(lengths, *[bounds.maximum, bounds.minimum], t, np.random.default_rng(0)).group < 0
        ).mean()
        for t in (1, 10)
    ]
    assert left[1] < 0.5 * left[0]
    assert left[1] < 0.25


def test_bounds_come_from_the_lengths_that_occur_not_from_a_ratio_of_means():
    """Samples of 5 tiles and nothing else: a bound of 9, the ratio's, would leave four tiles of nine empty."""
    lengths = np.stack([np.full(500, 5), np.random.default_rng(0).integers(90, 110, 500)], axis=1)
    bounds = choose_bounds(lengths, (1.7, 2.4), np.array([1, 8]))
    assert bounds.maximum[0] % 5 == 0
    assert fill_of_all_groups(lengths, bounds)[0] > 0.99
    nine = Bounds(np.array([9, 256]), np.array([9, 128]))
    assert fill_of_all_groups(lengths, nine)[0] < 0.56


@pytest.mark.parametrize("wide", [False, True])
def test_chosen_bounds_fill_no_worse_than_bounds_from_means(wide):
    lengths = corpus(3000, 2, wide).totals(3)
    chosen = choose_bounds(lengths, (7, 10), 8)
    plain = np.maximum(-(-8 * lengths.mean(0) // 8) * 8, lengths.max(0)).astype(np.int64)
    from_means = Bounds(plain, np.ceil(0.97 * plain).astype(np.int64))
    assert np.all(chosen.maximum % 8 == 0)
    assert np.all(chosen.maximum >= lengths.max(0))
    assert np.all(chosen.minimum <= chosen.maximum)
    assert (
        fill_of_all_groups(lengths, chosen).mean() >= fill_of_all_groups(lengths, from_means).mean()
    )


def test_a_dimension_that_no_sample_uses_neither_accepts_nor_refuses_a_group():
    lengths = corpus(1000, 3).totals(4)
    bounds = choose_bounds(lengths, (5, 7), 8)
    grouping = isf(lengths, bounds.maximum, bounds.minimum, 10, np.random.default_rng(0))
    same = isf(lengths[:, :3], bounds.maximum[:3], bounds.minimum[:3], 10, np.random.default_rng(0))
    assert bounds.maximum[3] == 8
    assert np.array_equal(grouping.group, same.group)


def test_no_samples_make_no_groups_and_no_bounds():
    grouping = isf(
        np.zeros((0, 2), np.int64), np.array([4, 4]), np.array([3, 3]), 10, np.random.default_rng(0)
    )
    assert grouping.groups == 0
    with pytest.raises(ValueError, match="no samples"):
        choose_bounds(np.zeros((0, 2), np.int64), (4, 5))


def fill_of_all_groups(lengths: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Mean fill per dimension over a few shuffles, leftover groups counted: [D]."""
    groups = 0.0
    for seed in range(5, 10):
        grouping = isf(lengths, bounds.maximum, bounds.minimum, 10, np.random.default_rng(seed))
        groups += (
            grouping.groups + group_leftovers(lengths, grouping, bounds.maximum).leftover_groups
        ) / 5
    return lengths.sum(0) / (groups * bounds.maximum)
