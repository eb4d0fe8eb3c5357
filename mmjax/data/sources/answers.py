"""Several answers to one prompt: their records, and the branches of a sample that they become.

A form of answers is what a record holds of them, and may be of several losses: `FORMS` has all. The
answers of a record share its prompt, which is tokenized once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mmjax.config import FileSource, LossConfig, PreferenceSource, RolloutsSource
from mmjax.config.losses import Answers, Dpo, Kto
from mmjax.data.sample import MAX_BRANCHES, BadSample, Conversation, Message, Rollout, Text
from mmjax.data.sources.answer_records import (
    JUDGED_REFERENCE,
    REFERENCE,
    parse_judged,
    parse_preference,
    parse_rollouts,
)
from mmjax.data.sources.chat_records import Record
from mmjax.data.storage.files import Unreadable
from mmjax.data.text.branching import Branching, Records, Weighted
from mmjax.data.text.chat import Chat

_OTHERS = 16  # records before one whose answers are tried, where some cannot be read


@dataclass(frozen=True)
class PairBranches(Branching):
    """A chosen answer in branch 1, a rejected one in branch 2."""

    def answered(self, conversation: Conversation) -> Sequence[Conversation]:
        if conversation.label is not None:
            raise BadSample(
                f"has an answer with a label, which loss={self.loss.kind} does not read: set loss=kto"
            )
        if conversation.rejected is None:
            raise BadSample(
                f"has no rejected answer, which loss={self.loss.kind} compares with the chosen one"
            )
        return [conversation, _with_rejected(conversation)]

    def texts(
        self,
        conversation: Conversation,
        answers: Sequence[Weighted],
        vocab: int,
    ) -> list[Text]:
        stored = "reference_log_probs" in self.loss.inputs
        if stored and len(conversation.reference) != 2:
            raise BadSample(
                "has no ref_chosen_logps and ref_rejected_logps, which loss.reference=stored reads; write them with "
                "mmjax.evaluate --log-probs"
            )
        return _weighted_texts(conversation, answers, stored)


@dataclass(frozen=True)
class JudgedBranches(Branching):
    """An answer that is good or bad in branch 1, and another record's in branch 2, where the loss reads it."""

    @property
    def _compares(self) -> bool:
        return len(self.loss.branches) > 1

    def read(self, records: Records, index: int) -> Conversation:
        conversation = records.conversation(index)
        stored = "reference_log_probs" in self.loss.inputs
        if (
            conversation.label is None
            or conversation.rejected is not None
            or stored
            or not self._compares
        ):
            return conversation
        # As in TRL, the answer of the record before it. Always the same one, so that runs resume.
        for back in range(1, min(len(records), 1 + _OTHERS)):
            try:
                neighbour = records.conversation((index - back) % len(records))
            except Unreadable:
                raise
            except BadSample:
                continue
            if neighbour.label is not None:
                return replace(conversation, rejected=replace(neighbour.messages[-1], weight=1.0))
        raise BadSample(
            f"has no other record before it whose answer loss={self.loss.kind} could compare its own with"
        )

    def answered(self, conversation: Conversation) -> Sequence[Conversation]:
        if conversation.label is None:
            raise BadSample(
                f"has no label, which says for loss={self.loss.kind} whether its answer is good"
            )
        if not self._compares:
            return [conversation]
        if conversation.rejected is None:
            raise BadSample(
                "has no kl_completion, whose ref_KL_logps loss.reference=stored reads; write both with "
                "mmjax.evaluate --log-probs"
            )
        return [conversation, _with_rejected(conversation)]

    def texts(
        self,
        conversation: Conversation,
        answers: Sequence[Weighted],
        vocab: int,
    ) -> list[Text]:
        stored = "reference_log_probs" in self.loss.inputs
        if stored and len(conversation.reference) < len(answers):
            missing = " and ".join(JUDGED_REFERENCE[: len(answers)])
            raise BadSample(
                f"has no {missing}, which loss.reference=stored reads; write them with mmjax.evaluate --log-probs"
            )
        label = 1.0 if conversation.label else -1.0
        return [
            replace(
                text, loss_inputs={"labels": np.full_like(text.weights, label), **text.loss_inputs}
            )
            for text in _weighted_texts(conversation, answers, stored)
        ]


def _with_rejected(conversation: Conversation) -> Conversation:
    """Return a conversation with the other answer in place of its last message."""
    return replace(conversation, messages=(*conversation.messages[:-1], conversation.rejected))


def _weighted_texts(
    conversation: Conversation, answers: Sequence[Weighted], stored: bool
) -> list[Text]:
    """Build a branch of each answer's tokens and weights, which sum to the weight of the last message.

    stored: whether the loss reads the reference's log-probabilities of the conversation.
    """
    count = sum(np.count_nonzero(weights) for _, weights in answers)
    weight = np.float32(conversation.messages[-1].weight / count)
    texts = []
    for number, (ids, weights) in enumerate(answers):
        # white space behind the last trained token isn't needed
        end = np.flatnonzero(weights)[-1] + 1
        inputs = {}
        if stored:
            # The loss reads their sum: the first trained token, behind the prompt's last, has it.
            values = np.zeros(end, np.float32)
            values[1] = conversation.reference[number]
            inputs["reference_log_probs"] = values
        texts.append(Text(ids[:end], weight * (weights[:end] > 0), loss_inputs=inputs))
    return texts


@dataclass(frozen=True)
class RolloutBranches(Branching):
    """An answer that a model has drawn in each branch."""

    def answered(self, conversation: Conversation) -> Sequence[Conversation]:
        if not conversation.rollouts:
            raise BadSample(
                f"has no rollouts (completion_ids, logprobs, advantages), which loss={self.loss.kind} trains on"
            )
        return ()

    def texts(
        self,
        conversation: Conversation,
        answers: Sequence[Weighted],
        vocab: int,
    ) -> list[Text]:
        ((last, _),) = answers
        rollouts = conversation.rollouts
        if len(rollouts) > MAX_BRANCHES:
            raise BadSample(
                f"has {len(rollouts)} answers, and a sample takes {MAX_BRANCHES}; divide it into several records, "
                "since every answer has an advantage of its own"
            )
        return [self._text(rollout, last, vocab) for rollout in rollouts]

    def _text(self, rollout: Rollout, last: np.ndarray, vocab: int) -> Text:
        """Build the branch of an answer. last: token of the prompt."""
        if (largest := max(rollout.tokens)) >= vocab:
            raise BadSample(f"has the token {largest} in an answer, and the tokenizer has {vocab}")
        count = len(rollout.tokens)
        if "reference_log_probs" in self.loss.inputs and len(rollout.reference) != count:
            raise BadSample("has no ref_logprobs of every token, which loss.reference=stored reads")
        mask = rollout.mask or (1,) * count
        weight = 1.0 if self.loss.loss_type == "dapo" else 1 / max(sum(mask), 1)
        values = {
            "old_log_probs": rollout.log_probs,
            "advantages": [rollout.advantage] * count,
            "reference_log_probs": rollout.reference,
        }
        return Text(
            np.concatenate([last, np.array(rollout.tokens, np.int32)]),
            np.array([0, *(weight * trained for trained in mask)], np.float32),
            loss_inputs={
                name: np.array([0, *values[name]], np.float32) for name in self.loss.inputs
            },
        )


@dataclass(frozen=True)
class AnswerForm:
    """Describe how records hold several answers, and what becomes of them."""

    source: type[FileSource]  # of JSON records
    columns: tuple[str, ...]  # of Parquet that must be there
    optional_columns: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], Record]
    branching: type[Branching]
    # Keys of a reference's log-probabilities, and the measures whose sum each is, of a loss that
    # measures them.
    log_probs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measured_by: LossConfig | None = None

    def beside(self, conversation: Conversation) -> dict[str, str]:
        """Return what is stored in a record beside log-probabilities: the other record's answer that one is of."""
        if conversation.label is None or conversation.rejected is None:
            return {}
        return {"kl_completion": "".join(conversation.rejected.parts)}

    def describe(self, log_probs: Collection[Mapping[str, float]]) -> str:
        """Say of what these log-probabilities are, and of pairs which answer is likelier."""
        if "ref_rejected_logps" not in self.log_probs:
            return "answers and as many of other records"
        better = [values["ref_chosen_logps"] > values["ref_rejected_logps"] for values in log_probs]
        return (
            f"pairs, the chosen answer likelier in {np.mean(better) if better else 0.0:.1%} of them"
        )

    @property
    def key(self) -> str:
        """Return the key by which such a record is known."""
        return next(column for column in self.columns if column != "prompt")


FORMS: Mapping[Answers, AnswerForm] = {
    "pair": AnswerForm(
        source=PreferenceSource,
        columns=("chosen", "rejected"),
        optional_columns=("prompt", *REFERENCE),
        parse=parse_preference,
        branching=PairBranches,
        log_probs={
            key: (f"logps/{answer}",)
            for key, answer in zip(REFERENCE, ("chosen", "rejected"), strict=True)
        },
        measured_by=Dpo(reference="none"),
    ),
    "judged": AnswerForm(
        source=PreferenceSource,
        columns=("prompt", "completion", "label"),
        optional_columns=("kl_completion", *JUDGED_REFERENCE),
        parse=parse_judged,
        branching=JudgedBranches,
        log_probs=dict(
            zip(JUDGED_REFERENCE, (("logps/chosen", "logps/rejected"), ("logps/kl",)), strict=True)
        ),
        measured_by=Kto(reference="none"),
    ),
    "rollouts": AnswerForm(
        source=RolloutsSource,
        columns=("prompt", "completion_ids", "logprobs", "advantages"),
        optional_columns=("ref_logprobs",),
        parse=parse_rollouts,
        branching=RolloutBranches,
    ),
}


def with_loss(chat: Chat, loss: LossConfig) -> Chat:
    """Return a chat whose conversations become what a loss is of."""
    branching = FORMS[loss.answers].branching(loss) if loss.is_branched else None
    return replace(chat, branching=branching)


def form_of(record: Mapping[str, Any]) -> AnswerForm | None:
    """Tell of which form of several answers a record is by its keys; None where it has one alone."""
    return next((form for form in FORMS.values() if form.key in record), None)


def parse_answers(record: Mapping[str, Any], kind: str) -> Record:
    """Parse a record of a source of several answers, of this kind, by the keys that it has. Raises BadSample."""
    forms = [form for form in FORMS.values() if form.source.kind == kind]
    return next((form for form in forms if form.key in record), forms[0]).parse(record)


def to_json(conversation: Conversation) -> dict[str, Any]:
    """Convert what a conversation has of several answers."""
    header: dict[str, Any] = {} if conversation.label is None else {"label": conversation.label}
    if conversation.rejected or conversation.reference:
        header["reference"] = conversation.reference
    if conversation.rejected:
        header["rejected"] = "".join(conversation.rejected.parts)
        if conversation.rejected.fields:
            header["rejected_fields"] = dict(conversation.rejected.fields)
    if conversation.rollouts:
        rollouts = [asdict(rollout) for rollout in conversation.rollouts]
        header["rollouts"] = [
            {k: v for k, v in rollout.items() if k != "mask" or v} for rollout in rollouts
        ]
    return header


def from_json(header: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Convert back to fields of a conversation. role: of its last message. Raises TypeError, ValueError or KeyError."""
    if (label := header.get("label")) not in (None, True, False):
        raise ValueError(f"a label {label!r}")
    rejected = None
    if "rejected" in header:
        fields = header.get("rejected_fields", {})
        fields = tuple((str(key), str(text)) for key, text in fields.items())
        rejected = Message(role, (str(header["rejected"]),), fields=fields)
    return {
        "label": label,
        "rejected": rejected,
        "reference": tuple(map(float, header.get("reference", ()))),
        "rollouts": tuple(_rollout(**rollout) for rollout in header.get("rollouts", ())),
    }


def _rollout(
    tokens: Sequence[int],
    log_probs: Sequence[float],
    advantage: float,
    reference: Sequence[float],
    mask: Sequence[int] = (),
) -> Rollout:
    return Rollout(
        tokens=tuple(map(int, tokens)),
        log_probs=tuple(map(float, log_probs)),
        advantage=float(advantage),
        reference=tuple(map(float, reference)),
        mask=tuple(map(int, mask)),
    )
