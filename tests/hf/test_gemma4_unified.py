"""Gemma 4 without towers computes what transformers computes of packed images, clips and texts."""

from __future__ import annotations

import json

import drawn
import numpy as np
import peft
import pytest
import torch
import transformers
from fine_tuning import moved
from parity import random_model
from parity_samples import check_samples, check_ten_steps, is_text
from PIL import Image
from pillow_processors import Gemma4UnifiedImageProcessor
from test_audio_towers import clip

from mmjax import export
from mmjax.config import LoraConfig, PatchBudget, Waveform
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.patches import patchify
from mmjax.data.media.preparations import before_encoder
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

VOCAB, IMAGE, CLIP = 61, 60, 58
GRIDS = [(3, 1), (1, 1), (2, 3), (1, 2), (3, 3)]  # of tokens


def made(seed, folder, **own):
    """A random model in a folder."""
    config = drawn.gemma4_unified(
        np.random.default_rng(seed),
        VOCAB,
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        audio_token_id=CLIP,
        **own,
    )
    model = random_model(config, transformers.Gemma4UnifiedForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def processor_of(model, **own):
    vision = model.config.vision_config
    sizes = {name: getattr(vision, name) for name in ("patch_size", "pooling_kernel_size")}
    return Gemma4UnifiedImageProcessor(max_soft_tokens=70, **sizes, **own)


def samples(model, seed=0):
    """Text alone; one image; two images with text between; an image first; clips of whole frames and others."""
    rng = np.random.default_rng(seed)
    vision, frame = model.config.vision_config, model.config.audio_config.audio_embed_dim
    unit = vision.patch_size * vision.pooling_kernel_size
    grids = iter(GRIDS)

    def image():
        rows, columns = next(grids)
        return rng.integers(0, 256, (rows * unit, columns * unit, 3), np.uint8)

    words = lambda n: rng.integers(1, IMAGE - 2, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), image(), words(5)],
        [words(2), image(), words(1), image(), words(4)],
        [image(), words(6)],
        [words(2), clip(3 * frame), words(3), clip(1), words(1)],
        [clip(12 * frame + 1), words(2), image(), words(4)],
    ]


def inputs(model, sample):
    """What transformers' model takes for a sample, by its own processors."""
    tokens, pictures, clips = [], [], []
    unit = model.config.vision_config.model_patch_size
    frame = model.config.audio_config.audio_embed_dim
    for part in sample:
        if is_text(part):
            tokens += part.tolist()
        elif part.ndim == 1:
            clips.append(part)
            tokens += [CLIP] * -(-len(part) // frame)
        else:
            pictures.append(Image.fromarray(part))
            tokens += [IMAGE] * (part.shape[0] * part.shape[1] // unit**2)
    given = {"input_ids": torch.tensor([tokens])}
    given["mm_token_type_ids"] = (given["input_ids"] == IMAGE) + 3 * (given["input_ids"] == CLIP)
    if pictures:
        images = processor_of(model, do_resize=False)(pictures)
        given |= {name: images[name] for name in ("pixel_values", "image_position_ids")}
    extractor = transformers.Gemma4UnifiedAudioFeatureExtractor(
        feature_size=frame, audio_samples_per_token=frame
    )
    return given | (extractor(clips, return_tensors="pt") if clips else {})


def theirs(model, sample):
    every = {"use_cache": False, "output_hidden_states": True}
    return model(**inputs(model, sample), **every).logits[0]


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_gemma4_without_towers_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    check_samples(model, tmp_path, samples(model), theirs)
