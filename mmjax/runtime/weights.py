"""Load pretrained weights into sharded parameters, and write them back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mmjax.config import ModelConfig
from mmjax.config.model import stacked_towers, step_vaes, tower_key
from mmjax.config.towers import Quantization
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import DTYPES, HfFolder, split_entry
from mmjax.hf.layout import TRANSPOSED, TensorNames, TensorSlice
from mmjax.hf.vae import open_vae, read_vae
from mmjax.models.layer_stacks import Params, named_layers
from mmjax.models.model import Model, module_of, parameter_group
from mmjax.models.quantization import Quantized, parameter_shapes, quantize

Index = tuple[slice, ...]
# The part of a checkpoint and our shape, of each layer of a stack, and of each expert; else a
# single one.
Layers = list[tuple[TensorSlice, tuple[int, ...]]]

CHUNK = 2**24  # bytes of a matrix that are read, and transposed, at a time


def modules_by_folder(config: ModelConfig) -> dict[Path, list[str]]:
    """Return the modules that are loaded from each folder; randomly initialised modules are in none."""
    named = {"llm": config.llm.weights}
    for name, encoder in config.item_modules.items():
        named |= {name: encoder.weights, f"{name}.connector": encoder.connector.weights}
    modules: dict[Path, list[str]] = defaultdict(list)
    for module, folder in named.items():
        if folder:
            modules[Path(folder)].append(module)
    return dict(modules)


@dataclass(frozen=True)
class FolderSources:
    """Locations of the parameters of a folder's modules, and tensors that are missing, of another shape, or of nobody.

    parameters: the layers of each parameter, a quantised one's by the path of both of its parts.
    problems: one line each.
    """

    folder: HfFolder
    parameters: Mapping[tuple[str, ...], Layers]
    problems: Sequence[str]


def folder_sources(model: Model) -> Iterator[FolderSources]:
    """Yield each folder that modules are loaded from, without reading a weight. Raises UserError where one is none."""
    folders = [
        (HfFolder.open(path), names) for path, names in modules_by_folder(model.config).items()
    ]
    folders += [
        (_vae_folder(model.config, name), [f"{name}.vae"]) for name in step_vaes(model.config)
    ]
    for folder, modules in folders:
        layout = layout_of(folder, model.config)
        named = {module: layout.modules[module] for module in modules}
        parameters = _locate_parameters(model, folder, named)
        problems = []
        for part, shape in chain.from_iterable(parameters.values()):
            try:
                check_fits(folder, part, shape)
            except UserError as error:
                problems.append(str(error))
        read = {split_entry(part.key)[0] for layers in parameters.values() for part, _ in layers}
        if unexpected := layout.unexpected_tensors(folder, read, modules):
            problems.append(
                f"{folder.path} has {len(unexpected)} tensors that this model lacks, such as {unexpected[0]}: its "
                "config.json does not describe its weights"
            )
        yield FolderSources(folder, parameters, tuple(dict.fromkeys(problems)))


def load_pretrained(model: Model, shardings: Params) -> Params:
    """Load the parameters of all modules that have a folder, as nested dicts, into these shardings.

    Frozen modules are in the model's precision or quantised, others in float32. Raises UserError
    naming a tensor that is missing, unexpected or of another shape.
    """
    loaded: Params = {}
    for sources in folder_sources(model):
        if sources.problems:
            raise UserError(sources.problems[0])
        folder = sources.folder
        for names, layers in sources.parameters.items():
            like = leaf_at(model.abstract, names)
            layout = leaf_at(shardings, names)
            parent = loaded
            for name in names[:-1]:
                parent = parent.setdefault(name, {})
            if isinstance(like, dict):
                how = stacked_towers(model.config)[module_of(names)].quantize
                parent[names[-1]] = _load_quantized(folder, layers, how, like, layout)
                continue
            dtype = jnp.dtype(model.dtype if module_of(names) in model.frozen else jnp.float32)
            parent[names[-1]] = _load(folder, layers, like.shape, dtype, layout)
    return loaded


def _vae_folder(config: ModelConfig, name: str) -> HfFolder:
    """Open the folder of a generator's VAE. Raises UserError where there is none, or another VAE than the config's."""
    latents = config.towers[name].latents
    folder = open_vae(latents.weights)
    if (stored := read_vae(folder)) != latents.vae:
        raise UserError(
            f"{tower_key(config, name)}.latents.vae is another VAE than that of {folder.path}, which is {stored}; use "
            "what mmjax.hf.vae.vae_latents reads of it"
        )
    return folder


def _locate_parameters(
    model: Model, folder: HfFolder, modules: Mapping[str, TensorNames]
) -> dict[tuple[str, ...], Layers]:
    """Locate every parameter of these modules in the folder. Raises UserError for one that has no place there."""
    sources = {}
    for names, full_shape in parameter_shapes(model.abstract).items():
        if (module := parameter_group(names)) not in modules:
            continue  # from another folder, or an adapter
        inside = name_inside(names)
        paths = [inside]
        shape = full_shape
        # ("layers", "runs", "4:8", ..) is a stack of layers 4 to 7; ("layers", "runs", "4", ..) is
        # layer 4 alone.
        if inside[:2] == ("layers", "runs"):
            numbers = named_layers(inside[2])
            paths = [("layers", str(i), *inside[3:]) for i in numbers]
            shape = full_shape[1:] if len(numbers) > 1 else full_shape
        layers = []
        for path in paths:
            if (part := modules[module].find(path)) is None:
                raise UserError(f"{folder.path}: nothing there is {'.'.join(path)} of {module}")
            layers += part.split(shape)
        sources[names] = layers
    return sources


def check_fits(folder: HfFolder, part: TensorSlice, shape: tuple[int, ...]) -> None:
    """Raise UserError where a tensor is missing, or its shape does not give our parameter's."""
    # What is cut out of the tensor (rows, columns or groups), split into other axes (view), and put
    # into our order must have the parameter's shape.
    have = folder.stored(part.key).shape
    cuts = [part.rows, part.columns][: len(have)]
    beyond = any(cut is not None and cut[1] > size for cut, size in zip(cuts, have, strict=False))
    ends = [
        size if cut is None else len(range(*cut)) for cut, size in zip(cuts, have, strict=False)
    ]
    selected = (*ends, *have[len(ends) :])
    if part.groups is not None:
        count, first, stop = part.groups
        if have[0] % count == 0 and stop <= have[0] // count:
            selected = (count, stop - first, *have[1:])
    if part.view is not None and math.prod(part.view) == math.prod(selected):
        selected = part.view
    fits = selected == shape if part.order is None else len(part.order) == len(selected)
    if fits and part.order is not None:
        permuted = tuple(selected[axis] for axis in part.order)
        # With another number of axes, such as a convolution's kernel as a matrix, only the size can
        # be compared.
        fits = (
            permuted == shape
            if len(permuted) == len(shape)
            else math.prod(permuted) == math.prod(shape)
        )
    if not fits or beyond:
        raise UserError(
            f"{folder.path}: {part.key} has shape {list(have)}, this model's {list(shape)} does not go with it"
        )


def _load(
    folder: HfFolder,
    layers: Layers,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
) -> jax.Array:
    """Load one array. Each of this process's shards is read once, however many of its devices store it."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))].append(device)
    arrays = []
    for bounds, replicas in devices.items():
        index = tuple(slice(*pair) for pair in bounds)
        shard = np.empty([stop - start for start, stop in bounds], dtype)
        # Leading axes count layers, experts, or both.
        leading = len(shape) - len(layers[0][1])
        numbers = np.arange(len(layers)).reshape(shape[:leading])[index[:leading]]
        for place, number in np.ndenumerate(numbers):
            _read_into(shard[(*place, ...)], folder, *layers[number], index[leading:])
        arrays += [jax.device_put(shard, device) for device in replicas]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _load_quantized(
    folder: HfFolder, layers: Layers, how: Quantization, like: Params, shardings: Params
) -> dict[str, jax.Array]:
    """Load the codes and scales of one matrix of every layer of a stack, which is quantised as it is stored.

    Only one layer's is ever whole in memory.
    """

    @cache
    def quantized() -> dict[str, np.ndarray]:
        matrices = []
        for part, shape in layers:
            matrix = np.empty(shape, np.float32)
            _read_into(matrix, folder, part, shape, tuple(slice(0, size) for size in shape))
            matrices.append(jax.device_get(quantize(jnp.asarray(matrix), how)))
        parts = Quantized._make(map(np.stack, zip(*matrices, strict=True)))._asdict()
        return {name: part.reshape(like[name].shape) for name, part in parts.items()}

    # Not called on a process that has no shard.
    return {
        name: jax.make_array_from_callback(
            x.shape,
            shardings[name],
            lambda index, name=name: quantized()[name][index],
            dtype=x.dtype,
        )
        for name, x in like.items()
    }


def _read_into(
    out: np.ndarray, folder: HfFolder, part: TensorSlice, shape: tuple[int, ...], index: Index
) -> None:
    """Write the part of our parameter that `index` selects into `out`, reading only the rows that it needs."""
    stored = folder.stored(part.key)
    first = 0 if part.rows is None else part.rows[0]
    if part.order is not None and part.order != TRANSPOSED:
        # Convolutions, and rows that take turns with others: small enough to be read whole.
        rows = slice(None) if part.rows is None else slice(*part.rows)
        tensor = (
            folder.read(part.key, rows)
            if part.groups is None
            else part.selected(folder.read(part.key))
        )
        out[...] = part.from_hf(tensor, shape)[index]
        return
    if not shape:
        out[...] = folder.read(part.key)
        return
    # The file stores rows: axis 0 of our parameter, or axis 1 where it is transposed.
    transposed = part.order == TRANSPOSED
    along = index[1] if transposed else index[0]
    across = index[:1] if transposed else index[1:]
    row_bytes = max(1, math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize)
    step = max(1, CHUNK // row_bytes)
    for begin in range(along.start, along.stop, step):
        end = min(begin + step, along.stop)
        chunk = folder.read(part.key, slice(first + begin, first + end))
        chunk = chunk if part.columns is None else chunk[:, slice(*part.columns)]
        target = slice(begin - along.start, end - along.start)
        chunk = chunk[(slice(None), *across)]
        if transposed:
            out[:, target] = chunk.T
        else:
            out[target] = chunk


def leaf_at(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


Name = tuple[str, ...]


def name_inside(name: Name) -> Name:
    """Return a parameter's name inside its module."""
    return name[1:] if name[0] == "llm" else name[2:]
