"""The embedded dataset: handwritten digits and keypad tones with questions about them, generated from a seed.

Small enough to learn in minutes on two cores, and as uneven as real corpora: text alone, one image,
several, clips and images in any order with words between, lengths with a long tail.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, log
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import EmbeddedSource
from mmjax.data.sample import Item, Question, Sample, SampleLengths, Split, Text
from mmjax.data.toy import digits, tones
from mmjax.data.toy.digits import Strip
from mmjax.data.toy.tones import Clip

Family = Literal["image", "audio", "mixed", "text"]

ORDINALS = "abcdefgh"
ENCODER = {Strip: "vision", Clip: "audio"}


class GeneratedQuestion(NamedTuple):
    """One possible question about a sample."""

    task: str  # family.name
    text: str
    answer: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on


def possible_questions(
    family: Family, media: Sequence[Strip | Clip], passage: str
) -> list[list[GeneratedQuestion]]:
    """List every question about a sample, one list per task; `passage` is the text of a text-only sample."""
    if family == "text":
        return _of_passage(passage)
    reads = [
        GeneratedQuestion(f"{family}.read", f"read {o}?", m.text, ("vision",))
        for o, m in _numbered(media, Strip)
    ]
    writes = [
        GeneratedQuestion(f"{family}.write", f"write {o}?", m.text, ("audio",))
        for o, m in _numbered(media, Clip)
    ]
    # A task's questions count as one in the draw, so a sample with many items does not ask to read
    # all the time.
    tasks = [reads, writes]
    if family == "image" and len(media) == 1:
        by_letter = zip(ORDINALS, media[0].text, strict=False)
        tasks.append(
            [
                GeneratedQuestion("image.at", f"at {letter}?", digit, ("vision",))
                for letter, digit in by_letter
            ]
        )
    if family == "audio" and len(media) == 1:
        tasks.append([GeneratedQuestion("audio.first", "first?", media[0].text[0], ("audio",))])
        tasks.append([GeneratedQuestion("audio.last", "last?", media[0].text[-1], ("audio",))])
    if family == "mixed" and len(media) == 2:
        tasks.append(
            [
                GeneratedQuestion(
                    "mixed.both",
                    "both?",
                    f"{writes[0].answer} {reads[0].answer}",
                    ("vision", "audio"),
                )
            ]
        )
    digits = "".join([m.text for m in media])
    # The largest of many digits is nearly always 9, which would be a good guess.
    if family != "audio" and 2 <= len(digits) <= 4:
        needs = ("vision", "audio") if family == "mixed" else ("vision",)
        tasks.append([GeneratedQuestion(f"{family}.max", "max?", max(digits), needs)])
    return [asks for asks in tasks if asks]


def _numbered(media: Sequence[Strip | Clip], kind: type) -> Iterator[tuple[str, Strip | Clip]]:
    """Iterate over the items of one kind, each with its letter among all items of the sample."""
    return (
        (letter, item) for letter, item in zip(ORDINALS, media, strict=False) if type(item) is kind
    )


def _of_passage(passage: str) -> list[list[GeneratedQuestion]]:
    if "+" in passage:
        return [[GeneratedQuestion("text.add", "add?", str(sum(map(int, passage.split("+")))), ())]]
    tasks = [
        [GeneratedQuestion("text.read", "read a?", passage, ())],
        [GeneratedQuestion("text.last", "last?", passage[-1], ())],
    ]
    if len(passage) <= 4:
        tasks.append([GeneratedQuestion("text.max", "max?", max(passage), ())])
    return tasks


def draw_questions(
    u: Iterator[float], tasks: list[list[GeneratedQuestion]], count: int
) -> tuple[GeneratedQuestion, ...]:
    """Draw up to `count` questions without replacement: tasks are equally likely, then questions of a task."""
    # An exponential race: the first to arrive is drawn with probability proportional to its rate, 1
    # / len(asks).
    arrivals = [(-log(1 - next(u)) * len(asks), ask) for asks in tasks for ask in asks]
    return tuple([ask for _, ask in sorted(arrivals)[:count]])


ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789*#?+"
END = 1  # the token that ends an answer; 0 is padding, characters follow from 2

FAMILIES: dict[Family, float] = {"image": 0.34, "audio": 0.34, "mixed": 0.22, "text": 0.10}
HELD_OUT_SAMPLES = {"validation": 1000, "test": 2000}

# RoPE positions. The question always starts at the same position, and items stand at fixed strides
# before it, so that "the second image" and "left" are the same distance in every sample.
QUESTION = 256
STRIDE = 64
# positions of a stride for the words before the item; the longest clip takes the other 48
BEFORE_ITEM = 16
PASSAGE = 128

_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
# Cumulative probabilities: of 1, 2, 3 images in an image sample, else 4; of 1, 2 clips in an audio
# sample, else 3; of the kinds of items in a mixed sample.
_IMAGES = (0.70, 0.87, 0.96)
_CLIPS = (0.86, 0.97)
# i: an image, a: a clip; they are shuffled.
_MIXES = ((0.66, "ia"), (0.79, "iia"), (0.92, "iaa"), (0.97, "iiia"), (1.0, "iiaa"))
_WORDS = (
    "here",
    "now",
    "then",
    "look",
    "note",
    "see",
    "this",
    "page",
    "call",
    "line",
    "from",
    "next",
    "one",
    "memo",
)
_TOKEN = np.zeros(128, np.int32)
_TOKEN[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(2, 2 + len(ALPHABET))


class Recipe(NamedTuple):
    """Everything about a sample except its pixels and waves."""

    family: Family
    words: tuple[str, ...]  # before each item; in a text sample, before the passage
    media: tuple[Strip | Clip, ...]
    passage: str
    asks: tuple[GeneratedQuestion, ...]


class EmbeddedDataset:
    """A `Source` of the embedded samples of one split; a sample depends on seed, split and its index alone.

    Splits share no digit image, whatever the seed. Training samples carry up to `source.questions`
    questions as parallel branches; validation and test samples exactly one. Indices beyond the end
    of a split also give samples.
    """

    def __init__(self, source: EmbeddedSource, split: Split, seed: int) -> None:
        if split not in _SPLITS:
            raise ValueError(f"unknown split {split!r}; known: {', '.join(_SPLITS)}")
        self.source = source
        self.split = split
        self.seed = seed
        self._families = _cumulative(
            {family: FAMILIES[family] for family in FAMILIES if family in source.modalities}
        )

    def __len__(self) -> int:
        return HELD_OUT_SAMPLES.get(self.split, self.source.samples)

    def fingerprint(self) -> str:
        source = (self.source.modalities, self.source.samples, self.source.questions)
        made_by = ("embedded-2", source, self.split, self.seed, ALPHABET)
        return hashlib.sha256(
            repr(made_by).encode() + digits.digit_table()[0].tobytes()
        ).hexdigest()[:16]

    def facts(self, index: int) -> SampleLengths:
        recipe = self.recipe(index)
        branches = tuple([len(ask.text) + len(ask.answer) + 1 for ask in recipe.asks])
        text = sum(map(len, recipe.words)) + len(recipe.passage) + sum(branches)
        sizes = [(m.samples,) if isinstance(m, Clip) else (m.height, m.width) for m in recipe.media]
        return SampleLengths(
            text,
            tuple([(ENCODER[type(m)], size) for m, size in zip(recipe.media, sizes, strict=True)]),
            branches=branches,
        )

    def sample(self, index: int) -> Sample:
        """Return a sample with its questions and answers."""
        recipe = self.recipe(index)
        branches = (
            _branch(number, ask, answered=True) for number, ask in enumerate(recipe.asks, start=1)
        )
        return Sample((*_context(recipe), *branches))

    def question(self, index: int) -> Question:
        """Return a sample's first question, without its answer."""
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
        """Draw everything about a sample except its pixels and waves."""
        u = _uniforms(self._rng(index, 0))
        draw = next(u)
        family = next(name for bound, name in self._families if draw < bound)
        media = _draw_media(u, family, digits.digits_by_label(self.split), self.split == "train")
        passage = _draw_passage(u) if family == "text" else ""
        words = (
            (_draw_words(u, 0.75, 78),)
            if passage
            else tuple([_draw_words(u, 0.3, BEFORE_ITEM) for _ in media])
        )
        # Media are encoded once for all their questions, so more cost little: 1..n, with more the
        # more probable.
        count = max(1, ceil(self.source.questions * next(u) ** 0.5)) if self.split == "train" else 1
        return Recipe(
            family,
            words,
            media,
            passage,
            draw_questions(u, possible_questions(family, media, passage), count),
        )

    def _rng(self, index: int, stream: int) -> np.random.Generator:
        """Return the generator of a sample's recipe (stream 0) or n-th item (stream n), by Philox's counter."""
        # Philox is counter-based: every (stream, index) is 2^64 draws away from the next, without
        # jumping there.
        key = np.array([self.seed % 2**64, _SPLITS.index(self.split)], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, stream, index, 0]))


class SwappedItems:
    """Replace the images or clips of an embedded dataset by those of another sample: a control for evaluation.

    Text, questions and answers stay; the items of `encoders` come from the next sample of the same
    family with as many. A model that really uses them falls to chance on every question that needs
    them.
    """

    def __init__(self, dataset: EmbeddedDataset, encoders: tuple[str, ...]) -> None:
        self.dataset = dataset
        self.encoders = encoders
        self._partners: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        return f"{self.dataset.fingerprint()}-swapped-{'-'.join(self.encoders)}"

    def facts(self, index: int) -> SampleLengths:
        """Return the sample's own text tokens, and the sizes of the items that it gets."""
        facts = self.dataset.facts(index)
        origins = (self._origin(index, number) for number in range(len(facts.items)))
        return SampleLengths(
            facts.text_tokens, tuple(self.dataset.facts(i).items[number] for i, number in origins)
        )

    def sample(self, index: int) -> Sample:
        return self.dataset.sample(index)

    def question(self, index: int) -> Question:
        return self.dataset.question(index)

    def item(self, index: int, number: int) -> np.ndarray:
        """Return the replacement of an item."""
        return self.dataset.item(*self._origin(index, number))

    def _origin(self, index: int, number: int) -> tuple[int, int]:
        """Return the sample and number of the item that replaces this one."""
        encoders = self._encoders(index)
        if encoders[number] not in self.encoders:
            return index, number
        partner = self.partner(index)
        # the n-th image is replaced by the partner's n-th image
        rank = encoders[:number].count(encoders[number])
        candidates = [
            k for k, name in enumerate(self._encoders(partner)) if name == encoders[number]
        ]
        return partner, candidates[rank]

    def partner(self, index: int) -> int:
        """Find the sample whose items `index` gets; it may lie beyond the end of the split."""
        if index not in self._partners:
            kind = self._kind(index)
            self._partners[index] = next(
                k for k in itertools.count(index + 1) if self._kind(k) == kind
            )
        return self._partners[index]

    def _kind(self, index: int) -> tuple[Family, list[int]]:
        """Return a sample's family, and how many items it has for each swapped encoder."""
        recipe = self.dataset.recipe(index)
        encoders = [ENCODER[type(item)] for item in recipe.media]
        return recipe.family, [encoders.count(name) for name in self.encoders]

    def _encoders(self, index: int) -> list[str]:
        return [ENCODER[type(item)] for item in self.dataset.recipe(index).media]


def encode_characters(text: str) -> np.ndarray:
    """Encode a text in `ALPHABET` to tokens int32 `[len(text)]`."""
    return _TOKEN[np.frombuffer(text.encode("ascii"), np.uint8)]


def decode_characters(tokens: Iterable[int]) -> str:
    """Decode tokens up to the end token, skipping padding."""
    return "".join(
        ALPHABET[token - 2]
        for token in itertools.takewhile(lambda t: t != END, tokens)
        if token > END
    )


def _context(recipe: Recipe) -> Iterator[Text | Item]:
    """Yield what all questions of a sample attend to: words and items, or words and the passage."""
    for number, words in enumerate(recipe.words):
        if words:
            yield _untrained(words, number * STRIDE)
        if recipe.media:
            yield Item(ENCODER[type(recipe.media[number])], number, number * STRIDE + BEFORE_ITEM)
    if recipe.passage:
        yield _untrained(recipe.passage, PASSAGE)


def _untrained(text: str, start: int, branch: int = 0) -> Text:
    return Text(encode_characters(text), np.zeros(len(text), np.float32), branch, start)


def _branch(number: int, ask: GeneratedQuestion, answered: bool) -> Text:
    """Encode a question and, if `answered`, its answer and the end token, which alone have a loss."""
    if not answered:
        return _untrained(ask.text, QUESTION, number)
    # The weight of a token is that of predicting it, so the first one trained is the answer's
    # first.
    tokens = np.append(encode_characters(ask.text + ask.answer), np.int32(END))
    weights = np.zeros(len(tokens), np.float32)
    weights[len(ask.text) :] = 1
    return Text(tokens, weights, number, QUESTION)


def _draw_media(
    u: Iterator[float], family: Family, pool: tuple[tuple[int, ...], ...], practice: bool
) -> tuple[Strip | Clip, ...]:
    """Draw the items of a sample in order, short ones where there are several, so that all can be learned."""
    if family == "text":
        return ()
    few = tones.PRACTICE_FEW if practice else tones.FEW
    draw = next(u)
    if family == "image":
        count = 1 + sum(draw >= bound for bound in _IMAGES)
        return tuple(
            [
                digits.draw_strip(u, digits.FEW if count > 1 else digits.COUNT_CDF, pool)
                for _ in range(count)
            ]
        )
    if family == "audio":
        count = 1 + sum(draw >= bound for bound in _CLIPS)
        counts = few if count > 1 else tones.PRACTICE if practice else tones.COUNTS
        return tuple([tones.draw_clip(u, counts, tones.KEYS) for _ in range(count)])
    kinds = next(kinds for bound, kinds in _MIXES if draw < bound)
    # Sorting by uniform draws is a random order.
    order = [kind for _, kind in sorted([(next(u), kind) for kind in kinds])]
    return tuple(
        digits.draw_strip(u, digits.FEW, pool)
        if kind == "i"
        else tones.draw_clip(u, few, tones.DIGITS)
        for kind in order
    )


def _draw_passage(u: Iterator[float]) -> str:
    """Draw two to eight digits, or a small sum."""
    if next(u) < 0.2:
        return f"{int(5 * next(u))}+{int(5 * next(u))}"
    # The power makes short passages more frequent.
    return "".join([str(int(10 * next(u))) for _ in range(2 + int(7 * next(u) ** 1.5))])


def _draw_words(u: Iterator[float], chance: float, max_length: int) -> str:
    """Draw words, each followed by another with this chance, at most `longest` characters."""
    text = ""
    while next(u) < chance:
        word = _WORDS[int(next(u) * len(_WORDS))] + " "
        if len(text) + len(word) > max_length:
            break
        text += word
    return text


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Yield endless uniform draws from 0 to 1, generated in blocks since single draws are slow."""
    while True:
        yield from rng.random(128).tolist()


def _cumulative(weights: dict[Family, float]) -> list[tuple[float, Family]]:
    if not weights:
        raise ValueError(
            "an embedded source needs at least one modality: image, audio, mixed or text"
        )
    bounds = np.cumsum(list(weights.values())) / sum(weights.values())
    bounds[-1] = 1  # against rounding: every draw is below the last bound
    return list(zip(bounds.tolist(), weights, strict=True))
