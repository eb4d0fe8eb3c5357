import numpy as np
import pytest
from synthetic import parts_of

from mmjax.balance.parts import Parts

PARTS = parts_of([[(0, 5)], [(0, 9), (2, 3), (1, 4), (2, 6)], [(0, 2), (1, 8)]])


def test_totals_are_the_positions_of_each_sample_in_each_module():
    assert PARTS.totals(4).tolist() == [[5, 0, 0, 0], [9, 4, 9, 0], [2, 8, 0, 0]]


def test_largest_is_the_longest_part_and_zero_for_a_module_without_parts():
    assert PARTS.largest(4).tolist() == [9, 8, 6, 0]


def test_take_reorders_samples_and_keeps_their_parts():
    taken = PARTS.take(np.array([2, 1]))
    assert taken.sample_start.tolist() == [0, 2, 6]
    assert taken.module.tolist() == [0, 1, 0, 2, 1, 2]
    assert taken.length.tolist() == [2, 8, 9, 3, 4, 6]
    assert PARTS.of_samples(np.array([2, 1])).tolist() == [5, 6, 1, 2, 3, 4]
    assert len(PARTS.take(np.array([], np.int64))) == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[(0, 5)], [(1, 5), (0, 3)]], "sample 1: its first part"),
        ([[(0, 5), (0, 3)]], "sample 0: its first part"),
        ([[(0, 5)], [(0, 5), (1, 0)]], "sample 1 has a part of length 0"),
        ([[(0, 5)], []], "sample 1 has no LLM part"),
    ],
)
def test_samples_that_break_the_contract_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        parts_of(samples)


def test_arrays_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="number of parts"):
        Parts(np.array([0, 2]), np.array([0], np.int32), np.array([3]))
