"""PaddleOCR-VL: a SigLIP for images of any size, an MLP on squares of its patches, an ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, ModelConfig
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, norm
from mmjax.hf.llava import find_projector, whole_layout
from mmjax.hf.processors import CLIP_MEAN, CLIP_STD
from mmjax.hf.qwen_vl import in_sections
from mmjax.hf.vision import vision_of, with_images

SECTIONS = (16, 24, 24)
EPS = 1e-5  # of the projector's norm, written in no config


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a PaddleOCR-VL's config says. Raises UserError for what is missing or not supported."""
    text = fields.inner("text_config")
    text.allow_only("layer_types")
    values = {**text.values, "model_type": "ernie4_5"}
    llm = decoder_of(replace(text, values=values), tables_are_tied(fields))
    llm = in_sections(replace(llm, rope_neighbours=False), text.where, SECTIONS, False)
    vision = fields.inner("vision_config")
    merge = vision.size("spatial_merge_size")
    connector = ConnectorConfig(
        merge=merge,
        mlp_width=merge**2 * vision.size("hidden_size"),
        norm_eps=EPS,
        activation="gelu",
    )
    tower = replace(vision_of(vision, -1, True, connector), mean=CLIP_MEAN, std=CLIP_STD)
    return ModelConfig(llm, {"vision": with_images(folder, tower)})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder)
    parts = {
        "norm": norm(f"{projector}pre_norm"),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, TensorNames(parts), projector)
