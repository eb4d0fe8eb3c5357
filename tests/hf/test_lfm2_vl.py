"""LFM2-VL computes what transformers computes of images of any size and of tiles, with text between them."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import torch
import transformers
from image_shapes import picture
from parity import leave_out_defaults, random_model
from parity_samples import check_samples, is_text
from PIL import Image
from pillow_processors import Lfm2VlImageProcessor
from test_generated_text import check
from test_idefics3 import Written

from mmjax.config import ResizeOrTiles
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.patches import patchify
from mmjax.data.media.preparations import before_encoder
from mmjax.data.media.preparations.resize_or_tiles import tile_grid
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.hf.processors import read_image_processing

VOCAB, IMAGE = 61, 60


def made(seed, folder, **own):
    """A random model in a folder with its processor."""
    rng = np.random.default_rng(seed)
    config = drawn.lfm2_vl(rng, VOCAB, image_token_id=IMAGE, **own)
    model = random_model(config, transformers.Lfm2VlForConditionalGeneration)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    patch, merge = config.vision_config.patch_size, config.downsample_factor
    least = drawn.between(rng, 1, 6)
    processor = Lfm2VlImageProcessor(
        encoder_patch_size=patch,
        downsample_factor=merge,
        tile_size=patch * merge * drawn.between(rng, 1, 3),
        min_image_tokens=least,
        max_image_tokens=least + drawn.between(rng, 1, 9),
        max_tiles=drawn.between(rng, 2, 6),
        max_pixels_tolerance=drawn.pick(rng, 1.0, 2.0),
        use_thumbnail=drawn.pick(rng, False, True),
        do_image_splitting=drawn.pick(rng, False, True, True),
        image_std=[0.2, 0.25, 0.3],
    )
    processor.save(folder)
    return model, processor


def samples():
    """Text alone; an image of each of several shapes, and two in a sample."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, 50, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), picture(40, 90), words(5)],
        [words(2), picture(31, 31), words(1), picture(70, 20), words(4)],
    ]


def inputs_of(sample, processor):
    """What the model there takes for one sample."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    out = processor(images)
    grids = zip(out.pop("image_rows").tolist(), out.pop("image_cols").tolist(), strict=True)
    grids, ids = iter(grids), []
    shapes = iter(out["spatial_shapes"].tolist())
    out.pop("image_sizes")
    tokens = lambda: [IMAGE] * (np.prod(next(shapes)) // processor.downsample_factor**2)  # noqa: E731
    for part in sample:
        if is_text(part):
            ids += part.tolist()
            continue
        rows, columns = next(grids)
        begin, end = "<|image_start|>", "<|image_end|>"
        if (rows, columns) == (1, 1):
            ids += [*Written()[begin], *tokens(), *Written()[end]]
            continue
        for tile in range(rows * columns):
            label = f"<|img_row_{tile // columns + 1}_col_{tile % columns + 1}|>"
            ids += [*Written()[begin * (tile == 0) + label], *tokens()]
        if processor.use_thumbnail:
            ids += [*Written()["<|img_thumbnail|>"], *tokens()]
        ids += Written()[end]
    return {"input_ids": torch.tensor([ids]), **out}


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(
    seed, tmp_path
):
    model, processor = made(seed, tmp_path)
    theirs = lambda model, sample: model(  # noqa: E731
        **inputs_of(sample, processor), use_cache=False
    ).logits[0]
    check_samples(model, tmp_path, samples(), theirs, Written())


@pytest.mark.exhaustive
def test_it_writes_what_it_writes_there(tmp_path):
    text = drawn.decoder(np.random.default_rng(1), "lfm2", VOCAB)
    model, processor = made(3, tmp_path, text_config=text)
    check(model, tmp_path, samples(), lambda prompt: inputs_of(prompt, processor), Written())


def test_images_are_prepared_as_its_processor_prepares_them_by_its_own_defaults_too(tmp_path):
    for options in ({}, {"min_image_tokens": 4, "max_image_tokens": 40, "tile_size": 64}):
        processor = Lfm2VlImageProcessor(**options)
        processor.save(tmp_path)
        how, mean, std, rescale, _ = read_image_processing(tmp_path)
        for shape in ((60, 90), (91, 37), (1, 40), (15, 900), (300, 640), (1000, 1300)):
            expected = processor([Image.fromarray(picture(*shape))])
            pixels = expected["pixel_values"][expected["pixel_attention_mask"] > 0].numpy()
            items = prepare_image(before_encoder(how), picture(*shape))
            grids = [[side // 16 for side in item.shape[:2]] for item in items]
            assert grids == expected["spatial_shapes"].tolist()
            made = np.concatenate([patchify(item, 16, 1) for item in items])
            made = (made.reshape(len(made), -1, 3) * rescale - mean) / std
            np.testing.assert_allclose(made.reshape(len(made), -1), pixels, atol=2e-6)


@pytest.mark.parametrize(("least", "most"), [(2, 10), (2, 3), (3, 5), (4, 12)])
def test_tiles_are_those_of_its_processor(least, most):
    there = Lfm2VlImageProcessor(min_tiles=least, max_tiles=most)
    how = ResizeOrTiles(4, 2, 1, 1, tolerance=1e-6, tile=24, min_tiles=least, max_tiles=most)
    for height, width in np.random.default_rng(most).integers(1, 120, (500, 2)).tolist():
        columns, rows, *_ = there._get_grid_layout(height, width, least, most, 24)
        assert tile_grid(how, (height, width)) == (rows, columns), (height, width)


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("vision_config", {"num_patches": 10}, "num_patches=10 is no square"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "model_type=.* is not supported"),
        ("", {"projector_hidden_act": "tanh"}, "projector_hidden_act='tanh'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(part, own, message, tmp_path):
    config = drawn.lfm2_vl(np.random.default_rng(0)).to_dict()
    (config[part] if part else config).update(own)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"min_tiles": 1}, "min_tiles=1: of a large image as one tile.*set it to 2"),
        ({"min_tiles": 5, "max_tiles": 4}, "min_tiles=5: set it to at most max_tiles=4"),
        ({"tile_size": 40}, "tile_size=40: give a multiple of 32"),
        ({"downsample_factor": 4}, "tokens of 4 x 4 of them, the tower has patches of 16 and tok"),
    ],
)
def test_other_processors_are_refused(own, message, tmp_path):
    Lfm2VlImageProcessor(**own).save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_without_a_processor_images_are_prepared_by_the_defaults_of_its_class(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    here = from_hf(tmp_path).encoders["vision"].images
    Lfm2VlImageProcessor().save(tmp_path)
    assert here == from_hf(tmp_path).encoders["vision"].images
