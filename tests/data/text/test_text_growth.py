"""A tokenizer.json that makes texts longer and longer is refused by the step that does, before any text is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import tokenizers

from mmjax.data.sample import BadSample
from mmjax.data.text.text_growth import MAX_GROWTH, check_growth
from mmjax.data.text.tokenizer import load_tokenizer
from mmjax.errors import UserError

# a, which NFKC makes plain; and one that it makes 18 characters of
WIDE, WIDEST = "\uff41", "\ufdfa"
TIMES = "ab \u4e2d\xc3" * 2 + WIDEST


def replace(pattern: str | dict[str, str], content: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


def regex(pattern: str, content: str) -> dict[str, Any]:
    return replace({"Regex": pattern}, content)


def prepend(text: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": text}


NFKC, NFKD, LOWER = ({"type": kind} for kind in ("NFKC", "NFKD", "Lowercase"))
BYTES = {"type": "ByteLevel"}
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
GROWING = {
    "doubled": [replace("a", "aa")] * 40,
    "doubled ten times": [replace("a", "aa")] * 10,
    "all doubled": [regex(".", "ab")] * 10,
    "doubled by a class": [regex(r"[\p{L}a]", "aa")] * 12,
    "in turns": [replace("a", "bb"), replace("b", "aa")] * 6,
    "pairs": [replace("ab", "abab")] * 14,
    "between all characters": [replace("", "x")] * 10,
    "where nothing matches": [regex("", "x")] * 10,
    "where nothing may match": [regex("a?", "aa")] * 9,
    "before a letter": [regex("(?=b)", "bb")] * 12,
    "nested": [
        {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [replace("a", "aaa")] * 7}],
        }
    ],
    "long": [replace("a", "x" * 1000)],
    "prepended": [prepend("a" * 10_000)],
    "prepended often": [prepend("a" * 1000)] * 5,
    "prepended and replaced": [prepend("a" * 4000), replace("a", "aaaa")],
    "by letter case": [replace("a", "AA"), LOWER] * 10,
    "by width": [replace("a", WIDE * 2), NFKC] * 10,
    "by Unicode's longest": [replace(" ", WIDEST), NFKD] * 4,
    "by bytes": [replace("\xc3", "\xe9\xe9"), BYTES] * 8,
    "by spaces around": [replace(" ", "\u4e2d\u4e2d"), BERT] * 8,
    "many steps": [regex("x", "x")] * 1000,
}
USUAL = {
    "Llama": [prepend("\u2581"), replace(" ", "\u2581")],
    "CLIP": [{"type": "NFC"}, regex(r"\s+", " "), LOWER],
    "ALBERT": [
        replace("``", '"'),
        replace("''", '"'),
        NFKD,
        {"type": "StripAccents"},
        LOWER,
        regex(" {2,}", " "),
    ],
    "fractions": [
        replace(character, "1/2")
        for character in "\xbc\xbd\xbe\u2153\u2154\u2155\u2156\u2157\u2158\u2159"
    ],
    "control characters": [replace(chr(code), f"<0x{code:02X}>") for code in range(9, 14)],
    "white space, twenty times": [regex(r"[\p{Zs}\s]+", " ")] * 20,
    "quotes": [replace(old, new) for old, new in ('\u201c"', "\u2019'", "\u2014-", "\t ")],
    "BERT": [BERT],
}


def write(folder: Path, **parts: object) -> str:
    """Write a tokenizer of characters into a folder."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    content = {"version": "1.0", **dict.fromkeys(names), "added_tokens": [], "model": model} | parts
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_make_texts_ever_longer_are_named(name: str, tmp_path: Path) -> None:
    steps = GROWING[name]
    folder = write(tmp_path, normalizer={"type": "Sequence", "normalizers": steps})
    with pytest.raises(
        UserError, match=r"tokenizer\.json: normalizer.* (makes|has) [\d,]+ .*are accepted"
    ) as refused:
        load_tokenizer(folder)
    assert "\n" not in str(refused.value)
    if all("pattern" in step for step in steps):
        folder = write(tmp_path, decoder={"type": "Sequence", "decoders": steps})
        with pytest.raises(UserError, match=r"tokenizer\.json: decoder"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", USUAL)
def test_usual_steps_are_read_and_stay_below_the_bound(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, normalizer={"type": "Sequence", "normalizers": USUAL[name]})
    backend = load_tokenizer(folder).backend
    for character in TIMES + "\n\u2153":
        assert len(backend.normalizer.normalize_str(character)) <= MAX_GROWTH


def test_what_passes_grows_no_text_by_more_than_is_accepted() -> None:
    """The bound beside what the library does, with every number of steps up to the one that is refused."""
    for name, steps in GROWING.items():
        for count in range(1, min(len(steps), 40)):
            part = {"type": "Sequence", "normalizers": steps[:count]}
            try:
                check_growth({"normalizer": part})
            except ValueError:
                break
            backend = tokenizers.Tokenizer.from_str(
                json.dumps(
                    {
                        "version": "1.0",
                        "normalizer": part,
                        "model": {"type": "BPE", "vocab": {}, "merges": []},
                    }
                )
            )
            grown = len(backend.normalizer.normalize_str(TIMES)) - len(
                backend.normalizer.normalize_str("")
            )
            assert grown <= 18 * MAX_GROWTH * len(TIMES), (name, count)
            assert len(backend.normalizer.normalize_str("")) <= 4096, (name, count)


def test_tokenizers_of_all_kinds_are_checked_in_a_moment(tmp_path: Path) -> None:
    makers = [
        lambda: checkpoints.byte_level(checkpoints.LLAMA3),
        lambda: checkpoints.llama2(("<image>",)),
    ]
    for make in (*makers, checkpoints.unigram, checkpoints.gemma):
        content = json.loads(make().to_str())
        began = time.process_time()
        for _ in range(10):
            check_growth(content)
        assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(a+)+$", "(?:(?:a*)*)*$", r"(b+|\p{L})*", "(a+?)*"]
)
def test_a_pattern_that_repeats_what_repeats_itself_is_named(pattern: str, tmp_path: Path) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    for part, step in (
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split]}),
        ("normalizer", regex(pattern, "")),
    ):
        with pytest.raises(
            UserError, match=rf"tokenizer\.json: {part} repeats what repeats itself: "
        ):
            load_tokenizer(write(tmp_path, **{part: step}))


@pytest.mark.parametrize("content", ["", "AAAA", "/////w==", "BAAAAAAAAAD/", "%"])
def test_a_character_map_that_the_library_panics_at_is_refused_before(
    content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UserError, match=r"tokenizer\.json: its precompiled_charsmap cannot be read"
    ):
        load_tokenizer(
            write(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": content})
        )
    assert capfd.readouterr().err == ""


def test_a_pattern_that_would_search_for_ages_makes_a_bad_sample_and_no_other(
    tmp_path: Path,
) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = load_tokenizer(write(tmp_path, pre_tokenizer=split))
    ages = "a" * 60 + "!"
    first, second, third = tokenizer.encode_all(["aa", ages, "a"])
    assert isinstance(second, BadSample)
    assert (
        f"{tmp_path}/tokenizer.json cannot tokenize it: Onig: Regex search error: retry-limit"
        in str(second)
    )
    assert (first.ids.tolist(), third.ids.tolist()) == ([1], [0])
    with pytest.raises(
        UserError, match=r"tokenizer\.json: model\.max_input_chars_per_word=5000; at most 1000"
    ):
        load_tokenizer(
            write(
                tmp_path,
                model={
                    "type": "WordPiece",
                    "vocab": {"a": 0},
                    "unk_token": "a",
                    "max_input_chars_per_word": 5000,
                },
            )
        )


def test_steps_that_the_library_panics_at_are_named(tmp_path: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": ""}, "content": "q"}
    with pytest.raises(UserError, match=r"tokenizer\.json: normalizer replaces the empty text"):
        load_tokenizer(write(tmp_path, normalizer={"type": "Sequence", "normalizers": [replace]}))
    with pytest.raises(
        UserError, match=r"tokenizer\.json: pre_tokenizer cuts texts into parts of no characters"
    ):
        load_tokenizer(write(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0}))
