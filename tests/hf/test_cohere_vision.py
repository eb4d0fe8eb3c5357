"""Aya Vision and Command A Vision compute what transformers computes, with text between the tiles of an image."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import torch
import transformers
from cohere_tiles import Cohere2VisionImageProcessor, canvas_of_cohere2
from image_shapes import picture
from parity import leave_out_defaults, random_model
from parity_samples import check_samples, is_text
from PIL import Image
from test_generated_text import check
from test_idefics3 import Written
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmjax.config import DynamicTiles
from mmjax.data.media.preparations.dynamic_tiles import tile_grid
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

VOCAB, IMAGE = 61, 60
WHOLE = {
    "aya_vision": transformers.AyaVisionForConditionalGeneration,
    "cohere2_vision": transformers.Cohere2VisionForConditionalGeneration,
}


PROCESSORS = {
    "aya_vision": GotOcr2ImageProcessorPil,
    "cohere2_vision": Cohere2VisionImageProcessor,
}


def made(family, seed, folder, **text):
    """A random model in a folder with its processor."""
    rng = np.random.default_rng(seed)
    config = drawn.cohere_vision(rng, family, VOCAB, image_token_id=IMAGE)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    model = random_model(config, WHOLE[family])
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    side = config.vision_config.image_size
    processor = PROCESSORS[family](
        size={"height": side, "width": side},
        max_patches=drawn.between(rng, 1, 5),
        image_std=[0.2, 0.25, 0.3],
        crop_to_patches=True,
    )
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    saved = json.loads(path.read_text())
    # Aya's own processor cuts images whatever this field says.
    saved["crop_to_patches"] = family == "cohere2_vision"
    if family == "cohere2_vision":
        saved["image_processor_type"] = "Cohere2VisionImageProcessorFast"
    path.write_text(json.dumps(saved))
    grid = side // config.vision_config.patch_size // config.downsample_factor
    return model, processor, grid**2


def samples():
    """Text alone; an image of each of several shapes, and two in a sample."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, 50, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), picture(40, 90), words(5)],
        [words(2), picture(31, 31), words(1), picture(70, 20), words(4)],
    ]


def inputs_of(family, sample, processor, tokens):
    """What the model there takes for one sample. tokens: of a tile."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    out = processor(images, return_tensors="pt")
    counts, ids = iter(out.pop("num_patches").tolist()), []
    for part in sample:
        if is_text(part):
            ids += part.tolist()
            continue
        count = next(counts)
        tile = [IMAGE] * tokens
        begin, end = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
        if family == "aya_vision":
            for number in range(1, count):
                ids += [*Written()[f"{begin * (number == 1)}TILE_{number}"], *tile]
            ids += [*Written()[f"{begin * (count == 1)}TILE_GLOBAL"], *tile, *Written()[end]]
        else:
            line = "<|IMG_LINE_BREAK|>"
            between = [*Written()[line], *tile] * (count - 1)
            ids += [*Written()[begin], *tile, *between, *Written()[line + end]]
    return {"input_ids": torch.tensor([ids]), **out}


@pytest.mark.default_cases("aya_vision-0", "cohere2_vision-1")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(
    family, seed, tmp_path
):
    model, processor, tokens = made(family, seed, tmp_path)
    theirs = lambda model, sample: model(  # noqa: E731
        **inputs_of(family, sample, processor, tokens), use_cache=False
    ).logits[0]
    check_samples(model, tmp_path, samples(), theirs, Written())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WHOLE)
def test_it_writes_what_it_writes_there(family, tmp_path):
    model, processor, tokens = made(family, 1, tmp_path)
    of = lambda prompt: inputs_of(family, prompt, processor, tokens)  # noqa: E731
    check(model, tmp_path, samples(), of, Written())


@pytest.mark.parametrize("most", [1, 2, 6, 12])
@pytest.mark.parametrize("tile", [(32, 32), (30, 50)])
def test_command_a_visions_tiles_are_those_that_enlarge_an_image_least(tile, most):
    how = DynamicTiles(tile=tile, max_tiles=most, grid_by="scale")
    for size in np.random.default_rng(most).integers(1, 300, (300, 2)).tolist():
        columns, rows = canvas_of_cohere2()(tuple(size), tile, 1, most)
        assert tile_grid(how, tuple(size)) == (rows, columns), size


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("aya_vision", {"alignment_intermediate_size": 7}, "alignment_intermediate_size=7 is odd"),
        ("aya_vision", {"vision_feature_select_strategy": "default"}, "'default' is not supported"),
        ("aya_vision", {"vision_feature_layer": [-1, 1]}, r"\[-1, 1\] names several layers"),
        ("cohere2_vision", {"downsample_factor": 50}, "downsample_factor=50: . x . patches are no"),
        (
            "cohere2_vision",
            {"vision_config": {"model_type": "clip_vision_model"}},
            "is not support",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family, change, message, tmp_path):
    made(family, 0, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_command_a_vision_marks_images_by_the_tokens_that_its_tokenizer_names(tmp_path):
    made("cohere2_vision", 0, tmp_path)
    assert texts_of(tmp_path) == ("<|START_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>")
    names = {
        "eoi_token": {"content": "<e>", "special": True},
        "extra_special_tokens": {"boi_token": "<b>", "img_line_break_token": "<l>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    assert texts_of(tmp_path) == ("<b>", "<l>", "<e>")


def texts_of(folder):
    images = from_hf(folder).encoders["vision"].images
    return images.begin, images.tile_end, images.end


def test_aya_labels_tiles_as_its_processor_says_and_without_one_as_its_class_does(tmp_path):
    made("aya_vision", 0, tmp_path)
    processor = {
        "image_processor": json.loads((tmp_path / "preprocessor_config.json").read_text()),
        "processor_class": "AyaVisionProcessor",
        "tile_token": "PART",
        "start_of_img_token": "<|BEGIN|>",
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    images = from_hf(tmp_path).encoders["vision"].images
    assert (images.label, images.whole, images.begin) == ("PART_{tile}", "TILE_GLOBAL", "<|BEGIN|>")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()
    tower = from_hf(tmp_path).encoders["vision"]
    assert tower.images.tile == (tower.positions.rows * tower.patch,) * 2
    assert (tower.images.label, tower.images.max_tiles) == ("TILE_{tile}", 12)
