"""Blocks of a row are shared by ranks as evenly as without regard to samples, and far fewer keys travel."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from test_mask_work import any_mask, dense

from mmjax.balance.mask_work import Mask, block_work
from mmjax.balance.token_blocks import (
    MAX_EXCESS,
    block_samples,
    distribute,
    distribute_samples,
    excess,
)
from mmjax.benchmarks.baselines.token_blocks import KINDS, visible_keys


def packed(lengths: list[int], tokens: int = 0) -> Mask:
    """Causal samples one after the other, and padding."""
    sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    sample = np.pad(sample, (0, max(0, tokens - len(sample))), constant_values=-1)
    one = np.ones(len(sample), np.int32)
    return Mask(sample, np.arange(len(sample), dtype=np.int32), 0 * one, one, one)


def drawn(seed: int, tokens: int, mean: int, long: int = 0) -> list[int]:
    """Lengths of samples that fill a row: one that is long, and others."""
    rng = np.random.default_rng(seed)
    lengths = [long] if long else []
    while sum(lengths) < tokens:
        lengths.append(
            min(max(1, int(rng.lognormal(np.log(mean) - 0.3, 0.8))), tokens - sum(lengths))
        )
    return lengths


def shared(mask: Mask, ranks: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    work = block_work(mask, block)
    return distribute_samples(work, block_samples(mask, block), ranks), work


def travelling(mask: Mask, rank: np.ndarray, ranks: int, block: int) -> int:
    """Keys that are attended by a rank that does not have them."""
    owner = np.repeat(rank, block)
    return int((visible_keys(mask, owner, ranks) & (owner != np.arange(ranks)[:, None])).sum())


@pytest.mark.parametrize("ranks", [3, 8, 64])
@pytest.mark.parametrize("kind", [*KINDS, "short"])
def test_ranks_get_as_many_blocks_and_nearly_as_much_work(kind, ranks):
    tokens = 1 << 15 if ranks == 8 else ranks << 12
    short = kind == "short"
    mask = (
        packed(drawn(ranks, tokens, 1000))
        if short
        else KINDS[kind](tokens, np.random.default_rng(ranks))
    )
    rank, work = shared(mask, ranks, 128)
    assert set(np.bincount(rank, minlength=ranks)) == {len(work) // ranks}
    assert excess(work, rank, ranks) <= MAX_EXCESS


def test_samples_that_fill_ranks_stay_whole():
    rank, _ = shared(packed([1024] * 8), 8, 128)
    assert all(len(set(of_sample)) == 1 for of_sample in rank.reshape(8, 8))


def test_only_the_long_sample_of_a_row_is_spread():
    tokens, ranks, long = 1 << 18, 8, 1 << 17
    mask = packed(drawn(0, tokens, 1000, long))
    rank, _ = shared(mask, ranks, 128)
    assert set(rank[: long // 128]) == set(range(ranks))
    others = packed([long]), rank[: long // 128]
    # Beside the long sample's keys hardly any travel.
    assert (
        travelling(mask, rank, ranks, 128)
        <= travelling(*others, ranks, 128) + 0.04 * ranks * tokens
    )


@pytest.mark.parametrize(("kind", "part"), [("MP", 0.4), ("short", 0.3), ("mixed", 0.65)])
def test_far_fewer_keys_travel_than_without_regard_to_samples(kind, part):
    tokens, ranks = 1 << 17, 8
    short = kind == "short"
    mask = (
        packed(drawn(1, tokens, 1000)) if short else KINDS[kind](tokens, np.random.default_rng(1))
    )
    rank, work = shared(mask, ranks, 128)
    assert travelling(mask, rank, ranks, 128) <= part * travelling(
        mask, distribute(work, ranks), ranks, 128
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_distribution_over_two_ranks_that_is_as_even_sends_much_less(seed):
    block, blocks = 4, 12
    mask = packed(drawn(seed, block * blocks, 12))
    rank, work = shared(mask, 2, block)
    even = excess(work, rank, 2)
    least = block * blocks
    for first in combinations(range(blocks), blocks // 2):
        other = np.ones(blocks, np.int32)
        other[list(first)] = 0
        if excess(work, other, 2) <= even:
            least = min(least, travelling(mask, other, 2, block))
    assert travelling(mask, rank, 2, block) <= 2 * least + 2 * block


@pytest.mark.parametrize("seed", range(8))
def test_visible_keys_are_those_of_the_mask(seed):
    rng = np.random.default_rng(seed)
    mask, rank = any_mask(rng, 50), rng.integers(0, 3, 50)
    allowed = dense(mask)
    assert np.array_equal(
        visible_keys(mask, rank, 3), [allowed[rank == r].any(0) for r in range(3)]
    )


def test_a_row_of_padding_is_dealt_out_too():
    rank, _ = shared(packed([], 512), 4, 32)
    assert set(np.bincount(rank)) == {4}
