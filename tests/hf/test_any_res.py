"""LLaVA-NeXT and LLaVA-OneVision compute what transformers computes: images in tiles, by rows with newlines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from image_shapes import picture
from parity import random_model
from parity_samples import check_samples, is_text
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

VOCAB, IMAGE = 61, 60
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3}
CLIP, SIGLIP = (
    lambda **own: CLIPVisionConfig(**TOWER | {"image_size": 12, "patch_size": 4} | own),
    lambda **own: SiglipVisionConfig(**TOWER | {"image_size": 12, "patch_size": 4, "vision_use_head": False} | own),
)
QWEN2, LLAMA = transformers.Qwen2Config(**TEXT), transformers.LlamaConfig(**TEXT)
GRIDS = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
SOME = tuple((rows, columns) for rows in range(1, 4) for columns in range(1, 4))
ALL = tuple((rows, columns) for rows in range(1, 5) for columns in range(1, 5))


@dataclass(frozen=True)
class Variant:
    vision: transformers.PreTrainedConfig
    text: transformers.PreTrainedConfig
    own: dict
    grids: tuple = GRIDS


NEXT = {
    "clip": Variant(CLIP(), LLAMA, {}),
    "siglip, last layer, whole": Variant(
        SIGLIP(),
        transformers.MistralConfig(**TEXT, tie_word_embeddings=True),
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "tie_word_embeddings": True},
        ((1, 1), (2, 3), (3, 2)),
    ),
    "odd tiles, no biases": Variant(
        CLIP(image_size=14, patch_size=6),
        QWEN2,
        {"multimodal_projector_bias": False, "vision_feature_layer": 1, "projector_hidden_act": "relu"},
        ((1, 4), (4, 1), (2, 2)),
    ),
}
ONEVISION = {
    "siglip, at most nine tiles": Variant(SIGLIP(), QWEN2, {}, ALL),
    "at most two tiles": Variant(SIGLIP(), QWEN2, {"vision_aspect_ratio": "anyres_max_2"}, ALL),
    "odd tiles, tied": Variant(
        SIGLIP(image_size=13, patch_size=4),
        transformers.Qwen2Config(**TEXT, tie_word_embeddings=True),
        {"vision_aspect_ratio": "anyres_max_1", "vision_feature_layer": -2, "tie_word_embeddings": True},
        SOME,
    ),
    "clip": Variant(CLIP(), LLAMA, {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}, GRIDS),
}
SHAPES = ((40, 40), (20, 90), (90, 20), (1, 40), (61, 1), (37, 50))


def samples(shapes=SHAPES):
    """Text alone, an image of each shape in a sample of its own, several in one."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, IMAGE, n)  # noqa: E731
    alone = [[words(2 + n % 3), picture(*shape), words(4)] for n, shape in enumerate(shapes)]
    return [[words(7)], *alone, [words(1), picture(30, 44), words(2), picture(50, 20), words(3)]]


def processor_of(variant, kind):
    tile = variant.vision.image_size
    points = [[rows * tile, columns * tile] for rows, columns in variant.grids]
    size = {"size": {"shortest_edge": tile}, "crop_size": {"height": tile, "width": tile}}
    if kind is LlavaOnevisionImageProcessorPil:
        size = {"size": {"height": tile, "width": tile}}
    return kind(**size, image_grid_pinpoints=points, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])


def theirs(processor, several):
    """Logits of one sample, of whose images the processor makes the tiles."""

    def logits(model, sample):
        images = [Image.fromarray(part) for part in sample if not is_text(part)]
        if not images:
            return model(input_ids=torch.tensor(sample[0])[None].long(), use_cache=False).logits[0]
        made = processor([images] if several else images, return_tensors="pt")
        features = model.get_image_features(**made).pooler_output
        lengths = iter([len(feature) for feature in features])
        tokens = [part if is_text(part) else np.full(next(lengths), IMAGE) for part in sample]
        ids = torch.tensor(np.concatenate(tokens))[None].long()
        return model(input_ids=ids, use_cache=False, **made).logits[0]

    return logits


def check(variant, config, model, processor, folder):
    points = processor.image_grid_pinpoints
    config = config(
        vision_config=variant.vision,
        text_config=variant.text,
        image_token_index=IMAGE,
        image_grid_pinpoints=points,
        **variant.own,
    )
    model = random_model(config, model)
    with torch.no_grad():
        model.model.image_newline.normal_(0, 1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    several = isinstance(processor, LlavaOnevisionImageProcessorPil)
    return check_samples(model, folder, samples(), theirs(processor, several))


@pytest.mark.parametrize("kind", NEXT)
def test_llava_next_is_what_transformers_makes_of_it(kind, tmp_path):
    variant = NEXT[kind]
    processor = processor_of(variant, LlavaNextImageProcessorPil)
    batch = check(variant, LlavaNextConfig, LlavaNextForConditionalGeneration, processor, tmp_path)
    assert isinstance(batch.text.slots["vision"], np.ndarray)


@pytest.mark.parametrize("kind", ONEVISION)
def test_llava_onevision_is_what_transformers_makes_of_it(kind, tmp_path):
    variant = ONEVISION[kind]
    processor = processor_of(variant, LlavaOnevisionImageProcessorPil)
    batch = check(variant, LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, processor, tmp_path)
    mixed = (batch.text.slots["vision"].slot >= 0).sum(-1) > 1
    assert mixed.any() == (variant.grids != GRIDS)
