"""MiniCPM-V computes what transformers computes of packed images of any size and text, and learns the same."""

from __future__ import annotations

import drawn
import numpy as np
import pytest
import torch
import transformers
from parity_samples import check_samples, is_text
from test_qwen_vl import IMAGE, VIDEO, random_whole, samples_of, theirs

from mmjax.hf.families import from_hf


def made(seed, folder, **own):
    """A random model in a folder."""
    config = drawn.minicpmv(
        np.random.default_rng(seed), image_token_id=IMAGE, video_token_id=VIDEO, **own
    )
    model = random_whole(config, transformers.MiniCPMV4_6ForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def inputs_of(model, folder):
    """What transformers' model takes for a sample: patches side by side, and the sizes of their grids."""
    vision = from_hf(folder).encoders["vision"]
    side, merge = vision.patch, vision.token_side

    def inputs(parts):
        tokens, patches, grids = [], [], []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
                continue
            rows, columns = part.shape[0] // side, part.shape[1] // side
            tokens += [IMAGE] * (rows * columns // merge**2)
            pixels = ((part / 255 - vision.mean) / vision.std).transpose(2, 0, 1)
            cut = pixels.reshape(3, rows, side, columns, side).transpose(0, 2, 1, 3, 4)
            patches.append(cut.reshape(3, side, -1))
            grids.append([rows, columns])
        given = {"input_ids": torch.tensor([tokens])}
        if grids:
            pixels = np.concatenate(patches, axis=-1)[None]
            given["pixel_values"] = torch.tensor(pixels, dtype=torch.float32)
            given["target_sizes"] = torch.tensor(grids, dtype=torch.int32)
        return given

    return inputs


def unit_of(folder):
    """The side of a token in pixels."""
    vision = from_hf(folder).encoders["vision"]
    return vision.patch * vision.token_side


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    samples = samples_of(unit_of(tmp_path))
    check_samples(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))
