"""Kahneman-Tversky optimisation: make good answers likelier than the reference does, and bad ones less likely.

The loss of an answer is w * (1 - sigmoid(beta * s * ((y - y_ref) - kl))), where y is the sum of
log-probabilities of its tokens, s is 1 for a good answer and -1 for a bad one, and w is the weight
of its kind (Ethayarajh et al. 2024, equations 7 and 8). kl is the mean of y - y_ref over the
microbatch's samples, each with another record's answer, but at least 0; it has no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmjax.batch import FIRST_BRANCH_BIT, TextBatch
from mmjax.config.losses import Kto
from mmjax.models.sample_totals import sample_totals

# `TextBatch.kind` of a sample's answers
JUDGED, MISMATCHED = (1 << FIRST_BRANCH_BIT + k for k in range(2))


def measures(config: Kto) -> dict[str, str]:
    """Name the metrics beside the loss: means over good answers, over bad ones, and over all."""
    of_kinds = {
        f"{what}/{kind}": f"share/{kind}"
        for kind in ("chosen", "rejected")
        for what in ("rewards", "logps")
    }
    of_all = [
        "share/chosen",
        "share/rejected",
        *(["kl", "logps/kl"] if config.loss_type == "kto" else []),
    ]
    return of_kinds | dict.fromkeys(of_all, "")


def token_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Kto
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute at every token `[R, T]` its answer's loss and measures.

    log_probs, reference: of every token `[R, T]`, 0 where it isn't trained; of the reference only
    the sum over an answer counts, wherever in it.
    """
    label = text.loss_inputs["labels"]
    judged = text.kind == JUDGED
    mismatched = (text.kind == MISMATCHED) & (text.weight > 0)
    ratios = log_probs - reference
    answers = [jnp.where(judged, ratios, 0.0), jnp.where(judged, log_probs, 0.0)]
    if config.loss_type == "kto":
        answers += [jnp.where(mismatched, log_probs, 0.0), mismatched.astype(jnp.float32)]
    ratio, log_prob, *of_others = sample_totals(answers, text)
    kl = jnp.zeros(())
    values = {}
    if config.loss_type == "kto":
        other_log_prob, count = of_others
        # Each of a sample's n mismatched tokens counts 1 / n, so all of them count as one sample.
        samples = jnp.where(mismatched, 1 / jnp.maximum(count, 1), 0.0).sum()
        kl = jnp.where(mismatched, ratios, 0.0).sum() / jnp.maximum(samples, 1)
        kl = jax.lax.stop_gradient(jnp.maximum(kl, 0.0))
        values = {"kl": jnp.broadcast_to(kl, label.shape), "logps/kl": other_log_prob}
    weight = jnp.where(label > 0, config.desirable_weight, config.undesirable_weight)
    losses = weight * (1 - jax.nn.sigmoid(config.beta * label * (ratio - kl)))
    for kind, is_kind in (("chosen", label > 0), ("rejected", label < 0)):
        share = is_kind.astype(jnp.float32)
        values |= {
            f"rewards/{kind}": config.beta * ratio * share,
            f"logps/{kind}": log_prob * share,
        }
        values[f"share/{kind}"] = share
    return losses, values
