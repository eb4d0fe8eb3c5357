"""Tiny LLaVA-NeXT and LLaVA-OneVision checkpoints with tokenizer, template and processor, and questions about images
of many shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from image_shapes import picture
from llava_folder import save_tokenizer
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

TILE, PATCH = 12, 4
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
TOWER |= {"image_size": TILE, "patch_size": PATCH}
NEXT_POINTS = [
    [TILE * rows, TILE * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
]
ONEVISION_POINTS = [
    [TILE * rows, TILE * columns] for rows in range(1, 4) for columns in range(1, 4)
]
SHAPES = ((40, 40), (20, 90), (90, 20), (37, 50), (12, 12), (61, 9), (100, 33), (7, 50))


def save_next(folder: Path) -> Path:
    """A LLaVA-NeXT, as `transformers` saves it, with all that serves it."""
    size = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
    LlavaNextImageProcessorPil(**size, image_grid_pinpoints=NEXT_POINTS).save_pretrained(folder)
    processor = {
        "processor_class": "LlavaNextProcessor",
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(
        json.dumps(
            processor | {"vision_feature_select_strategy": "default", "image_token": "<image>"}
        )
    )
    return _saved(folder, LlamaConfig, CLIPVisionConfig(**TOWER), LlavaNextConfig, LlavaNextForConditionalGeneration,
                  image_grid_pinpoints=NEXT_POINTS)  # fmt: skip


def save_onevision(folder: Path, most_tiles: int = 2) -> Path:
    """A LLaVA-OneVision whose images are interpolated where they have more than so many tiles."""
    size = {"size": {"height": TILE, "width": TILE}}
    LlavaOnevisionImageProcessorPil(**size, image_grid_pinpoints=ONEVISION_POINTS).save_pretrained(
        folder
    )
    said = {"vision_aspect_ratio": f"anyres_max_{most_tiles}"}
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": (TILE // PATCH) ** 2,
    } | said
    (folder / "processor_config.json").write_text(
        json.dumps(processor | {"vision_feature_select_strategy": "full", "image_token": "<image>"})
    )
    vision = SiglipVisionConfig(**TOWER, vision_use_head=False)
    return _saved(folder, Qwen2Config, vision, LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration,
                  image_grid_pinpoints=ONEVISION_POINTS, **said)  # fmt: skip


def _saved(folder, text, vision, config, model, **own) -> Path:
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = text(**TEXT, num_key_value_heads=2, vocab_size=len(tokenizer), **ends)
    image = tokenizer.convert_tokens_to_ids("<image>")
    model(
        config(vision_config=vision, text_config=text, image_token_index=image, **own)
    ).save_pretrained(folder)
    return folder


def save_questions(folder: Path, shapes=SHAPES) -> Path:
    """`data.json`: a question about an image of each shape, then one about two of them."""
    (folder / "images").mkdir(parents=True)
    for n, shape in enumerate(shapes):
        Image.fromarray(picture(*shape)).save(folder / "images" / f"{n}.png")
    names = [[f"{n}.png"] for n in range(len(shapes))] + [["0.png", "1.png"], ["2.png"]]
    records = []
    for n, images in enumerate(names):
        asked = "<image>" * len(images) + f"\nWhat colour is number {n}?"
        turns = [
            {"from": "human", "value": asked},
            {"from": "gpt", "value": "blue" if n % 2 else "red"},
        ]
        records.append({"id": str(n), "image": images, "conversations": turns})
    (folder / "data.json").write_text(json.dumps(records))
    return folder / "data.json"


def image_of(folder: Path, name: str) -> Image.Image:
    return Image.fromarray(np.asarray(Image.open(folder / "images" / name)))
