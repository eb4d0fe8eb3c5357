"""InternVL 2.5 to 3.5: InternViT, pixel shuffle, an MLP, a decoder; in transformers' layout and in OpenGVLab's own."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, ModelConfig, UniformVideo
from mmjax.errors import UserError
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, norm
from mmjax.hf.llava import feature_layer, find_projector, text_of, whole_layout
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.processors import read_videos
from mmjax.hf.vision import part_of_one, vision_of, with_images

PROJECTOR_EPS = 1e-5  # of PyTorch's LayerNorm; no config says it
OPEN = "mlp1."  # OpenGVLab's projector


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of transformers' layout says."""
    llm = text_of(fields)
    layer = feature_layer(fields)
    fields.allow_only("vision_feature_select_strategy", "default")
    connector = _connector(fields, llm.width, fields.choice("projector_hidden_act", ACTIVATIONS))
    vision = vision_of(fields.inner("vision_config"), layer, layer == -1, connector)
    prepared = with_images(folder, vision)
    tile = prepared.positions.rows * prepared.patch, prepared.positions.columns * prepared.patch
    videos = read_videos(folder.path, prepared, UniformVideo(size=tile, label="\nFrame{}: "))
    return ModelConfig(llm, {"vision": replace(prepared, videos=videos)})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of transformers' layout."""
    projector = find_projector(folder)
    parts = {
        "norm": norm(f"{projector}layer_norm"),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, TensorNames(parts), projector)


def read_chat(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that OpenGVLab's own config (`internvl_chat`) says."""
    text = fields.inner("llm_config")
    llm = decoder_of(
        text, fields.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
    )
    fields.allow_only("ps_version", "v2")
    tower = fields.inner("vision_config")
    side = tower.get("image_size", int)
    if (forced := fields.get("force_image_size", int, side)) != side:
        raise UserError(
            f"{fields.where}: force_image_size={forced} differs from vision_config.image_size, so positions would have "
            "to be interpolated, which is not supported"
        )
    connector = _connector(fields, llm.width, "gelu")
    vision = vision_of(tower, fields.get("select_layer", int), True, connector)
    return ModelConfig(llm, {"vision": with_images(folder, vision)})


def layout_chat(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of OpenGVLab's layout."""
    parts = {"norm": norm(f"{OPEN}0"), "mlp.up": linear(f"{OPEN}1"), "mlp.down": linear(f"{OPEN}3")}
    return whole_layout(folder, model, TensorNames(parts), OPEN)


def _connector(fields: Fields, width: int, activation: str) -> ConnectorConfig:
    return ConnectorConfig(
        merge=part_of_one(fields, "downsample_ratio"),
        mlp_width=width,
        norm="merged_layer",
        norm_eps=PROJECTOR_EPS,
        activation=activation,
    )
