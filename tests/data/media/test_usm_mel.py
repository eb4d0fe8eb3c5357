"""Log-mel frames of magnitudes are those of Gemma 4's extractor, whole frames alone."""

from __future__ import annotations

import numpy as np
import pytest
from test_whisper_mel import waves
from transformers import Gemma4AudioFeatureExtractor

from mmjax.config import AudioConfig, ConformerConfig, ConnectorConfig, UsmMel
from mmjax.data.media.patches import item_size
from mmjax.data.media.preparations.usm_mel import compute_frames, count_frames, split
from mmjax.errors import BadMedia

EARS = AudioConfig(
    1,
    8,
    2,
    16,
    UsmMel(),
    connector=ConnectorConfig(merge=1),
    conformer=ConformerConfig(past=3),
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("samples", [161, 320, 321, 16_000, 50_001, 479_999, 480_000])
@pytest.mark.parametrize(
    "own", [{}, {"feature_size": 40, "frame_length_ms": 25.1, "max_frequency": 7000.0}]
)
def test_frames_equal_the_extractors(own, samples):
    extractor = Gemma4AudioFeatureExtractor(min_frequency=20.0 * len(own), **own)
    window, mels = extractor.frame_length, extractor.feature_size
    how = UsmMel(mels, window=window, low=20.0 * len(own), high=own.get("max_frequency", 8000.0))
    for name, wave in waves(samples).items():
        made = extractor([wave], return_tensors="np")
        mask = made["input_features_mask"][0]
        if not mask.sum():
            with pytest.raises(BadMedia, match="is too short"):
                count_frames(how, EARS, samples, np.inf)
            continue
        assert count_frames(how, EARS, samples, np.inf) == (mask.sum(), mask.sum())
        frames = compute_frames(how, wave, mask.sum())
        assert frames.dtype == np.float32
        wanted = made["input_features"][0][mask]
        np.testing.assert_allclose(frames, wanted, atol=1e-5, err_msg=name)


def test_a_clip_has_a_token_for_each_four_of_its_frames_begun():
    counts = [item_size(EARS, (160 * (n + 1) + 1,)).tokens for n in range(9)]
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    with pytest.raises(BadMedia, match="a clip of 160 samples is too short"):
        item_size(EARS, (160,))
    with pytest.raises(BadMedia, match=r"a clip of 30.0 s is longer than the encoder's 30 s"):
        split(UsmMel(), 480_001)
