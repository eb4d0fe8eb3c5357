"""Images become patches and clips become frames, as many as their sizes say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import Made

from mmjax.config import AudioConfig, ConnectorConfig, LearnedGrid, LogMel, RotaryGrid, VisionConfig
from mmjax.data.media.patches import item_input, item_size, to_patches, token_grid
from mmjax.data.plan.length_index import build_index
from mmjax.data.sample import Item
from mmjax.errors import BadMedia


def vision(patch: int = 4, merge: int = 2, channels: int = 1) -> VisionConfig:
    return VisionConfig(
        1, 16, 2, 16, patch, channels=channels, connector=ConnectorConfig(merge=merge)
    )


def audio(merge: int = 2) -> AudioConfig:
    connector = ConnectorConfig(merge=merge)
    return AudioConfig(
        1, 16, 2, 16, LogMel(mels=20, sample_rate=4000, window=128, hop=64), connector=connector
    )


shapes = {
    "height": st.integers(1, 40),
    "width": st.integers(1, 40),
    "channels": st.sampled_from([1, 3]),
}
grids = {"patch": st.integers(1, 7), "merge": st.integers(1, 3)}


@settings(max_examples=60)
@given(**shapes, **grids)
def test_patches_hold_every_pixel_where_their_coordinates_say(
    height, width, channels, patch, merge
):
    image = np.random.default_rng(height * 41 + width).integers(
        0, 256, (height, width, channels), np.uint8
    )
    values, coordinates, valid = to_patches(image, patch, merge)
    rows, columns = coordinates[:, 1].max() + 1, coordinates[:, 2].max() + 1
    canvas = np.full((rows * patch, columns * patch, channels), 77, np.uint8)
    for value, (t, y, x) in zip(values, coordinates, strict=True):
        assert t == 0
        canvas[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = value.reshape(
            patch, patch, channels
        )
    np.testing.assert_array_equal(canvas[:height, :width], image)
    assert (canvas[height:] == 0).all()
    assert (canvas[:, width:] == 0).all()
    inside = (coordinates[:, 1] * patch < height) & (coordinates[:, 2] * patch < width)
    np.testing.assert_array_equal(valid, inside)


@settings(max_examples=60)
@given(**shapes, **grids)
def test_patches_of_a_merge_window_are_contiguous_and_windows_go_row_by_row(
    height, width, channels, patch, merge
):
    _, coordinates, _ = to_patches(np.zeros((height, width, channels), np.uint8), patch, merge)
    windows = coordinates[:, 1:].reshape(-1, merge * merge, 2)
    corners = windows[:, 0] // merge
    assert (windows // merge == corners[:, None]).all()
    assert corners.tolist() == sorted(corners.tolist())
    inner = (windows - windows[:, :1]).tolist()
    assert all(window == [[y, x] for y in range(merge) for x in range(merge)] for window in inner)


@settings(max_examples=60)
@given(**shapes, **grids, samples=st.integers(1, 3000))
def test_item_size_is_known_before_decoding(height, width, channels, patch, merge, samples):
    items = (
        (
            vision(patch, merge, channels),
            np.zeros((height, width, channels), np.uint8),
            (height, width),
        ),
        (audio(merge), np.zeros(samples, np.float32), (samples,)),
    )
    for encoder, array, size in items:
        prepared, expected = item_input(encoder, array), item_size(encoder, size)
        assert {len(part) for part in prepared} == {expected.positions}
        assert prepared.valid.sum() == expected.valid
        per_token = merge * merge if encoder.kind == "vision" else 2 * merge
        assert expected.positions == expected.tokens * per_token
        assert prepared.valid.reshape(expected.tokens, per_token).any(1).all()
        assert prepared.values.dtype == (np.uint8 if encoder.kind == "vision" else np.float32)
        assert prepared.coordinates.dtype == np.int32


@pytest.mark.parametrize(
    ("encoder", "array", "message"),
    [
        (vision(), np.zeros((0, 8, 1), np.uint8), "empty"),
        (vision(), np.zeros((8, 8, 3), np.uint8), r"\[height, width, 1\]"),
        (vision(), np.zeros((8, 8), np.uint8), r"\[height, width, 1\]"),
        (vision(), np.zeros((8, 8, 1), np.float32), "uint8"),
        (audio(), np.zeros(0, np.float32), "empty"),
        (audio(), np.zeros((100, 2), np.float32), r"\[samples\]"),
        (audio(), np.zeros(100, np.int16), "floats"),
    ],
)
def test_what_an_encoder_cannot_take_is_refused(encoder, array, message):
    with pytest.raises(ValueError, match=message):
        item_input(encoder, array)


@pytest.mark.parametrize(("encoder", "size"), [(vision(), (0, 8)), (audio(), (0,))])
def test_an_empty_item_has_no_size(encoder, size):
    with pytest.raises(ValueError, match="empty"):
        item_size(encoder, size)


def test_an_item_beyond_the_connectors_learned_positions_is_refused() -> None:
    encoder = VisionConfig(
        1, 32, 2, 64, patch=4, channels=1, connector=ConnectorConfig(merge=2, position_grid=4)
    )
    assert item_size(encoder, (8, 32)).tokens == 4
    with pytest.raises(BadMedia, match="position_grid is 4"):
        item_size(encoder, (8, 33))


def test_a_clip_beyond_the_position_grid_is_a_bad_sample_as_any_other():
    encoder = replace(audio(), connector=ConnectorConfig(merge=2, position_grid=4))
    index = build_index(
        {"a": Made([((Item("audio", 0),), [np.zeros(n, np.float32)]) for n in (40, 9000)])},
        {"audio": encoder},
    )
    assert index.bad.tolist() == [1]
    assert "position_grid is 4; raise it" in index.reason[0]


def test_of_a_learned_grid_only_whole_patches_are_seen_and_elsewhere_black_fills_them_up():
    image = np.arange(11 * 14 * 3, dtype=np.uint8).reshape(11, 14, 3)
    grid = VisionConfig(
        1, 8, 2, 8, patch=4, positions=LearnedGrid(2, 3), connector=ConnectorConfig(merge=1)
    )
    filled = replace(grid, positions=RotaryGrid())
    assert (item_size(grid, (11, 14)).tokens, item_size(filled, (11, 14)).tokens) == (2 * 3, 3 * 4)
    assert (token_grid(grid, (11, 14)), token_grid(filled, (11, 14))) == ((1, 2, 3), (1, 3, 4))
    np.testing.assert_array_equal(
        item_input(grid, image).values, item_input(grid, image[:8, :12]).values
    )
    with pytest.raises(BadMedia, match="an image of 3 x 14 pixels has not one patch of 4"):
        item_size(grid, (3, 14))
