"""DINOv2 computes what transformers computes, images of many sizes in one row: its positions are interpolated."""

from __future__ import annotations

import drawn
import numpy as np
import pytest
import torch
import transformers
from parity import random_model
from parity_samples import check_samples, check_tower, is_text, pixels
from transformers import (
    Dinov2Model,
    Dinov2WithRegistersModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mmjax.errors import UserError
from mmjax.hf.families import encoder_from_hf, from_hf

VOCAB, IMAGE = 61, 60


def image(rng: np.random.Generator, patch: int) -> np.ndarray:
    """Noise of any size, with a rest that is no whole patch."""
    height, width = (
        drawn.between(rng, 1, 9) * patch + drawn.between(rng, 0, patch - 1) for _ in range(2)
    )
    return rng.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.default_cases("1-False", "1-True")
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_dinov2_is_what_transformers_makes_of_it_with_images_of_many_sizes_in_one_row(
    seed, registers, tmp_path
):
    rng = np.random.default_rng(seed)
    config = drawn.dinov2_tower(rng, registers)
    theirs = random_model(config, Dinov2WithRegistersModel if registers else Dinov2Model)
    theirs.save_pretrained(tmp_path)

    def features(picture: np.ndarray) -> torch.Tensor:
        return theirs(pixels(picture)).last_hidden_state[0]

    pictures = [image(rng, config.patch_size) for _ in range(5)]
    check_tower(theirs, tmp_path, features, pictures, rng, merge=drawn.pick(rng, 1, 2, 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_a_llava_with_dinov2_is_what_transformers_makes_of_it(seed, tmp_path):
    rng = np.random.default_rng(seed)
    vision = drawn.dinov2_tower(rng)
    layer = drawn.pick(rng, -1, -vision.num_hidden_layers)
    config = LlavaConfig(
        vision_config=vision,
        text_config=drawn.any_decoder(rng, VOCAB),
        image_token_index=IMAGE,
        vision_feature_layer=layer,
        vision_feature_select_strategy="default",
    )
    model = random_model(config, LlavaForConditionalGeneration)
    model.save_pretrained(tmp_path)

    def theirs(model, sample):
        (picture,) = [part for part in sample if not is_text(part)]
        count = (picture.shape[0] // vision.patch_size) * (picture.shape[1] // vision.patch_size)
        tokens = np.concatenate(
            [part if is_text(part) else np.full(count, IMAGE) for part in sample]
        )
        ids = torch.tensor(tokens)[None].long()
        return model(input_ids=ids, pixel_values=pixels(picture), use_cache=False).logits[0]

    words = lambda n: rng.integers(1, IMAGE, n)  # noqa: E731
    samples = [[words(n), image(rng, vision.patch_size), words(n + 2)] for n in (3, 1, 4)]
    check_samples(model, tmp_path, samples, theirs)


def test_registers_that_an_llm_would_see_are_refused(tmp_path):
    vision = drawn.dinov2_tower(np.random.default_rng(0), registers=True)
    LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig()).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        UserError, match=r"the LLM sees the \d registers of its tower, which is not supported"
    ):
        from_hf(tmp_path)


def test_images_prepared_at_another_size_than_the_tower_was_trained_with_are_taken(tmp_path):
    drawn.dinov2_tower(np.random.default_rng(0)).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "BitImageProcessor"}'
    )
    assert encoder_from_hf(tmp_path).images.crop == (224, 224)
