"""The flash kernel computes exact attention, and its lists of blocks hold every allowed pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import MaskSpec, allowed
from mmjax.kernels.flash_attention import Scores, flash_attention, plan_blocks
from mmjax.kernels.masks import block_pairs, pad_mask
from mmjax.kernels.tiles import KernelTiles, Tiles, tiles_for

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
    pos = np.broadcast_to(np.arange(length), (rows, length))
    reach = None
    if rng.integers(2):  # chunks, or a sliding window
        window = rng.integers(3, 40)
        reach = pos % window + 1 if window % 2 else np.full((rows, length), window)
    fields = (sample, pos, span, kind, sees, reach)
    return MaskSpec(*(None if x is None else jnp.asarray(x, jnp.int32) for x in fields))


def exact_attention(
    q, k, v, weight, mask: MaskSpec, scale: float, cap: float
) -> tuple[np.ndarray, ...]:
    """Compute the output, and the gradients of its sum weighted by `weight`, in float64 and with all scores at once.

    In float32 `dense_attention` is itself up to 2e-5 from this.
    """
    q, k, v, weight = (np.asarray(x, np.float64) for x in (q, k, v, weight))
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bqnh,bknh->bnqk", q, keys) * scale
    slope = scale
    if cap:
        scores = np.tanh(scores / cap) * cap
        slope = scale * (1 - (scores / cap) ** 2)
    scores = np.where(np.asarray(allowed(mask, mask))[:, None], scores, -np.inf)
    row_max = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(row_max), row_max, 0))
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    d_weights = np.einsum("bqnh,bknh->bnqk", weight, values)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * slope

    def of_group(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(*k.shape[:3], group, -1).sum(3)

    return (
        np.einsum("bnqk,bknh->bqnh", weights, values),
        np.einsum("bnqk,bknh->bqnh", d_scores, keys),
        of_group(np.einsum("bnqk,bqnh->bknh", d_scores, q)),
        of_group(np.einsum("bnqk,bqnh->bknh", weights, weight)),
    )


@pytest.mark.default_cases("1", "2")
@pytest.mark.parametrize("seed", range(30))
def test_outputs_and_gradients_are_those_of_attention_in_float64(seed):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(40, 100))
    width = (40, 64, 72, 80, 128)[seed % 5]
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * (1, 2, 7)[seed % 3]
    scale = float(rng.choice([width**-0.5, 0.3]))
    cap = float(rng.choice([0, 1.5]))
    mask = random_mask(rng, 2, length)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(2, length, n, width)), jnp.float32)
        for n in (heads, kv_heads, kv_heads, heads)
    )

    @jax.jit
    def flash(q, k, v):
        plan = plan_blocks(mask, SMALL)
        out, pull_back = jax.vjp(
            lambda *x: flash_attention(*x, plan, Scores(scale, cap, SMALL, interpret=True)), q, k, v
        )
        return out, *pull_back(weight)

    wanted = exact_attention(q, k, v, weight, mask, scale, cap)
    for ours, exact in zip(flash(q, k, v), wanted, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16), (16, 16)])
def test_every_allowed_pair_is_listed_and_no_whole_pair_has_a_masked_one(sizes):
    whole_pairs = truly_whole = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        mask = pad_mask(random_mask(rng, 2, 90), 96)
        q_size, k_size = sizes
        whole, live = map(np.asarray, block_pairs(mask, mask, q_size, k_size))
        by_block = np.asarray(allowed(mask, mask)).reshape(
            2, 96 // q_size, q_size, 96 // k_size, k_size
        )
        by_block = by_block.transpose(0, 1, 3, 2, 4).reshape(*whole.shape, -1)
        assert not (by_block.any(-1) & ~live).any()
        assert not (whole & ~by_block.all(-1)).any()
        assert not (whole & ~live).any()
        whole_pairs += whole.sum()
        truly_whole += by_block.all(-1).sum()
    assert whole_pairs > 0.8 * truly_whole > 0


def test_most_pairs_in_the_blocks_that_causal_rows_visit_are_allowed():
    rng = np.random.default_rng(0)
    rows = []
    useful = 0
    for _ in range(4):
        lengths = rng.integers(1024, 4097, 16)
        lengths = lengths[np.cumsum(lengths) <= 16_384]
        useful += int((lengths * (lengths + 1) // 2).sum())
        rows.append(
            np.pad(
                np.repeat(np.arange(len(lengths)), lengths),
                (0, 16_384 - lengths.sum()),
                constant_values=-1,
            )
        )
    sample = jnp.asarray(np.stack(rows), jnp.int32)
    ones = jnp.ones_like(sample)
    mask = MaskSpec(
        sample, jnp.broadcast_to(jnp.arange(16_384), sample.shape), 0 * ones, ones, ones
    )
    tiles = tiles_for(128, 16_384)
    plan = jax.jit(lambda mask: plan_blocks(mask, tiles))(mask)
    shares = {}
    for name, lists in (
        ("forward", plan.forward),
        ("d_query", plan.d_query),
        ("d_key", plan.d_key),
    ):
        shares[name] = useful / (
            int(lists.count[..., 1].sum()) * getattr(tiles, name).q * getattr(tiles, name).k
        )
    print(shares)
    assert min(shares.values()) >= 0.75


def test_a_pair_that_is_wrongly_called_whole_is_found():
    mask = random_mask(np.random.default_rng(0), 1, 64)
    whole, live = block_pairs(mask, mask, 16, 16)
    wrong = whole | live
    by_block = (
        np.asarray(allowed(mask, mask))
        .reshape(1, 4, 16, 4, 16)
        .transpose(0, 1, 3, 2, 4)
        .reshape(1, 4, 4, -1)
    )
    assert (np.asarray(wrong) & ~by_block.all(-1)).any()
