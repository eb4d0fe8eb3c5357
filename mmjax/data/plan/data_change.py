"""A run's steps may come from one data set after another: what the epochs under way still owe goes on in the next.

A sample is known by its source, the name of its file and its number there; where a source has no
files, by its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.sampler import Due, Pool, key_of
from mmjax.data.sample import Files
from mmjax.disk import atomic_write
from mmjax.errors import UserError


@dataclass(frozen=True)
class Segment:
    """The steps of a run from `first` on, with one data set, mixture and batch."""

    first: int = 0
    # the file of what the epochs that were begun before still owe; None = nothing
    due: Path | None = None
    epochs: float = 0.0  # that were done before

    def read_due(self) -> Due:
        """Read the ids that are due, by source, as `write_due` stored them."""
        if self.due is None:
            return ()
        try:
            with np.load(self.due) as stored:
                due = [stored[str(s)] for s in range(len(stored.files))]
        except Exception as error:  # NumPy's reader raises what its parser stumbles over
            raise UserError(
                f"{self.due} cannot be read: {type(error).__name__}; restore it"
            ) from None
        # The content's hash is in the file's name, so a changed file does not match its own name.
        if not self.due.stem.endswith(_digest(due)):
            raise UserError(f"{self.due} is not what was written; restore it")
        return due


WHOLE_RUN = Segment()


def write_due(folder: Path, first: int, due: Due) -> Path:
    """Store what is due from step `first` on, in a file under its content's name."""
    folder.mkdir(exist_ok=True)
    path = folder / f"due-{first}-{_digest(due)}.npz"
    # given a name, NumPy would append .npz to it
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, **{str(s): ids for s, ids in enumerate(due)})
    return path


def _digest(due: Due) -> str:
    digest = hashlib.sha256(repr([len(ids) for ids in due]).encode())
    for ids in due:
        digest.update(np.ascontiguousarray(ids, np.int64).tobytes())
    return digest.hexdigest()[:16]


def still_due(grouper: StepGrouper, step: int) -> list[np.ndarray]:
    """Return, by source, the sorted ids left of the current epoch before `step`; none where one has just ended."""
    draws, used = grouper.used(step)
    due = [np.zeros(0, np.int64)] * len(grouper.pools)
    for s, draw in draws.items():
        pool = grouper.pools[s]
        epoch = pool.draw(draw.first, draw.last, key_of(grouper.seed, s))
        # Draws before `begin` belong to earlier chunks; later ones count where earlier steps of
        # this chunk used them.
        had = np.union1d(
            epoch[: draw.begin - draw.first], np.intersect1d(epoch[draw.begin - draw.first :], used)
        )
        if len(had):
            due[s] = np.setdiff1d(epoch, had)
    return due


@dataclass(frozen=True)
class IndexedFiles:
    """The samples of a run's data: their index, and by source its files."""

    index: LengthIndex
    files: Mapping[str, Files]

    @cached_property
    def start(self) -> dict[str, int]:
        """Return the first id of every source."""
        return dict(
            zip(self.index.source_name.tolist(), self.index.source_start[:-1].tolist(), strict=True)
        )


def translate_due(
    due: Due, old: IndexedFiles, pools: Sequence[Pool], new: IndexedFiles
) -> list[np.ndarray]:
    """Translate what is due of the old data into ids of the new one, whose other samples join the current epoch.

    pools: of the old data. Samples that are not there any more are owed no longer.
    """
    of_source = dict(zip(old.index.source_name.tolist(), zip(due, pools, strict=True), strict=True))
    translated = []
    for name in new.index.source_name.tolist():
        owed, pool = of_source.get(name, ((), None))
        if pool is None or not len(owed):
            translated.append(np.zeros(0, np.int64))
            continue
        new_number = _new_numbers(old.files[name], new.files[name])
        usable = new_number[pool.ids(np.arange(len(pool))) - old.start[name]]
        every = np.arange(sum(count for _, count in new.files[name]))
        # What is still owed, and all that the old data did not have: new samples join in the
        # current epoch.
        ids = np.union1d(new_number[owed - old.start[name]], np.setdiff1d(every, usable))
        # -1 stands for samples that are gone.
        translated.append(new.start[name] + ids[ids >= 0])
    return translated


def _new_numbers(old: Files, new: Files) -> np.ndarray:
    """Return the number in the new files of each sample of the old ones, int64; -1 = it is gone."""
    known = {}
    same = _same_names([name for name, _ in old], [name for name, _ in new])
    start = 0
    for name, count in new:
        known[name] = start, count
        start += count
    numbers = []
    for name, count in old:
        start, new_count = known.get(same.get(name, ""), (0, 0))
        number = np.arange(count)
        # A file that became shorter has lost its last samples.
        numbers.append(np.where(number < new_count, start + number, -1))
    return np.concatenate(numbers)


def _same_names(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return the new name of each old file: the same, or where none is, the one whose last part alone is the same."""
    if set(old) & set(new):
        return {name: name for name in old}
    last = {Path(name).name: name for name in new}
    return (
        {name: last[Path(name).name] for name in old if Path(name).name in last}
        if len(last) == len(new)
        else {}
    )
