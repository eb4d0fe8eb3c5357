"""PaliGemma 1 and 2: a SigLIP tower, one matrix, a Gemma whose prompt attends both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmjax.config import ConnectorConfig, ModelConfig
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear
from mmjax.hf.llava import PROJECTORS, whole_layout
from mmjax.hf.vision import vision_of, with_images

# The class's own, where a config has no such part at all.
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 224,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
TEXT = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16_384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257_152,
}


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a PaliGemma's config says: images and the text before the first answer are one prefix."""
    text = _part(fields, "text_config", TEXT)
    # It says what the mask does anyway: the prefix attends both ways, what follows is causal.
    text = replace(text, values={k: v for k, v in text.values.items() if k != "use_bidirectional_attention"})
    tied = fields.get("tie_word_embeddings", bool, True) or text.get("tie_word_embeddings", bool, True)
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    vision = with_images(folder, vision_of(_part(fields, "vision_config", TOWER), -1, True, connector))
    return ModelConfig(replace(decoder_of(text, tied), items="prefix"), {"vision": vision})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = next((p for p in PROJECTORS if f"{p}linear.weight" in folder.tensors), PROJECTORS[-1])
    connector = TensorNames({"linear": linear(f"{projector}linear")})
    return whole_layout(folder, model, _part(folder.fields, "vision_config", TOWER), connector, projector)


def _part(fields: Fields, name: str, default: Mapping[str, Any]) -> Fields:
    """A part of the config, whose kind is by default this one; the whole default where there is none."""
    values = fields.get(name, dict, {}) or default
    return Fields({"model_type": default["model_type"], **values}, f"{fields.where}: {name}")
