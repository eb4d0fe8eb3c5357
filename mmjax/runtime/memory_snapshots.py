"""Snapshots of the state in the memory of the hosts, from which a run goes on when a process or a host is lost.

Each process copies its shards to the host's memory after a step, and writes them beside the next
steps into a file of a memory file system; of what several processes of a host have, one writes.
Where no other host has the same, a process on another host keeps a copy. Files of the step before
are removed once all have written: the newest whole snapshot is never overwritten.

Layers are stored one by one, like a checkpoint's, and a snapshot restores into any shardings. No
program runs: what lies in shards is cut and joined in the host's memory.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from mmjax.config import TrainingConfig
from mmjax.console import size
from mmjax.disk import PROGRESS
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.layer_stacks import stack_layers, unstack_layers
from mmjax.parallel.sharding import without_shards
from mmjax.planning.memory import KEPT_COPIES, WRITTEN_COPIES
from mmjax.runtime.bit_sums import leaves_by_name
from mmjax.runtime.checkpoint import layer_of_struct
from mmjax.runtime.checkpoint_commit import report_progress, run_and_describe_failure
from mmjax.runtime.checkpoint_metadata import CheckpointMetadata, DamagedCheckpoint, DataState
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.snapshot_files import (
    Box,
    Piece,
    SnapshotFile,
    SnapshotFolder,
    SnapshotHeader,
    StoredPiece,
    Whole,
    write_snapshot,
)


def open_snapshots(config: TrainingConfig, folder: RunFolder) -> SnapshotFolder | None:
    """Open this host's part of a run's snapshots; None where none are to be taken.

    Raises UserError where nothing would restart the run, or the folder cannot be used.
    """
    if not config.memory_every:
        return None
    if PROGRESS not in os.environ:
        raise UserError(
            f"training.memory_every={config.memory_every}: nothing restarts this run, which snapshots in memory are "
            "for; start it by python -m mmjax.supervise -- COMMAND, or set training.memory_every=0"
        )
    if not (identity := folder.read_identity()):
        raise UserError(
            f"training.memory_every={config.memory_every}: {folder.path} was begun by a version that gave runs no "
            "id, so that its snapshots could be another's; set training.memory_every=0"
        )
    host = coordination.hosts()[coordination.index()]
    snapshots = SnapshotFolder(Path(config.memory_folder), identity, host)
    if (peers := coordination.peer_monitor()) is not None:
        snapshots.serve(peers.links)
    return snapshots


@dataclass(frozen=True)
class _Shards:
    """The shards of an array that this process writes: part of a tree, as a leaf."""

    shape: tuple[int, ...]
    shards: dict[Box, np.ndarray]

    def layer(self, number: int) -> _Shards:
        """Cut out a layer of a stack, whose first axis is in no mesh axis."""
        shards = {box[1:]: values[number] for box, values in self.shards.items()}
        return _Shards(self.shape[1:], shards)


@dataclass(frozen=True)
class _Reader:
    """Reads parts of an array of a snapshot: part of a tree, as a leaf."""

    read: Callable[[Box], np.ndarray]

    @staticmethod
    def stack(layers: list[_Reader]) -> _Reader:
        """Join the readers of layers to the reader of their stack."""

        def read(box: Box) -> np.ndarray:
            (first, last), *rest = box
            return np.stack([layer.read(tuple(rest)) for layer in layers[first:last]])

        return _Reader(read)


class MemorySnapshots:
    """The snapshots of one run, in the structure and shardings of its executor."""

    def __init__(self, folder: SnapshotFolder, executor: Executor) -> None:
        """Raises UserError where a host has too little memory."""
        self._folder = folder
        self._start = coordination.run_on_leader(lambda: secrets.token_hex(8))
        self._executor = executor
        self._abstract = tuple(state.abstract for state in executor.states)
        self._targets = [unstack_layers(part, layer_of_struct) for part in self._abstract]
        self._number = 0  # of saves
        self._thread: threading.Thread | None = None
        self._error = ""
        self._choose_writers()
        self._check_memory()

    # ----------------------------------------------------------------------------------------------
    # who writes what, and who keeps a copy

    def _choose_writers(self) -> None:
        hosts = tuple(coordination.hosts())
        index = coordination.index()
        self._written: list[dict[Box, jax.Device]] = []  # of each array, by shard
        writers: set[int] = set()
        everywhere = True  # whether every host has the whole state
        for struct in jax.tree.leaves(self._abstract):
            owners, on_all = _owners(struct.sharding, struct.shape, hosts)
            everywhere &= on_all
            writers.update(owners.values())
            mine = {}
            indices = struct.sharding.addressable_devices_indices_map(struct.shape)
            for device, part in indices.items():
                box = _box(part, struct.shape)
                if owners[hosts[index], box] == index:
                    mine.setdefault(box, device)
            self._written.append(mine)
        self._writes = index in writers
        group = sorted(p for p in writers if not everywhere or hosts[p] == hosts[index])
        self._group = group[0], len(group)
        after = [(index + n) % len(hosts) for n in range(1, len(hosts))]
        distant = next((p for p in after if hosts[p] != hosts[index]), None)
        # The process that keeps a copy of what this one writes.
        self.keeper = distant if self._writes and not everywhere else None

    def _check_memory(self) -> None:
        hosts = coordination.hosts()
        index = coordination.index()
        own = sum(
            len(mine)
            * struct.dtype.itemsize
            * int(np.prod(struct.sharding.shard_shape(struct.shape)))
            for mine, struct in zip(self._written, jax.tree.leaves(self._abstract), strict=True)
        )
        gathered = coordination.gather("snapshot bytes", json.dumps([own, self.keeper]))
        needed = 0
        for process, text in enumerate(gathered):
            written, keeper = json.loads(text)
            needed += WRITTEN_COPIES * written * (hosts[process] == hosts[index])
            needed += KEPT_COPIES * written * (keeper is not None and hosts[keeper] == hosts[index])
        self.host_bytes = needed
        if needed > (free := self._folder.free_bytes()):
            raise UserError(
                f"training.memory_every: snapshots need {size(needed)} of the memory of {hosts[index]}, and "
                f"{self._folder.path} has {size(free)}; make it larger, name another training.memory_folder, or set "
                "training.memory_every=0"
            )

    def describe(self) -> str:
        """Say what snapshots take, and what the run survives."""
        if len(set(coordination.hosts())) == 1:
            lost = "lost processes, not this host"
        elif self.keeper is None:
            lost = "any one host: every host has the whole state"
        else:
            lost = f"any one host: process {self.keeper} keeps a copy of what process 0 writes, and so on"
        return f"snapshots take {size(self.host_bytes)} of this host's memory; they survive {lost}"

    # ----------------------------------------------------------------------------------------------
    # saving

    def save(self, state: State, config: str, data: DataState) -> None:
        """Copy this process's shards to the host, and write them in the background."""
        self.wait()
        self._number += 1
        pieces = list(self._copied(state)) if self._writes else []
        header = SnapshotHeader(
            run=self._folder.run,
            start=self._start,
            step=data.step,
            writer=coordination.index(),
            group=self._group[0],
            writers=self._group[1],
            config=config,
            data=asdict(data),
        )
        arguments = (header, pieces, self._number)
        self._thread = threading.Thread(target=self._save, args=arguments, name="snapshot")
        self._thread.start()

    def _copied(self, state: State) -> Iterator[Piece]:
        """Copy the shards that this process writes. Training may donate their buffers afterwards."""
        parts = self._executor.parts(state)
        leaves, structure = jax.tree.flatten(parts)
        chosen = [
            {box: shard.data for shard in x.addressable_shards for box, d in mine.items()
             if shard.device == d}
            for x, mine in zip(leaves, self._written, strict=True)
        ]  # fmt: skip
        for shards in chosen:
            for shard in shards.values():
                shard.copy_to_host_async()
        copied = [
            _Shards(x.shape, {box: _on_host(shard) for box, shard in shards.items()})
            for x, shards in zip(leaves, chosen, strict=True)
        ]
        seen = set()  # what several parts have, such as counters, is the same in each
        for part in jax.tree.unflatten(structure, copied):
            for name, x in leaves_by_name(unstack_layers(part, _Shards.layer)).items():
                for box, values in x.shards.items():
                    if (name, box) not in seen:
                        seen.add((name, box))
                        yield Piece(name, x.shape, box, np.ascontiguousarray(values))

    def _save(self, header: SnapshotHeader, pieces: Sequence[Piece], number: int) -> None:
        def write() -> None:
            if pieces:
                path = write_snapshot(self._folder.path, header, pieces)
                if self.keeper is not None:
                    links = coordination.peer_monitor().links
                    self._folder.copy_to(links, self.keeper, path)

        failed = run_and_describe_failure(write)
        try:
            errors = coordination.gather(f"snapshot/{number}", failed)
        except Exception:  # another process has died: this one ends soon
            return
        self._error = next(filter(None, errors), "")
        if not self._error:
            self._folder.remove_before(header.step)
            if coordination.is_leader():
                run_and_describe_failure(lambda: report_progress(header.step))

    def wait(self) -> str:
        """Wait for the last snapshot, and return why it failed, the same on every process; empty where it did not."""
        if self._thread is not None:
            self._thread.join()
        return self._error

    def remove(self) -> None:
        """Remove all snapshots: the run has ended in order."""
        self.wait()
        self._folder.remove_all()

    # ----------------------------------------------------------------------------------------------
    # restoring

    def restore(self, whole: Whole) -> tuple[State, CheckpointMetadata]:
        """Restore a snapshot into this run's shardings.

        Raises DamagedCheckpoint on all processes where one of them cannot read it.
        """
        restored: list[Any] = []
        saved: list[CheckpointMetadata] = []
        failed = run_and_describe_failure(lambda: self._read(whole, restored, saved))
        error = next(
            filter(None, coordination.gather(f"snapshot/restored/{whole.step}", failed)), ""
        )
        if error:
            raise DamagedCheckpoint(
                f"the snapshot of step {whole.step} in memory cannot be used: {error}",
                everywhere=True,
            )
        self._folder.remove_after(whole.step)
        return self._executor.from_parts(restored), saved[0]

    def _read(self, whole: Whole, restored: list[Any], saved: list[CheckpointMetadata]) -> None:
        source = _Source(self._folder, whole)
        for part, target in zip(self._abstract, self._targets, strict=True):
            if not any(x.sharding.addressable_devices for x in jax.tree.leaves(part)):
                restored.append(jax.tree.map(without_shards, part))
                continue
            readers = [source.reader(*named) for named in leaves_by_name(target).items()]
            tree = jax.tree.unflatten(jax.tree.structure(target), readers)
            stacked = stack_layers(tree, self._executor.model.runs, _Reader.stack)
            restored.append(
                jax.tree.map(
                    lambda x, reader: jax.make_array_from_callback(
                        x.shape,
                        x.sharding,
                        lambda index: reader.read(_box(index, x.shape)),
                        dtype=x.dtype,
                    ),
                    part,
                    stacked,
                )
            )
        if source.header is None:
            raise ValueError("this host has none of it")
        data = DataState(**source.header.data)
        saved.append(
            CheckpointMetadata(whole.step, source.header.config, data, {}, source.header.run)
        )


class _Source:
    """The pieces of a snapshot: of the files on this host, and where these are not enough, of others'."""

    def __init__(self, folder: SnapshotFolder, whole: Whole) -> None:
        self._folder = folder
        self._whole = whole
        self._pieces: dict[str, list[tuple[SnapshotFile, StoredPiece]]] = defaultdict(list)
        self.header: SnapshotHeader | None = None  # of any file: all say the same of the step
        index = coordination.index()
        # What this process has written by itself is asked for first.
        writers = sorted(whole.holders, key=lambda writer: (writer != index, writer))
        self._elsewhere = [writer for writer in writers if not self._add(writer)]

    def reader(self, name: str, struct: jax.ShapeDtypeStruct) -> _Reader:
        """Return a reader of an array. It raises ValueError where the snapshot has another."""

        def read(box: Box) -> np.ndarray:
            values = np.empty([last - first for first, last in box], struct.dtype)
            for writer in [None, *self._elsewhere]:
                if writer is not None and not self._fetch(writer, name, box):
                    continue
                if self._fill(values, name, struct, box) == values.size:
                    return values
            raise ValueError(f"{name} is not whole in it")

        return _Reader(read)

    def _fill(self, values: np.ndarray, name: str, struct: jax.ShapeDtypeStruct, box: Box) -> int:
        """Copy what there is of an array's part; return how many elements that is."""
        # Pieces of one start are of one layout: equal, or without a common element.
        filled: dict[Box, int] = {}
        for file, piece in self._pieces[name]:
            common = _intersection(piece.box, box)
            if common is None or common in filled:
                continue
            if (piece.shape, piece.dtype) != (struct.shape, struct.dtype.name):
                raise ValueError(
                    f"{name} is {piece.dtype} {piece.shape} in it, and {struct.dtype.name} {struct.shape} here"
                )
            part = file.read(piece)[_slices(common, piece.box)]
            values[_slices(common, box)] = part
            filled[common] = part.size
        return sum(filled.values())

    def _fetch(self, writer: int, name: str, box: Box) -> bool:
        """Get the file of a writer from another host, where it has something of this part of an array."""
        links = coordination.peer_monitor().links
        step = self._whole.step
        process = self._whole.holders[writer][0]
        pieces = self._folder.fetch_pieces(links, process, step, writer)
        if not any(p.name == name and _intersection(p.box, box) is not None for p in pieces):
            return False
        self._folder.fetch(links, process, step, writer)
        self._elsewhere.remove(writer)
        return self._add(writer)

    def _add(self, writer: int) -> bool:
        """Add the pieces of a writer's file, where it is on this host."""
        file = self._folder.open(self._whole.step, writer, self._whole.start)
        if file is None:
            return False
        self.header = file.header
        for piece in file.pieces:
            self._pieces[piece.name].append((file, piece))
        return True


@cache
def _owners(
    sharding: NamedSharding, shape: tuple[int, ...], hosts: tuple[str, ...]
) -> tuple[dict[tuple[str, Box], int], bool]:
    """Return the process that writes each shard on each host, and whether every host has all shards."""
    writers: dict[tuple[str, Box], int] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        key = hosts[device.process_index], _box(index, shape)
        writers[key] = min(device.process_index, writers.get(key, device.process_index))
    boxes = {box for _, box in writers}
    return writers, len(writers) == len(boxes) * len(set(hosts))


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(
        (s.start or 0, length if s.stop is None else s.stop)
        for s, length in zip(index, shape, strict=True)
    )


def _intersection(a: Box, b: Box) -> Box | None:
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(first >= last for first, last in common) else common


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Return the slices of a box in an array that holds another box."""
    return tuple(
        slice(first - origin, last - origin)
        for (first, last), (origin, _) in zip(box, within, strict=True)
    )


def _on_host(shard: jax.Array) -> np.ndarray:
    """Copy a shard to the host: of CPUs' the buffer is NumPy's without a copy."""
    values = np.asarray(shard)
    return values.copy() if shard.device.platform == "cpu" else values
