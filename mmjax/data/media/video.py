"""Decode the sampled frames of videos: files that FFmpeg reads (through PyAV), or image files in the order of time.

As many frames are decoded as were planned, whatever the container's count says: a file that lacks a
few at its end repeats its last, one that lacks more is bad. Frames are turned upright; their
resizing is Pillow's, as for images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mmjax.config import MediaLimits, VisionConfig
from mmjax.data.media.decode import VideoHeader, check_media_size
from mmjax.data.media.decode_images import decode_image
from mmjax.data.media.image_transforms import LazyImage
from mmjax.data.media.preparations import sample_video
from mmjax.data.media.video_header import (
    describe_av_error,
    import_pyav,
    open_container,
    read_video_header,
    video_stream,
    zip_frame,
    zip_frames,
)
from mmjax.errors import BadMedia

EDGE = 512  # pixels by which buffers of a codec may be wider or higher than what is shown
MISSING_SHARE = 0.05  # of a video's time that its last frames may lack,
MISSING_FRAMES = 2  # or so many frames
GAP = 64  # frames that are decoded rather than skipped to the next key frame


def decode_video(
    file: BinaryIO, encoder: VisionConfig, limits: MediaLimits = MediaLimits()
) -> tuple[np.ndarray, ...]:
    """Decode the frames that `sample_video` takes: temporal patches, uint8 `[frames, height, width, 3]` each.

    At most the sampled frames are in memory, resized. Raises BadMedia as `read_video_header`, for a
    video beyond the limits, and for one that is truncated or corrupt.
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
        if frame.shape[:2] != header.size:
            raise BadMedia(
                f"a frame of {frame.shape[0]} x {frame.shape[1]} pixels in a video of {header.height} x {header.width}"
            )
        resized = (
            LazyImage(frame.shape[:2], frame, limits.pixels)
            .resized(sampled.size, encoder.videos.filter)
            .pixels
        )
        frames.append(resized)
    # A frame that is taken more than once is decoded once.
    distinct = np.unique(sampled.indices, return_inverse=True)[1].reshape(-1, encoder.frames)
    return tuple(np.stack([frames[k] for k in patch]) for patch in distinct)


def _image_frames(file: BinaryIO, indices: np.ndarray, limits: MediaLimits) -> Iterator[np.ndarray]:
    images = zip_frames(file)
    for index in np.unique(indices):
        try:
            yield decode_image(zip_frame(images, index).read(), limits)
        except BadMedia as bad:
            raise BadMedia(f"frame {index}: {bad}") from None


def _container_frames(
    file: BinaryIO, header: VideoHeader, indices: np.ndarray
) -> Iterator[np.ndarray]:
    """Decode these frames of a container, upright, each once and in order."""
    av = import_pyav()
    try:
        with open_container(file) as container:
            stream = video_stream(container)
            times, keys = _packet_times(container, stream)
            frame_times = _frame_times(np.unique(indices), times, header, float(stream.time_base))
            yield from _frames_at(container, stream, frame_times, times, keys)
    except av.FFmpegError as error:
        raise BadMedia(f"corrupt video: {describe_av_error(error)}") from None


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


def _frame_times(
    indices: np.ndarray, times: np.ndarray, header: VideoHeader, unit: float
) -> np.ndarray:
    """Find the times of the frames with these numbers. Raises BadMedia where the video ends long before it should.

    Where the header counts other frames than there are, as where it counts none and they come at a
    variable rate, a frame is the one that is shown at its time.
    """
    if len(times) == header.frames:
        return times[indices]
    lacks = header.frames / float(header.rate) - (times[-1] - times[0]) * unit
    # The last frame is shown for a while, which is not known here: no longer than the longest of
    # the others.
    longest = (np.diff(times).max(initial=0) or 1 / float(header.rate) / unit) * unit
    if lacks - longest > max(MISSING_SHARE * header.frames, MISSING_FRAMES) / float(header.rate):
        duration = header.frames / float(header.rate)
        raise BadMedia(
            f"truncated video: it ends {lacks:.1f} s before the {duration:.1f} s of its header"
        )
    shown = times[0] + indices / float(header.rate) / unit
    # Half a tick: times are rounded to the time base.
    return times[np.maximum(np.searchsorted(times, shown + 0.5, side="right") - 1, 0)]


def _frames_at(
    container: Any, stream: Any, frame_times: np.ndarray, times: np.ndarray, keys: np.ndarray
) -> Iterator[np.ndarray]:
    """Decode the frames of these ascending times, and skip to a key frame where many lie between two of them.

    A frame at a video's end that cannot be decoded is the last that can be; one elsewhere raises
    BadMedia.
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
        # Decoding goes on from the newest frame, unless the last key frame before the target is far
        # ahead of it: then it starts there.
        time = int(times[target])
        key = int(keys[max(np.searchsorted(keys, time, side="right") - 1, 0)])
        if position < 0 or np.searchsorted(times, key) > position + GAP:
            container.seek(key, stream=stream)
            frames = _decoded(container, stream)
        frame = next(
            (frame for frame in frames if frame.pts is not None and frame.pts >= time), None
        )
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
        raise BadMedia(
            f"a video that is turned by {frame.rotation} degrees, which are no quarters; encode it upright"
        )
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns % 4 else pixels
