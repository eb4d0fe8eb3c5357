"""Convert a run's checkpoint to the tensors of Hugging Face folders, a few at a time: the inverse of `pretrained`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmjax.config import LoraConfig, ModelConfig
from mmjax.config.lora_targets import adapters_by_layer, lora_scale
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import HfFolder
from mmjax.hf.parts import Part, Parts
from mmjax.hf.writing import Changed, NewTensor, rewrite_tensors
from mmjax.models.model import ADAPTER_ATTRIBUTE, module_of
from mmjax.runtime.checkpoint import SavedParameters
from mmjax.runtime.pretrained import check_fits

Name = tuple[str, ...]

GROUP_BYTES = 2**27  # of float32 parameters that are read from a checkpoint at once


@dataclass(frozen=True)
class Piece:
    """A parameter that is a tensor of a Hugging Face checkpoint, or some rows of one."""

    name: Name
    part: Part
    shape: tuple[int, ...]


@dataclass
class Exporter:
    """Converter of the parameters of one checkpoint of a run, read in groups to bound memory."""

    model: ModelConfig
    saved: SavedParameters
    _loaded: dict[Name, np.ndarray] = field(default_factory=dict)

    def names_of(self, modules: Sequence[str]) -> list[Name]:
        """Return the parameters of these modules, without their adapters."""
        return [name for name in self.saved.shapes if module_of(name) in modules and ADAPTER_ATTRIBUTE not in name[2:]]

    def lora_of(self, name: Name) -> LoraConfig | None:
        """Return the adapter config of a parameter, if it has one."""
        return adapters_by_layer(self.model).get(linear_name(name)) if name[-1] == "weight" else None

    def read(self, names: Sequence[Name]) -> None:
        """Load these parameters with their adapters, in place of those loaded before."""
        adapters = [(*n[:-1], ADAPTER_ATTRIBUTE, factor) for n in names if self.lora_of(n) for factor in ("a", "b")]
        self._loaded = {}  # freed first: the old and the new are never in memory together
        self._loaded = self.saved.read([*names, *adapters])

    def adapter(self, name: Name) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors a `[in, rank]` and b `[rank, out]` of a loaded parameter's adapter, float32."""
        return tuple(self._loaded[(*name[:-1], ADAPTER_ATTRIBUTE, factor)].astype(np.float32) for factor in ("a", "b"))

    def merged(self, name: Name, source: np.ndarray | None = None) -> np.ndarray | None:
        """Return a loaded parameter with its adapter added in float32; None where training has not changed `source`.

        source: the tensor that it was initialised from. A frozen parameter was rounded to the precision of the
        computation: where it is still the rounded source, the source itself is used.
        """
        value = self._loaded[name]
        lora = self.lora_of(name)
        # By bits: NaN equals itself, and 0.0 is not -0.0.
        same = source is not None and source.astype(value.dtype).tobytes() == value.tobytes()
        if lora is None:
            return None if same else value
        a, b = self.adapter(name)
        change = lora_scale(lora) * (a @ b)
        if same and not change.any():
            return None
        return (source if same else value).astype(np.float32) + change

    # --------------------------------------------------------------------------------------------- a folder's layout

    def rewrite(self, folder: HfFolder, modules: Sequence[str], out: Path) -> int:
        """Copy a folder's tensor files with these modules as trained; return how many tensors changed."""
        pieces = self.pieces(folder, modules)
        files = sorted({stored.file for stored in folder.tensors.values()})
        new = {file: self._changed(folder, file, pieces) for file in files}
        return sum(rewrite_tensors(folder, file, out / file.name, changed) for file, changed in new.items())

    def pieces(self, folder: HfFolder, modules: Sequence[str]) -> dict[str, list[Piece]]:
        """Return the parameters of these modules by the folder's tensor that they are, or are rows of."""
        layout = layout_of(folder, self.model)
        pieces = defaultdict(list)
        for name in self.names_of(modules):
            part = _part(layout.modules[module_of(name)], name, folder)
            check_fits(folder, part, self.saved.shapes[name])
            pieces[part.key].append(Piece(name, part, self.saved.shapes[name]))
        if "llm" in modules and self.model.llm.tied:
            table, copy = (_part(layout.modules["llm"], n, folder) for n in (EMBEDDING, OUTPUT))
            # Tied, but stored twice: the copies must stay equal.
            if copy.key in folder.tensors and folder.read(copy.key).tobytes() == folder.read(table.key).tobytes():
                pieces[copy.key].append(Piece(EMBEDDING, table, self.saved.shapes[EMBEDDING]))
        return pieces

    def _changed(self, folder: HfFolder, file: Path, pieces: Mapping[str, Sequence[Piece]]) -> Changed:
        """Return a function that gives a file's new tensors in order, reading parameters in groups."""
        keys = sorted((k for k in pieces if folder.stored(k).file == file), key=lambda k: folder.stored(k).begin)
        groups: dict[str, list[str]] = {}  # by the first key of the group, at which all of its parameters are read
        first = ""
        size = 0
        for key in keys:
            key_bytes = 4 * sum(math.prod(piece.shape) for piece in pieces[key])
            if not first or size + key_bytes > GROUP_BYTES:
                first = key
                size = 0
                groups[first] = []
            groups[first].append(key)
            size += key_bytes

        def changed(key: str) -> np.ndarray | None:
            if key not in pieces:
                return None
            if key in groups:
                self.read([piece.name for k in groups[key] for piece in pieces[k]])
            return self.tensor(folder, key, pieces[key])

        return changed

    def tensor(self, folder: HfFolder, key: str, pieces: Sequence[Piece]) -> np.ndarray | None:
        """Return a tensor with its loaded parameters as trained; None where none of them has changed."""
        tensor = folder.read(key)
        changed = False
        for piece in pieces:
            rows = slice(None) if piece.part.rows is None else slice(*piece.part.rows)
            source = tensor[rows] if tensor.shape else tensor
            # A scalar tensor cannot be sliced, only assigned as a whole.
            value = self.merged(piece.name, piece.part.ours(source, piece.shape))
            if value is not None:
                tensor[rows if tensor.shape else ...] = piece.part.theirs(value, source.shape)
                changed = True
        return tensor if changed else None

    # ----------------------------------------------------------------------------------------------------- our layout

    def own_layout(self, module: str) -> dict[str, NewTensor]:
        """Return the tensors of a module that came from no folder, by our names inside it; matrices are [in, out]."""

        def load(name: Name) -> np.ndarray:
            self.read([name])
            return self.merged(name)

        return {
            ".".join(_inside(name)): NewTensor("F32", self.saved.shapes[name], lambda n=name: load(n))
            for name in self.names_of([module])
        }


EMBEDDING = ("llm", "embed", "weight")
OUTPUT = ("llm", "head", "table", "weight")


def linear_name(name: Name) -> str:
    """Return the name of a parameter's linear layer in patterns, with `*` for numbers."""
    return ".".join([module_of(name), *("*" if part.isdigit() else part for part in _inside(name)[:-1])])


def _inside(name: Name) -> Name:
    """Return a parameter's name inside its module."""
    return name[1:] if name[0] == "llm" else name[2:]


def _part(parts: Parts, name: Name, folder: HfFolder) -> Part:
    if (part := parts.find(_inside(name))) is None:
        raise UserError(f"{folder.path}: nothing there is {'.'.join(_inside(name))} of {module_of(name)}")
    return part
