"""Checkpoints: state, config and data position in one atomic, asynchronous save; layers are named one by one.

The only file that knows Orbax. Because layers are stored singly, a checkpoint restores under any run borders and, because
arrays are read straight into the shardings asked for, onto any mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from mmjax.errors import UserError
from mmjax.models.layer_runs import into_runs, layers_one_by_one
from mmjax.models.model import Model
from mmjax.training.state import TrainState, all_parameters
from mmjax.training.step import Executor

FORMAT = "mmjax-1"
Params = dict[str, Any]

# Orbax and its storage report every save as a warning or an info line; a person sees our own line instead.
logging.getLogger("absl").setLevel(logging.ERROR)


@dataclass(frozen=True)
class DataState:
    """Where the data is: the step number alone finds it again, the rest proves that the data is still the same."""

    step: int  # the next to run
    index: str  # fingerprint of the length index
    budget: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself."""

    step: int
    config: str  # JSON
    data: DataState


class Checkpoints:
    """The checkpoints of one run, in the structure and shardings of its executor; the newest `keep` stay."""

    def __init__(self, folder: Path, executor: Executor, keep: int) -> None:
        self._folder, self._model = folder, executor.model
        self._shardings, self._abstract = executor.shardings, executor.abstract
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = _or_user_error(lambda: ocp.CheckpointManager(folder, options=options), f"cannot open {folder}")
        self._single = jax.jit(layers_one_by_one)

    def prepare(self) -> None:
        """Compile what saving needs, so that nothing is compiled in mid-run."""
        self._single = self._single.lower(_with_sharding(self._abstract, self._shardings)).compile()

    def latest(self) -> int | None:
        """The newest whole checkpoint's step, if there is one."""
        return self._manager.latest_step()

    def save(self, state: TrainState, config: str, data: DataState) -> None:
        """Start saving; training may go on at once. The checkpoint appears whole or not at all."""
        meta = {"format": FORMAT, "config": config, "data": asdict(data)}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(self._single(state)), meta=ocp.args.JsonSave(meta))
        if data.step != self.latest():
            self._manager.save(data.step, args=arguments)

    def restore(self, step: int) -> tuple[TrainState, Saved]:
        """State `step`, in this run's shardings. Raises UserError where the checkpoint is torn or of another model."""
        saved = read_saved(self._folder, step)
        wanted = layers_one_by_one(_with_sharding(self._abstract, self._shardings), _layer_of_struct)
        place = self._folder / str(step)
        restore = lambda: self._manager.restore(  # noqa: E731
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        )
        single = _or_user_error(restore, f"checkpoint {place} cannot be read; remove it to resume from the one before")
        return jax.device_put(into_runs(single.state, self._model.runs), self._shardings), saved

    def wait(self) -> None:
        """Until every save that was started is whole on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish saving and let go."""
        self._manager.close()


def newest(folder: Path) -> int:
    """The newest checkpoint's step. Raises UserError where there is none."""
    steps = sorted(int(p.name) for p in folder.glob("*") if p.is_dir() and p.name.isdigit())
    if not steps:
        raise UserError(f"{folder} holds no checkpoint; train further, or start afresh with --overwrite")
    return steps[-1]


def read_saved(folder: Path, step: int) -> Saved:
    """What checkpoint `step` says of itself. Raises UserError where it is not one of mmjax's, or torn."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = lambda: checkpointer.restore(  # noqa: E731
            folder / str(step), args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        )
        meta = _or_user_error(read, f"checkpoint {folder / str(step)} is torn or not one of mmjax's").meta
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder / str(step)} is not one of mmjax's ({FORMAT})")
    return Saved(step, meta["config"], DataState(**meta["data"]))


def restore_parameters(folder: Path, model: Model, shardings: Params) -> Params:
    """The newest checkpoint's parameters alone (trainable and frozen then may be frozen or trainable now), in these shardings.

    Raises UserError where a parameter is missing or has another shape.
    """
    step = newest(folder)
    read_saved(folder, step)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        place = folder / str(step)
        wrong = f"checkpoint {place} cannot be read; remove it to use the one before"
        tree = _or_user_error(lambda: checkpointer.item_metadata(place), wrong)["state"]
        stored = all_parameters(TrainState(None, tree["trainable"], tree["frozen"], None))
        wanted = layers_one_by_one(_with_sharding(model.abstract, shardings), _layer_of_struct)
        _check_same(stored, wanted, place)
        held = {part: _keep_structure(tree[part], wanted) for part in ("trainable", "frozen")}
        arguments = ocp.args.PyTreeRestore(
            item=held, restore_args=ocp.checkpoint_utils.construct_restore_args(held), partial_restore=True
        )
        read = _or_user_error(lambda: checkpointer.restore(place, args=ocp.args.Composite(state=arguments)), wrong).state
    single = all_parameters(TrainState(None, read["trainable"], read["frozen"], None))
    return jax.device_put(into_runs(single, model.runs), shardings)


def _keep_structure(part: Any, wanted: Any) -> Any:
    """`wanted`, cut down to the paths of `part`."""
    if not isinstance(part, dict):
        return wanted
    return {key: _keep_structure(value, wanted[key]) for key, value in part.items()}


def _check_same(stored: Params, wanted: Params, place: Path) -> None:
    have = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(stored)}
    need = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(wanted)}
    for name, x in need.items():
        if name not in have:
            raise UserError(f"{place} has no parameter {name}, which this model needs; it is a checkpoint of another model")
        if tuple(have[name].shape) != tuple(x.shape):
            raise UserError(f"{place}: {name} has shape {tuple(have[name].shape)}, this model needs {tuple(x.shape)}")
    if extra := sorted(set(have) - set(need)):
        raise UserError(f"{place} has parameter {extra[0]}, which this model lacks; it is a checkpoint of another model")


def _with_sharding(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def _layer_of_struct(leaf: jax.ShapeDtypeStruct, layer: int) -> jax.ShapeDtypeStruct:
    del layer
    sharding = leaf.sharding
    if not isinstance(sharding, SingleDeviceSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _or_user_error(action: Callable[[], Any], message: str) -> Any:
    try:
        return action()
    except UserError:
        raise
    except Exception as error:  # Orbax and its storage raise dozens of kinds for one broken file
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{message} ({first_line[:200]})") from error
