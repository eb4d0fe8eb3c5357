"""Mistral 3: a Pixtral tower, a norm, a matrix that merges patches, an MLP, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, merging_linear, norm
from mmjax.hf.llava import PROJECTORS, text_of, tower_fields, whole_layout
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.vision import vision_of, with_pixtral_images

TEXT = {  # where a config has none
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "max_position_embeddings": 131_072,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131_072,
}
TOWER = {"model_type": "pixtral", "patch_size": 14}


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a Mistral 3 says. Raises UserError for what is missing or not supported."""
    # The class ties the tables unless a config says otherwise.
    fields = fields.over({"tie_word_embeddings": True, "text_config": TEXT})
    llm = text_of(fields, "mistral")
    layer = fields.get("vision_feature_layer", (int, list), -1)
    if isinstance(layer, list):
        raise UserError(f"{fields.where}: vision_feature_layer={layer} names several layers, which is not supported")
    tower = vision_of(_tower(fields), layer, False, ConnectorConfig())
    connector = ConnectorConfig(
        merge=fields.get("spatial_merge_size", int, 2),
        mlp_width=llm.width,
        norm="rms",
        norm_eps=llm.norm_eps,
        activation=fields.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        biases=("up", "down") if fields.get("multimodal_projector_bias", bool, False) else (),
        merger_width=tower.width,
    )
    return ModelConfig(llm, {"vision": with_pixtral_images(folder, replace(tower, connector=connector))})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    vision = model.encoders["vision"]
    projector = next((p for p in PROJECTORS if f"{p}linear_1.weight" in folder.tensors), PROJECTORS[-1])
    merger = f"{projector}patch_merger.merging_layer"
    parts = {
        "norm": norm(f"{projector}norm"),
        "merger": merging_linear(merger, vision.connector.merger_width, vision.width, vision.connector.merge),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, _tower(folder.fields), TensorNames(parts), projector)


def _tower(fields: Fields) -> Fields:
    # Its defaults are those of Pixtral's class where there is a config at all.
    configured = fields.values.get("vision_config") is not None
    tower = tower_fields(fields, {"model_type": "pixtral"} if configured else TOWER)
    if tower.get("model_type", str) != "pixtral":
        raise UserError(f"{tower.where}: model_type={tower.values['model_type']!r} is not supported; known: 'pixtral'")
    return tower
