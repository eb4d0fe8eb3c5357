"""Losses of text: the settings of each, and what data, planning and the step ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from mmjax.config.ranges import Fraction, NonNegativeFloat, PositiveFloat

# What a record holds of answers: the last of a conversation, a chosen and a rejected one, one that
# is good or bad, or some that a model has drawn. `data.sources.answers` reads each.
Answers = Literal["one", "pair", "judged", "rollouts"]
# Where log-probabilities of the frozen reference come from: a second forward pass without adapters,
# the data, or none.
Reference = Literal["adapters_off", "stored", "none"]

PAIR = {1: "a chosen answer", 2: "a rejected one"}  # branches


class _Loss:
    """Facts that other parts of mmjax need of a loss."""

    kind: str
    answers: ClassVar[Answers]
    # kinds of sources that hold such answers and no others; (): conversations
    sources: ClassVar[tuple[str, ...]] = ()
    # that each sample has, with what is in them; {}: any
    branches: ClassVar[Mapping[int, str]] = {}
    # what it reads of every token of an answer beside its weight
    token_inputs: ClassVar[tuple[str, ...]] = ()

    @property
    def is_branched(self) -> bool:
        """Tell whether a sample's answers are branches, each of which sees the prompt and itself."""
        return self.answers != "one"

    @property
    def has_reference(self) -> bool:
        """Tell whether the loss compares the model with a frozen one."""
        return getattr(self, "reference", "none") != "none" and self.beta > 0

    @property
    def repeats_forward(self) -> bool:
        """Tell whether a step runs the model a second time without its adapters."""
        return self.has_reference and self.reference == "adapters_off"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Name what the loss reads of every token of an answer beside its weight."""
        stored = self.has_reference and self.reference == "stored"
        return (*self.token_inputs, *(("reference_log_probs",) if stored else ()))


@dataclass(frozen=True)
class CrossEntropy(_Loss):
    """Cross-entropy of every trained token."""

    answers: ClassVar[Answers] = "one"
    # share of a target's probability that all tokens get alike; not in evaluations
    label_smoothing: Fraction = 0.0
    kind: Literal["cross_entropy"] = "cross_entropy"


@dataclass(frozen=True)
class Dpo(_Loss):
    """Direct preference optimisation (Rafailov et al. 2023) of pairs of a chosen and a rejected answer."""

    answers: ClassVar[Answers] = "pair"
    sources: ClassVar[tuple[str, ...]] = ("preference",)
    branches: ClassVar[Mapping[int, str]] = PAIR
    # factor of the log-ratios to the reference: larger stays closer to it
    beta: PositiveFloat = 0.1
    # sigmoid_norm: an answer's log-ratio is the mean over its tokens (Tulu 3), not their sum.
    loss_type: Literal["sigmoid", "sigmoid_norm"] = "sigmoid"
    # stored: ref_chosen_logps and ref_rejected_logps of every record
    reference: Reference = "adapters_off"
    kind: Literal["dpo"] = "dpo"


@dataclass(frozen=True)
class Orpo(_Loss):
    """Odds ratio preference optimisation (Hong et al. 2024) of pairs, beside cross-entropy of the chosen answer."""

    answers: ClassVar[Answers] = "pair"
    sources: ClassVar[tuple[str, ...]] = ("preference",)
    branches: ClassVar[Mapping[int, str]] = PAIR
    # factor of the odds ratio's loss beside the cross-entropy: lambda in the paper
    beta: PositiveFloat = 0.1
    kind: Literal["orpo"] = "orpo"


@dataclass(frozen=True)
class Kto(_Loss):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024) of answers, each of which is good or bad."""

    answers: ClassVar[Answers] = "judged"
    sources: ClassVar[tuple[str, ...]] = ("preference",)
    token_inputs: ClassVar[tuple[str, ...]] = ("labels",)
    # factor of the log-ratios to the reference: larger stays closer to it
    beta: PositiveFloat = 0.1
    # apo_zero_unpaired: not compared with the KL divergence to the reference, which other records'
    # answers estimate (D'Oosterlinck et al. 2024).
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: PositiveFloat = 1.0  # of good answers
    undesirable_weight: PositiveFloat = 1.0  # of bad ones
    # stored: ref_logps, ref_KL_logps and kl_completion of every record
    reference: Reference = "adapters_off"
    kind: Literal["kto"] = "kto"

    @property
    def branches(self) -> dict[int, str]:
        return {1: "an answer"} | ({2: "another record's"} if self.loss_type == "kto" else {})


@dataclass(frozen=True)
class Grpo(_Loss):
    """A step of group relative policy optimisation on imported rollouts: PPO's clipped objective of every token."""

    answers: ClassVar[Answers] = "rollouts"
    sources: ClassVar[tuple[str, ...]] = ("rollouts",)
    token_inputs: ClassVar[tuple[str, ...]] = ("old_log_probs", "advantages")
    # how far a token's probability may fall below that it was drawn with, and still count
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat = 0.2  # the same above it; DAPO has 0.28
    # factor of the KL divergence to the reference; 0: none, and no reference
    beta: NonNegativeFloat = 0.0
    # the mean over all tokens of the step, or over answers' means
    loss_type: Literal["dapo", "grpo"] = "dapo"
    reference: Reference = "adapters_off"  # stored: ref_logprobs of every rollout
    kind: Literal["grpo"] = "grpo"


LOSSES = (CrossEntropy, Dpo, Orpo, Kto, Grpo)
LossConfig = CrossEntropy | Dpo | Orpo | Kto | Grpo

_ANY_ANSWERS = ("function", "dataset_info", "arrayrecord")  # sources that are read to know


def takes_answers(loss: LossConfig, source: Any) -> bool:
    """Tell whether a source holds, or may hold, the answers that a loss is of."""
    return source.kind in _ANY_ANSWERS or _is_of(loss, source)


def loss_of_source(source: Any, preferred: LossConfig = CrossEntropy()) -> LossConfig:
    """Choose a loss of the answers that a source holds, `preferred` if it is one, without a reference."""
    loss = next(loss for loss in (preferred, *(kind() for kind in LOSSES)) if _is_of(loss, source))
    return replace(loss, reference="none") if hasattr(loss, "reference") else loss


def _is_of(loss: LossConfig, source: Any) -> bool:
    if hasattr(source, "answers"):
        return source.answers == loss.answers
    of_answers = {kind for one in LOSSES for kind in one.sources}
    return source.kind in loss.sources if loss.sources else source.kind not in of_answers
