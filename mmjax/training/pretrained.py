"""Weights of Hugging Face checkpoints, read straight into the mesh's shards and the layers' runs.

Every process reads what its own devices hold, once, one array after the other: a process needs little more memory than
its devices' share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mmjax.config import ModelConfig
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import DTYPES, HfFolder
from mmjax.hf.parts import TRANSPOSED, Part, Parts
from mmjax.models.model import Model, group_of, module_of

Params = dict[str, Any]
Index = tuple[slice, ...]

PIECE = 2**24  # bytes of a matrix that are turned at a time


def by_folder(config: ModelConfig) -> dict[Path, list[str]]:
    """The modules that take their weights from each folder; those that are born at random are in none."""
    named = {"llm": config.llm.weights}
    for name, encoder in config.encoders.items():
        named |= {name: encoder.weights, f"{name}.connector": encoder.connector.weights}
    found: dict[Path, list[str]] = defaultdict(list)
    for module, folder in named.items():
        if folder:
            found[Path(folder)].append(module)
    return dict(found)


def load_pretrained(model: Model, shardings: Params) -> Params:
    """The parameters of all modules that have a folder, as parts of nested dicts, in these shardings.

    Frozen modules in the model's precision, others in float32. Raises UserError for tensors that are missing, too many
    or of another shape, naming them.
    """
    loaded: Params = {}
    for path, modules in by_folder(model.config).items():
        folder = HfFolder.open(path)
        layout = layout_of(folder, model.config)
        wanted = _wanted(model, folder, {module: layout.modules[module] for module in modules})
        read = {part.key for layers in wanted.values() for part, _ in layers}
        if strangers := layout.strangers(folder, read, modules):
            raise UserError(
                f"{path} has {len(strangers)} tensors that this model lacks, such as {strangers[0]}: its config.json "
                "does not describe its weights"
            )
        for names, layers in wanted.items():
            leaf, sharding = _at(model.abstract, names), _at(shardings, names)
            dtype = model.dtype if module_of(names) in model.frozen else jnp.float32
            _put(loaded, names, _loaded(folder, layers, leaf.shape, jnp.dtype(dtype), sharding))
    return loaded


Layers = list[tuple[Part, tuple[int, ...]]]  # the part and our shape of each layer of a stack; of one that is no stack


def _wanted(model: Model, folder: HfFolder, modules: Mapping[str, Parts]) -> dict[tuple[str, ...], Layers]:
    """Where every parameter of these modules lies. Raises UserError for one that lies nowhere."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(model.abstract):
        names = tuple(key.key for key in path)
        if (module := group_of(names)) not in modules:
            continue  # of another folder, or an adapter
        inside = names[1:] if names[0] == "llm" else names[2:]
        if inside[:2] == ("layers", "runs"):
            start, _, stop = inside[2].partition(":")
            paths = [("layers", str(i), *inside[3:]) for i in range(int(start), int(stop or int(start) + 1))]
            shape = leaf.shape[1:] if stop else leaf.shape
        else:
            paths, shape = [inside], leaf.shape
        layers = []
        for path in paths:
            if (part := modules[module].find(path)) is None:
                raise UserError(f"{folder.path}: nothing there is {'.'.join(path)} of {module}")
            check_fits(folder, part, shape)
            layers.append((part, shape))
        found[names] = layers
    return found


def check_fits(folder: HfFolder, part: Part, shape: tuple[int, ...]) -> None:
    """Raises UserError where a tensor is missing, or is not of the shape that our parameter's comes from."""
    have = folder.stored(part.key).shape
    rows = have[:1] if part.rows is None else (part.rows[1] - part.rows[0],)
    own = (*rows, *have[1:])
    fits = own == shape if part.order is None else len(part.order) == len(own)
    if fits and part.order is not None:
        turned = [own[axis] for axis in part.order]
        fits = tuple(turned) == shape if len(turned) == len(shape) else int(np.prod(turned)) == int(np.prod(shape))
    if not fits or (part.rows is not None and part.rows[1] > have[0]):
        raise UserError(
            f"{folder.path}: {part.key} has shape {list(have)}, this model's {list(shape)} does not go with it"
        )


def _loaded(
    folder: HfFolder, layers: Layers, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> jax.Array:
    """One array, each of this process's shards read once, whichever of its devices hold it."""
    devices: dict[tuple, list[jax.Device]] = defaultdict(list)
    indices = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        devices[key].append(device)
        indices[key] = tuple(slice(*bounds) for bounds in key)
    arrays = []
    for key, held_by in devices.items():
        shard = _shard(folder, layers, len(shape) > len(layers[0][1]), indices[key], dtype)
        arrays += [jax.device_put(shard, device) for device in held_by]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _shard(folder: HfFolder, layers: Layers, stacked: bool, index: Index, dtype: np.dtype) -> np.ndarray:
    out = np.empty([s.stop - s.start for s in index], dtype)
    if not stacked:
        _read_into(out, folder, *layers[0], index)
        return out
    for row, (part, shape) in enumerate(layers[index[0]]):
        _read_into(out[row, ...], folder, part, shape, index[1:])
    return out


def _read_into(out: np.ndarray, folder: HfFolder, part: Part, shape: tuple[int, ...], index: Index) -> None:
    """Write what `index` cuts out of our parameter into `out`, reading only rows that it needs."""
    stored = folder.stored(part.key)
    first = 0 if part.rows is None else part.rows[0]
    if part.order is not None and part.order != TRANSPOSED:
        # Convolutions, which are small.
        rows = slice(None) if part.rows is None else slice(*part.rows)
        out[...] = part.ours(folder.read(part.key, rows), shape)[index]
        return
    if not shape:
        out[...] = folder.read(part.key)
        return
    turned = part.order == TRANSPOSED
    along, across = (index[1], index[0]) if turned else (index[0], index[1:])
    row_bytes = max(1, int(np.prod(stored.shape[1:])) * DTYPES[stored.dtype].itemsize)
    step = max(1, PIECE // row_bytes)
    for begin in range(along.start, along.stop, step):
        end = min(begin + step, along.stop)
        piece = folder.read(part.key, slice(first + begin, first + end))
        at = slice(begin - along.start, end - along.start)
        if turned:
            out[:, at] = piece[:, across].T
        else:
            out[at] = piece[(slice(None), *across)]


def _at(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


def _put(tree: Params, names: tuple[str, ...], leaf: jax.Array) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = leaf
