"""Command A Vision and Aya Vision: a SigLIP tower for tiles, pixel shuffle, a gated MLP, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import AsIs, ConnectorConfig, DynamicTiles, LearnedGrid, ModelConfig
from mmjax.disk import read_json
from mmjax.errors import UserError
from mmjax.hf.class_defaults import processor_defaults
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, fused_parts, linear, norm
from mmjax.hf.llava import feature_layer, find_projector, text_of, whole_layout
from mmjax.hf.processors import CLIP_MEAN, CLIP_STD
from mmjax.hf.vision import vision_of, with_images

FAMILIES = ("aya_vision", "cohere2_vision")


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    llm = text_of(fields)
    tower = fields.inner("vision_config")
    tower.allow_only("model_type", "siglip_vision_model")
    is_aya = fields.get("model_type", str) == "aya_vision"
    if is_aya:
        fields.allow_only("vision_feature_select_strategy", "full")
        own = {"norm": "merged_layer", "norm_eps": fields.get("adapter_layer_norm_eps", float)}
        layer = feature_layer(fields)
    else:
        own = {"norm": "none"}
        layer = -1
    inner = fields.size("alignment_intermediate_size", llm.width)
    if inner % 2:
        raise UserError(
            f"{fields.where}: alignment_intermediate_size={inner} is odd, and half of it gates the other half"
        )
    connector = ConnectorConfig(
        merge=fields.size("downsample_factor"),
        mlp_width=inner // 2,
        activation="silu",
        biases=("gate", "up", "down"),
        gated=True,
        **own,
    )
    vision = vision_of(tower, layer, not is_aya, connector)
    grid = vision.positions
    assert isinstance(grid, LearnedGrid)
    if grid.rows != grid.columns or grid.rows % connector.merge:
        raise UserError(
            f"{fields.where}: downsample_factor={connector.merge}: {grid.rows} x {grid.columns} patches are no square "
            "of whole tokens, which is not supported"
        )
    vision = with_images(folder, vision)
    if isinstance(
        vision.images, AsIs
    ):  # there is no processor: its defaults, for the tower's tiles
        side = grid.rows * vision.patch
        tiles = DynamicTiles(tile=(side, side), grid_by="shape" if is_aya else "scale")
        vision = replace(vision, images=tiles, mean=CLIP_MEAN, std=CLIP_STD)
    if isinstance(vision.images, DynamicTiles):
        texts = (_aya_texts if is_aya else _cohere2_texts)(folder)
        vision = replace(vision, images=replace(vision.images, **texts))
    return ModelConfig(llm, {"vision": vision})


def _aya_texts(folder: HfFolder) -> dict[str, str]:
    """Read what Aya's processor writes around an image, before its tiles, and before the whole of it."""
    texts = {
        **processor_defaults("AyaVisionProcessor"),
        **read_json(folder.path / "processor_config.json", {}),
    }
    return {
        "begin": texts["start_of_img_token"],
        "label": texts["tile_token"] + "_{tile}",
        "whole": texts["tile_global_token"],
        "end": texts["end_of_img_token"],
    }


def _cohere2_texts(folder: HfFolder) -> dict[str, str]:
    """Read what Command A Vision's processor writes around an image and behind its tiles; the tokenizer names them."""
    return {
        "begin": folder.special_token("boi_token", "<|START_OF_IMG|>"),
        "tile_end": folder.special_token("img_line_break_token", "<|IMG_LINE_BREAK|>"),
        "end": folder.special_token("eoi_token", "<|END_OF_IMG|>"),
    }


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder)
    half = model.encoders["vision"].connector.mlp_width
    # The first half is gated by the second.
    fused = fused_parts(linear(f"{projector}linear_1"), up=half, gate=half)
    parts = {
        "norm": norm(f"{projector}layernorm"),
        "mlp.up": fused["up"],
        "mlp.gate": fused["gate"],
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, TensorNames(parts), projector)
