"""Read batches that a trainer has written down: arrays of .safetensors or .npz files, of which nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mmjax.errors import UserError
from mmjax.hf.safetensors_header import read_header

SUFFIXES = (".npz", ".safetensors")
IGNORED = -100  # label of a token that is not trained on
# Of safetensors; of bfloat16 the upper half of a float32.
DTYPES = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"},
    **{"F16": "f2", "BF16": "u2", "F32": "f4", "F64": "f8"},
}
BORDERS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")  # names of where samples begin and end


@dataclass(frozen=True)
class DumpedBatch:
    """The arrays that a model was fed in one call, under the names that transformers' models have for it."""

    name: str
    arrays: Mapping[str, np.ndarray]

    @property
    def ids(self) -> np.ndarray:
        """Return the tokens `[B, T]`."""
        return self.arrays["input_ids"]

    @property
    def row_mask(self) -> np.ndarray | None:
        """Return the mask `[B, T]`, 0 at padding, where there is such a one."""
        mask = self.arrays.get("attention_mask")
        return mask if mask is not None and mask.ndim == 2 else None

    @cached_property
    def borders(self) -> np.ndarray | None:
        """Return where the samples of the only row begin and end, as attention is told."""
        return next((self.arrays[name] for name in BORDERS if name in self.arrays), None)

    @property
    def counted(self) -> np.ndarray | None:
        """Return the positions `[B, T]` by which transformers parts samples; by three axes alone it does not."""
        position = self.arrays.get("position_ids")
        if position is None or position.ndim == 2:
            return position
        return position[0] if len(position) == 4 else None

    def positions(self, row: int, span: slice) -> np.ndarray | None:
        """Return the rotary positions of a stretch, `[n]` or by axis `[n, 3]`."""
        position = self.arrays.get("position_ids")
        if position is None or position.ndim == 2:
            return position if position is None else position[row, span]
        return position[-3:, row, span].T


def read_batches(path: Path) -> Iterator[DumpedBatch]:
    """Yield the batch of a file, or of each file of a folder. Raises UserError for what is no batch."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise UserError(f"--batches {path}: {error.strerror}") from None
    files = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise UserError(f"--batches {path}: it is, or holds, no {' or '.join(SUFFIXES)} file")
    for file in files:
        arrays = _read(file)
        if problem := _problem(arrays):
            raise UserError(f"{file}: {problem}")
        yield DumpedBatch(file.name, arrays)


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        if file.suffix == ".safetensors":
            return dict(_tensors(file))
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except Exception as error:  # of zip, zlib or NumPy, each of their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = reason.removesuffix("; copy the checkpoint again")
        raise UserError(f"{file} cannot be read: {reason:.300}") from None


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    with file.open("rb") as opened:
        for name, stored in read_header(file).items():
            opened.seek(stored.begin)
            values = np.frombuffer(opened.read(stored.size), DTYPES[stored.dtype])
            if stored.dtype == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            yield name, values.reshape(stored.shape)


def _problem(arrays: Mapping[str, np.ndarray]) -> str:
    """Return what is wrong with the shapes and types of arrays that are read; empty: nothing."""
    if (ids := arrays.get("input_ids")) is None:
        return f"it has no input_ids, but {', '.join(arrays) or 'nothing'}"
    if ids.ndim != 2 or not ids.size:
        return f"input_ids has the shape {list(ids.shape)}, not [rows, tokens]"
    rows, tokens = ids.shape
    shapes: dict[str, list[tuple[int, ...]]] = {
        "input_ids": [ids.shape],
        "labels": [ids.shape],
        "position_ids": [ids.shape, (3, *ids.shape), (4, *ids.shape)],
        "attention_mask": [ids.shape, (rows, 1, tokens, tokens)],
    }
    pairs = {"image_grid_thw": 3, "video_grid_thw": 3, "image_sizes": 2}
    shapes |= {
        name: [(len(arrays[name]), n)]
        for name, n in pairs.items()
        if name in arrays and arrays[name].ndim
    }
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            return f"{name} is of {array.dtype}, which are no numbers"
        known = shapes.get(name, [array.shape])
        if array.shape not in known:
            listed = " or ".join(str(list(shape)) for shape in known)
            return f"{name} has the shape {list(array.shape)}, not {listed}"
        is_whole = name in {*shapes, *BORDERS} - {"attention_mask"}
        if is_whole and array.dtype.kind not in "iu":
            return f"{name} is of {array.dtype}, not of integers"
        if name in pairs and (array < 1).any():
            return f"{name} holds {array.min()}; sizes are at least 1"
        if name in BORDERS:
            ends = array.reshape(-1).astype(np.int64)
            if rows > 1 or {0, tokens} - {*ends[:1], *ends[-1:]} or (np.diff(ends) < 0).any():
                return f"{name} is not a list that goes from 0 up to the {tokens} tokens of one row"
    return ""
