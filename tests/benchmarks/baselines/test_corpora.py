import numpy as np
import pytest

from mmjax.balance.pack import choose_row_maximum, pack_rows
from mmjax.benchmarks.baselines.grouping import group_corpora, steps_of_corpora


@pytest.mark.exhaustive
def test_corpora_are_grouped_apart_with_their_own_budgets_and_steps():
    rng = np.random.default_rng(0)
    corpus = rng.choice([3, 7], 2000, p=[0.8, 0.2])
    lengths = np.where((corpus == 7)[:, None], rng.integers(300, 500, (2000, 2)), rng.integers(10, 30, (2000, 2)))
    maximum = {one: choose_row_maximum(lengths[corpus == one], (4, 5)) for one in (3, 7)}

    def group(one: int, samples: np.ndarray) -> np.ndarray:
        return pack_rows(lengths[samples], maximum[one], np.arange(len(samples)), pool_rows=20)

    row, corpus_of_row = group_corpora(corpus, group)
    assert np.all(row >= 0)
    assert np.array_equal(corpus_of_row[row], corpus)
    assert np.array_equal(np.unique(row), np.arange(len(corpus_of_row)))
    for one in (3, 7):
        of = corpus == one
        assert np.all(np.bincount(row[of], lengths[of, 0]) <= maximum[one][0])

    steps = steps_of_corpora(corpus_of_row, 8, np.random.default_rng(1))
    assert np.array_equal(np.sort(steps[steps >= 0]), np.arange(len(corpus_of_row)))
    assert all(len(np.unique(corpus_of_row[step[step >= 0]])) == 1 for step in steps)
    assert np.sum(np.any(steps < 0, axis=1)) <= 2
    assert np.array_equal(steps, steps_of_corpora(corpus_of_row, 8, np.random.default_rng(1)))


def test_samples_above_a_budget_are_returned_and_no_samples_make_no_rows():
    row, corpus_of_row = group_corpora(np.array([1, 1, 0]), lambda one, samples: np.arange(len(samples)) - one)
    assert row.tolist() == [-1, 1, 0]
    assert corpus_of_row.tolist() == [0, 1]
    row, corpus_of_row = group_corpora(np.zeros(0, int), lambda one, samples: samples)
    assert len(row) == len(corpus_of_row) == len(steps_of_corpora(corpus_of_row, 4, np.random.default_rng(0))) == 0
