"""Admit samples to the queue of grouping `pack` so that none waits too long: next-fit lays the queue out in rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Load(NamedTuple):
    """Needs of a chunk's samples: the arrays of `Parts`, and their sums in each module."""

    start: np.ndarray  # [n + 1]
    module: np.ndarray  # [p]
    length: np.ndarray  # [p]
    total: np.ndarray  # [n, M] positions
    share: np.ndarray  # [n, M] of a microbatch's capacity


class Rows(NamedTuple):
    """Rows of a microbatch, numbered through all modules. A column has `per_column[k]` rows of module k."""

    start: np.ndarray  # [M + 1]
    per_column: np.ndarray  # [M]
    length: np.ndarray  # [M] positions


@njit(cache=True)
def admit(load, rows, columns, queue, waiting, following, max_waiting, current, latest, last, turn):
    """Let samples into the queue while all of it could be packed in time; return how many wait, and the head's length.

    Next-fit lays the queue out, in order: sample i would come in the v-th microbatch from now.
    Next-fit is monotone: whatever is taken out, nobody comes later. So nobody waits for longer than
    allowed as long as current + v is at most its `latest` [n] microbatch, and the microbatch at
    whose head somebody has no time to spare takes its head as laid out here. That head is returned;
    0 where everybody has time.

    last: the latest microbatch of those who enter now. max_waiting: samples that may wait. Writes
    queue, latest and, for the head, its rows to turn [p].
    """
    modules = len(rows.per_column)
    # The open row of every module in the current column, and what is free in it: next-fit never
    # looks back.
    row = np.zeros(modules, np.int64)
    free = rows.length.copy()
    # `turns` counts microbatches from the current one on; only the first one's rows are written to
    # `turn`.
    column = turns = np.int64(0)
    head = -1
    urgent = False
    i = 0
    empty = True  # the column
    n = len(latest)
    # i < waiting walks those already in the queue; after them each new sample joins if its turn
    # comes in time.
    while i < waiting or (following < n and waiting < max_waiting):
        s = queue[i] if i < waiting else following
        fits = _next_fit(s, load, rows, column, row, free, turn, turns == 0)
        if not fits:
            if not empty:
                column += 1
                # Behind the last column comes the first of the next microbatch; there the head, the
                # first microbatch's samples, ends.
                if column == columns:
                    column = 0
                    turns += 1
                    if head < 0:
                        head = i
                for k in range(modules):
                    row[k] = 0
                    free[k] = rows.length[k]
                fits = _next_fit(s, load, rows, column, row, free, turn, turns == 0)
            if not fits:  # alone in its column, in rows that `fit_alone` has found
                _alone(s, load, rows, column, turn, turns == 0)
                # Nothing else may join this column: every length exceeds -1, and no module has
                # another row.
                for k in range(modules):
                    free[k] = -1
                    row[k] = rows.per_column[k]
        empty = False
        if i >= waiting:
            # The newcomer would come after its own deadline, and so would whoever follows it, since
            # next-fit is monotone.
            if current + turns > last:
                break
            latest[s] = last
            queue[waiting] = s
            waiting += 1
            following += 1
        # Equality is enough: with one microbatch more in front of it, this sample would be late.
        urgent |= current + turns >= latest[s]
        i += 1
    if not urgent:
        head = 0
    # Everything in the queue fits the current microbatch, so all of it is the head.
    elif head < 0:
        head = waiting
    return waiting, following, min(head, waiting)


@njit(cache=True)
def _next_fit(s, load, rows, column, row, free, turn, write):
    """Put the parts of a sample behind those before it in the rows of a column; return whether they fit."""
    before_row = row.copy()
    before_free = free.copy()
    for j in range(load.start[s], load.start[s + 1]):
        k = load.module[j]
        length = load.length[j]
        if free[k] < length:
            # No row is left in this column, or none could ever hold the part: the sample leaves no
            # trace in row and free.
            if row[k] + 1 >= rows.per_column[k] or rows.length[k] < length:
                for m in range(len(row)):
                    row[m] = before_row[m]
                    free[m] = before_free[m]
                return False
            row[k] += 1
            free[k] = rows.length[k]
        free[k] -= length
        if write:
            # Rows lie module by module, inside it column by column: with 6 rows a module and 3
            # columns, row 1 of column 2 of module 1 is 6 + 2 * 2 + 1 = 11.
            turn[j] = rows.start[k] + column * rows.per_column[k] + row[k]
    return True


@njit(cache=True)
def _alone(s, load, rows, column, turn, write):
    """Put the parts of a sample in an empty column, longest first, each in the fullest row that holds it: bool."""
    begin = load.start[s]
    end = load.start[s + 1]
    # Sorted by insertion, so that equal lengths keep the sample's order: a sample has few parts.
    order = np.empty(end - begin, np.int64)
    for j in range(begin, end):
        place = j - begin
        while place > 0 and load.length[order[place - 1]] < load.length[j]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = j
    # The rows of column 0 stand for those of any.
    free = np.empty(rows.start[len(rows.per_column)], np.int64)
    for k in range(len(rows.per_column)):
        for r in range(rows.start[k], rows.start[k] + rows.per_column[k]):
            free[r] = rows.length[k]
    for j in order:
        k = load.module[j]
        best = -1
        for r in range(rows.start[k], rows.start[k] + rows.per_column[k]):
            if free[r] >= load.length[j] and (best < 0 or free[r] < free[best]):
                best = r
        if best < 0:
            return False
        free[best] -= load.length[j]
        if write:
            turn[j] = column * rows.per_column[k] + best
    return True


@njit(cache=True)
def fit_alone(load, rows):
    """Check each sample against an empty column: bool [n], True where it fits."""
    n = len(load.total)
    fits = np.empty(n, np.bool_)
    nowhere = np.empty(0, np.int64)
    for s in range(n):
        # A sample whose total fits one row of every module needs no search: all its parts go into
        # the first rows.
        fits[s] = True
        for k in range(len(rows.length)):
            fits[s] &= load.total[s, k] <= rows.length[k]
        fits[s] = fits[s] or _alone(s, load, rows, np.int64(0), nowhere, np.bool_(False))
    return fits
