"""Llama 4 computes what transformers computes of packed images in tiles, with text between them, and of text."""

from __future__ import annotations

import json

import drawn
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from image_shapes import picture
from parity import leave_out_defaults, random_model
from parity_samples import check_samples, is_text
from PIL import Image
from pillow_processors import Llama4ImageProcessor, Pillows
from test_generated_text import check
from test_idefics3 import Written
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

from mmjax.config import CanvasTiles
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.preparations import before_encoder
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.hf.processors import read_image_processing
from mmjax.models.vision_encoder import rounded_pixels

VOCAB, IMAGE = 61, 60


@pytest.fixture(autouse=True)
def outputs(monkeypatch):
    """The class around the text reads a field that the text's outputs lack."""
    outputs = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    monkeypatch.setattr(outputs, "image_outputs", None, raising=False)


def made(seed, folder, **own):
    """A random model in a folder with its processor."""
    rng = np.random.default_rng(seed)
    config = drawn.llama4(rng, VOCAB, image_token_index=IMAGE, **own)
    model = random_model(config, transformers.Llama4ForConditionalGeneration)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    side = config.vision_config.image_size
    processor = Llama4ImageProcessor(
        size={"height": side, "width": side},
        max_patches=drawn.between(rng, 1, 6),
        resize_to_max_canvas=drawn.pick(rng, False, False, True),
        resample=drawn.pick(rng, 2, 3),
        image_mean=[0.5, 0.45, 0.4],
        image_std=[0.5, 0.3, 0.25],
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
        [words(2), picture(11, 11), words(1), picture(70, 20), words(4)],
    ]


def inputs_of(sample, processor, tokens):
    """What the model there takes for one sample. tokens: of a tile."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    made = processor(images)
    grids, ids = iter(made["aspect_ratios"].tolist()), []
    for part in sample:
        if is_text(part):
            ids += part.tolist()
            continue
        written = Llama4Processor._prompt_split_image(None, next(grids), 1)
        first, *others = written.split("<|patch|>")
        ids += Written()[first]
        for text in others:
            ids += [IMAGE] * tokens + Written()[text]
    return {"input_ids": torch.tensor([ids]), "pixel_values": made["pixel_values"].float()}


def tokens_of(model):
    """Of a tile."""
    vision = model.config.vision_config
    return (vision.image_size // vision.patch_size * vision.pixel_shuffle_ratio) ** 2


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(
    seed, tmp_path
):
    model, processor = made(seed, tmp_path)
    theirs = lambda model, sample: model(  # noqa: E731
        **inputs_of(sample, processor, round(tokens_of(model))), use_cache=False
    ).logits[0]
    check_samples(model, tmp_path, samples(), theirs, Written())


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 3])
def test_it_writes_what_it_writes_there(seed, tmp_path):
    model, processor = made(seed, tmp_path)
    tokens = round(tokens_of(model))
    check(
        model, tmp_path, samples(), lambda prompt: inputs_of(prompt, processor, tokens), Written()
    )


def same_pixels(processor, how, mean, std, shape):
    """The tiles of an image are equal to the bit."""
    expected = processor([Image.fromarray(picture(*shape))])["pixel_values"]
    items = jnp.asarray(np.stack(prepare_image(before_encoder(how), picture(*shape))), jnp.float32)
    ours = np.asarray(rounded_pixels(items, np.array(mean), np.array(std)))
    np.testing.assert_array_equal(ours, expected.float().numpy().transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resize_to_max_canvas": True, "size": {"height": 48, "width": 48}, "resample": 3},
        {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "max_patches": 4},
    ],
)
def test_images_are_prepared_as_its_processor_prepares_them_to_the_bit(options, tmp_path):
    processor = Llama4ImageProcessor(**options)
    processor.save(tmp_path)
    how, mean, std, *_ = read_image_processing(tmp_path)
    for shape in ((60, 90), (91, 37), (1, 40), (15, 900), (300, 640), (336, 336), (700, 1300)):
        same_pixels(processor, how, mean, std, shape)


@pytest.mark.default_cases("5-True", "16-False")
@pytest.mark.parametrize("enlarged", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5, 16])
def test_tiles_are_those_of_its_processor(most, enlarged):
    size = {"height": 8, "width": 8}
    there = Llama4ImageProcessor(max_patches=most, resize_to_max_canvas=enlarged, size=size)
    how = CanvasTiles(tile=8, max_tiles=most, enlarged=enlarged)
    for shape in np.random.default_rng(most).integers(1, 70, (300, 2)).tolist():
        same_pixels(there, how, (0.5,), (0.5,), shape)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "resample", "share"), [("bilinear", 2, 0.02), ("bicubic", 3, 0.01)]
)
def test_torch_resizes_bytes_to_levels_of_pillows(mode, resample, share):
    """As torchvision does on CPUs with AVX2: two levels of 255 at most, in a few of all values."""
    noise = np.random.default_rng(0).integers(0, 256, (700, 1300, 3), np.uint8)
    for image in (picture(60, 90), picture(700, 1300), noise):
        bytes_ = torch.tensor(image).permute(2, 0, 1)[None]
        for height, width in ((224, 336), (672, 1248), (336, 336)):
            size = SizeDict(height=height, width=width)
            ours = Pillows().resize(bytes_, size, resample).int()
            theirs = torch.nn.functional.interpolate(
                bytes_, (height, width), mode=mode, antialias=True
            )
            apart = (ours - theirs.int()).abs()
            assert apart.max() <= 2
            assert (apart > 0).float().mean() < share


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio=0.3 is no part 1/n of one"),
        ({"intermediate_size": 30}, "intermediate_size=30 is not supported; known: 32"),
        ({"projector_input_dim": 9}, "projector_input_dim=9 is not supported; known: 10"),
        ({"vision_output_dim": 9}, "vision_output_dim=9 is not supported; known: 10"),
        ({"image_size": 9}, "image_size=9 has 3 patches a side, which are no whole squares of 2"),
        ({"image_size": [12, 12]}, r"image_size=\[12, 12\] is no int"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(own, message, tmp_path):
    vision = {"hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"projector_output_dim": 10, "projector_input_dim": 10, "vision_output_dim": 10}
    config = {"model_type": "llama4", "vision_config": vision | {"patch_size": 3, "image_size": 12}}
    write = (tmp_path / "config.json").write_text
    write(json.dumps(config))
    assert from_hf(tmp_path).encoders["vision"].images == CanvasTiles(tile=12).with_tokens()
    config["vision_config"] |= own
    write(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"do_normalize": False}, "do_normalize=False: .*set it to true"),
        ({"rescale_factor": 0.5}, "rescale_factor=0.5: only 1 / 255 is known"),
        ({"size": {"height": 12, "width": 24}}, "size=.*give the same height and width"),
        ({"resample": 1}, "resample=1: known are 2 and 3"),
        ({}, "it makes images of 336 x 336 pixels"),
    ],
)
def test_other_processors_are_refused(own, message, tmp_path):
    made(0, tmp_path)
    Llama4ImageProcessor(**own).save(tmp_path)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)
