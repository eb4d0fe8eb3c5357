"""Headers of safetensors files: those that the safetensors library reads are read alike, and no others."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from mmjax.errors import UserError
from mmjax.hf.folder import HfFolder
from mmjax.hf.safetensors_header import BITS, MAX_VALUES, read_header

DATA = np.arange(1, 3, dtype=np.float32).tobytes()
ONE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
MAX = 2**64 - 1


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]", more: str = "") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


def one(*args: str, size: int = 4, **fields: str) -> tuple[str, int]:
    return f'{{"a":{entry(*args, **fields)}}}', size


def two(first: str, second: str, size: int = 8) -> tuple[str, int]:
    return f'{{"a":{entry(offsets=first)},"b":{entry(offsets=second)}}}', size


def unknown(value: str) -> tuple[str, int]:
    return one(more=f',"x":{value}')


def with_metadata(value: str) -> tuple[str, int]:
    return f'{{"__metadata__":{value},"a":{entry()}}}', 4


EMPTY = entry(shape="[0]", offsets="[%d,%d]")
HEADERS: dict[str, tuple[str | bytes, int]] = {  # text, and bytes of data behind it
    "plain": (ONE, 4),
    "space before": (" \n\t\r" + ONE, 4),
    "space behind": (ONE + " \n\t\r", 4),
    "null behind": (ONE + "\0", 4),
    "vertical tab behind": (ONE + "\x0b", 4),
    "byte order mark": ("\ufeff" + ONE, 4),
    "UTF-16": (ONE.encode("utf-16"), 4),
    "UTF-16 without a mark": (ONE.encode("utf-16-le"), 4),
    "not UTF-8": (ONE.encode().replace(b"a", b"\xff", 1), 4),
    "a surrogate in UTF-8": (ONE.encode().replace(b"a", b"\xed\xa0\x80", 1), 4),
    "no tensors": ("{}", 0),
    "no tensors, but bytes": ("{}", 1),
    "no JSON": ("pickle", 4),
    "nothing": ("", 0),
    "a list": ("[]", 0),
    "null": ("null", 0),
    "a text": ('"ab"', 0),
    "a number": ("12", 0),
    "comma at the end": (ONE.replace("}}", "},}"), 4),
    "comment": (ONE.replace("{", "{/**/", 1), 4),
    "two objects": (ONE + ONE, 4),
    "cut": (ONE[:-1], 4),
    "description null": ('{"a":null}', 0),
    "description a number": ('{"a":1}', 0),
    "description empty": ('{"a":{}}', 0),
    "description a list": ('{"a":["F32",[1],[0,4]]}', 4),
    "description a list of two": ('{"a":["F32",[1]]}', 4),
    "description a list of four": ('{"a":["F32",[1],[0,4],1]}', 4),
    "no dtype": (ONE.replace('"dtype":"F32",', ""), 4),
    "no shape": (ONE.replace('"shape":[1],', ""), 4),
    "no offsets": (ONE.replace(',"data_offsets":[0,4]', ""), 4),
    "a field twice": (ONE.replace('"shape"', '"shape":[1],"shape"'), 4),
    "dtype twice": (ONE.replace('"dtype"', '"dtype":"F32","dtype"'), 4),
    "unknown field": unknown('{"y":[1,2.5,null,true]}'),
    "unknown field twice": unknown('1,"x":2'),
    "unknown NaN": unknown("NaN"),
    "unknown Infinity": unknown("-Infinity"),
    "unknown number out of range": unknown("1e999"),
    "unknown integer out of range": unknown("9" * 400),
    "unknown long integer": unknown("9" * 300),
    "unknown long fraction": unknown("0." + "9" * 5000),
    "unknown leading zero": unknown("01"),
    "escaped names": (ONE.replace('"a"', '"\\u0061"').replace("dtype", "d\\u0074ype"), 4),
    "surrogate pair": (ONE.replace('"a"', '"\\ud83d\\ude00"'), 4),
    "half a pair": (ONE.replace('"a"', '"\\ud800"'), 4),
    "half a pair inside": unknown('["\\udc00"]'),
    "half a pair before a letter": unknown('"\\uD800\\u0041"'),
    "line break in a name": (ONE.replace('"a"', '"a\n"'), 4),
    "escaped line break in a name": (ONE.replace('"a"', '"a\\nb"').replace("[1]", "[2]"), 4),
    "empty name": (ONE.replace('"a"', '""'), 4),
    "name twice, the same": (f'{{"a":{entry()},"a":{entry()}}}', 4),
    "name twice, the last right": (f'{{"a":{entry(shape="[9]", offsets="[7,8]")},"a":{entry()}}}', 4),
    "name twice, the last wrong": (f'{{"a":{entry()},"a":{entry(shape="[9]", offsets="[7,8]")}}}', 4),
    "name twice, the first no tensor": (f'{{"a":3,"a":{entry()}}}', 4),
    "name twice, one behind the other": (f'{{"a":{entry()},"a":{entry(offsets="[4,8]")}}}', 8),
    "metadata": with_metadata('{"format":"pt"}'),
    "metadata null": with_metadata("null"),
    "metadata a list": with_metadata("[]"),
    "metadata a text": with_metadata('"x"'),
    "metadata of numbers": with_metadata('{"a":1}'),
    "metadata of null": with_metadata('{"a":null}'),
    "metadata key twice": with_metadata('{"a":"1","a":"2"}'),
    "metadata twice": with_metadata('{},"__metadata__":{}'),
    "metadata null twice": with_metadata('null,"__metadata__":null'),
    "metadata escaped": (f'{{"\\u005f_metadata__":{{"a":1}},"a":{entry()}}}', 4),
    "metadata alone": ('{"__metadata__":{}}', 0),
    "dtype unknown": one('"F128"'),
    "dtype in small letters": one('"f32"'),
    "dtype null": one("null"),
    "dtype a list": one('["F32"]'),
    "dtype a number": one("10"),
    "dtype an object": one('{"F32":null}'),
    "dtype an object with a value": one('{"F32":1}'),
    "half a byte": one('"F4"', "[1]", "[0,1]", size=1),
    "six bits": one('"F6_E2M3"', "[1]", "[0,1]", size=1),
    "shape true": one(shape="[true]"),
    "shape 1.0": one(shape="[1.0]"),
    "shape 1e0": one(shape="[1e0]"),
    "shape -1": one(shape="[-1]"),
    "shape -0": one(shape="[-0]", offsets="[0,0]", size=0),
    "shape a text": one(shape='["1"]'),
    "shape a number": one(shape="1"),
    "shape null": one(shape="null"),
    "shape in itself": one(shape="[[1]]"),
    "no axes": one(shape="[]"),
    "a hundred axes": one(shape=f"[{','.join(['1'] * 100)}]"),
    "empty": one(shape="[0]", offsets="[0,0]", size=0),
    "empty, then too large": one(shape=f"[0,{MAX},{MAX}]", offsets="[0,0]", size=0),
    "too large, then empty": one(shape=f"[{MAX},{MAX},0]", offsets="[0,0]", size=0),
    "too large by its elements": one(shape=f"[{2**32},{2**32}]", offsets="[0,0]", size=0),
    "too large by its bits": one(shape=f"[{2**62}]", offsets="[0,0]", size=0),
    "shape beyond 64 bits": one(shape=f"[{MAX + 1},0]", offsets="[0,0]", size=0),
    "shape of more bytes": one(shape="[2]"),
    "shape of fewer bytes": one(shape="[1]", offsets="[0,8]", size=8),
    "offsets negative": one(offsets="[-4,0]"),
    "offsets in reverse": one(offsets="[4,0]"),
    "offsets false": one(offsets="[false,4]"),
    "offsets of fractions": one(offsets="[0.0,4.0]"),
    "offsets of one": one(offsets="[4]"),
    "offsets of three": one(offsets="[0,4,4]"),
    "offsets of texts": one(offsets='["0","4"]'),
    "offsets an object": one(offsets='{"0":0,"1":4}'),
    "offsets null": one(offsets="null"),
    "offsets -0": one(offsets="[-0,4]"),
    "offsets 00": one(offsets="[00,4]"),
    "offsets +0": one(offsets="[+0,4]"),
    "offsets huge": one(offsets=f"[0,{MAX}]"),
    "offsets beyond 64 bits": one(offsets=f"[0,{MAX + 5}]"),
    "hole at the start": one(offsets="[4,8]", size=8),
    "bytes behind": one(size=5),
    "too few bytes": one(size=3),
    "two": two("[0,4]", "[4,8]"),
    "two in reverse": two("[4,8]", "[0,4]"),
    "two in one place": two("[0,4]", "[0,4]", 4),
    "overlap": two("[0,4]", "[2,6]", 6),
    "hole": two("[0,4]", "[5,9]", 9),
    "empty between": (f'{{"a":{entry()},"z":{EMPTY % (4, 4)},"b":{entry(offsets="[4,8]")}}}', 8),
    "empty at the start": (f'{{"a":{entry()},"z":{EMPTY % (0, 0)}}}', 4),
    "empty inside another": (f'{{"a":{entry()},"z":{EMPTY % (2, 2)}}}', 4),
    "empty behind the end": (f'{{"a":{entry()},"z":{EMPTY % (8, 8)}}}', 4),
    **{
        f"dtype {dtype}": one(f'"{dtype}"', "[4]", f"[0,{4 * bits // 8}]", size=4 * bits // 8)
        for dtype, bits in BITS.items()
    },
    **{f"{n} lists deep": unknown("[" * n + "]" * n) for n in (100, 125, 126, 5000)},
    **{f"{n} objects deep": unknown('{"k":' * n + "1" + "}" * n) for n in (125, 126)},
}  # fmt: skip
LENGTHS = (
    -1,
    0,
    1,
    2,
    len(ONE) - 1,
    len(ONE) + 1,
    len(ONE) + 4,
    len(ONE) + 5,
    10**8,
    10**8 + 1,
    2**40,
    2**63,
)


def write(path: Path, header: str | bytes, size: int, length: int | None = None) -> None:
    encoded = header if isinstance(header, bytes) else header.encode()
    length = len(encoded) if length is None else length
    path.write_bytes(struct.pack("<Q", length % 2**64) + encoded + (DATA * (size // 8 + 1))[:size])


def refusal(path: Path) -> str:
    """The line with which mmjax refuses a file; empty where it reads it."""
    try:
        read_header(path)
    except UserError as error:
        return str(error)
    return ""


def compare(path: Path, what: object) -> bool:
    """Compare what the library and mmjax make of a file; return whether they read it."""
    content = path.read_bytes()
    try:
        with safe_open(path, "np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            library = {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
            values = {
                name: opened.get_tensor(name).tobytes()
                for name, (dtype, shape) in library.items()
                if dtype == "F32" and max(shape, default=0) < 2**32 and len(shape) < 32
            }
    except SafetensorError:
        message = refusal(path)
        assert message.startswith(f"{path} "), what
        assert "\n" not in message, what
        return False
    tensors = read_header(path)
    assert {name: (stored.dtype, stored.shape) for name, stored in tensors.items()} == library, what
    for name, value in values.items():
        assert content[tensors[name].begin :][: tensors[name].size] == value, what
    return True


def test_every_kind_of_header_is_read_or_refused_as_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    accepted = set()
    for name, (header, size) in HEADERS.items():
        write(path, header, size)
        if compare(path, name):
            accepted.add(name)
    for length in LENGTHS:
        write(path, ONE, 4, length)
        assert not compare(path, f"length {length}")
    for content in (b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", 1) + b"{"):
        path.write_bytes(content)
        assert not compare(path, content)
    assert 40 < len(accepted) < len(HEADERS) - 70


def test_spoiled_headers_are_read_or_refused_as_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes = {"a.weight": [2, 3], "b": [], "c.bias": [4], "none": [0, 7], "d": [1, 1, 2]}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    whole = json.dumps(header)
    pieces = [
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "0",
        "1",
        "-",
        ".",
        "e",
        "\\u0041",
        "\\ud800",
        " ",
        "null",
        "true",
    ]
    accepted = 0
    for seed in range(250):
        pick = random.Random(seed)
        text = whole
        for _ in range(pick.choice([1, 1, 1, 2])):
            first, last = sorted(pick.choices(range(len(text)), k=2))
            last = min(last, first + pick.choice([0, 1, 1, 2, 5]))
            text = text[:first] + pick.choice([*pieces, text[first:last] * 2, ""]) + text[last:]
        write(path, text, begin + pick.choice([0, 0, 0, 0, -1, 1, 4]))
        accepted += compare(path, (seed, text))
    assert 6 < accepted < 220


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "has no weight_map"),
        ({"a": 1}, r"'a' is in 1, which is no file of the folder"),
        ({"a": ["x"]}, "no file of the folder"),
        ({"a": None}, "no file of the folder"),
        ({"a": ""}, "no file of the folder"),
        ({"a": ".."}, "no file of the folder"),
        ({"a": "../x.safetensors"}, "no file of the folder"),
        ({"a": "/etc/passwd"}, "no file of the folder"),
        ({"a": "http://127.0.0.1/x.safetensors"}, "no file of the folder"),
        ({"a": "pipe:touch PWNED"}, "cannot be read: No such file"),
        ({"a": "x\0"}, "cannot be read"),
        ({"a": "gone.safetensors"}, "gone.safetensors cannot be read: No such file"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "one.safetensors lacks b, which"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(
    tmp_path: Path, weights: object, message: str
) -> None:
    write(tmp_path / "one.safetensors", ONE, 4)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(UserError, match=message) as refused:
        _ = HfFolder.open(tmp_path).tensors
    assert "\n" not in str(refused.value)


def test_of_a_name_in_two_files_the_index_says_which_counts_and_types_that_nothing_reads_do_no_harm(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", ONE, 4)
    write(tmp_path / "ids.safetensors", *one('"I64"', "[1]", "[0,8]", size=8))
    (tmp_path / "ids.safetensors").write_bytes(
        (tmp_path / "ids.safetensors").read_bytes().replace(b'"a"', b'"i"')
    )
    (tmp_path / "config.json").write_text("{}")
    for name in ("one", "two"):
        weights = {"a": f"{name}.safetensors", "i": "ids.safetensors", "b": "two.safetensors"}
        (tmp_path / "two.safetensors").write_bytes(b"")
        write(tmp_path / "two.safetensors", *two("[0,4]", "[4,8]"))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        folder = HfFolder.open(tmp_path)
        assert folder.stored("a").file.stem == name
        assert folder.tensors["i"].dtype == "I64"
        with pytest.raises(UserError, match=r"ids.safetensors: i is of type I64"):
            folder.read("i")


def test_a_pipe_in_the_place_of_a_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model\.safetensors is no whole safetensors file: it is no regular file"
    ):
        read_header(tmp_path / "model.safetensors")


def test_a_header_of_too_many_values_is_refused_before_it_is_parsed_and_one_long_text_is_not(
    tmp_path: Path,
) -> None:
    """Each value takes up to 200 bytes, and a text what it is."""
    for name, text in {
        "values": "[" + "[]," * (MAX_VALUES // 2) + "0]",
        "text": '"' + "a" * 3_000_000 + '"',
    }.items():
        header = f'{{"__metadata__":{{"a":{text}}}}}'.encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_header(tmp_path / "text") == {}
    with pytest.raises(UserError, match=r"its header has more than 2,097,152 values"):
        read_header(tmp_path / "values")
