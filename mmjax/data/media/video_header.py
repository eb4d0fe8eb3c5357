"""Read a video's size, number of frames and frame rate from its container alone, before anything is decoded.

Of MP4 and QuickTime from the tables of its `moov` box, of others as FFmpeg reports them, and where
a container has no count (WebM, Matroska), from its duration and rate (`matroska.py`).
"""

from __future__ import annotations

import errno
import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np

from mmjax.data.media.decode import VideoHeader
from mmjax.data.media.decode_images import image_kind, read_image_size
from mmjax.data.media.matroska import MATROSKA_START, parse_duration, read_matroska_header
from mmjax.errors import BadMedia, UserError

ZIP_START = b"PK\x03\x04"  # of a list of frames as one file: a ZIP of images, not compressed
MAX_MOOV = 1 << 27  # bytes of an MP4's tables
MAX_FRAMES = 1 << 22  # of a track of an MP4, for each of which FFmpeg makes an entry of 24 bytes
MAX_FRAME_PIXELS = 8192 * 4352  # of a frame of a container; a decoder may hold up to 17 of them
MAX_TERM = (1 << 31) - 1  # of a frame rate's fraction
# Playlists, SDP and other formats name files, addresses and ports, which FFmpeg would open: it may
# use no protocol.
ALONE = {"protocol_whitelist": "none"}


def import_pyav(what: str = "videos") -> Any:
    """Import PyAV. Raises UserError, naming what the data has, where it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError(
            f'the data has {what}, which PyAV decodes: pip install "mmjax[video]"'
        ) from None
    av.logging.set_level(None)  # FFmpeg's own messages; its errors are raised
    return av


def read_video_header(file: BinaryIO) -> tuple[int, int]:
    """Read a video's header, packed, from a seekable file: of a container, an image, or a ZIP of images.

    Raises BadMedia for an unknown format, and for a video without frames.
    """
    import_pyav()
    if not (start := file.read(32)):
        raise BadMedia("an empty file (0 bytes)")
    file.seek(0)
    if image_kind(start):
        height, width = read_image_size(file)
        header = VideoHeader(frames=1, height=height, width=width, rate=Fraction(0))
    elif start.startswith(ZIP_START):
        with zip_frames(file) as frames:
            height, width = read_image_size(zip_frame(frames, 0))
            count = len(frames.filelist)
            header = VideoHeader(frames=count, height=height, width=width, rate=Fraction(0))
    else:
        # By our own readers where they can tell, in a tenth of the time; else by FFmpeg.
        quick = _mp4_header(file) if start[4:8] == b"ftyp" else None
        if start.startswith(MATROSKA_START):
            quick = read_matroska_header(file)
            file.seek(0)
        header = quick or _container_header(file)
    if header.frames < 1 or min(header.size) < 1:
        raise BadMedia(
            f"a video of {header.frames} frames of {header.height} x {header.width} pixels is empty"
        )
    pixels = header.height * header.width if header.rate else 0
    if max(header.size) > 0xFFFF or header.frames >= 1 << 31 or pixels > MAX_FRAME_PIXELS:
        raise BadMedia(
            f"a video of {header.frames} frames of {header.height} x {header.width} pixels is too large"
        )
    return header.packed()


def zip_frames(file: BinaryIO) -> zipfile.ZipFile:
    """Open a ZIP of uncompressed images. Raises BadMedia where it is none."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise BadMedia(f"no ZIP of frames: {error}") from None
    if not archive.filelist or any(
        frame.compress_type != zipfile.ZIP_STORED for frame in archive.filelist
    ):
        raise BadMedia("a ZIP that is no list of frames: they are not compressed")
    return archive


def zip_frame(archive: zipfile.ZipFile, number: int) -> BinaryIO:
    """Read the image file of one frame."""
    return io.BytesIO(archive.read(archive.filelist[number]))


def _mp4_header(file: BinaryIO) -> VideoHeader | None:
    """Read the first video track of a `moov` box; None where its tables count no frames (fragmented files) or are odd.

    A tenth of the time that FFmpeg takes, which opens the codec too.
    """
    moov = next((content for name, content in _file_boxes(file) if name == b"moov"), None)
    if moov is None:
        raise BadMedia("an MP4 without a moov box: truncated, or never finished")
    tracks = [content for name, content in _boxes(moov) if name == b"trak"]
    for track in tracks:
        _check_frames(track)
    try:
        for track in tracks:
            media = _inner(track, b"mdia")
            if _inner(media, b"hdlr")[8:12] == b"vide":
                return _track_header(track, media)
    except (LookupError, ValueError, struct.error):
        return None
    raise BadMedia("an MP4 without a video track")


def _check_frames(track: memoryview) -> None:
    """Raise BadMedia for a track whose tables claim so many frames that a list of them is a danger."""
    with suppress(LookupError, struct.error):
        table = _inner(track, b"mdia", b"minf", b"stbl")
        size, frames = struct.unpack_from(">II", _inner(table, b"stsz"), 4)
        # Of uncompressed sound a frame is one sample, of one tick; FFmpeg makes entries of its
        # chunks.
        sound = struct.unpack_from(">I4xI", _inner(table, b"stts"), 4) == (1, 1)
        if size and frames > MAX_FRAMES and not sound:
            raise BadMedia(f"an MP4 with a track of {frames:,} frames")


def _track_header(track: memoryview, media: memoryview) -> VideoHeader | None:
    table = _inner(media, b"minf", b"stbl")
    (frames,) = struct.unpack_from(">I", _inner(table, b"stsz"), 8)
    # Behind version and count, the description has 32 bytes before its sides.
    width, height = struct.unpack_from(">HH", _inner(table, b"stsd"), 8 + 32)
    clock = _inner(media, b"mdhd")
    (timescale,) = struct.unpack_from(">I", clock, 20 if clock[0] == 1 else 12)
    # stts: pairs of (number of frames, ticks of each).
    durations = (
        np.frombuffer(_inner(table, b"stts"), ">u4", offset=8).reshape(-1, 2).astype(np.int64)
    )
    ticks = int((durations[:, 0] * durations[:, 1]).sum())
    if not frames or not ticks or int(durations[:, 0].sum()) != frames:
        return None
    placed = _inner(track, b"tkhd")
    # Of a matrix [a b u; c d v; x y w] that takes (x, y) to (a x + c y, b x + d y): upright or
    # turned by half it has b = 0, by a quarter a = 0.
    a, b = struct.unpack_from(">ii", placed, 52 if placed[0] == 1 else 40)
    if abs(b) > abs(a):  # a quarter turn
        height, width = width, height
    return VideoHeader(
        frames, height, width, Fraction(timescale * frames, ticks).limit_denominator(MAX_TERM)
    )


def _file_boxes(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of an MP4's outer boxes, but of `moov` alone the content."""
    end = file.seek(0, io.SEEK_END)
    start = 0
    while start + 8 <= end:
        file.seek(start)
        size, name = struct.unpack(">I4s", file.read(8))
        head = 8
        if size == 1:  # the size follows in 8 bytes
            (size,) = struct.unpack(">Q", file.read(8))
            head = 16
        elif size == 0:  # to the end of the file
            size = end - start
        if size < head or start + size > end:
            raise BadMedia(
                f"truncated MP4: its {name.decode('latin-1')} box at byte {start} is not whole"
            )
        if name == b"moov" and size > MAX_MOOV:
            raise BadMedia(f"an MP4 whose moov box has {size} bytes")
        yield name, file.read(size - head) if name == b"moov" else b""
        start += size


def _boxes(content: bytes | memoryview) -> Iterator[tuple[bytes, memoryview]]:
    content = memoryview(content)
    start = 0
    while start + 8 <= len(content):
        size, name = struct.unpack_from(">I4s", content, start)
        if size < 8 or start + size > len(content):
            return
        yield name, content[start + 8 : start + size]
        start += size


def _inner(content: bytes | memoryview, *path: bytes) -> memoryview:
    """Return the content of a box in a box in this one. Raises LookupError where there is none."""
    content = memoryview(content)
    for name in path:
        content = dict(_boxes(content))[name]
    return content


def _container_header(file: BinaryIO) -> VideoHeader:
    """Read the header by FFmpeg, with the frames counted from the duration where the container does not count them."""
    with open_container(file) as container:
        stream = video_stream(container)
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise BadMedia("a video that does not say its frame rate; encode it again")
        frames = stream.frames
        if not frames:
            if (
                seconds := track_seconds(container, stream)
            ) is None:  # a recording that was never finished: its packets are counted
                frames = sum(1 for packet in container.demux(stream) if packet.size)
            else:
                frames = max(1, round(seconds * rate))
        return VideoHeader(
            frames, stream.height, stream.width, Fraction(rate).limit_denominator(MAX_TERM)
        )


def track_seconds(container: Any, stream: Any) -> Fraction | None:
    """Read how long a track is: by Matroska's tag, by itself, or as the longest of its container; None if unknown."""
    with suppress(ValueError):
        return parse_duration(stream.metadata.get("DURATION", ""))
    if stream.duration is not None:
        return stream.duration * stream.time_base
    return (
        None
        if container.duration is None
        else Fraction(container.duration, import_pyav().time_base)
    )


def open_container(file: BinaryIO) -> Any:
    """Open a video by FFmpeg. Raises BadMedia where it cannot."""
    av = import_pyav()
    try:
        return av.open(file, metadata_errors="replace", options=ALONE)
    except (av.FFmpegError, ValueError, OSError) as error:
        # FFmpeg may seek before the start of a short file, which is the file's fault and no I/O
        # error.
        if (
            isinstance(error, OSError)
            and not isinstance(error, av.FFmpegError)
            and error.errno != errno.EINVAL
        ):
            raise
        raise BadMedia(f"no video that FFmpeg can open: {describe_av_error(error)}") from None


def video_stream(container: Any) -> Any:
    """Return the first video stream. Raises BadMedia where there is none, or none that FFmpeg can decode."""
    if not container.streams.video:
        raise BadMedia("a file without a video track")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise BadMedia("a video by a codec that FFmpeg does not know")
    return stream


def describe_av_error(error: Exception) -> str:
    """Describe an error of FFmpeg or the system in one line."""
    return str(getattr(error, "strerror", None) or error).partition("\n")[0]
