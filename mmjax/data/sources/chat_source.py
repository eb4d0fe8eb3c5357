"""A source of conversations: text tokenized with a checkpoint's chat template, media prepared for its encoders.

Token counts are cached on disk, and samples that cannot be read are remembered in the run's
quarantine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from mmjax.config import DataConfig, MediaLimits
from mmjax.data.media.patches import ItemModules
from mmjax.data.sample import (
    PICTURE,
    SOUND,
    BadSample,
    Conversation,
    MediaPlace,
    Question,
    Sample,
    SampleLengths,
)
from mmjax.data.sources.media_sizes import (
    KINDS,
    MediaFacts,
    Progress,
    check_state,
    open_facts,
    open_states,
    read_facts,
)
from mmjax.data.sources.processors import (
    PROBES,
    Functions,
    MediaProcessors,
    MediaSizes,
    SampleMedia,
    text_tokens,
)
from mmjax.data.sources.sound import WithSound
from mmjax.data.sources.token_counts import (
    Reopen,
    TokenCounts,
    content_hash,
    count_text,
)
from mmjax.data.storage.files import FileRef, Unreadable
from mmjax.data.text.chat import Chat
from mmjax.data.text.chat_template import ASSISTANT
from mmjax.data.text.conversation_tokens import outlined_branches, outlined_sample
from mmjax.disk import append_json_lines, read_json_lines
from mmjax.errors import BadMedia, UserError


@dataclass(frozen=True)
class BadSampleEntry:
    """A sample that cannot be used, by its name "source[index]", and why."""

    sample: str
    reason: str


NAMED = 5  # bad samples in an error


def bad_limit(data: DataConfig, total: int) -> tuple[int, str]:
    """Return how many of all samples may be bad, and the setting that says so."""
    if data.max_bad is not None:
        return data.max_bad, f"data.max_bad={data.max_bad}"
    return math.floor(data.max_bad_share * total), f"data.max_bad_share={data.max_bad_share:g}"


@dataclass
class Quarantine:
    """The bad samples that a run has met since its start. Each has one line in `path`, also over restarts.

    total: samples of the run, some of which may be bad (`bad_limit`). writes: whether this process
    writes the file.
    """

    path: Path
    data: DataConfig
    total: int
    writes: bool = True
    _met: dict[str, BadSampleEntry] = field(default_factory=dict, repr=False)  # by sample

    def __len__(self) -> int:
        return len(self._met)

    def add(self, bad: Iterable[BadSampleEntry], starting: bool = False) -> list[BadSampleEntry]:
        """Record samples that were not met before, and return those.

        starting: the run has not begun, so that an error removes its folder. Raises UserError,
        after recording them, where a bad sample is fatal or there are too many.
        """
        new = {entry.sample: entry for entry in bad if entry.sample not in self._met}
        self._met |= new
        if new and self.writes:
            self._write(new.values())
        if not new:
            return []
        first, *later = self._met.values()
        message = f"{len(self):,} of {self.total:,} samples cannot be used; the first, {first.sample}: {first.reason}"
        if later:
            unnamed = f" and {len(later) - NAMED:,} more" if len(later) > NAMED else ""
            message += (
                f"; the others: {', '.join(entry.sample for entry in later[:NAMED])}{unnamed}"
            )
        listed = (
            "python -m mmjax.index lists all of them" if starting else f"all are in {self.path}"
        )
        if self.data.on_bad_sample == "raise":
            raise UserError(
                f"{message}. Mend them, or skip them with data.on_bad_sample=skip; {listed}"
            )
        limit, setting = bad_limit(self.data, self.total)
        if len(self) > limit:
            raise UserError(
                f"{message}. That is more than {setting} allows, which is {limit:,}; mend them, or allow so many with "
                f"data.max_bad={len(self)}; {listed}"
            )
        return list(new.values())

    def _write(self, new: Iterable[BadSampleEntry]) -> None:
        if self.path.is_dir():
            raise UserError(
                f"{self.path} is a folder, and the bad samples are to be listed there; remove it"
            )
        written = {
            BadSampleEntry(str(r.get("sample")), str(r.get("reason")))
            for r in read_json_lines(self.path)
        }
        append_json_lines(self.path, (asdict(entry) for entry in new if entry not in written))


def with_pictures(kinds: Sequence[str], conversation: Conversation) -> list[str]:
    """Tell images that a generator makes, the assistant's, from those that encoders see; the sound of videos stays."""
    roles = iter(
        [
            message.role
            for message in conversation.messages
            for p in message.parts
            if isinstance(p, MediaPlace)
        ]
    )
    by_model = [kind != SOUND and next(roles) == ASSISTANT for kind in kinds]
    return [
        PICTURE if kind == "image" and answered else kind
        for kind, answered in zip(kinds, by_model, strict=True)
    ]


class ChatSource:
    """Conversations of a data set as a `Source`, and as questions: each one's last answer."""

    def __init__(
        self,
        reopen: Reopen,
        chat: Chat,
        encoders: ItemModules,
        cache: Path,
        functions: Functions | None = None,
        limits: MediaLimits = MediaLimits(),
    ) -> None:
        """reopen: opens the conversations, here and in counting worker processes. functions: callbacks by name."""
        self.conversations = reopen()
        # whether media are compared with what they were when the run was started
        self.watched = False
        self.chat = chat
        self._cache = cache
        self._reopen = reopen
        self._limits = limits
        self._processors = MediaProcessors(encoders, functions, limits)
        # As their headers are read: with the sound of videos, where a model has it.
        self._heard = (
            WithSound(self.conversations) if self._processors.sound else self.conversations
        )
        self._media = SampleMedia(self._processors, self._sizes, self._file)

    def __len__(self) -> int:
        return len(self.conversations)

    def fingerprint(self) -> str:
        """Hash the records, the sizes of their media, the template, how media are prepared, and their limits."""
        encoders = repr(self._processors.encoders)
        parts = self.media_fingerprint() + self.chat.fingerprint() + encoders
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def media_fingerprint(self) -> str:
        """Hash the records, the sizes of their media, and their limits: all but how a model takes them."""
        records = self.conversations.fingerprint() + repr(self._limits)
        digest = hashlib.sha256(records.encode())
        # Resized media change tokens, so that a batch of the same index would have another content.
        for array in (self._facts.start, self._facts.size, self._facts.bad):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def content(self) -> str:
        """Hash what all conversations say: the same wherever and whenever their files were written."""
        return hashlib.sha256(np.ascontiguousarray(self._text.content).tobytes()).hexdigest()[:16]

    def files(self) -> list[tuple[str, int]]:
        return self.conversations.files()

    def place(self, index: int) -> str:
        return self.conversations.place(index)

    @property
    def window(self) -> int:
        """Neighbouring samples that are shuffled together, where files are read in order; 0 where they are not."""
        return getattr(self.conversations, "window", 0)

    def read_headers(self, progress: Progress = lambda done: None) -> MediaFacts:
        """Read the media's headers that are new or have changed since the last time; return the facts of all."""
        self._facts = read_facts(self._heard, PROBES, self._cache, progress, self._limits)
        return self._facts

    def image_sizes(self) -> np.ndarray:
        """Return (height, width) of all images, int64 `[k, 2]`, as their headers were read last."""
        return self._facts.of("image")

    def count_tokens(self, progress: Progress = lambda done: None) -> None:
        """Tokenize all text, unless that was done for these records and this template."""
        self._text = count_text(self.conversations, self._reopen, self.chat, self._cache, progress)

    @property
    def unread_keys(self) -> dict[str, int]:
        """Return in how many records each key stands that nothing reads."""
        return self._facts.unread

    @cached_property
    def _facts(self) -> MediaFacts:
        known = open_facts(self._heard, self._cache, self._limits)
        return self.read_headers() if known is None else known

    @cached_property
    def _text(self) -> TokenCounts:
        return count_text(self.conversations, self._reopen, self.chat, self._cache)

    @cached_property
    def _bad(self) -> dict[int, str]:
        # Where both text and media are bad, the media's reason is named.
        tables = (self._text, self._facts)
        return {
            k: why for t in tables for k, why in zip(t.bad.tolist(), t.reason.tolist(), strict=True)
        }

    def facts(self, index: int) -> SampleLengths:
        if (reason := self._bad.get(index)) is not None:
            raise BadSample(reason)
        tokens = int(self._text.tokens[index])
        if self._may_write_text[index] and self._writes_text(index):
            # also what is written between the items of its media
            tokens = text_tokens(self.sample(index))
        branches = () if self.chat.branching is None else outlined_branches(self._codes(index))
        return self._media.facts(index, tokens, branches)

    def outline(self, index: int) -> Sample:
        """Return the sample with all tokens 0: what its attention depends on, without reading its text again."""
        if self._may_write_text[index] and self._writes_text(index):
            return self.sample(index)
        codes = self._codes(index)
        kinds = [
            "image" if kind == PICTURE else kind for kind, _ in self._sizes(index) if kind != SOUND
        ]
        return self._media.place(index, lambda encoders, _: outlined_sample(codes, kinds, encoders))

    def _codes(self, index: int) -> list[int]:
        return self._text.outline[
            self._outline_start[index] : self._outline_start[index + 1]
        ].tolist()

    @cached_property
    def _outline_start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._text.codes, dtype=np.int64)])

    @cached_property
    def _may_write_text(self) -> np.ndarray:
        """Tell which samples have media of a kind around whose items text may be written, bool `[n]`."""
        kinds = [number for number, kind in enumerate(KINDS) if self._processors.writes_text(kind)]
        media = np.concatenate([[0], np.cumsum(np.isin(self._facts.kind, kinds))])
        return np.diff(media[self._facts.start]) > 0

    def _writes_text(self, index: int) -> bool:
        try:
            return self._media.writes_text(index)
        except BadMedia as bad:
            raise BadSample(str(bad)) from None

    def _sizes(self, index: int) -> MediaSizes:
        media = slice(*self._facts.start[index : index + 2])
        kinds = [KINDS[k] for k in self._facts.kind[media].tolist()]
        if self._processors.makes_pictures:
            kinds = with_pictures(kinds, self.conversations.conversation(index))
        return [
            (kind, tuple(size))
            for kind, size in zip(kinds, self._facts.size[media].tolist(), strict=True)
        ]

    @cached_property
    def _states(self) -> np.ndarray | None:
        return open_states(self._heard, self._cache, self._limits)

    def _file(self, index: int, medium: int) -> FileRef:
        """Return a medium's file. Raises UserError where it is watched and has changed since the run was started."""
        stored = self.conversations.media(index)[medium]
        if self.watched and self._states is not None:
            first, last = self._facts.start[index : index + 2].tolist()
            # The sound of a video, which is read from the video's file, has facts of its own.
            files = first + np.flatnonzero(self._facts.kind[first:last] != KINDS.index(SOUND))
            check_state(stored, int(self._states[files[medium]]))
        return stored

    def _conversation(self, index: int) -> Conversation:
        """Read a conversation. Raises UserError where it is not the one whose tokens were counted."""
        try:
            conversation = self.chat.read(self.conversations, index)
            if index in self._bad or content_hash(conversation) == self._text.content[index]:
                return conversation
        except BadSample as error:
            if isinstance(error, Unreadable) or index in self._bad:
                raise
        raise UserError(
            f"{self.place(index)} has changed since it was indexed; restore it and go on with --resume, or train on "
            "what it has now with --resume --new-data (where the file's size and time are as before, touch it)"
        )

    def sample(self, index: int) -> Sample:
        conversation = self._conversation(index)
        return self._media.place(index, partial(self.chat.sample, conversation))

    def item(self, index: int, number: int) -> np.ndarray:
        item = self._media.item(index, number)
        _, size = [item for medium in self._media.items(index) for item in medium.items][number]
        if item.shape[: len(size)] != tuple(size):
            sizes = ["x".join(map(str, sides)) for sides in (item.shape[: len(size)], size)]
            raise BadMedia(
                f"{self.place(index)}: a file of it is decoded to {sizes[0]}, and its header said {sizes[1]} when it "
                "was read first: another file has taken its place, with the same size and time of change. Headers are "
                f"remembered in {self._cache / 'media'}: remove that, and go on with --resume --new-data"
            )
        return item

    def item_hash(self, index: int, number: int) -> bytes | None:
        return self._media.item_hash(index, number)

    def question(self, index: int) -> Question:
        """Return the conversation up to its last answer, and that answer. Raises BadSample where it ends otherwise."""
        conversation = self.conversations.conversation(index)
        *history, last = conversation.messages
        if last.role != ASSISTANT or any(isinstance(part, MediaPlace) for part in last.parts):
            raise BadSample(
                "it does not end with an answer of the assistant, so there is nothing to ask"
            )
        return Question(
            family="",
            task="",
            prompt=self._media.place(
                index, partial(self.chat.prompt, Conversation(tuple(history)))
            ),
            answer="".join(last.parts).strip(),
            needs=tuple(dict.fromkeys(medium.encoder for medium in self._media.items(index))),
            answers=conversation.answers,
        )

    def answer_tokens(self, index: int) -> int:
        """Count the tokens of a question's answer, including its end."""
        return text_tokens(self.sample(index)) - text_tokens(self.question(index).prompt)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.chat.ends

    def decode(self, tokens: Sequence[int]) -> str:
        return self.chat.decode_answer(tokens)
