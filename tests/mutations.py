"""A thousand inputs that somebody or something has spoiled: `python tests/mutations.py --first 0 --count 1000`.

Every mutation is a pure function of (seed, number): what it is of, in which way it is spoiled, and
the random numbers of that way. `mutated.py` has the things that are spoiled, and judges what mmjax
makes of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Random = np.random.Generator
SEED = 2026
SHARES = {
    "image": 19,
    "audio": 15,
    "records": 26,
    "index": 10,
    "cache": 10,
    "run": 5,
    "config": 7,
    "words": 4,
    "checkpoint": 4,
}


@dataclass(frozen=True)
class Mutation:
    """One spoiled input."""

    seed: int
    number: int
    kind: str  # of SHARES

    def random(self) -> Random:
        """The same numbers whenever they are asked for."""
        return np.random.default_rng((self.seed, self.number))


def mutation(number: int, seed: int = SEED) -> Mutation:
    """The mutation of this number."""
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    hundred, place = divmod(number, len(kinds))
    order = np.random.default_rng((seed, 1 << 32, hundred)).permutation(len(kinds))
    return Mutation(seed, number, kinds[order[place]])


# --------------------------------------------------------------------------------------------------
# bytes

HEADS = (
    b"\xff\xd8\xff\xe0\0\x10JFIF\0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"GIF89a\1\0\1\0", b"BM", b"II*\0\x08\0\0\0",
    b"MM\0*", b"RIFF\xff\xff\xff\x7fWEBPVP8 ", b"RIFF\x24\0\0\0WAVEfmt ", b"fLaC\0\0\0\x22", b"OggS\0\2",
    b"ID3\4\0\0\0\0\0\x7f", b"\xff\xfb\x90\x64", b"PK\3\4", b"\x1f\x8b\x08", b"PAR1", b"\x93NUMPY\1\0", b"{}", b"[",
    b"%PDF-1.7", b"\0" * 64,
)  # fmt: skip


def _flip(data: bytes, rng: Random) -> bytes:
    found = bytearray(data)
    for at in rng.integers(len(data), size=int(rng.choice([1, 1, 2, 8]))) if data else ():
        found[at] ^= 1 << int(rng.integers(8))
    return bytes(found)


def _flip_head(data: bytes, rng: Random) -> bytes:
    return _flip(data[:64], rng) + data[64:]


def _noise(data: bytes, rng: Random) -> bytes:
    start, length = int(rng.integers(len(data) or 1)), int(rng.integers(1, 64))
    return data[:start] + rng.bytes(length)[: len(data) - start] + data[start + length :]


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: int(rng.integers(len(data) or 1))]


def _lengthen(data: bytes, rng: Random) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 2000)))


def _hole(data: bytes, rng: Random) -> bytes:
    start, length = int(rng.integers(len(data) or 1)), int(rng.integers(1, 200))
    return data[:start] + data[start + length :]


def _head(data: bytes, rng: Random) -> bytes:
    head = HEADS[int(rng.integers(len(HEADS)))]
    return head + data[len(head) :]


def _zeros(data: bytes, rng: Random) -> bytes:
    start = int(rng.integers(len(data) or 1))
    return data[:start] + bytes(len(data) - start)


BYTES: Mapping[str, Callable[[bytes, Random], bytes]] = {
    "flip": _flip,
    "flip_head": _flip_head,
    "noise": _noise,
    "cut": _cut,
    "lengthen": _lengthen,
    "hole": _hole,
    "head": _head,
    "zeros": _zeros,
    "empty": lambda data, rng: b"",
}


def spoiled_bytes(
    data: bytes, rng: Random, ways: Sequence[str] = tuple(BYTES)
) -> tuple[str, bytes]:
    """The way, and what it makes of a file's bytes."""
    way = str(rng.choice(ways))
    return way, BYTES[way](data, rng)


# --------------------------------------------------------------------------------------------------
# records as JSON

VALUES = (
    None, True, False, 0, -1, 3, 1.5, -2.5e300, 10**18, 10**400, float("nan"), float("inf"), "", "text", "<image>",
    "<audio>", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "data:image/png;base64,!!", "a\0b", "\ud800",
    "x" * 5000, "missing.png", [], {}, [[]], [None], ["text"], [1, 2], {"a": 1}, {"path": 5}, {"bytes": "x"},
    {"url": None}, [{}],
    [{"type": "image"}], {"data": "AAAA"}, -(10**30), "\u202e\ufeff", "</s>",
)  # fmt: skip


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are, inner ones too."""
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def spoiled_record(record: dict[str, Any], rng: Random) -> tuple[str, bytes]:
    """The way, and one record as a line of JSON, or nearly."""
    tree = json.loads(json.dumps(record))
    places = [place for place in _places(tree) if place]
    *above, key = places[int(rng.integers(len(places)))]
    parent = _at(tree, above)
    way = str(
        rng.choice(
            ["value", "value", "drop", "rename", "nest", "double", "deep", "utf8", "number", "text"]
        )
    )
    if way == "drop":
        del parent[key]
    elif way == "rename" and isinstance(parent, dict):
        parent[str(key)[:-1] + chr(97 + int(rng.integers(26)))] = parent.pop(key)
    elif way == "nest":
        parent[key] = [{key: parent[key]}, [parent[key]], {"value": parent[key]}][
            int(rng.integers(3))
        ]
    elif way == "double" and isinstance(parent, list):
        parent.append(parent[key])
    else:
        parent[key] = VALUES[int(rng.integers(len(VALUES)))]
    line = json.dumps(tree, ensure_ascii=bool(rng.integers(2))).encode("utf-8", "surrogatepass")
    if way == "deep":
        line = line[:-1] + b', "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif way == "utf8":
        line = line.replace(b"a", b"\xff\xfe", 1)
    elif way == "number":
        line = re.sub(
            rb'"[^"]*"',
            [b"1e999", b"-", b"9" * 6000, b"Infinity", b"0x10"][int(rng.integers(5))],
            line,
            count=1,
        )
    elif way == "text":
        line = [
            b"null",
            b'"text"',
            b"[1]",
            b"5",
            b"{",
            b"}{",
            b"\0",
            line[: len(line) // 2],
            b"{}",
        ][int(rng.integers(9))]
    return way, line


# --------------------------------------------------------------------------------------------------
# config files

NUMBERS = ("0", "-1", "1", "2", "3", "7", "1e9", "10**9", "10**30", "2**31", "float('nan')", "float('inf')", "-0.5",
           "1e-30", "True", "None", "'4'", "(1, 2)", "{}", "'none'")  # fmt: skip
TEXTS = ("0", "-1", "1", "2", "3", "7", "1e9", "1000000000", "9" * 40, "nan", "inf", "-0.5", "1e-30", "true", "none",
         "text", "(1,2)", "{}", "", "()", "1,2,3", '"', "a.b", "=", "\0", "\ud800")  # fmt: skip


def _one(found: Sequence[Any], rng: Random) -> Any:
    return found[int(rng.integers(len(found)))]


def spoiled_source(text: str, rng: Random) -> tuple[str, str]:
    """The way, and the text of a config file."""
    way = str(
        rng.choice(
            ["number", "number", "number", "key", "class", "line", "character", "text", "bytes"]
        )
    )
    lines = text.splitlines(keepends=True)
    number, key, kind = (
        [m.span() for m in re.finditer(pattern, text) if m.start() > text.index("def config")]
        for pattern in (r"(?<==)-?\d[\d_.e]*", r"\b\w+(?==)", r"\b[A-Z]\w+(?=\()")
    )
    if way == "number":
        start, stop = _one(number, rng)
        return way, text[:start] + _one(NUMBERS, rng) + text[stop:]
    if way in ("key", "class"):
        spans = key if way == "key" else kind
        (start, stop), (other, end) = _one(spans, rng), _one(spans, rng)
        return way, text[:start] + text[other:end] + text[stop:]
    at = int(rng.integers(len(lines)))
    if way == "line":
        return way, "".join(lines[:at] + lines[at + 1 :])
    if way == "text":
        return way, text.replace(lines[at], lines[at] * 2, 1)
    if way == "bytes":
        return way, spoiled_bytes(text.encode(), rng, ("flip", "cut", "noise"))[1].decode("latin-1")
    start = int(rng.integers(len(text)))
    return way, text[:start] + _one("()[]{}'\",:=\t\0é#\\", rng) + text[
        start + int(rng.integers(2)) :
    ]


def spoiled_words(words: Sequence[str], rng: Random) -> list[str]:
    """Some words `a.b=value` for a config that has these."""
    found = []
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        key, _, value = _one(words, rng).partition("=")
        key, value = key.strip(), value.strip()
        way = int(rng.integers(6))
        if way == 0:
            at = int(rng.integers(len(key)))
            key = key[:at] + chr(97 + int(rng.integers(26))) + key[at + 1 :]
        elif way == 1:
            key = key.rpartition(".")[0] if rng.integers(2) else f"{key}.more"
        elif way == 2:
            value = _one(words, rng).partition("=")[2].strip()
        else:
            value = _one(TEXTS, rng)
        found.append(f"{key}={value}" if way != 5 or rng.integers(3) else key)
    return found


# --------------------------------------------------------------------------------------------------
# running


def main(argv: Sequence[str] | None = None) -> int:
    """Run some mutations and print what became of them; 1 where there is a fault of mmjax's."""
    from mutated import Outcome, tried  # which has the data, and imports this file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--kind", choices=SHARES, help="only these")
    args = parser.parse_args(argv)
    wanted = [mutation(number, args.seed) for number in range(args.first, args.first + args.count)]
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in SHARES}
    for one, outcome in tried([of for of in wanted if args.kind in (None, of.kind)]):
        outcomes[one.kind].append(outcome)
        if outcome.verdict == "fault":
            print(f"FAULT {one.number} ({one.kind}, {outcome.way}): {outcome.told}", flush=True)
    print(table(outcomes))
    return int(any(outcome.verdict == "fault" for of in outcomes.values() for outcome in of))


def table(outcomes: Mapping[str, Sequence[Any]]) -> str:
    """What became of the mutations of each kind."""
    rows = [("kind", "mutations", "accepted", "refused", "samples bad", "faults")]
    total = np.zeros(5, int)
    for kind, of in outcomes.items():
        verdicts = [
            sum(o.verdict == verdict for o in of) for verdict in ("accepted", "refused", "fault")
        ]
        numbers = np.array([len(of), *verdicts[:2], sum(o.listed for o in of), verdicts[2]])
        total += numbers
        rows.append((kind, *map(str, numbers)))
    rows.append(("all", *map(str, total)))
    return "\n".join("  ".join(cell.rjust(11) for cell in row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
