"""Read a checkpoint's parameters without the rest of its state: into shardings, or a few at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.errors import UserError
from mmjax.models.layer_stacks import Params, key_names, stack_layers, unstack_layers
from mmjax.models.model import Model
from mmjax.runtime.array_storage import ArrayStorage, put_tree
from mmjax.runtime.bit_sums import find_damaged, leaves_by_name
from mmjax.runtime.checkpoint import layer_of_struct
from mmjax.runtime.checkpoint_metadata import STATE, read_metadata, reading
from mmjax.runtime.state import TrainState, all_parameters

OPTIMIZER, AVERAGE = "optimizer", "average"  # fields of `TrainState` and `AveragedState`


def restore_parameters(
    folder: Path, step: int, model: Model, shardings: Params, evaluated: str = "trained"
) -> Params:
    """Restore only the parameters of checkpoint `step`, into these shardings.

    evaluated: `average` for the moving average of those that were trained. What was frozen may be
    trainable now, and the reverse. Raises UserError where the checkpoint is damaged, or a parameter
    is missing, unexpected or of another shape.
    """
    saved = SavedParameters(folder, step, model, shardings, evaluated)
    params = all_parameters(saved.read_state(saved.parts))
    # Checksums are of the stored precision, so the cast comes after them.
    params = jax.tree.map(lambda x, w: x.astype(w.dtype), params, saved.structs)
    return put_tree(stack_layers(params, model.runs), shardings)


class SavedParameters:
    """The parameters of checkpoint `step`, read a few at a time, by default into the host's memory.

    They are named by their path in nested dicts, layers by number. Raises UserError where the
    checkpoint is damaged, or not of this model.

    Attributes:
        structs: shape and dtype of every parameter of the model, in nested dicts.
        parts: what is stored of each parameter, by `trainable` and `frozen`.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        model: Model,
        shardings: Params | None = None,
        evaluated: str = "trained",
    ) -> None:
        self._folder = folder
        self._step = step
        self._path = folder / str(step) / STATE
        self._sums = read_metadata(folder, step).sums
        self._storage = ArrayStorage()
        if shardings is None:
            mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("host",))
            shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.abstract)
        structs = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            model.abstract,
            shardings,
        )
        self.structs = unstack_layers(structs, layer_of_struct)
        self._averaged = evaluated == "average"
        with reading(folder, step):
            stored = self._storage.structure(self._path)
            if self._averaged:
                stored = _with_average(stored)
            self.parts = _parameter_tree(stored, self.structs)

    def read(self, names: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], np.ndarray]:
        """Read these parameters as they were saved: frozen ones may be in the precision of the computation."""
        state = self.read_state({part: _select(x, set(names)) for part, x in self.parts.items()})
        return {
            key_names(path): x
            for part in (state.trainable, state.frozen)
            for path, x in jax.tree.leaves_with_path(part)
        }

    def read_state(self, parts: dict[str, Params]) -> TrainState:
        """Read what some of `parts` name, and compare it with its checksums."""
        stored = {part: _as_stored(tree, self.structs) for part, tree in parts.items() if tree}
        if not stored:
            return _state_of({})
        if self._averaged and "trainable" in stored:
            stored[OPTIMIZER] = {AVERAGE: stored.pop("trainable")}
        with reading(self._folder, self._step):
            found = self._storage.read(self._path, stored, partial=True)
            if (damaged := find_damaged(found, self._sums)) is not None:
                raise UserError(f"{damaged} is not what was saved")
        return _state_of(_with_average(found) if OPTIMIZER in found else found)


def _with_average(state: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state with the moving average in the place of the parameters that were trained."""
    average = (state.get(OPTIMIZER) or {}).get(AVERAGE)
    if average is None:
        raise UserError(
            "it has no moving average; its run has none (optimizer.ema): use training.evaluated=trained"
        )
    return state | {"trainable": average}


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


def _parameter_tree(tree: Any, target: Params) -> dict[str, Params]:
    """Return the parameters of a stored state. Raises UserError where they are of another model."""
    parts = {part: tree.get(part) or {} for part in ("trainable", "frozen")}
    stored = leaves_by_name(all_parameters(_state_of(parts)))
    expected = leaves_by_name(target)
    for name, x in expected.items():
        if name not in stored:
            raise UserError(
                f"it is of another model: it has no parameter {name}, which this model needs"
            )
        shape = tuple(stored[name].shape)
        if shape != x.shape:
            raise UserError(
                f"it is of another model: {name} has shape {shape}, this model needs {x.shape}"
            )
    if extra := sorted(set(stored) - set(expected)):
        raise UserError(
            f"it is of another model: it has parameter {extra[0]}, which this model lacks"
        )
    return parts


def _state_of(parts: dict[str, Params]) -> TrainState:
    return TrainState(None, parts.get("trainable", {}), parts.get("frozen", {}), None)


def _as_stored(stored: Any, target: Any) -> Any:
    """Reduce `target` to the paths of `stored`, in the stored precision."""
    if not isinstance(stored, dict):
        return jax.ShapeDtypeStruct(target.shape, stored.dtype, sharding=target.sharding)
    return {key: _as_stored(value, target[key]) for key, value in stored.items()}
