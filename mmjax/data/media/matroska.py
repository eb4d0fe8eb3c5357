"""The header of a Matroska or WebM file: frames, size and rate of its video, from what stands before its first cluster.

A few elements are read, where FFmpeg also opens the codecs and decodes the first frames. What these
elements do not tell, such as the rate of a recording, is left to FFmpeg.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import BinaryIO

from mmjax.data.media.decode import VideoHeader

MATROSKA_START = b"\x1a\x45\xdf\xa3"
SEGMENT, CLUSTER = 0x18538067, 0x1F43B675
INFO, TIMESTAMP_SCALE, DURATION = 0x1549A966, 0x2AD7B1, 0x4489
TRACKS, TRACK, TRACK_UID, TRACK_TYPE, DEFAULT_DURATION = 0x1654AE6B, 0xAE, 0x73C5, 0x83, 0x23E383
VIDEO, WIDTH, HEIGHT = 0xE0, 0xB0, 0xBA
# a projection, which may turn frames, and crops
CHANGED_SIZE = (0x7670, 0x54AA, 0x54BB, 0x54CC, 0x54DD)
TAGS, TAG, TARGETS, TAG_TRACK_UID = 0x1254C367, 0x7373, 0x63C0, 0x63C5
SIMPLE_TAG, TAG_NAME, TAG_TEXT = 0x67C8, 0x45A3, 0x4487
VIDEO_TRACK = 1
MAX_ELEMENT = 1 << 20  # bytes of an element that is read
# of a rate's fraction, as FFmpeg rounds it: 33,366,667 ns are 1001 / 30000 s
MAX_RATE_TERM = 30_000
NANOSECONDS = 10**9

Children = dict[int, list[bytes]]  # contents of elements by id


def read_matroska_header(file: BinaryIO) -> VideoHeader | None:
    """Read the header of a file that begins with `MATROSKA_START`; None where only FFmpeg can tell."""
    with suppress(LookupError, ValueError, struct.error):
        return _header(_before_first_cluster(file))
    return None


def _before_first_cluster(file: BinaryIO) -> Children:
    """Read the elements of the segment that stand before its first cluster, but large ones."""
    elements: Children = {}
    offset = file.seek(0)
    inside = False  # the segment, whose elements follow
    while True:
        file.seek(offset)
        head = file.read(12)
        name, size, length = _element(head, 0)
        offset += length
        if name == SEGMENT and not inside:
            inside = True
            continue
        if name == CLUSTER:
            return elements
        if inside and name in (INFO, TRACKS, TAGS) and size <= MAX_ELEMENT:
            file.seek(offset)
            elements.setdefault(name, []).append(file.read(size))
        offset += size


def _header(segment: Children) -> VideoHeader | None:
    tracks = [_children(track) for track in _children(segment[TRACKS][0])[TRACK]]
    videos = [track for track in tracks if _integer(track[TRACK_TYPE][0]) == VIDEO_TRACK]
    picture = _children(videos[0][VIDEO][0])
    if any(name in picture for name in CHANGED_SIZE):
        return None
    seconds = _tagged_seconds(segment, videos[0][TRACK_UID][0])
    if seconds is None:
        if len(tracks) > 1:  # the segment is as long as the longest of them
            return None
        info = _children(segment[INFO][0])
        scale = _integer(info.get(TIMESTAMP_SCALE, [b"\x0f\x42\x40"])[0])
        (duration,) = struct.unpack(
            ">d" if len(info[DURATION][0]) == 8 else ">f", info[DURATION][0]
        )
        seconds = Fraction(duration) * scale / NANOSECONDS
    # The track's header has nanoseconds a frame, rounded: the fraction that was meant is the
    # nearest with small terms.
    rate = 1 / Fraction(_integer(videos[0][DEFAULT_DURATION][0]), NANOSECONDS).limit_denominator(
        MAX_RATE_TERM
    )
    height, width = (_integer(picture[side][0]) for side in (HEIGHT, WIDTH))
    return VideoHeader(frames=max(1, round(seconds * rate)), height=height, width=width, rate=rate)


def _tagged_seconds(segment: Children, track: bytes) -> Fraction | None:
    """Read how long a track is from its tag DURATION, "00:00:01.668000000"; None where there is none."""
    for tag in (tag for tags in segment.get(TAGS, []) for tag in _children(tags)[TAG]):
        fields = _children(tag)
        targets = _children(fields[TARGETS][0]).get(TAG_TRACK_UID, []) if TARGETS in fields else []
        if track not in targets:
            continue
        for simple in map(_children, fields.get(SIMPLE_TAG, [])):
            if simple[TAG_NAME][0] == b"DURATION":
                return parse_duration(simple[TAG_TEXT][0].decode())
    return None


def parse_duration(text: str) -> Fraction:
    """Parse Matroska's "hours:minutes:seconds" as seconds. Raises ValueError for another text."""
    hours, minutes, seconds = text.rstrip("\0 ").split(":")
    return 3600 * int(hours) + 60 * int(minutes) + Fraction(seconds)


def _children(content: bytes) -> Children:
    elements: Children = {}
    for name, value in _elements(content):
        elements.setdefault(name, []).append(value)
    return elements


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset < len(content):
        name, size, length = _element(content, offset)
        yield name, content[offset + length : offset + length + size]
        offset += length + size


def _element(content: bytes, offset: int) -> tuple[int, int, int]:
    """Read an element's id and size, and how many bytes these take. Raises ValueError for an unknown size.

    Both are numbers of as many bytes as the first one has leading zeros, and one more: 0x42 0x86 is
    an id of two bytes, 0x40 0x02 the size 2, as a size leaves out the bit that ends the zeros.
    """
    # 0x42 is 01000010: one leading zero, bit_length 7, so 2 bytes. Ids keep all of their bits.
    name_length = 9 - content[offset].bit_length()
    size_start = offset + name_length
    size_length = 9 - content[size_start].bit_length()
    end = size_start + size_length
    if name_length > 4 or size_length > 8 or end > len(content):
        raise ValueError("no element")
    name = int.from_bytes(content[offset:size_start], "big")
    largest = (1 << 7 * size_length) - 1
    size = int.from_bytes(content[size_start:end], "big") & largest
    # All ones are a size that was not known when the file was written, but of the segment, whose
    # end is not needed.
    if size == largest and name != SEGMENT:
        raise ValueError("an element of unknown size")
    return name, size, end - offset


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "big")
