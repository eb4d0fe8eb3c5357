"""Clips' files become the samples that transformers' load_audio gives, their headers tell the length, bad ones why."""

from __future__ import annotations

import io
import struct
import tracemalloc

import numpy as np
import pytest
import soundfile
import soxr
from transformers.audio_utils import load_audio

from mmjax.config import MediaLimits
from mmjax.data.media.decode_clips import (
    BLOCK,
    ClipHeader,
    decode_clip,
    read_clip_header,
    resampled_length,
)
from mmjax.errors import BadMedia

FORMATS = {
    "wav 16": ("WAV", "PCM_16"),
    "wav 8": ("WAV", "PCM_U8"),
    "wav float": ("WAV", "FLOAT"),
    "wav extensible": ("WAVEX", "PCM_24"),
    "flac": ("FLAC", "PCM_16"),
    "vorbis": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}


def wave(frames: int, channels: int = 1) -> np.ndarray:
    """float32 `[frames, channels]`: a tone of each channel's own with noise."""
    rng, t = np.random.default_rng(frames), np.arange(frames)[:, None]
    tones = 0.4 * np.sin(t * 0.03 * (1 + np.arange(channels))) + 0.02 * rng.standard_normal(
        (frames, channels)
    )
    return tones.astype(np.float32)


def encoded(samples: np.ndarray, rate: int, name: str) -> bytes:
    file, (format, subtype) = io.BytesIO(), FORMATS[name]
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def check_as_transformers(data: bytes, rate: int, folder) -> None:
    path = folder / "clip"
    path.write_bytes(data)
    expected = load_audio(str(path), sampling_rate=rate, backend="soundfile")
    made = decode_clip(data, rate)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, expected)
    assert resampled_length(read_clip_header(io.BytesIO(data)), rate) == len(made)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_format_has_the_samples_of_transformers(name, channels, tmp_path):
    data = encoded(wave(50_003, channels), 48_000, name)
    assert read_clip_header(io.BytesIO(data)) == ClipHeader(50_003, 48_000)
    check_as_transformers(data, 48_000, tmp_path)
    check_as_transformers(data, 16_000, tmp_path)


@pytest.mark.parametrize(
    ("frames", "rate"), [(48, 48_000), (8, 8000), (160_001, 44_100), (22_050, 22_050), (12, 11_025)]
)
def test_resampled_clips_have_the_length_and_samples_of_transformers(frames, rate, tmp_path):
    check_as_transformers(encoded(wave(frames, 3), rate, "wav float"), 16_000, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_file_is_bad_or_whole_never_half_a_clip(name):
    data = encoded(wave(60_000), 16_000, name)
    whole, reasons = decode_clip(data, 16_000), set()
    for cut in [*range(1, 60, 3), *np.linspace(60, len(data) - 1, 40).astype(int)]:
        try:
            made = decode_clip(data[:cut], 16_000)
        except BadMedia as error:
            reasons.add(str(error))
        else:  # only what follows the samples was cut off
            np.testing.assert_array_equal(made, whole)
            assert cut > 0.9 * len(data)
    assert reasons
    assert not any("\n" in reason or " at 0x" in reason for reason in reasons)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_that_were_overwritten_never_end_in_anything_but_a_clip_or_bad_media(name):
    data, rng = encoded(wave(8000), 16_000, name), np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(0, min(len(data), 3000), 3):
            broken[at] = rng.integers(256)
        try:
            facts = read_clip_header(io.BytesIO(bytes(broken)))
            made = decode_clip(bytes(broken), facts.sample_rate)
        except BadMedia:
            continue
        assert len(made) == facts.frames
        assert np.isfinite(made).all()


def test_what_is_no_clip_says_so():
    for data in (
        b"<html>not found</html>",
        b"\0" * 100,
        b"RIFF0000WEBPVP8 ",
        b"RF64\0\0\0\0WAVE",
        b"FORM\0\0\0\0AIFFCOMM",
    ):
        with pytest.raises(BadMedia, match="no clip of a known format"):
            read_clip_header(io.BytesIO(data))
    with pytest.raises(BadMedia, match=r"an empty file \(0 bytes\)"):
        decode_clip(b"", 16_000)


@pytest.mark.parametrize("name", ["wav 16", "wav float"])
def test_a_clip_without_samples_says_so(name):
    with pytest.raises(BadMedia, match="a clip of 0 samples is empty"):
        read_clip_header(io.BytesIO(encoded(wave(0), 16_000, name)))


@pytest.mark.parametrize("frames", [1, 7])
def test_a_clip_of_less_than_a_thousandth_of_a_second_is_refused(frames):
    with pytest.raises(
        BadMedia, match=rf"a clip of {frames} samples at 8000 Hz is shorter than 1 ms"
    ):
        decode_clip(encoded(wave(frames), 8000, "wav 16"), 16_000)


def test_a_wav_that_claims_fewer_bytes_than_follow_is_refused_and_one_with_other_chunks_is_not():
    data = encoded(wave(2000), 16_000, "wav 16")
    at = data.index(b"data") + 4
    claims = data[:at] + struct.pack("<I", 100) + data[at + 4 :]
    with pytest.raises(BadMedia, match=r"claims 100 bytes of samples, and 3900 more bytes follow"):
        decode_clip(claims, 16_000)
    for more in (
        b"LIST" + struct.pack("<I", 4) + b"INFO",
        b"id3 " + struct.pack("<I", 3) + b"abc\0",
        bytes(500),
    ):
        np.testing.assert_array_equal(decode_clip(data + more, 16_000), decode_clip(data, 16_000))


def test_samples_that_are_no_numbers_are_bad():
    samples = wave(1000)
    samples[500] = np.nan
    with pytest.raises(BadMedia, match="samples that are not finite"):
        decode_clip(encoded(samples, 16_000, "wav float"), 16_000)


def test_a_clip_longer_than_the_limit_is_refused_by_its_header():
    data = encoded(wave(16_001), 16_000, "flac")
    with pytest.raises(BadMedia, match=r"a clip of 1\.0 s is longer than 1 s"):
        decode_clip(data, 16_000, MediaLimits(seconds=1))
    assert len(decode_clip(data, 16_000, MediaLimits(seconds=1.001))) == 16_001


def test_a_wav_that_was_written_to_a_pipe_has_the_length_that_is_there(tmp_path):
    data = bytearray(encoded(wave(3000), 16_000, "wav 16"))
    for at in (4, data.index(b"data") + 4):
        data[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    assert read_clip_header(io.BytesIO(bytes(data))).frames == 3000
    check_as_transformers(bytes(data), 16_000, tmp_path)


def test_an_mp3_that_does_not_say_its_length_is_bad_instead_of_cut_off(tmp_path):
    data = encoded(wave(100_000), 16_000, "mp3")
    first = data.index(data[:2], 4)
    assert any(name in data[:first] for name in (b"Xing", b"Info"))
    with pytest.raises(BadMedia, match="an MP3 that does not say its length"):
        read_clip_header(io.BytesIO(data[first:]))
    tagged = b"ID3\x04\0\0\0\0\x10\0" + bytes(2048) + data
    check_as_transformers(tagged, 16_000, tmp_path)


def test_an_error_of_the_file_itself_is_no_bad_media():
    class Lost(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            self.reads = getattr(self, "reads", 0) + 1
            if self.reads > 2:
                raise ConnectionResetError("lost")
            return super().read(count)

    for name in ("wav 16", "flac", "opus"):
        with pytest.raises(ConnectionResetError, match="lost"):
            read_clip_header(Lost(encoded(wave(9000), 16_000, name)))


def test_a_clip_of_many_channels_and_a_high_rate_takes_little_more_than_its_resampled_samples():
    """40 s of 8 channels at 96 kHz: 123 MB of samples from 20 KB."""
    data = encoded(np.zeros((40 * 96_000, 8), np.float32), 96_000, "flac")
    assert len(data) < 100_000
    tracemalloc.start()
    assert len(decode_clip(data, 16_000)) == 40 * 16_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 25_000_000


def test_clips_that_are_decoded_in_blocks_are_those_that_are_decoded_whole():
    samples = wave(2 * BLOCK + 1234)
    whole = soxr.resample(samples[:, 0], 44_100, 16_000, quality="HQ")
    made = decode_clip(encoded(samples, 44_100, "wav float"), 16_000)
    np.testing.assert_array_equal(made[: len(whole)], whole[: len(made)])
    assert abs(len(made) - len(whole)) <= 1


@pytest.mark.parametrize("bits", ["PCM_S8", "PCM_16", "PCM_24"])
def test_a_flac_whose_samples_are_not_those_of_its_checksum_is_bad(bits):
    file = io.BytesIO()
    soundfile.write(file, wave(5000, 2), 16_000, format="FLAC", subtype=bits)
    data = bytearray(file.getvalue())
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(decode_clip(bytes(data), 16_000), expected.T.mean(axis=0))
    data[30] ^= 1
    with pytest.raises(BadMedia, match="corrupt FLAC: its samples are not those of its checksum"):
        decode_clip(bytes(data), 16_000)


@pytest.mark.parametrize("frames", [100, 5000, 200_000])
def test_a_flac_with_bytes_behind_its_last_frame_is_bad_and_one_without_is_whole(frames):
    data = encoded(wave(frames), 16_000, "flac")
    unknown = data[:15] + bytes(3) + data[18:]  # of how many bytes the longest frame is
    for whole in (data, unknown):
        assert len(decode_clip(whole, 16_000)) == frames
        for behind in (b"\1", bytes(16), b"TAG" + bytes(125), whole[-50:]):
            with pytest.raises(BadMedia, match="corrupt FLAC: other bytes follow its last frame"):
                decode_clip(whole + behind, 16_000)


def test_an_ogg_with_a_damaged_or_a_missing_page_is_bad():
    data = encoded(wave(200_000), 16_000, "vorbis")
    pages = [b"OggS" + page for page in data.split(b"OggS")[1:]]
    middle = len(pages) // 2
    damaged = bytearray(pages[middle])
    damaged[-1] ^= 1
    with pytest.raises(BadMedia, match="corrupt OGG: the checksum of its page at byte"):
        decode_clip(b"".join((*pages[:middle], damaged, *pages[middle + 1 :])), 16_000)
    with pytest.raises(BadMedia, match="corrupt OGG: pages are missing before byte"):
        decode_clip(b"".join((*pages[:middle], *pages[middle + 1 :])), 16_000)
