"""Levelling exchanges samples so that no column has much more attention than the mean, within every row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mmjax.balance.level import level
from mmjax.balance.lpt import to_rows
from mmjax.balance.pack_columns import sort_columns
from mmjax.balance.parts import Parts
from mmjax.balance.waits import Prices, least_fullest, wait_share

PRICES = Prices(np.array([4.2, 0.4, 0.2]) / 0.65, np.array([2.4, 1.2, 0.7]) / 1e4 / 0.40)


def made(
    kind: str, columns: int, rows: int, seed: int
) -> tuple[Parts, np.ndarray, np.ndarray, np.ndarray]:
    """Samples with one item or none of two encoders, dealt to columns: parts, columns, rows, lengths."""
    rng = np.random.default_rng(seed)
    n = columns * 20
    text = np.clip(rng.lognormal(6.0, 0.8, n), 20, 3000).astype(np.int64)
    image = np.where(rng.random(n) < 0.6, rng.integers(64, 1500, n), 0)
    audio = np.where(rng.random(n) < 0.3, rng.integers(20, 800, n), 0)
    match kind:
        case "halves":  # just above and below half of what is usual
            text = rng.choice([1499, 1501, 3000], n)
        case "giant":
            text[0] = 20_000
        case "equal":
            text[:], image[:], audio[:] = 500, 256, 64
        case "no audio":
            audio[:] = 0
    lengths = np.stack([text, image, audio], axis=1)
    sample, module = np.nonzero(lengths)
    start = np.concatenate([[0], np.cumsum(np.bincount(sample))])
    parts = Parts(
        start, module.astype(np.int32), lengths[sample, module], lengths[sample, module] ** 2
    )
    order = np.argsort(-lengths[:, 0], kind="stable")
    column = np.empty(n, np.int64)
    column[order] = np.concatenate([rng.permutation(columns) for _ in range(20)])
    of_part = column[sample]
    per_column = np.full(3, rows)
    _, fullest = to_rows(module, parts.length, of_part, per_column)
    return parts, of_part, per_column, np.maximum(fullest, 1) + 8


def seconds(parts: Parts, column: np.ndarray, columns: int) -> np.ndarray:
    load = np.zeros((3, columns))
    np.add.at(load, (parts.module, column), parts.pairs * PRICES.pair[parts.module])
    return load


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [2, 8, 64])
@pytest.mark.parametrize("kind", ["mixed", "halves", "giant", "equal", "no audio"])
def test_rows_stay_within_their_length_samples_together_and_the_fullest_column_gets_less(
    kind, columns, rows
):
    for seed in range(3):
        parts, column, per_column, length = made(kind, columns, rows, seed)
        levelled = level(parts, column, columns, per_column, length, PRICES)
        sample = np.repeat(np.arange(len(parts.sample_start) - 1), np.diff(parts.sample_start))
        # all parts in one column
        np.testing.assert_array_equal(levelled, levelled[parts.sample_start[:-1]][sample])
        assert np.all((levelled >= 0) & (levelled < columns))
        _, fullest = to_rows(parts.module, parts.length, levelled, per_column)
        assert np.all(fullest <= length)
        before, after = (seconds(parts, c, columns).max(1).sum() for c in (column, levelled))
        assert after < before or levelled is column
        np.testing.assert_array_equal(
            levelled, level(parts, column.copy(), columns, per_column, length, PRICES)
        )
        if kind == "mixed" and columns == 64:
            mean = seconds(parts, column, columns).mean(1).sum()
            assert after - mean < 0.65 * (before - mean)


def test_a_sample_with_an_item_elsewhere_stays_and_counts():
    parts, column, rows, length = made("mixed", 8, 1, 0)
    item = np.flatnonzero(parts.module > 0)[:6]
    owner = np.searchsorted(parts.sample_start, item, side="right") - 1
    column = column.copy()
    column[item] = (column[item] + 1) % 8
    length = np.maximum(length, to_rows(parts.module, parts.length, column, rows)[1] + 8)
    levelled = level(parts, column, 8, rows, length, PRICES)
    assert levelled is not column
    for sample in owner:
        own = slice(*parts.sample_start[sample : sample + 2])
        np.testing.assert_array_equal(levelled[own], column[own])
    assert np.all(to_rows(parts.module, parts.length, levelled, rows)[1] <= length)


def test_where_attention_costs_nothing_or_there_is_one_column_nothing_is_exchanged():
    parts, column, rows, length = made("mixed", 8, 1, 0)
    dense = Prices(PRICES.position, np.zeros(3))
    assert level(parts, column, 8, rows, length, dense) is column
    alone = np.zeros_like(column)
    assert level(parts, alone, 1, rows, length, PRICES) is alone


@pytest.mark.parametrize(("microbatches", "columns"), [(2, 1), (4, 8), (3, 5), (8, 64)])
def test_heavy_columns_run_together_and_ranks_get_as_much_over_all_microbatches(
    microbatches, columns
):
    rng = np.random.default_rng(columns)
    load = rng.pareto(1.5, (microbatches, columns, 2)) + 1
    place = sort_columns(load)
    assert sorted(place.tolist()) == list(range(microbatches * columns))
    flat = load.reshape(-1, 2)
    dealt = np.empty_like(flat)
    dealt[place] = flat
    dealt = dealt.reshape(load.shape)
    assert dealt.max(1).sum() <= load.max(1).sum()
    if columns > 1:
        assert dealt.max(1).sum() < load.max(1).sum()
        lightest = dealt.sum(-1).min(1)
        # each microbatch above the next one
        assert np.all(lightest[:-1] >= dealt.sum(-1).max(1)[1:])
    # they are sorted already
    np.testing.assert_array_equal(sort_columns(dealt), np.arange(microbatches * columns))


def test_no_assignment_gets_below_the_bound_and_often_one_reaches_it():
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(60):
        ranks, n = int(rng.integers(1, 4)), int(rng.integers(1, 8))
        values = rng.integers(1, 40, (n, 1)).astype(float)
        best = min(
            np.bincount(assignment, values[:, 0], ranks).max()
            for assignment in itertools.product(range(ranks), repeat=n)
        )
        bound = least_fullest(values, ranks)[0]
        assert bound <= best + 1e-9
        reached += bound >= 0.95 * best
    assert reached > 30


def test_the_share_of_waiting_is_that_of_the_mean_rank_in_the_time_of_the_fullest():
    assert wait_share(np.array([[[1.0, 3.0]], [[2.0, 2.0]]])) == pytest.approx(1 - 4 / 5)
