"""Mistral 3 and LightOnOCR: a Pixtral tower, a norm, a matrix that merges patches, an MLP, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import Activation, ConnectorConfig, ModelConfig
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, merging_linear, norm
from mmjax.hf.llava import feature_layer, find_projector, text_of, whole_layout
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.vision import vision_of, with_pixtral_images


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a Mistral 3 says. Raises UserError for what is missing or not supported."""
    activation = fields.choice("projector_hidden_act", ACTIVATIONS)
    biased = fields.get("multimodal_projector_bias", bool)
    return _read(folder, fields, feature_layer(fields), activation, biased)


def read_lighton(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a LightOnOCR says, whose images have no text between their rows."""
    model = _read(folder, fields, -1, "gelu", False)
    vision = model.encoders["vision"]
    return replace(
        model, encoders={"vision": replace(vision, images=vision.images.without_tokens())}
    )


def _read(
    folder: HfFolder, fields: Fields, layer: int, activation: Activation, biased: bool
) -> ModelConfig:
    llm = text_of(fields)
    tower_fields = fields.inner("vision_config")
    tower_fields.allow_only("model_type", "pixtral")
    tower = vision_of(tower_fields, layer, False, ConnectorConfig())
    connector = ConnectorConfig(
        merge=fields.size("spatial_merge_size"),
        mlp_width=llm.width,
        norm="rms",
        norm_eps=llm.norm_eps,
        activation=activation,
        biases=("up", "down") if biased else (),
        merger_width=tower.width,
    )
    return ModelConfig(
        llm, {"vision": with_pixtral_images(folder, replace(tower, connector=connector))}
    )


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    vision = model.encoders["vision"]
    projector = find_projector(folder)
    merger = f"{projector}patch_merger.merging_layer"
    parts = {
        "norm": norm(f"{projector}norm"),
        "merger": merging_linear(
            merger, vision.connector.merger_width, vision.width, vision.connector.merge
        ),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, TensorNames(parts), projector)
