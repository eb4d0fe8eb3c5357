"""Count the query-key pairs of attention masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_CHUNK = 256  # tokens that are compared at once while runs are sought


class Mask(NamedTuple):
    """Mask spec of one row: int32 `[T]` each."""

    sample: np.ndarray  # -1 = padding
    pos: np.ndarray  # index in the row before any permutation; no two tokens of a sample alike
    span: np.ndarray  # item whose tokens see each other both ways, 0 = none
    kind: np.ndarray  # one bit, this token's modality (bit 0 = text)
    sees: np.ndarray  # bits of the kinds that this query may attend causally


def allowed_keys(mask: Mask) -> np.ndarray:
    """Count the keys that each token may attend, int64 `[T]`, in any order of tokens. 0 for padding.

    Row-wise sum of the attention mask, Cornstarch section 4.3.2. Raises ValueError for two tokens
    of a sample with one `pos`.
    """
    start, first, grows = _runs(mask)
    # Only runs have been counted, of which a row has far fewer than tokens.
    keys = np.empty(len(mask.sample), np.int64)
    _fill(start, first, grows, keys)
    return keys


def block_work(mask: Mask, block: int) -> np.ndarray:
    """Sum `allowed_keys` over blocks of `block` tokens, int64 `[ceil(T / block)]`; the last may be short.

    Raises ValueError as `allowed_keys` does, and for blocks of no token.
    """
    if block < 1:
        raise ValueError(f"blocks of {block} tokens; needed is one or more")
    tokens = len(mask.sample)
    work = np.zeros(-(-tokens // block), np.int64)
    _sum_blocks(*_runs(mask), tokens, block, work)
    return work


def _runs(mask: Mask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find each run's first token and its allowed keys, int64 `[R]`; whether they grow by one a token `[R]`."""
    arrays = [np.ascontiguousarray(x, np.int32) for x in mask]
    start = _run_starts(*arrays)
    length = np.diff(start, append=len(mask.sample))
    # From here on arrays have one element a run, that of its first token. Padding is in no order.
    sample, *rest = [x[start] for x in arrays]
    first, grows, distinct = _run_work(np.flatnonzero(sample >= 0), length, sample, *rest)
    if not distinct:
        raise ValueError("two tokens of a sample have the same pos")
    return start, first, grows


def causal_pairs(tokens: np.ndarray | int, window: int, chunked: bool = False) -> np.ndarray | int:
    """Count the causal pairs of so many tokens, within a window where it is not 0; chunked: in chunks of it."""
    pairs = tokens * (tokens + 1) // 2
    if not window:
        return pairs
    if chunked:
        chunks, rest = np.divmod(tokens, window)
        return chunks * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    # A window of w excludes, of n tokens, the causal pairs of n - w tokens.
    beyond = (tokens - window) * (tokens > window)
    return pairs - beyond * (beyond + 1) // 2


@njit(cache=True)
def run_pairs(tokens, kind, sees, span, branch, window):
    """Count the allowed pairs of one sample, given as runs of tokens that attend alike in the order of `pos`.

    All int64 [R]; kind, sees and span as in `Mask`, branch: 0 for what all branches after it see.
    window: keys that a query sees at most, itself included, those of its span aside; 0 = all.
    Branches between a token and branch 0 do not count.
    """
    runs = len(tokens)
    begin = np.zeros(runs + 1, np.int64)
    gap = np.zeros(runs, np.int64)  # tokens of other branches between a run's branch and branch 0
    fork = branch_begin = previous = 0
    for i in range(runs):
        if i == 0 or branch[i] != previous:
            branch_begin = begin[i]
            fork = begin[i] if previous == 0 else fork
        gap[i] = branch_begin - fork if branch[i] else 0
        previous = branch[i]
        begin[i + 1] = begin[i] + tokens[i]
    pairs = 0
    for i in range(runs):
        for j in range(runs):
            if span[i] != 0 and span[i] == span[j]:
                pairs += tokens[i] * tokens[j]
            elif j <= i and sees[i] & kind[j]:
                pairs += tokens[i] * (tokens[i] + 1) // 2 if i == j else tokens[i] * tokens[j]
                if window:
                    first = begin[i] - (0 if branch[j] else gap[i])
                    # The first query misses so many of the run's keys, and each after it one more.
                    missed = first - window + 1 - begin[j]
                    pairs -= _clipped_sum(missed + tokens[i] - 1, tokens[j]) - _clipped_sum(
                        missed - 1, tokens[j]
                    )
    return pairs


@njit(cache=True)
def _clipped_sum(last, top):
    """Sum max(0, min(x, top)) over all whole x up to `last`."""
    inside = max(0, min(last, top))
    return inside * (inside + 1) // 2 + max(0, last - top) * top


@njit(cache=True)
def _run_starts(sample, pos, span, kind, sees):
    """Find the first token of every run, int64 [R]. `pos` of padding is not read."""
    tokens = len(sample)
    # As many as tokens at worst; cut to what was found at the end.
    start = np.empty(tokens, np.int64)
    runs = 0
    for begin in range(0, tokens, _CHUNK):
        end = min(begin + _CHUNK, tokens)
        # Most chunks lie inside one run: compare them as a block and skip the loop over tokens.
        # Needs a token before it, so the first chunk is always walked.
        if begin > 0 and _continues(sample, pos, span, kind, sees, begin, end):
            continue
        for i in range(begin, end):
            last = i - 1
            changed = (
                i == 0
                or sample[i] != sample[last]
                or span[i] != span[last]
                or kind[i] != kind[last]
            )
            # Within a run everything is equal but `pos`, which counts up: then a closed formula
            # gives each token's keys.
            if changed or sees[i] != sees[last] or (sample[i] >= 0 and pos[i] != pos[last] + 1):
                start[runs] = i
                runs += 1
    return start[:runs].copy()


@njit(cache=True)
def _continues(sample, pos, span, kind, sees, begin, end):
    """Return whether these tokens all belong to the run before. Loops have no exit, so that they are vectorized."""
    last = begin - 1
    in_sample = sample[last]
    in_span = span[last]
    of_kind = kind[last]
    seeing = sees[last]
    samples = sample[begin:end]
    spans = span[begin:end]
    kinds = kind[begin:end]
    masks = sees[begin:end]
    differs = False
    for i in range(end - begin):
        changed = (samples[i] != in_sample) | (spans[i] != in_span)
        differs |= changed | (kinds[i] != of_kind) | (masks[i] != seeing)
    if in_sample >= 0:
        follows = pos[begin:end]
        expected = pos[last] + 1
        for i in range(end - begin):
            # pos[begin + i] must be pos[begin - 1] + 1 + i.
            differs |= follows[i] - i != expected
    return not differs


@njit(cache=True)
def _run_work(order, length, sample, pos, span, kind, sees):
    """Count allowed keys of each run's first token; whether they grow along it; whether no sample repeats a `pos`.

    order: the runs that are no padding.
    """
    first = np.zeros(len(length), np.int64)
    grows = np.zeros(len(length), np.bool_)

    # Two stable sorts, the minor key first, order runs by (sample, pos).
    order = _sorted(_sorted(order, pos), sample)
    distinct = True
    for i in range(1, len(order)):
        r = order[i]
        previous = order[i - 1]
        # Runs cover pos .. pos + length - 1; in order of `pos` they must not overlap within a
        # sample.
        distinct &= sample[r] != sample[previous] or pos[r] >= pos[previous] + length[previous]
    # What lies wholly before the run, in its sample. What lies within the run is `grows`.
    visible = _seen_before(order, _segments(order, sample, sample), length, kind, sees)
    in_span = np.empty(len(order), np.int64)
    spans = 0
    for i in range(len(order)):
        r = order[i]
        # A causal token that sees its own kind sees one key more than the token before it in the
        # run.
        grows[r] = span[r] == 0 and sees[r] & kind[r] != 0
        # The first token sees itself where it sees its kind causally; in a span it is counted with
        # the span.
        first[r] = visible[i] + grows[r]
        if span[r] != 0:
            in_span[spans] = r
            spans += 1
    _add_spans(_sorted(in_span[:spans], span), sample, span, length, kind, sees, first)
    return first, grows, distinct


@njit(cache=True)
def _segments(order, first_key, second_key):
    """Number the stretches of `order` in which neither key changes: int64 [len(order)]."""
    segment = np.zeros(len(order), np.int64)
    for i in range(1, len(order)):
        r = order[i]
        previous = order[i - 1]
        segment[i] = segment[i - 1] + (
            first_key[r] != first_key[previous] or second_key[r] != second_key[previous]
        )
    return segment


@njit(cache=True)
def _add_spans(order, sample, span, length, kind, sees, first):
    """Add what each run sees of its span and not causally; `order` is by span, sample, then `pos`. Writes `first`.

    Of the span all count, so those that causality allows as well are taken off: what is left is the
    same for all tokens of a run, its own among them.
    """
    segment = _segments(order, span, sample)
    size = np.zeros(len(order), np.int64)
    for i in range(len(order)):
        # Tokens of the whole span: everyone in it sees all of them, whatever their order.
        size[segment[i]] += length[order[i]]
    visible = _seen_before(order, segment, length, kind, sees)
    for i in range(len(order)):
        first[order[i]] += size[segment[i]] - visible[i]


@njit(cache=True)
def _sorted(order, key):
    """Sort `order` stably by the int32 key of its elements: O(n), and one look where that is so already."""
    n = len(order)
    low = high = 0
    sorted_already = True
    for i in range(n):
        # int64, as the difference of two int32 keys may not fit in one.
        one = np.int64(key[order[i]])
        sorted_already &= i == 0 or one >= key[order[i - 1]]
        low, high = (min(low, one), max(high, one)) if i else (one, one)
    shift = 0
    # As many passes as the range of keys has bytes: most keys differ in one or two.
    while not sorted_already and (high - low) >> shift:
        begin = np.zeros(257, np.int64)
        for i in range(n):
            # Radix sort by bytes: count digit d at d + 1, so that the cumulative sum gives where
            # each digit starts.
            begin[((key[order[i]] - low) >> shift & 255) + 1] += 1
        for digit in range(256):
            begin[digit + 1] += begin[digit]
        moved = np.empty_like(order)
        for i in range(n):
            digit = (key[order[i]] - low) >> shift & 255
            moved[begin[digit]] = order[i]
            begin[digit] += 1
        order = moved
        shift += 8
    return order


@njit(cache=True)
def _seen_before(order, segment, length, kind, sees):
    """Count for each run of `order` the tokens of earlier runs of its segment whose kind it sees, int64 [n]."""
    visible = np.zeros(len(order), np.int64)
    # At most as many kinds as there are modalities, so a list is searched faster than a dictionary.
    kinds = [np.int64(0)]  # no query sees kind 0; others are added as they come
    count = [np.int64(0)]
    for i in range(len(order)):
        r = order[i]
        if i > 0 and segment[i] != segment[i - 1]:
            for k in range(len(kinds)):
                count[k] = 0
        kind_index = -1
        for k in range(len(kinds)):
            if sees[r] & kinds[k]:
                visible[i] += count[k]
            if kinds[k] == kind[r]:
                kind_index = k
        if kind_index < 0:
            # The run itself counts for later ones only, for within it nothing is before.
            kinds.append(np.int64(kind[r]))
            count.append(length[r])
        else:
            count[kind_index] += length[r]
    return visible


@njit(cache=True)
def _fill(start, first, grows, keys):
    """Expand the runs' allowed keys to every token; writes `keys`."""
    for r in range(len(start)):
        end = start[r + 1] if r + 1 < len(start) else len(keys)
        for i in range(start[r], end):
            keys[i] = first[r] + grows[r] * (i - start[r])


@njit(cache=True)
def _sum_blocks(start, first, grows, tokens, block, work):
    """Add the allowed keys of every run's tokens to the blocks that they are in; writes `work`."""
    for r in range(len(start)):
        end = start[r + 1] if r + 1 < len(start) else tokens
        i = start[r]
        while i < end:
            # Up to the end of the block that token i is in, or of the run.
            stop = min((i // block + 1) * block, end)
            n = stop - i
            offset = i - start[r]
            # Token x of the run has first + grows * x keys; here x = offset .. offset + n - 1.
            work[i // block] += n * first[r] + grows[r] * (n * offset + n * (n - 1) // 2)
            i = stop
