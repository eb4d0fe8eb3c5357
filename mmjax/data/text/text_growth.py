"""Bound how much longer a tokenizer.json may make a text, before anything is tokenized.

Twenty replacements of `a` by `aa` make a megabyte of one letter, and forty of them never end. The
steps of a normalizer, and those of a decoder, are followed with upper bounds: of how many
characters a text of one character has after each step, and of how many of these a later step
replaces. Bounds add up, so that what holds for every single character holds for all texts.
"""

from __future__ import annotations

import base64
import re
import struct
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

# characters for one; Unicode's own forms of one have up to 18, which is not counted here
MAX_GROWTH = 256
MAX_ADDED = 4096  # characters to a text of any length
MAX_STEPS = 256
# characters of a word that WordPiece splits, whose time grows with their square; it has 100
MAX_WORD = 1000
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# steps that make other characters of one
FACTORS = {"BertNormalizer": 3, "ByteLevel": 4, "ByteFallback": 1}
# Python's parser knows the shortest match of most patterns, but no properties of characters.
PROPERTY = re.compile(r"\\[pP]\{[^{}]*\}|\[:\^?\w+:\]")
_REPEATS = (re._constants.MAX_REPEAT, re._constants.MIN_REPEAT)
_GROUPS = (re._constants.SUBPATTERN, re._constants.BRANCH)

Json = Mapping[str, Any]


class GrowingText(ValueError):
    """Too long a text: the step's place in the file, and by how much."""


def check_growth(content: Json) -> None:
    """Raise GrowingText where a tokenizer.json's normalizer or decoder makes texts longer without a reason.

    Words and patterns that take ages are refused, too, and maps that the library panics at.
    """
    model = content.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, Mapping) else None
    if isinstance(word, int) and word > MAX_WORD:
        raise GrowingText(f"model.max_input_chars_per_word={word}; at most {MAX_WORD} are accepted")
    for part in PARTS:
        for pattern in _patterns(content.get(part)):
            if _searches_for_ages(pattern):
                raise GrowingText(f"{part} repeats what repeats itself: {pattern[:80]!r}")
    for part in ("normalizer", "decoder"):
        steps = list(_steps(content.get(part), part))
        if len(steps) > MAX_STEPS:
            raise GrowingText(f"{part} has {len(steps):,} steps; at most {MAX_STEPS} are accepted")
        if not any(step.get("type") in ("Replace", "Prepend", "Precompiled") for _, step in steps):
            continue
        replaced = {_literal(step)[:1] for _, step in steps} - {""}
        _follow(steps, 0, dict.fromkeys(replaced, 0.0))
        for character in sorted({"", *replaced}):  # "": any other one
            _follow(
                steps, 1, dict.fromkeys(replaced, 0.0) | ({character: 1.0} if character else {})
            )
    for part in PARTS:
        for inner in _parts(content.get(part)):
            if inner.get("type") == "Replace" and inner.get("pattern") == {"String": ""}:
                raise GrowingText(f"{part} replaces the empty text")
            if inner.get("type") == "FixedLength" and inner.get("length") == 0:
                raise GrowingText(f"{part} cuts texts into parts of no characters")


def _steps(step: Any, place: str) -> Iterator[tuple[str, Json]]:
    """Yield steps in their order, with their places in the file."""
    if not isinstance(step, Mapping):
        return
    if step.get("type") != "Sequence":
        yield f"{place} ({step.get('type')})", step
        return
    for name in ("normalizers", "decoders"):
        for number, one in enumerate(step.get(name) or ()):
            yield from _steps(one, f"{place}.{name}[{number}]")


def _follow(steps: list[tuple[str, Json]], start: int, counts: dict[str, float]) -> None:
    """Follow a text through all steps: its length, 0 or 1 to begin with, and how often it has what is replaced."""
    length = float(start)
    for place, step in steps:
        kind = step.get("type")
        added, times = "", 0.0
        shorter = 0  # characters that each time vanish
        if kind == "Replace":
            added, literal = _canonical(step.get("content")), _literal(step)
            shorter = len(literal) or _shortest_match(step)
            # A pattern that matches nothing does so between all characters, and once in a text
            # without any.
            times = (
                counts[literal[0]]
                if literal
                else length / shorter
                if shorter
                else length + (not start)
            )
        elif kind == "Prepend" and not start:
            added, times = _canonical(step.get("prepend")), 1.0
        elif kind in FACTORS or kind == "Precompiled":
            length *= FACTORS.get(kind) or _longest_mapped(step)
            counts = dict.fromkeys(counts, length)
        length += times * max(0, len(added) - shorter)
        for character in counts.keys() & set(added):
            counts[character] += times * added.count(character)
        if length > (MAX_GROWTH if start else MAX_ADDED):
            what = f"of one; at most {MAX_GROWTH}" if start else f"of nothing; at most {MAX_ADDED}"
            raise GrowingText(f"{place} makes {length:,.0f} characters {what} are accepted")


def _canonical(text: Any) -> str:
    """Write a text as the longest of Unicode's forms does, so that other steps make no other characters of it."""
    return unicodedata.normalize("NFKD", text).casefold() if isinstance(text, str) else ""


def _literal(step: Json) -> str:
    """Return the text that a step replaces; empty where it is no text, but a regular expression."""
    pattern = step.get("pattern")
    return _canonical(pattern.get("String")) if isinstance(pattern, Mapping) else ""


def _shortest_match(step: Json) -> int:
    """Return how long a match of a step's regular expression is at least; 0 where that is not known."""
    parsed = [_parsed(expression) for expression in _patterns(step.get("pattern"))]
    return int(parsed[0].getwidth()[0]) if parsed and parsed[0] is not None else 0


def _patterns(part: Any) -> Iterator[str]:
    """Yield the regular expressions of a part."""
    return (inner["Regex"] for inner in _parts(part) if isinstance(inner.get("Regex"), str))


def _parts(part: Any) -> Iterator[Json]:
    """Yield all objects in a part of the file, itself first."""
    if isinstance(part, Mapping):
        yield part
    for inner in (
        part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    ):
        yield from _parts(inner)


def _parsed(expression: str) -> Any:
    """Parse a regular expression; None where Python cannot."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return re._parser.parse(PROPERTY.sub(r"\\w", expression))
    except (re.error, RecursionError, OverflowError, ValueError):
        return None


def _searches_for_ages(expression: str) -> bool:
    """Return whether it repeats without end what is nothing but such repetitions, as (a+)+: 2^n ways to match n."""
    parsed = _parsed(expression)
    return parsed is not None and any(
        _repeats(body) for operation, body in _operations(parsed) if _is_endless(operation, body)
    )


def _operations(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all operations of a parsed expression, with what they take."""
    for operation, taken in parsed:
        yield operation, taken
        for inner in _inside(taken):
            yield from _operations(inner)


def _inside(taken: Any) -> Iterator[Any]:
    """Yield the expressions in what an operation takes."""
    if isinstance(taken, re._parser.SubPattern):
        yield taken
    elif isinstance(taken, tuple | list):
        for item in taken:
            yield from _inside(item)


def _is_endless(operation: Any, taken: Any) -> bool:
    return operation in _REPEATS and taken[1] == re._constants.MAXREPEAT


def _repeats(taken: Any) -> bool:
    """Return whether one of the expressions in it is nothing but endless repetitions."""
    return any(
        len(inner) > 0
        and all(
            _is_endless(operation, taken) or (operation in _GROUPS and _repeats(taken))
            for operation, taken in inner
        )
        for inner in _inside(taken)
    )


def _longest_mapped(step: Json) -> int:
    """Return the length of the longest text that SentencePiece's map makes of a character: a trie, and then texts."""
    try:
        content = base64.b64decode(str(step.get("precompiled_charsmap")), validate=True)
        (size,) = struct.unpack_from("<I", content)
        texts = content[4 + size // 4 * 4 :]
        texts.decode()
        if 4 + size > len(content):
            raise ValueError("it is cut off")
        return max(1, *(len(text) for text in texts.split(b"\0")))
    except (struct.error, ValueError) as error:
        raise GrowingText(f"its precompiled_charsmap cannot be read: {error}") from None
