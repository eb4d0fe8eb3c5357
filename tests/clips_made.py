"""Short videos written with PyAV, of blocks of colour that move: sizes, rates and lengths as a test draws them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

SOUND_RATE = 24_000  # Hz


def frames_of(rng: np.random.Generator, count: int, height: int, width: int) -> list[np.ndarray]:
    """Blocks of 8 pixels that move to the right, uint8 `[height, width, 3]` each, and get lighter."""
    blocks = rng.integers(0, 200, (height // 8 + 1, width // 8 + 1, 3))
    picture = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    return [np.clip(np.roll(picture, 3 * k, 1) + k, 0, 255).astype(np.uint8) for k in range(count)]


def write_video(
    path: Path,
    frames: Sequence[np.ndarray],
    rate: Fraction | int = 30,
    codec: str = "mpeg4",
    times: Sequence[int] | None = None,
    turned: int = 0,
    key_every: int = 12,
    sound: np.ndarray | None = None,
) -> Path:
    """Write a video. times: of the frames, in units of 1 / rate; turned: degrees of its display matrix.

    sound: samples in -1..1 at `SOUND_RATE`, float32 `[channels, n]`.
    """
    height, width, _ = frames[0].shape
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = (
            width,
            height,
            "yuv420p",
            key_every,
        )
        if turned:
            stream.set_display_rotation(turned)
        track = (
            None
            if sound is None
            else container.add_stream("aac" if path.suffix == ".mp4" else "pcm_s16le", SOUND_RATE)
        )
        if track is not None:
            track.layout = "mono" if len(sound) == 1 else "stereo"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts = times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if track is not None:
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(sound, np.float32), "fltp", track.layout.name
            )
            frame.sample_rate, frame.pts = SOUND_RATE, 0
            for piece in av.AudioResampler(track.format, track.layout, SOUND_RATE).resample(frame):
                container.mux(track.encode(piece))
            container.mux(track.encode())
    return path
