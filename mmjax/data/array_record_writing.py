"""Writes conversations as a folder of ArrayRecord shards. What is not whole is never taken for it, and a killed run
goes on with the first shard that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.data.array_records import FACTS, INDEX, Contents, Shard, header_of, packed
from mmjax.data.conversation import BadSample
from mmjax.data.media_facts import MediaFacts
from mmjax.data.stored import StoredConversations, digest
from mmjax.errors import UserError

LEFT_OUT = "left_out.jsonl"  # records that could not be read, with their reasons
MAKING = "making.json"  # is there until the folder is whole
_SHARD, _SHARDS = 1000, 1000  # records in a shard, of larger data sets as many as make this many shards
_READERS, _WINDOW = 32, 128  # threads that read media, and records that they are ahead of the writing


def write_array_records(
    conversations: StoredConversations, facts: MediaFacts, folder: Path, progress: Callable[[int], None]
) -> Contents:
    """Write all records whose facts are good, and what is known of their media; returns what the folder holds.

    Records that cannot be read after all are left out and listed. Raises UserError where the folder holds something
    else.
    """
    made_from = digest(conversations.fingerprint(), digest(*map(str, facts.bad)))
    if (folder / INDEX).exists():
        if (contents := Contents.read(str(folder))).made_from != made_from:
            raise UserError(f"{folder} holds another data set; name another folder, or remove it")
        return contents
    _claim(folder, made_from)
    good = facts.good()
    shards = np.array_split(good, max(1, -(-len(good) // max(_SHARD, -(-len(good) // _SHARDS)))))
    done = 0
    with ThreadPoolExecutor(_READERS) as pool:
        for number, records in enumerate(shards):
            if not (folder / f"{number:05d}.arrayrecord").exists():
                _write_shard(folder / f"{number:05d}", conversations, records.tolist(), pool)
            done += len(records)
            progress(done)
    return _finish(folder, facts, len(shards), made_from)


def _claim(folder: Path, made_from: str) -> None:
    making = folder / MAKING
    if folder.exists() and any(folder.iterdir()):
        if not making.exists():
            raise UserError(f"{folder} is not empty; name a new folder")
        if json.loads(making.read_text())["made_from"] != made_from:
            raise UserError(f"{folder} holds a part of another data set; name another folder, or remove it")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _write(making, json.dumps({"made_from": made_from}))


def _write_shard(
    name: Path, conversations: StoredConversations, records: Sequence[int], pool: ThreadPoolExecutor
) -> None:
    """The shard itself comes last: where it is, the rest is."""
    kept, headers, left = [], [], []
    shard = Shard(name.with_suffix(".arrayrecord"))
    for index, found in zip(records, _ahead(pool, lambda i: _read(conversations, i), records), strict=True):
        if isinstance(found, str):
            left.append({"record": index, "reason": found})
            continue
        header, media = found
        shard.write(packed(header, media))
        kept.append(index)
        headers.append(json.dumps(header))
    _write(name.with_suffix(".jsonl"), "".join(line + "\n" for line in headers))
    _write(name.with_suffix(".kept.json"), json.dumps({"kept": kept, "left": left}))
    shard.close()


def _read(conversations: StoredConversations, index: int) -> tuple[dict[str, Any], list[bytes]] | str:
    """A record's header and media, or why it cannot be used."""
    try:
        media = [stored.read() for stored in conversations.media(index)]
        return header_of(conversations.conversation(index), [len(encoded) for encoded in media]), media
    except BadSample as error:
        return str(error)


def _ahead(pool: ThreadPoolExecutor, read: Callable[[int], Any], records: Iterable[int]) -> Iterator[Any]:
    """What `read` gives for each record, in order, read by threads a bounded number ahead."""
    waiting = []
    for index in records:
        waiting.append(pool.submit(read, index))
        if len(waiting) == _WINDOW:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _finish(folder: Path, facts: MediaFacts, shards: int, made_from: str) -> Contents:
    told = [json.loads((folder / f"{number:05d}.kept.json").read_text()) for number in range(shards)]
    kept = np.array([index for shard in told for index in shard["kept"]], np.int64)
    facts.take(kept).save(folder / FACTS)
    if left := [line for shard in told for line in shard["left"]]:
        _write(folder / LEFT_OUT, "".join(json.dumps(line) + "\n" for line in left))
    contents = Contents(tuple(len(shard["kept"]) for shard in told), made_from)
    contents.write(folder)
    for path in (*folder.glob("*.kept.json"), *folder.glob("*.partial"), folder / MAKING):
        path.unlink()
    return contents


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)
