"""How many tokens of text each conversation of a data set has: counted once, on all cores, and kept."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.config import ChatFormat
from mmjax.data.chat import Chat, load_chat
from mmjax.data.conversation import BadSample, Conversation, Conversations
from mmjax.data.kept import Damaged, keep, kept, note, remove
from mmjax.data.media_facts import Progress
from mmjax.data.stored import StoredConversations, digest

Reopen = Callable[[], StoredConversations]  # in another process: it must pickle

_VERSION = "3"
_NAMES = ("tokens", "bad", "reason")
_CHUNK = 8192  # records that a killed run counts again, for each core
_ALONE = 3 * _CHUNK  # as many are counted before another process has started


@dataclass(frozen=True)
class TextLengths:
    """Of all records of a data set."""

    tokens: np.ndarray  # int32 [n]: of text, media left out; 0 of a bad record
    bad: np.ndarray  # int64 [b]: records whose text cannot be used, in order
    reason: np.ndarray  # str [b]


def open_text_lengths(conversations: StoredConversations, chat: Chat, cache: Path) -> TextLengths | None:
    """What `count_text` found for these records and this template; None where it was not called."""
    return _read(_path(conversations, chat, cache))


def count_text(
    conversations: StoredConversations,
    reopen: Reopen,
    chat: Chat,
    cache: Path,
    progress: Progress = lambda done: None,
) -> TextLengths:
    """The lengths of all records. What was counted before a run was killed is not counted again."""
    path = _path(conversations, chat, cache)
    if (known := _read(path)) is not None:
        return known
    parts = path.with_suffix(".parts")
    chunks = [range(k, min(k + _CHUNK, len(conversations))) for k in range(0, len(conversations), _CHUNK)]
    missing = [chunk for chunk in chunks if _read(_part(parts, chunk)) is None]
    done = len(conversations) - sum(map(len, missing))
    for chunk, found in _counted(missing, conversations, reopen, chat):
        _write(_part(parts, chunk), found)
        progress(done := done + len(chunk))
    whole = [kept(_part(parts, chunk), _NAMES) for chunk in chunks]
    joined = TextLengths(*(np.concatenate([part[name] for part in whole]) for name in _NAMES))
    _write(path, joined)
    remove(parts)
    return joined


def _counted(
    chunks: Sequence[range], conversations: StoredConversations, reopen: Reopen, chat: Chat
) -> Iterator[tuple[range, TextLengths]]:
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or sum(map(len, chunks)) <= _ALONE:
        yield from ((chunk, _lengths(chunk, conversations, chat)) for chunk in chunks)
        return
    # Not forked: the threads that JAX has started would be missing in it.
    started = partial(_start, reopen, chat.form)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), started) as pool:
        yield from zip(chunks, pool.map(_in_worker, chunks), strict=True)


_opened: tuple[StoredConversations, Chat] | None = None  # of a worker


def _start(reopen: Reopen, form: ChatFormat) -> None:
    global _opened
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core already
    _opened = reopen(), load_chat(form)


def _in_worker(chunk: range) -> TextLengths:
    return _lengths(chunk, *_opened)


def _lengths(chunk: range, conversations: Conversations, chat: Chat) -> TextLengths:
    read = [_conversation(conversations, index) for index in chunk]
    counted = iter(chat.text_tokens([found for found in read if isinstance(found, Conversation)]))
    found = [next(counted) if isinstance(of, Conversation) else of for of in read]
    bad = {k: str(of) for k, of in enumerate(found) if isinstance(of, BadSample)}
    return TextLengths(
        np.array([0 if isinstance(of, BadSample) else of for of in found], np.int32),
        np.array(list(bad), np.int64) + chunk.start,
        np.array(list(bad.values()), np.str_),
    )


def _conversation(conversations: Conversations, index: int) -> Conversation | BadSample:
    try:
        return conversations.conversation(index)
    except BadSample as bad:
        return bad


def _path(conversations: StoredConversations, chat: Chat, cache: Path) -> Path:
    return cache / f"text-{digest(conversations.fingerprint(), chat.fingerprint(), _VERSION)}"


def _part(folder: Path, chunk: range) -> Path:
    return folder / f"{chunk.start}-{chunk.stop}"


def _read(folder: Path) -> TextLengths | None:
    """What was counted; None where it was not, or is not whole."""
    try:
        return TextLengths(**kept(folder, _NAMES))
    except Damaged as damage:
        note(damage)
        return None


def _write(folder: Path, lengths: TextLengths) -> None:
    keep(folder, {name: getattr(lengths, name) for name in _NAMES})
