"""Conversations of JSON files, with media in folders, in archives or in the records themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.data.chat_records import ClipSpan, Record, Reference
from mmjax.data.conversation import BadSample, Conversation, Medium
from mmjax.data.excerpts import AudioSegment
from mmjax.data.json_records import JsonRecords
from mmjax.data.media_folder import MediaFolder, unbase64
from mmjax.data.stored import FileRef, InlineBytes, hash_strings


class ChatFiles:
    """`StoredConversations` of JSON records, each parsed by `read`."""

    def __init__(
        self,
        paths: Sequence[str],
        cache: Path,
        folders: Mapping[Medium, MediaFolder],
        read: Callable[[Mapping[str, Any]], Record],
        reading: str,
    ) -> None:
        """reading: a description, for the fingerprint, of everything that `read` depends on."""
        self._records = JsonRecords(paths, cache)
        self._folders = folders
        self._read = read
        self._reading = reading

    def __len__(self) -> int:
        return len(self._records)

    def fingerprint(self) -> str:
        places = [f"{medium}={folder.root} {folder.outside}" for medium, folder in self._folders.items()]
        return hash_strings(self._records.fingerprint(), self._reading, *places)

    def files(self) -> list[tuple[str, int]]:
        return self._records.files()

    def conversation(self, index: int) -> Conversation:
        return self._read(self._records[index]).conversation

    def media(self, index: int) -> tuple[FileRef, ...]:
        record = self._read(self._records[index])
        media = zip(record.conversation.media(), record.references, strict=True)
        return tuple(resolve_reference(reference, self._folders[medium.kind]) for medium, reference in media)


def resolve_reference(reference: Reference, folder: MediaFolder) -> FileRef:
    """Resolve a reference: a path, a URL, bytes, base64, or an object with one of them. Raises BadSample."""
    if isinstance(reference, str):
        return folder.find(reference)
    if isinstance(reference, bytes):
        return InlineBytes(reference)
    if isinstance(reference, ClipSpan):
        clip = folder.find(reference.path)
        return (
            AudioSegment(clip, reference.offset, reference.duration) if reference.offset or reference.duration else clip
        )
    if isinstance(reference, Mapping):
        # OpenAI's input_audio has base64 under "data"; Hugging Face datasets have "bytes" and "path".
        if isinstance(encoded := reference.get("data"), str):
            return InlineBytes(unbase64(encoded))
        value = next((reference[key] for key in ("bytes", "path", "url") if reference.get(key) is not None), None)
        if isinstance(value, str | bytes):
            return resolve_reference(value, folder)
    raise BadSample(f"refers to a file by {str(reference)[:80]!r}; expected a path, a URL or bytes")
