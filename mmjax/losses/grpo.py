"""Policy optimisation by rewards of answers that a model has drawn: PPO's clipped objective of every token.

Schulman et al. 2017, equation 7; advantages are the data's (GRPO, Shao et al. 2024; DAPO, Yu et al.
2025).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.config.losses import Grpo


def measures(config: Grpo) -> dict[str, str]:
    """Name the metrics beside the loss, all of them means over the tokens."""
    return dict.fromkeys(("clip_ratio", *(("kl",) if config.beta else ())), "")


def token_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Grpo
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute every token's loss `[R, T]` and measures.

    log_probs, reference: of every token `[R, T]`, 0 where it isn't trained.
    """
    advantage = text.loss_inputs["advantages"]
    # 0 instead of the log-ratio where nothing is trained: exp of anything large would be infinite,
    # and its gradient NaN even where the weight is 0.
    ratio = jnp.exp(jnp.where(text.weight > 0, log_probs - text.loss_inputs["old_log_probs"], 0.0))
    clipped = jnp.clip(ratio, 1 - config.epsilon, 1 + config.epsilon_high)
    # The lower of both, so that clipping takes the gradient away only where the policy has already
    # moved far enough the way the advantage points.
    losses = -jnp.minimum(ratio * advantage, clipped * advantage)
    values = {"clip_ratio": (clipped * advantage < ratio * advantage).astype(jnp.float32)}
    if config.beta:
        # An estimate without bias that is never negative (Schulman 2020, k3).
        values["kl"] = jnp.exp(reference - log_probs) - (reference - log_probs) - 1
        losses += config.beta * values["kl"]
    return losses, values
