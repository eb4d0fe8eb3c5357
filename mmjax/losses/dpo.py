"""Direct preference optimisation: compare a chosen answer with a rejected one.

The loss of a pair is -log sigmoid(beta * ((c - c_ref) - (r - r_ref))), where c and r are sums of
log-probabilities of the chosen answer's tokens and the rejected one's (Rafailov et al. 2023,
equation 7).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmjax.batch import FIRST_BRANCH_BIT, TextBatch
from mmjax.config.losses import Dpo
from mmjax.models.sample_totals import sample_totals

# `TextBatch.kind` of a pair's answers
CHOSEN, REJECTED = (1 << FIRST_BRANCH_BIT + k for k in range(2))


def measures(config: Dpo) -> dict[str, str]:
    """Name the metrics beside the loss, all of them means over the pairs."""
    rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    return dict.fromkeys([*rewards, "logps/chosen", "logps/rejected"], "")


def token_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Dpo
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute at every token `[R, T]` its pair's loss and measures.

    log_probs, reference: of every token `[R, T]`, 0 where it isn't trained; of the reference only
    the sum over an answer counts, wherever in it.
    """
    chosen, rejected = text.kind == CHOSEN, text.kind == REJECTED
    ratios = log_probs - reference
    trained = (text.weight > 0).astype(jnp.float32)
    # A pair is one sample, its answers two branches of it: six sums over the sample, each at all of
    # its tokens, so that the chosen answer's tokens know the rejected one's sums as well.
    answers = [
        jnp.where(answer, x, 0.0)
        for x in (ratios, log_probs, trained)
        for answer in (chosen, rejected)
    ]
    better, worse, better_log_prob, worse_log_prob, *counts = sample_totals(answers, text)
    lengths = [jnp.maximum(n, 1) if config.loss_type == "sigmoid_norm" else 1.0 for n in counts]
    losses = -jax.nn.log_sigmoid(config.beta * (better / lengths[0] - worse / lengths[1]))
    values = {
        "rewards/chosen": config.beta * better,
        "rewards/rejected": config.beta * worse,
        "rewards/margins": config.beta * (better - worse),
        "rewards/accuracies": (better > worse).astype(jnp.float32),
        "logps/chosen": better_log_prob,
        "logps/rejected": worse_log_prob,
    }
    return losses, values
