"""For comparison only: what `token_blocks` is measured against, Cornstarch sections 4.3.2, 5.3 and 6.5, appendix A.

Plain LPT leaves unequal counts; zigzag, ring and random do not look at the work; the integer program is exact but takes
seconds for tens of blocks.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, kron

from mmjax.balance.token_blocks import check_ranks


def longest_first(work: np.ndarray, ranks: int) -> np.ndarray:
    """Give each block, heaviest first, to the rank with least work (LPT). int32 `[B]` from int `[B]`; counts differ.

    Cornstarch, algorithm 2, which as printed pushes the rank's number plus the workload where its load is meant.
    """
    check_ranks(ranks)
    work = np.ascontiguousarray(work, np.int64)
    return _longest_first(work, np.argsort(-work, kind="stable"), ranks)


def zigzag(blocks: int, ranks: int) -> np.ndarray:
    """Give rank r chunks r and 2 * ranks - 1 - r of 2 * ranks of the row: int32 `[B]`. Equal work if causal.

    Cornstarch, section 2 (figure 4a).
    """
    chunk = ring(blocks, 2 * ranks)
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def ring(blocks: int, ranks: int) -> np.ndarray:
    """Give each rank one contiguous chunk of the row: int32 `[B]`. Cornstarch, section 6.5, "naive ring"."""
    check_ranks(ranks)
    return (np.arange(blocks) * ranks // max(blocks, 1)).astype(np.int32)


def random(blocks: int, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Draw as many blocks for each rank, or one less, at random: int32 `[B]`. Cornstarch, section 5.3."""
    return rng.permutation(ring(blocks, ranks))


def integer_program(
    work: np.ndarray, ranks: int, seconds: float = 10.0, equal_counts: bool = False
) -> tuple[np.ndarray, bool]:
    """Find the ranks `[B]` (int32) whose largest work is least, and whether that is proven. work: int `[B]`.

    Cornstarch, equation 1; `equal_counts` adds that counts differ by one at most. Raises RuntimeError where `seconds`
    do not suffice to find any distribution.
    """
    check_ranks(ranks)
    work = np.asarray(work, np.float64)
    blocks = len(work)
    if blocks == 0 or not work.any():
        return ring(blocks, ranks), True
    share = csr_array(work[None] / work.sum())  # of order one, as the solver's tolerances are
    largest = csr_array(-np.ones((ranks, 1)))
    no_largest = [csr_array((blocks, 1)), csr_array((ranks, 1))]
    of_block = hstack([kron(eye_array(blocks), np.ones((1, ranks))), no_largest[0]])
    of_rank = hstack([kron(np.ones((1, blocks)), eye_array(ranks)), no_largest[1]])
    min_blocks, max_blocks = (blocks // ranks, -(-blocks // ranks)) if equal_counts else (0, blocks)
    constraints = [
        LinearConstraint(of_block, 1, 1),
        LinearConstraint(of_rank, min_blocks, max_blocks),
        LinearConstraint(hstack([kron(share, eye_array(ranks)), largest]), -np.inf, 0),
    ]
    chosen = np.r_[np.ones(blocks * ranks), 0]
    solution = milp(
        1 - chosen,
        integrality=chosen,
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 0},
    )
    if solution.x is None:
        raise RuntimeError(f"no distribution of {blocks} blocks found in {seconds} s: {solution.message}")
    return solution.x[:-1].reshape(blocks, ranks).argmax(1).astype(np.int32), solution.status == 0


@njit(cache=True)
def _longest_first(work, heaviest_first, ranks):
    """Return the rank of each block, int32 [B]; of equal loads the first rank's."""
    rank = np.empty(len(work), np.int32)
    loads = [(np.int64(0), g) for g in range(ranks)]
    for block in heaviest_first:
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + work[block], lightest))
        rank[block] = lightest
    return rank
