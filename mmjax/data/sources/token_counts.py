"""Count the text tokens of conversations, on all cores and once for each data set and template."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.config import ChatFormat
from mmjax.data.sample import BadSample, Conversation
from mmjax.data.sources.media_sizes import Progress
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import Conversations, hash_strings
from mmjax.data.text.branching import Branching
from mmjax.data.text.chat import Chat
from mmjax.data.text.conversation_tokens import outline_tokens
from mmjax.data.text.load_chat import load_chat
from mmjax.disk import remove_path

# Opens the conversations in another process, so it must pickle; open files and locks do not.
Reopen = Callable[[], Conversations]

_VERSION = "8"
_NAMES = ("tokens", "content", "codes", "outline", "bad", "reason")
_CHUNK = 8192  # records that a killed run counts again, for each core
_ALONE = 3 * _CHUNK  # records below which starting worker processes takes longer than counting


@dataclass(frozen=True)
class TokenCounts:
    """Text tokens of all records of a data set."""

    tokens: np.ndarray  # int32 [n]: of text, without media; 0 for a bad record
    content: np.ndarray  # uint64 [n]: hash of each conversation; 0 for a bad record
    codes: np.ndarray  # int32 [n]: codes of each record's outline
    # int32 [c]: all of these, one record after the other, as `Chat.outlines` returns them
    outline: np.ndarray
    bad: np.ndarray  # int64 [b]: records whose text cannot be used, in order
    reason: np.ndarray  # str [b]


def open_token_counts(conversations: Conversations, chat: Chat, cache: Path) -> TokenCounts | None:
    """Open the lengths that `count_text` cached for these records and this template; None if there are none."""
    arrays = open_arrays_if_sound(_path(conversations, chat, cache), _NAMES)
    return None if arrays is None else TokenCounts(**arrays)


def count_text(
    conversations: Conversations,
    reopen: Reopen,
    chat: Chat,
    cache: Path,
    progress: Progress = lambda done: None,
) -> TokenCounts:
    """Count the text tokens of all records. A killed run resumes where it was."""
    if (known := open_token_counts(conversations, chat, cache)) is not None:
        return known
    path = _path(conversations, chat, cache)
    # Each chunk is saved in a folder of its own until all are counted.
    parts = path.with_suffix(".parts")
    chunks = [
        range(k, min(k + _CHUNK, len(conversations))) for k in range(0, len(conversations), _CHUNK)
    ]
    folders = {chunk: parts / f"{chunk.start}-{chunk.stop}" for chunk in chunks}
    missing = [chunk for chunk in chunks if open_arrays_if_sound(folders[chunk], _NAMES) is None]
    done = len(conversations) - sum(map(len, missing))
    for chunk, lengths in _count_chunks(missing, conversations, reopen, chat):
        save_arrays(folders[chunk], vars(lengths))
        progress(done := done + len(chunk))
    saved = [open_arrays(folders[chunk], _NAMES) for chunk in chunks]
    joined = TokenCounts(
        **{name: np.concatenate([part[name] for part in saved]) for name in _NAMES}
    )
    save_arrays(path, vars(joined))
    remove_path(parts)
    return joined


def _count_chunks(
    chunks: Sequence[range], conversations: Conversations, reopen: Reopen, chat: Chat
) -> Iterator[tuple[range, TokenCounts]]:
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or sum(map(len, chunks)) <= _ALONE:
        yield from ((chunk, _lengths(chunk, conversations, chat)) for chunk in chunks)
        return
    # Spawned, since a fork copies JAX's locks but not the threads that would release them.
    initializer = partial(_open_in_worker, reopen, chat.form, chat.branching)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), initializer) as pool:
        yield from zip(chunks, pool.map(_count_in_worker, chunks), strict=True)


_opened: tuple[Conversations, Chat] | None = None  # in a worker process


def _open_in_worker(reopen: Reopen, form: ChatFormat, branching: Branching | None) -> None:
    global _opened
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core already
    _opened = reopen(), replace(load_chat(form), branching=branching)


def _count_in_worker(chunk: range) -> TokenCounts:
    return _lengths(chunk, *_opened)


def _lengths(chunk: range, conversations: Conversations, chat: Chat) -> TokenCounts:
    tokens = np.zeros(len(chunk), np.int32)
    content = np.zeros(len(chunk), np.uint64)
    bad = {}  # reasons by index
    readable = []  # indices

    def read() -> Iterator[Conversation]:
        for index in chunk:
            try:
                conversation = chat.read(conversations, index)
            except BadSample as error:
                bad[index] = str(error)
                continue
            readable.append(index)
            content[index - chunk.start] = content_hash(conversation)
            yield conversation

    codes = np.zeros(len(chunk), np.int32)
    outlines: list[int] = []
    for position, outline in enumerate(chat.outlines(read())):
        index = readable[position]
        if isinstance(outline, BadSample):
            bad[index] = str(outline)
            content[index - chunk.start] = 0
        else:
            tokens[index - chunk.start] = outline_tokens(outline)
            codes[index - chunk.start] = len(outline)
            outlines += outline
    indices = sorted(bad)
    return TokenCounts(
        tokens=tokens,
        content=content,
        codes=codes,
        outline=np.array(outlines, np.int32),
        bad=np.array(indices, np.int64),
        reason=np.array([bad[k] for k in indices], np.str_),
    )


def _path(conversations: Conversations, chat: Chat, cache: Path) -> Path:
    return cache / f"text-{hash_strings(conversations.fingerprint(), chat.fingerprint(), _VERSION)}"


def content_hash(conversation: Conversation) -> int:
    """Hash a conversation to 64 bits: its texts, weights and answers, and where its media stand."""
    judged = "" if conversation.label is None else f"{conversation.label}"
    encoded = f"{conversation!r}{judged}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
