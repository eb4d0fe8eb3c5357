"""Compute what a step trains on of text: cross-entropy, preferences between pairs of answers, or rewards of answers.

The answers to a prompt are branches of one sample: what they share is encoded and attended once, and no answer sees
another. A pair's loss is -log sigmoid(beta * ((c - c_ref) - (r - r_ref))), where c and r are sums of log-probabilities
of the chosen answer's tokens and the rejected one's (DPO, Rafailov et al. 2023, equation 7). Rewards come with answers
that a model has drawn, and the loss is PPO's (Schulman et al. 2017, equation 7), of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from mmjax.batch import FIRST_BRANCH_BIT, Microbatch, TextBatch
from mmjax.config import CrossEntropy, Dpo, Grpo, LossConfig
from mmjax.config.model import adapted_modules
from mmjax.config.training import repeats_forward
from mmjax.models.dropout import Noise
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, Outputs, restrict
from mmjax.models.stage import REFERENCE, Stage, Values
from mmjax.parallel.sharding import in_row_order
from mmjax.runtime.losses import losses_in_chunks

CHOSEN, REJECTED = (1 << FIRST_BRANCH_BIT + k for k in range(2))  # `TextBatch.kind` of a pair's answers

Measures = dict[str, jax.Array]  # float32 [R, T], times the tokens' loss weights; TRL's names


def measures_of(loss: LossConfig) -> tuple[str, ...]:
    """Name what is measured beside the loss, in means over the pairs or tokens of a step."""
    if isinstance(loss, Dpo):
        rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
        return (*rewards, "logps/chosen", "logps/rejected")
    if isinstance(loss, Grpo):
        return ("clip_ratio", *(("kl",) if loss.beta else ()))
    return ()


@dataclass(frozen=True, eq=False)
class TextObjective:
    """The loss of text as a pure function of parameters and a microbatch, the frozen reference's pass included."""

    model: Model
    loss: LossConfig
    chunks: int  # parts of the vocabulary whose logits are computed one after the other
    reference: Model | None = None  # without adapters, where it runs in the step

    @classmethod
    def of(cls, model: Model, loss: LossConfig, chunks: int) -> TextObjective:
        """Build the objective of a config, with the model's stacks."""
        reference = None
        if repeats_forward(loss):
            config = replace(model.config, lora={})
            cuts = {name: tuple(run.start for run in runs if run.start) for name, runs in model.runs.items()}
            reference = Model.build(config, model.dtype, cuts, model.functions)
        return cls(model, loss, chunks, reference)

    def __call__(
        self, params: Params, batch: Microbatch, noise: Noise | None = None
    ) -> tuple[Outputs, jax.Array, Measures]:
        """Compute the whole model's outputs, and every token's weighted loss `[R, T]`."""
        stage = Stage.whole(self.model)
        values, seed, reference = self.run(stage, params, {}, batch, noise)
        outputs = stage.operands(values, seed)
        return outputs, *self.token_losses(outputs, batch.text, reference)

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Name the towers that run again in the reference's pass: the LLM, and encoders that have adapters.

        Encoders without adapters run once for both passes, as all other parameters are frozen.
        """
        if self.reference is None:
            return frozenset()
        adapted = {module.partition(".")[0] for module in adapted_modules(self.model.config)}
        return frozenset({"llm", *adapted})

    def run(
        self,
        stage: Stage,
        params: Params,
        inputs: Mapping[str, jax.Array],
        batch: Microbatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> tuple[Values, Callable[[jax.Array], jax.Array], Outputs | None]:
        """Run a stage as `Stage.run`; also return the outputs of the frozen reference, where there is one.

        What the reference's pass makes for other stages is among the values, under the name of what the stage makes for
        them with `REFERENCE` behind it.
        """
        if self.reference is None:
            return *stage.run(params, inputs, batch, noise, accumulators), None
        once, twice = stage.split({*self.model.config.encoders} - self.repeated)
        reference = twice.of(self.reference)
        frozen = restrict(params, self.reference.abstract)
        twins = {name.removesuffix(REFERENCE): x for name, x in inputs.items() if name.endswith(REFERENCE)}
        inputs = {name: x for name, x in inputs.items() if not name.endswith(REFERENCE)}
        inputs |= once.of(self.reference).run(frozen, inputs, batch)[0]
        values, seed = twice.run(params, inputs, batch, noise, accumulators)
        frozen_values, frozen_seed = reference.run(frozen, inputs | twins, batch)
        for name in stage.outputs:
            if name.endswith(REFERENCE):
                values[name] = frozen_values[name.removesuffix(REFERENCE)]
        return values, seed, reference.operands(frozen_values, frozen_seed)

    def token_losses(
        self, outputs: Outputs, text: TextBatch, reference: Outputs | None = None
    ) -> tuple[jax.Array, Measures]:
        """Compute every token's weighted loss and measures, float32 `[R, T]`, 0 where its weight is."""
        if isinstance(self.loss, CrossEntropy):
            return self._cross_entropy(outputs, text), {}
        trained = text.weight > 0
        ones = text._replace(weight=trained.astype(jnp.float32))
        log_probs = -self._cross_entropy(outputs, ones)
        if reference is not None:
            stored = -jax.lax.stop_gradient(self._cross_entropy(reference, ones))
        else:
            stored = text.loss_inputs.get("reference_log_probs", jnp.zeros_like(log_probs))
        compute = preference_losses if isinstance(self.loss, Dpo) else policy_losses
        losses, measures = compute(log_probs, jnp.where(trained, stored, 0.0), text, self.loss)
        losses, measures = jax.tree.map(lambda x: jnp.where(trained, text.weight * x, 0.0), (losses, measures))
        return losses, jax.lax.stop_gradient(measures)

    def _cross_entropy(self, outputs: Outputs, text: TextBatch) -> jax.Array:
        cap = self.model.config.llm.logit_cap
        return losses_in_chunks(outputs.hidden, outputs.table, text, self.chunks, cap)


def preference_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Dpo
) -> tuple[jax.Array, Measures]:
    """Compute at every token `[R, T]` its pair's loss and measures.

    log_probs, reference: of every token `[R, T]`, 0 where it isn't trained; of the reference only the sum over an
    answer counts, wherever in it.
    """
    chosen, rejected = text.kind == CHOSEN, text.kind == REJECTED
    ratios = log_probs - reference
    trained = (text.weight > 0).astype(jnp.float32)
    of_answers = [jnp.where(answer, x, 0.0) for x in (ratios, log_probs, trained) for answer in (chosen, rejected)]
    better, worse, better_log_prob, worse_log_prob, *counts = sample_totals(of_answers, text)
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


def policy_losses(
    log_probs: jax.Array, reference: jax.Array, text: TextBatch, config: Grpo
) -> tuple[jax.Array, Measures]:
    """Compute every token's loss `[R, T]` and measures. Arguments as of `preference_losses`, the reference by token."""
    advantage = text.loss_inputs["advantages"]
    ratio = jnp.exp(jnp.where(text.weight > 0, log_probs - text.loss_inputs["old_log_probs"], 0.0))
    clipped = jnp.clip(ratio, 1 - config.epsilon, 1 + config.epsilon_high)
    losses = -jnp.minimum(ratio * advantage, clipped * advantage)
    values = {"clip_ratio": (clipped * advantage < ratio * advantage).astype(jnp.float32)}
    if config.beta:
        # An estimate without bias that is never negative (Schulman 2020, k3).
        values["kl"] = jnp.exp(reference - log_probs) - (reference - log_probs) - 1
        losses += config.beta * values["kl"]
    return losses, values


def sample_totals(values: Sequence[jax.Array], text: TextBatch) -> jax.Array:
    """Add up each of these arrays `[R, T]` over the tokens of every sample: `[n, R, T]`, at all of its tokens."""

    def totals(sums: jax.Array, sample: jax.Array) -> jax.Array:
        is_last = jnp.concatenate([sample[:, 1:] != sample[:, :-1], jnp.ones_like(sample[:, :1], bool)], axis=1)
        last = jnp.where(is_last, _running_sums(sums, sample), 0.0)
        return _running_sums(last[..., ::-1], sample[:, ::-1])[..., ::-1]

    return in_row_order(totals, text.pos, jnp.stack(values), text.sample)


def _running_sums(values: jax.Array, sample: jax.Array) -> jax.Array:
    """Add up from each sample's first token to every position, `[n, R, T]`; a sample's tokens stand side by side."""
    # By 1, 2, 4, ... tokens, so that no rounding depends on what else is in the row, and NaN passes to no other sample.
    step = 1
    while step < sample.shape[1]:
        earlier = jnp.where(sample[:, step:] == sample[:, :-step], values[..., :-step], 0.0)
        values = values.at[..., step:].add(earlier)
        step *= 2
    return values
