"""A part of a diffusers folder, such as its `vae`: opened by its own folder or by the whole's, and written."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.disk import atomic_write
from mmjax.errors import UserError
from mmjax.hf.folder import CLASS_NAME, HfFolder
from mmjax.hf.layout import TensorNames, TensorSlice
from mmjax.hf.writing import NewTensor, write_tensors
from mmjax.hub import DIFFUSERS_SINGLE

PIPELINE = "model_index.json"  # of a whole folder
Piece = tuple[TensorSlice, np.ndarray]  # a parameter, and where it lies


def open_part(path: str | Path, part: str, *names: str) -> HfFolder:
    """Open `path` where it is the folder of one model, else its subfolder `part`.

    names: of the class in diffusers. Raises UserError where there is no such folder, or one of
    another class.
    """
    path = Path(path).expanduser()
    if (path / PIPELINE).is_file():
        path /= part
    elif not (path / "config.json").is_file():
        if not (path / part / "config.json").is_file():
            raise UserError(
                f"{path} is no diffusers folder: neither config.json nor {part}/config.json is there"
            )
        path /= part
    folder = HfFolder.open(path)
    folder.fields.allow_only(CLASS_NAME, *names)
    return folder


def write_part(
    path: Path,
    fields: Mapping[str, Any],
    names: TensorNames,
    parameters: Mapping[tuple[str, ...], np.ndarray],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Write the folder of one model, which diffusers reads, from its parameters by their paths inside it.

    fields: of its `config.json`. shapes: of tensors whose parameters do not tell, by name. Raises
    UserError for a parameter that has no place there.
    """
    pieces = defaultdict(list)
    for name, value in parameters.items():
        if (part := names.find(name)) is None:
            raise UserError(f"{path}: nothing there is {'.'.join(name)}")
        pieces[part.key].append((part, value))
    tensors = {}
    for key, parts in pieces.items():
        shape = (shapes or {}).get(key) or _joint_shape(parts)

        def make(parts: list[Piece] = parts, shape: tuple[int, ...] = shape) -> np.ndarray:
            tensor = np.zeros(shape, np.float32)
            for part, value in parts:
                place = part.selected(tensor)
                place[...] = part.to_hf(value, place.shape)
            return tensor

        tensors[key] = NewTensor("F32", shape, make)
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / DIFFUSERS_SINGLE) as partial:
        write_tensors(partial, tensors)
    with atomic_write(path / "config.json") as partial:
        partial.write_text(json.dumps(fields, indent=2) + "\n")


def _joint_shape(parts: list[Piece]) -> tuple[int, ...]:
    """Return the shape of the tensor that parameters are, or are rows of."""
    shapes = [_stored_shape(part, value.shape) for part, value in parts]
    return (sum(rows for rows, *_ in shapes), *shapes[0][1:])


def _stored_shape(part: TensorSlice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor, or of the rows of one, that holds a parameter of this shape."""
    if part.order is None:
        return shape
    axes = (*shape, *(1,) * (len(part.order) - len(shape)))
    # Axis k of the parameter is axis order[k] of the tensor.
    return tuple(axes[part.order.index(axis)] for axis in range(len(axes)))
