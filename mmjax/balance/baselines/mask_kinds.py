"""Make masks of the three kinds in figure 11 of Cornstarch, to measure token distribution with (section 6.5).

An item's tokens are a span: they see each other both ways and no text. Text sees all of its sample up to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from mmjax.balance.mask_work import Mask

TEXT = 1  # bits of `kind`
ITEM = 2
LEAST_TOKENS = 64
_SPANS = 16
_SAMPLES = 32
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

    A quarter of every sample is in spans of at most 1/64 of the row. Raises ValueError below 64 tokens.
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
        # 1,024 tokens, a sample of 200: 50 in spans of at most 16, so 4 spans, edges 0, 12, 25, 37, 50.
        spans = -(-(length // 4) // (tokens // 64))
        edges = length // 4 * np.arange(spans + 1) // max(spans, 1)
        begins.append(begin + edges[:-1] + _draw_text_before(length - edges[-1], spans, rng))
        sizes.append(np.diff(edges))
    sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return _make_mask(sample, np.concatenate(begins), np.concatenate(sizes))


KINDS: Mapping[str, Callable[[int, np.random.Generator], Mask]] = MappingProxyType(
    {"EP": prepended, "EE": embedded, "MP": packed}
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
