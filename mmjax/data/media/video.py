"""Videos: their headers, which frames are taken of them in what size, and those frames decoded.

A video is a file that FFmpeg reads (through PyAV), or a list of image files in the order of time. Frames are counted
and sized from the container alone, so that lengths are known before anything is decoded: of MP4 and QuickTime from the
tables of its `moov` box, of others as FFmpeg reports them, and where a container has no count (WebM, Matroska), from
its duration and rate (`matroska.py`). As many frames are decoded as were planned, whatever the count says: a file that
lacks a few at its end repeats its last, one that lacks more is bad. Frames are turned upright.

Frames are sampled as in transformers' video processors; their resizing is Pillow's, as for images.
"""

from __future__ import annotations

import errno
import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmjax.config import Glm4Video, MediaLimits, Qwen2Video, Qwen3Video, SmartResize, VisionConfig
from mmjax.data.media.decode import VideoHeader, check_media_size
from mmjax.data.media.decode_images import decode_image, image_kind, read_image_size
from mmjax.data.media.image_transforms import LazyImage, Size, smart_size, smart_size_of_frames
from mmjax.data.media.matroska import MATROSKA_START, parse_duration, read_matroska_header
from mmjax.errors import BadMedia, UserError

ZIP_START = b"PK\x03\x04"  # of a list of frames as one file: a ZIP of images, not compressed
MAX_MOOV = 1 << 27  # bytes of an MP4's tables
MAX_FRAMES = 1 << 22  # of a track of an MP4, for each of which FFmpeg makes an entry of 24 bytes
MAX_FRAME_PIXELS = 8192 * 4352  # of a frame of a container; a decoder may hold up to 17 of them
EDGE = 512  # pixels by which buffers of a codec may be wider or higher than what is shown
MISSING_SHARE = 0.05  # of a video's time that its last frames may lack,
MISSING_FRAMES = 2  # or so many frames
MAX_TERM = (1 << 31) - 1  # of a frame rate's fraction
# Playlists, SDP and other formats name files, addresses and ports, which FFmpeg would open: it may use no protocol.
ALONE = {"protocol_whitelist": "none"}
GAP = 64  # frames that are decoded rather than skipped to the next key frame


class SampledVideo(NamedTuple):
    """The frames that are taken of a video; each `VisionConfig.frames` of them are a temporal patch, and an item."""

    indices: np.ndarray  # int64 [n]: frames of the video, ascending; a multiple of a temporal patch
    size: Size  # of a frame, resized
    times: tuple[int, ...] = ()  # rotary positions of the temporal patches along t
    texts: tuple[str, ...] = ()  # that is written before the first temporal patch, between two, and behind the last


# ---------------------------------------------------------------------------------------------------------- sampling


def sample_video(encoder: VisionConfig, header: VideoHeader) -> SampledVideo:
    """Choose the frames of a video and their size, from its header. Raises BadMedia for a video without any."""
    how = encoder.videos
    unit = encoder.frames
    merged = encoder.patch * encoder.connector.merge  # pixels per side of an LLM token
    size = (header.height, header.width)
    if isinstance(how, Qwen2Video):
        indices = _every_nth(how, header, unit)
        size = _qwen2_size(how, size, merged, len(indices), unit)
        seconds_per_frame = header.frames / float(header.rate or how.fps) / len(indices)
        indices = _filled(indices, unit)
        times = _rotary_times(how, len(indices) // unit, unit * seconds_per_frame, unit)
        return SampledVideo(indices, size, times=tuple(times.tolist()))
    if isinstance(how, Qwen3Video):
        indices = _first_to_last(how, header)
        size = _qwen3_size(how, size, merged, len(indices), unit)
        indices = _filled(indices, unit)
        seconds = (indices / float(header.rate or how.fps)).reshape(-1, unit)
        # The mean of a temporal patch's first and last frame.
        texts = tuple(f"<{(first + last) / 2:.1f} seconds>" for first, last in seconds[:, [0, -1]].tolist())
        return SampledVideo(indices, size, texts=(*texts, ""))
    if isinstance(how, Glm4Video):
        indices = _up_to_a_length(how, header)
        size = smart_size_of_frames(size, merged, (how.min_pixels, how.max_pixels), len(indices), unit)
        # Those of every other frame taken, however many frames a temporal patch has.
        seconds = (indices[::2] / float(header.rate or how.fps)).astype(int).tolist()
        indices = _filled(indices, unit)
        texts = tuple(str(seconds[min(k, len(seconds) - 1)]) for k in range(len(indices) // unit))
        return SampledVideo(indices, size, texts=("", *texts))
    if how.taken == "first":
        count = min(how.frames, header.frames)
        indices = np.arange(count) * header.frames // count
    else:
        # Of equal parts, rounded to float32 as torch.arange does.
        middles = (np.arange(how.frames) + 0.5) * (header.frames / how.frames)
        indices = np.minimum(middles.astype(np.float32).astype(np.int64), header.frames - 1)
    indices = _filled(indices, unit)
    labels = [how.label.replace("{}", str(k + 1)) for k in range(len(indices) // unit)] if how.label else []
    texts = (*(label.lstrip("\n") for label in labels[:1]), *labels[1:], "") if labels else ()
    return SampledVideo(indices, (how.size[0], how.size[1]) if how.size else size, texts=texts)


def _rotary_times(how: Qwen2Video, count: int, sampled: float, unit: int) -> np.ndarray:
    """Compute the times of so many temporal patches, whole positions, as transformers does for each family.

    In float32, and cut off; where parts of positions count there are none.

    sampled: seconds between the frames taken that begin two of them.
    """
    patches = np.arange(count, dtype=np.float32)
    per_second = np.float32(how.tokens_per_second)
    if how.seconds == "nominal":
        times = patches * np.float32(unit / how.fps) * per_second
        return (np.rint(times) if how.turns == "patches" else times).astype(int)
    return (patches * (per_second * np.float32(sampled) if how.tokens_per_second else np.float32(1))).astype(int)


def _every_nth(how: Qwen2Video, header: VideoHeader, unit: int) -> np.ndarray:
    """Choose frames at equal distances from the first on, a multiple of `unit` of them where there are so many."""
    total = header.frames
    max_frames = min(how.max_frames, total) // unit * unit
    count = total / float(header.rate or how.fps) * how.fps
    count = int(min(max(count, how.min_frames), max_frames, total) // unit * unit) or min(unit, total)
    step = total / count
    # Rounded to float32, as torch.arange does: 2.9999999999 is frame 3. (Where rounding makes that one frame longer, it
    # ends with a frame that is not there; here it does not.)
    return np.minimum((np.arange(count) * step).astype(np.float32).astype(np.int64), total - 1)


def _first_to_last(how: Qwen3Video, header: VideoHeader) -> np.ndarray:
    """Choose frames at equal distances, the first and the last among them."""
    count = int(header.frames / float(header.rate or how.fps) * how.fps)
    count = min(max(count, how.min_frames), how.max_frames, header.frames)
    return np.linspace(0, header.frames - 1, count).round().astype(np.int64)


def _up_to_a_length(how: Glm4Video, header: VideoHeader) -> np.ndarray:
    """Choose frames at a rate, an even number; of a video longer than `how.seconds`, at equal distances."""
    rate = float(header.rate or how.fps)
    length = header.frames / rate
    if length <= how.seconds:
        times = np.arange(max(int(length * how.fps), 1)) * rate / how.fps
    elif (count := int(how.seconds * how.fps)) < header.frames:
        times = np.linspace(0, length, count) * rate
    else:
        times = np.arange(header.frames)
    indices = np.unique(np.minimum(np.ceil(times).astype(np.int64), header.frames - 1))
    return _filled(indices, 2)


def _filled(indices: np.ndarray, unit: int) -> np.ndarray:
    """Repeat the last frame until the last temporal patch is whole."""
    return np.pad(indices, (0, -len(indices) % unit), mode="edge")


def _qwen2_size(how: Qwen2Video, size: Size, merged: int, frames: int, unit: int) -> Size:
    max_pixels = how.max_pixels
    if how.total_pixels:
        max_pixels = max(min(max_pixels, how.total_pixels * unit // frames), int(how.min_pixels * 1.05))
    return smart_size(SmartResize(merged, 1, how.min_pixels, max_pixels), size)


def _qwen3_size(how: Qwen3Video, size: Size, merged: int, frames: int, unit: int) -> Size:
    max_pixels = how.max_pixels
    if how.frame_pixels:
        max_pixels = max(min(how.frame_pixels, max_pixels // frames), int(how.min_pixels * 1.05)) * frames
    return smart_size_of_frames(size, merged, (how.min_pixels, max_pixels), frames, unit)


# ----------------------------------------------------------------------------------------------------------- headers


def import_pyav(what: str = "videos") -> Any:
    """Import PyAV. Raises UserError, naming what the data has, where it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError(f'the data has {what}, which PyAV decodes: pip install "mmjax[video]"') from None
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
        header = VideoHeader(1, *read_image_size(file), Fraction(0))
    elif start.startswith(ZIP_START):
        with _zip_frames(file) as frames:
            header = VideoHeader(len(frames.filelist), *read_image_size(_zip_frame(frames, 0)), Fraction(0))
    else:
        quick = _mp4_header(file) if start[4:8] == b"ftyp" else None
        if start.startswith(MATROSKA_START):
            quick = read_matroska_header(file)
            file.seek(0)
        header = quick or _container_header(file)
    if header.frames < 1 or min(header.height, header.width) < 1:
        raise BadMedia(f"a video of {header.frames} frames of {header.height} x {header.width} pixels is empty")
    pixels = header.height * header.width if header.rate else 0
    if max(header.height, header.width) > 0xFFFF or header.frames >= 1 << 31 or pixels > MAX_FRAME_PIXELS:
        raise BadMedia(f"a video of {header.frames} frames of {header.height} x {header.width} pixels is too large")
    return header.packed()


def _zip_frames(file: BinaryIO) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise BadMedia(f"no ZIP of frames: {error}") from None
    if not archive.filelist or any(frame.compress_type != zipfile.ZIP_STORED for frame in archive.filelist):
        raise BadMedia("a ZIP that is no list of frames: they are not compressed")
    return archive


def _zip_frame(archive: zipfile.ZipFile, number: int) -> BinaryIO:
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
        # Of uncompressed sound a frame is one sample, of one tick; FFmpeg makes entries of its chunks.
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
    durations = np.frombuffer(_inner(table, b"stts"), ">u4", offset=8).reshape(-1, 2).astype(np.int64)
    ticks = int((durations[:, 0] * durations[:, 1]).sum())
    if not frames or not ticks or int(durations[:, 0].sum()) != frames:
        return None
    placed = _inner(track, b"tkhd")
    a, b = struct.unpack_from(">ii", placed, 52 if placed[0] == 1 else 40)  # of a matrix [a b u; c d v; x y w]
    if abs(b) > abs(a):  # a quarter turn
        height, width = width, height
    return VideoHeader(frames, height, width, Fraction(timescale * frames, ticks).limit_denominator(MAX_TERM))


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
            raise BadMedia(f"truncated MP4: its {name.decode('latin-1')} box at byte {start} is not whole")
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
        stream = _video_stream(container)
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
        return VideoHeader(frames, stream.height, stream.width, Fraction(rate).limit_denominator(MAX_TERM))


def track_seconds(container: Any, stream: Any) -> Fraction | None:
    """Read how long a track is: by Matroska's tag, by itself, or as the longest of its container; None if unknown."""
    with suppress(ValueError):
        return parse_duration(stream.metadata.get("DURATION", ""))
    if stream.duration is not None:
        return stream.duration * stream.time_base
    return None if container.duration is None else Fraction(container.duration, import_pyav().time_base)


def open_container(file: BinaryIO) -> Any:
    """Open a video by FFmpeg. Raises BadMedia where it cannot."""
    av = import_pyav()
    try:
        return av.open(file, metadata_errors="replace", options=ALONE)
    except (av.FFmpegError, ValueError, OSError) as error:
        # FFmpeg may seek before the start of a short file, which is the file's fault and no I/O error.
        if isinstance(error, OSError) and not isinstance(error, av.FFmpegError) and error.errno != errno.EINVAL:
            raise
        raise BadMedia(f"no video that FFmpeg can open: {_reason(error)}") from None


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise BadMedia("a file without a video track")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise BadMedia("a video by a codec that FFmpeg does not know")
    return stream


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).partition("\n")[0]


# ---------------------------------------------------------------------------------------------------------- decoding


def decode_video(file: BinaryIO, encoder: VisionConfig, limits: MediaLimits = MediaLimits()) -> tuple[np.ndarray, ...]:
    """Decode the frames that `sample_video` takes: temporal patches, uint8 `[frames, height, width, 3]` each.

    At most the sampled frames are in memory, resized. Raises BadMedia as `read_video_header`, for a video beyond the
    limits, and for one that is truncated or corrupt.
    """
    size = read_video_header(file)
    check_media_size("video", size, limits)
    header = VideoHeader.unpacked(size)
    sampled = sample_video(encoder, header)
    file.seek(0)
    if header.rate:
        decoded = _container_frames(file, header, sampled.indices)
    else:
        decoded = _image_frames(file, sampled.indices, limits)
    frames = []
    for frame in decoded:
        if frame.shape[:2] != (header.height, header.width):
            raise BadMedia(
                f"a frame of {frame.shape[0]} x {frame.shape[1]} pixels in a video of {header.height} x {header.width}"
            )
        resized = LazyImage(frame.shape[:2], frame, limits.pixels).resized(sampled.size, encoder.videos.filter).pixels
        frames.append(resized)
    # A frame that is taken more than once is decoded once.
    distinct = np.unique(sampled.indices, return_inverse=True)[1].reshape(-1, encoder.frames)
    return tuple(np.stack([frames[k] for k in patch]) for patch in distinct)


def _image_frames(file: BinaryIO, indices: np.ndarray, limits: MediaLimits) -> Iterator[np.ndarray]:
    images = _zip_frames(file)
    for index in np.unique(indices):
        try:
            yield decode_image(_zip_frame(images, index).read(), limits)
        except BadMedia as bad:
            raise BadMedia(f"frame {index}: {bad}") from None


def _container_frames(file: BinaryIO, header: VideoHeader, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Decode these frames of a container, upright, each once and in order."""
    av = import_pyav()
    try:
        with open_container(file) as container:
            stream = _video_stream(container)
            times, keys = _packet_times(container, stream)
            frame_times = _frame_times(np.unique(indices), times, header, float(stream.time_base))
            yield from _frames_at(container, stream, frame_times, times, keys)
    except av.FFmpegError as error:
        raise BadMedia(f"corrupt video: {_reason(error)}") from None


def _packet_times(container: Any, stream: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read the times of all frames and of the key frames, in ticks of the stream, sorted. Decodes nothing."""
    shown = []
    keys = []
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if (time := packet.pts if packet.pts is not None else packet.dts) is None:
            raise BadMedia("a video whose frames have no times; encode it again")
        shown.append(time)
        if packet.is_keyframe:
            keys.append(time)
    if not keys:
        raise BadMedia("a video without a frame that can be decoded")
    times = np.unique(np.array(shown, np.int64))
    # Frames before the first key frame cannot be decoded.
    return times[times >= min(keys)], np.array(sorted(keys), np.int64)


def _frame_times(indices: np.ndarray, times: np.ndarray, header: VideoHeader, unit: float) -> np.ndarray:
    """Find the times of the frames with these numbers. Raises BadMedia where the video ends long before it should.

    Where the header counts other frames than there are, as where it counts none and they come at a variable rate, a
    frame is the one that is shown at its time.
    """
    if len(times) == header.frames:
        return times[indices]
    lacks = header.frames / float(header.rate) - (times[-1] - times[0]) * unit
    # The last frame is shown for a while, which is not known here: no longer than the longest of the others.
    longest = (np.diff(times).max(initial=0) or 1 / float(header.rate) / unit) * unit
    if lacks - longest > max(MISSING_SHARE * header.frames, MISSING_FRAMES) / float(header.rate):
        whole = header.frames / float(header.rate)
        raise BadMedia(f"truncated video: it ends {lacks:.1f} s before the {whole:.1f} s of its header")
    at = times[0] + indices / float(header.rate) / unit
    # Half a tick: times are rounded to the time base.
    return times[np.maximum(np.searchsorted(times, at + 0.5, side="right") - 1, 0)]


def _frames_at(
    container: Any, stream: Any, frame_times: np.ndarray, times: np.ndarray, keys: np.ndarray
) -> Iterator[np.ndarray]:
    """Decode the frames of these ascending times, and skip to a key frame where many lie between two of them.

    A frame at a video's end that cannot be decoded is the last that can be; one elsewhere raises BadMedia.
    """
    stream.thread_type = "SLICE"  # threads for whole frames would delay them, and outlive the file
    # A stream may have other frames than its container says.
    max_pixels = (stream.height + EDGE) * (stream.width + EDGE)
    stream.codec_context.options = {"max_pixels": str(max_pixels)}
    pixels = None  # of the newest frame
    position = -1  # index in `times` of the newest frame
    frames: Iterator[Any] = iter(())
    for target in np.searchsorted(times, frame_times).tolist():
        if target == position:  # a frame that is shown for long
            yield pixels
            continue
        time = int(times[target])
        key = int(keys[max(np.searchsorted(keys, time, side="right") - 1, 0)])
        if position < 0 or np.searchsorted(times, key) > position + GAP:
            container.seek(key, stream=stream)
            frames = _decoded(container, stream)
        frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= time), None)
        ending = len(times) - target <= max(MISSING_SHARE * len(times), MISSING_FRAMES)
        if frame is not None and frame.pts == time:
            pixels = _upright(frame)
            position = target
        elif frame is not None or pixels is None or not ending:
            raise BadMedia(f"corrupt video: frame {target} of {len(times)} cannot be decoded")
        yield pixels


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Decode from here on; packets that cannot be decoded give no frame."""
    av = import_pyav()
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.EOFError:
            return
        except av.FFmpegError:
            continue


def _upright(frame: Any) -> np.ndarray:
    """Convert a frame to RGB, uint8 `[h, w, 3]`, and turn it as its display matrix says."""
    pixels = frame.to_ndarray(format="rgb24")
    turns, rest = divmod(round(frame.rotation), 90)
    if rest:
        raise BadMedia(f"a video that is turned by {frame.rotation} degrees, which are no quarters; encode it upright")
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns % 4 else pixels
