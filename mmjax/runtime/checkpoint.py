"""Checkpoints: parameters, optimizer state, config and data position in one atomic, asynchronous save.

Layers are stored one by one, not stacked, so a checkpoint restores into any division of the layers
into stacks; arrays are read straight into the requested shardings, so it restores onto any mesh.
Every array is saved with a checksum: storage may return a missing or damaged chunk as zeros or
noise without an error.

On accelerators programs divide stacks into layers. What lies on CPUs is the host's memory already:
NumPy does so there, and nothing is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.layer_stacks import stack_layers, unstack_layers
from mmjax.parallel.sharding import partition_spec, without_shards
from mmjax.runtime.array_storage import ArrayStorage, copy_to_host, lies_on_cpus, put_tree
from mmjax.runtime.bit_sums import (
    Sums,
    as_ints,
    bit_sums,
    find_damaged,
    host_bit_sum,
    leaves_by_name,
)
from mmjax.runtime.checkpoint_commit import (
    Commit,
    Retention,
    begin_partial,
    partial_folder,
    remove_leftovers,
    run_and_describe_failure,
)
from mmjax.runtime.checkpoint_metadata import (
    STATE,
    CheckpointMetadata,
    DamagedCheckpoint,
    DataState,
    describe_misplaced,
    parse_metadata,
    user_error,
    write_metadata,
)
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.program_cache import CachedProgram
from mmjax.runtime.state import TrainState


@dataclass
class _Stored:
    """The contents of a checkpoint, as far as this process has read them."""

    parts: list[TrainState | None] = field(default_factory=list)  # None: of other processes
    saved: CheckpointMetadata | None = None
    misplaced: str = ""
    differences: list[str] = field(default_factory=list)  # from the state that this run needs


class CheckpointStore:
    """The checkpoints of one run, in the structure and shardings of its executor."""

    def __init__(self, folder: Path, executor: Executor, retention: Retention) -> None:
        self._folder = folder
        self._executor = executor
        self.retention = retention
        self._saves = 0
        self._commit: Commit | None = None
        # A pipeline's state lies on several meshes, each with programs of its own; a checkpoint
        # does not show it.
        self._abstract = tuple(state.abstract for state in executor.states)
        self._targets = [unstack_layers(part, layer_of_struct) for part in self._abstract]
        self._target = _merge_parts(self._targets)
        self._local = [
            any(x.sharding.addressable_devices for x in jax.tree.leaves(part))
            for part in self._abstract
        ]
        self._on_host = all(map(lies_on_cpus, self._abstract))
        # Of several processes each holds shards alone.
        self._saves_from_host = self._on_host and coordination.count() == 1
        # A program of each part writes its layers one by one, by the names that every executor has.
        self._unstack = list(map(_unstack_program, self._targets))
        self._storage = ArrayStorage()

        def open_folder() -> None:
            with user_error(f"cannot open {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(folder)

        coordination.run_on_leader(open_folder)

    def prepare(self) -> None:
        """Compile what saving needs, so that nothing is compiled in mid-run."""
        if self._saves_from_host:
            return
        self._unstack = [
            unstack.compile(part) if local else unstack
            for unstack, part, local in zip(self._unstack, self._abstract, self._local, strict=True)
        ]

    def save(self, state: State, config: str, data: DataState) -> None:
        """Copy the state to the host and write it in the background; it appears whole or not at all."""
        self.wait()
        self._saves += 1
        number = self._saves
        sums: Sums = {}
        # Goes as soon as it is written: the last save is remembered until the next.
        trees = [self._unstacked(state, sums)]
        path = partial_folder(self._folder, data.step) / STATE
        futures: list[Any] = []

        def begin() -> None:
            tree = trees.pop()
            futures.extend(self._storage.begin_write(path, tree))
            if self._saves_from_host:
                sums.update({name: host_bit_sum(x) for name, x in leaves_by_name(tree).items()})

        # Errors travel as text to `write`, so that every process starts the same save and all learn
        # why it failed.
        refused = coordination.run_on_leader(
            lambda: run_and_describe_failure(lambda: begin_partial(self._folder, data.step))
        )
        if not self._saves_from_host:
            refused = refused or run_and_describe_failure(begin)

        def write() -> None:
            begun = refused
            if self._saves_from_host:
                begun = begun or run_and_describe_failure(begin)
            if len(self._targets) > 1:  # each process knows the sums of its own stages
                for gathered in coordination.gather(f"sums/{number}", json.dumps(sums)):
                    sums.update(json.loads(gathered) | sums)
            # Every future is awaited, also after one has failed: none may write any more when the
            # folder is removed. In the thread that writes, so that training does not wait for the
            # others.
            failed = [begun, *(run_and_describe_failure(future.result) for future in futures)]
            if error := next(filter(None, failed), ""):
                raise OSError(error)

        def finish(partial: Path) -> None:
            self._storage.finish_write(partial / STATE)
            write_metadata(partial, config, data, sums)

        self._commit = Commit(
            folder=self._folder,
            step=data.step,
            number=number,
            write=write,
            finish=finish,
            retention=self.retention,
        )

    def _unstacked(self, state: State, sums: Sums) -> Any:
        """Merge the state's parts, layers one by one; writes `sums` of the arrays that programs divide."""
        parts = []
        for number, part in enumerate(self._executor.parts(state)):
            if self._saves_from_host:
                # Training may donate the buffers, of which those on CPUs are NumPy's without a copy.
                host = jax.tree.map(copy_to_host, part)
                parts.append(unstack_layers(host, lambda stack, layer: stack[layer, ...]))
            elif self._local[number]:
                layers, layer_sums = self._unstack[number](part)
                parts.append(layers)
                sums.update(as_ints(layer_sums) | sums)
            else:
                parts.append(jax.tree.map(without_shards, self._targets[number]))
        return _merge_parts(parts)

    def wait(self) -> str:
        """Wait for the last save, and return why it failed, the same on every process; empty where it did not."""
        return self._commit.wait() if self._commit else ""

    @property
    def finished_save(self) -> Commit | None:
        """Return the last save if it has ended, successfully or not."""
        return self._commit if self._commit and self._commit.finished else None

    def restore(self, step: int) -> tuple[State, CheckpointMetadata]:
        """Restore step `step` into this run's shardings.

        Raises DamagedCheckpoint on all processes where one of them cannot read it, and UserError
        where it is of another model or optimizer.
        """
        checkpoint = self._folder / str(step)
        stored = _Stored()
        failed = run_and_describe_failure(lambda: self._read(step, stored))
        error = next(filter(None, coordination.gather(f"restored/{step}", failed)), "")
        if not error and stored.misplaced:
            raise UserError(
                f"checkpoint {checkpoint} cannot be used: {stored.misplaced}", everywhere=True
            )
        if not error and stored.differences:
            raise UserError(
                f"checkpoint {checkpoint} is of another model or optimizer: {stored.differences[0]}; resume with the "
                "model, optimizer and optimizer.moments that saved it, or start another run from its parameters: "
                f"run=FOLDER init_from={self._folder.parent}",
                everywhere=True,
            )
        if not error:
            # By programs that all processes run.
            damaged = (find_damaged(part, stored.saved.sums) for part in stored.parts if part)
            if (name := next(filter(None, damaged), None)) is not None:
                error = f"{name} is not what was saved"
        if error:
            raise DamagedCheckpoint(
                f"checkpoint {checkpoint} cannot be used: {error}", everywhere=True
            )
        restored = []
        for part, like in zip(stored.parts, self._abstract, strict=True):
            if part is None:
                restored.append(jax.tree.map(without_shards, like))
            else:
                stacked = stack_layers(part, self._executor.model.runs)
                restored.append(put_tree(stacked, jax.tree.map(lambda x: x.sharding, like)))
        return self._executor.from_parts(restored), stored.saved

    def _read(self, step: int, stored: _Stored) -> None:
        """Read checkpoint `step`, as far as it goes with this run."""
        path = self._folder / str(step) / STATE
        stored.saved = parse_metadata(self._folder, step)
        stored.misplaced = describe_misplaced(self._folder, stored.saved)
        stored.differences.extend(_different_names(stored.saved.sums, self._target))
        if not self._on_host:
            structs = self._storage.structure(path)
            stored.differences.extend(_different_dtypes(structs, self._target))
        if stored.differences:
            return
        # Each part by itself: what several have lies on the mesh of each.
        for target, local in zip(self._targets, self._local, strict=True):
            partial = len(self._targets) > 1
            part = self._storage.read(path, target, partial) if local else None
            stored.parts.append(part)
            stored.differences.extend(_different_dtypes(part, target))


def _different_names(sums: Sums, target: Any) -> Iterator[str]:
    """List the arrays that only the checkpoint or only the target has."""
    # The checksums are protected by one of their own, so a missing name is no damage.
    different = sums.keys() ^ leaves_by_name(target).keys()
    yield from (
        f"{name} is only {'there' if name in sums else 'here'}" for name in sorted(different)
    )


def _different_dtypes(stored: Any, target: Any) -> Iterator[str]:
    """List the arrays of another precision."""
    needed = leaves_by_name(target)
    for name, x in leaves_by_name(stored).items():
        if name in needed and x.dtype != needed[name].dtype:
            yield f"{name} is {x.dtype} there and {needed[name].dtype} here"


def _unstack_program(target: TrainState) -> Any:
    """Return the program that divides the stacks of a state into these layers, and sums their bits."""

    def unstack(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        layers = unstack_layers(state)
        return layers, bit_sums(layers)

    shardings = jax.tree.map(lambda x: x.sharding, target)
    return CachedProgram(
        "", shardings.step.mesh, unstack, out_shardings=(shardings, shardings.step)
    )


def _merge_parts(parts: Sequence[Any]) -> Any:
    """Merge trees of a state's parts: dicts by name, tuples member by member; of what several have, the first's."""
    first = parts[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for part in parts for name in part)
        return {
            name: _merge_parts([part[name] for part in parts if name in part]) for name in names
        }
    if isinstance(first, tuple):
        members = [_merge_parts(members) for members in zip(*parts, strict=True)]
        return type(first)._make(members) if hasattr(first, "_make") else tuple(members)
    return first


def layer_of_struct(leaf: jax.ShapeDtypeStruct, layer: int) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of a layer of a stack."""
    del layer  # all layers of a stack are sharded alike
    layout = NamedSharding(leaf.sharding.mesh, partition_spec(leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=layout)
