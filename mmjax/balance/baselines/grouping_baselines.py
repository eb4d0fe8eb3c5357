"""For comparison only: the groupings that OmniBal's table 5 sets beside ISF. `isf` and `pack` are better.

Each takes a fixed number of samples per row, which pads rows to their longest sample. The result is the row of each
sample, int32 `[n]`, in the order of the epoch: a step is the next `ranks` rows.
"""

from __future__ import annotations

import numpy as np

_WINDOW_STEPS = 4  # what length groups are sorted within; sorting the whole epoch would leave no padding and no chance


def random_groups(samples: int, per_row: int, rng: np.random.Generator) -> np.ndarray:
    """Baseline of OmniBal section 5.3: the next samples of a shuffle form a row."""
    return _rows_of(rng.permutation(samples), per_row)


def length_groups(lengths: np.ndarray, per_row: int, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Length-Group of OmniBal section 5.3: samples of similar size share a row, so that there is less padding.

    Within windows of a few steps, samples are sorted by their size, the rows are cut from that and shuffled.
    lengths: int `[n, D]`; the size of a sample is the sum over dimensions of its length / the total.
    """
    order = _sort_windows(_size(lengths), rng.permutation(len(lengths)), _WINDOW_STEPS * per_row * ranks)
    row = _rows_of(order, per_row)
    shuffled = np.arange(row.max(initial=-1) + 1, dtype=np.int32)
    for begin in range(0, len(shuffled), _WINDOW_STEPS * ranks):
        rng.shuffle(shuffled[begin : begin + _WINDOW_STEPS * ranks])
    return shuffled[row]


def device_groups(lengths: np.ndarray, per_row: int, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Device-Group of OmniBal section 5.3: rows of one step are of similar size, so that no rank waits for another.

    The samples of a step are sorted by size and dealt to its rows, there and back. lengths: int `[n, D]`.
    """
    step = per_row * ranks
    order = _sort_windows(_size(lengths), rng.permutation(len(lengths)), step)
    row = np.empty(len(order), np.int32)
    place = np.arange(len(order))
    turn, rank = place % step // ranks, place % ranks
    row[order] = place // step * ranks + np.where(turn % 2, ranks - 1 - rank, rank)
    return row


def _size(lengths: np.ndarray) -> np.ndarray:
    return (lengths / np.maximum(lengths.sum(0), 1)).sum(1)


def _sort_windows(size: np.ndarray, order: np.ndarray, window: int) -> np.ndarray:
    """`order` with each window of it sorted by size, largest first."""
    return order[np.lexsort((-size[order], np.arange(len(order)) // window))]


def _rows_of(order: np.ndarray, per_row: int) -> np.ndarray:
    row = np.empty(len(order), np.int32)
    row[order] = np.arange(len(order)) // per_row
    return row
