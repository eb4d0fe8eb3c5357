"""Checkpoints: state, config and data position in one atomic, asynchronous save; layers are named one by one.

The only file that knows Orbax. Because layers are stored singly, a checkpoint restores under any run borders and,
because arrays are read straight into the shardings asked for, onto any mesh. Every array is saved with the sum of its
bits: storage may read a missing or damaged chunk as zeros or noise without a word, and nobody should train on that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.errors import UserError
from mmjax.models.layer_runs import into_runs, layers_one_by_one
from mmjax.models.model import Model
from mmjax.training.optimizer import key_names
from mmjax.training.state import TrainState, all_parameters
from mmjax.training.step import Executor

FORMAT = "mmjax-1"
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


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself."""

    step: int
    config: str  # JSON
    data: DataState
    sums: Sums


class Checkpoints:
    """The checkpoints of one run, in the structure and shardings of its executor; the newest `keep` stay."""

    def __init__(self, folder: Path, executor: Executor, keep: int) -> None:
        self._folder, self._model, self._shardings = folder, executor.model, executor.shardings
        self._abstract = _with_sharding(executor.abstract, executor.shardings)
        self._wanted = layers_one_by_one(self._abstract, _layer_of_struct)
        layouts = jax.tree.map(lambda x: x.sharding, self._wanted)
        self._single: Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]
        self._single = jax.jit(_single_with_sums, out_shardings=(layouts, executor.shardings.step))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handlers = {"state": _state_handler(), "meta": ocp.JsonCheckpointHandler()}
        with _user_error(f"cannot open {folder}"):
            self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def prepare(self) -> None:
        """Compile what saving needs, so that nothing is compiled in mid-run."""
        self._single = self._single.lower(self._abstract).compile()

    def save(self, state: TrainState, config: str, data: DataState) -> None:
        """Start saving; training may go on at once. The checkpoint appears whole or not at all."""
        single, sums = self._single(state)
        meta = {"format": FORMAT, "config": config, "data": asdict(data), "sums": _as_ints(sums)}
        with _user_error(f"cannot save step {data.step} in {self._folder}"):
            items = ocp.args.Composite(state=ocp.args.PyTreeSave(single), meta=ocp.args.JsonSave(meta))
            self._manager.save(data.step, args=items)

    def restore(self, step: int) -> tuple[TrainState, Saved]:
        """State `step`, in this run's shardings. Raises UserError where the checkpoint is torn or of another model."""
        saved = read_saved(self._folder, step)
        with _reading(self._folder, step):
            items = ocp.args.Composite(state=_restore_as(self._wanted))
            single = self._manager.restore(step, args=items).state
            _check_sums(single, saved.sums)
        return jax.device_put(into_runs(single, self._model.runs), self._shardings), saved

    def close(self) -> None:
        """Wait until every save that was started is whole on disk, and let go."""
        with _user_error(f"cannot save in {self._folder}"):
            self._manager.close()


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints under `folder`, ascending. One that is being written has another kind of name."""
    return sorted(int(p.name) for p in folder.glob("*") if p.is_dir() and p.name.isdecimal())


def newest(folder: Path) -> int:
    """The newest checkpoint's step. Raises UserError where there is none."""
    if not (steps := steps_in(folder)):
        raise UserError(f"{folder} holds no checkpoint yet; train further, or start afresh with --overwrite")
    return steps[-1]


def read_saved(folder: Path, step: int) -> Saved:
    """What checkpoint `step` says of itself. Raises UserError where it is not one of mmjax's, or torn."""
    with _reading(folder, step), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = checkpointer.restore(folder / str(step), args=items).meta
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise UserError(f"it is not one of mmjax's ({FORMAT})")
        return Saved(step, meta["config"], DataState(**meta["data"]), meta["sums"])


def restore_parameters(folder: Path, step: int, model: Model, shardings: Params) -> Params:
    """The parameters alone of checkpoint `step`, in these shardings.

    What was frozen may be trainable now, and the reverse. Raises UserError where the checkpoint is torn, or a parameter
    is missing, too many or of another shape.
    """
    saved = read_saved(folder, step)
    place = folder / str(step) / "state"
    wanted = layers_one_by_one(_with_sharding(model.abstract, shardings), _layer_of_struct)
    with _reading(folder, step), ocp.Checkpointer(_state_handler()) as checkpointer:
        tree = checkpointer.metadata(place).item_metadata.tree
        parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
        _check_same(all_parameters(_state_of(parts)), wanted)
        held = {part: _as_stored(stored, wanted) for part, stored in parts.items()}
        single = checkpointer.restore(place, args=_restore_as(held, partial=True))
        _check_sums(_state_of(single), saved.sums)
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
        with _reading(folder, step), ocp.Checkpointer(_state_handler()) as checkpointer:
            tree = checkpointer.metadata(self._place).item_metadata.tree
            self._parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
            _check_same(all_parameters(_state_of(self._parts)), self._wanted)

    @property
    def _place(self) -> Path:
        return self._folder / str(self._step) / "state"

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
        with _reading(self._folder, self._step), ocp.Checkpointer(_state_handler()) as checkpointer:
            found = checkpointer.restore(self._place, args=_restore_as(held, partial=True))
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


def _check_sums(tree: Any, saved: Sums) -> None:
    for name, found in _as_ints(jax.jit(_bit_sums)(tree)).items():
        if saved.get(name) != found:
            raise UserError(f"{name} is not what was saved")


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
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        lines = str(root).strip().splitlines() or [type(root).__name__]
        raise UserError(f"{message}: {lines[0][:200]}") from error


@contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    """Turn whatever reading a checkpoint raises into one line that says what is left to do."""
    # When one array cannot be read, the others' reads end later, in threads, and each prints a traceback about an event
    # loop that is gone. So after a failure these stay mute.
    heard, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    asyncio_log = logging.getLogger("asyncio")
    level = asyncio_log.level
    asyncio_log.setLevel(logging.CRITICAL)
    try:
        with _user_error(f"checkpoint {folder / str(step)} cannot be used"):
            yield
        sys.unraisablehook = heard
        asyncio_log.setLevel(level)
    except UserError as error:
        older = [s for s in steps_in(folder) if s < step]
        remedy = f"to go on from step {older[-1]} instead, remove it" if older else "there is no older one here"
        raise UserError(f"{error}; {remedy}") from error.__cause__
