"""Route tokens to experts: the router's choice, and the sums of which its losses and the imbalance are made."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.config import ExpertsConfig


class RouterArrays(NamedTuple):
    """The parameters of a router."""

    weight: Float[Array, "d e"]
    correction: Float[Array, " e"] | None  # added to the scores of experts when they are chosen
    bias: Float[Array, " e"] | None
    input_scale: Float[Array, " d"] | None  # of the router's inputs, beside 1 / sqrt(d)
    expert_input_scale: Float[Array, " d"] | None
    share_scale: Float[Array, " e"] | None  # of the weights of each expert


class Routes(NamedTuple):
    """The experts of every token, and the weights of their outputs."""

    expert: Int[Array, "n k"]  # the number of experts where a position is padding
    share: Float[Array, "n k"]


class Routing(NamedTuple):
    """Sums over the tokens of a layer, float32; of several layers, with a leading axis."""

    tokens: Float[Array, "*l e"]  # that each expert got
    probability: Float[Array, "*l e"]  # of each expert
    squares: Float[Array, "*l"]  # of the log-sum-exp of the router's logits
    count: Float[Array, "*l"]  # tokens
    # in which tokens went to the devices of their experts; 1 where all went at once
    turns: Float[Array, "*l"]


def pack(routing: Routing) -> Float[Array, "1 l s"]:
    """Put the sums of layers into one array, which goes from stage to stage."""
    numbers = (x[:, None] for x in (routing.squares, routing.count, routing.turns))
    return jnp.concatenate([routing.tokens, routing.probability, *numbers], axis=1)[None]


def unpack(packed: Float[Array, "1 l s"]) -> Routing:
    """Return the sums that `pack` has put into one array."""
    experts = (packed.shape[-1] - 3) // 2
    tokens, probability, numbers = jnp.split(packed[0], (experts, 2 * experts), axis=1)
    squares, count, turns = numbers.T
    return Routing(
        tokens=tokens, probability=probability, squares=squares, count=count, turns=turns
    )


def route(
    x: Float[Array, "n d"],
    router: RouterArrays,
    valid: Bool[Array, " n"],
    config: ExpertsConfig,
) -> tuple[Routes, Routing]:
    """Choose the experts of tokens in float32. valid: positions that are tokens; padding gets no expert.

    Groups of experts are chosen as in DeepSeek-V3 (2024, section 2.1.2).
    """
    width, experts = router.weight.shape
    correction = router.correction
    inputs = x.astype(jnp.float32)
    if router.input_scale is not None:
        inputs = inputs * (router.input_scale.astype(jnp.float32) * width**-0.5)
    logits = jnp.matmul(
        inputs, router.weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if router.bias is not None:
        logits = logits + router.bias.astype(jnp.float32)
    probability = jax.nn.softmax(logits)
    scores = probability if config.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    _, expert = jax.lax.top_k(_of_chosen_groups(choice, config), config.per_token)
    share = jnp.take_along_axis(scores, expert, axis=-1)
    if config.normalized:
        share = share / share.sum(-1, keepdims=True)
    share = share * config.scale
    if router.share_scale is not None:
        share = share * router.share_scale.astype(jnp.float32)[expert]
    expert = jnp.where(valid[:, None], expert, experts)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    routing = Routing(
        # Not scattered: sums of floats in no fixed order would differ from run to run on a GPU.
        tokens=(expert[..., None] == jnp.arange(experts)).sum((0, 1), dtype=jnp.float32),
        probability=jnp.where(valid[:, None], probability, 0).sum(0),
        squares=jnp.where(valid, squares, 0).sum(),
        count=valid.sum(dtype=jnp.float32),
        turns=jnp.ones(()),
    )
    return Routes(expert, share), routing


def _of_chosen_groups(scores: Float[Array, "n e"], config: ExpertsConfig) -> Float[Array, "n e"]:
    """Leave the scores of experts of the chosen groups; others become minus infinity."""
    if config.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), config.groups, -1)
    best = jax.lax.top_k(grouped, config.group_best)[0].sum(-1)
    _, chosen = jax.lax.top_k(best, config.chosen_groups)
    is_chosen = (chosen[..., None] == jnp.arange(config.groups)).any(1)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def balance_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the loss that balances experts (Fedus et al. 2021, "Switch Transformers"), over all layers together.

    The number of experts times the sum over them of their tokens times their probability, both per
    token of a layer: `per_token` where all experts get the same, and more where not.
    """
    # 8 experts, 2 a token, all alike: 8 * 8 * (2 / 8 * 1 / 8) = 2.
    count = jnp.maximum(routing.count.sum(), 1)
    shares = routing.tokens.sum(0) / count * (routing.probability.sum(0) / count)
    return shares.sum() * routing.tokens.shape[-1]


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the mean squared log-sum-exp of the logits (Zoph et al. 2022, "ST-MoE"), over tokens and layers."""
    return routing.squares.sum() / jnp.maximum(routing.count.sum(), 1)
