"""Frames of samples are those of Gemma 4 Unified's extractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Gemma4UnifiedAudioFeatureExtractor

from mmjax.config import AudioConfig, ConnectorConfig, Waveform
from mmjax.data.media.patches import item_size, log_mel_frames, split_clip
from mmjax.errors import BadMedia

EARS = AudioConfig(1, 640, 1, 0, Waveform(), connector=ConnectorConfig(merge=1))


@pytest.mark.parametrize("samples", [1, 639, 640, 641, 16_000])
def test_frames_equal_the_extractors_and_each_is_a_token(samples):
    wave = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    wanted = Gemma4UnifiedAudioFeatureExtractor()(wave, return_tensors="np")["input_features"][0]
    frames = log_mel_frames(EARS, wave)
    assert frames.dtype == np.float32
    np.testing.assert_array_equal(frames, wanted)
    assert item_size(EARS, (samples,)).tokens == len(wanted)


def test_an_empty_clip_is_refused():
    with pytest.raises(BadMedia, match="a clip of 0 samples is empty"):
        split_clip(EARS, 0)
