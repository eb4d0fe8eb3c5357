"""The interface of data sources: conversations, and samples whose text has places for items decoded on request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np

from mmjax.errors import bounded_line

Medium = Literal["image", "audio", "video"]
# Kinds of media beside those, which no record names:
SOUND = "sound"  # of a video
PICTURE = "picture"  # an image of the assistant's, which a generator makes
Split = Literal["train", "validation", "test"]

MARKER = re.compile(r"<(image|audio|video)>")  # a medium's place in a text
# White space with a line break, after and before a marker.
_BREAK_AFTER = re.compile(r"^[^\S\r\n]*[\r\n]\s*")
_BREAK_BEFORE = re.compile(r"\s*[\r\n][^\S\r\n]*$")


class BadSample(ValueError):
    """A record that cannot be trained on. Its message is the reason, without the record's name, which callers add."""

    def __init__(self, reason: object) -> None:
        super().__init__(bounded_line(reason))


@dataclass(frozen=True)
class MediaPlace:
    """A place of an image, clip or video in a message; the n-th place of a conversation is that of its n-th medium."""

    kind: Medium | Literal["sound"]
    # white space with a line break before and behind its marker, which is text where
    # `ChatFormat.line_breaks` says so
    before: str = field(default="", compare=False)
    after: str = field(default="", compare=False)


# Fields of messages: what functions the assistant may call, which the conversation's first message
# has, and those that it calls.
TOOLS, TOOL_CALLS = JSON_FIELDS = ("tools", "tool_calls")


@dataclass(frozen=True)
class Message:
    """One message of a conversation: text and media, in order."""

    role: str  # "system", "user", "assistant", ...
    parts: tuple[str | MediaPlace, ...]
    weight: float = 1.0  # of the loss on an answer's tokens
    # by key, beside the parts: what else the chat template is given ("reasoning_content", "name");
    # those of JSON_FIELDS are JSON
    fields: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Rollout:
    """An answer that a model has drawn, and how good it is."""

    tokens: tuple[int, ...]  # its end among them
    log_probs: tuple[float, ...]  # of every token, of the model that has drawn them
    advantage: float
    reference: tuple[float, ...] = ()  # log-probabilities of every token, of the reference
    mask: tuple[int, ...] = ()  # 1 for each token that is trained on, 0 for others; (): all are


@dataclass(frozen=True)
class Conversation:
    """One record of a data set."""

    messages: tuple[Message, ...]
    # all right answers to its last question, where the record has several
    answers: tuple[str, ...] = ()
    # the worse of a pair of last answers, the better of which is the last message
    rejected: Message | None = None
    # the reference's log-probabilities of both, the better one's first
    reference: tuple[float, ...] = ()
    rollouts: tuple[Rollout, ...] = ()  # answers that a model has drawn to its last message
    # Whether the last answer is good, where the record judges it; `rejected` is then another
    # record's answer. Not in the representation, whose hash stored runs have.
    label: bool | None = field(default=None, repr=False)
    # keys of the record that nothing reads
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def loss_of_answers(self) -> str:
        """Name a loss that is of such answers; empty where there is one alone."""
        if self.label is not None:
            return "kto"
        return "dpo" if self.rejected else "grpo" if self.rollouts else ""

    def media(self) -> Iterator[MediaPlace]:
        """Iterate over the places of media in order."""
        return (
            part
            for message in self.messages
            for part in message.parts
            if isinstance(part, MediaPlace)
        )


def split_markers(text: str) -> list[str | MediaPlace]:
    """Split a text at its markers `<image>`, `<audio>` and `<video>`.

    A line break beside a marker is part of the marker, not of the text: LLaVA's records write one,
    and chat templates write their own. Other white space stays.
    """
    pieces = MARKER.split(text)
    parts: list[str | MediaPlace] = []
    break_before = ""
    for k in range(0, len(pieces), 2):  # re.split alternates texts with the marker's group
        piece = pieces[k]
        # A piece's start follows a marker unless it is the first, its end precedes one unless it is
        # the last.
        if k > 0:
            stripped = _BREAK_AFTER.sub("", piece)
            parts.append(
                MediaPlace(
                    cast(Medium, pieces[k - 1]), break_before, piece[: len(piece) - len(stripped)]
                )
            )
            piece = stripped
        break_before = ""
        if k < len(pieces) - 1:
            stripped = _BREAK_BEFORE.sub("", piece)
            break_before = piece[len(stripped) :]
            piece = stripped
        if piece:
            parts.append(piece)
    return parts


def with_line_breaks(parts: Sequence[str | MediaPlace]) -> tuple[str | MediaPlace, ...]:
    """Return a message's parts with the line breaks beside its markers as text, as its record has them."""
    pieces: list[str | MediaPlace] = []
    for part in parts:
        texts = (part,) if isinstance(part, str) else (part.before, part, part.after)
        for text in texts:
            if isinstance(text, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += text
            elif text:
                pieces.append(text)
    return tuple(pieces)


MAX_BRANCHES = 18  # of a sample: the attention mask has a bit for each
# the names of a source's files and how many samples each has, in order
Files = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Text:
    """Tokens of one stretch of text.

    Everything after it attends to branch 0. Branches 1, 2, ... attend to branch 0, the items and
    themselves, but not to each other: several questions about the same image.
    """

    tokens: np.ndarray  # int32 [n]
    # float32 [n]: of the loss on predicting this token from the one before it in its branch
    weights: np.ndarray
    branch: int = 0
    start: int | None = None  # RoPE position of the first token; None = continue the branch
    back: int = 0  # RoPE positions that it goes back, to stand beside what is before it
    # float32 [n] by name, of an answer in a branch: what the loss reads of its tokens
    loss_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """The place of the tokens of one item: the sample's item `number`, counting images, clips and temporal patches of
    videos in order from 0.

    Text may stand between an item's tokens; each part of them has an `Item` then. Where positions
    have axes, all temporal patches of a video begin at the same row and column positions, and the
    parts of its sound, which stand between them, at their first token's from there on.
    """

    encoder: str
    number: int
    start: int | None = None  # RoPE position of the first token; None = continue the branch
    # index of a piece in its video; from 1 on it begins where the one before it began
    patch: int = 0
    time: int = 0  # RoPE position along t, from that of its video's first token on
    # what goes on behind it: its rows and columns, or its time too
    text_after: Literal["space", "time"] = "space"
    part: tuple[int, int] | None = None  # [begin, end) of its tokens that stand here; None: all


NO_TOKEN = -1  # in `TokenLayout.token`: no token
NEWLINE = -2  # in `TokenLayout.token`: the connector's newline embedding
CORNERS = 4  # tokens that one position may interpolate, as bilinear resizing does


class TokenLayout(NamedTuple):
    """The tokens of one image, each the weighted sum of up to four tokens that the encoder made of its items."""

    # int32 [n, CORNERS]: indices into all items' tokens, one item after the other; or a code above
    token: np.ndarray
    share: np.ndarray  # float32 [n, CORNERS]: weights of these tokens

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True)
class ArrangedItems:
    """The place of the tokens of several items, interleaved or interpolated: the tiles of one image."""

    encoder: str
    number: int  # of the first item
    items: int  # how many
    tokens: TokenLayout
    start: int | None = None  # RoPE position of the first token; None = continue the branch


@dataclass(frozen=True)
class Sample:
    """One training example, with text and items interleaved; items are not decoded yet."""

    segments: tuple[Text | Item | ArrangedItems, ...]


@dataclass(frozen=True)
class Question:
    """One question of a sample, for evaluation."""

    family: str  # with the others of which it is scored; "" = its source
    task: str  # family.name, or "" where a family has but one
    prompt: Sample  # its last text ends right before the answer
    answer: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on; empty for text
    answers: tuple[str, ...] = ()  # all right answers, where there are several


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of a sample, computed from headers without decoding anything."""

    text_tokens: int
    # (encoder, size): (height, width) in pixels, (frames, height, width) of a temporal patch,
    # (samples,) of a clip
    items: tuple[tuple[str, tuple[int, ...]], ...]
    # LLM tokens of all items; None = all that their encoders make (no `ArrangedItems`)
    item_tokens: int | None = None
    # text tokens of branches 1, 2, ...; None = read the sample to see
    branches: tuple[int, ...] | None = None


class Source(Protocol):
    """Random access to samples. `facts` and `sample` decode no media; `item` opens and decodes one item.

    Samples that cannot be used raise BadSample from the first two, media that cannot be decoded
    BadMedia from `item`. Where `sample` takes long, a source may have `outline` too: the sample
    with any tokens, but as many, and any weights of its texts, but the same first token that is
    trained on. The length index counts what is attended by it. With `item_hash(index, number)`, a
    hash of what an item is decoded from, an item that is encoded once is decoded once.
    """

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a hash that changes when any sample changes."""

    def facts(self, index: int) -> SampleLengths: ...

    def sample(self, index: int) -> Sample: ...

    def item(self, index: int, number: int) -> np.ndarray:
        """Decode an image, uint8 `[height, width, channels]`, or a clip, float32 `[samples]` in -1..1.

        Of a video a temporal patch, uint8 `[frames, height, width, channels]`.
        """


def with_place(source: Source, index: int, reason: object) -> str:
    """Put before the reason why a sample cannot be used its file and line, where its source knows them."""
    return f"{source.place(index)}: {reason}" if hasattr(source, "place") else str(reason)
