"""Read one record of a chat data set, in the shapes that people write: who said what, and which files it names.

Text stands as it is written, `<image>` and `<audio>` cut out where media stand. Nothing is guessed: a place without its
file, a file without its place, an unknown role or an empty message is a bad sample.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmjax.data.conversation import MARKER, BadSample, Conversation, Media, Medium, Message, marked_parts

KEYS: Mapping[Medium, tuple[str, ...]] = {"image": ("images", "image"), "audio": ("audios", "audio")}
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
}
MAX_WEIGHT = 1e6  # of a message
_PART_KEYS: Mapping[str, tuple[Medium, tuple[str, ...]]] = {  # by a part's type: where its file is named
    "image": ("image", ("image", "path", "url", "bytes")),
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "audio": ("audio", ("audio", "path", "url", "bytes")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
}

Reference = Any  # a path, a URL, bytes, {"bytes", "path"}, ... as the record has it; of a manifest an Excerpt


@dataclass(frozen=True)
class Excerpt:
    """Seconds of a clip's file; a duration of None is to its end."""

    path: str
    offset: float
    duration: float | None


@dataclass(frozen=True)
class Record:
    """A conversation and what it says of each of its media, in order."""

    conversation: Conversation
    references: tuple[Reference, ...]


def chat_record(record: Mapping[str, Any], turns: str) -> Record:
    """A record whose messages are under the key `turns`: {"from", "value"} or {"role", "content"} each.

    Media are named at their place in the content, or beside the messages ("image", "images", "audio", "audios") and
    marked in the text. Raises BadSample.
    """
    said = record.get(turns)
    if not isinstance(said, Sequence) or isinstance(said, str) or not said:
        raise BadSample(f"has no {turns}")
    if record.get("videos") or record.get("video"):
        raise BadSample("has videos, which are not read")
    if record.get("tools"):
        raise BadSample("has tools, which are not read")
    beside = {medium: deque(_listed(record, keys)) for medium, keys in KEYS.items()}
    given = {medium: len(waiting) for medium, waiting in beside.items()}
    messages, references, places = [], [], Counter[str]()
    if system := _system(record.get("system")):
        messages.append(Message("system", system))
    for number, turn in enumerate(said, start=1):
        role, content, weight = _turn(turn, number)
        parts: list[str | Media] = []
        for part in _parts(content, number):
            if isinstance(part, str):
                parts.append(part)
                continue
            medium, reference = part
            if reference is None:
                places[medium] += 1
                reference = beside[medium].popleft() if beside[medium] else None
            references.append(reference)
            parts.append(Media(medium))
        if any(isinstance(part, Media) or part.strip() for part in parts):
            messages.append(Message(role, tuple(parts), weight))
        elif role != "system":  # an empty one says nothing, and many data sets have it
            raise BadSample(f"message {number} ({role}) is empty")
    for medium, count in given.items():
        if places[medium] != count:
            raise BadSample(f"has {places[medium]} places <{medium}> for {count} {medium} file(s)")
    return Record(_checked(tuple(messages)), tuple(references))


def question_record(question: Any, answer: Any, media: Mapping[Medium, Sequence[Reference]]) -> Record:
    """One question and its answer. Media stand where the question marks them; where it marks none, before it.

    Raises BadSample.
    """
    answers: tuple[str, ...] = ()
    if isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer):
        # Of several that are right the first is learned; VQA has one of each person: {"answer": "red", ...}.
        given = [one.get("answer") if isinstance(one, Mapping) else one for one in answer]
        answer, answers = given[0], tuple(one for one in given if isinstance(one, str))
    if not isinstance(question, str) or not isinstance(answer, str):
        raise BadSample("has no question" if not isinstance(question, str) else "has no answer")
    if not MARKER.search(question):
        question = "".join(f"<{medium}>" * len(files) for medium, files in media.items()) + question
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    found = chat_record({"messages": said} | {KEYS[medium][0]: files for medium, files in media.items()}, "messages")
    return replace(found, conversation=replace(found.conversation, answers=answers))


def questions_record(record: Mapping[str, Any], question: str, answer: str) -> Record:
    """A question under one key, its answer, or the list of those that are right, under another; media as in chats.

    Raises BadSample.
    """
    media = {medium: _listed(record, keys) for medium, keys in KEYS.items()}
    given = _value_of_one(record, (answer, f"{answer}s"))
    return question_record(record.get(question), given, {medium: files for medium, files in media.items() if files})


def clip_record(record: Mapping[str, Any], prompt: str) -> Record:
    """A line of an audio manifest: {"audio_filepath", "text", "offset", "duration", "prompt"}.

    The clip comes before the prompt, which `prompt` stands in for. Raises BadSample.
    """
    path = record.get("audio_filepath")
    if not isinstance(path, str) or not path:
        raise BadSample("has no audio_filepath")
    offset, duration = (_seconds(record, key) for key in ("offset", "duration"))
    if duration == 0:
        raise BadSample("has duration=0: an empty clip")
    clip = Excerpt(path, offset or 0.0, duration)
    own = record.get("prompt")
    if own is not None and not isinstance(own, str):
        raise BadSample(f"has a prompt that is a {type(own).__name__}, not text")
    return question_record(prompt if own is None else own, record.get("text"), {"audio": [clip]})


def _listed(record: Mapping[str, Any], keys: tuple[str, ...]) -> list[Reference]:
    """Return what a record names beside its messages under one of these keys. Raises BadSample where several are."""
    found = _value_of_one(record, keys)
    if _is_empty(found):
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def _value_of_one(record: Mapping[str, Any], keys: Sequence[str], where: str = "") -> Any:
    """Return the value of the one key that is present and not empty; None where none is.

    where: the part of the sample that messages name. Raises BadSample where several keys have a value, since either may
    be meant.
    """
    present = [key for key in keys if not _is_empty(record.get(key))]
    if len(present) > 1:
        raise BadSample(f"{where}has both {present[0]} and {present[1]}; keep the one that is meant")
    # An empty value is told from a missing one, so that an empty message is called empty.
    return record[present[0]] if present else next((record[key] for key in keys if record.get(key) is not None), None)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)


def _system(system: Any) -> tuple[str, ...]:
    """Return the text of a system message beside the others: a string, or a list of text parts. Raises BadSample."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return ()
    if isinstance(system, str):
        return (system,)
    if isinstance(system, Sequence) and all(isinstance(of, Mapping) and of.get("type") == "text" for of in system):
        texts = [part.get("text") for part in system]
        if all(isinstance(text, str) for text in texts):
            return tuple(text for text in texts if text)
    raise BadSample(f"has a system message that is a {type(system).__name__}; write text, or a list of text parts")


def _turn(turn: Any, number: int) -> tuple[str, Any, float]:
    """Return the role, content and weight of a message."""
    if not isinstance(turn, Mapping):
        raise BadSample(f"message {number} is not an object")
    if turn.get("tool_calls"):
        raise BadSample(f"message {number} has tool_calls, which are not read")
    where = f"message {number} "
    name = _value_of_one(turn, ("role", "from"), where)
    content = _value_of_one(turn, ("content", "value"), where)
    if not isinstance(name, str) or name not in ROLES:
        raise BadSample(f"message {number} has the unknown role {name!r}; known: {', '.join(ROLES)}")
    return ROLES[name], content, _weight(turn.get("weight"), ROLES[name], number)


def _weight(given: Any, role: str, number: int) -> float:
    """Return the weight of a message, 1 where none is given."""
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= MAX_WEIGHT:
        raise BadSample(f"message {number} has weight={given!r}; give a number from 0 to {MAX_WEIGHT:g}")
    if role != "assistant" and given:
        raise BadSample(
            f"message {number} ({role}) has weight={given!r}, but only what the assistant says is trained on"
        )
    return float(given)


def _parts(content: Any, number: int) -> Iterator[str | tuple[Medium, Reference | None]]:
    """Text, and media with what is said of them; None where it is said beside the messages."""
    if isinstance(content, str):
        yield from ((part.kind, None) if isinstance(part, Media) else part for part in marked_parts(content))
        return
    if not isinstance(content, Sequence):
        raise BadSample(f"message {number} has no content")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text"):
            if not isinstance(part.get("text"), str):
                raise BadSample(f"message {number} has a text part without text")
            if part["text"]:
                yield part["text"]
        elif isinstance(kind, str) and kind in _PART_KEYS:
            medium, keys = _PART_KEYS[kind]
            given = [key for key in keys if part.get(key) is not None]
            if len(given) > 1 and set(given) != {"path", "bytes"}:  # these two together name one file (datasets)
                both = f"both {given[0]} and {given[1]}"
                raise BadSample(f"message {number} has a part {kind} with {both}; keep the one that is meant")
            yield medium, part[given[0]] if given else None
        else:
            known = ", ".join(("text", *_PART_KEYS))
            raise BadSample(f"message {number} has a part of the unknown type {kind!r}; known: {known}")


def _checked(messages: tuple[Message, ...]) -> Conversation:
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise BadSample("has no message of the assistant: there is nothing to learn")
    if not any(message.weight for message in answers):
        raise BadSample("has weight=0 in every message of the assistant: there is nothing to learn")
    try:
        "".join(part for message in messages for part in message.parts if isinstance(part, str)).encode()
    except UnicodeEncodeError:
        raise BadSample("has half of a surrogate pair in its text") from None
    return Conversation(messages)


def _seconds(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1e9):
        raise BadSample(f"has {key}={value!r}; it is in seconds, at least 0")
    return None if value is None else float(value)
