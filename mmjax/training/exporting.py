"""Convert a run's checkpoint to tensors of Hugging Face folders, a few at a time: the inverse of `pretrained`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmjax.adapters import adapted, scale
from mmjax.config import LoraConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.families import layout_of
from mmjax.hf.folder import HfFolder
from mmjax.hf.parts import Part, Parts
from mmjax.hf.writing import Changed, NewTensor, rewrite_tensors
from mmjax.models.model import ADAPTER, module_of
from mmjax.training.checkpoint import SavedParameters
from mmjax.training.pretrained import check_fits

Name = tuple[str, ...]

TOGETHER = 2**27  # bytes of float32 parameters that are read from a checkpoint at once


@dataclass(frozen=True)
class Piece:
    """A parameter that is a tensor of a checkpoint, or some rows of one."""

    name: Name
    part: Part
    shape: tuple[int, ...]


@dataclass
class Exporter:
    """The parameters of one checkpoint of a run, as they go into other layouts."""

    model: ModelConfig
    saved: SavedParameters
    _held: dict[Name, np.ndarray] = field(default_factory=dict)

    def names_of(self, modules: Sequence[str]) -> list[Name]:
        """The parameters of some modules, without their adapters."""
        return [name for name in self.saved.shapes if module_of(name) in modules and ADAPTER not in name[2:]]

    def lora_of(self, name: Name) -> LoraConfig | None:
        """The adapter beside a parameter."""
        return adapted(self.model).get(linear_name(name)) if name[-1] == "weight" else None

    def read(self, names: Sequence[Name]) -> None:
        """Hold these parameters, with their adapters, and no others."""
        beside = [(*n[:-1], ADAPTER, own) for n in names if self.lora_of(n) for own in ("a", "b")]
        self._held = {}  # before others are read
        self._held = self.saved.read([*names, *beside])

    def adapter(self, name: Name) -> tuple[np.ndarray, np.ndarray]:
        """The a `[in, rank]` and b `[rank, out]` beside a parameter that is held, float32."""
        return tuple(self._held[(*name[:-1], ADAPTER, own)].astype(np.float32) for own in ("a", "b"))

    def merged(self, name: Name, source: np.ndarray | None = None) -> np.ndarray | None:
        """A parameter that is held, its adapter added in float32; None where it is the `source` still.

        source: what it once was loaded from. A frozen parameter was rounded to the precision of the computation: where
        it still is the source so rounded, the source itself goes on.
        """
        value, lora = self._held[name], self.lora_of(name)
        same = source is not None and source.astype(value.dtype).tobytes() == value.tobytes()
        if lora is None:
            return None if same else value
        a, b = self.adapter(name)
        change = scale(lora) * (a @ b)
        if same and not change.any():
            return None
        return (source if same else value).astype(np.float32) + change

    # --------------------------------------------------------------------------------------------- a folder's layout

    def rewrite(self, folder: HfFolder, modules: Sequence[str], out: Path) -> int:
        """All files of a folder's tensors into another, those of these modules as trained. Returns how many changed."""
        pieces = self.pieces(folder, modules)
        files = sorted({stored.file for stored in folder.tensors.values()})
        new = {file: self._by_turns(folder, file, pieces) for file in files}
        return sum(rewrite_tensors(folder, file, out / file.name, changed) for file, changed in new.items())

    def pieces(self, folder: HfFolder, modules: Sequence[str]) -> dict[str, list[Piece]]:
        """The parameters of these modules by the folder's tensor that they are, or are rows of."""
        layout, found = layout_of(folder, self.model), defaultdict(list)
        for name in self.names_of(modules):
            part = _part(layout.modules[module_of(name)], name, folder)
            check_fits(folder, part, self.saved.shapes[name])
            found[part.key].append(Piece(name, part, self.saved.shapes[name]))
        if "llm" in modules and self.model.llm.tied:
            table, copy = (_part(layout.modules["llm"], n, folder) for n in (EMBEDDING, OUTPUT))
            # A table that is stored twice must not differ from itself.
            if copy.key in folder.tensors and _bits(folder, copy.key) == _bits(folder, table.key):
                found[copy.key].append(Piece(EMBEDDING, table, self.saved.shapes[EMBEDDING]))
        return found

    def _by_turns(self, folder: HfFolder, file: Path, pieces: Mapping[str, Sequence[Piece]]) -> Changed:
        """Return a function that gives a file's new tensors in order, read from the checkpoint in groups."""
        keys = sorted((k for k in pieces if folder.stored(k).file == file), key=lambda k: folder.stored(k).begin)
        groups = _groups(keys, pieces)

        def changed(key: str) -> np.ndarray | None:
            if key not in pieces:
                return None
            if key in groups:
                self.read([piece.name for k in groups[key] for piece in pieces[k]])
            return self.tensor(folder, key, pieces[key])

        return changed

    def tensor(self, folder: HfFolder, key: str, pieces: Sequence[Piece]) -> np.ndarray | None:
        """A tensor with its parameters, which are held, as trained; None where none of them has changed."""
        tensor, changed = folder.read(key), False
        for piece in pieces:
            rows = slice(None) if piece.part.rows is None else slice(*piece.part.rows)
            own = tensor[rows] if tensor.shape else tensor
            value = self.merged(piece.name, piece.part.ours(own, piece.shape))
            if value is not None:
                tensor[rows if tensor.shape else ...] = piece.part.theirs(value, own.shape)
                changed = True
        return tensor if changed else None

    # ----------------------------------------------------------------------------------------------------- our layout

    def own_layout(self, module: str) -> dict[str, NewTensor]:
        """The tensors of a module that came from no folder, by our names inside it; matrices are [in, out]."""

        def made(name: Name) -> np.ndarray:
            self.read([name])
            return self.merged(name)

        return {
            ".".join(_inside(name)): NewTensor("F32", self.saved.shapes[name], lambda n=name: made(n))
            for name in self.names_of([module])
        }


EMBEDDING, OUTPUT = ("llm", "embed", "weight"), ("llm", "head", "table", "weight")


def linear_name(name: Name) -> str:
    """Return the name of a parameter's linear layer in patterns."""
    return ".".join([module_of(name), *("*" if part.isdigit() else part for part in _inside(name)[:-1])])


def _inside(name: Name) -> Name:
    """A parameter's name inside its module."""
    return name[1:] if name[0] == "llm" else name[2:]


def _part(parts: Parts, name: Name, folder: HfFolder) -> Part:
    if (part := parts.find(_inside(name))) is None:
        raise UserError(f"{folder.path}: nothing there is {'.'.join(_inside(name))} of {module_of(name)}")
    return part


def _bits(folder: HfFolder, key: str) -> bytes:
    return folder.read(key).tobytes()


def _groups(keys: Sequence[str], pieces: Mapping[str, Sequence[Piece]]) -> dict[str, list[str]]:
    """Neighbours whose parameters are read together, by the first of them."""
    groups: dict[str, list[str]] = {}
    first, size = "", 0
    for key in keys:
        own = 4 * sum(math.prod(piece.shape) for piece in pieces[key])
        if not first or size + own > TOGETHER:
            first, size = key, 0
            groups[first] = []
        groups[first].append(key)
        size += own
    return groups
