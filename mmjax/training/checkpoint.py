"""Checkpoints: state, config and data position in one atomic, asynchronous save; layers are named one by one.

The only file that knows Orbax. Because layers are stored singly, a checkpoint restores under any run borders and,
because arrays are read straight into the shardings asked for, onto any mesh. Every array is saved with the sum of its
bits: storage may read a missing or damaged chunk as zeros or noise without a word, and nobody should train on that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.data.kept import sealed, unsealed
from mmjax.errors import UserError
from mmjax.models.layer_runs import into_runs, layers_one_by_one
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.training.checkpoint_commit import (
    Commit,
    Retention,
    begin_partial,
    partial_of,
    reason,
    reason_of,
    remove_leftovers,
    steps_in,
)
from mmjax.training.late_ends import drop_late_ends
from mmjax.training.optimizer import key_names
from mmjax.training.state import TrainState, all_parameters
from mmjax.training.step import Executor

FORMAT = "mmjax-1"
STATE, META = "state", "meta/metadata"  # in a checkpoint's folder: the arrays, and what it says of itself
Params = dict[str, Any]
Sums = dict[str, int]  # of every array's bits, by its name

# Orbax and its storage report every save as a warning or an info line; a person sees our own line instead.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class DataState:
    """Where the data is: the step number alone finds it again, the rest proves that the data is still the same."""

    step: int  # the next to run
    index: str  # fingerprint of the length index
    budget: dict[str, Any]
    planner: int = 1  # of the version of mmjax; checkpoints from before there was a number have the first
    segment: int = 0  # the step at which this data, mixture and batch were begun with


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself."""

    step: int
    config: str  # JSON
    data: DataState
    sums: Sums


class TornCheckpoint(UserError):
    """A checkpoint that is not whole, or not as it was saved. All processes find it together."""


class Checkpoints:
    """The checkpoints of one run, in the structure and shardings of its executor."""

    def __init__(self, folder: Path, executor: Executor, retention: Retention) -> None:
        self._folder, self._model, self._shardings = folder, executor.model, executor.shardings
        self.retention, self._saves = retention, 0
        self._commit: Commit | None = None
        self._abstract = _with_sharding(executor.abstract, executor.shardings)
        self._wanted = layers_one_by_one(self._abstract, _layer_of_struct)
        layouts = jax.tree.map(lambda x: x.sharding, self._wanted)
        self._single: Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]
        self._single = jax.jit(_single_with_sums, out_shardings=(layouts, executor.shardings.step))
        self._handler = _state_handler()
        processes.led(self._open)

    def _open(self) -> None:
        with _user_error(f"cannot open {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._folder)

    def prepare(self) -> None:
        """Compile what saving needs, so that nothing is compiled in mid-run."""
        self._single = self._single.lower(self._abstract).compile()

    def save(self, state: TrainState, config: str, data: DataState) -> None:
        """Start saving; training may go on at once. The checkpoint appears whole or not at all: `wait` tells."""
        self.wait()
        single, sums = self._single(state)
        meta = {"format": FORMAT, "config": config, "data": asdict(data), "sums": _as_ints(sums)}
        partial, futures = partial_of(self._folder, data.step), []

        def begin() -> None:  # what is saved is in the host's memory when this ends
            saving = self._handler.async_save(partial / STATE, args=ocp.args.PyTreeSave(single))
            futures.extend(asyncio.run_coroutine_threadsafe(saving, _loop()).result())

        def finish(partial: Path) -> None:
            self._handler.finalize(partial / STATE)
            (partial / META).parent.mkdir()
            (partial / META).write_text(json.dumps(sealed(meta)))

        refused = processes.led(lambda: reason_of(lambda: begin_partial(self._folder, data.step)))
        refused = refused or reason_of(begin)

        def write() -> None:
            failed = [refused, *(reason_of(future.result) for future in futures)]  # all: none may write any more
            if error := next(filter(None, failed), ""):
                raise OSError(error)

        self._saves += 1
        self._commit = Commit(self._folder, data.step, self._saves, write, finish, self.retention)

    def wait(self) -> str:
        """Why what was saved last is not whole, once it could be; empty where it is. The same on every process."""
        return self._commit.wait() if self._commit else ""

    @property
    def ended(self) -> Commit | None:
        """The save that was begun last, if nothing more will come of it."""
        return self._commit if self._commit and self._commit.ended else None

    def restore(self, step: int) -> tuple[TrainState, Saved]:
        """State `step`, in this run's shardings. Raises TornCheckpoint, where one process cannot read it on all."""
        found: list[Any] = []

        def read() -> None:
            # By the handler itself: around it Orbax's processes wait for each other, also for one that has failed.
            found.append(read_saved(self._folder, step))
            found.append(self._handler.restore(self._folder / str(step) / STATE, args=_restore_as(self._wanted)))

        error = next(filter(None, processes.gather(f"restored/{step}", reason_of(read))), "")
        if not error and (wrong := _not_as_saved(found[1], found[0].sums)) is not None:
            error = f"{wrong} is not what was saved"
        if error:
            raise TornCheckpoint(f"checkpoint {self._folder / str(step)} cannot be used: {error}", everywhere=True)
        saved, single = found
        return jax.device_put(into_runs(single, self._model.runs), self._shardings), saved

    def close(self) -> None:
        """Wait until the save that was started last has ended."""
        self.wait()


def checkpoint_step(folder: Path, step: int | None = None) -> int:
    """Return a checkpoint's step, by default the newest's. Raises UserError where there is no such checkpoint."""
    if not (steps := steps_in(folder)):
        raise UserError(f"{folder} holds no checkpoint yet; train further, or start afresh with --overwrite")
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {folder.parent} has checkpoints of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_saved(folder: Path, step: int) -> Saved:
    """What checkpoint `step` says of itself. Raises UserError where it is not one of mmjax's, or torn."""
    with _reading(folder, step):
        meta = json.loads((folder / str(step) / META).read_text())
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise UserError(f"it is not one of mmjax's ({FORMAT})")
        if "sum" in meta:  # checkpoints from before there was one have none
            meta = unsealed(meta)
        return Saved(step, meta["config"], DataState(**meta["data"]), meta["sums"])


def restore_parameters(folder: Path, step: int, model: Model, shardings: Params) -> Params:
    """The parameters alone of checkpoint `step`, in these shardings.

    What was frozen may be trainable now, and the reverse. Raises UserError where the checkpoint is torn, or a parameter
    is missing, too many or of another shape.
    """
    saved = read_saved(folder, step)
    place, handler = folder / str(step) / STATE, _state_handler()
    wanted = layers_one_by_one(_with_sharding(model.abstract, shardings), _layer_of_struct)
    with _reading(folder, step):
        tree = handler.metadata(place).tree
        parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
        _check_same(all_parameters(_state_of(parts)), wanted)
        held = {part: _as_stored(stored, wanted) for part, stored in parts.items()}
        single = handler.restore(place, args=_restore_as(held, partial=True))
        if (wrong := _not_as_saved(_state_of(single), saved.sums)) is not None:
            raise UserError(f"{wrong} is not what was saved")
    params = jax.tree.map(lambda x, w: x.astype(w.dtype), all_parameters(_state_of(single)), wanted)
    return jax.device_put(into_runs(params, model.runs), shardings)


class SavedParameters:
    """The parameters of checkpoint `step`, read a few at a time into the host's memory.

    By their names there: nested names, layers by their numbers. Raises UserError where the checkpoint is torn, or not
    of this model.
    """

    def __init__(self, folder: Path, step: int, model: Model) -> None:
        self._folder, self._step, self._saved = folder, step, read_saved(folder, step)
        mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("host",))
        here = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*(None,) * len(x.shape))), model.abstract)
        self._wanted = layers_one_by_one(_with_sharding(model.abstract, here), _layer_of_struct)
        with _reading(folder, step):
            tree = _state_handler().metadata(self._place).tree
            self._parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
            _check_same(all_parameters(_state_of(self._parts)), self._wanted)

    @property
    def _place(self) -> Path:
        return self._folder / str(self._step) / STATE

    @property
    def shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The shape of every parameter by its name."""
        return {key_names(path): x.shape for path, x in jax.tree.leaves_with_path(self._wanted)}

    def read(self, names: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], np.ndarray]:
        """Some parameters as they were saved: frozen ones may be in the precision of the computation."""
        chosen = {part: _only(stored, set(names)) for part, stored in self._parts.items()}
        held = {part: _as_stored(stored, self._wanted) for part, stored in chosen.items() if stored}
        if not held:
            return {}
        with _reading(self._folder, self._step):
            found = _state_handler().restore(self._place, args=_restore_as(held, partial=True))
            host = {part: jax.tree.map(np.asarray, found[part]) for part in held}
            for name, x in _named(_state_of({"trainable": {}, "frozen": {}} | host)).items():
                bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
                if self._saved.sums.get(name) != int(bits.sum(dtype=np.uint64)) % 2**32:
                    raise UserError(f"{name} is not what was saved")
        return {key_names(path): x for part in host.values() for path, x in jax.tree.leaves_with_path(part)}


def _only(tree: Any, names: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Any:
    """The branches of nested dicts that lead to these names."""
    if not isinstance(tree, dict):
        return tree
    inner = {k: _only(v, names, (*path, k)) for k, v in tree.items() if isinstance(v, dict) or (*path, k) in names}
    return {k: v for k, v in inner.items() if v != {}}


def _state_of(parts: dict[str, Params]) -> TrainState:
    return TrainState(None, parts["trainable"], parts["frozen"], None)


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    drop_late_ends()
    # By default Orbax slices replicated arrays on the devices to share out the writing: a hundred small programs,
    # compiled in mid-run.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _restore_as(structs: Any, partial: bool = False) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=structs, restore_args=ocp.checkpoint_utils.construct_restore_args(structs), partial_restore=partial
    )


def _as_stored(stored: Any, wanted: Any) -> Any:
    """`wanted`, cut down to the paths of `stored` and in its precision."""
    if not isinstance(stored, dict):
        return jax.ShapeDtypeStruct(wanted.shape, stored.dtype, sharding=wanted.sharding)
    return {key: _as_stored(value, wanted[key]) for key, value in stored.items()}


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(tree)}


def _check_same(stored: Params, wanted: Params) -> None:
    have, need = _named(stored), _named(wanted)
    for name, x in need.items():
        if name not in have:
            raise UserError(f"it is of another model: it has no parameter {name}, which this model needs")
        if tuple(have[name].shape) != tuple(x.shape):
            shapes = f"{name} has shape {tuple(have[name].shape)}, this model needs {tuple(x.shape)}"
            raise UserError(f"it is of another model: {shapes}")
    if extra := sorted(set(have) - set(need)):
        raise UserError(f"it is of another model: it has parameter {extra[0]}, which this model lacks")


def _bit_sums(tree: Any) -> dict[str, jax.Array]:
    """The sum of every array's bits modulo 2^32, by name: exact, so the same in any layout."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = lambda x: jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])  # noqa: E731
    return {name: jnp.sum(bits(x), dtype=jnp.uint32) for name, x in _named(tree).items()}


def _single_with_sums(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
    single = layers_one_by_one(state)
    return single, _bit_sums(single)


def _as_ints(sums: dict[str, jax.Array]) -> Sums:
    return {name: int(x) for name, x in jax.device_get(sums).items()}


def _not_as_saved(tree: Any, saved: Sums) -> str | None:
    """The first array that is not what was saved."""
    return next((name for name, found in _as_ints(jax.jit(_bit_sums)(tree)).items() if saved.get(name) != found), None)


def _with_sharding(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def _layer_of_struct(leaf: jax.ShapeDtypeStruct, layer: int) -> jax.ShapeDtypeStruct:
    del layer  # a stack's layers lie alike
    layout = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=layout)


@contextmanager
def _user_error(message: str) -> Iterator[None]:
    """Turn whatever the body raises into one line."""
    try:
        yield
    except Exception as error:  # Orbax and its storage raise dozens of kinds for one broken file
        raise UserError(f"{message}: {reason(error)}") from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Where saves are begun, in a thread of its own: a notebook's main thread has one already.

    It is never closed: when one write of many fails, the others still tell it how they end.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    """Turn whatever reading a checkpoint raises into one line that says what is left to do."""
    try:
        with _user_error(f"checkpoint {folder / str(step)} cannot be used"):
            yield
    except UserError as error:
        older = [s for s in steps_in(folder) if s < step]
        remedy = f"to use step {older[-1]} instead, remove it" if older else "there is no older one here"
        raise UserError(f"{error}; {remedy}") from error.__cause__
