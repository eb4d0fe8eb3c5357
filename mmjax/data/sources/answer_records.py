"""Parse records of several answers to one prompt: pairs, judged answers and rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmjax.config.losses import Answers
from mmjax.data.sample import BadSample, Message, Rollout
from mmjax.data.sources.chat_records import (
    Record,
    media_beside,
    messages_under,
    parse_chat,
    with_media_first,
    with_unread,
)
from mmjax.data.sources.record_keys import MEDIA, is_absent, unread_keys

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
    if len({(message.parts, message.fields) for message in messages}) == 1:
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
