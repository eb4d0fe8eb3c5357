"""Parse a record of a file: a conversation, a question, a pair of answers, rollouts, or a line of a manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmjax.data.sample import (
    MARKER,
    TOOL_CALLS,
    TOOLS,
    BadSample,
    Conversation,
    MediaPlace,
    Medium,
    Message,
    split_markers,
)
from mmjax.data.sources.record_keys import FIELDS, MEDIA, READ, TRAINED, is_absent, unread_keys

KEYS: Mapping[Medium, tuple[str, ...]] = {
    "image": ("images", "image"),
    "audio": ("audios", "audio"),
    "video": ("videos", "video"),
}
FUNCTION_CALL = "function_call"  # LLaMA-Factory's role of an answer that is calls, as JSON
# Roles as data sets name them: OpenAI's, ShareGPT's ("human", "gpt", "observation"), Gemma's
# ("model").
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    FUNCTION_CALL: "assistant",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
}
_NO_FUNCTIONS = "that are no list of functions"
MAX_WEIGHT = 1e6  # of a message
MAX_CHARACTERS = 1 << 22  # of a conversation's text
# By a part's type: its medium, and the keys under which its file may be named.
_PART_KEYS: Mapping[str, tuple[Medium, tuple[str, ...]]] = {
    "image": ("image", ("image", "path", "url", "bytes")),
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "audio": ("audio", ("audio", "path", "url", "bytes")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
    "video": ("video", ("video", "path", "url", "bytes")),
    "video_url": ("video", ("video_url",)),
}
_READ_BY_TURNS = {"conversations": READ["llava"], "messages": READ["messages"]}
# A path, a URL, bytes, {"bytes", "path"}, ... as the record has it; for a manifest a ClipSpan; for
# a video also a list of its frames' images.
Reference = Any


@dataclass(frozen=True)
class ClipSpan:
    """A stretch of a clip's file in seconds; a duration of None is to its end."""

    path: str
    offset: float
    duration: float | None


@dataclass(frozen=True)
class Record:
    """A conversation and the references to its media, in order."""

    conversation: Conversation
    references: tuple[Reference, ...]


def parse_chat(record: Mapping[str, Any], turns: str, answered: bool = True) -> Record:
    """Parse a record whose messages are under the key `turns`: {"from", "value"} or {"role", "content"} each.

    Media are named inside the content, or beside the messages ("image", "images", "audio",
    "audios", "video", "videos") and marked in the text. In a record with videos and no images,
    `<image>` marks a video where nothing else does, as in LLaVA-Video's. answered: an answer must
    be there to train on. Raises BadSample.
    """
    turn_list = record.get(turns)
    if is_absent(turn_list):
        raise BadSample(f"has no {turns}")
    if not isinstance(turn_list, Sequence) or isinstance(turn_list, str):
        raise BadSample(
            f"has {turns} that are a {type(turn_list).__name__}, not a list of messages"
        )
    unread = unread_keys(record, "record", _READ_BY_TURNS[turns])
    # Files named beside the messages, which places marked in the text take in order.
    files = {medium: listed_files(record, keys) for medium, keys in KEYS.items()}
    image_is_video = bool(files["video"]) and not files["image"] and not _marks_video(turn_list)
    messages = []
    references = []
    places = Counter[str]()  # marked in the text
    if system := _system(record.get("system")):
        messages.append(Message("system", system))
    for number, turn in enumerate(turn_list, start=1):
        turn, role, content, weight = _turn(turn, number)
        unread += unread_keys(turn, "message", READ["message"], f"message {number} ")
        fields = _fields(turn, role, number)
        calls = TOOL_CALLS in dict(fields)
        parts: list[str | MediaPlace] = []
        for part in _parts("" if content is None and calls else content, number, unread):
            if isinstance(part, str):
                parts.append(part)
                continue
            place, reference = part
            medium = place.kind
            if reference is None and medium == "image" and image_is_video:
                medium = "video"
            if reference is None:  # a marker, which takes the next file beside the messages
                listed = files[medium]
                reference = listed[places[medium]] if places[medium] < len(listed) else None
                places[medium] += 1
            references.append(reference)
            parts.append(replace(place, kind=medium))
        if calls or any(isinstance(part, MediaPlace) or part.strip() for part in parts):
            messages.append(Message(role, tuple(parts), weight, fields))
        elif role != "system":  # many data sets have an empty system message, which changes nothing
            raise BadSample(f"message {number} ({role}) is empty")
    for medium, listed in files.items():
        if places[medium] != len(listed):
            raise BadSample(
                f"has {places[medium]} places <{medium}> for {len(listed)} {medium} file(s)"
            )
    if system and any(message.role == "system" for message in messages[1:]):
        raise BadSample(
            f"has a system message beside {turns} and one among them; keep the one that is meant"
        )
    if not is_absent(tools := record.get(TOOLS)):
        functions, _ = _as_json(tools, "has tools", _NO_FUNCTIONS)
        _, text = _as_json([_wrapped(one) for one in functions], "has tools", _NO_FUNCTIONS)
        messages[0] = replace(messages[0], fields=(*messages[0].fields, (TOOLS, text)))
    _check_texts(messages)
    if answered:
        _check_trainable(messages)
    for reference in references:
        if isinstance(reference, Mapping):
            unread += unread_keys(reference, "file", READ["file"], "a file of it ")
    return Record(
        Conversation(tuple(messages), unread=tuple(sorted(set(unread)))), tuple(references)
    )


def _marks_video(turns: Sequence[Any]) -> bool:
    """Tell whether any message has a place for a video."""
    contents = [t.get("content") or t.get("value") for t in turns if isinstance(t, Mapping)]
    return any("<video>" in c if isinstance(c, str) else "'video" in repr(c) for c in contents)


def parse_question(
    question: Any,
    answer: Any,
    media: Mapping[Medium, Sequence[Reference]],
    beside: Mapping[str, Any] | None = None,
) -> Record:
    """Build a record of a question and its answer; unmarked media come before the question. Raises BadSample.

    beside: other keys of the record, which are checked: a system message is read.
    """
    answers: tuple[str, ...] = ()
    if isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer):
        # The first of several right answers is trained on. VQA has one of each annotator:
        # {"answer": "red", ...}.
        candidates = [one.get("answer") if isinstance(one, Mapping) else one for one in answer]
        if wrong := [
            type(candidate).__name__ for candidate in candidates if not isinstance(candidate, str)
        ]:
            raise BadSample(f"has an answer that is a {wrong[0]}, not text")
        answer, answers = candidates[0], tuple(candidates)
    for name, text in (("question", question), ("answer", answer)):
        if is_absent(text) and not isinstance(text, str):
            raise BadSample(f"has no {name}")
        if not isinstance(text, str):
            raise BadSample(
                f"has {name}={str(text)[:40]!r}, which is a {type(text).__name__}, not text"
            )
    _check_characters(len(question) + len(answer))
    # LLaVA's convention for questions without a marker.
    if not MARKER.search(question):
        question = "".join(f"<{medium}>" * len(files) for medium, files in media.items()) + question
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    files_by_key = {KEYS[medium][0]: files for medium, files in media.items()}
    record = parse_chat({**(beside or {}), "messages": turns} | files_by_key, "messages")
    return replace(record, conversation=replace(record.conversation, answers=answers))


def parse_question_record(record: Mapping[str, Any], question: str, answer: str) -> Record:
    """Parse a question under one key, and its answer, or several right ones, under another. Raises BadSample."""
    media = {medium: listed_files(record, keys) for medium, keys in KEYS.items()}
    answers = value_of_one(record, (answer, f"{answer}s"))
    read = {question, answer, f"{answer}s", "system", *MEDIA}
    unread = unread_keys(record, "record", read)
    if record.get(question) is None:
        raise BadSample(f"has no {question}")
    files_of = {medium: files for medium, files in media.items() if files}
    beside = {"system": record.get("system")}
    return with_unread(parse_question(record.get(question), answers, files_of, beside), unread)


def with_unread(record: Record, unread: Sequence[str]) -> Record:
    """Add keys that nothing reads to those of a record's messages."""
    if not unread:
        return record
    names = tuple(sorted({*record.conversation.unread, *unread}))
    return replace(record, conversation=replace(record.conversation, unread=names))


def messages_under(record: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """Return the messages under a key, of which a text alone is one. Raises BadSample."""
    value = record.get(key)
    if isinstance(value, list | tuple) and value:
        return list(value)
    if not isinstance(value, str) or not value:
        raise BadSample(f"has no {key} answer" if role == "assistant" else f"has no {key}")
    return [{"role": role, "content": value}]


def media_beside(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record names beside its messages: media, and a system message."""
    return {key: record[key] for key in ("system", *MEDIA) if record.get(key) is not None}


def with_media_first(turns: Sequence[Any], media: Mapping[str, Any]) -> list[Any]:
    """Put media that no message has a place for before the first question, as TRL does."""
    marks = [medium for medium, keys in KEYS.items() for _ in listed_files(media, keys)]
    contents = [
        turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, Mapping)
    ]
    marked = any(MARKER.search(c) if isinstance(c, str) else _has_media(c) for c in contents)
    first = next(
        (
            number
            for number, turn in enumerate(turns)
            if isinstance(turn, Mapping)
            and ROLES.get(str(turn.get("role", turn.get("from")))) == "user"
        ),
        None,
    )
    if not marks or marked or first is None:
        return list(turns)
    key = next((key for key in ("content", "value") if key in turns[first]), None)
    if key is None:  # which is refused with its message
        return list(turns)
    content = turns[first][key]
    if isinstance(content, str):
        content = "".join(f"<{medium}>" for medium in marks) + content
    elif content is None or isinstance(content, list | tuple):
        content = [*({"type": medium} for medium in marks), *(content or [])]
    return [*turns[:first], {**turns[first], key: content}, *turns[first + 1 :]]


def _has_media(content: Any) -> bool:
    """Tell whether any typed part is a medium."""
    # anything else is refused with its message
    parts = content if isinstance(content, list | tuple) else ()
    return any(
        isinstance(part, Mapping) and part.get("type") in tuple(_PART_KEYS) for part in parts
    )


def parse_manifest_line(record: Mapping[str, Any], prompt: str) -> Record:
    """Parse a line of an audio manifest: {"audio_filepath", "text", "offset", "duration", "prompt"}.

    The clip comes before the prompt, for which `prompt` is the default. Raises BadSample.
    """
    unread = unread_keys(record, "manifest", READ["manifest"])
    path = record.get("audio_filepath")
    if not isinstance(path, str) or not path:
        raise BadSample("has no audio_filepath")
    offset, duration = (_seconds(record, key) for key in ("offset", "duration"))
    if duration == 0:
        raise BadSample("has duration=0: an empty clip")
    clip = ClipSpan(path, offset or 0.0, duration)
    question = record.get("prompt")
    if question is None:
        question = prompt
    elif not isinstance(question, str):
        raise BadSample(f"has a prompt that is a {type(question).__name__}, not text")
    text = record.get("text")
    if text is not None and not isinstance(text, str):
        raise BadSample(f"has a text that is a {type(text).__name__}, not text")
    return with_unread(parse_question(question, text, {"audio": [clip]}), unread)


def listed_files(record: Mapping[str, Any], keys: tuple[str, ...]) -> list[Reference]:
    """List the files that a record names beside its messages under one of these keys. Raises BadSample for several.

    The frames of one video, under "video", are a list in themselves.
    """
    value = value_of_one(record, keys)
    if is_absent(value):
        return []
    if isinstance(value, list | tuple) and "video" in keys and value is record.get("video"):
        return [list(value)]
    return list(value) if isinstance(value, list | tuple) else [value]


def value_of_one(record: Mapping[str, Any], keys: Sequence[str], where: str = "") -> Any:
    """Return the value of the one key that is present and not empty; None where none is.

    where: a prefix for messages. Raises BadSample where several keys have a value, since either may
    be meant.
    """
    present = [key for key in keys if not _is_empty(record.get(key))]
    if len(present) > 1:
        raise BadSample(
            f"{where}has both {present[0]} and {present[1]}; keep the one that is meant"
        )
    # Return an empty value rather than None, so that an empty message is not reported as missing.
    return (
        record[present[0]]
        if present
        else next((record[key] for key in keys if record.get(key) is not None), None)
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)


def _system(system: Any) -> tuple[str, ...]:
    """Return the text of a system message beside the others: a string, or a list of text parts. Raises BadSample."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return ()
    if isinstance(system, str):
        return (system,)
    if isinstance(system, Sequence) and all(
        isinstance(p, Mapping) and p.get("type") == "text" for p in system
    ):
        texts = [part.get("text") for part in system]
        if all(isinstance(text, str) for text in texts):
            return tuple(text for text in texts if text)
    raise BadSample(
        f"has a system message that is a {type(system).__name__}; write text, or a list of text parts"
    )


def _turn(turn: Any, number: int) -> tuple[Mapping[str, Any], str, Any, float]:
    """Return a message with its role, content and weight; the calls of `function_call` are its tool_calls."""
    if not isinstance(turn, Mapping):
        raise BadSample(f"message {number} is not an object")
    where = f"message {number} "
    name = value_of_one(turn, ("role", "from"), where)
    content = value_of_one(turn, ("content", "value"), where)
    if not isinstance(name, str) or name not in ROLES:
        raise BadSample(
            f"message {number} has the unknown role {name!r}; known: {', '.join(ROLES)}"
        )
    if name == FUNCTION_CALL:
        if not is_absent(turn.get(TOOL_CALLS)):
            raise BadSample(
                f"{where}({name}) has {TOOL_CALLS} beside its content; keep the one that is meant"
            )
        turn, content = {**turn, TOOL_CALLS: _listed_calls(content, where)}, None
    return turn, ROLES[name], content, _weight(turn, ROLES[name], number)


def _listed_calls(content: Any, where: str) -> list[Any]:
    """List the calls of a `function_call`: one, or a list, or the JSON of either. Raises BadSample."""
    what = f"{where}({FUNCTION_CALL})"
    reason = 'is no JSON of a call: {"name": "zoom", "arguments": {}}, or a list of them'
    value = _json(content, what, reason) if isinstance(content, str) else content
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list) or not calls:
        raise BadSample(f"{what} {reason}")
    return calls


def _weight(turn: Mapping[str, Any], role: str, number: int) -> float:
    """Return the weight of a message, by default 1; other stacks say by true or false whether it is trained on."""
    present = [key for key in (*TRAINED, "masked") if turn.get(key) is not None]
    if not present:
        return 1.0
    if len(present) > 1:
        raise BadSample(
            f"message {number} has both {present[0]} and {present[1]}; keep the one that is meant"
        )
    key = present[0]
    value = turn[key]
    if key == "weight":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_WEIGHT:
            raise BadSample(
                f"message {number} has weight={value!r}; give a number from 0 to {MAX_WEIGHT:g}"
            )
    elif not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadSample(
            f"message {number} has {key}={value!r}; give true or false, or a number as its weight"
        )
    weight = 1.0 - value if key == "masked" else float(value)
    if role != "assistant" and weight and key != "masked":
        raise BadSample(
            f"message {number} ({role}) has {key}={value!r}, but only what the assistant says is trained on"
        )
    return weight


def _fields(turn: Mapping[str, Any], role: str, number: int) -> tuple[tuple[str, str], ...]:
    """Return what a message has for the chat template beside its content. Raises BadSample."""
    fields = {key: turn[key] for key in FIELDS if not is_absent(turn.get(key))}
    for key in {"reasoning_content", TOOL_CALLS} & fields.keys():
        if role != "assistant":
            raise BadSample(
                f"message {number} ({role}) has {key}, which an answer of the assistant may have alone"
            )
    if TOOL_CALLS in fields:
        fields[TOOL_CALLS] = _calls(fields[TOOL_CALLS], f"message {number} has tool_calls")
    for key, value in fields.items():
        if not isinstance(value, str):
            raise BadSample(
                f"message {number} has a {key} that is a {type(value).__name__}, not text"
            )
    return tuple(fields.items())


def _calls(value: Any, what: str) -> str:
    """Return the calls of functions as JSON, their arguments as objects, which templates take. Raises BadSample."""
    reason = 'that are not as OpenAI has them: [{"function": {"name": "zoom", "arguments": {}}}]'
    calls = []
    for call in _as_json(value, what, reason)[0]:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadSample(f"{what} {reason}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, what, reason)
        if not isinstance(arguments, Mapping):
            raise BadSample(f"{what} {reason}")
        names = {"id": call["id"]} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append(names | {"type": "function", "function": function})
    return _as_json(calls, what, reason)[1]


def _wrapped(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function, bare or not, as templates take it: {"type": "function", "function": {"name", ...}}."""
    if "function" in function or "name" not in function:
        return function
    bare = {key: value for key, value in function.items() if key != "type"}
    return {"type": "function", "function": bare}


def _as_json(value: Any, what: str, reason: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return a list of objects, or the JSON of one, and its JSON. Raises BadSample for anything else."""
    objects = _json(value, what, reason) if isinstance(value, str) else value
    if not isinstance(objects, list) or not all(isinstance(one, Mapping) for one in objects):
        raise BadSample(f"{what} {reason}")
    try:
        return objects, json.dumps(objects, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise BadSample(f"{what} {reason}") from None


def _json(text: str, what: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadSample(f"{what} {reason}") from None


def _parts(
    content: Any, number: int, unread: list[str]
) -> Iterator[str | tuple[MediaPlace, Reference | None]]:
    """Yield texts, and places of media with their references; None for a reference beside the messages.

    unread: to which keys that nothing reads are added.
    """
    # marked_parts cuts LLaVA's "<image>" out of a string; lists of parts have no markers in their
    # texts.
    if isinstance(content, str):
        _check_characters(len(content))
        yield from (
            (part, None) if isinstance(part, MediaPlace) else part
            for part in split_markers(content)
        )
        return
    if not isinstance(content, Sequence):
        raise BadSample(f"message {number} has no content")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text"):
            if not isinstance(part.get("text"), str):
                raise BadSample(f"message {number} has a text part without text")
            unread += unread_keys(
                part, "part", READ["text part"], f"message {number} has a part text that "
            )
            if part["text"]:
                yield part["text"]
        elif isinstance(kind, str) and kind in _PART_KEYS:
            medium, keys = _PART_KEYS[kind]
            unread += unread_keys(
                part, "part", READ[f"{medium} part"], f"message {number} has a part {kind} that "
            )
            present = [key for key in keys if part.get(key) is not None]
            # Hugging Face datasets' images have both path and bytes for one file.
            if len(present) > 1 and set(present) != {"path", "bytes"}:
                both = f"both {present[0]} and {present[1]}"
                raise BadSample(
                    f"message {number} has a part {kind} with {both}; keep the one that is meant"
                )
            yield MediaPlace(medium), part[present[0]] if present else None
        else:
            known = ", ".join(("text", *_PART_KEYS))
            raise BadSample(
                f"message {number} has a part of the unknown type {kind!r}; known: {known}"
            )


def _check_trainable(messages: Sequence[Message]) -> None:
    """Raise BadSample where no answer is trained on."""
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise BadSample("has no message of the assistant: there is nothing to learn")
    if not any(message.weight for message in answers):
        raise BadSample("has weight=0 in every message of the assistant: there is nothing to learn")


def _check_texts(messages: Sequence[Message]) -> None:
    """Raise BadSample where a text is not Unicode, or longer than any model reads."""
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    texts += [text for message in messages for _, text in message.fields]
    _check_characters(sum(map(len, texts)))
    # JSON can escape half a pair, which is no text: tokenizers would fail on it.
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise BadSample("has half of a surrogate pair in its text") from None


def _check_characters(count: int) -> None:
    """Raise BadSample for more text than any model reads, before it is copied."""
    if count > MAX_CHARACTERS:
        raise BadSample(f"has {count:,} characters of text, more than {MAX_CHARACTERS:,}")


def _seconds(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1e9):
        raise BadSample(f"has {key}={value!r}; it is in seconds, at least 0")
    return None if value is None else float(value)
