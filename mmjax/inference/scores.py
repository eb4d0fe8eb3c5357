"""Score answers by the measures that benchmarks use. `right` are all the answers that count as right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

AGREEING = 3  # people whose answer it must be to be wholly right (VQA)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"none": "0"}
ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class Scored:
    """One answer, and what it should have been."""

    prediction: str
    right: tuple[str, ...]


def exact_match(answers: Sequence[Scored]) -> float:
    """The share that is, but for white space around it, one of the right answers."""
    return float(np.mean([a.prediction.strip() in {right.strip() for right in a.right} for a in answers]))


def anls(answers: Sequence[Scored]) -> float:
    """Average normalized Levenshtein similarity (Biten et al. 2019): below 0.5 it is 0; case does not count."""

    def similar(prediction: str, right: str) -> float:
        similarity = 1 - Levenshtein.normalized_distance(_folded(prediction), _folded(right))
        return similarity if similarity >= 0.5 else 0.0

    return float(np.mean([max(similar(a.prediction, right) for right in a.right) for a in answers]))


def vqa_accuracy(answers: Sequence[Scored]) -> float:
    """Accuracy as VQA has it (Antol et al. 2015): 1 where three people or more gave this answer, less where fewer did.

    Averaged over all but one of the people, each left out in turn; of fewer than three answers any is wholly right.
    Articles, punctuation, case and apostrophes do not count, and number words are digits.
    """

    def accuracy(a: Scored) -> float:
        prediction = _plain(a.prediction)
        right = [_plain(right) for right in a.right]
        if len(right) < AGREEING:
            return float(prediction in right)
        same = right.count(prediction)
        # Two of ten people gave it: 1/3 without one of these two, 2/3 without one of the eight, 0.6 on average.
        return float(np.mean([min(1.0, (same - (one == prediction)) / AGREEING) for one in right]))

    return float(np.mean([accuracy(a) for a in answers]))


def word_error_rate(answers: Sequence[Scored]) -> float:
    """Words inserted, left out or replaced, of all answers together, over the words of the right ones.

    By the nearest of several right answers; case and punctuation do not count.
    """
    errors = words = 0
    for a in answers:
        prediction = _words(a.prediction)
        distances = [(Levenshtein.distance(prediction, right), len(right)) for right in map(_words, a.right)]
        error, length = min(distances, key=lambda pair: pair[0] / max(pair[1], 1))
        errors += error
        words += length
    return errors / max(words, 1)


MEASURES: dict[str, Callable[[Sequence[Scored]], float]] = {
    "exact_match": exact_match,
    "anls": anls,
    "vqa_accuracy": vqa_accuracy,
    "wer": word_error_rate,
}


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def _straight(text: str) -> str:
    """With typewriters' apostrophes."""
    return text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


def _words(text: str) -> list[str]:
    return re.sub(r"[^\w\s']|_", " ", _straight(text).lower()).split()


def _plain(text: str) -> str:
    text = _straight(text).lower().replace("'", "")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)  # 1,000
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)  # not that of 3.5
    words = re.sub(r"[^\w\s.]|_", " ", text).split()
    return " ".join(DIGITS.get(word, word) for word in words if word not in ARTICLES)
