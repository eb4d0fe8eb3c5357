"""Place the passes of encoders' copies into the idle time of a pipeline: list scheduling in whole numbers.

As in BigMac, the order of the LLM's passes stays that of its own schedule. Where a worker would
wait, it runs its copy of the encoders, which has every P-th microbatch. Settings of the list
scheduler are tried in turn and the fastest is taken, so the result is a pure function of whole
numbers: every process comes to the same one.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

NEVER = 2**62
# a worker's sequences: the host's passes, encoders' forward and their backward passes
HOST, ENCODE, BACK = 0, 1, 2


class NestedPasses(NamedTuple):
    """The passes of all workers by number, as arrays; each worker has three sequences that keep their order."""

    queue: np.ndarray  # int64 [passes]: numbers of passes, sequence after sequence
    bounds: np.ndarray  # int64 [workers, 3, 2]: where each sequence begins and ends in the queue
    length: np.ndarray  # int64 [passes]: times in whole numbers
    # int64 [passes + 1]; pass a waits for needs[need_start[a]:need_start[a + 1]]
    need_start: np.ndarray
    needs: np.ndarray  # numbers of passes
    microbatch: np.ndarray  # int64 [passes]
    # bool [passes]: forward passes of the host's first stage that takes encoders' tokens
    takes_tokens: np.ndarray
    # bool [passes]: an encoder microbatch's first pass, from which on the worker holds it
    opens: np.ndarray
    closes: np.ndarray  # bool [passes]: its last


def nest(passes: NestedPasses, copies: int, warmup: int) -> list[list[int]]:
    """Return every worker's passes in order, by number.

    copies: of the encoders, P. warmup: microbatches that the first stage with encoders' tokens runs
    ahead. A copy holds at most two microbatches more than the host's schedule asks for, however
    many there are. Raises ValueError for sequences in which workers wait for each other.
    """
    # The host runs `warmup` microbatches ahead and one more, of which a copy has every P-th: with 5
    # ahead and 4 copies a worker holds at least 2.
    needed = -(-(warmup + 1) // copies)
    settings = product(
        (needed + 1, needed + 2),
        range(copies, 3 * copies + 1, max(1, copies // 4)),
        range(copies + 1),
        (0, 1, 2, 3, 4, 6),
    )
    best = NEVER
    orders = np.zeros((len(passes.bounds), len(passes.length)), np.int64)
    fastest = orders.copy()
    for setting in settings:
        end = _schedule(passes, np.array(setting), orders)
        if end < best:
            best = end
            fastest[:] = orders
    if best == NEVER:
        raise ValueError("the passes of nested stages are in no order that runs")
    counts = (passes.bounds[:, :, 1] - passes.bounds[:, :, 0]).sum(1)
    return [order[:count].tolist() for order, count in zip(fastest, counts, strict=True)]


@njit(cache=True)
def _schedule(passes, setting, orders):
    """Fill in every worker's order; return when the last pass ends, or NEVER where workers wait for each other.

    setting: encoder microbatches that a worker may hold; how many microbatches ahead of the host
    encoders may begin one; how near the host one must be to go before the host's own passes; and in
    quarters of an encoder's pass, how soon the host's next pass must be due for the worker to wait
    for it.
    """
    # In time `clock`, every worker that is free and has a pass whose needs are done begins one, in
    # this order: an encoder's urgent pass; a backward pass that makes room for it; the host's; else
    # an encoder's pass, if the host's next is far enough away not to be late for it. Then the clock
    # goes on to the next end of a pass.
    limit, ahead, urgent, patience = setting
    workers = len(passes.bounds)
    end = np.full(len(passes.length), -1, np.int64)
    position = passes.bounds[:, :, 0].copy()
    free = np.zeros(workers, np.int64)
    count = np.zeros(workers, np.int64)
    holds = np.zeros(workers, np.int64)
    ready = np.zeros(3, np.int64)
    front = 0  # the microbatch whose tokens the host takes next
    clock = 0
    pending = len(passes.length)
    while pending > 0:
        progress = True
        while progress:
            progress = False
            for w in range(workers):
                if free[w] > clock:
                    continue
                for kind in range(3):
                    ready[kind] = NEVER
                    if position[w, kind] < passes.bounds[w, kind, 1]:
                        ready[kind] = _ready(passes, passes.queue[position[w, kind]], end)
                is_urgent = False
                is_full = False
                if position[w, ENCODE] < passes.bounds[w, ENCODE, 1]:
                    next_pass = passes.queue[position[w, ENCODE]]
                    microbatch = passes.microbatch[next_pass]
                    is_urgent = microbatch < front + urgent
                    is_full = passes.opens[next_pass] and holds[w] >= limit
                    if is_full or (passes.opens[next_pass] and microbatch >= front + ahead):
                        ready[ENCODE] = NEVER
                choice = -1
                if is_urgent and ready[ENCODE] <= clock:
                    choice = ENCODE
                elif is_urgent and is_full and ready[BACK] <= clock:
                    choice = BACK  # which makes room
                elif ready[HOST] <= clock:
                    choice = HOST
                else:
                    for kind in (ENCODE, BACK):
                        if choice < 0 and ready[kind] <= clock:
                            length = passes.length[passes.queue[position[w, kind]]]
                            if (
                                ready[HOST] == NEVER
                                or 4 * (ready[HOST] - clock) >= patience * length
                            ):
                                choice = kind
                if choice < 0:
                    continue
                chosen = passes.queue[position[w, choice]]
                position[w, choice] += 1
                end[chosen] = free[w] = clock + passes.length[chosen]
                orders[w, count[w]] = chosen
                count[w] += 1
                holds[w] += int(passes.opens[chosen]) - int(passes.closes[chosen])
                front += int(passes.takes_tokens[chosen])
                pending -= 1
                progress = True
        # Nothing runs and nothing can begin: the orders of the sequences contradict each other.
        following = NEVER
        for w in range(workers):
            if free[w] > clock:
                following = min(following, free[w])
        if following == NEVER and pending > 0:
            return NEVER
        clock = following
    return end.max()


@njit(cache=True)
def _ready(passes, number, end):
    """Return when all that a pass needs has ended, NEVER where some has not begun."""
    ready = 0
    for n in range(passes.need_start[number], passes.need_start[number + 1]):
        if end[passes.needs[n]] < 0:
            return NEVER
        ready = max(ready, end[passes.needs[n]])
    return ready
