"""Load weights of Hugging Face checkpoints straight into the mesh's shards, with the layers of a tower stacked.

Every process reads what its own devices store, once, one array after the other: a process needs little more memory than
its devices' share.
"""

from __future__ import annotations

import math
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
from mmjax.models.model import Model, module_of, parameter_group

Params = dict[str, Any]
Index = tuple[slice, ...]

CHUNK = 2**24  # bytes of a matrix that are read, and transposed, at a time


def modules_by_folder(config: ModelConfig) -> dict[Path, list[str]]:
    """Return the modules that are loaded from each folder; randomly initialised modules are in none."""
    named = {"llm": config.llm.weights}
    for name, encoder in config.encoders.items():
        named |= {name: encoder.weights, f"{name}.connector": encoder.connector.weights}
    modules: dict[Path, list[str]] = defaultdict(list)
    for module, folder in named.items():
        if folder:
            modules[Path(folder)].append(module)
    return dict(modules)


def load_pretrained(model: Model, shardings: Params) -> Params:
    """Load the parameters of all modules that have a folder, as nested dicts, into these shardings.

    Frozen modules are in the model's precision, others in float32. Raises UserError naming tensors that are missing,
    unexpected or of another shape.
    """
    loaded: Params = {}
    for path, modules in modules_by_folder(model.config).items():
        folder = HfFolder.open(path)
        layout = layout_of(folder, model.config)
        sources = _sources(model, folder, {module: layout.modules[module] for module in modules})
        read = {part.key for layers in sources.values() for part, _ in layers}
        if strangers := layout.strangers(folder, read, modules):
            raise UserError(
                f"{path} has {len(strangers)} tensors that this model lacks, such as {strangers[0]}: its config.json "
                "does not describe its weights"
            )
        for names, layers in sources.items():
            dtype = jnp.dtype(model.dtype if module_of(names) in model.frozen else jnp.float32)
            leaf = _get(model.abstract, names)
            parent = loaded
            for name in names[:-1]:
                parent = parent.setdefault(name, {})
            parent[names[-1]] = _load(folder, layers, leaf.shape, dtype, _get(shardings, names))
    return loaded


# The part of a checkpoint and our shape, of each layer of a stack; a single one for a parameter that is not stacked.
Layers = list[tuple[Part, tuple[int, ...]]]


def _sources(model: Model, folder: HfFolder, modules: Mapping[str, Parts]) -> dict[tuple[str, ...], Layers]:
    """Find every parameter of these modules in the folder. Raises UserError for one that is missing."""
    sources = {}
    for path, leaf in jax.tree.leaves_with_path(model.abstract):
        names = tuple(key.key for key in path)
        if (module := parameter_group(names)) not in modules:
            continue  # from another folder, or an adapter
        inside = names[1:] if names[0] == "llm" else names[2:]
        paths = [inside]
        shape = leaf.shape
        # ("layers", "runs", "4:8", ..) is a stack of layers 4 to 7; ("layers", "runs", "4", ..) is layer 4 alone.
        if inside[:2] == ("layers", "runs"):
            start, _, stop = inside[2].partition(":")
            paths = [("layers", str(i), *inside[3:]) for i in range(int(start), int(stop or int(start) + 1))]
            shape = leaf.shape[1:] if stop else leaf.shape
        layers = []
        for path in paths:
            if (part := modules[module].find(path)) is None:
                raise UserError(f"{folder.path}: nothing there is {'.'.join(path)} of {module}")
            check_fits(folder, part, shape)
            layers.append((part, shape))
        sources[names] = layers
    return sources


def check_fits(folder: HfFolder, part: Part, shape: tuple[int, ...]) -> None:
    """Raise UserError where a tensor is missing, or its shape does not give our parameter's."""
    have = folder.stored(part.key).shape
    rows = have[:1] if part.rows is None else (part.rows[1] - part.rows[0],)
    selected = (*rows, *have[1:])
    fits = selected == shape if part.order is None else len(part.order) == len(selected)
    if fits and part.order is not None:
        permuted = tuple(selected[axis] for axis in part.order)
        # With another number of axes, such as a convolution's kernel as a matrix, only the size can be compared.
        fits = permuted == shape if len(permuted) == len(shape) else math.prod(permuted) == math.prod(shape)
    if not fits or (part.rows is not None and part.rows[1] > have[0]):
        raise UserError(
            f"{folder.path}: {part.key} has shape {list(have)}, this model's {list(shape)} does not go with it"
        )


def _load(
    folder: HfFolder, layers: Layers, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> jax.Array:
    """Load one array. Each of this process's shards is read once, however many of its devices store it."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))].append(device)
    arrays = []
    for bounds, replicas in devices.items():
        index = tuple(slice(*pair) for pair in bounds)
        shard = np.empty([stop - start for start, stop in bounds], dtype)
        if len(shape) == len(layers[0][1]):
            _read_into(shard, folder, *layers[0], index)
        else:  # a stack, whose first axis counts layers
            for row, (part, layer_shape) in enumerate(layers[index[0]]):
                _read_into(shard[row, ...], folder, part, layer_shape, index[1:])
        arrays += [jax.device_put(shard, device) for device in replicas]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_into(out: np.ndarray, folder: HfFolder, part: Part, shape: tuple[int, ...], index: Index) -> None:
    """Write the part of our parameter that `index` selects into `out`, reading only the rows that it needs."""
    stored = folder.stored(part.key)
    first = 0 if part.rows is None else part.rows[0]
    if part.order is not None and part.order != TRANSPOSED:
        # Convolutions: small enough to be read whole.
        rows = slice(None) if part.rows is None else slice(*part.rows)
        out[...] = part.ours(folder.read(part.key, rows), shape)[index]
        return
    if not shape:
        out[...] = folder.read(part.key)
        return
    # The file stores rows: axis 0 of our parameter, or axis 1 where it is transposed.
    transposed = part.order == TRANSPOSED
    along = index[1] if transposed else index[0]
    across = index[0] if transposed else index[1:]
    row_bytes = max(1, math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize)
    step = max(1, CHUNK // row_bytes)
    for begin in range(along.start, along.stop, step):
        end = min(begin + step, along.stop)
        chunk = folder.read(part.key, slice(first + begin, first + end))
        target = slice(begin - along.start, end - along.start)
        if transposed:
            out[:, target] = chunk[:, across].T
        else:
            out[target] = chunk[(slice(None), *across)]


def _get(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree
