"""VideoLLaMA 3 computes what transformers computes of packed images of any size and text."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import test_qwen_vl
import torch
import transformers
from parity_samples import check_samples
from test_qwen_vl import IMAGE, VIDEO, random_whole, samples_of, theirs

from mmjax.config import SmartResize
from mmjax.errors import UserError
from mmjax.hf.families import from_hf


def made(seed, folder, merge):
    """A random model in a folder whose image processor merges so many patches a side."""
    config = drawn.video_llama_3(
        np.random.default_rng(seed), image_token_id=IMAGE, video_token_id=VIDEO
    )
    model = random_whole(config, transformers.VideoLlama3ForConditionalGeneration)
    model.save_pretrained(folder)
    said = {
        "image_processor_type": "VideoLlama3ImageProcessor",
        "patch_size": config.vision_config.patch_size,
        "merge_size": merge,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return model


def inputs_of(model, folder):
    """What transformers' model takes for a sample."""
    merge = from_hf(folder).encoders["vision"].connector.merge
    of_images = test_qwen_vl.inputs_of(model, folder)

    def inputs(parts):
        given = of_images(parts)
        given.pop("mm_token_type_ids", None)
        if "image_grid_thw" in given:
            given["image_merge_sizes"] = torch.full((len(given["image_grid_thw"]),), merge)
        return given

    return inputs


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    merge = 1 + seed % 2
    model = made(seed, tmp_path, merge)
    unit = model.config.vision_config.patch_size * merge
    check_samples(model, tmp_path, samples_of(unit), theirs(inputs_of(model, tmp_path)))


def test_a_folder_without_a_processor_has_a_token_for_each_patch(tmp_path):
    made(0, tmp_path, 2)
    (tmp_path / "preprocessor_config.json").unlink()
    assert from_hf(tmp_path).encoders["vision"].connector.merge == 1


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"merge_size": 3}, "merge_size=3 is not supported; known: 1, 2"),
        ({"temporal_patch_size": 2}, r"temporal_patch_size=2.*set it to 1"),
    ],
)
def test_other_processors_are_refused(own, message, tmp_path):
    model = made(0, tmp_path, 2)
    patch = model.config.vision_config.patch_size
    how = from_hf(tmp_path).encoders["vision"].images
    assert how == SmartResize(patch, 2, 56 * 56, 28 * 28 * 1280)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)
