"""Conversations of JSON files, with media in folders, in archives or in the records themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.data.sample import BadSample, Conversation, Medium
from mmjax.data.sources.chat_records import ClipSpan, Record, Reference
from mmjax.data.sources.json_records import JsonRecords
from mmjax.data.sources.record_keys import is_absent
from mmjax.data.storage.archives import MediaFolder, unbase64
from mmjax.data.storage.files import FileRef, InlineBytes, hash_strings, is_url
from mmjax.data.storage.media_files import AudioSegment, FrameFiles


class ChatFiles:
    """`StoredConversations` of JSON records, each parsed by `read`."""

    def __init__(
        self,
        paths: Sequence[str],
        cache: Path,
        folders: Mapping[Medium, MediaFolder],
        read: Callable[[Mapping[str, Any]], Record],
        reading: str,
        samples: int = 0,
    ) -> None:
        """reading: a description, for the fingerprint, of everything that `read` depends on.

        samples: so many records are drawn of all, all of them once before any comes again; 0: all.
        """
        self._records = JsonRecords(paths, cache)
        self._drawn = _draw(len(self._records), samples) if samples else None
        self._folders = folders
        self._read = read
        self._reading = reading

    def __len__(self) -> int:
        return len(self._records) if self._drawn is None else len(self._drawn)

    def fingerprint(self) -> str:
        draw_count = [] if self._drawn is None else [f"num_samples={len(self._drawn)}"]
        # Where `videos` is set `_reading` has it, so that other data sets are known by what they
        # were before it was.
        folders = {medium: folder for medium, folder in self._folders.items() if medium != "video"}
        places = [f"{medium}={folder.root} {folder.outside}" for medium, folder in folders.items()]
        return hash_strings(self._records.fingerprint(), self._reading, *places, *draw_count)

    @property
    def roots(self) -> tuple[str, ...]:
        """Return where media are looked for: the same records may be in several folders, each with media of its own."""
        return tuple(
            f if is_url(f) else os.path.abspath(f)
            for f in (folder.root for folder in self._folders.values())
        )

    def files(self) -> list[tuple[str, int]]:
        if self._drawn is None:
            return self._records.files()
        # Other records are drawn of a file that has grown, so that no number of one is known again.
        return [(f"{len(self)} of {self._records.files()}", len(self))]

    def place(self, index: int) -> str:
        return self._records.place(self._number(index))

    def record(self, index: int) -> dict[str, Any]:
        """Return a record as its file has it. Raises BadSample."""
        return self._records[self._number(index)]

    def _number(self, index: int) -> int:
        """Return the number of a record among all of the files."""
        return index if self._drawn is None else int(self._drawn[index])

    def conversation(self, index: int) -> Conversation:
        return self._read(self.record(index)).conversation

    def media(self, index: int) -> tuple[FileRef, ...]:
        return tuple(
            resolve_reference(reference, self._folders[kind])
            for kind, reference in self.references(index)
        )

    def references(self, index: int) -> tuple[tuple[Medium, Reference], ...]:
        """Return the kind of each medium of a record, and what the record refers to it by."""
        record = self._read(self.record(index))
        places = record.conversation.media()
        return tuple(
            (place.kind, reference)
            for place, reference in zip(places, record.references, strict=True)
        )


def _draw(count: int, samples: int) -> np.ndarray:
    """Draw so many of `count` records, int64 `[samples]`, sorted: always the same ones."""
    rounds = np.random.default_rng(0)
    permutations = [rounds.permutation(count) for _ in range(-(-samples // max(count, 1)))]
    return np.sort(np.concatenate(permutations)[:samples])


def resolve_reference(reference: Reference, folder: MediaFolder) -> FileRef:
    """Resolve a reference: a path, a URL, bytes, base64, an object with one of them, or a list of a video's frames.

    Raises BadSample.
    """
    if isinstance(reference, str):
        return folder.find(reference)
    if isinstance(reference, bytes):
        return InlineBytes(reference)
    if isinstance(reference, ClipSpan):
        clip = folder.find(reference.path)
        return (
            AudioSegment(clip, reference.offset, reference.duration)
            if reference.offset or reference.duration
            else clip
        )
    if (
        isinstance(reference, list | tuple)
        and reference
        and not any(isinstance(r, list | tuple) for r in reference)
    ):
        return FrameFiles(tuple(resolve_reference(frame, folder) for frame in reference))
    if isinstance(reference, Mapping):
        # OpenAI's input_audio has base64 under "data"; Hugging Face datasets have "bytes" and
        # "path".
        present = [
            key for key in ("data", "bytes", "path", "url") if not is_absent(reference.get(key))
        ]
        if len(present) > 1 and present != ["bytes", "path"]:
            raise BadSample(
                f"has a file with both {present[0]} and {present[1]}; keep the one that is meant"
            )
        value = reference[present[0]] if present else None
        if present == ["data"] and isinstance(value, str):
            return InlineBytes(unbase64(value))
        if isinstance(value, str | bytes):
            return resolve_reference(value, folder)
    raise BadSample(f"refers to a file by {str(reference)[:80]!r}; expected a path, a URL or bytes")
