"""Tokens are drawn as temperature, top-k and top-p say, each row by its own number."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mmjax.errors import UserError
from mmjax.inference.generator import Sampling, choose, keep

VOCAB = 40
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
DRAWS = 20_000
KINDS = [
    Sampling(1.0, seed=3),
    Sampling(0.5, seed=4),
    Sampling(1.5, top_k=5, seed=5),
    Sampling(1.0, top_p=0.6, seed=6),
    Sampling(2.0, top_k=12, top_p=0.7, seed=7),
    Sampling(1.0, top_k=10 * VOCAB, top_p=1e-6, seed=8),
]


def scores_there(sampling: Sampling, logits: np.ndarray) -> np.ndarray:
    """What transformers draws from the softmax of."""
    import torch

    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    return (
        TopPLogitsWarper(sampling.top_p)(None, scores) if sampling.top_p < 1 else scores
    ).numpy()


@pytest.mark.parametrize("sampling", KINDS)
def test_the_tokens_that_may_be_drawn_are_those_that_transformers_keeps(sampling):
    logits = np.random.default_rng(1).normal(0, 3, (50, VOCAB)).astype(np.float32)
    here = keep(sampling, jnp.asarray(logits / sampling.temperature))
    np.testing.assert_allclose(here, scores_there(sampling, logits), rtol=1e-6)


@pytest.mark.parametrize("sampling", KINDS)
def test_each_token_is_drawn_as_often_as_its_share(sampling):
    rows = jnp.arange(DRAWS, dtype=jnp.int32)
    drawn = jax.jit(partial(choose, sampling))(jnp.tile(LOGITS, (DRAWS, 1)), rows, jnp.int32(2))
    scores = scores_there(sampling, LOGITS[None])[0].astype(np.float64)
    share = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    count = np.bincount(np.asarray(drawn), minlength=VOCAB)
    assert not count[share == 0].any()
    likely = share * DRAWS >= 5
    chi2 = ((count - share * DRAWS)[likely] ** 2 / (share * DRAWS)[likely]).sum()
    # With n degrees of freedom, n + 4 sqrt(2 n) is hardly ever exceeded by chance; the seeds are
    # fixed.
    free = max(likely.sum() - 1, 1)
    assert chi2 < free + 4 * np.sqrt(2 * free)


def test_a_row_draws_by_its_number_its_place_and_the_seed_alone():
    logits = jnp.tile(LOGITS, (64, 1))
    rows = jnp.arange(64, dtype=jnp.int32)

    def draw(seed: int, rows: jnp.ndarray, place: int) -> np.ndarray:
        return np.asarray(choose(Sampling(1.0, seed=seed), logits[: len(rows)], rows, place))

    first = draw(0, rows, 3)
    np.testing.assert_array_equal(first, draw(0, rows, 3))
    np.testing.assert_array_equal(first[[7, 60, 2]], draw(0, jnp.array([7, 60, 2], jnp.int32), 3))
    assert (first != draw(1, rows, 3)).any()
    assert (first != draw(0, rows, 4)).any()
    assert len(set(first.tolist())) > 5


def test_temperature_zero_is_the_most_likely_token():
    logits = np.random.default_rng(2).normal(size=(9, VOCAB)).astype(np.float32)
    chosen = choose(Sampling(), jnp.asarray(logits), jnp.zeros(9, jnp.int32), jnp.int32(0))
    np.testing.assert_array_equal(chosen, logits.argmax(-1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": -2}, "top_k=-2"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "seed": -1}, "seed=-1"),
        ({"top_p": 0.5}, "give a temperature"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        Sampling(**given)
