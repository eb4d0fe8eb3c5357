import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.mask_work import Mask, allowed_keys
from mmjax.benchmarks.baselines.token_blocks import ITEM, KINDS, TEXT

any_row = given(st.sampled_from(sorted(KINDS)), st.integers(64, 3000), st.integers(0, 2**32))


def made(kind: str, tokens: int, seed: int = 0) -> Mask:
    return KINDS[kind](tokens, np.random.default_rng(seed))


@settings(max_examples=100)
@any_row
def test_items_see_their_own_span_and_text_all_of_its_sample_before_it(kind, tokens, seed):
    mask = made(kind, tokens, seed)
    assert all(x.shape == (tokens,) and x.dtype == np.int32 for x in mask)
    assert np.array_equal(mask.pos, np.arange(tokens))
    text = mask.span == 0
    in_sample = mask.pos - np.searchsorted(mask.sample, mask.sample)
    expected = np.where(text, in_sample + 1, np.bincount(mask.span)[mask.span])
    assert np.array_equal(allowed_keys(mask), expected)
    assert np.array_equal(mask.kind, np.where(text, TEXT, ITEM))


@settings(max_examples=100)
@any_row
def test_spans_are_contiguous_and_a_quarter_of_every_sample_but_where_lengths_are_mixed(
    kind, tokens, seed
):
    mask = made(kind, tokens, seed)
    assert set(np.diff(mask.sample)) <= {0, 1}
    assert mask.sample[0] == 0
    assert np.array_equal(
        np.bincount(mask.sample, mask.span > 0), np.bincount(mask.sample) // 4 * (kind != "mixed")
    )
    starts = np.flatnonzero(np.diff(mask.span, prepend=0) * (mask.span > 0))
    assert mask.span[starts].tolist() == list(range(1, mask.span.max() + 1))
    sizes = np.bincount(mask.span)[1:]
    assert sizes.max(initial=0) <= -(-tokens // 64)
    assert sizes.min(initial=1) >= 1


def test_prepended_items_stand_before_all_text():
    mask = made("EP", 1 << 14)
    assert mask.span.tolist() == np.repeat([*range(1, 17), 0], [256] * 16 + [3 * 4096]).tolist()
    assert not mask.sample.any()


def test_embedded_items_have_text_around_them():
    mask = made("EE", 1 << 14)
    assert np.bincount(mask.span).tolist() == [3 * 4096] + [256] * 16
    assert np.count_nonzero(np.diff(mask.span)) > 24
    assert not mask.sample.any()


def test_packed_samples_are_about_32_and_vary_in_length():
    lengths = np.concatenate([np.bincount(made("MP", 1 << 14, seed).sample) for seed in range(50)])
    assert 26 < len(lengths) / 50 < 39
    assert 0.7 < np.log(lengths).std() < 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_makes_one_mask(kind):
    assert all(map(np.array_equal, made(kind, 1000, 3), made(kind, 1000, 3)))
    assert all(map(np.array_equal, made(kind, 1000, 3), made(kind, 1000, 4))) == (kind == "EP")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_too_short_for_the_spans_are_refused(kind):
    with pytest.raises(ValueError, match="needed are 64"):
        made(kind, 63)
