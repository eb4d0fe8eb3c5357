"""How media are prepared is config like any other: stored, read back, and checked with the key named."""

from __future__ import annotations

import pytest

from mmjax.config import (
    AnyRes,
    AsIs,
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    MediaLimits,
    SmartResize,
    WhisperMel,
)
from mmjax.config.assignment import assign
from mmjax.config.codec import decode, encode, leaves
from mmjax.config.ranges import check_section
from mmjax.errors import UserError

ALL = (
    AsIs(),
    FixedSize(),
    FixedSize(square=(1, 2, 3), resize=(), crop=()),
    SmartResize(),
    DynamicTiles(),
    AnyRes(),
)


@pytest.mark.parametrize("how", ALL)
def test_every_preparation_is_stored_as_a_tree_and_as_lines(how):
    tree = {"images": encode(ImagePreparation, how, "images")}
    assert decode(ImagePreparation, tree["images"], "images") == how
    edited: dict = {"images": {"kind": "as_is"}}
    for key, text in leaves(dict[str, ImagePreparation], tree):
        assign(dict[str, ImagePreparation], edited, f"{key}={text}")
    assert decode(ImagePreparation, edited["images"], "images") == how
    check_section(how, "images")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            FixedSize(resize=(1, 2, 3)),
            "images.resize=1,2,3: give the shortest edge, or height and width",
        ),
        (FixedSize(resize=(0,)), "images.resize=0: must be more than 0"),
        (FixedSize(crop=(224,)), "images.crop=224: give height and width, or nothing"),
        (
            FixedSize(square=(1, 2, 256)),
            "images.square=1,2,256: give red, green and blue, each 0 to 255",
        ),
        (SmartResize(merge=0), "images.merge=0: must be at least 1"),
        (
            SmartResize(min_pixels=9, max_pixels=8),
            "images.max_pixels=8: must be at least min_pixels=9",
        ),
        (DynamicTiles(tile=()), "images.tile=(): give height and width"),
        (
            DynamicTiles(min_tiles=3, max_tiles=2),
            "images.max_tiles=2: must be at least min_tiles=3",
        ),
        (AnyRes(pinpoints=()), "images.pinpoints is empty; name some, such as 672x336"),
        (AnyRes(pinpoints=("336x500",)), "'336x500' is no HEIGHTxWIDTH in multiples of tile=336"),
        (AnyRes(pinpoints=("336",)), "'336' is no HEIGHTxWIDTH"),
        (AnyRes(pinpoints=("336x-336x336",)), "'336x-336x336' is no HEIGHTxWIDTH"),
    ],
)
def test_images_that_cannot_be_prepared_so_are_refused_by_key(how, message):
    with pytest.raises(UserError) as caught:
        check_section(how, "images")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (WhisperMel(window=401), "clips.window=401: must be even, and at least 2"),
        (WhisperMel(hop=0), "clips.hop=0: must be at least 1"),
        (
            MediaLimits(min_side=5, max_side=4),
            "clips.max_side=4: must be at least min_side=5",
        ),
        (MediaLimits(seconds=0), "clips.seconds=0: must be more than 0"),
    ],
)
def test_clips_and_limits_are_checked_too(section, message):
    check_section(type(section)(), "clips")
    with pytest.raises(UserError) as caught:
        check_section(section, "clips")
    assert str(caught.value) == message
