"""Add up values of tokens over the samples of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.parallel.sharding import in_row_order


def sample_totals(values: Sequence[jax.Array], text: TextBatch) -> jax.Array:
    """Add up each of these arrays `[R, T]` over the tokens of every sample: `[n, R, T]`, at all of its tokens."""

    def totals(sums: jax.Array, sample: jax.Array) -> jax.Array:
        # Samples a a a b b with values 1 2 3 4 5: running sums 1 3 6 4 9, of which the last ones
        # 0 0 6 0 9 summed from the right give 6 6 6 9 9.
        last = jnp.where(ends_sample(sample), _running_sums(sums, sample), 0.0)
        return _running_sums(last[..., ::-1], sample[:, ::-1])[..., ::-1]

    return in_row_order(totals, text.pos, jnp.stack(values), text.sample)


def ends_sample(sample: jax.Array) -> jax.Array:
    """Return whether each token is the last of its sample, bool `[R, T]`."""
    return jnp.concatenate(
        [sample[:, 1:] != sample[:, :-1], jnp.ones_like(sample[:, :1], bool)], axis=1
    )


def _running_sums(values: jax.Array, sample: jax.Array) -> jax.Array:
    """Add up from each sample's first token to every position, `[n, R, T]`; a sample's tokens stand side by side."""
    # By 1, 2, 4, ... tokens, so that no rounding depends on what else is in the row, and NaN passes
    # to no other sample. Before a step of s, each position has the sum of its last s tokens.
    step = 1
    while step < sample.shape[1]:
        earlier = jnp.where(sample[:, step:] == sample[:, :-step], values[..., :-step], 0.0)
        values = values.at[..., step:].add(earlier)
        step *= 2
    return values
