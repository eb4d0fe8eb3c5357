"""Checkpoints: parameters, optimizer state, config and data position in one atomic, asynchronous save.

The only file that uses Orbax. Layers are stored one by one, not stacked, so a checkpoint restores
into any division of the layers into stacks; arrays are read straight into the requested shardings,
so it restores onto any mesh. Every array is saved with a checksum: storage may return a missing or
damaged chunk as zeros or noise without an error.

On accelerators programs divide stacks into layers. What lies on CPUs is the host's memory already:
NumPy does so there, and nothing is compiled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.disk import verify_checksum, with_checksum
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.layer_stacks import Params, key_names, stack_layers, unstack_layers
from mmjax.models.model import Model
from mmjax.parallel.sharding import partition_spec, without_shards
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
    root_cause_line,
    run_and_describe_failure,
    saved_steps,
)
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.state import TrainState, all_parameters

# TensorStore's errors begin with a status code: "OUT_OF_RANGE: Error writing ..".
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


@cache
def silence_late_io_errors() -> None:
    """Install the filters, once per process."""
    # When one array of many cannot be read or written, Orbax gives up and closes its event loop.
    # The others finish later in threads of TensorStore, some after the run has printed its own
    # error; each would print a traceback. Remove when Orbax awaits them all.
    previous_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        # Writes that finish after Orbax has closed its event loop.
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed or (isinstance(error, Exception) and _from_storage(error))):
            previous_hook(unraisable)

    def allow(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return (
            error is None
            or "was never retrieved" not in record.getMessage()
            or not _from_storage(error)
        )

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(allow)


def _from_storage(error: BaseException) -> bool:
    """Return whether an error was raised by Orbax, or by TensorStore, whose errors have no traceback."""
    if error.__traceback__ is None:
        return bool(_STATUS.match(str(error)))
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(name.startswith("orbax.") for name in modules)


FORMAT = "mmjax-2"
# In a checkpoint's folder: the arrays, and a JSON object with format, run, config, data position
# and checksums.
STATE = "state"
META = "meta/metadata"

# Orbax and its storage report every save as a warning or an info line; we print one line of our own
# instead.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class DataState:
    """Position in the data. The step number alone determines it; the rest proves that the data is still the same."""

    step: int  # the next to run
    index: str  # fingerprint of the length index
    budget: dict[str, Any]
    planner: int = 1  # version of the planning algorithm; checkpoints without one are of the first
    segment: int = 0  # the step from which on this data, mixture and batch are used


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint.

    step: of its folder's name. run: the id of the run that saved it; empty where that had none.
    """

    step: int
    config: str  # JSON
    data: DataState
    sums: Sums
    run: str = ""


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete or damaged. Raised on all processes together."""


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
        self._targets = [unstack_layers(part, _layer_of_struct) for part in self._abstract]
        self._target = _merge_parts(self._targets)
        self._local = [
            any(x.sharding.addressable_devices for x in jax.tree.leaves(part))
            for part in self._abstract
        ]
        self._on_host = all(map(_lies_on_cpus, self._abstract))
        # Of several processes each holds shards alone.
        self._saves_from_host = self._on_host and coordination.count() == 1
        # A program of each part writes its layers one by one, by the names that every executor has.
        self._unstack: list[Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]] = []
        for target in self._targets:
            shardings = jax.tree.map(lambda x: x.sharding, target)
            self._unstack.append(
                jax.jit(_unstack_with_sums, out_shardings=(shardings, shardings.step))
            )
        self._handler = _state_handler()

        def open_folder() -> None:
            with _user_error(f"cannot open {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(folder)

        coordination.run_on_leader(open_folder)

    def prepare(self) -> None:
        """Compile what saving needs, so that nothing is compiled in mid-run."""
        if self._saves_from_host:
            return
        self._unstack = [
            unstack.lower(part).compile() if local else unstack
            for unstack, part, local in zip(self._unstack, self._abstract, self._local, strict=True)
        ]

    def save(self, state: State, config: str, data: DataState) -> None:
        """Copy the state to the host and write it in the background; it appears whole or not at all."""
        self.wait()
        parts = []
        sums: Sums = {}
        for number, part in enumerate(self._executor.parts(state)):
            if self._saves_from_host:
                part = unstack_layers(
                    jax.tree.map(_copy_to_host, part), lambda stack, layer: stack[layer, ...]
                )
            elif self._local[number]:
                part, part_sums = self._unstack[number](part)
                sums |= {
                    name: value for name, value in as_ints(part_sums).items() if name not in sums
                }
            else:
                part = jax.tree.map(without_shards, self._targets[number])
            parts.append(part)
        # Goes as soon as it is written: the last save is remembered until the next.
        unstacked = [_merge_parts(parts)]
        divided = len(parts) > 1
        del parts, part
        run = RunFolder(self._folder.parent).read_identity()
        meta = {"format": FORMAT, "run": run, "config": config, "data": asdict(data), "sums": sums}
        save = self._saves
        partial = partial_folder(self._folder, data.step)
        futures: list[Any] = []

        def begin() -> None:
            # Returns when the state is in the host's memory: from then on training may donate its
            # buffers.
            tree = unstacked.pop()
            saving = self._handler.async_save(partial / STATE, args=ocp.args.PyTreeSave(tree))
            futures.extend(asyncio.run_coroutine_threadsafe(saving, _loop()).result())
            if self._saves_from_host:
                sums.update({name: host_bit_sum(x) for name, x in leaves_by_name(tree).items()})

        def finish(partial: Path) -> None:
            self._handler.finalize(partial / STATE)
            (partial / META).parent.mkdir()
            (partial / META).write_text(json.dumps(with_checksum(meta)))

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
            # Every future is awaited, also after one has failed: none may write any more when the
            # folder is removed. In the thread that writes, so that training does not wait for the
            # others.
            if divided:  # each process knows the sums of its own stages
                for gathered in coordination.gather(f"sums/{save}", json.dumps(sums)):
                    meta["sums"] = json.loads(gathered) | meta["sums"]
            failed = [begun, *(run_and_describe_failure(future.result) for future in futures)]
            if error := next(filter(None, failed), ""):
                raise OSError(error)

        self._saves += 1
        self._commit = Commit(
            folder=self._folder,
            step=data.step,
            number=self._saves,
            write=write,
            finish=finish,
            retention=self.retention,
        )

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
        path = self._folder / str(step) / STATE
        parts: list[Any] = []  # metadata and state
        misplaced: list[str] = []
        differences: list[str] = []  # from the state that this run needs

        def read() -> None:
            # By the handler itself: Orbax's checkpointers have processes wait for each other, also
            # for a failed one.
            saved = _parse_metadata(self._folder, step)
            misplaced.append(describe_misplaced(self._folder, saved))
            parts.append(saved)
            differences.extend(_different_names(saved.sums, self._target))
            if not self._on_host:
                differences.extend(
                    _different_dtypes(self._handler.metadata(path).tree, self._target)
                )
            if not differences:
                # Each part by itself: what several have lies on the mesh of each.
                for target, local in zip(self._targets, self._local, strict=True):
                    partial = len(self._targets) > 1
                    parts.append(_restore(self._handler, path, target, partial) if local else None)
                    differences.extend(_different_dtypes(parts[-1], target))

        error = next(
            filter(None, coordination.gather(f"restored/{step}", run_and_describe_failure(read))),
            "",
        )
        if not error and any(misplaced):
            raise UserError(
                f"checkpoint {path.parent} cannot be used: {misplaced[0]}", everywhere=True
            )
        if not error and differences:
            raise UserError(
                f"checkpoint {path.parent} is of another model or optimizer: {differences[0]}; resume with the model, "
                "optimizer and optimizer.moments that saved it, or start another run from its parameters: run=FOLDER "
                f"init_from={self._folder.parent}",
                everywhere=True,
            )
        for part in parts[1:]:
            if (
                not error
                and part is not None
                and (wrong := find_damaged(part, parts[0].sums)) is not None
            ):
                error = f"{wrong} is not what was saved"
        if error:
            raise DamagedCheckpoint(
                f"checkpoint {self._folder / str(step)} cannot be used: {error}", everywhere=True
            )
        saved, *unstacked = parts
        runs = self._executor.model.runs
        restored = []
        for part, like in zip(unstacked, self._abstract, strict=True):
            if part is None:
                restored.append(jax.tree.map(without_shards, like))
            else:
                restored.append(
                    _put(stack_layers(part, runs), jax.tree.map(lambda x: x.sharding, like))
                )
        return self._executor.from_parts(restored), saved

    def close(self) -> None:
        """Wait for the last save."""
        self.wait()


def checkpoint_step(folder: Path, step: int | None = None) -> int:
    """Return a checkpoint's step, by default the newest's. Raises UserError where there is no such checkpoint."""
    if not (steps := saved_steps(folder)):
        raise UserError(
            f"{folder} holds no checkpoint yet; train further, or start afresh with --overwrite"
        )
    if step is not None and step not in steps:
        raise UserError(
            f"--step {step}: {folder.parent} has checkpoints of {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def read_metadata(folder: Path, step: int) -> CheckpointMetadata:
    """Read the metadata of checkpoint `step`.

    Raises UserError where it is not one of mmjax's, is damaged, or is of another step or run than
    its place says.
    """
    saved = _parse_metadata(folder, step)
    if misplaced := describe_misplaced(folder, saved):
        raise UserError(f"checkpoint {folder / str(step)} cannot be used: {misplaced}")
    return saved


def _parse_metadata(folder: Path, step: int) -> CheckpointMetadata:
    with _reading(folder, step):
        meta = json.loads((folder / str(step) / META).read_text())
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            stored_format = meta.get("format") if isinstance(meta, dict) else None
            raise UserError(
                f"its format is {stored_format!r}; this version of mmjax reads {FORMAT!r}"
            )
        meta = verify_checksum(meta)
        data = DataState(**meta["data"])
        return CheckpointMetadata(step, meta["config"], data, meta["sums"], meta.get("run", ""))


def describe_misplaced(folder: Path, saved: CheckpointMetadata) -> str:
    """Say of which step and run a checkpoint is that was put in the place of another; empty where it was not.

    Runs begun by versions that drew no id have none to compare: of their checkpoints only the step
    is compared.
    """
    run = RunFolder(folder.parent).read_identity()
    if saved.data.step == saved.step and run in ("", saved.run):
        return ""
    config = json.loads(saved.config)
    name = config.get("run") or f"runs/{config.get('name')}"
    subject = (
        f"the state of run {name} after step {saved.data.step}"
        if run not in ("", saved.run)
        else ""
    )
    subject = subject or f"this run's state after step {saved.data.step}"
    return (
        f"it is {subject}, in the place of step {saved.step}; put back what was there, or remove it. To start from "
        "another run's parameters say init_from=RUN"
    )


def restore_parameters(folder: Path, step: int, model: Model, shardings: Params) -> Params:
    """Restore only the parameters of checkpoint `step`, into these shardings.

    What was frozen may be trainable now, and the reverse. Raises UserError where the checkpoint is
    damaged, or a parameter is missing, unexpected or of another shape.
    """
    saved = read_metadata(folder, step)
    path = folder / str(step) / STATE
    handler = _state_handler()
    target = unstack_layers(_with_sharding(model.abstract, shardings), _layer_of_struct)
    with _reading(folder, step):
        parts = _parameter_tree(handler, path, target)
        stored = {part: _as_stored(tree, target) for part, tree in parts.items()}
        single = _restore(handler, path, stored, partial=True)
        if (wrong := find_damaged(_state_of(single), saved.sums)) is not None:
            raise UserError(f"{wrong} is not what was saved")
    # Checksums are of the stored precision, so the cast comes after them.
    params = jax.tree.map(lambda x, w: x.astype(w.dtype), all_parameters(_state_of(single)), target)
    return _put(stack_layers(params, model.runs), shardings)


class SavedParameters:
    """The parameters of checkpoint `step`, read a few at a time into the host's memory.

    They are named by their path in nested dicts, layers by number. Raises UserError where the
    checkpoint is damaged, or not of this model.
    """

    def __init__(self, folder: Path, step: int, model: Model) -> None:
        self._folder = folder
        self._step = step
        self._path = folder / str(step) / STATE
        self._sums = read_metadata(folder, step).sums
        mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("host",))
        host = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.abstract)
        self._target = unstack_layers(_with_sharding(model.abstract, host), _layer_of_struct)
        with _reading(folder, step):
            self._parts = _parameter_tree(_state_handler(), self._path, self._target)

    @property
    def structs(self) -> Params:
        """Return shape and dtype of every parameter, in nested dicts."""
        return self._target

    def read(self, names: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], np.ndarray]:
        """Read these parameters as they were saved: frozen ones may be in the precision of the computation."""
        selected = {part: _select(tree, set(names)) for part, tree in self._parts.items()}
        stored = {part: _as_stored(tree, self._target) for part, tree in selected.items() if tree}
        if not stored:
            return {}
        with _reading(self._folder, self._step):
            parts = _restore(_state_handler(), self._path, stored, partial=True)
            if (
                wrong := find_damaged(
                    _state_of({"trainable": {}, "frozen": {}} | parts), self._sums
                )
            ) is not None:
                raise UserError(f"{wrong} is not what was saved")
        return {
            key_names(path): x
            for part in parts.values()
            for path, x in jax.tree.leaves_with_path(part)
        }


def _select(tree: Any, names: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Any:
    """Keep the branches of nested dicts that lead to these names."""
    if not isinstance(tree, dict):
        return tree
    inner = {
        k: _select(v, names, (*path, k))
        for k, v in tree.items()
        if isinstance(v, dict) or (*path, k) in names
    }
    return {k: v for k, v in inner.items() if v != {}}


def _parameter_tree(
    handler: ocp.PyTreeCheckpointHandler, path: Path, target: Params
) -> dict[str, Params]:
    """Read the stored structure of trainable and frozen parameters. Raises UserError where it is of another model."""
    tree = handler.metadata(path).tree
    parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
    stored = leaves_by_name(all_parameters(_state_of(parts)))
    expected = leaves_by_name(target)
    for name, x in expected.items():
        if name not in stored:
            raise UserError(
                f"it is of another model: it has no parameter {name}, which this model needs"
            )
        if tuple(stored[name].shape) != tuple(x.shape):
            shapes = (
                f"{name} has shape {tuple(stored[name].shape)}, this model needs {tuple(x.shape)}"
            )
            raise UserError(f"it is of another model: {shapes}")
    if extra := sorted(set(stored) - set(expected)):
        raise UserError(
            f"it is of another model: it has parameter {extra[0]}, which this model lacks"
        )
    return parts


def _state_of(parts: dict[str, Params]) -> TrainState:
    return TrainState(None, parts["trainable"], parts["frozen"], None)


class _LocalShards:
    """An array as Orbax reads it to save it, but no jax.Array: of these it refuses what one process holds whole.

    Where this process has none of the array, an empty shard that Orbax never writes gives it the
    shape of shards. Goes when Orbax saves arrays of a part of the processes' devices.
    """

    def __init__(self, x: jax.Array) -> None:
        self.shape = x.shape
        self.dtype = x.dtype
        self.sharding = x.sharding
        self.size = x.size
        self.nbytes = x.nbytes
        self.ndim = x.ndim
        empty = SimpleNamespace(shape=x.sharding.shard_shape(x.shape))
        self.addressable_shards = x.addressable_shards or [
            SimpleNamespace(data=empty, replica_id=-1, index=None)
        ]


class _StageHandler(ocp.type_handlers.ArrayHandler):
    """Saves arrays that lie on some of the processes' devices, such as those of a pipeline's stages."""

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None
    ) -> Any:
        return await super().serialize([_LocalShards(x) for x in values], infos, args)


class _HostHandler(ocp.type_handlers.NumpyHandler):
    """Reads and writes arrays in the host's memory, under the type of those on devices: a checkpoint is of one kind."""

    def typestr(self) -> str:
        return ocp.type_handlers.ArrayHandler.typestr(self)


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    silence_late_io_errors()
    # By default Orbax slices replicated arrays on the devices, to divide the writing among
    # replicas: a hundred small programs, compiled in mid-run.
    arrays = _StageHandler(use_replica_parallel=False)
    host = _HostHandler(deepcopy_host_arrays=False)  # what is saved is a copy already
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, host), (jax.Array, arrays)
    )
    # Random mantissas do not compress: a tenth of the bytes for half of the time.
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def _restore(handler: ocp.PyTreeCheckpointHandler, path: Path, structs: Any, partial: bool) -> Any:
    """Read arrays into their shardings, or whole into the host's memory where they all belong on CPUs."""
    # A stage that trains nothing has no moments where the whole state has some: Orbax would read a
    # number there.
    item = _without_empty(structs) if partial else structs
    if _lies_on_cpus(structs):
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    else:
        args = ocp.checkpoint_utils.construct_restore_args(item)
    request = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=partial)
    restored = leaves_by_name(handler.restore(path, args=request))
    for name, struct in leaves_by_name(structs).items():
        if restored[name].shape != struct.shape:
            raise ValueError(f"{name} has shape {restored[name].shape}, not {struct.shape}")
    return jax.tree.unflatten(
        jax.tree.structure(structs), [restored[name] for name in leaves_by_name(structs)]
    )


def _without_empty(tree: Any) -> Any:
    """Return dicts and named tuples as dicts, without what holds no array."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if not isinstance(tree, dict):
        return tree
    return {key: _without_empty(value) for key, value in tree.items() if jax.tree.leaves(value)}


def _lies_on_cpus(structs: Any) -> bool:
    return all(d.platform == "cpu" for x in jax.tree.leaves(structs) for d in x.sharding.device_set)


def _copy_to_host(x: jax.Array) -> np.ndarray:
    """Copy an array of this process: training may donate its buffers, of which CPUs' are NumPy's without a copy."""
    copy = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            copy[shard.index] = shard.data
    return copy


def _put(tree: Any, shardings: Any) -> Any:
    """Put arrays where they belong. NumPy's may be whole on each of several processes, which JAX would compare."""

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, np.ndarray):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree, shardings)


def _as_stored(stored: Any, target: Any) -> Any:
    """Reduce `target` to the paths of `stored`, in the stored precision."""
    if not isinstance(stored, dict):
        return jax.ShapeDtypeStruct(target.shape, stored.dtype, sharding=target.sharding)
    return {key: _as_stored(value, target[key]) for key, value in stored.items()}


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


def _unstack_with_sums(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
    unstacked = unstack_layers(state)
    return unstacked, bit_sums(unstacked)


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


def _with_sharding(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )


def _layer_of_struct(leaf: jax.ShapeDtypeStruct, layer: int) -> jax.ShapeDtypeStruct:
    del layer  # all layers of a stack are sharded alike
    layout = NamedSharding(leaf.sharding.mesh, partition_spec(leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=layout)


@contextmanager
def _user_error(message: str) -> Iterator[None]:
    """Turn any error of the body into one line."""
    try:
        yield
    except Exception as error:  # Orbax and its storage raise dozens of kinds for one broken file
        raise UserError(f"{message}: {root_cause_line(error)}") from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start an event loop for saves, in a thread of its own: a notebook's main thread already runs one."""
    # It is never closed: when one write of many fails, the others still report to it.
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    """Turn any error of reading a checkpoint into one line with the remedy."""
    try:
        with _user_error(f"checkpoint {folder / str(step)} cannot be used"):
            yield
    except UserError as error:
        older = [s for s in saved_steps(folder) if s < step]
        remedy = (
            f"to use step {older[-1]} instead, remove it" if older else "there is no older one here"
        )
        raise UserError(f"{error}; {remedy}") from error.__cause__
