"""Convert the parameters of a run's checkpoint to the tensors of a Hugging Face folder, in groups to bound memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from mmjax.config import LoraConfig, ModelConfig
from mmjax.config.model import adapters_by_layer, lora_scale
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import HfFolder, split_entry
from mmjax.hf.layout import TensorNames, TensorSlice
from mmjax.hf.writing import Changed, NewTensor, rewrite_tensors
from mmjax.models.model import ADAPTER_ATTRIBUTE, module_of
from mmjax.models.quantization import Quantized, dequantize, parameter_shapes
from mmjax.runtime.saved_parameters import SavedParameters
from mmjax.runtime.weights import Name, check_fits, leaf_at, name_inside

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
            if (lora := self.lora_of(n))
            for factor in ("a", "b", *["magnitude"] * lora.dora)
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
        return isinstance(leaf_at(self.saved.structs, name), dict)

    def adapter(self, name: Name) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors a `[in, rank]` and b `[rank, out]` of a loaded parameter's adapter, float32."""
        return tuple(
            self._loaded[(*name[:-1], ADAPTER_ATTRIBUTE, factor)].astype(np.float32)
            for factor in ("a", "b")
        )

    def magnitude(self, name: Name, weight: np.ndarray | None = None) -> np.ndarray:
        """Return the trained lengths of a loaded parameter's columns (DoRA), float32 `[out]`.

        weight: that they are trained beside, by default the loaded one.
        """
        weight = self._loaded[name] if weight is None else weight
        change = self._loaded[(*name[:-1], ADAPTER_ATTRIBUTE, "magnitude")]
        return np.linalg.norm(weight.astype(np.float32), axis=0) + change

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
        weight = source if same else value
        new = weight.astype(np.float32) + change
        if lora.dora:
            new *= self.magnitude(name, weight) / np.linalg.norm(new, axis=0)
        return None if same and not change.any() and np.array_equal(new, weight) else new

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
        # Tensors are written one after the other, and parameters read from the checkpoint by groups:
        #   tensors of the file   q k v | o gate up | down ...    in the order of their bytes
        #   parameters in memory  ----- | --------- | ----        up to GROUP_BYTES
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
            ".".join(name_inside(name)): NewTensor("F32", self.shapes[name], lambda n=name: load(n))
            for name in self.names_of([module])
        }


EMBEDDING = ("llm", "embed", "weight")
OUTPUT = ("llm", "head", "table", "weight")


def linear_name(name: Name) -> str:
    """Return the name of a parameter's linear layer in patterns, with `*` for numbers."""
    return ".".join(
        [module_of(name), *("*" if part.isdigit() else part for part in name_inside(name)[:-1])]
    )


def _part(parts: TensorNames, name: Name, folder: HfFolder) -> TensorSlice:
    if (part := parts.find(name_inside(name))) is None:
        raise UserError(
            f"{folder.path}: nothing there is {'.'.join(name_inside(name))} of {module_of(name)}"
        )
    return part
