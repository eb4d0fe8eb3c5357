"""Adapters go by the modules that transformers makes of a checkpoint, however old its names."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors import safe_open

from mmjax.hf.writing import module_path

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
VISUAL = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
CONFIGS = {
    "llava": lambda: transformers.LlavaConfig(vision_config=CLIP, text_config=TEXT, image_token_index=5),
    "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
        vision_config=VISUAL, text_config=TEXT | ROPE | {"model_type": "qwen2_5_vl_text"}
    ),
    "qwen2-audio": lambda: transformers.Qwen2AudioConfig(audio_config=AUDIO, text_config=TEXT),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_linear_layer_has_the_path_of_its_module(family, tmp_path):
    kind = (
        transformers.AutoModelForMultimodalLM if family == "qwen2-audio" else transformers.AutoModelForImageTextToText
    )
    model = kind.from_config(CONFIGS[family]())
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        paths = {module_path(key, as_named=False) for key in file.keys() if key.endswith(".weight")}  # noqa: SIM118
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear - paths <= {"lm_head"}


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "model.vision_tower.encoder.layers.0.mlp.fc1"),
        ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("visual.blocks.0.attn.proj", "model.visual.blocks.0.attn.proj"),
        ("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
    ],
)
def test_old_names_are_known(key, path):
    assert module_path(f"{key}.weight", as_named=False) == path
    assert module_path(f"{key}.weight", as_named=True) == key
