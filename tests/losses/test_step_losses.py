from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import PADDING, TextBatch
from mmjax.losses import cross_entropy, step_losses
from mmjax.models.decoder import logits_of

ROWS, LENGTH, VOCAB, SOURCES, WIDTH = 4, 16, 12, 3, 8


@partial(jax.jit, static_argnums=3)
def step_loss(logits, text, total, sources):
    losses = cross_entropy.token_losses(logits, text)
    by_source = step_losses.sum_by_source(losses, text, sources)
    return cross_entropy.mean_loss(losses, total), *by_source


token_losses, in_chunks = (
    jax.jit(cross_entropy.token_losses),
    jax.jit(cross_entropy.losses_in_chunks, static_argnums=3),
)


@pytest.fixture
def text() -> TextBatch:
    """Tokens of three sources, a third without a weight, the last row empty."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    weight = rng.uniform(0.5, 2, shape) * (rng.random(shape) < 0.66)
    source = rng.integers(0, SOURCES, shape)
    weight[-1], source[-1] = 0, PADDING
    zeros = np.zeros(shape, np.int32)
    return TextBatch(
        zeros,
        rng.integers(0, VOCAB, shape).astype(np.int32),
        weight.astype(np.float32),
        *[zeros] * 6,
        source.astype(np.int32),
        *[zeros] * 2,
        {},
        {},
    )


@pytest.fixture
def logits() -> np.ndarray:
    return 3 * np.random.default_rng(1).standard_normal((ROWS, LENGTH, VOCAB), np.float32)


def reference(logits: np.ndarray, text: TextBatch) -> np.ndarray:
    """Weighted cross-entropy in float64."""
    x = np.asarray(logits, np.float64)
    chosen = np.take_along_axis(x, text.target[..., None], -1)[..., 0]
    return text.weight.astype(np.float64) * (np.log(np.exp(x).sum(-1)) - chosen)


def test_a_tokens_loss_is_its_weighted_cross_entropy(logits, text):
    np.testing.assert_allclose(
        token_losses(logits, text), reference(logits, text), rtol=1e-5, atol=1e-6
    )


def test_bfloat16_logits_are_summed_in_float32(logits, text):
    half = logits.astype(jnp.bfloat16)
    found = token_losses(half, text)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(
        found, reference(half.astype(np.float32), text), rtol=1e-5, atol=1e-6
    )


def test_tokens_without_a_weight_cost_exactly_nothing_whatever_is_predicted_there(logits, text):
    unweighted = text.weight == 0
    wild = np.where(unweighted[..., None], np.float32(np.inf), logits)
    assert not np.asarray(token_losses(wild, text))[unweighted].any()
    gradient = jax.jit(jax.grad(lambda x: step_loss(x, text, 1.0, SOURCES)[0]))(logits)
    assert not np.asarray(gradient)[unweighted].any()
    assert np.asarray(gradient)[~unweighted].any(-1).all()


def test_the_report_splits_loss_and_weight_by_source(logits, text):
    _, loss, weight = step_loss(logits, text, 1.0, SOURCES)
    losses = reference(logits, text)
    for source in range(SOURCES):
        mine = text.source == source
        assert loss[source] == pytest.approx(losses[mine].sum(), rel=1e-5)
        assert weight[source] == pytest.approx(text.weight[mine].sum(), rel=1e-6)


def test_the_parts_of_a_step_add_up_to_its_loss_however_unequal_their_weights(logits, text):
    total = float(text.weight.sum())
    whole = step_loss(logits, text, total, SOURCES)[0]
    part = lambda r: (logits[r], jax.tree.map(lambda x: x[r], text))  # noqa: E731
    parts = [float(step_loss(*part([r]), total, SOURCES)[0]) for r in range(ROWS)]
    assert sum(parts) == pytest.approx(float(whole), rel=1e-6)
    assert float(whole) == pytest.approx(reference(logits, text).sum() / total, rel=1e-5)


@pytest.fixture
def factors() -> tuple[np.ndarray, np.ndarray]:
    """Activations and a table whose scores lie between -15 and 15."""
    rng = np.random.default_rng(2)
    return 2 * rng.standard_normal((ROWS, LENGTH, WIDTH), np.float32), rng.standard_normal(
        (VOCAB, WIDTH), np.float32
    )


def gradients(hidden, table, text, chunks):
    return jax.grad(lambda *of: in_chunks(*of, text, chunks).sum(), (0, 1))(hidden, table)


@pytest.mark.parametrize("chunks", [2, 3, 4, VOCAB])
def test_a_loss_in_chunks_is_that_of_all_logits_with_its_gradients(chunks, factors, text):
    losses = [in_chunks(*factors, text, n) for n in (chunks, 1)]
    of_factors = zip(gradients(*factors, text, chunks), gradients(*factors, text, 1), strict=True)
    for found, wanted in (losses, *of_factors):
        np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_one_chunk_is_the_loss_of_the_whole_logits_to_the_bit(factors, text):
    whole = jax.jit(
        lambda hidden, table: cross_entropy.token_losses(logits_of(hidden, table), text)
    )
    np.testing.assert_array_equal(in_chunks(*factors, text, 1), whole(*factors))


def test_in_bfloat16_chunks_add_the_activations_gradient_in_float32(factors, text):
    half = [x.astype(jnp.bfloat16) for x in factors]
    exact = gradients(*(x.astype(jnp.float32) for x in half), text, 1)
    for chunks in (1, VOCAB):
        found = in_chunks(*half, text, chunks)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, in_chunks(*half, text, 1), rtol=1e-6, atol=1e-5)
        for gradient, wanted in zip(gradients(*half, text, chunks), exact, strict=True):
            assert gradient.dtype == jnp.bfloat16
            # Two roundings: of each part's gradient, and of the sum.
            np.testing.assert_allclose(
                gradient.astype(jnp.float32), wanted, atol=2**-7 * np.abs(wanted).max()
            )


def test_in_chunks_too_tokens_without_a_weight_cost_exactly_nothing(factors, text):
    hidden, table = factors
    unweighted = text.weight == 0
    wild = np.where(unweighted[..., None], np.float32(np.inf), hidden)
    assert not np.asarray(in_chunks(wild, table, text, 3))[unweighted].any()
    gradient = np.asarray(gradients(hidden, table, text, 3)[0])
    assert not gradient[unweighted].any()
    assert gradient[~unweighted].any(-1).all()


def test_scores_too_large_for_an_exponential_are_summed_across_chunks(text):
    hidden, table = (
        np.ones((ROWS, LENGTH, 1), np.float32),
        np.linspace(-400, 400, VOCAB, dtype=np.float32)[:, None],
    )
    np.testing.assert_allclose(
        in_chunks(hidden, table, text, 4), in_chunks(hidden, table, text, 1), rtol=1e-6
    )
    assert np.isfinite(gradients(hidden, table, text, 4)[1]).all()
