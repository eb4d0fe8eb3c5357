"""For comparison only: the groupings that OmniBal's table 5 sets beside ISF. `isf` and `pack` are better.

Each takes a fixed number of samples per row, which pads rows to their longest sample. The result is
the row of each sample, int32 `[n]`, in the order of the epoch: a step is the next `ranks` rows.
"""

from __future__ import annotations

import numpy as np

# what length groups are sorted within; sorting the whole epoch would leave no padding and no chance
_WINDOW_STEPS = 4


def random_groups(samples: int, per_row: int, rng: np.random.Generator) -> np.ndarray:
    """Form each row of the next samples of a shuffle: the baseline of OmniBal section 5.3."""
    return _cut_rows(rng.permutation(samples), per_row)


def length_groups(
    lengths: np.ndarray, per_row: int, ranks: int, rng: np.random.Generator
) -> np.ndarray:
    """Group samples of similar size, so that there is less padding: Length-Group of OmniBal section 5.3.

    Within windows of a few steps, samples are sorted by their size, the rows are cut from that and
    shuffled.
    lengths: int `[n, D]`; the size of a sample is the sum over dimensions of its length / the
    total.
    """
    order = _sort_windows(
        _relative_size(lengths), rng.permutation(len(lengths)), _WINDOW_STEPS * per_row * ranks
    )
    row = _cut_rows(order, per_row)
    shuffled = np.arange(row.max(initial=-1) + 1, dtype=np.int32)
    for begin in range(0, len(shuffled), _WINDOW_STEPS * ranks):
        rng.shuffle(shuffled[begin : begin + _WINDOW_STEPS * ranks])
    return shuffled[row]


def device_groups(
    lengths: np.ndarray, per_row: int, ranks: int, rng: np.random.Generator
) -> np.ndarray:
    """Give one step's rows similar sizes, so that no rank waits: Device-Group of OmniBal section 5.3.

    The samples of a step are sorted by size and dealt to its rows, there and back. lengths: int
    `[n, D]`.
    """
    step = per_row * ranks
    order = _sort_windows(_relative_size(lengths), rng.permutation(len(lengths)), step)
    row = np.empty(len(order), np.int32)
    place = np.arange(len(order))
    turn = place % step // ranks
    rank = place % ranks
    # With 4 ranks the places 0 .. 7 of a step go to its rows 0 1 2 3 3 2 1 0.
    row[order] = place // step * ranks + np.where(turn % 2, ranks - 1 - rank, rank)
    return row


def _relative_size(lengths: np.ndarray) -> np.ndarray:
    return (lengths / np.maximum(lengths.sum(0), 1)).sum(1)


def _sort_windows(size: np.ndarray, order: np.ndarray, window: int) -> np.ndarray:
    """Sort each window of `order` by size, largest first."""
    return order[np.lexsort((-size[order], np.arange(len(order)) // window))]


def _cut_rows(order: np.ndarray, per_row: int) -> np.ndarray:
    row = np.empty(len(order), np.int32)
    row[order] = np.arange(len(order)) // per_row
    return row
