"""How many tokens of text each conversation of a data set has: counted once, on all cores, and kept."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.config import ChatFormat
from mmjax.data.chat import Chat, load_chat
from mmjax.data.conversation import BadSample, Conversation, Conversations
from mmjax.data.media_facts import Progress
from mmjax.data.stored import StoredConversations, digest

Reopen = Callable[[], StoredConversations]  # in another process: it must pickle

_VERSION = "1"
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
    path = _path(conversations, chat, cache)
    return _read(path) if path.exists() else None


def count_text(
    conversations: StoredConversations,
    reopen: Reopen,
    chat: Chat,
    cache: Path,
    progress: Progress = lambda done: None,
) -> TextLengths:
    """The lengths of all records. What was counted before a run was killed is not counted again."""
    path = _path(conversations, chat, cache)
    if path.exists():
        return _read(path)
    parts = path.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    chunks = [range(k, min(k + _CHUNK, len(conversations))) for k in range(0, len(conversations), _CHUNK)]
    missing = [chunk for chunk in chunks if not _part(parts, chunk).exists()]
    done = len(conversations) - sum(map(len, missing))
    for chunk, found in _counted(missing, conversations, reopen, chat):
        _write(_part(parts, chunk), found)
        progress(done := done + len(chunk))
    whole = [_read(_part(parts, chunk)) for chunk in chunks]
    joined = TextLengths(*(np.concatenate([getattr(p, name) for p in whole]) for name in ("tokens", "bad", "reason")))
    _write(path, joined)
    shutil.rmtree(parts, ignore_errors=True)
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
    return cache / f"text-{digest(conversations.fingerprint(), chat.fingerprint(), _VERSION)}.npz"


def _part(folder: Path, chunk: range) -> Path:
    return folder / f"{chunk.start}-{chunk.stop}.npz"


def _read(path: Path) -> TextLengths:
    with np.load(path) as found:
        return TextLengths(found["tokens"], found["bad"], found["reason"])


def _write(path: Path, lengths: TextLengths) -> None:
    partial_path = path.with_name(f"{path.stem}.{os.getpid()}.partial.npz")
    np.savez(partial_path, tokens=lengths.tokens, bad=lengths.bad, reason=lengths.reason)
    partial_path.rename(path)
