"""The loss of each sample inside the step: that of its own tokens, whatever lies beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import PADDING
from mmjax.data.loading.text_rows import BatchLayout, empty_text
from mmjax.losses.step_losses import MAX_WORST, highest_losses, worst_samples


def packed(rng: np.random.Generator, rows: int, length: int, first: int = 0):
    """Rows of samples of random lengths, with random losses, and each sample's mean."""
    text = empty_text((rows, length), BatchLayout({}, "causal", 10), {})
    losses, means, owner = np.zeros((rows, length), np.float32), {}, first
    for row in range(rows):
        at = 0
        for number in range(100):
            end = at + int(rng.integers(1, 9))
            if end > length:
                break
            weight = rng.integers(0, 3, end - at).astype(np.float32)
            loss = weight * rng.uniform(0.1, 5, end - at).astype(np.float32)
            text.sample[row, at:end], text.owner[row, at:end], text.weight[row, at:end] = (
                number,
                owner,
                weight,
            )
            losses[row, at:end] = loss
            if weight.any():
                means[owner] = float(loss.sum() / weight.sum())
            owner, at = owner + 1, end
    return losses, text, means


def told(worst) -> dict[int, float]:
    samples, losses = worst[:2]
    return {int(s): float(x) for s, x in zip(samples, losses, strict=True) if x > 0}


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (8, 64), (3, 200)])
def test_the_worst_samples_are_those_of_the_highest_mean(rows, length):
    losses, text, means = packed(np.random.default_rng(rows), rows, length)
    found = told(jax.jit(worst_samples)(jnp.asarray(losses), jax.tree.map(jnp.asarray, text)))
    wanted = dict(sorted(means.items(), key=lambda pair: -pair[1])[:MAX_WORST])
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose([found[k] for k in wanted], list(wanted.values()), rtol=1e-5)


def test_over_microbatches_the_worst_of_all_stay():
    rng = np.random.default_rng(0)
    parts = [packed(rng, 4, 64, first=1000 * k) for k in range(3)]
    samples, losses, means = jnp.zeros(MAX_WORST, jnp.int32), jnp.zeros(MAX_WORST), {}
    for part, text, of in parts:
        more, theirs, _ = worst_samples(jnp.asarray(part), jax.tree.map(jnp.asarray, text))
        samples, losses = highest_losses(
            jnp.concatenate([samples, more]), jnp.concatenate([losses, theirs])
        )
        means |= of
    wanted = dict(sorted(means.items(), key=lambda pair: -pair[1])[:MAX_WORST])
    assert told((samples, losses)).keys() == wanted.keys()
    assert list(np.asarray(losses)) == sorted(np.asarray(losses), reverse=True)


def test_samples_whose_loss_is_not_finite_come_first_and_are_counted_and_taint_no_neighbour():
    losses, text, means = packed(np.random.default_rng(1), 4, 64)
    bad = sorted(means)[3], sorted(means)[9]
    for sample, value in zip(bad, (np.nan, np.inf), strict=True):
        losses[(text.owner == sample) & (text.weight > 0)] = value
    samples, highest, not_finite = worst_samples(
        jnp.asarray(losses), jax.tree.map(jnp.asarray, text)
    )
    assert int(not_finite) == 2
    assert set(np.asarray(samples[:2]).tolist()) == set(bad)
    assert np.isinf(np.asarray(highest[:2])).all()
    rest = told((samples, highest))
    for sample in rest.keys() - set(bad):
        assert rest[sample] == pytest.approx(means[sample], rel=1e-5)


def test_a_sample_of_which_nothing_is_trained_on_has_no_loss():
    _, text, _ = packed(np.random.default_rng(2), 1, 32)
    silent = text._replace(weight=np.zeros_like(text.weight))
    assert told(worst_samples(jnp.zeros((1, 32)), jax.tree.map(jnp.asarray, silent))) == {}
    empty = text._replace(sample=np.full_like(text.sample, PADDING))
    assert told(worst_samples(jnp.ones((1, 32)), jax.tree.map(jnp.asarray, empty))) == {}
