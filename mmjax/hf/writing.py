"""Writing safetensors tensor by tensor, and a checkpoint's folder again with other values in the same places."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmjax.errors import UserError
from mmjax.hf.folder import CHUNK, DTYPES, INDEX, SINGLE, HfFolder

# Weights in other formats, or of others: nobody who reads the folder must find old ones.
WEIGHTS = (
    *("*.safetensors", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.onnx*", "*.gguf"),
)
ALIGNED = 8  # bytes: a header's length is a multiple, as of the library's own

Changed = Callable[[str], np.ndarray | None]  # a tensor's new value by its name; None: it stays as it is


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written, which is made when its turn comes."""

    dtype: str  # the format's name, such as BF16
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(path: Path, tensors: Mapping[str, NewTensor]) -> None:
    """A safetensors file, made tensor by tensor."""
    header = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            _write(file, tensor.make(), tensor.dtype, tensor.shape)


def rewrite_tensors(folder: HfFolder, file: Path, out: Path, changed: Changed) -> int:
    """A file of a folder's tensors again: its header byte for byte, its tensors in their places, some changed.

    Tensors are asked for in the order in which they lie there. Returns how many were changed.
    """
    tensors = {name: stored for name, stored in folder.tensors.items() if stored.file == file}
    count = 0
    with file.open("rb") as source, out.open("wb") as target:
        for name, stored in sorted(tensors.items(), key=lambda pair: pair[1].begin):
            _copy(source, target, stored.begin)  # the header, or what lies between tensors
            value = changed(name)
            if value is None:
                _copy(source, target, stored.begin + math.prod(stored.shape) * DTYPES[stored.dtype].itemsize)
            else:
                _write(target, value, stored.dtype, stored.shape)
                source.seek(target.tell())
                count += 1
        _copy(source, target, file.stat().st_size)
    return count


def copy_beside(folder: HfFolder, out: Path) -> list[str]:
    """Everything in a folder but weights, byte for byte, into another; the names of what was left out.

    Left out are hidden files, and weights, with their index, that the folder does not take its tensors from.
    """
    read = {stored.file for stored in folder.tensors.values()}
    skipped = []
    for path in sorted(folder.path.rglob("*")):
        name = path.relative_to(folder.path)
        if path.is_dir() or any(part.startswith(".") for part in name.parts) or path in read:
            continue
        if any(path.match(pattern) for pattern in WEIGHTS) or (path.name == INDEX and folder.path / SINGLE in read):
            skipped.append(str(name))
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
    return skipped


def _copy(source: BinaryIO, target: BinaryIO, end: int) -> None:
    """Bytes up to `end`, from where both files stand."""
    while (remaining := end - source.tell()) > 0:
        if not (piece := source.read(min(CHUNK, remaining))):
            raise UserError(f"{source.name} ends too soon; copy the checkpoint again")
        target.write(piece)


def _write(file: BinaryIO, value: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"a tensor of shape {value.shape} does not go into one of shape {shape}")
    stored = np.ascontiguousarray(value.astype(DTYPES[dtype], copy=False)).reshape(-1).view(np.uint8)
    for begin in range(0, len(stored), CHUNK):
        file.write(memoryview(stored[begin : begin + CHUNK]))
