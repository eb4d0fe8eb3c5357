"""How media are prepared is config like any other: stored, read back, and checked."""

from __future__ import annotations

import pytest

from mmjax.config import (
    AnyRes,
    AsIs,
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    SmartResize,
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


@pytest.mark.parametrize("pinpoint", ["336", "336x500", "336x-336x336"])
def test_a_resolution_is_a_height_and_a_width_in_whole_tiles(pinpoint: str) -> None:
    with pytest.raises(UserError, match=r"images\.pinpoints"):
        check_section(AnyRes(pinpoints=(pinpoint,)), "images")
