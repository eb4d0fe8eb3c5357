"""Read the header of a safetensors file, and accept exactly the files that the safetensors library accepts.

But for one bound: a header of more than `MAX_VALUES`, some 300,000 tensors, would take gigabytes as
Python's objects.

A file is 8 bytes with the header's length, the header (JSON: by tensor its dtype, shape and bytes),
and then the bytes of all tensors, which leave nothing out and lie nowhere twice. The library itself
maps files, and says nothing of where a tensor lies. Its JSON is stricter than Python's: no NaN, no
number beyond float64, no half of a surrogate pair, at most 127 levels.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.errors import UserError

MAX_HEADER = 100_000_000  # bytes, the format's own
MAX_VALUES = 1 << 21  # of a header: names, texts, numbers, lists and objects
MAX_DEPTH = 127  # of objects and lists inside each other
MAX_INTEGER = 2**64 - 1  # of a shape, an offset, and a tensor's bits
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
FIELDS = ("dtype", "shape", "data_offsets")
METADATA = "__metadata__"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file. Shape and dtype are the file's own."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the file's start
    size: int  # bytes


class _Malformed(ValueError):
    """A header that the library refuses: the tensor, or nothing, and why."""


def read_header(path: Path) -> dict[str, Stored]:
    """Locate the tensors of a safetensors file by name. Raises UserError, naming the tensor, where it is malformed."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # opening a pipe would wait for its writer
            raise _Malformed("it is no regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise _Malformed("its header does not fit")
            header = file.read(length)
        # Of a name that comes twice the last counts.
        tensors = dict(_tensor(path, 8 + length, *pair) for pair in _entries(header))
        for name, stored in tensors.items():
            _check_size(name, stored)
        _check_cover(tensors, 8 + length, size)
        return tensors
    except _Malformed as error:
        raise UserError(
            f"{path} is no whole safetensors file: {error}; copy the checkpoint again"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


def _entries(header: bytes) -> list[tuple[str, Any]]:
    """Parse a header to the name and description of every tensor."""
    # Each value but the first stands behind one of these.
    if sum(map(header.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise _Malformed(
            f"its header has more than {MAX_VALUES:,} values, divide it into several files"
        )
    try:
        text = header.decode()
        parsed = json.loads(
            text,
            object_pairs_hook=tuple,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
        )
        if SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()  # fails where one stands alone
        if not isinstance(parsed, tuple):
            raise ValueError("it is no object")
        if _depth(parsed) > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    except (ValueError, RecursionError) as error:
        raise _Malformed(
            f"its header is no JSON of tensors ({str(error) or 'nested too deeply'})"
        ) from None
    metadata = [value for name, value in parsed if name == METADATA]
    if len(metadata) > 1 or not all(value is None or _is_texts(value) for value in metadata):
        raise _Malformed(f"{METADATA} is not one object of texts")
    return [(name, value) for name, value in parsed if name != METADATA]


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for _, text in value)


def _integer(text: str) -> int | float:
    # As in serde_json, what is no 64-bit integer is a float, and so no size.
    return _real(text) if text == "-0" or len(text) > len(str(MAX_INTEGER)) else int(text)


def _real(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _depth(value: Any) -> int:
    """Count the levels of objects and lists in each other."""
    if not isinstance(value, tuple | list):
        return 0
    inner = (pair[1] for pair in value) if isinstance(value, tuple) else value
    return 1 + max(map(_depth, inner), default=0)


def _tensor(path: Path, start: int, name: str, entry: Any) -> tuple[str, Stored]:
    """Read a tensor's description, an object or the list of its fields. start: where the tensors begin in the file."""
    if isinstance(entry, list) and len(entry) == len(FIELDS):
        entry = tuple(zip(FIELDS, entry, strict=True))
    if not isinstance(entry, tuple):
        raise _Malformed(f"{name!r} is described by no object of {', '.join(FIELDS)}")
    known = [(field, value) for field, value in entry if field in FIELDS]
    if len(known) != len(FIELDS) or len(fields := dict(known)) != len(FIELDS):
        raise _Malformed(f"{name!r} does not have {', '.join(FIELDS)} once each")
    dtype, shape, offsets = (fields[field] for field in FIELDS)
    if isinstance(dtype, tuple) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # how serde also writes a name
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Malformed(f"{name!r} has dtype={dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise _Malformed(f"{name!r} has shape={shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _Malformed(f"{name!r} has data_offsets={offsets!r:.200}")
    begin, end = offsets
    return name, Stored(path, dtype, tuple(shape), start + begin, end - begin)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER  # True is an int, too


def _check_size(name: str, stored: Stored) -> None:
    """Raise _Malformed where a tensor has more or fewer bytes than its shape needs."""
    what = f"{name!r} of {stored.dtype} and shape {list(stored.shape)!r:.200}"
    bits = 1
    for factor in (*stored.shape, BITS[stored.dtype]):
        bits *= factor
        if bits > MAX_INTEGER:  # also where a later factor is 0
            raise _Malformed(f"{what} is too large")
    if bits % 8 or stored.size != bits // 8:
        raise _Malformed(f"{what} has {stored.size} bytes")


def _check_cover(tensors: dict[str, Stored], start: int, size: int) -> None:
    """Raise _Malformed unless the tensors are all the bytes from `start` on, each once."""
    for name, stored in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].size)):
        if stored.begin != start:
            raise _Malformed(
                f"{name!r} begins at byte {stored.begin}, not where the tensor before it ends, {start}"
            )
        start += stored.size
    if start != size:
        raise _Malformed(f"it has {size} bytes, and by its header {start}")
