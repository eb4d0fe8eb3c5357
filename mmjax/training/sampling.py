"""Which token comes next: the most likely one, or one drawn at random, by the row's own number and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mmjax.errors import UserError

IMPL = "threefry2x32"  # named, since other generators give other bits under vmap


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. First the `top_k` most likely are kept, then of these the fewest with `top_p` in all."""

    temperature: float = 0.0  # 0 = the most likely token
    top_k: int = 0  # 0 = all of them
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature={self.temperature}: choose 0 (the most likely token) or more")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: choose 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: choose more than 0, and at most 1")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed}: choose 0 to {2**31 - 1}")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError("top_k and top_p choose nothing at temperature 0; give a temperature as well")


def choose(sampling: Sampling, logits: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
    """The next token int32 `[B]`, by logits float32 `[B, V]`. row: int32 `[B]`, the number of each row's prompt.

    place: int32 `[]`, the answer's tokens before this one.
    """
    if not sampling.temperature:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = keep(sampling, logits / sampling.temperature)
    seed = jax.random.key(sampling.seed, impl=IMPL)

    def noise(row: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(seed, row), place)
        return jax.random.gumbel(key, logits.shape[-1:], logits.dtype)

    # The largest of scores with Gumbel noise is a draw from their softmax.
    return jnp.argmax(kept + jax.vmap(noise)(row), axis=-1).astype(jnp.int32)


def keep(sampling: Sampling, scores: jax.Array) -> jax.Array:
    """Scores `[B, V]` with -inf for the tokens that are not drawn; equal ones stay together."""
    if 0 < sampling.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if sampling.top_p < 1:
        ordered = jnp.sort(scores, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        likelier = jnp.cumsum(share, axis=-1) - share
        least = jnp.min(jnp.where(likelier < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return scores
