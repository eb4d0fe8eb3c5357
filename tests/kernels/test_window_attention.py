"""Attention in closed windows, interpreted: exact for windows of any sizes in any order, up to a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import PADDING, MaskSpec
from mmjax.kernels import window_attention as windows
from mmjax.kernels.masks import encoder_mask
from mmjax.kernels.window_attention import BLOCK, WindowPlan, plan_windows, window_attention
from mmjax.models.blockwise_attention import dense_attention

SIZES = (64, 49, 48, 36, 20, 16)


def mask_of_windows(rows: list[list[int]], length: int, gaps: tuple[int, ...] = ()) -> MaskSpec:
    """Windows of these sizes in rows, padding behind them and at every row's `gaps`."""
    span = np.zeros((len(rows), length), np.int32)
    sample = np.full((len(rows), length), PADDING, np.int32)
    for row, sizes in enumerate(rows):
        used = np.repeat(1 + np.arange(len(sizes)), sizes)
        span[row, : len(used)] = used
        sample[row, : len(used)] = used // 3  # an image of several windows
        sample[row, list(gaps)] = PADDING
    mask = encoder_mask(jnp.asarray(sample))
    return mask._replace(span=jnp.asarray(span), sees=0 * mask.sees)


def drawn(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, dtype) for key in keys]


def with_gradients(function, arrays: list[jax.Array]) -> list[np.ndarray]:
    *inputs, d_out = arrays

    def program(*inputs):
        out, backward = jax.vjp(function, *inputs)
        return out, *backward(d_out.astype(out.dtype))

    return [np.asarray(x, np.float32) for x in jax.jit(program)(*inputs)]


def errors(mask: MaskSpec, arrays: list[jax.Array]) -> list[float]:
    """The largest errors of output and gradients over the largest values, beside dense attention in float32."""
    scale = arrays[0].shape[-1] ** -0.5
    plan = plan_windows(mask)
    found = with_gradients(
        lambda q, k, v: window_attention(q, k, v, plan, scale, interpret=True), arrays
    )
    exact = [x.astype(jnp.float32) for x in arrays]
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, mask, mask), exact)
    padding = np.asarray(mask.sample) < 0
    assert not any(x[padding].any() for x in found)
    return [
        float(np.abs(x - e).max() / np.abs(e).max()) for x, e in zip(found, expected, strict=True)
    ]


def rows_of(size: int) -> list[list[int]]:
    """A row full of windows of one size, and one of several sizes with padding behind them."""
    return [[size] * (300 // size), [64, size, 48, 4, size, 36]]


@pytest.mark.default_cases("64", "48")
@pytest.mark.parametrize("size", SIZES)
def test_windows_of_any_size_are_attended_as_dense_attention_does(size):
    mask = mask_of_windows(rows_of(size), 300, gaps=(5, 6, 17))
    assert max(errors(mask, drawn((2, 300, 2, 16), "float32"))) < 2e-6


@pytest.mark.default_cases("80")
@pytest.mark.parametrize("width", [64, 72, 80])
def test_in_bfloat16_errors_are_those_of_its_operands(width):
    mask = mask_of_windows([[36] * 8, [64, 64, 49, 48, 20, 16, 36]], 300)
    output, *gradients = errors(mask, drawn((2, 300, 2, width), "bfloat16"))
    assert output <= 0.003
    assert max(gradients) <= 0.006


def test_a_row_shorter_than_a_block_is_one():
    assert max(errors(mask_of_windows([[16, 20]], 40), drawn((1, 40, 2, 16), "float32"))) < 2e-6


def test_blocks_hold_whole_windows_cover_every_row_and_are_few():
    rng = np.random.default_rng(0)
    for length in (64, 300, 1000):
        rows = [rng.choice([64, 48, 36, 32, 24, 16, 12, 4], 40).tolist() for _ in range(3)]
        rows = [sizes[: int((np.cumsum(sizes) <= length).sum())] for sizes in rows]
        mask = mask_of_windows(rows, length)
        for row, start in enumerate(np.asarray(plan_windows(mask).start)):
            assert (start[0], start[-1]) == (0, length)
            assert 0 <= np.diff(start).min() <= np.diff(start).max() <= BLOCK
            ends = np.cumsum(rows[row])
            assert set(start[start < ends[-1]][1:].tolist()) <= set(ends.tolist())


def test_windows_of_whole_blocks_need_one_turn_of_every_program():
    start = np.asarray(plan_windows(mask_of_windows([[64, 64, 32, 32, 16, 16]], 256)).start[0])
    np.testing.assert_array_equal(start, [0, 64, 128, 192, 256, 256, 256, 256, 256])


def leaking(plan: WindowPlan) -> WindowPlan:
    """All tokens in one window."""
    return plan._replace(window=jnp.minimum(plan.window, 1))


def cut(plan: WindowPlan) -> WindowPlan:
    """Blocks at multiples of 64, which windows cross."""
    blocks = plan.start.shape[1]
    start = jnp.minimum(BLOCK * jnp.arange(blocks), plan.window.shape[1])
    return plan._replace(start=jnp.broadcast_to(start, plan.start.shape))


@pytest.mark.parametrize("fault", [leaking, cut])
def test_a_plan_that_mixes_or_cuts_windows_is_seen(fault, monkeypatch):
    planned = plan_windows
    monkeypatch.setitem(globals(), "plan_windows", lambda mask: fault(planned(mask)))
    mask = mask_of_windows(rows_of(48), 300)
    assert max(errors(mask, drawn((2, 300, 2, 16), "float32"))) > 0.05


def test_the_backward_pass_keeps_neither_output_nor_sums():
    mask = mask_of_windows([[64, 36]], 128)
    q, k, v, _ = drawn((1, 128, 2, 16), "float32")
    _, residuals = windows._forward(q, k, v, plan_windows(mask), 0.25, True)
    assert [x.shape for x in residuals[:3]] == [q.shape] * 3
    assert len(residuals) == 4
    assert isinstance(residuals[3], WindowPlan)
