"""Log-mel frames are a direct transform's, cover their clip and do not hear gain."""

import numpy as np
import pytest

from mmjax.config import LogMel
from mmjax.data.media.mel_power import mel_filters
from mmjax.data.media.preparations.log_mel import compute_frames, frame_count

HOW = LogMel(mels=20, sample_rate=4000, window=128, hop=64)


@pytest.mark.parametrize(("samples", "expected"), [(1, 1), (128, 1), (129, 2), (192, 2), (193, 3)])
def test_frames_cover_a_clip_to_its_last_sample(samples, expected):
    assert frame_count(HOW, samples) == expected
    wave = np.zeros(samples, np.float32)
    wave[-10:] = 1
    frames = compute_frames(HOW, wave)
    assert len(frames) == expected
    assert samples < 10 or frames[-1].max() > -3


def test_log_mel_equals_a_direct_dft():
    wave = np.random.default_rng(0).normal(size=700).astype(np.float32) * 0.2
    wave += np.sin(2 * np.pi * 770 / 4000 * np.arange(700)).astype(np.float32)
    count, filters = frame_count(HOW, 700), mel_filters(4000, 128, 20)
    decades = np.zeros((count, 20))
    for frame in range(count):
        piece = np.zeros(128)
        part = wave[frame * 64 : frame * 64 + 128]
        piece[: len(part)] = part
        piece *= 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(128) / 128)
        for mel in range(20):
            power = sum(
                filters[k, mel]
                * abs(sum(piece * np.exp(-2j * np.pi * k * np.arange(128) / 128))) ** 2
                for k in range(65)
            )
            decades[frame, mel] = np.log10(power)
    expected = (np.maximum(decades, decades.max() - 8) - decades.max()) / 2 + 1
    np.testing.assert_allclose(compute_frames(HOW, wave), expected, atol=1e-4)


def test_log_mel_does_not_hear_gain_and_a_silent_clip_stays_silent():
    wave = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_allclose(
        compute_frames(HOW, wave), compute_frames(HOW, wave * np.float32(0.1)), atol=1e-3
    )
    assert (compute_frames(HOW, np.zeros(500, np.float32)) == -3).all()


def test_mel_filters_are_slaneys():
    # Whisper's bank (16 kHz, 400 samples, 80 mels): spacing 37.24 Hz below 1 kHz, and unit area per
    # filter.
    filters = mel_filters(16_000, 400, 80)
    assert filters.shape == (201, 80)
    assert (filters.sum(0) > 0).all()
    np.testing.assert_allclose(filters[:, 60:].sum(0) * 40, 1, atol=0.06)
    assert filters[1, 0] == pytest.approx(0.0248, abs=1e-3)
