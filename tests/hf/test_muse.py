"""Muse Glimmer computes what transformers computes of packed images, videos and texts."""

from __future__ import annotations

import drawn
import numpy as np
import pytest
import torch
import transformers
from parity_samples import check_samples, is_text
from test_qwen_vl import IMAGE, VIDEO, random_whole, samples_of, theirs

from mmjax.hf.families import from_hf


def made(seed, folder, vocab=97, **tokens):
    """A random model in a folder."""
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO} | tokens
    config = drawn.muse_glimmer(np.random.default_rng(seed), vocab, **ids)
    model = random_whole(config, transformers.MuseGlimmerForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def unit_of(model):
    """Pixels of a side of a token."""
    vision = model.config.vision_config
    return vision.patch_size * vision.merge_size


def patches_of(frames, encoder):
    """The rows of patches of frames `[n, h, w, 3]` as its processors cut them, and their grid."""
    side, unit = encoder.patch, encoder.frames
    count, height, width, _ = frames.shape
    grid = count // unit, height // side, width // side
    pixels = (frames / 255 - encoder.mean) / encoder.std
    parts = pixels.reshape(grid[0], unit, grid[1], side, grid[2], side, 3)
    parts = parts.transpose(0, 2, 4, 1, 6, 3, 5).reshape(np.prod(grid), -1)
    return torch.tensor(parts, dtype=torch.float32), grid


def inputs_of(model, folder):
    """What transformers' model takes for a sample of images and texts."""
    encoder = from_hf(folder).encoders["vision"]

    def inputs(parts):
        tokens, media = [], []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
                continue
            media.append(patches_of(np.stack([part] * encoder.frames), encoder))
            tokens += [IMAGE] * (np.prod(media[-1][1]) // encoder.connector.merge**2)
        given = {"input_ids": torch.tensor([tokens])}
        if media:
            given["pixel_values"] = torch.cat([patches for patches, _ in media])
            given["image_grid_thw"] = torch.tensor([grid for _, grid in media])
        return given

    return inputs


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    check_samples(model, tmp_path, samples_of(unit_of(model)), theirs(inputs_of(model, tmp_path)))
