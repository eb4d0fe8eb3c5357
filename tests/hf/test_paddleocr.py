"""PaddleOCR-VL computes what transformers computes of packed images of any size and text."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import torch
import transformers
from parity_samples import is_text
from test_qwen_vl import IMAGE, VIDEO, check, random_whole

from mmjax.config import SmartResize
from mmjax.errors import UserError
from mmjax.hf.families import from_hf


def made(seed, folder):
    """A random model in a folder."""
    config = drawn.paddleocr_vl(
        np.random.default_rng(seed), image_token_id=IMAGE, video_token_id=VIDEO
    )
    model = random_whole(config, transformers.PaddleOCRVLForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def inputs_of(model, folder):
    """What transformers' model takes for a sample, whose patches go row by row."""
    vision = from_hf(folder).encoders["vision"]
    side, merge = vision.patch, vision.connector.merge

    def inputs(parts):
        tokens, patches, grids = [], [], []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
                continue
            rows, columns = part.shape[0] // side, part.shape[1] // side
            tokens += [IMAGE] * (rows * columns // merge**2)
            pixels = (part / 255 - vision.mean) / vision.std
            cut = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
            patches.append(cut.reshape(-1, 3, side, side))
            grids.append([1, rows, columns])
        given = {"input_ids": torch.tensor([tokens])}
        if grids:
            given |= {
                "pixel_values": torch.tensor(np.concatenate(patches), dtype=torch.float32),
                "image_grid_thw": torch.tensor(grids),
                "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
            }
        return given

    return inputs


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    check(made(seed, tmp_path), tmp_path, inputs_of=inputs_of)


def test_a_published_config_with_its_text_beside_the_tower_is_the_same_model(tmp_path):
    made(1, tmp_path)
    nested = from_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"]
    config["vision_config"]["model_type"] = "paddleocr_vl"
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert from_hf(tmp_path) == nested


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not"),
        ("text_config", {"layer_types": ["sliding_attention"]}, "layer_types=.* is not supported"),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [1]}},
            "must have three numbers: of t, y and x",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(part, own, message, tmp_path):
    made(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[part] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_a_processor_of_temporal_patches_is_refused(tmp_path):
    vision = made(0, tmp_path).config.vision_config
    said = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    how = from_hf(tmp_path).encoders["vision"].images
    bounds = 384 * 384, 1536 * 1536
    assert how == SmartResize(vision.patch_size, vision.spatial_merge_size, *bounds, widened=True)
    path.write_text(json.dumps(said | {"temporal_patch_size": 2}))
    with pytest.raises(UserError, match=r"temporal_patch_size=2.*set it to 1"):
        from_hf(tmp_path)
