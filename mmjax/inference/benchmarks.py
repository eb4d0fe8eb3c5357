"""Ask and score public benchmarks by their own rules: MMBench, AI2D, MMMU, ChartQA, DocVQA and MME."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from mmjax.data.sources.benchmark_tables import read_table, stamps
from mmjax.data.storage.files import hash_strings
from mmjax.disk import atomic_folder
from mmjax.inference.scores import Replies, Scored, Scores, anls

Row = Mapping[str, Any]  # of a benchmark's table, by column
ONE_WORD = "Answer the question using a single word or phrase."
YES_OR_NO = " Please answer yes or no."
CIRCLE = 1_000_000  # MMBench asks question n again, options rotated, as n + 1,000,000 and so on
# what may be around an option's letter
AFFIXES = (
    ("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ")."),
    (":", ""), (":", ","), (":", "."), (":", ")"), (":", ")."),
)  # fmt: skip
PERCEPTION = {
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """A row of a benchmark, and what a model answered."""

    row: Row
    prediction: str


@dataclass(frozen=True)
class Benchmark:
    """Ask a benchmark's rows, and score the answers."""

    question: Callable[[Row], str]
    score: Callable[[Sequence[Reply]], Scores]
    columns: tuple[str, ...] = ("question", "answer")  # that a table must have


def options(row: Row) -> dict[str, str]:
    """Return the options by letter: of the columns A, B, ..., or of a list, which may be written as Python's."""
    listed_options = row.get("options") or row.get("choices")
    if isinstance(listed_options, str):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            listed_options = ast.literal_eval(listed_options)  # literals only, nothing is executed
    if isinstance(listed_options, list | tuple):
        return dict(zip(ascii_uppercase, map(str, listed_options), strict=False))
    columns = {letter: row.get(letter) for letter in ascii_uppercase}
    return {letter: str(text) for letter, text in columns.items() if text not in (None, "", "nan")}


def right_letter(row: Row) -> str:
    """Return the letter of the right option, which a table names by letter or by number from 0 on."""
    answer = str(row["answer"]).strip()
    return ascii_uppercase[int(answer)] if answer.isdecimal() else answer.upper()


def chosen_option(answer: str, choices: Mapping[str, str]) -> str:
    """Return the letter that an answer chooses, else of the only option whose text it has; empty: neither.

    MMBench's heuristic matching (Liu et al. 2023, section 4.2), without its language model.
    """
    words = answer.split()
    for before, after in (("", ""), *AFFIXES):
        letters = [
            c for c in ("ABCD" if after or before else "ABCDE") if f"{before}{c}{after}" in words
        ]
        # "A" alone may be the article.
        if len(letters) == 1 and not (before == after == "" and "A" in words and len(words) > 3):
            return letters[0]
    named = [c for c, text in choices.items() if text.lower() in answer.lower()]
    return named[0] if len(named) == 1 else ""


def last_option(answer: str, choices: Mapping[str, str]) -> str:
    """Return the letter that an answer names last, else of the option whose text it has last; empty: neither.

    MMMU's rule (Yue et al. 2023), which draws at random where this is empty.
    """
    for mark in ",.!?;:'":
        answer = answer.strip(mark)
    answer = f" {answer} "
    for form, place in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        if letters := [c for c in choices if form.format(c) in answer]:
            return max(letters, key=lambda c: answer.rfind(place.format(c)))
    if len(answer.split()) <= 5:
        return ""
    folded = {c: text.lower() for c, text in choices.items() if text.lower() in answer.lower()}
    return max(folded, key=lambda c: answer.lower().rfind(folded[c]), default="")


def relaxed_match(prediction: str, answer: str) -> bool:
    """Return whether a number is within 5 % of the reference, or a text is the reference but for case (ChartQA)."""
    value, reference = _number(prediction), _number(answer)
    if value is not None and reference:
        return abs(value - reference) / abs(reference) <= 0.05
    return prediction.lower() == answer.lower()


def yes_or_no(answer: str) -> str:
    """Return "yes" or "no", which an answer is or begins with; empty: neither (MME)."""
    answer = answer.lower().strip().replace(".", "")
    if len(answer) == 1:
        return {"y": "yes", "n": "no"}.get(answer, "")
    return next((word for word in ("yes", "no") if word in answer[:4]), "")


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _mean(hits: Iterable[bool]) -> float:
    return float(np.mean([*hits]))


def _with_options(row: Row) -> str:
    hint = row.get("hint")
    lines = [str(hint)] if hint and hint != "nan" else []
    choices = [f"{letter}. {text}" for letter, text in options(row).items()]
    end = (
        "Answer with the option's letter from the given choices directly." if choices else ONE_WORD
    )
    return "\n".join([*lines, str(row["question"]), *choices, end])


def _of_circles(replies: Sequence[Reply]) -> Scores:
    circles: dict[int, list[bool]] = defaultdict(list)
    for reply in replies:
        choices = options(reply.row)
        right = chosen_option(reply.prediction, choices) == right_letter(reply.row)
        circles[int(reply.row["index"]) % CIRCLE].append(right)
    hits = [hit for circle in circles.values() for hit in circle]
    return {"accuracy": _mean(map(all, circles.values())), "accuracy_once": _mean(hits)}


def _of_options(choose: Callable[[str, Mapping[str, str]], str]) -> Callable[..., Scores]:
    """Score by an option's letter, and questions without options by their answer, case and full stop aside."""

    def right(reply: Reply) -> bool:
        if choices := options(reply.row):
            return choose(reply.prediction, choices) == right_letter(reply.row)
        folded = reply.prediction.strip().rstrip(".").lower()
        return folded in {str(a).strip().rstrip(".").lower() for a in _references(reply.row)}

    return lambda replies: {"accuracy": _mean(map(right, replies))}


def _references(row: Row) -> list[str]:
    """List the right answers, of a list that may be written as Python's."""
    answers = row.get("answers") or row["answer"]
    if isinstance(answers, str) and answers.startswith("["):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            answers = ast.literal_eval(answers)
    return [*map(str, answers)] if isinstance(answers, list) else [str(answers)]


def _relaxed(replies: Sequence[Reply]) -> Scores:
    parts: dict[str, list[bool]] = defaultdict(list)
    for reply in replies:
        hit = any(relaxed_match(reply.prediction, right) for right in _references(reply.row))
        part = str(reply.row.get("type") or reply.row.get("split") or "")
        for name in {"relaxed_accuracy", *([f"relaxed_accuracy_{part}"] if part else [])}:
            parts[name].append(hit)
    return {name: _mean(hits) for name, hits in sorted(parts.items())}


def _of_documents(replies: Sequence[Reply]) -> Scores:
    return {"anls": anls([Scored(r.prediction, tuple(_references(r.row))) for r in replies])}


def _of_pairs(replies: Sequence[Reply]) -> Scores:
    """Score images, each asked twice: accuracy and the share of images with both right, in points by category."""
    pairs: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for reply in replies:
        row = reply.row
        name = str(row.get("question_id") or row.get("image_path") or row["images"])
        hit = yes_or_no(reply.prediction) == yes_or_no(str(row["answer"])) != ""
        pairs[str(row["category"])][name].append(hit)
    points = {
        category: 100
        * (
            _mean(h for pair in by_image.values() for h in pair)
            + _mean(map(all, by_image.values()))
        )
        for category, by_image in sorted(pairs.items())
    }
    groups = {
        name: [p for c, p in points.items() if (c in PERCEPTION) == (name == "perception")]
        for name in ("perception", "cognition")
    }
    return {name: float(sum(values)) for name, values in groups.items() if values} | points


BENCHMARKS = {
    "mmbench": Benchmark(_with_options, _of_circles, ("index", "question", "answer")),
    "ai2d": Benchmark(_with_options, _of_options(chosen_option)),
    "mmmu": Benchmark(_with_options, _of_options(last_option)),
    "chartqa": Benchmark(
        lambda row: f"{row['question']}\nAnswer the question with a single word.", _relaxed
    ),
    "docvqa": Benchmark(lambda row: f"{row['question']}\n{ONE_WORD}", _of_documents, ("question",)),
    "mme": Benchmark(
        lambda row: f"{str(row['question']).replace(YES_OR_NO, '')}\n{ONE_WORD}",
        _of_pairs,
        ("question", "answer", "category"),
    ),
}
QUESTIONS, ROWS = "questions.jsonl", "rows.jsonl"
PLACE = re.compile(r"<image ?(\d)>")  # of one of several images in a text


def write_questions(name: str, path: str, option: str, cache: Path) -> Path:
    """Write a benchmark's questions as records of messages with their images, unless that was done; return the folder.

    Raises UserError, naming `option`, for a table that is none of this benchmark.
    """
    benchmark = BENCHMARKS[name]
    folder = cache / f"benchmark-{hash_strings(name, *stamps(path, option))}"
    if folder.exists():
        return folder
    with (
        atomic_folder(folder) as partial,
        (partial / QUESTIONS).open("w") as questions,
        (partial / ROWS).open("w") as rows,
    ):
        for row, images in read_table(path, option, benchmark.columns, cache):
            files = [f"{hashlib.sha256(image).hexdigest()}.image" for image in images]
            for file, image in zip(files, images, strict=True):
                (partial / file).write_bytes(image)
            content = _message_parts(benchmark.question(row), files)
            right = str(row.get("answer") or row.get("answers"))
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": right},
            ]
            questions.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            rows.write(json.dumps(row | {"images": files}, ensure_ascii=False, default=str) + "\n")
    return folder


def score_replies(name: str, folder: Path, replies: Replies) -> Scores:
    """Score answers to a benchmark's questions by its own rules; nothing where nothing was asked."""
    rows = (folder / ROWS).read_text().splitlines()
    scored = [Reply(json.loads(rows[a.sample]), a.prediction) for a in replies.answered]
    return BENCHMARKS[name].score(scored) if scored else {}


def _message_parts(text: str, images: Sequence[str]) -> list[dict[str, str]]:
    """Put images where a text names them by number, and those that it does not name before it."""
    pieces = PLACE.split(text)
    numbers = {int(number) - 1 for number in pieces[1::2]}
    parts = [{"type": "image", "path": name} for n, name in enumerate(images) if n not in numbers]
    for k, piece in enumerate(pieces):
        if k % 2 == 0:
            parts += [{"type": "text", "text": piece}] if piece else []
        elif int(piece) <= len(images):
            parts.append({"type": "image", "path": images[int(piece) - 1]})
    return parts
