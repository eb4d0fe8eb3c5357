"""Blocks of tokens for the ranks of context parallelism: the same attention and as many blocks for each.

Cornstarch, section 4.3.2 and appendix A. Its LPT leaves ranks with unequal counts, which static shapes would pad; here
counts are equal, and exchanges of blocks take the balance further than LPT's.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_ENOUGH = 1e-5  # excess that ends the search: far below what the time of a kernel varies
_EXCHANGES = 8  # at most, for each rank
_FEW = 32  # blocks a rank up to which pairs of blocks are exchanged too; with more, single ones suffice


def distribute(work: np.ndarray, ranks: int) -> np.ndarray:
    """Assign each block a rank, int32 `[B]`; counts differ by one at most. work: int `[B]`, as of `block_work`.

    Blocks are dealt in rounds of one a rank, heaviest first, the heaviest of a round to the rank with the least work:
    ranks then differ by no more than the blocks of one round do. After that the rank with the most work exchanges one
    block, or two, with the rank where that lowers the larger work of both most, until no exchange does. Raises
    ValueError for ranks below 1. Cornstarch, algorithm 2, with counts held equal.
    """
    check_ranks(ranks)
    work = np.ascontiguousarray(work, np.int64)
    blocks, count, load = _deal(work, np.argsort(-work, kind="stable"), ranks)
    _exchange_while_better(work, blocks, count, load, work.sum() / ranks * (1 + _ENOUGH))
    rank = np.empty(len(work), np.int32)
    filled = np.arange(blocks.shape[1]) < count[:, None]
    rank[blocks[filled]] = np.repeat(np.arange(ranks), count)
    return rank


def excess(work: np.ndarray, rank: np.ndarray, ranks: int) -> float:
    """Divide the largest work of a rank by the mean, less 1; 0 without work. work: int `[B]`, rank: int `[B]`."""
    load = np.zeros(ranks, np.int64)
    np.add.at(load, rank, work)
    return float(load.max() / load.mean() - 1) if load.any() else 0.0


def token_order(rank: np.ndarray, tokens: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Order tokens so that each rank's are contiguous; return the order and its inverse, int32 `[T]` both.

    A rank's blocks stay in their order: `x[order]` is what ranks 0, 1, .. hold one after the other, and
    `x[order][inverse]` is `x`. rank: int `[ceil(T / block)]`. Cornstarch, section 4.3.2.
    """
    blocks = np.argsort(rank, kind="stable").astype(np.int32)
    # block = 4: block 2 becomes tokens 8 .. 11; tokens of a short last block that do not exist are dropped.
    order = (blocks[:, None] * np.int32(block) + np.arange(block, dtype=np.int32)).ravel()
    order = order[order < tokens]
    inverse = np.empty_like(order)
    inverse[order] = np.arange(tokens, dtype=np.int32)
    return order, inverse


def check_ranks(ranks: int) -> None:
    """Raise ValueError for ranks below 1."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; needed is one or more")


@njit(cache=True)
def _deal(work, heaviest_first, ranks):
    """Deal blocks to ranks, heaviest first, int64 [ranks, rounds]; return also their counts and work, int64 [ranks]."""
    rounds = -(-len(work) // ranks)
    blocks = np.empty((ranks, rounds), np.int64)
    count = np.zeros(ranks, np.int64)
    load = np.zeros(ranks, np.int64)
    for begin in range(0, len(work), ranks):
        # Sorted once a round: each rank receives one block of it.
        least_first = np.argsort(load, kind="mergesort")
        for i in range(begin, min(begin + ranks, len(work))):
            block = heaviest_first[i]
            rank = least_first[i - begin]
            blocks[rank, count[rank]] = block
            count[rank] += 1
            load[rank] += work[block]
    return blocks, count, load


@njit(cache=True)
def _exchange_while_better(work, blocks, count, load, enough):
    """Exchange blocks of the rank with the most work while that gains and it has more than `enough`; writes all."""
    ranks, rounds = blocks.shape
    for _ in range(_EXCHANGES * ranks):
        if load.max() <= enough:
            return
        if not _exchange(work, blocks, count, load, 1) and (
            rounds > _FEW or not _exchange(work, blocks, count, load, 2)
        ):
            return


@njit(cache=True)
def _exchange(work, blocks, count, load, size):
    """Do the best exchange of `size` blocks of the heaviest rank for as many of another; whether there was one."""
    heavy = np.argmax(load)
    heavy_sums, heavy_sets = _sums(work, blocks[heavy, : count[heavy]], size)
    min_load = load[heavy]
    light = -1
    give = np.empty(0, np.int64)
    take = np.empty(0, np.int64)
    for candidate in np.argsort(load, kind="mergesort"):
        if 2 * min_load <= load[heavy] + load[candidate]:
            break  # not even equal shares of these two would be better, nor of those to come
        light_sums, light_sets = _sums(work, blocks[candidate, : count[candidate]], size)
        k = 0
        for i in range(len(heavy_sums)):
            # Sums descend: the best is the first so small that it would do more than equal the two, or the one before.
            while k < len(light_sums) and 2 * (heavy_sums[i] - light_sums[k]) < load[heavy] - load[candidate]:
                k += 1
            for j in range(max(k - 1, 0), min(k + 1, len(light_sums))):
                moved = heavy_sums[i] - light_sums[j]
                larger = max(load[heavy] - moved, load[candidate] + moved)
                if larger < min_load:
                    min_load = larger
                    light = candidate
                    give = heavy_sets[i]
                    take = light_sets[j]
    if light < 0:
        return False
    for side in range(size):
        mine = blocks[heavy, give[side]]
        theirs = blocks[light, take[side]]
        blocks[heavy, give[side]], blocks[light, take[side]] = theirs, mine
        load[heavy] += work[theirs] - work[mine]
        load[light] += work[mine] - work[theirs]
    for rank in (heavy, light):
        row = blocks[rank, : count[rank]].copy()
        blocks[rank, : count[rank]] = row[np.argsort(-work[row], kind="mergesort")]
    return True


@njit(cache=True)
def _sums(work, blocks, size):
    """Sum the work of every set of one or two blocks, descending, int64 [m]; the sets' places in `blocks` [m, size]."""
    n = len(blocks)
    if size == 1:
        return work[blocks], np.arange(n).reshape(n, 1)
    sums = np.empty(n * (n - 1) // 2, np.int64)
    sets = np.empty((n * (n - 1) // 2, 2), np.int64)
    m = 0
    for i in range(n):
        for j in range(i + 1, n):
            sums[m] = work[blocks[i]] + work[blocks[j]]
            sets[m, 0] = i
            sets[m, 1] = j
            m += 1
    order = np.argsort(-sums, kind="mergesort")
    return sums[order], sets[order]
