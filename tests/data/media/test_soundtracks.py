"""The sound of a video is as long as its header says, and is the clip that was written; a silent video has none."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from clips_made import SOUND_RATE, frames_of, write_video
from PIL import Image

from mmjax.config import MediaLimits
from mmjax.data.media.decode_clips import resampled_length
from mmjax.data.media.soundtrack import (
    SILENT,
    decode_clip,
    decode_sound,
    read_clip_header,
    read_sound_header,
)
from mmjax.data.media.video_header import read_video_header
from mmjax.errors import BadMedia


def tones(samples: int, rate: int = SOUND_RATE) -> np.ndarray:
    time = np.arange(samples) / rate
    return (0.3 * np.sin(2 * np.pi * 440 * time) + 0.1 * np.sin(2 * np.pi * 1000 * time)).astype(
        np.float32
    )


@pytest.mark.parametrize("samples", [30_000, 90_000], ids=["shorter", "longer"])
@pytest.mark.parametrize(("ending", "tolerance"), [("mp4", 0.02), ("mkv", 1e-4)])
def test_sound_is_resampled_as_clips_are_and_frames_are_counted_beside_it(
    ending: str, tolerance: float, samples: int, tmp_path: Path
) -> None:
    """A stereo track that ends before the 2 s of frames or after, of which the channels' mean is taken."""
    stereo = np.stack([tones(samples), np.zeros(samples, np.float32)])
    path = write_video(
        tmp_path / f"a.{ending}", frames_of(np.random.default_rng(0), 20, 32, 40), 10, sound=stereo
    )
    with path.open("rb") as file:
        header = read_sound_header(file)
        assert header.sample_rate == SOUND_RATE
        assert abs(header.frames - samples) <= SOUND_RATE / 1000  # Matroska counts milliseconds
        wave = decode_sound(file, 16_000)
        assert len(wave) == resampled_length(header, 16_000)
        file.seek(0)
        assert read_video_header(file)[0] >> 32 == 20
        file.seek(0)
        with pytest.raises(BadMedia, match="is longer than 1 s"):
            decode_sound(file, 16_000, MediaLimits(seconds=1))
    middle = slice(2000, len(wave) - 2000)
    np.testing.assert_allclose(wave[middle], tones(len(wave), 16_000)[middle] / 2, atol=tolerance)


def test_a_video_without_sound_and_a_list_of_frames_are_silent(tmp_path: Path) -> None:
    frames = frames_of(np.random.default_rng(0), 5, 32, 40)
    picture = io.BytesIO()
    Image.fromarray(frames[0]).save(picture, "PNG")
    for content in (write_video(tmp_path / "a.mp4", frames).read_bytes(), picture.getvalue()):
        assert read_sound_header(io.BytesIO(content)) == SILENT
        assert decode_sound(io.BytesIO(content), 16_000) is None
    with pytest.raises(BadMedia, match="no video that FFmpeg can open"):
        read_sound_header(io.BytesIO(b"no video at all, but some text"))


def test_an_m4a_is_a_clip_of_its_own_length_and_one_that_is_cut_off_is_bad(tmp_path: Path) -> None:
    samples = (0.5 * np.sin(np.arange(48_000) * 0.05)).astype(np.float32)
    with av.open(str(tmp_path / "a.m4a"), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = 16_000
        frame.pts = 0  # else the encoder's own first samples are not told from the clip's
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    data = (tmp_path / "a.m4a").read_bytes()
    header = read_clip_header(io.BytesIO(data))
    assert header.sample_rate == 16_000
    assert abs(header.frames - 48_000) <= 2048
    made = decode_clip(data, 16_000)
    assert len(made) == header.frames
    assert np.corrcoef(made[1000:40_000], samples[1000:40_000])[0, 1] > 0.95
    for cut in range(40, len(data) - 2000, 997):
        with pytest.raises(BadMedia):
            decode_clip(data[:cut], 16_000)
