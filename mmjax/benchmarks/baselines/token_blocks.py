"""For comparison only: what `mask_work` and `token_blocks` are measured against (Cornstarch 4.3.2, 5.3, 6.5, A).

Plain LPT leaves unequal counts; zigzag, ring and random do not look at the work; the integer
program is exact but takes seconds for tens of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numba import njit

from mmjax.balance.mask_work import Mask
from mmjax.balance.token_blocks import check_ranks

TEXT = 1  # bits of `kind`
ITEM = 2
LEAST_TOKENS = 64
_SPANS = 16
_SAMPLES = 32
_SHORT = 1024  # tokens of a short sample, on average
_SPREAD = 1.0  # of the logarithm of a sample's length


def prepended(tokens: int, rng: np.random.Generator) -> Mask:
    """Make an EP mask, encoder outputs prepended: 16 spans, a quarter of the row, then text. `rng` is not drawn from.

    Raises ValueError below 64 tokens.
    """
    _check_tokens(tokens)
    edges = tokens // 4 * np.arange(_SPANS + 1) // _SPANS
    return _make_mask(np.zeros(tokens, np.int32), edges[:-1], np.diff(edges))


def embedded(tokens: int, rng: np.random.Generator) -> Mask:
    """Make an EE mask, encoder outputs embedded: the spans of `prepended` at random places of the text.

    Raises ValueError below 64 tokens.
    """
    _check_tokens(tokens)
    edges = tokens // 4 * np.arange(_SPANS + 1) // _SPANS
    begins = edges[:-1] + _draw_text_before(tokens - edges[-1], _SPANS, rng)
    return _make_mask(np.zeros(tokens, np.int32), begins, np.diff(edges))


def packed(tokens: int, rng: np.random.Generator) -> Mask:
    """Make an MP mask, multimodal packing: about 32 samples of log-normal length, each with spans as in `embedded`.

    A quarter of every sample is in spans of at most 1/64 of the row. Raises ValueError below 64
    tokens.
    """
    _check_tokens(tokens)
    mean = np.log(tokens / _SAMPLES) - _SPREAD**2 / 2
    ends: list[int] = []
    while not ends or ends[-1] < tokens:
        length = max(round(rng.lognormal(mean, _SPREAD)), 1)
        ends.append(min((ends[-1] if ends else 0) + length, tokens))
    lengths = np.diff([0, *ends])
    begins: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for begin, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        # 1,024 tokens, a sample of 200: 50 in spans of at most 16, so 4 spans, edges 0, 12, 25, 37,
        # 50.
        spans = -(-(length // 4) // (tokens // 64))
        edges = length // 4 * np.arange(spans + 1) // max(spans, 1)
        begins.append(begin + edges[:-1] + _draw_text_before(length - edges[-1], spans, rng))
        sizes.append(np.diff(edges))
    sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return _make_mask(sample, np.concatenate(begins), np.concatenate(sizes))


def mixed(tokens: int, rng: np.random.Generator) -> Mask:
    """Make the mask of rows that mix lengths: half is one sample of text, the rest samples of about 1,024 tokens.

    Lengths are log-normal. Raises ValueError below 64 tokens.
    """
    _check_tokens(tokens)
    lengths = [tokens // 2]
    while (room := tokens - sum(lengths)) > 0:
        lengths.append(
            min(max(round(rng.lognormal(np.log(_SHORT) - _SPREAD**2 / 2, _SPREAD)), 1), room)
        )
    sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    no_spans = np.zeros(0, np.int64)
    return _make_mask(sample, no_spans, no_spans)


KINDS: Mapping[str, Callable[[int, np.random.Generator], Mask]] = MappingProxyType(
    {"EP": prepended, "EE": embedded, "MP": packed, "mixed": mixed}
)


def _check_tokens(tokens: int) -> None:
    if tokens < LEAST_TOKENS:
        raise ValueError(f"a mask of {tokens} tokens; needed are {LEAST_TOKENS} or more")


def _draw_text_before(text: int, spans: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how many of `text` tokens stand before each span, ascending, int64 `[spans]`."""
    return np.sort(rng.integers(0, text + 1, spans))


def _make_mask(sample: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> Mask:
    """Build the mask of text with spans of these first tokens and sizes, `[spans]` each, numbered from 1."""
    span = np.zeros(len(sample), np.int32)
    for span_id, (begin, size) in enumerate(zip(begins, sizes, strict=True), 1):
        span[begin : begin + size] = span_id
    text = span == 0
    kind = np.where(text, TEXT, ITEM).astype(np.int32)
    sees = np.where(text, TEXT | ITEM, 0).astype(np.int32)
    return Mask(sample, np.arange(len(sample), dtype=np.int32), span, kind, sees)


def longest_first(work: np.ndarray, ranks: int) -> np.ndarray:
    """Give each block, heaviest first, to the rank with least work (LPT). int32 `[B]` from int `[B]`; counts differ.

    Cornstarch, algorithm 2, which as printed pushes the rank's number plus the workload where its
    load is meant.
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


def visible_keys(mask: Mask, rank: np.ndarray, ranks: int) -> np.ndarray:
    """Find the keys that queries of each rank may attend, bool `[ranks, T]`. rank: int `[T]`, of each token."""
    visible = np.zeros((ranks, len(rank)), np.bool_)
    in_sample = mask.sample >= 0
    sample = np.where(in_sample, mask.sample, 0)
    # A number for each span of each sample.
    pairs = sample * (mask.span.max(initial=0) + np.int64(1)) + mask.span
    spans, span = np.unique(pairs, return_inverse=True)
    kinds = {kind: in_sample & (mask.kind == kind) for kind in np.unique(mask.kind)}
    in_span = in_sample & (mask.span != 0)
    for number, keys in enumerate(visible):
        queries = np.flatnonzero(in_sample & (rank == number))
        for kind, of_kind in kinds.items():
            seeing = queries[mask.sees[queries] & kind != 0]
            # Of a kind, a rank's last query that sees it may attend all that any of its queries
            # may.
            last = np.full(sample.max(initial=0) + 1, -1, np.int64)
            np.maximum.at(last, sample[seeing], mask.pos[seeing])
            keys |= of_kind & (mask.pos <= last[sample])
        with_queries = np.zeros(len(spans), np.bool_)
        with_queries[span[queries]] = True
        keys |= in_span & with_queries[span]
    return visible
