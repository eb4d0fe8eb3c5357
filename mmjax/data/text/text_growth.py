"""Bound how much longer a tokenizer.json may make a text, before anything is tokenized.

Twenty replacements of `a` by `aa` make a megabyte of one letter, and forty of them never end. The steps of a
normalizer, and those of a decoder, are followed with upper bounds: of how many characters a text of one character has
after each step, and of how many of these a later step replaces. Bounds add up, so that what holds for every single
character holds for all texts.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

MAX_GROWTH = 256  # characters for one; Unicode's own forms of one have up to 18, which is not counted here
MAX_ADDED = 4096  # characters to a text of any length
MAX_STEPS = 256
MAX_WORD = 1000  # characters of a word that WordPiece splits, whose time grows with their square; it has 100
FACTORS = {"BertNormalizer": 3, "ByteLevel": 4, "ByteFallback": 1}  # steps that make other characters of one
# Python's parser knows the shortest match of most patterns, but no properties of characters.
PROPERTY = re.compile(r"\\[pP]\{[^{}]*\}|\[:\^?\w+:\]")

Json = Mapping[str, Any]


class GrowingText(ValueError):
    """Too long a text: the step's place in the file, and by how much."""


def check_growth(content: Json) -> None:
    """Raise GrowingText where a tokenizer.json's normalizer or decoder makes texts longer without a reason.

    Words that take ages are refused, too.
    """
    model = content.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, Mapping) else None
    if isinstance(word, int) and word > MAX_WORD:
        raise GrowingText(f"model.max_input_chars_per_word={word}; at most {MAX_WORD} are accepted")
    for part in ("normalizer", "decoder"):
        steps = list(_steps(content.get(part), part))
        if len(steps) > MAX_STEPS:
            raise GrowingText(f"{part} has {len(steps):,} steps; at most {MAX_STEPS} are accepted")
        if not any(step.get("type") in ("Replace", "Prepend", "Precompiled") for _, step in steps):
            continue
        replaced = {_literal(step)[:1] for _, step in steps} - {""}
        _follow(steps, 0, dict.fromkeys(replaced, 0.0))
        for character in sorted({"", *replaced}):  # "": any other one
            _follow(steps, 1, dict.fromkeys(replaced, 0.0) | ({character: 1.0} if character else {}))


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
            # A pattern that matches nothing does so between all characters, and once in a text without any.
            times = counts[literal[0]] if literal else length / shorter if shorter else length + (not start)
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
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if not isinstance(expression, str):
        return 0
    try:
        with warnings.catch_warnings(action="ignore"):
            return int(re._parser.parse(PROPERTY.sub(r"\\w", expression)).getwidth()[0])
    except (re.error, RecursionError, OverflowError, ValueError):
        return 0


def _longest_mapped(step: Json) -> int:
    """Return the length of the longest text that SentencePiece's map makes of a character: a trie, and then texts."""
    try:
        content = base64.b64decode(str(step.get("precompiled_charsmap") or ""))
        (size,) = struct.unpack_from("<I", content)
        return max(1, *(len(text) for text in content[4 + size :].split(b"\0")))
    except (binascii.Error, struct.error, TypeError):
        return 1
