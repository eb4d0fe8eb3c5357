"""The sound of a video, and M4A, as clips: lengths from the container's header, samples decoded by FFmpeg (PyAV).

As many samples are taken as the header promises, and silence follows where there are fewer:
Matroska may say but the length of its longest track. Whether a file is cut off is seen by its
frames.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mmjax.config import MediaLimits
from mmjax.data.media import decode_clips
from mmjax.data.media.decode import check_media_size
from mmjax.data.media.decode_clips import BLOCK, ClipHeader, check_clip_header, resample
from mmjax.data.media.decode_images import image_kind
from mmjax.data.media.video_header import ZIP_START, import_pyav, open_container, track_seconds
from mmjax.errors import BadMedia

SILENT = ClipHeader(frames=0, sample_rate=1)  # of a video without sound
MISSING_SECONDS = 0.1  # that an M4A may lack at its end, whose header counts what its encoder added


def read_clip_header(file: BinaryIO) -> ClipHeader:
    """Read length and sample rate of a clip of any format, as `decode_clips.read_clip_header`. Raises BadMedia."""
    if not _is_m4a(file):
        return decode_clips.read_clip_header(file)
    import_pyav("M4A clips")
    if (header := read_sound_header(file)) == SILENT:
        raise BadMedia("an M4A without a sound track")
    return check_clip_header(header)


def decode_clip(data: bytes, sample_rate: int, limits: MediaLimits = MediaLimits()) -> np.ndarray:
    """Decode a clip's file of any format to mono samples at that rate, as `decode_clips.decode_clip` does."""
    file = io.BytesIO(data)
    if not _is_m4a(file):
        return decode_clips.decode_clip(data, sample_rate, limits)
    check_media_size("audio", read_clip_header(file), limits)
    return decode_sound(io.BytesIO(data), sample_rate, limits, MISSING_SECONDS)


def _is_m4a(file: BinaryIO) -> bool:
    start = file.read(32)
    file.seek(0)
    return start[4:8] == b"ftyp" and image_kind(start) is None


def read_sound_header(file: BinaryIO) -> ClipHeader:
    """Read the length of a video's first sound track from a seekable file; `SILENT` where it has none.

    Raises BadMedia for a file that cannot be opened, and for a track that does not say how long it
    is.
    """
    # A list of images, or one, counts as a video: there is no container to open.
    start = file.read(32)
    file.seek(0)
    if start.startswith(ZIP_START) or image_kind(start):
        return SILENT
    with open_container(file) as container:
        if not container.streams.audio or not container.streams.audio[0].rate:
            return SILENT
        stream = container.streams.audio[0]
        if (seconds := track_seconds(container, stream)) is None:
            raise BadMedia("a video whose sound does not say how long it is; encode it again")
        return ClipHeader(frames=max(1, round(seconds * stream.rate)), sample_rate=stream.rate)


def decode_sound(
    file: BinaryIO,
    sample_rate: int,
    limits: MediaLimits = MediaLimits(),
    missing_seconds: float = math.inf,
) -> np.ndarray | None:
    """Decode a video's sound to mono samples at that rate, float32 `[n]`; None for a silent video.

    Raises BadMedia as `read_sound_header`, for sound beyond the limits, for sound that is corrupt,
    and where more of it is missing than so many seconds.
    """
    header = read_sound_header(file)
    if header == SILENT:
        return None
    check_media_size("sound", header, limits)
    file.seek(0)
    av = import_pyav()
    try:
        with open_container(file) as container:
            missing = missing_seconds * header.sample_rate
            return resample(
                _filled(_mono(av, container, header), header.frames, missing), header, sample_rate
            )
    except av.FFmpegError as error:
        raise BadMedia(f"corrupt sound of a video: {error}") from None


def _mono(av: Any, container: Any, header: ClipHeader) -> Iterator[np.ndarray]:
    for piece in _samples(av, container, header):
        wave = piece.mean(axis=0)
        if not np.isfinite(wave).all():
            raise BadMedia("a video's sound holds samples that are not finite")
        yield wave


def _filled(blocks: Iterator[np.ndarray], samples: int, may_miss: float) -> Iterator[np.ndarray]:
    """Yield so many samples in blocks, the last ones silence where there are fewer. Raises BadMedia for too few."""
    # In blocks, so that a header that promises hours does not make hours of silence at once.
    missing = samples
    for block in blocks:
        yield block[:missing]
        missing -= len(block[:missing])
    if missing == samples:
        raise BadMedia("a video whose sound cannot be decoded")
    if missing > may_miss:
        raise BadMedia(f"truncated sound: {samples - missing} of {samples} samples")
    for start in range(0, missing, BLOCK):
        yield np.zeros(min(BLOCK, missing - start), np.float32)


def _samples(av: Any, container: Any, header: ClipHeader) -> Any:
    """Decode float32 `[channels, samples]`, piece by piece, no further than the header says."""
    # fltp: float32, a plane for each channel, whatever the codec decodes to.
    planar = av.AudioResampler(format="fltp")
    count = 0
    for frame in container.decode(container.streams.audio[0]):
        for piece in planar.resample(frame):
            yield piece.to_ndarray()
            count += piece.samples
        if count >= header.frames:
            return
