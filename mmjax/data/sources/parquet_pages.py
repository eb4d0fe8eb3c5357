"""Measure what a Parquet column takes when it is unpacked, by the headers of its pages; its footer may claim anything.

A page's header is a Thrift struct in the compact protocol; behind it follow as many bytes as it
says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

# Fields of a page's header, and of the header of its kind inside.
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
_VALUES = 1
MAX_HEADER = 1 << 20  # bytes; of statistics, mostly
_HEAD = 512  # bytes of the first read
# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_INTEGERS = 4, 5, 6

Struct = dict[int, Any]  # by field: an int, another struct, or None for what is not needed


class Unpacked(NamedTuple):
    """The contents of a column chunk."""

    size: int  # bytes of its pages, unpacked
    page: int  # bytes of the largest
    values: int  # of its data pages, nulls too
    dictionary: int  # bytes of its dictionary, which any of the values may refer to; 0: none


def measure_chunk(file: BinaryIO, start: int, size: int) -> Unpacked:
    """Add up the pages of a column chunk of `size` bytes. Raises ValueError where they are damaged."""
    pages = list(_page_headers(file, start, start + size))
    data = [page[field] for page in pages for field in (_DATA, _DATA_V2) if field in page]
    return Unpacked(
        size=sum(_count(page, _UNCOMPRESSED) for page in pages),
        page=max(
            (max(_count(page, _UNCOMPRESSED), _count(page, _COMPRESSED)) for page in pages),
            default=0,
        ),
        values=sum(_count(header, _VALUES) for header in data),
        dictionary=sum(_count(page, _UNCOMPRESSED) for page in pages if _DICTIONARY in page),
    )


def _count(fields: Any, field: int) -> int:
    """Return a field that is a number of bytes or values. Raises ValueError where it is not there."""
    value = fields.get(field) if isinstance(fields, dict) else None
    if type(value) is not int or value < 0:
        raise ValueError("the header of a page is damaged")
    return value


def _page_headers(file: BinaryIO, start: int, stop: int) -> Iterator[Struct]:
    while start < stop:
        header, length = _page_header(file, start, stop)
        yield header
        start += length + _count(header, _COMPRESSED)


def _page_header(file: BinaryIO, start: int, stop: int) -> tuple[Struct, int]:
    """Read the header at a byte, and how long it is."""
    size = _HEAD
    while True:
        file.seek(start)
        content = file.read(min(size, stop - start))
        try:
            return _struct(content, 0)
        except IndexError:
            if len(content) < size or size >= MAX_HEADER:
                raise ValueError(f"the header of the page at byte {start} is not whole") from None
            size *= 8


def _struct(content: bytes, offset: int) -> tuple[Struct, int]:
    """Parse a struct, and where it ends. Raises IndexError where it goes on behind the content."""
    fields: Struct = {}
    field = 0
    # 4 bits of what is added to the last field's number, and 4 of the type
    while head := content[offset]:
        offset += 1
        if head >> 4:
            field += head >> 4
        else:
            field, offset = _integer(content, offset)
        fields[field], offset = _value(content, offset, head & 15)
    return fields, offset + 1


def _value(content: bytes, offset: int, kind: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, offset
    if kind in _INTEGERS:
        return _integer(content, offset)
    if kind == _STRUCT:
        return _struct(content, offset)
    if kind == _BINARY:
        size, offset = _varint(content, offset)
        return None, offset + size
    if kind in (_BYTE, _DOUBLE):
        return None, offset + (1 if kind == _BYTE else 8)
    raise ValueError(f"a page's header has a field of type {kind}")


def _integer(content: bytes, offset: int) -> tuple[int, int]:
    """Parse a number of zigzag: 0, -1, 1, -2, ..."""
    number, offset = _varint(content, offset)
    return number >> 1 ^ -(number & 1), offset


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Parse a number of 7 bits a byte, the lowest first, all but the last with the highest bit set."""
    number = shift = 0
    while (byte := content[offset]) & 0x80:
        number |= (byte & 0x7F) << shift
        shift += 7
        offset += 1
    return number | byte << shift, offset + 1
