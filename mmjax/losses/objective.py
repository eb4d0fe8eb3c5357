"""Compute the text loss of a step: cross-entropy, or a loss of several answers to a prompt.

Such answers are branches of one sample: what they share is encoded and attended once, and no answer
sees another. Their log-probabilities come from one forward pass, those of a frozen reference from
the data or from a second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.batch import Microbatch, TextBatch
from mmjax.config import LossConfig
from mmjax.config.model import adapted_modules
from mmjax.losses import ANSWER_LOSSES
from mmjax.losses.cross_entropy import losses_in_chunks, mean_loss, mean_loss_in_chunks
from mmjax.models.dropout import Noise
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, Outputs, restrict
from mmjax.models.piece import Values
from mmjax.models.stage import REFERENCE, Stage

Measures = dict[str, jax.Array]  # float32 [R, T], times the tokens' loss weights; TRL's names


def measures_of(loss: LossConfig) -> tuple[str, ...]:
    """Name the metrics beside the loss."""
    return tuple(ANSWER_LOSSES[loss.kind].measures(loss)) if loss.is_branched else ()


def mean_measures(loss: LossConfig, sums: Mapping[str, Any], weight: float) -> dict[str, float]:
    """Compute mean metrics from their sums over a step's tokens; metrics of no tokens are left out.

    weight: sum of the tokens' loss weights.
    """
    if not loss.is_branched:
        return {}
    weights = {
        name: sums[divisor] if divisor else weight
        for name, divisor in ANSWER_LOSSES[loss.kind].measures(loss).items()
    }
    return {name: float(sums[name] / total) for name, total in weights.items() if total > 0}


@dataclass(frozen=True, eq=False)
class TextObjective:
    """The loss of text as a pure function of parameters and a microbatch, the frozen reference's pass included."""

    model: Model
    loss: LossConfig
    chunks: int  # parts of the logits that are computed one after the other
    reference: Model | None = None  # without adapters, where it runs in the step

    @classmethod
    def of(cls, model: Model, loss: LossConfig, chunks: int) -> TextObjective:
        """Build the objective of a config, with the model's stacks."""
        reference = None
        if loss.repeats_forward:
            config = replace(model.config, lora={})
            cuts = {
                name: tuple(run.start for run in runs if run.start)
                for name, runs in model.runs.items()
            }
            reference = Model.build(config, model.dtype, cuts, model.functions)
        return cls(model, loss, chunks, reference)

    def __call__(
        self, params: Params, batch: Microbatch, noise: Noise | None = None
    ) -> tuple[Outputs, jax.Array, Measures]:
        """Compute the whole model's outputs, and every token's weighted loss `[R, T]`."""
        stage = Stage.whole(self.model)
        values, seed, reference = self.run(stage, params, {}, batch, noise)
        # Gradients that scans accumulate reach the loss through `seed` (`Stage.run`).
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

        What the reference's pass makes for other stages is among the values, under the name of what
        the stage makes for them with `REFERENCE` behind it.
        """
        if self.reference is None:
            return *stage.run(params, inputs, batch, noise, accumulators), None
        # Three runs: `once`, of encoders without adapters, whose tokens both passes read; `twice`
        # with the adapters; and its towers again without, from the same parameters less the
        # adapters'. The last one's values leave the stage under names of their own.
        once, twice = stage.split({*self.model.config.encoders} - self.repeated)
        reference = twice.of(self.reference)
        frozen = restrict(params, self.reference.abstract)
        twins = {
            name.removesuffix(REFERENCE): x
            for name, x in inputs.items()
            if name.endswith(REFERENCE)
        }
        inputs = {name: x for name, x in inputs.items() if not name.endswith(REFERENCE)}
        inputs |= once.of(self.reference).run(frozen, inputs, batch)[0]
        values, seed = twice.run(params, inputs, batch, noise, accumulators)
        frozen_values, frozen_seed = reference.run(frozen, inputs | twins, batch)
        for name in stage.outputs:
            if name.endswith(REFERENCE):
                values[name] = frozen_values[name.removesuffix(REFERENCE)]
        return values, seed, reference.operands(frozen_values, frozen_seed)

    def step_loss(
        self,
        outputs: Outputs,
        text: TextBatch,
        total_weight: jax.Array,
        reference: Outputs | None = None,
    ) -> tuple[jax.Array, jax.Array, Measures]:
        """Compute a microbatch's part of the step's loss: the sum of `token_losses` / the weight of the whole step.

        Cross-entropy is smoothed here alone, so that evaluations of any smoothing compare. Also
        returns what `token_losses` does, without gradients.
        """
        if not self.loss.is_branched:
            form = self.chunks, self.model.config.llm.logit_cap, self.loss.label_smoothing
            operands = outputs.hidden, outputs.table, text, total_weight
            return *mean_loss_in_chunks(*operands, *form), {}
        losses, measures = self.token_losses(outputs, text, reference)
        return mean_loss(losses, total_weight), jax.lax.stop_gradient(losses), measures

    def token_losses(
        self, outputs: Outputs, text: TextBatch, reference: Outputs | None = None
    ) -> tuple[jax.Array, Measures]:
        """Compute every token's weighted loss and measures, float32 `[R, T]`, 0 where its weight is."""
        if not self.loss.is_branched:
            return self._cross_entropy(outputs, text), {}
        # Answers are compared by plain log-probabilities: weights come in at the very end.
        trained = text.weight > 0
        ones = text._replace(weight=trained.astype(jnp.float32))
        log_probs = -self._cross_entropy(outputs, ones)
        if reference is not None:
            stored = -jax.lax.stop_gradient(self._cross_entropy(reference, ones))
        else:
            stored = text.loss_inputs.get("reference_log_probs", jnp.zeros_like(log_probs))
        compute = ANSWER_LOSSES[self.loss.kind].token_losses
        losses, measures = compute(log_probs, jnp.where(trained, stored, 0.0), text, self.loss)
        losses, measures = jax.tree.map(
            lambda x: jnp.where(trained, text.weight * x, 0.0), (losses, measures)
        )
        return losses, jax.lax.stop_gradient(measures)

    def _cross_entropy(self, outputs: Outputs, text: TextBatch) -> jax.Array:
        cap = self.model.config.llm.logit_cap
        return losses_in_chunks(outputs.hidden, outputs.table, text, self.chunks, cap)
