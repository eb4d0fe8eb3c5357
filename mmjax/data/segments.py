"""A run's steps may come from one data set after another: what the epochs under way still owe goes on in the next.

A sample is known by its source, the name of its file and its number there; where a source has no files, by its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mmjax.data.grouping import StepGrouper
from mmjax.data.index import LengthIndex
from mmjax.data.stream import Due, Pool, drawn, key_of
from mmjax.errors import UserError

Files = Sequence[tuple[str, int]]  # the names of a source's files and how many samples each has, in order


@dataclass(frozen=True)
class Segment:
    """The steps of a run from `first` on, with one data set, mixture and batch."""

    first: int = 0
    due: Path | None = None  # the file of what epochs that were begun before still owe; None = nothing

    def read_due(self) -> Due:
        """By source, as `write_due` was given it."""
        if self.due is None:
            return ()
        try:
            with np.load(self.due) as stored:
                due = [[stored[f"{s}/{k}"] for k in range(n)] for s, n in enumerate(stored["epochs"].tolist())]
        except Exception as error:  # NumPy's reader raises what its parser stumbles over
            raise UserError(f"{self.due} cannot be read: {type(error).__name__}; restore it") from None
        if not self.due.stem.endswith(_digest(due)):
            raise UserError(f"{self.due} is not what was written; restore it")
        return due


WHOLE_RUN = Segment()


def write_due(folder: Path, first: int, due: Due) -> Path:
    """Keep what is due from step `first` on, in a file under its content's name."""
    folder.mkdir(exist_ok=True)
    path = folder / f"due-{first}-{_digest(due)}.npz"
    partial = path.with_suffix(".partial.npz")
    arrays = {f"{s}/{k}": ids for s, of in enumerate(due) for k, ids in enumerate(of)}
    np.savez(partial, epochs=np.array([len(of) for of in due], np.int64), **arrays)
    partial.rename(path)
    return path


def _digest(due: Due) -> str:
    whole = hashlib.sha256(b"".join(np.ascontiguousarray(ids, np.int64).tobytes() for of in due for ids in of))
    return whole.hexdigest()[:16]


def still_due(grouper: StepGrouper, step: int) -> list[list[np.ndarray]]:
    """Of every source, the ids that epochs begun before `step` have not had yet, epoch by epoch."""
    chunk, used = grouper.used(step)
    counts = (drawn(grouper.weights, grouper.chunk_size, chunks) for chunks in (chunk, chunk + 1))
    return [
        _due_of(pool, int(begin), int(end), key_of(grouper.seed, s), used)
        for s, (pool, begin, end) in enumerate(zip(grouper.pools, *counts, strict=True))
    ]


def _due_of(pool: Pool, begin: int, end: int, key: np.uint64, used: np.ndarray) -> list[np.ndarray]:
    """What one source still owes where its draws up to `begin` are used, and of those up to `end` the `used`.

    A small source may come several times in one chunk: what is used counts for the earliest epoch that drew it.
    """
    if end == 0:
        return []
    ids, epochs = pool.draw(begin, end, key)
    left, due, begun = np.sort(used), [], 0
    for epoch in range(int(pool.draw(max(begin - 1, 0), max(begin, 1), key)[1][0]), int(epochs.max(initial=-1)) + 1):
        start, whole = pool.epoch(epoch)
        before = pool.draw(start, max(start, min(begin, start + len(whole))), key)[0]
        now = ids[epochs == epoch]
        taken = now[np.isin(now, left)]
        left = np.delete(left, np.searchsorted(left, np.unique(taken)))
        due.append(np.setdiff1d(whole, np.concatenate([before, taken])))
        begun = len(due) if len(before) + len(taken) else begun
    return [rest for rest in due[:begun] if len(rest)]


@dataclass(frozen=True)
class Held:
    """The samples of a run's data: their index, and by source its files."""

    index: LengthIndex
    files: Mapping[str, Files]

    @cached_property
    def start(self) -> dict[str, int]:
        """The first id of every source."""
        return dict(zip(self.index.source_name.tolist(), self.index.source_start[:-1].tolist(), strict=True))


def carried(due: Due, old: Held, pools: Sequence[Pool], new: Held) -> list[list[np.ndarray]]:
    """What is due of the old data, as ids of the new one, whose other samples join the last epoch under way.

    pools: of the old data. Samples that are not there any more are owed no longer.
    """
    of_source = dict(zip(old.index.source_name.tolist(), zip(due, pools, strict=True), strict=True))
    found = []
    for name in new.index.source_name.tolist():
        owed, pool = of_source.get(name, ((), None))
        if pool is None or not owed:
            found.append([])
            continue
        now = _now(old.files[name], new.files[name])
        start = new.start[name]
        epochs = [now[ids - old.start[name]] for ids in owed]
        usable = now[pool.ids(np.arange(len(pool))) - old.start[name]]
        every = np.arange(sum(count for _, count in new.files[name]))
        epochs[-1] = np.concatenate([epochs[-1], np.setdiff1d(every, usable)])
        found.append([start + np.unique(ids[ids >= 0]) for ids in epochs])
    return found


def _now(old: Files, new: Files) -> np.ndarray:
    """The number in the new files of each sample of the old ones, int64; -1 = it is gone."""
    known, same = {}, _same_names([name for name, _ in old], [name for name, _ in new])
    at = 0
    for name, count in new:
        known[name] = at, count
        at += count
    found = []
    for name, count in old:
        start, there = known.get(same.get(name, ""), (0, 0))
        number = np.arange(count)
        found.append(np.where(number < there, start + number, -1))
    return np.concatenate(found)


def _same_names(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """The new name of each old file: the same, or where none is, the one whose last part alone is the same."""
    if set(old) & set(new):
        return {name: name for name in old}
    last = {Path(name).name: name for name in new}
    return {name: last[Path(name).name] for name in old if Path(name).name in last} if len(last) == len(new) else {}
