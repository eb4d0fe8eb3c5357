"""The embedded dataset: handwritten digits and keypad tones with questions about them, from a seed.

Small enough to learn in minutes on two cores, and as uneven as real corpora: text alone, one image, several, clips and
images in any order with words between, lengths with a long tail. See `questions.py` for what is asked.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from math import ceil
from typing import NamedTuple

import numpy as np

from mmjax.config import EmbeddedSource
from mmjax.data import digits, tones
from mmjax.data.digits import Split, Strip
from mmjax.data.questions import ENCODER, Ask, Family, choose, possible
from mmjax.data.sample import Facts, Item, Question, Sample, Text
from mmjax.data.tones import Clip

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789*#?+"
END = 1  # the token that ends an answer; 0 is padding, characters follow from 2

FAMILIES: dict[Family, float] = {"image": 0.34, "audio": 0.34, "mixed": 0.22, "text": 0.10}
HELD_OUT_SAMPLES = {"validation": 1000, "test": 2000}

# RoPE positions. The question always starts at the same place, and items stand at fixed strides before it, so that "the
# second image" and "left" mean the same distance in every sample.
QUESTION = 256
STRIDE = 64
BEFORE_ITEM = 16  # of each stride, for the words before the item; the longest clip takes the other 48
PASSAGE = 128

_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_IMAGES = (0.70, 0.87, 0.96)  # cumulative: of 1, 2, 3 images in an image sample; else 4
_CLIPS = (0.86, 0.97)  # of 1, 2 clips in an audio sample; else 3
_MIXES = ((0.66, "ia"), (0.79, "iia"), (0.92, "iaa"), (0.97, "iiia"), (1.0, "iiaa"))
_WORDS = ("here", "now", "then", "look", "note", "see", "this", "page", "call", "line", "from", "next", "one", "memo")
_TOKEN = np.zeros(128, np.int32)
_TOKEN[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(2, 2 + len(ALPHABET))


class Recipe(NamedTuple):
    """Everything about a sample but its pixels and waves."""

    family: Family
    words: tuple[str, ...]  # before each item; of a text sample, before the passage
    media: tuple[Strip | Clip, ...]
    passage: str
    asks: tuple[Ask, ...]


class EmbeddedDataset:
    """A `Source` of the embedded samples of one split; a sample depends on seed, split and its index alone.

    Splits share no digit image, whatever the seed. Training samples carry up to `source.questions` questions as
    parallel branches; validation and test samples exactly one. Samples go on behind the end of a split, unused.
    """

    def __init__(self, source: EmbeddedSource, split: Split, seed: int) -> None:
        if split not in _SPLITS:
            raise ValueError(f"unknown split {split!r}; known: {', '.join(_SPLITS)}")
        self.source, self.split, self.seed = source, split, seed
        self._families = _cumulative({family: FAMILIES[family] for family in FAMILIES if family in source.modalities})

    def __len__(self) -> int:
        return HELD_OUT_SAMPLES.get(self.split, self.source.samples)

    def fingerprint(self) -> str:
        """Changes when any sample changes."""
        source = (self.source.modalities, self.source.samples, self.source.questions)
        made_by = ("embedded-2", source, self.split, self.seed, ALPHABET)
        return hashlib.sha256(repr(made_by).encode() + digits.digit_table()[0].tobytes()).hexdigest()[:16]

    def facts(self, index: int) -> Facts:
        """Text tokens and item sizes of a sample."""
        recipe = self.recipe(index)
        asked = sum([len(ask.text) + len(ask.answer) + 1 for ask in recipe.asks])
        text = sum(map(len, recipe.words)) + len(recipe.passage) + asked
        return Facts(text, tuple([(ENCODER[type(item)], _size(item)) for item in recipe.media]))

    def sample(self, index: int) -> Sample:
        """A sample with its questions and answers."""
        recipe = self.recipe(index)
        branches = (_branch(number, ask, answered=True) for number, ask in enumerate(recipe.asks, start=1))
        return Sample((*_context(recipe), *branches))

    def question(self, index: int) -> Question:
        """A sample's (first) question, its answer left out."""
        recipe = self.recipe(index)
        ask = recipe.asks[0]
        prompt = Sample((*_context(recipe), _branch(1, ask, answered=False)))
        return Question(recipe.family, ask.task, prompt, ask.answer, ask.needs)

    def item(self, index: int, number: int) -> np.ndarray:
        """Render an image, uint8 `[height, width, 1]`, or synthesise a clip, float32 `[samples]` at 4 kHz."""
        media = self.recipe(index).media[number]
        rng = self._rng(index, 1 + number)
        if isinstance(media, Clip):
            return tones.render_clip(media, rng)
        return digits.render_strip(media, rng if self.split == "train" else None)

    def recipe(self, index: int) -> Recipe:
        """What a sample is made of."""
        u = _uniforms(self._rng(index, 0))
        family = _pick(u, self._families)
        media = _draw_media(u, family, digits.digits_of(self.split), self.split == "train")
        passage = _draw_passage(u) if family == "text" else ""
        words = (_draw_words(u, 0.75, 78),) if passage else tuple([_draw_words(u, 0.3, BEFORE_ITEM) for _ in media])
        # Media are encoded once for all their questions, so more cost little: 1..n, the chance of n rising with n.
        count = max(1, ceil(self.source.questions * next(u) ** 0.5)) if self.split == "train" else 1
        return Recipe(family, words, media, passage, choose(u, possible(family, media, passage), count))

    def _rng(self, index: int, stream: int) -> np.random.Generator:
        """Stream 0 draws the recipe, stream n the n-th item; Philox's counter tells them apart."""
        key = np.array([self.seed % 2**64, _SPLITS.index(self.split)], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, stream, index, 0]))


class SwappedItems:
    """An embedded dataset whose samples got another sample's images or clips: a control for evaluation.

    Text, questions and answers stay; the items of `encoders` come from the next sample of the same family with as many.
    A model that really uses them falls to chance on every question that needs them.
    """

    def __init__(self, dataset: EmbeddedDataset, encoders: tuple[str, ...]) -> None:
        self.dataset, self.encoders = dataset, encoders
        self._partners: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        """Changes when any sample changes."""
        return f"{self.dataset.fingerprint()}-swapped-{'-'.join(self.encoders)}"

    def facts(self, index: int) -> Facts:
        """The sample's own text, the sizes of the items that it got."""
        own = self.dataset.facts(index)
        homes = (self._home(index, number) for number in range(len(own.items)))
        return Facts(own.text_tokens, tuple(self.dataset.facts(home).items[number] for home, number in homes))

    def sample(self, index: int) -> Sample:
        """The sample's own text, questions and answers."""
        return self.dataset.sample(index)

    def question(self, index: int) -> Question:
        """The sample's own question."""
        return self.dataset.question(index)

    def item(self, index: int, number: int) -> np.ndarray:
        """The item that stands in for this one."""
        return self.dataset.item(*self._home(index, number))

    def _home(self, index: int, number: int) -> tuple[int, int]:
        """The sample and number of the item that stands in for this one."""
        names = [ENCODER[type(item)] for item in self.dataset.recipe(index).media]
        if names[number] not in self.encoders:
            return index, number
        partner = self.partner(index)
        rank = names[:number].count(names[number])
        others = [ENCODER[type(item)] for item in self.dataset.recipe(partner).media]
        return partner, [at for at, name in enumerate(others) if name == names[number]][rank]

    def partner(self, index: int) -> int:
        """The sample whose items `index` gets; it may lie behind the end of the split."""
        if index not in self._partners:
            own = self.dataset.recipe(index)
            others = ((other, self.dataset.recipe(other)) for other in itertools.count(index + 1))
            self._partners[index] = next(
                other
                for other, recipe in others
                if recipe.family == own.family and self._counts(recipe) == self._counts(own)
            )
        return self._partners[index]

    def _counts(self, recipe: Recipe) -> list[int]:
        names = [ENCODER[type(item)] for item in recipe.media]
        return [names.count(encoder) for encoder in self.encoders]


def encode(text: str) -> np.ndarray:
    """Tokens int32 `[len(text)]` of a text in `ALPHABET`."""
    return _TOKEN[np.frombuffer(text.encode("ascii"), np.uint8)]


def decode(tokens: Iterable[int]) -> str:
    """The characters up to the end token; padding is left out."""
    text = []
    for token in tokens:
        if token == END:
            break
        if token > END:
            text.append(ALPHABET[token - 2])
    return "".join(text)


def _context(recipe: Recipe) -> Iterator[Text | Item]:
    """What all questions of a sample see: words and items, or words and the passage."""
    for number, words in enumerate(recipe.words):
        if words:
            yield _silent(words, number * STRIDE)
        if recipe.media:
            yield Item(ENCODER[type(recipe.media[number])], number, number * STRIDE + BEFORE_ITEM)
    if recipe.passage:
        yield _silent(recipe.passage, PASSAGE)


def _silent(text: str, start: int) -> Text:
    return Text(encode(text), np.zeros(len(text), np.float32), start=start)


def _branch(number: int, ask: Ask, answered: bool) -> Text:
    """A question and, if wanted, its answer and the end token, on which alone the loss is."""
    if not answered:
        return Text(encode(ask.text), np.zeros(len(ask.text), np.float32), number, QUESTION)
    tokens = np.append(encode(ask.text + ask.answer), np.int32(END))
    weights = np.zeros(len(tokens), np.float32)
    weights[len(ask.text) :] = 1
    return Text(tokens, weights, number, QUESTION)


def _draw_media(
    u: Iterator[float], family: Family, pool: tuple[tuple[int, ...], ...], practice: bool
) -> tuple[Strip | Clip, ...]:
    """The items of a sample in order; short ones where there are several, so that all of them can be told."""
    if family == "text":
        return ()
    few = tones.PRACTICE_FEW if practice else tones.FEW
    draw = next(u)
    if family == "image":
        count = 1 + sum(draw >= bound for bound in _IMAGES)
        return tuple([digits.draw_strip(u, digits.FEW if count > 1 else digits.COUNTS, pool) for _ in range(count)])
    if family == "audio":
        count = 1 + sum(draw >= bound for bound in _CLIPS)
        counts = few if count > 1 else tones.PRACTICE if practice else tones.COUNTS
        return tuple([tones.draw_clip(u, counts, tones.KEYS) for _ in range(count)])
    kinds = next(kinds for bound, kinds in _MIXES if draw < bound)
    order = [kind for _, kind in sorted([(next(u), kind) for kind in kinds])]
    return tuple(
        digits.draw_strip(u, digits.FEW, pool) if kind == "i" else tones.draw_clip(u, few, tones.DIGITS)
        for kind in order
    )


def _draw_passage(u: Iterator[float]) -> str:
    """Two to eight digits, or a small sum."""
    if next(u) < 0.2:
        return f"{int(5 * next(u))}+{int(5 * next(u))}"
    return "".join([str(int(10 * next(u))) for _ in range(2 + int(7 * next(u) ** 1.5))])


def _draw_words(u: Iterator[float], chance: float, longest: int) -> str:
    """Words, each followed by another with this chance, at most `longest` characters."""
    text = ""
    while next(u) < chance:
        word = _WORDS[int(next(u) * len(_WORDS))] + " "
        if len(text) + len(word) > longest:
            break
        text += word
    return text


def _size(item: Strip | Clip) -> tuple[int, ...]:
    return (item.samples,) if isinstance(item, Clip) else (item.height, item.width)


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Endless uniform draws from 0 to 1; in blocks, as single draws of a generator are slow."""
    while True:
        yield from rng.random(128).tolist()


def _cumulative(weights: dict[Family, float]) -> list[tuple[float, Family]]:
    if not weights:
        raise ValueError("an embedded source needs at least one modality: image, audio, mixed or text")
    bounds = np.cumsum(list(weights.values())) / sum(weights.values())
    bounds[-1] = 1  # no draw may fall behind the last bound by rounding
    return list(zip(bounds.tolist(), weights, strict=True))


def _pick(u: Iterator[float], bounds: list[tuple[float, Family]]) -> Family:
    draw = next(u)
    return next(name for bound, name in bounds if draw < bound)
