"""Clips have as many frames as their samples say, and those that convolutions reach beyond their end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmjax.config import AudioConfig, ConnectorConfig, LogMel, Sinusoids, StoredTable, WhisperMel
from mmjax.data.media.patches import (
    ClipSize,
    clip_size,
    item_input,
    item_size,
    log_mel_frames,
    shown_tokens,
)
from mmjax.data.media.preparations.whisper_mel import compute_frames
from mmjax.errors import BadMedia

HOP = 160
WHISPER = AudioConfig(
    1, 16, 2, 16, WhisperMel(seconds=1), StoredTable(50), connector=ConnectorConfig(merge=1)
)
QWEN = replace(WHISPER, pool=2)


def clip(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).normal(size=samples).astype(np.float32)


@pytest.mark.parametrize("merge", [1, 2, 3, 4])
@pytest.mark.parametrize("pool", [1, 2, 3])
@pytest.mark.parametrize("attended", ["clip", "window"])
def test_any_pooling_and_merging_has_room_for_every_frame_and_tokens_for_every_whole_group(
    merge, pool, attended
):
    clips = replace(WHISPER.clips, attended=attended)
    encoder = replace(WHISPER, clips=clips, pool=pool, connector=ConnectorConfig(merge=merge))
    for frames in (*range(6, 20), 97, 98, 99, 100):
        wave = clip(frames * HOP - 5)
        size, made = item_size(encoder, wave.shape), item_input(encoder, wave)
        seen = 50 if attended == "window" else -(-frames // 2)
        held = 100 if attended == "window" else min(2 * seen + 1, 100)
        assert size.tokens == -(-(seen // pool) // merge)
        assert size.positions == (size.tokens + encoder.hidden_tokens) * encoder.positions_per_token
        assert ((made.coordinates[:, 1] >= 0) & made.valid)[::2].sum() == seen
        assert made.valid.sum() == size.valid == held
        np.testing.assert_array_equal(made.values[:held], compute_frames(clips, wave, held))
        assert (made.values[held:] == 0).all()


def test_own_frames_of_any_length_are_pooled_too():
    encoder = replace(WHISPER, clips=LogMel(), pool=2, connector=ConnectorConfig(merge=2))
    size = item_size(encoder, (400 + 6 * HOP,))
    assert (size.tokens, size.valid, size.positions) == (1, 7, 16)
    assert len(log_mel_frames(encoder, clip(400 + 6 * HOP))) == 7


@pytest.mark.parametrize(
    ("frames", "held"), [(1, 3), (2, 3), (3, 5), (98, 99), (99, 100), (100, 100)]
)
def test_convolutions_reach_two_frames_beyond_the_middle_of_the_last_position(frames, held):
    assert clip_size(QWEN, frames * HOP) == ClipSize(frames, held, -(-frames // 2))


def test_clips_beyond_the_window_or_the_positions_or_below_one_token_are_bad():
    with pytest.raises(BadMedia, match=r"a clip of 1\.0 s is longer than the encoder's 1 s"):
        item_size(QWEN, (16_001,))
    with pytest.raises(BadMedia, match="a piece of 16001 samples is longer than the encoder's 1 s"):
        item_size(replace(QWEN, clips=replace(QWEN.clips, longer="split")), (16_001,))
    with pytest.raises(
        BadMedia,
        match="a clip of 81 frames is longer than the 80 of which the encoder has positions",
    ):
        item_size(replace(QWEN, positions=StoredTable(40)), (80 * HOP + 1,))
    with pytest.raises(BadMedia, match="a clip of 320 samples is too short"):
        item_size(QWEN, (2 * HOP,))
    assert item_size(QWEN, (2 * HOP + 1,)).tokens == 1


def test_chunks_of_2d_convolutions_begin_with_a_position_and_the_last_is_read_as_if_it_were_whole():
    """A chunk of 20 frames is 3 positions of 8, and of 27 frames the 7 of the second chunk are one."""
    clips = replace(QWEN.clips, end="mirror")
    encoder = AudioConfig(
        1, 16, 2, 24, clips, Sinusoids(), chunk=20, stem_width=4, connector=ConnectorConfig(merge=1)
    )
    for frames, positions, read in ((27, 4, 28), (20, 3, 20), (7, 1, 7), (33, 5, 36)):
        wave = clip(frames * HOP + 5)
        assert clip_size(encoder, len(wave)) == ClipSize(frames, read, positions)
        assert item_size(encoder, wave.shape) == (8 * positions, positions, read)
        row = item_input(encoder, wave)
        heard = row.coordinates[:, 1] == 0
        np.testing.assert_array_equal(
            np.flatnonzero(heard), [n if n < 20 else n + 4 for n in range(frames)]
        )
        np.testing.assert_array_equal(row.values[heard], compute_frames(clips, wave))
        assert row.valid.sum() == read
        assert not row.values[~heard].any()
    # whole chunks of a clip shorter than one too
    padded = replace(encoder, padded_chunks=True)
    assert clip_size(padded, 7 * HOP + 5) == ClipSize(7, 8, 1)
    assert clip_size(padded, 14 * HOP) == ClipSize(14, 16, 2)
    assert clip_size(padded, 18 * HOP) == ClipSize(18, 20, 3)


def test_windows_of_a_whole_clip_are_chunks_with_positions_of_their_own():
    clips = replace(WHISPER.clips, attended="window", longer="whole")
    encoder = replace(WHISPER, clips=clips, chunk=100, connector=ConnectorConfig(merge=5))
    for samples, windows in ((1, 1), (16_000, 1), (16_001, 2), (40_000, 3)):
        wave = clip(samples)
        assert item_size(encoder, wave.shape) == (100 * windows, 10 * windows, 100 * windows)
        row = item_input(encoder, wave)
        assert row.valid.all()
        assert (row.coordinates[:, 1] == 0).all()
        np.testing.assert_array_equal(row.values, compute_frames(clips, wave, 100 * windows))


def test_of_windows_of_a_clip_the_tokens_that_are_the_clips_are_shown():
    clips = replace(WHISPER.clips, attended="window", longer="split", shown="clip")
    encoder = replace(WHISPER, clips=clips, connector=ConnectorConfig(merge=5))
    # Windows of 10 tokens; 31 positions are 6, and one of a third window none.
    assert shown_tokens(encoder, (61 * HOP,)).tolist() == list(range(6))
    assert shown_tokens(encoder, (16_000, 61 * HOP)).tolist() == list(range(16))
    assert shown_tokens(encoder, (16_000, 16_000, HOP)).tolist() == list(range(20))
    with pytest.raises(BadMedia, match="a clip of 160 samples is too short"):
        shown_tokens(encoder, (HOP,))
    assert shown_tokens(WHISPER, (16_000,)) is None
