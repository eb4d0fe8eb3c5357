"""Several answers to one prompt: their records, and the branches of a sample that they become.

A form of answers is what a record holds of them, and may be of several losses: `FORMS` has all. The
answers of a record share its prompt, which is tokenized once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mmjax.config import CrossEntropy, FileSource, LossConfig, PreferenceSource, RolloutsSource
from mmjax.config.losses import Answers, Dpo, Kto
from mmjax.data.sample import MAX_BRANCHES, BadSample, Conversation, Message, Rollout, Text
from mmjax.data.sources.chat_records import (
    Record,
    media_beside,
    messages_under,
    parse_chat,
    with_media_first,
    with_unread,
)
from mmjax.data.sources.record_keys import MEDIA, is_absent, unread_keys
from mmjax.data.storage.files import Unreadable
from mmjax.data.text.chat import Branching, Chat, Records, Weighted

MAX_LOG_PROB = 0.1  # of a token; rounded ones may be a little above 0
# Keys of a reference's log-probabilities: of a pair's answers, and of an answer and another
# record's.
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
JUDGED_REFERENCE = ("ref_logps", "ref_KL_logps")
KEYS: Mapping[Answers, frozenset[str]] = {  # of a record, beside those of its messages
    "pair": frozenset(("prompt", "chosen", "rejected", "system", *REFERENCE, *MEDIA)),
    "judged": frozenset(
        ("prompt", "completion", "label", "kl_completion", "system", *JUDGED_REFERENCE, *MEDIA)
    ),
    # completions: the texts of the answers, which completion_ids have
    "rollouts": frozenset(
        (
            "prompt",
            "completion_ids",
            "completions",
            "logprobs",
            "advantages",
            "ref_logprobs",
            "completion_mask",
            "system",
            *MEDIA,
        )
    ),
}
_OTHERS = 16  # records before one whose answers are tried, where some cannot be read


def parse_preference(record: Mapping[str, Any]) -> Record:
    """Parse a pair of answers as TRL has it: {"prompt", "chosen", "rejected"}, each a text or messages.

    Without a prompt both have it, and it is what they share. Log-probabilities of a reference may
    stand under "ref_chosen_logps" and "ref_rejected_logps". Raises BadSample.
    """
    unread = unread_keys(record, "record", KEYS["pair"])
    chosen, rejected = (messages_under(record, key, "assistant") for key in ("chosen", "rejected"))
    prompt = messages_under(record, "prompt", "user") if record.get("prompt") else chosen[:-1]
    if not record.get("prompt") and rejected[:-1] != prompt:
        raise BadSample("has no prompt, and chosen and rejected differ before their last messages")
    if not prompt:
        raise BadSample("has no prompt")
    if record.get("prompt") and (len(chosen), len(rejected)) != (1, 1):
        raise BadSample(
            "has several messages in chosen or rejected; they hold one answer of the assistant each"
        )
    return with_unread(
        parse_pair(prompt, chosen[-1], rejected[-1], media_beside(record), record), unread
    )


def parse_pair(
    prompt: Sequence[Any],
    chosen: Any,
    rejected: Any,
    media: Mapping[str, Any],
    record: Mapping[str, Any],
) -> Record:
    """Build a record of messages and two answers to them, with the reference's log-probabilities. Raises BadSample.

    media: files beside the messages. record: that has them all.
    """
    reference = _stored(record, REFERENCE)
    prompt = with_media_first(prompt, media)
    parsed, worse = (
        parse_chat({"messages": [*prompt, answer]} | media, "messages")
        for answer in (chosen, rejected)
    )
    messages = parsed.conversation.messages[-1], worse.conversation.messages[-1]
    if any(message.role != "assistant" for message in messages):
        raise BadSample("has a chosen or rejected message that is not the assistant's")
    if any(not isinstance(part, str) for message in messages for part in message.parts):
        raise BadSample(
            "has a medium in a chosen or rejected answer; answers that are compared are text"
        )
    if messages[1].weight not in (1, messages[0].weight):
        raise BadSample(
            f"has a rejected answer with weight={messages[1].weight!r}; a pair has its chosen answer's"
        )
    _check_prompt_weights(parsed.conversation.messages[:-1])
    if messages[0].parts == messages[1].parts:
        raise BadSample("has the same chosen and rejected answer: there is nothing to learn")
    pair = replace(parsed.conversation, rejected=messages[1], reference=reference)
    return with_unread(replace(parsed, conversation=pair), worse.conversation.unread)


def parse_judged(record: Mapping[str, Any]) -> Record:
    """Parse an answer that is good or bad, as TRL has it: {"prompt", "completion", "label"}.

    Prompt and completion are a text or messages, the label is true or false. "kl_completion" may be
    the answer of another record, with log-probabilities of a reference under "ref_logps" and
    "ref_KL_logps". Raises BadSample.
    """
    unread = unread_keys(record, "record", KEYS["judged"])
    reference = _stored(record, JUDGED_REFERENCE)
    if record.get("ref_KL_logps") is not None and record.get("ref_logps") is None:
        raise BadSample("has ref_KL_logps and no ref_logps")
    if not isinstance(label := record.get("label"), bool):
        raise BadSample(
            f"has label={label!r}; expected true for a good answer, or false for a bad one"
        )
    media = media_beside(record)
    prompt = with_media_first(messages_under(record, "prompt", "user"), media)
    parsed = _answered(prompt, record, "completion", media)
    judged = replace(parsed.conversation, label=label, reference=reference)
    _check_prompt_weights(judged.messages[:-1])
    if record.get("kl_completion") is not None:
        mismatched = _answered(prompt, record, "kl_completion", media).conversation
        judged = replace(judged, rejected=mismatched.messages[-1])
        unread += mismatched.unread
    return with_unread(replace(parsed, conversation=judged), unread)


def _answered(
    prompt: Sequence[Any], record: Mapping[str, Any], key: str, media: Mapping[str, Any]
) -> Record:
    """Parse a prompt with the answer under a key. Raises BadSample."""
    answers = messages_under(record, key, "assistant")
    if len(answers) != 1:
        raise BadSample(f"has several messages in {key}; it holds one answer of the assistant")
    parsed = parse_chat({"messages": [*prompt, *answers]} | media, "messages")
    message = parsed.conversation.messages[-1]
    if message.role != "assistant":
        raise BadSample(f"has a {key} that is not the assistant's")
    if any(not isinstance(part, str) for part in message.parts):
        raise BadSample(f"has a medium in its {key}; answers that are judged are text")
    return parsed


def _stored(record: Mapping[str, Any], keys: Sequence[str]) -> tuple[float, ...]:
    """Return log-probabilities of a reference that a record has under these keys. Raises BadSample."""
    values = {key: record[key] for key in keys if record.get(key) is not None}
    for key, value in values.items():
        if not _are_numbers([value]):
            raise BadSample(f"has {key}={value!r}, which is no number")
        _check_log_probs(key, [value])
    return tuple(values.values())


def parse_rollouts(record: Mapping[str, Any]) -> Record:
    """Parse answers that a model has drawn: {"prompt", "completion_ids", "logprobs", "advantages"}. Raises BadSample.

    The latter three have an entry for each answer: its tokens, their log-probabilities when they
    were drawn, and a number. "ref_logprobs", where there are any, are the reference's;
    "completion_mask" has a 0 for each token that is not trained on, as a tool's.
    """
    unread = unread_keys(record, "record", KEYS["rollouts"])
    media = media_beside(record)
    prompt = with_media_first(messages_under(record, "prompt", "user"), media)
    if not isinstance(record.get("completion_ids"), list | tuple) or not record["completion_ids"]:
        text = ", whose tokens must be those that logprobs are of: text alone does not say them"
        raise BadSample(f"has no completion_ids{text if record.get('completions') else ''}")
    columns = [record.get(key) for key in ("completion_ids", "logprobs", "advantages")]
    if any(
        not isinstance(values, list | tuple) or len(values) != len(columns[0]) for values in columns
    ):
        raise BadSample("has not as many logprobs and advantages as completion_ids")
    for key in ("ref_logprobs", "completion_mask"):
        values = [()] * len(columns[0]) if is_absent(record.get(key)) else record[key]
        if not isinstance(values, list | tuple) or len(values) != len(columns[0]):
            raise BadSample(f"has not as many {key} as completion_ids")
        columns.append(values)
    rollouts = []
    for number, (tokens, log_probs, advantage, reference, mask) in enumerate(
        zip(*columns, strict=True)
    ):
        if not _are_numbers(tokens, int) or not tokens or not _are_numbers([advantage]):
            raise BadSample(f"has no tokens, or no advantage, of answer {number}")
        if min(tokens) < 0:
            raise BadSample(
                f"has a token {min(tokens)} in answer {number}; leave out what is no token, with its logprob"
            )
        if not _are_numbers(log_probs) or len(log_probs) != len(tokens):
            raise BadSample(f"has not a log-probability of every token of answer {number}")
        if not _are_numbers(reference):
            raise BadSample(f"has ref_logprobs of answer {number} that are no numbers")
        for key, values in (("logprobs", log_probs), ("ref_logprobs", reference)):
            _check_log_probs(key, values)
        mask = () if mask is None else mask
        if (
            not isinstance(mask, list | tuple)
            or any(m not in (0, 1) for m in mask)
            or len(mask) not in (0, len(tokens))
        ):
            raise BadSample(
                f"has a completion_mask of answer {number} that is no 0 or 1 for every token"
            )
        rollouts.append(
            Rollout(
                tokens=tuple(tokens),
                log_probs=tuple(log_probs),
                advantage=float(advantage),
                reference=tuple(reference),
                mask=() if all(mask) else tuple(map(int, mask)),
            )
        )
    if not any(not rollout.mask or any(rollout.mask) for rollout in rollouts):
        raise BadSample("has a completion_mask of 0 alone: there is nothing to learn")
    parsed = parse_chat({"messages": prompt} | media, "messages", answered=False)
    _check_prompt_weights(parsed.conversation.messages)
    return with_unread(
        replace(parsed, conversation=replace(parsed.conversation, rollouts=tuple(rollouts))), unread
    )


def _check_prompt_weights(messages: Sequence[Message]) -> None:
    """Raise BadSample where a message of a prompt asks for another weight than that of all or of none."""
    if weight := next(
        (message.weight for message in messages if message.weight not in (0, 1)), None
    ):
        raise BadSample(
            f"has a message with weight={weight!r} in its prompt, of which nothing is trained on"
        )


def _check_log_probs(key: str, values: Sequence[float]) -> None:
    """Raise BadSample for logarithms of probabilities above 1, which are probabilities, or losses."""
    if values and max(values) > MAX_LOG_PROB:
        raise BadSample(
            f"has {max(values):.4g} in {key}; logarithms of probabilities are at most 0"
        )


def _are_numbers(values: Any, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Tell whether these are finite numbers."""
    return isinstance(values, list | tuple) and all(
        isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x) for x in values
    )


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
    return replace(
        chat,
        branching=None if isinstance(loss, CrossEntropy) else FORMS[loss.answers].branching(loss),
    )


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
