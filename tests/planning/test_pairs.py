"""Counted pairs are exactly those that the mask spec allows."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.batch import TOKEN_FIELDS, TextBatch
from mmjax.planning.work import allowed_pairs, item_pairs, pairs_beyond_window

TEXT, IMAGE, CLIP = 1, 2, 4
EVERYTHING = TEXT | IMAGE | CLIP
BRANCH = 1 << 12  # the bit of the first branch


def random_text(
    rng: np.random.Generator, rows: int, length: int, items: str, branches: int = 0
) -> TextBatch:
    """Rows of several samples and padding: text, images that text may interrupt, then questions blind to each other."""
    fields = {f: np.zeros((rows, length), np.int32) for f in TOKEN_FIELDS}
    fields["sample"] -= 1
    fields["pos"] += np.arange(length, dtype=np.int32)
    for row in range(rows):
        at = sample = span = 0
        while at < length - rng.integers(0, length // 4 + 1):
            end = min(length, at + int(rng.integers(1, length)))
            fields["sample"][row, at:end] = sample
            for t in range(at, end):
                kind = int(rng.choice([TEXT, IMAGE, CLIP]))
                fields["kind"][row, t] = kind
                fields["sees"][row, t] = 0 if items == "isolated" and kind != TEXT else EVERYTHING
                if items != "causal" and kind != TEXT:
                    fields["span"][row, t] = span + kind  # text in between does not end the span
            for branch in range(branches):
                own = BRANCH << branch
                where = slice(end - 2 * (branch + 1), end - 2 * branch)
                if end - at > 2 * branches:
                    fields["kind"][row, where], fields["span"][row, where] = own, 0
                    fields["sees"][row, where] = EVERYTHING | own
            at, sample, span = end, sample + 1, span + 8
    return TextBatch(**fields, slots={}, send={})


def brute_force_pairs(text: TextBatch, window: int = 10**6) -> list[int]:
    counts = []
    for sample, pos, span, kind, sees in zip(
        text.sample, text.pos, text.span, text.kind, text.sees, strict=True
    ):
        count = 0
        for q in range(len(sample)):
            for k in range(len(sample)):
                together = span[q] == span[k] != 0
                apart = pos[q] - pos[k]
                # what other branches have between them does not count
                if kind[k] < BRANCH <= kind[q]:
                    between = (sample == sample[q]) & (pos > pos[k]) & (pos < pos[q])
                    apart -= int((between & (kind >= BRANCH) & (kind != kind[q])).sum())
                causally = pos[k] <= pos[q] and apart < window and (sees[q] & kind[k]) != 0
                count += bool(sample[q] == sample[k] >= 0 and (together or causally))
        counts.append(count)
    return counts


@pytest.mark.parametrize("branches", [0, 3])
@pytest.mark.parametrize("items", ["causal", "bidirectional", "isolated"])
def test_pairs_equal_a_walk_over_every_query_and_key(items: str, branches: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        text = random_text(rng, 3, int(rng.integers(4, 28)), items, branches)
        assert allowed_pairs(text).tolist() == brute_force_pairs(text)


@pytest.mark.parametrize("branches", [0, 3])
@pytest.mark.parametrize("items", ["causal", "bidirectional", "isolated"])
def test_pairs_within_a_window_equal_a_walk_over_every_query_and_key(
    items: str, branches: int
) -> None:
    rng = np.random.default_rng(3)
    for window in range(1, 13):
        text = random_text(rng, 3, int(rng.integers(4, 28)), items, branches)
        assert (
            allowed_pairs(text) - pairs_beyond_window(text, window)
        ).tolist() == brute_force_pairs(text, window)


def test_a_permutation_of_the_row_changes_no_count() -> None:
    rng = np.random.default_rng(1)
    text = random_text(rng, 3, 24, "isolated", 2)
    order = rng.permutation(24)
    fields = {f: getattr(text, f)[:, order] for f in TOKEN_FIELDS}
    moved = TextBatch(**fields, slots={}, send={})
    assert (moved.pos[0] != text.pos[0]).any()
    assert allowed_pairs(moved).tolist() == allowed_pairs(text).tolist() == brute_force_pairs(moved)


def test_padding_alone_allows_nothing() -> None:
    text = random_text(np.random.default_rng(2), 2, 8, "causal")
    text.sample[:] = -1
    assert allowed_pairs(text).tolist() == [0, 0]
    assert item_pairs(text.sample).tolist() == [0, 0]


def test_item_pairs_are_the_squares_of_item_lengths() -> None:
    item = np.array([[0, 0, 0, -1, 1, 1, -1, -1], [-1] * 8, [0, 1, 2, 2, 2, 2, -1, 2]], np.int32)
    assert item_pairs(item).tolist() == [9 + 4, 0, 1 + 1 + 25]
