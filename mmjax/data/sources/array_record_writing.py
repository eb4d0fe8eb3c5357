"""Write conversations as a folder of ArrayRecord shards. An unfinished folder is never taken for a complete one, and a
killed run resumes with the first missing shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.data.sample import BadSample
from mmjax.data.sources.array_records import (
    FACTS,
    INDEX,
    FolderIndex,
    encode_record,
    open_shard,
    to_header,
)
from mmjax.data.sources.media_sizes import MediaFacts
from mmjax.data.storage.files import Conversations, hash_strings
from mmjax.disk import atomic_write, json_lines
from mmjax.errors import UserError

UNREADABLE_FILE = "left_out.jsonl"  # records that could not be read, with their reasons
UNFINISHED_FILE = "making.json"  # exists until the folder is complete
_SHARD_RECORDS = 1000  # at least, and of large data sets as many as make
_MAX_SHARDS = 1000
_READERS = 32  # threads that read media
_WINDOW = 128  # records that they are ahead of the writing


def write_array_records(
    conversations: Conversations, facts: MediaFacts, folder: Path, progress: Callable[[int], None]
) -> FolderIndex:
    """Write all records whose facts are good, with the facts of their media; return the folder's contents.

    Records that cannot be read after all are left out and listed. Raises UserError where the folder
    holds something else.
    """
    # Which records are bad is part of the identity, as it decides which records each shard has.
    made_from = hash_strings(conversations.fingerprint(), hash_strings(*map(str, facts.bad)))
    if (folder / INDEX).exists():
        if (contents := FolderIndex.read(str(folder))).made_from != made_from:
            raise UserError(f"{folder} holds another data set; name another folder, or remove it")
        return contents
    _claim(folder, made_from)
    good = facts.good()
    shard_records = max(_SHARD_RECORDS, -(-len(good) // _MAX_SHARDS))
    shards = np.array_split(good, max(1, -(-len(good) // shard_records)))
    done = 0
    with ThreadPoolExecutor(_READERS) as pool:
        for number, records in enumerate(shards):
            if not (folder / f"{number:05d}.arrayrecord").exists():
                _write_shard(folder / f"{number:05d}", conversations, records.tolist(), pool)
            done += len(records)
            progress(done)
    return _finish(folder, facts, len(shards), made_from)


def _claim(folder: Path, made_from: str) -> None:
    """Create the folder, or check that it holds an unfinished part of the same data set."""
    making = folder / UNFINISHED_FILE
    if folder.exists() and any(folder.iterdir()):
        if not making.exists():
            raise UserError(f"{folder} is not empty; name a new folder")
        if json.loads(making.read_text())["made_from"] != made_from:
            raise UserError(
                f"{folder} holds a part of another data set; name another folder, or remove it"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        # Written before any shard, so that a resumed run knows whose shards these are.
        _write(making, json.dumps({"made_from": made_from}))


def _write_shard(
    name: Path, conversations: Conversations, records: Sequence[int], pool: ThreadPoolExecutor
) -> None:
    written = []
    headers = []
    left_out = []
    # The shard gets its name last: a run that resumes takes its existence for that of the other two
    # files.
    with open_shard(name.with_suffix(".arrayrecord")) as shard:
        for index, result in zip(
            records, _map_ahead(pool, lambda i: _read(conversations, i), records), strict=True
        ):
            if isinstance(result, str):
                left_out.append({"record": index, "reason": result})
                continue
            header, media = result
            shard.write(encode_record(header, media))
            written.append(index)
            headers.append(header)
        _write(name.with_suffix(".jsonl"), json_lines(headers))
        _write(name.with_suffix(".kept.json"), json.dumps({"kept": written, "left": left_out}))


def _read(conversations: Conversations, index: int) -> tuple[dict[str, Any], list[bytes]] | str:
    """Read a record's header and media, or return why it cannot be used."""
    try:
        media = [stored.read() for stored in conversations.media(index)]
        return to_header(
            conversations.conversation(index), [len(encoded) for encoded in media]
        ), media
    except BadSample as error:
        return str(error)


def _map_ahead(
    pool: ThreadPoolExecutor, read: Callable[[int], Any], records: Iterable[int]
) -> Iterator[Any]:
    """Yield `read` of each record in order, with at most `_WINDOW` waiting in memory (`pool.map` submits all)."""
    waiting = []
    for index in records:
        waiting.append(pool.submit(read, index))
        if len(waiting) == _WINDOW:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _finish(folder: Path, facts: MediaFacts, shards: int, made_from: str) -> FolderIndex:
    """Join what the shards' lists of records say, and mark the folder as complete."""
    lists = [
        json.loads((folder / f"{number:05d}.kept.json").read_text()) for number in range(shards)
    ]
    written = np.array([index for shard in lists for index in shard["kept"]], np.int64)
    facts.take(written).save(folder / FACTS)
    if left_out := [line for shard in lists for line in shard["left"]]:
        _write(folder / UNREADABLE_FILE, json_lines(left_out))
    contents = FolderIndex(tuple(len(shard["kept"]) for shard in lists), made_from)
    contents.write(folder)
    for path in (*folder.glob("*.kept.json"), *folder.glob("*.partial"), folder / UNFINISHED_FILE):
        path.unlink()
    return contents


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text)
