"""Decode audio files to mono samples, and read their lengths from headers alone (M4A: `soundtrack`).

WAV, FLAC, Ogg (Vorbis, Opus) and MP3; channels averaged, then resampled by soxr, as in
transformers' `load_audio`. Faults that libsndfile ignores are errors: more samples than the header
claims, lost pages, other samples than those of a checksum.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile
import soxr

from mmjax.config import MediaLimits
from mmjax.data.media.decode import FileReader, call_decoder, check_media_size, read_head
from mmjax.data.media.mp3 import decode_mp3, is_mp3, read_mp3_header
from mmjax.errors import BadMedia

# bytes at the end of a FLAC in which its last frame is, or more where its header says so
LAST_FRAME = 1 << 16
CLIP_STARTS = {b"fLaC": "FLAC", b"OggS": "OGG"}
# frames; libsndfile's length of a stream whose header was written before its end was known
UNKNOWN_LENGTH = 1 << 62
UNKNOWN_SIZE = 0x7FFF0000  # bytes; a WAV header claims at least this for the same reason
BLOCK = 1 << 20  # samples of all channels that are decoded at a time
MIN_SECONDS = 0.001  # a shorter clip is a mistake


class ClipHeader(NamedTuple):
    """Length and sample rate of a clip, from its header."""

    frames: int  # samples of each channel
    sample_rate: int  # Hz


def read_clip_header(file: BinaryIO) -> ClipHeader:
    """Read length and sample rate of a clip from the header of a seekable file (for Ogg also from its end).

    Raises BadMedia for an unknown format, an unknown length, and an empty clip.
    """
    reader = FileReader(file)
    return check_clip_header(call_decoder(reader, _clip_kind(reader), _clip_facts))


def check_clip_header(facts: ClipHeader) -> ClipHeader:
    """Return a header. Raises BadMedia for an unknown length, and an empty clip."""
    if facts.frames >= UNKNOWN_LENGTH:
        raise BadMedia("it does not say its length; encode it again")
    if facts.frames < 1 or facts.sample_rate < 1:
        raise BadMedia("a clip of 0 samples is empty")
    if facts.frames < MIN_SECONDS * facts.sample_rate:
        raise BadMedia(
            f"a clip of {facts.frames} samples at {facts.sample_rate} Hz is shorter than {1e3 * MIN_SECONDS:g} ms"
        )
    return facts


def resampled_length(facts: ClipHeader, sample_rate: int) -> int:
    """Return a clip's length in samples after resampling to that rate."""
    return -(-facts.frames * sample_rate // facts.sample_rate)


def decode_clip(data: bytes, sample_rate: int, limits: MediaLimits = MediaLimits()) -> np.ndarray:
    """Decode a clip's file to mono samples at that rate, float32 `[clip_samples]` in about -1..1.

    Raises BadMedia as `read_clip_header`, for a clip beyond the limits, and for a file that is
    truncated, corrupt or holds NaN.
    """
    facts = read_clip_header(io.BytesIO(data))
    check_media_size("audio", facts, limits)
    reader = FileReader(io.BytesIO(data))
    kind = _clip_kind(reader)
    if kind == "OGG":
        _check_ogg_pages(data)
    return call_decoder(reader, kind, partial(_mono, facts=facts, sample_rate=sample_rate))


def resample(blocks: Iterable[np.ndarray], facts: ClipHeader, sample_rate: int) -> np.ndarray:
    """Resample blocks of mono samples to that rate, float32 of the length that `resampled_length` says.

    The samples are those of `soxr.resample` of all blocks at once.
    """
    samples = resampled_length(facts, sample_rate)
    wave = np.zeros(samples, np.float32)
    stream = None
    if facts.sample_rate != sample_rate:
        stream = soxr.ResampleStream(
            facts.sample_rate, sample_rate, 1, dtype="float32", quality="HQ"
        )
    position = 0
    # The last block is empty: only it ends the stream.
    for block, last in chain(
        ((block, False) for block in blocks), [(np.empty(0, np.float32), True)]
    ):
        block = np.ascontiguousarray(block, np.float32)
        resampled = block if stream is None else stream.resample_chunk(block, last)
        resampled = resampled[: samples - position]
        wave[position : position + len(resampled)] = resampled
        position += len(resampled)
    return wave


def _clip_kind(reader: FileReader) -> str:
    head = read_head(reader)
    kind = next((kind for start, kind in CLIP_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        kind = "WAV"
    elif is_mp3(head):
        kind = "MP3"
    if kind is None:
        raise BadMedia("no clip of a known format (WAV, FLAC, Ogg, MP3, M4A)")
    return kind


def _clip_facts(reader: FileReader, kind: str) -> ClipHeader:
    if kind == "MP3":
        return ClipHeader._make(read_mp3_header(reader))
    if kind == "WAV":
        _check_wav_chunks(reader)
    reader.seek(0)
    with soundfile.SoundFile(reader) as clip:
        # libsndfile corrects a wrong data size by itself and only logs it.
        if kind == "WAV" and (
            log := re.search(r"^data : (\d+) \(should be (\d+)\)", clip.extra_info, re.MULTILINE)
        ):
            claimed, actual = map(int, log.groups())
            if actual < claimed < UNKNOWN_SIZE:
                raise BadMedia(f"truncated WAV: {actual} of {claimed} bytes of samples")
        return ClipHeader(clip.frames, clip.samplerate)


def _check_wav_chunks(reader: FileReader) -> None:
    """Raise BadMedia for a WAV with bytes behind its samples that are no chunk: a writer did not update its header."""
    file_size = reader.seek(0, io.SEEK_END)
    # behind RIFF, a size and WAVE; a chunk is name (4 bytes), size (4), content, padded to even
    # length
    position = 12
    samples = 0
    while position + 8 <= file_size:
        name, size = struct.unpack("<4sI", reader.start(8, position))
        if samples and (
            position + 8 + size > file_size or not (name.isascii() and name.decode().isprintable())
        ):
            if any(reader.start(1024, position)):  # zeros are padding
                raise BadMedia(
                    f"a WAV that claims {samples} bytes of samples, and {file_size - position} more bytes follow them"
                )
            return
        if name == b"data":
            if size >= UNKNOWN_SIZE:
                return
            samples = size
        position += 8 + size + size % 2


def _mono(reader: FileReader, kind: str, facts: ClipHeader, sample_rate: int) -> np.ndarray:
    """Decode a clip block by block, its channels averaged, and resample it."""
    reader.seek(0)
    count = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal count
        for block in decode_mp3(reader.read()) if kind == "MP3" else _blocks(reader, kind):
            count += len(block)
            if not np.isfinite(block).all():
                raise BadMedia("it holds samples that are not finite")
            yield block
            if count > facts.frames:
                return

    wave = resample(counted(), facts, sample_rate)
    if count != facts.frames:
        raise BadMedia(f"truncated {kind}: {count} of {facts.frames} samples")
    return wave


def _blocks(reader: FileReader, kind: str) -> Iterator[np.ndarray]:
    head = reader.start(42)
    reader.seek(0)
    with soundfile.SoundFile(reader) as clip:
        read = partial(clip.read, max(1, BLOCK // clip.channels), always_2d=True)
        blocks = _checked_flac(read, head) if kind == "FLAC" else _read_all(read)
        for block in blocks:
            yield block.T.mean(axis=0) if clip.channels > 1 else block[:, 0]
    if kind == "FLAC":
        _check_flac_end(reader, head)


def _read_all(read: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    while len(block := read("float32")):
        yield block


def _checked_flac(read: Callable[[str], np.ndarray], head: bytes) -> Iterator[np.ndarray]:
    """Yield the samples of a FLAC, as libsndfile converts them, float32 `[samples, channels]`.

    Raises BadMedia where they are not those of its checksum (MD5 of all samples), which libFLAC
    alone does not compare.
    head: "fLaC", 4 bytes, 10 of sizes, 20 bits of the rate, 3 of channels - 1, 5 of bits - 1, 36 of
    the length, MD5.
    """
    bits = (int.from_bytes(head[18:26]) >> 36 & 31) + 1
    expected = head[26:42]
    md5 = hashlib.md5(usedforsecurity=False)
    while len(block := read("int32")):
        samples = (block >> 32 - bits).astype("<i4")
        md5.update(samples.view(np.uint8).reshape(-1, 4)[:, : -(-bits // 8)].tobytes())
        yield block.astype(np.float32) * np.float32(2.0**-31)
    if any(expected) and md5.digest() != expected:
        raise BadMedia("corrupt FLAC: its samples are not those of its checksum")


def _check_flac_end(reader: FileReader, head: bytes) -> None:
    """Raise BadMedia for a FLAC with bytes behind its last frame, which libFLAC takes for a lost frame.

    head: as above; 3 of its bytes are the size of the longest frame, which not every writer knows.
    A frame begins with 14 set bits and a 0, and ends with a checksum by which that of the whole is
    0; with zeros behind, too.
    """
    longest = max(int.from_bytes(head[15:18]), LAST_FRAME)
    size = reader.seek(0, io.SEEK_END)
    tail = reader.start(min(longest, size), size - min(longest, size))
    starts = [match.start() for match in re.finditer(rb"\xff[\xf8\xf9]", tail)]
    # From the last on: almost always the frame that ends the file.
    if tail.endswith(bytes(16)) or not any(_crc16(tail[start:]) == 0 for start in reversed(starts)):
        raise BadMedia("corrupt FLAC: other bytes follow its last frame")


def _crc16(data: bytes) -> int:
    """Compute FLAC's checksum of a frame, of the polynomial 0x8005."""
    table = _crc16_table()
    crc = 0
    for byte in data:
        crc = (crc << 8 & 0xFFFF) ^ table[crc >> 8 ^ byte]
    return crc


@cache
def _crc16_table() -> list[int]:
    """Return the remainders of all bytes, as of 16 more bits behind them."""
    table = list(range(0, 1 << 16, 1 << 8))
    for _ in range(8):
        table = [(crc << 1 ^ (0x8005 if crc & 0x8000 else 0)) & 0xFFFF for crc in table]
    return table


def _check_ogg_pages(data: bytes) -> None:
    """Raise BadMedia for an Ogg file with a page that is cut off, missing or damaged, which decoders drop silently.

    A page: "OggS", 10 bytes, its stream's number (4 bytes), its own number (4), a checksum (4), the
    number of segments, the length of each segment, the segments.
    """
    start = 0
    numbers: dict[bytes, int] = {}  # of the last page of each stream
    while start < len(data):
        segments = data[start + 26] if start + 26 < len(data) else 0
        end = start + 27 + segments + sum(data[start + 27 : start + 27 + segments])
        if data[start : start + 4] != b"OggS":
            raise BadMedia(f"corrupt OGG: no page begins at byte {start}")
        if end > len(data) or start + 27 > len(data):
            raise BadMedia("truncated OGG: its last page is not whole")
        page = data[start : start + 22] + bytes(4) + data[start + 26 : end]
        stream, number, checksum = (
            data[start + 14 : start + 18],
            *struct.unpack_from("<II", data, start + 18),
        )
        if _ogg_checksum(page) != checksum:
            raise BadMedia(f"corrupt OGG: the checksum of its page at byte {start} is wrong")
        if number != numbers.get(stream, number - 1) + 1:
            raise BadMedia(f"corrupt OGG: pages are missing before byte {start}")
        numbers[stream] = number
        start = end


# the bits of each byte in reverse
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _ogg_checksum(page: bytes) -> int:
    """Compute a CRC-32 as Ogg has it: zlib's polynomial, but highest bits first and nothing inverted."""
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)
