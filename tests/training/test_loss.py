from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import PADDING, TextBatch
from mmjax.training import loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH, VOCAB, SOURCES = 4, 16, 11, 3


step_loss, token_losses = jax.jit(loss.step_loss, static_argnums=3), jax.jit(loss.token_losses)


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
    np.testing.assert_allclose(token_losses(logits, text), reference(logits, text), rtol=1e-5, atol=1e-6)


def test_bfloat16_logits_are_summed_in_float32(logits, text):
    half = logits.astype(jnp.bfloat16)
    found = token_losses(half, text)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(half.astype(np.float32), text), rtol=1e-5, atol=1e-6)


def test_tokens_without_a_weight_cost_exactly_nothing_whatever_is_predicted_there(logits, text):
    unweighted = text.weight == 0
    wild = np.where(unweighted[..., None], np.float32(np.inf), logits)
    assert not np.asarray(token_losses(wild, text))[unweighted].any()
    gradient = jax.jit(jax.grad(lambda x: step_loss(x, text, 1.0, SOURCES)[0]))(logits)
    assert not np.asarray(gradient)[unweighted].any()
    assert np.asarray(gradient)[~unweighted].any(-1).all()


def test_the_report_splits_loss_and_weight_by_source(logits, text):
    _, report = step_loss(logits, text, 1.0, SOURCES)
    losses = reference(logits, text)
    for source in range(SOURCES):
        mine = text.source == source
        assert report.loss[source] == pytest.approx(losses[mine].sum(), rel=1e-5)
        assert report.weight[source] == pytest.approx(text.weight[mine].sum(), rel=1e-6)


def test_the_parts_of_a_step_add_up_to_its_loss_however_unequal_their_weights(logits, text):
    total = float(text.weight.sum())
    whole, _ = step_loss(logits, text, total, SOURCES)
    part = lambda r: (logits[r], jax.tree.map(lambda x: x[r], text))  # noqa: E731
    parts = [float(step_loss(*part([r]), total, SOURCES)[0]) for r in range(ROWS)]
    assert sum(parts) == pytest.approx(float(whole), rel=1e-6)
    assert float(whole) == pytest.approx(reference(logits, text).sum() / total, rel=1e-5)
