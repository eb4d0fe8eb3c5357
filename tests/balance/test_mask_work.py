"""Allowed keys are those of the mask spec's dense definition, for any order of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.mask_work import Mask, allowed_keys, block_work
from mmjax.batch import MaskSpec, allowed

TEXT, IMAGE, CLIP = 1, 2, 4


def dense(mask: Mask) -> np.ndarray:
    """Which keys each query may attend, bool `[T, T]`."""
    return allowed(MaskSpec(*mask), MaskSpec(*mask))


def permuted(mask: Mask, order: np.ndarray) -> Mask:
    return Mask(*(x[order] for x in mask))


def causal(tokens: int) -> Mask:
    one = np.ones(tokens, np.int32)
    return Mask(0 * one, np.arange(tokens, dtype=np.int32), 0 * one, one, one.copy())


def any_mask(rng: np.random.Generator, tokens: int) -> Mask:
    """Every field of every token drawn on its own: interleaved samples and spans, padding anywhere, gaps in pos."""
    kind = (1 << rng.integers(0, rng.choice([1, 2, 31]), tokens)).astype(np.int32)
    return Mask(
        sample=rng.integers(-1, rng.integers(0, 4), tokens, np.int32, endpoint=True),
        pos=rng.choice(3 * tokens, tokens, replace=False).astype(np.int32),
        span=rng.integers(0, rng.integers(0, 5), tokens, np.int32, endpoint=True),
        kind=kind,
        sees=rng.integers(0, rng.choice([1, 3, 2**31 - 1]), tokens, np.int32, endpoint=True),
    )


def usual_mask(rng: np.random.Generator, tokens: int) -> Mask:
    """Samples one after the other, padding in between and behind, each of text and items of some tokens."""
    fields = {name: np.zeros(tokens, np.int32) for name in Mask._fields} | {
        "pos": np.arange(tokens, dtype=np.int32)
    }
    at = sample = span = 0
    while at < tokens:
        end = min(tokens, at + int(rng.integers(1, tokens + 1)))
        padding = rng.random() < 0.2
        while at < end:
            here = slice(at, min(end, at + int(rng.choice([1, 5, 100, 600]))))
            kind = rng.choice([TEXT, IMAGE, CLIP])
            fields["sample"][here], fields["kind"][here] = -1 if padding else sample, kind
            fields["sees"][here] = rng.choice([0, TEXT, TEXT | IMAGE, TEXT | IMAGE | CLIP])
            fields["span"][here] = 0 if kind == TEXT else span + rng.integers(0, 2)
            at, span = here.stop, span + rng.integers(0, 2)
        sample += 1
    return Mask(**fields)


def assert_counted(mask: Mask, block: int) -> None:
    expected = dense(mask).sum(1)
    keys, work = allowed_keys(mask), block_work(mask, block)
    assert keys.dtype == work.dtype == np.int64
    assert np.array_equal(keys, expected)
    assert work.tolist() == [expected[i : i + block].sum() for i in range(0, len(expected), block)]


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 50))
def test_any_tokens_in_any_order_see_what_the_dense_mask_allows(seed, tokens, block):
    assert_counted(any_mask(np.random.default_rng(seed), tokens), block)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 900), st.integers(1, 300))
def test_rows_as_packed_and_their_permuted_blocks_see_what_the_dense_mask_allows(
    seed, tokens, block
):
    rng = np.random.default_rng(seed)
    mask = usual_mask(rng, tokens)
    assert_counted(mask, block)
    blocks = rng.permutation(-(-tokens // block))
    order = (blocks[:, None] * block + np.arange(block)).ravel()
    assert_counted(permuted(mask, order[order < tokens]), block)


@pytest.mark.parametrize("field", Mask._fields)
@pytest.mark.parametrize("at", [1, 255, 256, 257, 511, 512, 767])
def test_one_token_that_differs_is_noticed_wherever_it_stands(field, at):
    mask = causal(768)
    getattr(mask, field)[at] += 1000 if field == "pos" else 1
    assert_counted(mask, 128)


def test_a_pair_that_span_and_causality_both_allow_counts_once():
    mask = causal(6)._replace(span=np.array([0, 7, 7, 0, 7, 0], np.int32))
    assert allowed_keys(mask).tolist() == [1, 4, 4, 4, 5, 6]


def test_pos_of_padding_is_not_read():
    mask = causal(600)
    mask.sample[100:500] = -1
    mask.pos[100:500] = 0
    assert_counted(mask, 64)
    assert allowed_keys(mask)[-1] == 200


def test_a_million_tokens_are_counted_to_the_last():
    tokens = 1 << 20
    mask = causal(tokens)
    assert block_work(mask, 1000).sum() == tokens * (tokens + 1) // 2
    mask.span[:] = 1
    assert block_work(mask, 128).tolist() == [128 * tokens] * (tokens // 128)


def test_arrays_of_another_type_or_layout_count_alike():
    mask = usual_mask(np.random.default_rng(0), 300)
    wide = np.stack([x.astype(np.int64) for x in mask], axis=1)
    wide.flags.writeable = False
    assert np.array_equal(allowed_keys(Mask(*wide.T)), allowed_keys(mask))


def test_a_row_without_tokens_has_no_work():
    assert allowed_keys(causal(0)).shape == block_work(causal(0), 128).shape == (0,)


@pytest.mark.parametrize("count", [allowed_keys, lambda mask: block_work(mask, 4)])
def test_two_tokens_of_a_sample_at_one_pos_are_refused(count):
    mask = causal(10)
    mask.pos[7] = 3
    with pytest.raises(ValueError, match="same pos"):
        count(mask)
    mask.sample[7] = 1
    assert count(mask).sum() == 9 * 10 // 2 + 1


def test_blocks_of_no_token_are_refused():
    with pytest.raises(ValueError, match="blocks of 0"):
        block_work(causal(4), 0)
