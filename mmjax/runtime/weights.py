"""Load pretrained weights into sharded parameters, and write them back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mmjax.config import LoraConfig, ModelConfig
from mmjax.config.model import adapters_by_layer, lora_scale, step_vaes, towers_of
from mmjax.config.towers import Quantization
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import DTYPES, HfFolder, split_entry
from mmjax.hf.layout import TRANSPOSED, TensorNames, TensorSlice
from mmjax.hf.vae import open_vae, read_vae
from mmjax.hf.writing import Changed, NewTensor, rewrite_tensors
from mmjax.models.layer_stacks import Params, named_layers
from mmjax.models.model import ADAPTER_ATTRIBUTE, Model, module_of, parameter_group
from mmjax.models.quantization import Quantized, dequantize, parameter_shapes, quantize
from mmjax.runtime.saved_parameters import SavedParameters

Index = tuple[slice, ...]

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


def load_pretrained(model: Model, shardings: Params) -> Params:
    """Load the parameters of all modules that have a folder, as nested dicts, into these shardings.

    Frozen modules are in the model's precision or quantised, others in float32. Raises UserError
    naming tensors that are missing, unexpected or of another shape.
    """
    loaded: Params = {}
    folders = [
        (HfFolder.open(path), names) for path, names in modules_by_folder(model.config).items()
    ]
    folders += [
        (_vae_folder(model.config, name), [f"{name}.vae"]) for name in step_vaes(model.config)
    ]
    for folder, modules in folders:
        layout = layout_of(folder, model.config)
        sources = _sources(model, folder, {module: layout.modules[module] for module in modules})
        read = {split_entry(part.key)[0] for layers in sources.values() for part, _ in layers}
        if unexpected := layout.unexpected_tensors(folder, read, modules):
            raise UserError(
                f"{folder.path} has {len(unexpected)} tensors that this model lacks, such as {unexpected[0]}: its "
                "config.json does not describe its weights"
            )
        for names, layers in sources.items():
            like = _get(model.abstract, names)
            layout = _get(shardings, names)
            parent = loaded
            for name in names[:-1]:
                parent = parent.setdefault(name, {})
            if isinstance(like, dict):
                how = towers_of(model.config)[module_of(names)].quantize
                parent[names[-1]] = _load_quantized(folder, layers, how, like, layout)
                continue
            dtype = jnp.dtype(model.dtype if module_of(names) in model.frozen else jnp.float32)
            parent[names[-1]] = _load(folder, layers, like.shape, dtype, layout)
    return loaded


def _vae_folder(config: ModelConfig, name: str) -> HfFolder:
    """Open the folder of a generator's VAE. Raises UserError where there is none, or another VAE than the config's."""
    latents = config.generators[name].latents
    folder = open_vae(latents.weights)
    if (stored := read_vae(folder)) != latents.vae:
        raise UserError(
            f"model.generators.{name}.latents.vae is another VAE than that of {folder.path}, which is {stored}; use "
            "what mmjax.hf.vae.vae_latents reads of it"
        )
    return folder


# The part of a checkpoint and our shape, of each layer of a stack, and of each expert; else a
# single one.
Layers = list[tuple[TensorSlice, tuple[int, ...]]]


def _sources(
    model: Model, folder: HfFolder, modules: Mapping[str, TensorNames]
) -> dict[tuple[str, ...], Layers]:
    """Find every parameter of these modules in the folder, a quantised one by the path of both of its parts.

    Raises UserError for one that is missing.
    """
    sources = {}
    for names, full_shape in parameter_shapes(model.abstract).items():
        if (module := parameter_group(names)) not in modules:
            continue  # from another folder, or an adapter
        inside = names[1:] if names[0] == "llm" else names[2:]
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
        for single in layers:
            check_fits(folder, *single)
        sources[names] = layers
    return sources


def check_fits(folder: HfFolder, part: TensorSlice, shape: tuple[int, ...]) -> None:
    """Raise UserError where a tensor is missing, or its shape does not give our parameter's."""
    have = folder.stored(part.key).shape
    cuts = [part.rows, part.columns][: len(have)]
    beyond = any(cut is not None and cut[1] > size for cut, size in zip(cuts, have, strict=False))
    ends = [size if cut is None else cut[1] - cut[0] for cut, size in zip(cuts, have, strict=False)]
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
    if part.columns is not None:
        across = tuple(slice(part.columns[0] + s.start, part.columns[0] + s.stop) for s in across)
    row_bytes = max(1, math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize)
    step = max(1, CHUNK // row_bytes)
    for begin in range(along.start, along.stop, step):
        end = min(begin + step, along.stop)
        chunk = folder.read(part.key, slice(first + begin, first + end))
        target = slice(begin - along.start, end - along.start)
        chunk = chunk[(slice(None), *across)]
        if transposed:
            out[:, target] = chunk.T
        else:
            out[target] = chunk


def _get(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


Name = tuple[str, ...]

GROUP_BYTES = 2**27  # of float32 parameters that are read from a checkpoint at once


@dataclass(frozen=True)
class Piece:
    """A parameter, or one expert of it, that is a tensor of a Hugging Face checkpoint or a part of one."""

    name: Name
    part: TensorSlice
    shape: tuple[int, ...]
    expert: int | None = None


@dataclass
class Exporter:
    """Converter of the parameters of one checkpoint of a run, read in groups to bound memory."""

    model: ModelConfig
    saved: SavedParameters
    _loaded: dict[Name, np.ndarray] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> dict[Name, tuple[int, ...]]:
        """Return the shape of every parameter, of a quantised one that of the matrix."""
        return parameter_shapes(self.saved.structs)

    def names_of(self, modules: Sequence[str]) -> list[Name]:
        """Return the parameters of these modules, without their adapters."""
        return [
            name
            for name in self.shapes
            if module_of(name) in modules and ADAPTER_ATTRIBUTE not in name[2:]
        ]

    def lora_of(self, name: Name) -> LoraConfig | None:
        """Return the adapter config of a parameter, if it has one."""
        return (
            adapters_by_layer(self.model).get(linear_name(name)) if name[-1] == "weight" else None
        )

    def read(self, names: Sequence[Name]) -> None:
        """Load these parameters with their adapters, in place of those loaded before."""
        adapters = [
            (*n[:-1], ADAPTER_ATTRIBUTE, factor)
            for n in names
            if self.lora_of(n)
            for factor in ("a", "b")
        ]
        self._loaded = {}  # freed first: the old and the new are never in memory together
        parts = [
            (*name, part) for name in names if self.is_quantized(name) for part in Quantized._fields
        ]
        stored = self.saved.read([*names, *parts, *adapters])
        for name in {path[:-1] for path in parts}:
            matrix = Quantized._make(
                jnp.asarray(stored.pop((*name, part))) for part in Quantized._fields
            )
            stored[name] = np.asarray(dequantize(matrix, jnp.float32))
        self._loaded = stored

    def is_quantized(self, name: Name) -> bool:
        """Return whether a parameter is a quantised matrix."""
        return isinstance(_get(self.saved.structs, name), dict)

    def adapter(self, name: Name) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors a `[in, rank]` and b `[rank, out]` of a loaded parameter's adapter, float32."""
        return tuple(
            self._loaded[(*name[:-1], ADAPTER_ATTRIBUTE, factor)].astype(np.float32)
            for factor in ("a", "b")
        )

    def merged(
        self, name: Name, source: np.ndarray | None = None, expert: int | None = None
    ) -> np.ndarray | None:
        """Return a loaded parameter with its adapter added in float32; None where training has not changed `source`.

        source: the tensor that it was initialised from. A frozen parameter was rounded to the
        precision of the
        computation: where it is still the rounded source, the source itself is used. What was
        quantised is frozen, and adapters are added to what they were trained beside. expert: the
        only one that counts.
        """
        value = self._loaded[name] if expert is None else self._loaded[name][expert]
        lora = self.lora_of(name)
        # By bits: NaN equals itself, and 0.0 is not -0.0.
        same = source is not None and source.astype(value.dtype).tobytes() == value.tobytes()
        if lora is None:
            unchanged = same or (source is not None and self.is_quantized(name))
            return None if unchanged else value
        a, b = self.adapter(name)
        change = lora_scale(lora) * (a @ b)
        if same and not change.any():
            return None
        return (source if same else value).astype(np.float32) + change

    # ---------------------------------------------------------------------------------------------
    # a folder's layout

    def rewrite(self, folder: HfFolder, modules: Sequence[str], out: Path) -> int:
        """Copy a folder's tensor files with these modules as trained; return how many tensors changed."""
        pieces = self.pieces(folder, modules)
        files = sorted({stored.file for stored in folder.tensors.values()})
        new = {file: self._changed(folder, file, pieces) for file in files}
        return sum(
            rewrite_tensors(folder, file, out / file.name, changed) for file, changed in new.items()
        )

    def pieces(self, folder: HfFolder, modules: Sequence[str]) -> dict[str, list[Piece]]:
        """Return the parameters of these modules by the folder's tensor that they are, or are rows of."""
        layout = layout_of(folder, self.model)
        pieces = defaultdict(list)
        for name in self.names_of(modules):
            part = _part(layout.modules[module_of(name)], name, folder)
            for number, (single, shape) in enumerate(part.split(self.shapes[name])):
                check_fits(folder, single, shape)
                piece = Piece(name, single, shape, number if part.experts else None)
                pieces[split_entry(single.key)[0]].append(piece)
        if "llm" in modules and self.model.llm.tied:
            table, copy = (_part(layout.modules["llm"], n, folder) for n in (EMBEDDING, OUTPUT))
            # Tied, but stored twice: the copies must stay equal.
            if (
                copy.key in folder.tensors
                and folder.read(copy.key).tobytes() == folder.read(table.key).tobytes()
            ):
                pieces[copy.key].append(Piece(EMBEDDING, table, self.shapes[EMBEDDING]))
        return pieces

    def _changed(
        self, folder: HfFolder, file: Path, pieces: Mapping[str, Sequence[Piece]]
    ) -> Changed:
        """Return a function that gives a file's new tensors in order, reading parameters in groups."""
        keys = sorted(
            (k for k in pieces if folder.stored(k).file == file),
            key=lambda k: folder.stored(k).begin,
        )
        # By the first key of the group, at which all of its parameters are read.
        groups: dict[str, set[Name]] = {}
        first = ""
        size = 0
        for key in keys:
            names = {name for piece in pieces[key] for name in self._read_with(piece)}
            if first and names <= groups[first]:
                continue
            key_bytes = 4 * sum(math.prod(self.shapes[name]) for name in names)
            if not first or size + key_bytes > GROUP_BYTES:
                first = key
                size = 0
                groups[first] = set()
            groups[first] |= names
            size += key_bytes

        def changed(key: str) -> np.ndarray | None:
            if key not in pieces:
                return None
            if key in groups:
                self.read(sorted(groups[key]))
            return self.tensor(folder, key, pieces[key])

        return changed

    def _read_with(self, piece: Piece) -> list[Name]:
        """Name the parameters that are read with a piece: a layer's experts take turns in a file, matrix by matrix."""
        if piece.expert is None:
            return [piece.name]
        *experts, _, leaf = piece.name
        return [
            name
            for part in ("gate", "up", "down")
            if (name := (*experts, part, leaf)) in self.shapes
        ]

    def tensor(self, folder: HfFolder, key: str, pieces: Sequence[Piece]) -> np.ndarray | None:
        """Return a tensor with its loaded parameters as trained; None where none of them has changed."""
        tensor = folder.read(key)
        changed = False
        for piece in pieces:
            source = piece.part.selected(tensor)
            value = self.merged(piece.name, piece.part.from_hf(source, piece.shape), piece.expert)
            if value is not None:
                source[...] = piece.part.to_hf(value, source.shape)
                changed = True
        return tensor if changed else None

    # ----------------------------------------------------------------------------------------------
    # our layout

    def own_layout(self, module: str) -> dict[str, NewTensor]:
        """Return the tensors of a module that came from no folder, by our names inside it; matrices are [in, out]."""

        def load(name: Name) -> np.ndarray:
            self.read([name])
            return self.merged(name)

        return {
            ".".join(_inside(name)): NewTensor("F32", self.shapes[name], lambda n=name: load(n))
            for name in self.names_of([module])
        }


EMBEDDING = ("llm", "embed", "weight")
OUTPUT = ("llm", "head", "table", "weight")


def linear_name(name: Name) -> str:
    """Return the name of a parameter's linear layer in patterns, with `*` for numbers."""
    return ".".join(
        [module_of(name), *("*" if part.isdigit() else part for part in _inside(name)[:-1])]
    )


def _inside(name: Name) -> Name:
    """Return a parameter's name inside its module."""
    return name[1:] if name[0] == "llm" else name[2:]


def _part(parts: TensorNames, name: Name, folder: HfFolder) -> TensorSlice:
    if (part := parts.find(_inside(name))) is None:
        raise UserError(
            f"{folder.path}: nothing there is {'.'.join(_inside(name))} of {module_of(name)}"
        )
    return part
