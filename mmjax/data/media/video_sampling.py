"""Choose the frames of a video, and their size, from its header, as transformers' video processors do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmjax.config import Glm4Video, Qwen2Video, Qwen3Video, SmartResize, VisionConfig
from mmjax.data.media.decode import VideoHeader
from mmjax.data.media.image_transforms import Size, smart_size, smart_size_of_frames


class SampledVideo(NamedTuple):
    """The frames that are taken of a video; each `VisionConfig.frames` of them are a temporal patch, and an item."""

    indices: np.ndarray  # int64 [n]: frames of the video, ascending; a multiple of a temporal patch
    size: Size  # of a frame, resized
    times: tuple[int, ...] = ()  # rotary positions of the temporal patches along t
    texts: tuple[str, ...] = ()  # that is written before the first temporal patch, between two, and behind the last


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
