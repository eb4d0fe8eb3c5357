import numpy as np
import pytest

from mmjax.balance.permutation import Shuffler


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000, 100_000])
def test_a_permutation_holds_every_number_once(n):
    assert np.array_equal(np.sort(Shuffler(3, n).permutation(n)), np.arange(n))


def test_permutations_stay_the_same_with_every_version_of_numpy():
    """Written down once; steps of runs depend on it."""
    shuffler = Shuffler(1, 2, 3)
    assert shuffler.permutation(8).tolist() == [7, 2, 3, 6, 5, 0, 4, 1]
    assert shuffler.permutation(8).tolist() == [7, 5, 4, 0, 3, 1, 6, 2]
    assert shuffler.bytes(5).hex() == "f572a075cb"


def test_keys_and_calls_differ():
    shuffler = Shuffler(0)
    drawn = [
        shuffler.permutation(50),
        shuffler.permutation(50),
        Shuffler(1).permutation(50),
        Shuffler(0, 1).permutation(50),
    ]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert np.count_nonzero(one == other) < 10


def test_every_place_is_as_likely_for_every_number():
    """4,000 permutations of 8: each count of 64 is 500 on average, with a deviation of 21."""
    shuffler, count = Shuffler(5), np.zeros((8, 8), np.int64)
    for _ in range(4000):
        count[np.arange(8), shuffler.permutation(8)] += 1
    assert count.min() > 400
    assert count.max() < 600


def test_bytes_are_evenly_spread():
    drawn = np.frombuffer(Shuffler(9).bytes(100_001), np.uint8)
    assert len(drawn) == 100_001
    count = np.bincount(drawn, minlength=256)
    assert count.min() > 300
    assert count.max() < 490
