"""Read MP3s strictly: their length from the header of their encoder, and their samples with libmpg123's complaints.

libmpg123 (inside libsndfile) goes on where a file is damaged and says so on standard error alone,
which belongs to the whole process. So another process decodes, of which standard error is read: one
for each process that meets an MP3, for as long as that lives.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from mmjax.errors import BadMedia

DELAY = 529  # samples by which a decoder is late, which libmpg123 cuts off
TAG = 10  # bytes of the header of an ID3v2 tag
# bytes of what an encoder says behind its Xing header; the last 3 are samples before and behind the
# sound
LAME = 24
# By version (0: 2.5, 2: 2, 3: 1): sample rates in Hz, and by channels the bytes of a frame's side
# information.
RATES = {0: (11025, 12000, 8000), 2: (22050, 24000, 16000), 3: (44100, 48000, 32000)}
SIDE = {0: (17, 9), 2: (17, 9), 3: (32, 17)}
# kbit/s of layer 3, of version 1 and of the others
BIT_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (*(0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),),
)
ENDS = (b"TAG", b"APETAGEX", b"LYRICSBE")  # of tags behind the last frame
SAMPLES = {0: 576, 2: 576, 3: 1152}  # of a frame

# Decodes files until there are no more: each the number of its first sample, how many are wanted,
# its length and bytes. Answers with blocks, each the bytes of its float32 samples behind their
# number, an empty one, and a line of JSON: what soundfile raised, and what was said on standard
# error.
_DECODER = """
import io, json, os, struct, sys, tempfile
import numpy, soundfile
requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
log = tempfile.TemporaryFile()
os.dup2(log.fileno(), 1)
os.dup2(log.fileno(), 2)
while head := requests.read(24):
    first, missing, size = struct.unpack("<QQQ", head)
    file = io.BytesIO(requests.read(size))
    fault = ""
    try:
        with soundfile.SoundFile(file) as clip:
            if first:  # a seek to 0 would change the last bit of what transformers reads
                clip.seek(first)
            while len(block := clip.read(min(missing, (1 << 20) // clip.channels), "float32", True)):
                missing -= len(block)
                mono = block.T.mean(axis=0) if clip.channels > 1 else block[:, 0]
                answers.write(struct.pack("<Q", 4 * len(mono)) + numpy.ascontiguousarray(mono).tobytes())
    except Exception as error:
        fault = str(error) or type(error).__name__
    log.seek(0)
    lines = log.read(1 << 16).decode(errors="replace")
    log.seek(0)
    log.truncate()
    answers.write(struct.pack("<Q", 0) + json.dumps([fault, lines]).encode() + b"\\n")
    answers.flush()
"""


def is_mp3(head: bytes) -> bool:
    """Tell an MP3 by its first bytes: a tag's, or a frame's."""
    return head.startswith(b"ID3") or (head[:1] == b"\xff" and head[1:2] >= b"\xe0")


def read_mp3_header(file: BinaryIO) -> tuple[int, int]:
    """Read samples of each channel and the sample rate from the first frame, as libmpg123 counts them.

    Raises BadMedia where it does not say how many frames follow, and where none does.
    """
    start = _first_frame(file)
    version, rate, channels, length = _frame(_read(file, start, 4))
    side = 4 + SIDE[version][channels == 1]
    frame = _read(file, start, length)
    tag = frame[side : side + 8]
    flags = int.from_bytes(tag[4:8])
    if tag[:4] not in (b"Xing", b"Info") or not flags & 1:
        raise BadMedia(
            "an MP3 that does not say its length (no Xing or Info header); encode it again"
        )
    following = _frame(_read(file, start + length, 4))
    if following[:2] != (version, rate):
        raise BadMedia("an MP3 whose second frame has another rate than its first")
    total = int.from_bytes(frame[side + 8 : side + 12]) * SAMPLES[version]
    # Behind the frames come, as the flags say, the bytes, a table and a quality, then what LAME and
    # FFmpeg say.
    encoder = side + 12 + 4 * bool(flags & 2) + 100 * bool(flags & 4) + 4 * bool(flags & 8)
    if len(lame := frame[encoder : encoder + LAME]) < LAME or not lame[0]:
        return total, rate
    # 12 bits each. A decoder drops the delay and its own 529 samples at the start, and at the end
    # the trailing ones less these 529, which come out late.
    padding = int.from_bytes(lame[21:24])
    delay = padding >> 12
    trailing = padding & 0xFFF
    return min(total, total - trailing + DELAY) - delay - DELAY, rate


def _check_frames(data: bytes) -> None:
    """Raise BadMedia where the frames that the first announces are not all that follows it, but tags.

    libsndfile stops where the sound ends, and sees nothing of what is behind it.
    """
    file = io.BytesIO(data)
    position = _first_frame(file)
    version, _, channels, length = _frame(data[position : position + 4])
    count = position + 4 + SIDE[version][channels == 1] + 8
    for _ in range(int.from_bytes(data[count : count + 4])):
        position += length
        length = _frame(data[position : position + 4])[-1]
    trailing = data[position + length : position + length + 8]
    if position + length > len(data):
        raise BadMedia("a truncated MP3: its last frame is not whole")
    if len(trailing) >= 4 and not trailing.startswith(ENDS):
        raise BadMedia(
            f"a damaged MP3: it goes on behind its last frame, at byte {position + length}"
        )


def _first_frame(file: BinaryIO) -> int:
    """Return where the first frame is: behind a tag, whose size has 7 bits in each of 4 bytes."""
    head = _read(file, 0, TAG)
    if head[:3] != b"ID3":
        return 0
    return TAG + sum((byte & 0x7F) << 7 * k for k, byte in enumerate(reversed(head[6:10])))


def _frame(header: bytes) -> tuple[int, int, int, int]:
    """Parse a frame's header: version, rate, channels, bytes. Raises BadMedia where it is no frame of layer 3."""
    if len(header) < 4:
        raise BadMedia("a truncated MP3: it ends in its first frames")
    (bits,) = struct.unpack(">I", header)
    version, layer, rate, bit_rate = bits >> 19 & 3, bits >> 17 & 3, bits >> 10 & 3, bits >> 12 & 15
    if bits >> 21 != 0x7FF or version == 1 or layer != 1 or rate == 3 or bit_rate in (0, 15):
        raise BadMedia("a corrupt MP3: where a frame is to be there is none")
    # Bytes of a frame: samples / 8 * bits per second / rate, and one of padding if so marked. 1152
    # samples at 128 kbit/s and 44,100 Hz are 144 * 128,000 / 44,100 = 417.
    hertz = RATES[version][rate]
    length = SAMPLES[version] // 8 * 1000 * BIT_RATES[version != 3][bit_rate] // hertz + (
        bits >> 9 & 1
    )
    return version, hertz, 1 if bits >> 6 & 3 == 3 else 2, length


def _read(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(count)


class _Decoder:
    """A process that decodes; one file at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork has none of its own yet

    def blocks(self, data: bytes, first: int, count: int) -> Iterator[np.ndarray]:
        """Decode a stretch of a file to blocks of mono samples, float32. Raises BadMedia at a damaged one's end."""
        with self._lock:
            process = self._started()
            try:
                # The decoder answers only when it has all of the file.
                process.stdin.write(struct.pack("<QQQ", first, count, len(data)))
                process.stdin.write(data)
                process.stdin.flush()
                while size := struct.unpack("<Q", process.stdout.read(8))[0]:
                    yield np.frombuffer(process.stdout.read(size), np.float32)
                fault, lines = json.loads(process.stdout.readline())
            except (OSError, ValueError, struct.error):
                self._end()
                raise BadMedia("a corrupt MP3: its decoder ended") from None
            except GeneratorExit:  # what is left of the answer is of no use
                self._end()
                raise
        if fault or lines.strip():
            raise BadMedia(f"a damaged MP3: {fault or _first_complaint(lines)}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DECODER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._owner = os.getpid()
            atexit.register(self._end)
        return self._process

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                pipe.close()
        self._process = None


def _first_complaint(lines: str) -> str:
    """Return the first of libmpg123's lines, without where in its source it stands."""
    first = next(line for line in lines.splitlines() if line.strip())
    return re.sub(r"^\[[^]]*\]\s*|\(?\bat 0x\w+\)?", "", first).strip()[:200]


_decoder = _Decoder()


def decode_mp3(data: bytes, first: int = 0, count: int = 1 << 62) -> Iterator[np.ndarray]:
    """Decode an MP3, or `count` samples from the `first` on, to blocks of mono samples, float32 `[n]`.

    Raises BadMedia, at the end also for what libmpg123 mends.
    """
    _check_frames(data)
    return _decoder.blocks(data, first, count)
