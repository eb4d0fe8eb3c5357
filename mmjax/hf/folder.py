"""A Hugging Face folder on disk: its config, and its tensors by name, read without loading a file whole.

Files are read, not mapped: pages of a mapped file count as memory of the process that touches them,
and a process reads what its devices hold.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args, get_origin

import ml_dtypes
import numpy as np

from mmjax.disk import read_json
from mmjax.errors import UserError
from mmjax.hf.class_defaults import complete_config, generator_config
from mmjax.hf.safetensors_header import Stored, read_header
from mmjax.hub import DIFFUSERS_SINGLE, SINGLE

CLASS_NAME = "_class_name"  # a field of every config that diffusers writes

# Not None, which is a value that a caller may give for null.
_NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """One object of a JSON file. `where` names it in messages: the file, and the key inside."""

    values: Mapping[str, Any]
    where: str

    def get(self, name: str, kinds: type | tuple[type, ...], null: Any = _NEEDED) -> Any:
        """A field of one of these types; of a list, with its elements' type: list[int], list[list[int]].

        null: what JSON's null stands for, or a field that the class has not.

        Raises UserError where it has another type, or is null or missing and that stands for
        nothing.
        """
        value = self.values.get(name)
        if value is None:
            if null is _NEEDED:
                raise UserError(f"{self.where} has no {name!r}")
            return null
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        # JSON writes 1.0 as 1 at times; a bool is an int in Python and no number here.
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not any(_is(value, kind) for kind in kinds):
            expected = " or ".join(k.__name__ if get_origin(k) is None else str(k) for k in kinds)
            raise UserError(f"{self.where}: {name}={value!r} is no {expected}")
        return value

    def size(self, name: str, null: Any = _NEEDED) -> int:
        """A number of something that there must be. Raises UserError where it is below 1 too."""
        value = self.get(name, int, null)
        if value < 1:
            raise UserError(f"{self.where}: {name}={value} must be at least 1")
        return value

    def inner(self, name: str) -> Fields:
        """A field that is an object. Raises UserError where it is none."""
        return Fields(self.get(name, dict), f"{self.where}: {name}")

    def allow_only(self, name: str, *known: Any) -> None:
        """Raise UserError where a field is there and has none of these values, for which alone it is read right."""
        value = self.values.get(name)
        if value is not None and value not in known:
            supported = ", ".join(map(repr, known)) or "to leave it out"
            raise UserError(f"{self.where}: {name}={value!r} is not supported; known: {supported}")

    def choice(self, name: str, known: Mapping[str, Any], null: Any = _NEEDED) -> Any:
        """Map a field's text to its value in `known`. Raises UserError for a text that is not there."""
        value = self.get(name, str, null)
        if value not in known:
            raise UserError(
                f"{self.where}: {name}={value!r} is not supported; known: {', '.join(known)}"
            )
        return known[value]


def _is(value: Any, kind: type) -> bool:
    if get_origin(kind) is list:
        (element,) = get_args(kind)
        return isinstance(value, list) and all(_is(item, element) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CHUNK = 2**24  # bytes of a tensor that are read at a time


@dataclass(frozen=True)
class HfFolder:
    """A folder with a `config.json` and safetensors: a single file, or several with an index."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    single: str = SINGLE  # name of the file

    @classmethod
    def open(cls, path: str | Path) -> HfFolder:
        """Raises UserError where it is no such folder."""
        path = Path(path).expanduser()
        if not path.is_dir():
            raise UserError(f"{path} is no folder; give the folder of a Hugging Face checkpoint")
        config = read_json(path / "config.json")
        return cls(path, config, DIFFUSERS_SINGLE if CLASS_NAME in config else SINGLE)

    @property
    def index(self) -> str:
        """Return the name of the index of several files."""
        return f"{self.single}.index.json"

    @cached_property
    def fields(self) -> Fields:
        """The fields of its config, with what it leaves out (`mmjax.hf.class_defaults`)."""
        where = str(self.path / "config.json")
        if CLASS_NAME in self.config:
            return Fields(generator_config(self.config, str(self.config[CLASS_NAME])), where)
        return Fields(complete_config(self.config, where), where)

    def special_token(self, name: str, default: str) -> str:
        """Return the text of a special token of the folder's tokenizer, by its name there."""
        tokenizer = read_json(self.path / "tokenizer_config.json", {})
        extra = tokenizer.get("extra_special_tokens")
        named = tokenizer | (extra if isinstance(extra, dict) else {})
        written = named.get(name) or default
        return written["content"] if isinstance(written, dict) else written

    @property
    def has_weights(self) -> bool:
        """Return whether there are any: a config alone can be planned with."""
        return (self.path / self.index).exists() or (self.path / self.single).exists()

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor by name; as transformers, of the single file where an index is beside it.

        Raises UserError for files that are missing, torn, or not safetensors.
        """
        if (self.path / self.single).exists():
            if (self.path / self.index).exists():
                note(
                    f"{self.path} has both {self.single} and {self.index}; {self.single} is read, as by transformers"
                )
            return read_header(self.path / self.single)
        if (self.path / self.index).exists():
            return self._indexed_tensors()
        raise UserError(
            f"{self.path} has neither {self.single} nor {self.index}; pickled weights are never loaded, so save it "
            "once with save_pretrained(..., safe_serialization=True)"
        )

    def _indexed_tensors(self) -> dict[str, Stored]:
        """Locate the tensors of several files; of a name in two of them, the index says which counts.

        Where the index has a name twice, its last value counts, as in transformers.
        """
        weights = read_json(self.path / self.index).get("weight_map")
        if not isinstance(weights, dict):
            raise UserError(
                f"{self.path / self.index} has no weight_map; save the checkpoint again"
            )
        for name, file in weights.items():
            # As transformers saves them. Anything else, such as ../x or a URL, is not the
            # checkpoint's own file.
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
                raise UserError(
                    f"{self.path / self.index}: {name!r} is in {file!r}, which is no file of the folder"
                )
        headers = {file: read_header(self.path / file) for file in sorted(set(weights.values()))}
        tensors = {name: stored for header in headers.values() for name, stored in header.items()}
        if missing := sorted(set(weights) - set(tensors)):
            raise UserError(
                f"{self.path / weights[missing[0]]} lacks {missing[0]}, which {self.index} says is there; "
                "copy the checkpoint again"
            )
        return tensors | {
            name: headers[file][name] for name, file in weights.items() if name in headers[file]
        }

    def stored(self, key: str) -> Stored:
        """Locate a tensor, or an entry of one. Raises UserError where there is none of this name, or of its dtype."""
        name, entry = split_entry(key)
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{tensor.file}: {name} is of type {tensor.dtype}; known: {', '.join(DTYPES)}"
            )
        if entry is None:
            return tensor
        if not tensor.shape or entry >= tensor.shape[0]:
            raise UserError(
                f"{self.path}: {name} has shape {list(tensor.shape)}, and so no entry {entry}"
            )
        size = tensor.size // tensor.shape[0]
        return replace(tensor, shape=tensor.shape[1:], begin=tensor.begin + entry * size, size=size)

    def read(self, key: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor (its first axis), in its own dtype. Raises UserError where the file ends before them."""
        stored = self.stored(key)
        dtype = DTYPES[stored.dtype]
        start, stop, _ = rows.indices(stored.shape[0]) if stored.shape else (0, 1, 1)
        # Rows of the first axis lie one after the other, so a range of them is one stretch of the
        # file.
        row = math.prod(stored.shape[1:]) * dtype.itemsize
        out = np.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype)
        into = memoryview(out.reshape(-1).view(np.uint8)) if out.size else memoryview(b"")
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.begin + start * row)
            done = 0
            while done < len(into):
                # Straight into the array: no second copy of a tensor in memory. An unbuffered file
                # may give less than asked.
                if not (got := file.readinto(into[done : done + CHUNK])):
                    raise UserError(f"{stored.file} ends inside {key}; copy the checkpoint again")
                done += got
        return out


def split_entry(key: str) -> tuple[str, int | None]:
    """Split the name of an entry of a tensor's first axis, such as `experts.down_proj[3]`; else there is no entry."""
    name, bracket, entry = key.removesuffix("]").partition("[")
    return name, int(entry) if bracket else None


@cache
def note(line: str) -> None:
    """Tell the user, once per process, what a folder says without effect."""
    print(f"note: {line}", file=sys.stderr, flush=True)
