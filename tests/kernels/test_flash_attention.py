"""The flash kernel computes what dense attention computes, and its lists of blocks hold every allowed pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.kernels.flash_attention import KernelTiles, Scores, Tiles, flash_attention, plan_blocks
from mmjax.kernels.masks import MaskSpec, allowed, block_pairs, pad_mask
from mmjax.models.attention import Scoring, dense_attention

SMALL = KernelTiles(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 32, 4, 1))


def random_mask(rng: np.random.Generator, rows: int, length: int) -> MaskSpec:
    """Samples, padding, items, isolated items, branches and windows, in any mix."""
    sample = np.sort(rng.integers(0, 4, (rows, length)), axis=1)
    sample[:, length - int(rng.integers(0, length // 4)) :] = -1
    span = 1 + np.arange(length) // int(rng.integers(3, 30))
    span = np.where(rng.random((rows, length)) < rng.choice([0, 0.5, 1]), span, 0)
    if rng.integers(2):
        kind = 1 << rng.integers(0, 3, (rows, length))
        sees = rng.integers(0, 8, (rows, length))
    else:
        kind = np.ones((rows, length))
        sees = np.full((rows, length), 7)
    reach = np.full((rows, length), rng.integers(3, 40)) if rng.integers(2) else None
    pos = np.broadcast_to(np.arange(length), (rows, length))
    fields = (sample, pos, span, kind, sees, reach)
    return MaskSpec(*(None if x is None else jnp.asarray(x, jnp.int32) for x in fields))


@pytest.mark.default_cases("0", "1", "2")
@pytest.mark.parametrize("seed", range(30))
def test_outputs_and_gradients_are_those_of_dense_attention(seed):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(40, 100))
    width = (40, 64, 72, 80, 128)[seed % 5]
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * (1, 2, 7)[seed % 3]
    scoring = Scoring(float(rng.choice([0, 0.3])), float(rng.choice([0, 1.5])))
    mask = random_mask(rng, 2, length)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(2, length, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    scores = Scores(scoring.scale or width**-0.5, scoring.cap, SMALL, interpret=True)

    def flash(q, k, v):
        out = flash_attention(q, k, v, plan_blocks(mask, SMALL), scores)
        return (out * weight).sum(), out

    def dense(q, k, v):
        out = dense_attention(q, k, v, mask, mask, scoring)
        return (out * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(flash, (0, 1, 2), has_aux=True))(q, k, v)
    (_, wanted), wanted_gradients = jax.jit(jax.value_and_grad(dense, (0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        # Of the largest where that is above 1: float32 alone rounds 11 by 5e-7, and a gradient sums a row of such.
        largest = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16), (16, 16)])
def test_every_allowed_pair_is_listed_and_no_whole_pair_has_a_masked_one(sizes):
    whole_pairs = truly_whole = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        mask = pad_mask(random_mask(rng, 2, 90), 96)
        q_size, k_size = sizes
        whole, live = map(np.asarray, block_pairs(mask, mask, q_size, k_size))
        by_block = np.asarray(allowed(mask, mask)).reshape(2, 96 // q_size, q_size, 96 // k_size, k_size)
        by_block = by_block.transpose(0, 1, 3, 2, 4).reshape(*whole.shape, -1)
        assert not (by_block.any(-1) & ~live).any()
        assert not (whole & ~by_block.all(-1)).any()
        assert not (whole & ~live).any()
        whole_pairs += whole.sum()
        truly_whole += by_block.all(-1).sum()
    assert whole_pairs > 0.8 * truly_whole > 0


def test_a_pair_that_is_wrongly_called_whole_is_found():
    mask = random_mask(np.random.default_rng(0), 1, 64)
    whole, live = block_pairs(mask, mask, 16, 16)
    wrong = whole | live
    by_block = np.asarray(allowed(mask, mask)).reshape(1, 4, 16, 4, 16).transpose(0, 1, 3, 2, 4).reshape(1, 4, 4, -1)
    assert (np.asarray(wrong) & ~by_block.all(-1)).any()
