"""Log-mel frames are those of Whisper's extractor, without computing its thirty seconds of silence."""

from __future__ import annotations

import time

import numpy as np
import pytest
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

from mmjax.config import WhisperMel
from mmjax.data.media.preparations.whisper_mel import compute_frames, split, valid_frames
from mmjax.errors import BadMedia

LENGTHS = (1, 100, 160, 161, 399, 401, 1000, 16_000, 50_001, 479_900, 479_990, 480_000)


def waves(samples: int) -> dict[str, np.ndarray]:
    """Clips that differ in how far their quiet bins lie below the loudest."""
    rng, t = np.random.default_rng(samples), np.arange(samples)
    click = np.zeros(samples)
    click[-1] = 1
    made = {
        "noise": 0.1 * rng.standard_normal(samples),
        "tone": 0.5 * np.sin(0.3 * t),
        "sweep": 0.3 * np.sin(0.05 * t) * np.sin(2e-4 * t) ** 6
        + 1e-4 * rng.standard_normal(samples),
        "silence": np.zeros(samples),
        "click": click,
    }
    return {name: wave.astype(np.float32) for name, wave in made.items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("samples", LENGTHS)
@pytest.mark.parametrize("mels", [80, 128])
def test_frames_within_and_beyond_the_clip_equal_whispers_extractor(samples, mels):
    extractor, how = WhisperFeatureExtractor(feature_size=mels), WhisperMel(mels=mels)
    for name, wave in waves(samples).items():
        made = extractor(
            wave, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
        )
        valid = valid_frames(how, samples)
        assert valid == made["attention_mask"].sum()
        for extra in (0, 3, 3000):
            frames = compute_frames(how, wave, valid + extra)
            assert frames.dtype == np.float32
            assert len(frames) == min(valid + extra, 3000)
            np.testing.assert_allclose(
                frames, made["input_features"][0].T[: len(frames)], atol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("samples", [1, 4_000, 7_999, 8_001, 8_123, 16_000, 160_123, 500_007])
def test_frames_of_clips_of_any_length_equal_qwen3_asrs_extractor(samples):
    extractor = Qwen3ASRFeatureExtractor(80, n_window=0)
    how = WhisperMel(mels=80, end="mirror", longer="whole", shortest=8000)
    for name, wave in waves(samples).items():
        made = extractor(wave, sampling_rate=16_000, padding=True, return_attention_mask=True)
        assert valid_frames(how, samples) == made["attention_mask"].sum()
        expected = made["input_features"][0].T
        np.testing.assert_allclose(compute_frames(how, wave), expected, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("samples", [4_000, 32_000, 32_001, 47_900, 150_000])
def test_a_clip_of_several_windows_is_padded_and_normalised_as_a_whole(samples):
    extractor = WhisperFeatureExtractor(feature_size=40)
    how = WhisperMel(mels=40, seconds=2, longer="whole", attended="window")
    for wave in waves(samples).values():
        made = extractor(
            wave, sampling_rate=16_000, padding=True, truncation=False, pad_to_multiple_of=32_000, return_tensors="np",
        )  # fmt: skip
        expected = made["input_features"][0].T
        frames = compute_frames(how, wave, len(expected) + 9)
        np.testing.assert_allclose(frames, expected, atol=1e-4)


def test_other_windows_and_rates_equal_the_extractor_too():
    extractor = WhisperFeatureExtractor(feature_size=40, n_fft=256, hop_length=128, chunk_length=2)
    how = WhisperMel(mels=40, window=256, hop=128, seconds=2)
    assert how.window_frames == extractor.nb_max_frames
    for samples in (1, 5000, 31_990, 32_000):
        for wave in waves(samples).values():
            expected = extractor(wave, sampling_rate=16_000, return_tensors="np")["input_features"][
                0
            ].T
            np.testing.assert_allclose(compute_frames(how, wave, 250), expected, atol=1e-4)


def test_a_clip_longer_than_the_window_is_refused_or_split_never_cut_off():
    samples = 16_000 * 70 + 5
    with pytest.raises(BadMedia, match=r"a clip of 70\.0 s is longer than the encoder's 30 s"):
        split(WhisperMel(), samples)
    cut = split(WhisperMel(longer="split"), samples)
    assert cut == ((0, 480_000), (480_000, 960_000), (960_000, samples))
    for how in (WhisperMel(), WhisperMel(longer="split")):
        with pytest.raises(BadMedia, match="longer than the encoder's 30 s"):
            compute_frames(how, np.zeros(samples, np.float32))
    assert split(WhisperMel(), 480_000) == ((0, 480_000),)


def test_an_empty_clip_is_bad():
    with pytest.raises(BadMedia, match="a clip of 0 samples is empty"):
        compute_frames(WhisperMel(), np.zeros(0, np.float32))


@pytest.mark.parametrize("wave", [np.zeros((4, 2), np.float32), np.zeros(4, np.int16)])
def test_only_waves_of_one_channel_of_floats_are_taken(wave):
    with pytest.raises(ValueError, match="a clip must be floats"):
        compute_frames(WhisperMel(), wave)


@pytest.mark.exhaustive
def test_a_core_makes_frames_a_hundred_times_faster_than_the_clip_plays():
    wave = waves(480_000)["noise"]
    compute_frames(WhisperMel(mels=128), wave)
    best = min(_seconds(wave) for _ in range(5))
    assert best < 0.3


def _seconds(wave: np.ndarray) -> float:
    started = time.process_time()
    compute_frames(WhisperMel(mels=128), wave)
    return time.process_time() - started
