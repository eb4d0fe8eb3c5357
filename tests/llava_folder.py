"""A tiny LLaVA checkpoint with its tokenizer, template and processor, and a LLaVA-style folder of questions for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    TokenizersBackend,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 60),
    "blue": (40, 60, 220),
    "white": (240, 240, 240),
}
SIDE, PATCH = 16, 4
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ':' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ ' <image>\n' }}"
    "{% else %}{{ ' ' + part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def save_tokenizer(folder: Path) -> TokenizersBackend:
    """Byte-level BPE with <s>, </s>, <pad> and <image>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [f"USER: What colour is the upper half? ASSISTANT: {c}" for c in COLOURS] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    special = [
        AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<pad>", "<image>")
    ]
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = TokenizersBackend(tokenizer_object=backend, chat_template=TEMPLATE, **named)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, window: int = 0, heads: int = 4
) -> Path:
    """A LLaVA of a few thousand parameters, as `transformers` saves it, with all that serves it.

    window: of its LLM, a Mistral, in tokens; 0 = a Llama, which has none.
    """
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    text = (partial(MistralConfig, sliding_window=window) if window else LlamaConfig)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(dtype).save_pretrained(folder)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def save_parts(place: Path) -> None:
    """`tower` and `llm` in a folder: a SigLIP and a Qwen2 that never met, with its tokenizer and the template."""
    tokens = len(save_tokenizer(place / "llm"))
    text = {
        "vocab_size": tokens,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    qwen = Qwen2Config(**text, num_attention_heads=4, num_key_value_heads=2)
    Qwen2ForCausalLM(qwen).save_pretrained(place / "llm")
    tower = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    SiglipVisionModel(
        SiglipVisionConfig(**tower, image_size=SIDE, patch_size=PATCH)
    ).save_pretrained(place / "tower")
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(place / "tower")


def save_questions(folder: Path, count: int, seed: int = 0) -> Path:
    """`data.json` and images of two colours, PNG and JPEG of several sizes; each is asked for one of its halves."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    names, records = list(COLOURS), []
    for i in range(count):
        upper, lower = rng.choice(len(names), 2)
        size = int(rng.integers(12, 40))
        pixels = np.empty((size, size, 3), np.uint8)
        pixels[: size // 2], pixels[size // 2 :] = COLOURS[names[upper]], COLOURS[names[lower]]
        name = f"{i}.{'png' if i % 2 else 'jpg'}"
        Image.fromarray(pixels).save(folder / "images" / name, quality=95)
        half, answer = [("upper", names[upper]), ("lower", names[lower])][int(rng.integers(2))]
        turns = [
            {"from": "human", "value": f"<image>\nWhat colour is the {half} half?"},
            {"from": "gpt", "value": answer},
        ]
        records.append({"id": str(i), "image": name, "conversations": turns})
    (folder / "data.json").write_text(json.dumps(records))
    return folder / "data.json"
