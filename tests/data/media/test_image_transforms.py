"""Images become the items that transformers' processors make of them: the same pixels, before they are normalised."""

from __future__ import annotations

import numpy as np
import pytest
from image_shapes import SHAPES, picture
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmjax.config import (
    AnyRes,
    AsIs,
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    MediaLimits,
    PanAndScan,
    PixtralResize,
    SmartResize,
    SplitTiles,
)
from mmjax.data.media.image_transforms import prepare_image, prepared_sizes, smaller_size
from mmjax.data.media.patches import patchify
from mmjax.data.media.preparations import before_encoder
from mmjax.data.media.preparations.dynamic_tiles import tile_grid
from mmjax.errors import BadMedia

RAW = {"do_rescale": False, "do_normalize": False}
FILTER_NUMBERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def items(how: ImagePreparation, image: np.ndarray, images: int = 1) -> tuple[np.ndarray, ...]:
    """The items of an image, once their sizes are what its size alone said."""
    prepare = before_encoder(how)
    made = prepare_image(prepare, image, images)
    assert tuple(item.shape[:2] for item in made) == prepared_sizes(
        prepare, image.shape[:2], images
    )
    assert {item.dtype for item in made} == {np.dtype(np.uint8)}
    return made


def theirs(processor: object, image: np.ndarray) -> np.ndarray:
    """uint8 `[item, h, w, 3]` of what a processor makes of one image."""
    pixels = np.asarray(processor([Image.fromarray(image)], **RAW)["pixel_values"])
    pixels = pixels.reshape(-1, *pixels.shape[-3:]).transpose(0, 2, 3, 1)
    assert pixels.dtype == np.uint8
    return pixels


def pinpoints(tile: int, rows: int, columns: int) -> tuple[list[list[int]], tuple[str, ...]]:
    """All grids up to that many rows and columns, as transformers writes them and as a config does."""
    sizes = [[tile * y, tile * x] for y in range(1, rows + 1) for x in range(1, columns + 1)]
    return sizes, tuple(f"{height}x{width}" for height, width in sizes)


FIXED = {
    "clip": (
        CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        FixedSize(resize=(56,), crop=(56, 56)),
    ),
    "clip cropped beyond the image": (
        CLIPImageProcessorPil(size={"shortest_edge": 50}, crop_size={"height": 77, "width": 61}),
        FixedSize(resize=(50,), crop=(77, 61)),
    ),
    "clip not resized": (
        CLIPImageProcessorPil(do_resize=False, crop_size={"height": 60, "width": 51}),
        FixedSize(resize=(), crop=(60, 51)),
    ),
    "siglip": (
        SiglipImageProcessorPil(size={"height": 70, "width": 42}),
        FixedSize(resize=(70, 42), crop=()),
    ),
    "llava padded": (
        LlavaImageProcessorPil(
            do_pad=True, size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        FixedSize(square=(122, 116, 104), resize=(56,), crop=(56, 56)),
    ),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_item_of_a_fixed_size_has_the_pixels_of_transformers(name, shape):
    processor, how = FIXED[name]
    np.testing.assert_array_equal(
        np.stack(items(how, picture(*shape))), theirs(processor, picture(*shape))
    )


@pytest.mark.parametrize("filter", FILTER_NUMBERS)
def test_every_filter_is_pillows(filter):
    processor = SiglipImageProcessorPil(
        size={"height": 40, "width": 42}, resample=FILTER_NUMBERS[filter]
    )
    how = FixedSize(resize=(40, 42), crop=(), filter=filter)
    np.testing.assert_array_equal(
        np.stack(items(how, picture(91, 37))), theirs(processor, picture(91, 37))
    )


@pytest.mark.parametrize("shape", [*SHAPES, (3, 600), (599, 3), (1, 200)])
@pytest.mark.parametrize(
    ("patch", "merge", "least", "most"),
    [(14, 2, 56 * 56, 28 * 28 * 1280), (16, 2, 65536, 100_000), (7, 3, 441, 5000)],
)
def test_smart_resize_has_the_size_and_the_patches_of_qwen_vl(shape, patch, merge, least, most):
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, patch_size=patch, merge_size=merge
    )
    made = processor([Image.fromarray(picture(*shape))], **RAW)
    how = SmartResize(patch=patch, merge=merge, min_pixels=least, max_pixels=most)
    (item,) = items(how, picture(*shape))
    assert made["image_grid_thw"][0].tolist() == [1, item.shape[0] // patch, item.shape[1] // patch]
    both_frames = made["pixel_values"].reshape(-1, 3, 2, patch, patch)
    np.testing.assert_array_equal(both_frames[:, :, 0], both_frames[:, :, 1])
    patches = patchify(item, patch, merge)
    assert patches.dtype == np.uint8
    np.testing.assert_array_equal(
        patches, both_frames[:, :, 0].transpose(0, 2, 3, 1).reshape(len(patches), -1)
    )


@pytest.mark.parametrize("shape", [(1, 201), (201, 1), (5000, 20)])
def test_smart_resize_refuses_what_qwen_vl_refuses(shape):
    with pytest.raises(ValueError, match="aspect ratio"):
        Qwen2VLImageProcessorPil()([Image.fromarray(picture(*shape))], **RAW)
    with pytest.raises(
        BadMedia, match=f"{shape[0]} x {shape[1]} pixels: one side is more than 200 times the other"
    ):
        prepared_sizes(before_encoder(SmartResize()), shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 2), (2, 6), (3, 3)])
def test_dynamic_tiles_have_the_pixels_and_the_order_of_internvl(shape, least, most):
    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True, min_patches=least, max_patches=most, size={"height": 32, "width": 24}
    )
    how = DynamicTiles(tile=(32, 24), min_tiles=least, max_tiles=most)
    made = items(how, picture(*shape))
    np.testing.assert_array_equal(np.stack(made), theirs(processor, picture(*shape)))
    rows, columns = tile_grid(how, shape)
    assert len(made) == rows * columns + (rows * columns > 1)


def test_without_a_thumbnail_there_are_only_tiles():
    how = DynamicTiles(tile=(32, 32))
    whole = items(how, picture(37, 91))
    tiles = items(DynamicTiles(tile=(32, 32), thumbnail=False), picture(37, 91))
    assert len(tiles) == len(whole) - 1 > 1
    np.testing.assert_array_equal(np.stack(tiles), np.stack(whole[:-1]))


@pytest.mark.parametrize("most", [1, 4, 6, 12, 24])
def test_tiles_are_those_of_opengvlabs_own_listing(most):
    """Their listing is the sorted set of pairs; where one tile is permitted its order never matters."""
    listing = {(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most}
    rng = np.random.default_rng(most)
    shapes = [
        *SHAPES,
        *((4 * n, 5 * n) for n in (50, 100, 300)),
        *rng.integers(1, 3000, (300, 2)).tolist(),
    ]
    for height, width in shapes:
        best, nearest = (1, 1), float("inf")
        for x, y in sorted(listing, key=lambda pair: pair[0] * pair[1]):
            distance = abs(width / height - x / y)
            if distance < nearest:
                best, nearest = (x, y), distance
            elif distance == nearest and width * height > 0.5 * 448 * 448 * x * y:
                best = (x, y)
        assert tile_grid(DynamicTiles(max_tiles=most), (height, width)) == best[::-1]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 5000), (5000, 2)])
def test_any_res_has_the_pixels_and_the_order_of_llava_next(shape):
    sizes, names = (
        [[56, 28], [28, 56], [56, 56], [84, 28], [28, 84]],
        ("56x28", "28x56", "56x56", "84x28", "28x84"),
    )
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=sizes,
    )
    made = items(AnyRes(tile=28, pinpoints=names), picture(*shape))
    np.testing.assert_array_equal(np.stack(made), theirs(processor, picture(*shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_res_has_the_pixels_and_the_order_of_llava_onevision(shape):
    sizes, names = pinpoints(32, 4, 4)
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32}, image_grid_pinpoints=sizes
    )
    how = AnyRes(tile=32, pinpoints=names, several="square", background=(122, 116, 104))
    np.testing.assert_array_equal(
        np.stack(items(how, picture(*shape))), theirs(processor, picture(*shape))
    )
    pair = [[Image.fromarray(picture(*shape)), Image.fromarray(picture(20, 33))]]
    of_pair = np.asarray(processor(pair, **RAW)["pixel_values"])[0].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(np.stack(items(how, picture(*shape), images=2)), of_pair)


def test_as_is_leaves_the_image_alone():
    image = picture(37, 91)
    (item,) = items(AsIs(), image)
    assert item is image


@pytest.mark.parametrize("how", [AsIs(), FixedSize(), SmartResize(), DynamicTiles(), AnyRes()])
def test_an_image_without_pixels_is_bad(how):
    with pytest.raises(BadMedia, match="an image of 0 x 7 pixels is empty"):
        prepared_sizes(before_encoder(how), (0, 7))


def test_an_image_that_would_be_blown_up_while_it_is_prepared_is_bad():
    with pytest.raises(BadMedia, match="preparing it would need 1120000 x 224 pixels"):
        prepared_sizes(before_encoder(FixedSize()), (5000, 1))
    with pytest.raises(
        BadMedia, match="preparing it would need 64 x 96 pixels, which is more than 6000"
    ):
        prepared_sizes(
            before_encoder(DynamicTiles(tile=(32, 32))), (64, 96), limits=MediaLimits(pixels=6000)
        )


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 1), np.uint8), np.zeros((4, 4, 3))]
)
def test_only_rgb_images_of_bytes_are_taken(array):
    with pytest.raises(ValueError, match="an image must be uint8"):
        prepare_image(before_encoder(AsIs()), array)


@pytest.mark.parametrize(
    "how",
    [
        FixedSize(),
        FixedSize(square=(1, 2, 3), resize=(336,), crop=(336, 336)),
        FixedSize(resize=(384, 384), crop=()),
        SmartResize(),
        SmartResize(frames=2),
        DynamicTiles(),
        AnyRes(),
        PixtralResize(),
        SplitTiles(),
        PanAndScan(),
    ],
)
def test_a_smaller_copy_of_a_photo_becomes_items_of_the_same_sizes_and_a_small_image_stays(
    how,
) -> None:
    prepare = before_encoder(how)
    for size in ((3024, 4032), (4000, 3001), (6000, 1500)):
        for images in (1, 2):
            small = smaller_size(prepare, size, images)
            assert prepared_sizes(prepare, small, images) == prepared_sizes(prepare, size, images)
            assert small[0] <= size[0]
            assert small[1] <= size[1]
            if isinstance(how, FixedSize | SmartResize):
                assert small[0] * small[1] < 0.3 * size[0] * size[1]
    assert smaller_size(prepare, (40, 50)) == (40, 50)
    assert smaller_size(before_encoder(AsIs()), (3024, 4032)) == (3024, 4032)
