from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import corpus

from mmjax.balance.lpt import split, to_rows
from mmjax.balance.parts import Parts


def place(
    parts: Parts, rows: np.ndarray, microbatches: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The microbatch of each sample, the row of each part and the fullest rows."""
    microbatch = split(parts.totals(len(rows)), microbatches)
    return microbatch, *to_rows(parts.module, parts.length, microbatch[parts.sample()], rows)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_each_part_has_a_row_of_its_samples_microbatch_and_need_is_the_fullest(microbatches, wide):
    rows = np.array([4, 2, 3])
    order = np.random.default_rng(0).permutation(200)[:48]
    parts = corpus(200, 0, wide).take(order)
    microbatch, row, need = place(parts, rows, microbatches)

    assert np.array_equal(row // rows[parts.module], microbatch[parts.sample()])
    assert set(microbatch.tolist()) == set(range(microbatches))
    use = np.zeros((3, 4 * microbatches), np.int64)
    np.add.at(use, (parts.module, row), parts.length)
    assert np.array_equal(use.max(1), need)
    assert np.all(use.sum(1) == parts.totals(3).sum(0))
    for k in range(3):
        assert np.all(use[k, rows[k] * microbatches :] == 0)


def test_fullest_rows_are_within_four_thirds_of_the_bound_in_one_microbatch():
    """Graham: LPT is at most 4/3 - 1/(3 rows) of the best, which is at least the mean and the longest part."""
    rows = np.array([4, 2, 3])
    for seed in range(20):
        parts = corpus(24, seed, wide=True)
        bound = np.maximum(parts.totals(3).sum(0) / rows, parts.largest(3))
        assert np.all(place(parts, rows)[2] <= (4 / 3 - 1 / (3 * rows)) * bound * 1.1)


def test_microbatches_are_nearly_as_equal_as_the_best_assignment():
    ratios = []
    for seed in range(10):
        parts = corpus(9, seed)
        totals = parts.totals(3)
        share = totals * 2 / totals.sum(0)
        best = min(
            max(share[chosen].sum(0).max(), share[~chosen].sum(0).max())
            for chosen in np.array(list(product([False, True], repeat=9)))
        )
        microbatch = split(totals, 2)
        got = max(share[microbatch == m].sum(0).max() for m in range(2))
        assert got >= best - 1e-12
        ratios.append(got / best)
    assert np.mean(ratios) < 1.12
    assert max(ratios) < 1.35


def test_equal_samples_are_spread_evenly():
    parts = corpus(1, 0).take(np.zeros(12, np.int64))
    rows = place(parts, np.array([2, 2, 2]), 3)[1][parts.sample_start[:-1]]
    assert np.bincount(rows).tolist() == [2] * 6


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 30)), max_size=40
    ),
    rows=st.tuples(*[st.integers(1, 3)] * 3),
)
def test_parts_stay_in_their_group_and_no_row_is_fuller_than_longest_first_allows(parts, rows):
    """Longest first: the last part of a row went to what was then the emptiest, so at most the mean and that part."""
    module, group, length = np.array(parts, np.int64).reshape(-1, 3).T
    row, need = to_rows(module, length, group, np.array(rows))
    assert np.array_equal(row // np.array(rows, np.int32)[module], group)
    for k in range(3):
        loads = np.bincount(row[module == k], length[module == k], 1).astype(int)
        assert need[k] == loads.max()
        for g in set(group[module == k].tolist()):
            own = (module == k) & (group == g)
            assert (
                loads[g * rows[k] : (g + 1) * rows[k]].max()
                <= length[own].sum() / rows[k] + length[own].max()
            )
    again, needed = to_rows(module, length, group, np.array(rows))
    assert np.array_equal(row, again)
    assert np.array_equal(need, needed)


def test_nothing_to_place_needs_nothing():
    nothing = np.zeros(0, np.int64)
    row, need = to_rows(nothing.astype(np.int32), nothing, nothing, np.array([2, 1]))
    assert len(row) == 0
    assert need.tolist() == [0, 0]
    assert split(np.zeros((0, 2), np.int64), 3).tolist() == []
    assert split(np.zeros((4, 2), np.int64), 3).max() < 3
