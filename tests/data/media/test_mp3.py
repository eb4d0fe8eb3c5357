"""MP3s have the length that libsndfile says, and what libmpg123 complains of is refused, with nothing on the screen."""

from __future__ import annotations

import io
import re
import shutil
import subprocess

import numpy as np
import pytest
import soundfile

from mmjax.data.media.decode_clips import decode_clip
from mmjax.data.media.mp3 import read_mp3_header
from mmjax.data.storage.files import InlineBytes
from mmjax.data.storage.media_files import AudioSegment
from mmjax.errors import BadMedia

COMPLAINT = re.compile(r"error|warning|note:|illegal|skipped|giving up", re.IGNORECASE)


def tone(rate: int, channels: int) -> np.ndarray:
    """float32 `[samples, channels]`: two seconds and a bit that rise, with noise."""
    t = np.arange(2 * rate + 321) / rate
    noise = np.random.default_rng(rate).standard_normal(len(t))
    mono = 0.4 * np.sin(2 * np.pi * 440 * t * (1 + t / 3)) + 0.05 * noise
    return np.repeat(mono[:, None], channels, axis=1).astype(np.float32)


def by_libsndfile(rate: int, channels: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(rate, channels), rate, format="MP3", subtype="MPEG_LAYER_III")
    return file.getvalue()


def by_ffmpeg(rate: int, channels: int) -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format="mp3") as container:
        stream = container.add_stream("libmp3lame", rate=rate, layout=layout)
        samples = np.ascontiguousarray(tone(rate, channels).T)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("encode", [by_libsndfile, by_ffmpeg])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100])
def test_the_header_says_as_many_samples_as_libsndfile(encode, channels, rate) -> None:
    data = encode(rate, channels)
    info = soundfile.info(io.BytesIO(data))
    assert (
        read_mp3_header(io.BytesIO(data))
        == (info.frames, info.samplerate)
        == (len(tone(rate, 1)), rate)
    )
    # As transformers reads; soundfile.read seeks first, and the last bit differs.
    with soundfile.SoundFile(io.BytesIO(data)) as clip:
        expected = clip.read(dtype="float32", always_2d=True)
    np.testing.assert_array_equal(decode_clip(data, rate), expected.T.mean(axis=0))


def spoiled(data: bytes, rng: np.random.Generator) -> bytes:
    broken = bytearray(data)
    at = int(rng.integers(len(data)))
    match rng.integers(5):
        case 0:
            broken[at] ^= 1 << int(rng.integers(8))
        case 1:
            broken[at : at + 20] = rng.bytes(len(broken[at : at + 20]))
        case 2:
            broken[at:at] = rng.bytes(13)
        case 3:
            del broken[at : at + 17]
        case 4:
            broken[at : at + 64] = bytes(len(broken[at : at + 64]))
    return bytes(broken)


def test_a_damaged_mp3_is_refused_by_what_libmpg123_says_and_nothing_comes_to_the_screen(
    capfd,
) -> None:
    data = by_libsndfile(16_000, 1)
    rng = np.random.default_rng(0)
    reasons = []
    for _ in range(40):
        try:
            decode_clip(spoiled(data, rng), 16_000)
        except BadMedia as error:
            reasons.append(str(error))
    assert len(reasons) > 20
    assert any(reason.startswith("a damaged MP3: ") for reason in reasons)
    assert not any("\n" in reason for reason in reasons)
    assert capfd.readouterr() == ("", "")
    assert len(decode_clip(data, 16_000)) == len(tone(16_000, 1))  # and the decoder goes on


def test_what_follows_the_last_frame_must_be_a_tag() -> None:
    data = by_libsndfile(16_000, 1)
    decode_clip(data + b"TAG" + bytes(125), 16_000)
    with pytest.raises(BadMedia, match="it goes on behind its last frame"):
        decode_clip(data + bytes(range(1, 60)), 16_000)


def test_a_stretch_of_a_file_is_what_the_whole_has_there_and_as_strictly_read() -> None:
    data = by_libsndfile(44_100, 2)
    whole = decode_clip(data, 44_100)
    cut = decode_clip(AudioSegment(InlineBytes(data), 0.5, 0.25).read(), 44_100)
    np.testing.assert_array_equal(cut, whole[22_050 : 22_050 + 11_025])


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("mpg123"), reason="needs mpg123")
def test_nothing_that_mpg123_complains_of_is_used(tmp_path) -> None:
    rng = np.random.default_rng(1)
    sources = [
        encode(r, c)
        for encode in (by_libsndfile, by_ffmpeg)
        for r in (16_000, 44_100)
        for c in (1, 2)
    ]
    strict = 0
    for number in range(300):
        data = spoiled(sources[number % len(sources)], rng)
        (tmp_path / "a.mp3").write_bytes(data)
        said = subprocess.run(
            ["mpg123", "-t", tmp_path / "a.mp3"], capture_output=True, text=True, errors="replace"
        )
        complains = any(COMPLAINT.search(line) for line in said.stderr.splitlines())
        try:
            decode_clip(data, 16_000)
        except BadMedia:
            strict += not complains
        else:
            assert not complains, said.stderr
    assert strict < 15  # files that lack their last samples, of which mpg123 says nothing
