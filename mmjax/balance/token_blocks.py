"""Share the blocks of tokens of packed rows among context-parallel ranks.

`distribute` gives ranks equal counts and equal work. `distribute_samples` does so too and cuts few
samples: a rank needs the keys of a sample from other ranks only if it has some of its blocks, but
not all. Ranks are bisected recursively into halves that get as many blocks and as much work;
samples stay whole except one, which is cut so that both come out even. So a short sample ends on
one rank, and a long one on as many as it has work for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mmjax.balance.mask_work import Mask

# of the largest rank's work over the mean; beyond, samples are cut without regard
MAX_EXCESS = 1e-3
# excess that ends the exchange of blocks: far below what the time of a kernel varies
_EXCESS_OF_BLOCKS = 1e-5
_EXCESS_OF_SAMPLES = 9e-5
_EXCHANGES_OF_RANK = 8  # at most
# blocks a rank up to which pairs of blocks are exchanged too; with more, single ones suffice
_FEW_BLOCKS = 32
_EVEN = 2e-4  # part of a half's work that it may differ by
# samples that are tried as the one to cut; of many blocks fewer, so that it takes milliseconds
_CUTS = 6
_BLOCKS_TRIED = 20_000
_EXCHANGES = 8  # at most, to cut a sample evenly


def distribute(work: np.ndarray, ranks: int) -> np.ndarray:
    """Assign each block a rank, int32 `[B]`; counts differ by one at most. work: int `[B]`, as of `block_work`.

    Blocks are dealt in rounds of one a rank, heaviest first, the heaviest of a round to the rank
    with the least work: ranks then differ by no more than the blocks of one round do. After that
    the rank with the most work exchanges one block, or two, with the rank where that lowers the
    larger work of both most, until no exchange does. Raises ValueError for ranks below 1.
    Cornstarch, algorithm 2, with counts held equal.

    Blocks of 1 to 6 units of work are dealt to two ranks in three rounds:

        work       6    5    4    3    2    1
        rank       0    1    1    0    0    1     11 units and 10

    >>> distribute(np.array([1, 2, 3, 4, 5, 6]), 2).tolist()
    [1, 0, 0, 1, 1, 0]
    """
    check_ranks(ranks)
    work = np.ascontiguousarray(work, np.int64)
    rank = _deal(work, np.argsort(-work, kind="stable"), ranks)
    return _exchange_blocks(work, rank, ranks, _EXCESS_OF_BLOCKS)


def distribute_samples(work: np.ndarray, sample: np.ndarray, ranks: int) -> np.ndarray:
    """Assign each block a rank, int32 `[B]`, with few samples on several; counts differ by one at most.

    work: int `[B]`, as of `block_work`. sample: int `[B]`, of most of a block's tokens, -1 =
    padding; those of one are one after the other. The largest work of a rank is at most
    `MAX_EXCESS` above the mean, or that of `distribute`. Raises ValueError for ranks below 1.
    """
    check_ranks(ranks)
    work = np.ascontiguousarray(work, np.int64)
    rank = _bisect(work, np.ascontiguousarray(sample, np.int64), ranks)
    rank = _exchange_blocks(work, rank, ranks, _EXCESS_OF_SAMPLES)
    if excess(work, rank, ranks) <= MAX_EXCESS:
        return rank
    balanced = distribute(work, ranks)
    return min(rank, balanced, key=lambda ranked: excess(work, ranked, ranks))


def block_samples(mask: Mask, block: int) -> np.ndarray:
    """Return the sample of the token in the middle of each block, int32 `[ceil(T / block)]`."""
    begin = np.arange(0, len(mask.sample), block)
    return mask.sample[np.minimum(begin + block // 2, len(mask.sample) - 1)]


def excess(work: np.ndarray, rank: np.ndarray, ranks: int) -> float:
    """Divide the largest work of a rank by the mean, less 1; 0 without work. work: int `[B]`, rank: int `[B]`."""
    load = np.zeros(ranks, np.int64)
    np.add.at(load, rank, work)
    return float(load.max() / load.mean() - 1) if load.any() else 0.0


def token_order(rank: np.ndarray, tokens: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Order tokens so that each rank's are contiguous; return the order and its inverse, int32 `[T]` both.

    A rank's blocks stay in their order: `x[order]` is what ranks 0, 1, .. hold one after the other,
    and `x[order][inverse]` is `x`. rank: int `[ceil(T / block)]`. Cornstarch, section 4.3.2.
    """
    blocks = np.argsort(rank, kind="stable").astype(np.int32)
    # block = 4: block 2 becomes tokens 8 .. 11; tokens of a short last block that do not exist are
    # dropped.
    order = (blocks[:, None] * np.int32(block) + np.arange(block, dtype=np.int32)).ravel()
    order = order[order < tokens]
    inverse = np.empty_like(order)
    # If token t comes i-th, then i is where t is found.
    inverse[order] = np.arange(tokens, dtype=np.int32)
    return order, inverse


def check_ranks(ranks: int) -> None:
    """Raise ValueError for ranks below 1."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; needed is one or more")


def _exchange_blocks(work: np.ndarray, rank: np.ndarray, ranks: int, enough: float) -> np.ndarray:
    """Exchange blocks of the rank with most work until its excess is `enough`, or none helps: the rank of each."""
    count = np.bincount(rank, minlength=ranks)
    load = np.zeros(ranks, np.int64)
    np.add.at(load, rank, work)
    blocks = np.zeros((ranks, count.max(initial=0)), np.int64)
    # Those of a rank one after the other, heaviest first.
    blocks[np.arange(blocks.shape[1]) < count[:, None]] = np.lexsort((-work, rank))
    _exchange_while_better(work, blocks, count, load, work.sum() / ranks * (1 + enough))
    exchanged = np.empty(len(work), np.int32)
    filled = np.arange(blocks.shape[1]) < count[:, None]
    exchanged[blocks[filled]] = np.repeat(np.arange(ranks), count)
    return exchanged


@njit(cache=True)
def _deal(work, heaviest_first, ranks):
    """Deal blocks to ranks in rounds, heaviest first to the one with the least work: int32 [B]."""
    rank = np.empty(len(work), np.int32)
    load = np.zeros(ranks, np.int64)
    for begin in range(0, len(work), ranks):
        # Sorted once a round: each rank receives one block of it.
        least_first = np.argsort(load, kind="mergesort")
        for i in range(begin, min(begin + ranks, len(work))):
            block = heaviest_first[i]
            rank[block] = least_first[i - begin]
            load[rank[block]] += work[block]
    return rank


@njit(cache=True)
def _exchange_while_better(work, blocks, count, load, enough):
    """Exchange blocks of the rank with the most work while that gains and it has more than `enough`; writes all."""
    ranks, rounds = blocks.shape
    for _ in range(_EXCHANGES_OF_RANK * ranks):
        if load.max() <= enough:
            return
        if not _exchange(work, blocks, count, load, 1) and (
            # Pairs are n^2 of a rank's blocks; with many blocks single ones differ finely enough.
            rounds > _FEW_BLOCKS or not _exchange(work, blocks, count, load, 2)
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
        # Candidates come lightest first, so the mean of the two only grows from here on.
        if 2 * min_load <= load[heavy] + load[candidate]:
            break  # not even equal shares of these two would be better, nor of those to come
        light_sums, light_sets = _sums(work, blocks[candidate, : count[candidate]], size)
        k = 0
        for i in range(len(heavy_sums)):
            # Sums descend: the best is the first so small that it would do more than equal the two,
            # or the one before.
            while (
                k < len(light_sums)
                and 2 * (heavy_sums[i] - light_sums[k]) < load[heavy] - load[candidate]
            ):
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
        # Blocks of a rank stay heaviest first, which `_sums` relies on.
        row = blocks[rank, : count[rank]].copy()
        blocks[rank, : count[rank]] = row[np.argsort(-work[row], kind="mergesort")]
    return True


@njit(cache=True)
def _sums(work, blocks, size):
    """Sum the work of every set of one or two blocks, descending, int64 [m]; the sets' places in `blocks` [m, size]."""
    n = len(blocks)
    if size == 1:
        # Already descending, see `_exchange`.
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


@njit(cache=True)
def _bisect(work, sample, ranks):
    """Bisect ranks, and blocks with them, until each rank has its own: int32 [B]."""
    rank = np.zeros(len(work), np.int32)
    blocks = np.arange(len(work))
    # Slices of `blocks` to be shared, each with the first and the number of the ranks that share
    # it.
    pending = np.zeros((ranks, 4), np.int64)
    pending[0] = 0, len(work), 0, ranks
    slices = 1
    while slices > 0:
        slices -= 1
        begin, end, first, among = pending[slices]
        if among == 1:
            rank[blocks[begin:end]] = first
            continue
        half = among // 2
        count = (end - begin) * half // among
        members = blocks[begin:end].copy()
        chosen = _halve(work[members], sample[members], count, work[members].sum() * (half / among))
        blocks[begin : begin + count] = members[chosen]
        blocks[begin + count : end] = members[~chosen]
        pending[slices] = begin, begin + count, first, half
        pending[slices + 1] = begin + count, end, first + half, among - half
        slices += 2
    return rank


@njit(cache=True)
def _halve(work, sample, count, target):
    """Choose so many blocks with about this work, cutting few samples: bool [n]."""
    n = len(work)
    total = work.sum()
    start, sizes, works = _runs(work, sample)
    order = np.argsort(-works, kind="mergesort")  # heaviest first
    blocks_of = np.array([count, n - count])
    work_of = np.array([target, total - target])
    best = np.zeros(n, np.bool_)
    best[:count] = True
    lowest = np.inf
    tries = min(len(order), _CUTS, max(3, _BLOCKS_TRIED // n))
    for t in range(tries):
        # From the lightest sample to the heaviest: the lighter it is, the fewer keys travel.
        cut = order[(len(order) - 1) * (tries - 1 - t) // max(tries - 1, 1)]
        chosen = np.zeros(n, np.bool_)
        free_blocks = blocks_of.copy()
        free_work = work_of.copy()
        keys = 0
        # The sample to be cut comes last, when the blocks and the work that remain are its own.
        for i in range(len(order) + 1):
            run = cut if i == len(order) else order[i]
            if i < len(order) and run == cut:
                continue
            begin = start[run]
            end = begin + sizes[run]
            side = -1
            if i < len(order):
                side = _side(sizes[run], works[run], free_blocks, free_work, blocks_of, work_of)
            if side >= 0:
                if side == 0:
                    chosen[begin:end] = True
                free_blocks[side] -= sizes[run]
                free_work[side] -= works[run]
                continue
            part, part_work = _share(sizes[run], works[run], free_blocks, free_work)
            cut_in = _choose(work[begin:end], part, part_work)
            chosen[begin:end] = cut_in
            keys += _sent_keys(cut_in)
            chosen_work = work[begin:end][cut_in].sum()
            free_blocks[0] -= part
            free_blocks[1] -= sizes[run] - part
            free_work[0] -= chosen_work
            free_work[1] -= works[run] - chosen_work
        uneven = abs(free_work[0]) / max(min(target, total - target), 1.0)
        cost = keys if uneven <= _EVEN else n * (1 + 1e6 * uneven)
        if cost < lowest:
            lowest = cost
            best = chosen
        if cost <= sizes[cut]:
            break
    return best


@njit(cache=True)
def _runs(work, sample):
    """Find the first block, the number of blocks and the work of each sample, int64 [R]; padding is one each."""
    start = np.zeros(len(work), np.int64)
    sizes = np.zeros(len(work), np.int64)
    works = np.zeros(len(work), np.int64)
    runs = 0
    for i in range(len(work)):
        if i == 0 or sample[i] != sample[i - 1] or sample[i] < 0:
            start[runs] = i
            runs += 1
        sizes[runs - 1] += 1
        works[runs - 1] += work[i]
    return start[:runs], sizes[:runs], works[:runs]


@njit(cache=True)
def _side(size, work, free_blocks, free_work, blocks_of, work_of):
    """Choose the side with more room for a whole sample, by what it has more of; -1: it fits neither."""
    # Parts of all blocks and of all work that the sample has.
    blocks_part = size / (blocks_of[0] + blocks_of[1])
    work_part = work / max(work_of[0] + work_of[1], 1.0)
    best = -1
    highest = -np.inf
    for side in range(2):
        if size <= free_blocks[side] and work <= free_work[side] + _EVEN * work_of[side]:
            room = free_work[side] / max(work_of[side], 1.0) * work_part
            room += free_blocks[side] / max(blocks_of[side], 1) * blocks_part
            if room > highest:
                highest = room
                best = side
    return best


@njit(cache=True)
def _share(size, work, free_blocks, free_work):
    """Return how many blocks of a sample go to the first side, as it has room, and how much work."""
    part = round(size * free_blocks[0] / max(free_blocks.sum(), 1))
    part = max(size - free_blocks[1], min(part, free_blocks[0]))
    if size == free_blocks.sum():
        return part, free_work[0]
    return part, work * max(0.0, min(1.0, free_work[0] / max(free_work.sum(), 1.0)))


@njit(cache=True)
def _choose(work, count, target):
    """Choose so many blocks of a sample with the sum of work nearest to `target`, mostly one behind the other."""
    n = len(work)
    chosen = np.zeros(n, np.bool_)
    # By work, which is the order of the row under a causal mask: sums of a window of it only grow
    # along it.
    order = np.arange(n)
    for i in range(1, n):
        if work[i] < work[i - 1]:
            order = np.argsort(work, kind="mergesort")
            break
    total = work[order[:count]].sum()
    begin = 0
    missing = target - total
    for i in range(n - count):
        total += work[order[i + count]] - work[order[i]]
        if abs(target - total) < abs(missing):
            begin = i + 1
            missing = target - total
    chosen[order[begin : begin + count]] = True
    for _ in range(_EXCHANGES):
        if abs(missing) <= _EVEN / 10 * target:
            break
        give, take = _nearest_exchange(work, order, chosen, missing)
        if give < 0:
            break
        chosen[give] = False
        chosen[take] = True
        missing -= work[take] - work[give]
    return chosen


@njit(cache=True)
def _nearest_exchange(work, order, chosen, missing):
    """Find the exchange of a chosen block for another that brings the sum nearest to what is missing; -1: none does."""
    lowest = abs(missing)
    give = -1
    take = -1
    inside = order[chosen[order]]
    outside = order[~chosen[order]]
    k = 0
    for block in inside:
        # Both ascend, and so does what a block is best exchanged for.
        while k < len(outside) and work[outside[k]] < work[block] + missing:
            k += 1
        for j in range(max(k - 1, 0), min(k + 1, len(outside))):
            difference = abs(missing - (work[outside[j]] - work[block]))
            if difference < lowest:
                lowest = difference
                give = block
                take = outside[j]
    return give, take


@njit(cache=True)
def _sent_keys(chosen):
    """Count the blocks of a causal sample that each side needs of the other: those before its own last one."""
    last = np.zeros(2, np.int64)
    count = np.zeros(2, np.int64)
    for i in range(len(chosen)):
        side = 0 if chosen[i] else 1
        last[side] = i + 1
        count[side] += 1
    return last.sum() - count.sum()
