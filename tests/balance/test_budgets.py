import numpy as np
import pytest
from synthetic import corpus, parts_of

from mmjax.balance.budgets import fit_budgets
from mmjax.balance.pack import oversize


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("samples", "rows", "microbatches"), [(24, (8, 2, 3), 1), (48, (4, 2, 3), 4)]
)
def test_modules_fill_up_together_near_the_samples_asked_for(samples, rows, microbatches, wide):
    parts = corpus(3000, 0, wide)
    budgets = fit_budgets(parts, samples, rows, microbatches, alignment=8)
    lasts = budgets.rows * budgets.length * microbatches / (1.02 * parts.totals(3).mean(0))
    assert lasts.min() / lasts.max() > 0.95  # independent rounding of each length costs up to 12%
    assert budgets.samples_per_step == pytest.approx(lasts.min())
    assert samples * 0.93 < budgets.samples_per_step < samples * 1.07
    assert np.all(budgets.length % 8 == 0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_rows_hold_the_largest_item_and_sample(microbatches):
    parts = corpus(3000, 1, wide=True)
    budgets = fit_budgets(parts, 24, (8, 2, 3), microbatches)
    assert np.all(budgets.length >= parts.largest(3))
    assert np.all(budgets.rows * budgets.length >= parts.totals(3).max(0))
    assert oversize(parts, budgets).mean() < 0.001


def test_a_long_item_means_fewer_rows_of_the_same_positions():
    parts = parts_of([[(0, 100), (1, 10)]] * 99 + [[(0, 100), (1, 70)]])
    budgets = fit_budgets(parts, 24, (6, 8), names=("llm", "vision"))
    assert budgets.length[1] == 96  # 88 hold the same eight items of 10 as 80
    assert budgets.rows.tolist() == [6, 3]  # 24 x 10.6 x 1.02 positions in three rows of 88
    assert budgets.notes == ("vision: 3 rows instead of 8, since a row must hold 70",)


def test_an_item_beyond_the_whole_budget_raises_the_samples_per_step():
    parts = parts_of([[(0, 100), (1, 10)]] * 99 + [[(0, 100), (1, 700)]])
    budgets = fit_budgets(parts, 24, (8, 2), names=("llm", "vision"))
    assert budgets.rows[1] == 1
    assert budgets.length[1] >= 700
    # 700 / (16.9 x 1.02), less what is no whole text of 100
    assert 39 < budgets.samples_per_step < 43
    assert "one sample takes up to 700 positions of vision" in budgets.notes[-1]
    lasts = (budgets.rows * budgets.length) / parts.totals(2).mean(0)
    assert lasts.min() / lasts.max() > 0.95


def test_a_module_without_parts_keeps_its_rows_at_one_alignment_unit():
    budgets = fit_budgets(parts_of([[(0, 30)], [(0, 50)]]), 16, (4, 3), alignment=16)
    assert budgets.rows.tolist() == [4, 3]
    assert budgets.length[1] == 16
    assert budgets.notes == ()


@pytest.mark.parametrize(("samples", "rows"), [(0, (4,)), (8, (0,))])
def test_numbers_below_one_are_refused(samples, rows):
    with pytest.raises(ValueError, match="at least 1"):
        fit_budgets(parts_of([[(0, 30)]]), samples, rows)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        fit_budgets(parts_of([]), 8, (4,))
