"""Odds ratio preference optimisation: learn the chosen answer, and by the ratio of its odds to the rejected one's.

The loss of a pair is -c - beta * log sigmoid(log odds(c) - log odds(r)), where c and r are the mean
log-probabilities of the chosen answer's tokens and the rejected one's, and odds(x) = exp(x) / (1 -
exp(x)) (Hong et al. 2024, equations 3 to 7). There is no reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.config.losses import Orpo
from mmjax.losses.dpo import CHOSEN, REJECTED
from mmjax.models.sample_totals import sample_totals

_MAX_LOG_PROB = -1e-6  # of an answer that is certain, whose odds are infinite


def measures(config: Orpo) -> dict[str, str]:
    """Name the metrics beside the loss, all of them means over the pairs."""
    rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    odds_names = ("logps/chosen", "logps/rejected", "nll_loss", "log_odds_ratio", "log_odds_chosen")
    return dict.fromkeys([*rewards, *odds_names], "")


def token_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Orpo
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute at every token `[R, T]` its pair's loss and measures.

    log_probs: of every token `[R, T]`, 0 where it isn't trained. reference: not read.
    """
    trained = (text.weight > 0).astype(jnp.float32)
    answers = text.kind == CHOSEN, text.kind == REJECTED
    # In order: log-probabilities of the chosen and the rejected answer, then their token counts.
    sums = sample_totals(
        [jnp.where(answer, x, 0.0) for x in (log_probs, trained) for answer in answers], text
    )
    better, worse = (
        total / jnp.maximum(count, 1) for total, count in zip(sums[:2], sums[2:], strict=True)
    )
    log_odds = _log_odds(better) - _log_odds(worse)
    ratio = jax.nn.log_sigmoid(log_odds)
    values = {
        "rewards/chosen": config.beta * better,
        "rewards/rejected": config.beta * worse,
        "rewards/margins": config.beta * (better - worse),
        "rewards/accuracies": (better > worse).astype(jnp.float32),
        "logps/chosen": better,
        "logps/rejected": worse,
        "nll_loss": -better,
        "log_odds_ratio": ratio,
        "log_odds_chosen": log_odds,
    }
    return -better - config.beta * ratio, values


def _log_odds(log_prob: jax.Array) -> jax.Array:
    # log(p / (1 - p)) with p = e^x. expm1, since 1 - e^x cancels where p is nearly 1.
    log_prob = jnp.minimum(log_prob, _MAX_LOG_PROB)
    return log_prob - jnp.log(-jnp.expm1(log_prob))
