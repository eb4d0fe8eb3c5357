"""Score answers: exact match, ANLS, VQA accuracy and word error rate, and what sets of answers have of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    return float(
        np.mean([a.prediction.strip() in {right.strip() for right in a.right} for a in answers])
    )


def anls(answers: Sequence[Scored]) -> float:
    """Average normalized Levenshtein similarity (Biten et al. 2019): below 0.5 it is 0; case does not count."""

    def similar(prediction: str, right: str) -> float:
        similarity = 1 - Levenshtein.normalized_distance(_folded(prediction), _folded(right))
        return similarity if similarity >= 0.5 else 0.0

    return float(np.mean([max(similar(a.prediction, right) for right in a.right) for a in answers]))


def vqa_accuracy(answers: Sequence[Scored]) -> float:
    """Accuracy as VQA has it (Antol et al. 2015): 1 where three people or more gave this answer, less where fewer did.

    Averaged over all but one of the people, each left out in turn; of fewer than three answers any
    is wholly right. Articles, punctuation, case and apostrophes do not count, and number words are
    digits.
    """

    def accuracy(a: Scored) -> float:
        prediction = _plain(a.prediction)
        right = [_plain(right) for right in a.right]
        if len(right) < AGREEING:
            return float(prediction in right)
        same = right.count(prediction)
        # Two of ten people gave it: 1/3 without one of these two, 2/3 without one of the eight, 0.6
        # on average.
        return float(np.mean([min(1.0, (same - (one == prediction)) / AGREEING) for one in right]))

    return float(np.mean([accuracy(a) for a in answers]))


def word_error_rate(answers: Sequence[Scored]) -> float:
    """Words inserted, left out or replaced, of all answers together, over the words of the right ones.

    By the nearest of several right answers; case and punctuation do not count.
    """
    errors = words = 0
    for a in answers:
        prediction = _words(a.prediction)
        distances = [
            (Levenshtein.distance(prediction, right), len(right)) for right in map(_words, a.right)
        ]
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


Scores = dict[str, float]


@dataclass(frozen=True)
class Answered:
    """One question of a data set and what the model answered."""

    sample: int
    family: str
    task: str
    question: str
    answer: str
    prediction: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on
    references: tuple[str, ...]  # all answers that count as right
    ended: bool  # by an end token, and not because there was room for no more

    @property
    def scored(self) -> Scored:
        """Return the prediction and its references for `MEASURES`."""
        return Scored(self.prediction, self.references)

    def __str__(self) -> str:
        right = self.prediction == self.answer
        question = self.question.replace("\n", "\\n")
        return f"{question}  ->  {self.prediction!r}" + (
            "" if right else f"  (it is {self.answer!r})"
        )


@dataclass(frozen=True)
class Replies:
    """The answers to one source's questions, and why the others could not be asked, by sample."""

    answered: tuple[Answered, ...]
    left_out: dict[int, str]

    def scores(self, measures: Sequence[str]) -> Scores:
        """Score by measure, as `MEASURES` names them; nothing where nothing was asked."""
        answers = [a.scored for a in self.answered]
        return {name: MEASURES[name](answers) for name in measures} if answers else {}

    def json_lines(self, source: str) -> Iterator[Mapping[str, object]]:
        """Yield one JSON object for every question, asked or not."""
        for a in self.answered:
            line = {
                "sample": f"{source}[{a.sample}]",
                "said": a.prediction,
                "right": list(a.references),
            }
            yield line if a.ended else line | {"ended": False}
        for sample, reason in self.left_out.items():
            yield {"sample": f"{source}[{sample}]", "left_out": reason}


def exact_match_by_group(answered: Sequence[Answered]) -> Scores:
    """Return `exact_match_<family>`, then `exact_match_<family>.<task>`, and `samples`; nothing without answers."""
    groups = defaultdict[str, list[Scored]](list)
    for a in answered:
        for group in {a.family, a.task}:
            groups[group].append(a.scored)
    names = sorted(groups, key=lambda name: ("." in name, name))
    scores = {f"exact_match_{name}": MEASURES["exact_match"](groups[name]) for name in names}
    return scores | {"samples": len(answered)} if scores else {}


def chance(answered: Sequence[Answered]) -> Scores:
    """Return `chance_<family>`: the exact match of each task's most frequent answer."""
    answers: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for a in answered:
        answers[a.family][a.task][a.answer] += 1
    return {
        f"chance_{family}": sum(max(c.values()) for c in tasks.values())
        / sum(c.total() for c in tasks.values())
        for family, tasks in sorted(answers.items())
    }
