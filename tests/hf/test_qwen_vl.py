"""Qwen2.5-VL and Qwen3-VL compute what transformers computes of packed images and text, and learn the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from parity import random_model
from parity_images import check_images
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.hf.families import from_hf

IMAGE, VIDEO = 90, 91  # tokens
TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
VISION2 = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "window_size": 24,  # 3 x 3 merged patches
    "fullatt_block_indexes": [1, 3],
}
VISION3 = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2, 3],
}
SECTIONS2, SECTIONS3 = [2, 2, 2], [4, 2, 2]
GRIDS = [(7, 4), (1, 1), (3, 8), (2, 3), (5, 5)]  # of merged patches


def qwen2_5(text=None, vision=None, rope=ROPE, sections=SECTIONS2, **own):
    rope = rope | ({"mrope_section": sections} if sections else {})
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope} | (text or {}),
        vision_config=VISION2 | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen2_5_VLForConditionalGeneration)


def qwen3(text=None, vision=None, rope=ROPE, sections=SECTIONS3, **own):
    rope = rope | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": rope} | (text or {}),
        vision_config=VISION3 | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen3VLForConditionalGeneration)


def random_whole(config, kind):
    for part in (config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    return random_model(config, kind)


def samples_of(unit, grids=GRIDS, seed=0):
    """Two images in a sample, one without, one that begins and one that ends with an image; `unit`: pixels a token."""
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (rows * unit, columns * unit, 3)).astype(np.uint8) for rows, columns in grids]
    text = lambda n: rng.integers(1, 89, n)  # noqa: E731
    return [
        [text(3), images[0], text(2), images[1], text(4)],
        [text(7)],
        [images[2], text(3)],
        [text(2), images[3], text(1), images[4]],
    ]


def inputs_of(model, folder):
    """What transformers' processor and model take for a sample."""
    config = from_hf(folder).encoders["vision"]
    processor = Qwen2VLImageProcessorPil(
        patch_size=config.patch, merge_size=config.connector.merge, temporal_patch_size=config.frames,
        image_mean=list(config.mean), image_std=list(config.std), do_resize=False,
    )  # fmt: skip

    def inputs(parts):
        tokens, images = [], []
        for part in parts:
            if part.ndim == 1:
                tokens += part.tolist()
                continue
            unit = config.patch * config.connector.merge
            tokens += [IMAGE] * (part.shape[0] // unit * (part.shape[1] // unit))
            images.append(Image.fromarray(part))
        ids = torch.tensor([tokens])
        if not images:
            return {"input_ids": ids}
        made = processor(images, return_tensors="pt")
        return {
            "input_ids": ids,
            "pixel_values": made["pixel_values"].float(),
            "image_grid_thw": made["image_grid_thw"],
            "mm_token_type_ids": (ids == IMAGE).int(),
        }

    return inputs


def check(model, folder, grids=GRIDS):
    vision = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    inputs = inputs_of(model, folder)
    batch = check_images(model, folder, samples_of(unit, grids), inputs)
    check_positions(model, batch, samples_of(unit, grids), inputs)


def check_positions(model, batch, samples, inputs):
    for number, parts in enumerate(samples):
        given = inputs(parts)
        here = batch.text.position[0][batch.text.sample[0] == number]
        types = (given["input_ids"] == IMAGE).int()
        there, _ = model.model.get_rope_index(
            given["input_ids"], mm_token_type_ids=types, image_grid_thw=given.get("image_grid_thw")
        )
        np.testing.assert_array_equal(here, there[:, 0].T.numpy())


MODELS = {
    "2.5": lambda: qwen2_5(),
    "2.5 tied": lambda: qwen2_5(tie_word_embeddings=True),
    "2.5 yarn": lambda: qwen2_5(rope=YARN),
    "2.5 heads": lambda: qwen2_5(
        {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "rms_norm_eps": 1e-3},
        {"num_heads": 4, "out_hidden_size": 96, "patch_size": 6, "window_size": 27, "hidden_act": "gelu"},
        sections=[4, 1, 3],
    ),
    "2.5 windows everywhere": lambda: qwen2_5({}, {"fullatt_block_indexes": [7], "depth": 2, "window_size": 16}),
    "2.5 no windows": lambda: qwen2_5({}, {"fullatt_block_indexes": [0, 1, 2, 3], "temporal_patch_size": 1}),
    "2.5 merge 3": lambda: qwen2_5({}, {"spatial_merge_size": 3, "window_size": 30}),
    "3": lambda: qwen3(),
    "3 tied": lambda: qwen3(tie_word_embeddings=True),
    "3 yarn": lambda: qwen3(rope=YARN),
    "3 heads": lambda: qwen3(
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True},
        {"num_heads": 2, "hidden_act": "gelu", "num_position_embeddings": 9, "in_channels": 3},
        sections=[6, 3, 3],
    ),
    "3 more stacked than layers": lambda: qwen3({"num_hidden_layers": 2}),
    "3 stacked to the last layer": lambda: qwen3({"num_hidden_layers": 3}, {"deepstack_visual_indexes": [1, 4]}),
    "3 stacked beyond the last": lambda: qwen3({}, {"deepstack_visual_indexes": [2, 5, 9]}),
    "3 default sections": lambda: qwen3(sections=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_is_what_transformers_makes_of_it(name, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    check(model, tmp_path)
