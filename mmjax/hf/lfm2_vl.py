"""LFM2-VL: a SigLIP 2 for images of any size, an MLP on squares of its patches, an LFM2."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import AsIs, ConnectorConfig, ModelConfig, ResizeOrTiles
from mmjax.hf.decoders import tables_are_tied
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, norm
from mmjax.hf.llava import find_projector, text_of, whole_layout
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.vision import vision_of, with_images

EPS = 1e-5  # of the projector's norm, written in no config


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that an LFM2-VL's config says. Raises UserError for what is missing or not supported."""
    # The class around the text has the word on its tables.
    tied = fields.get("tie_embedding", bool, tables_are_tied(fields))
    llm = replace(text_of(fields), tied=tied)
    connector = ConnectorConfig(
        merge=fields.size("downsample_factor"),
        mlp_width=fields.size("projector_hidden_size"),
        norm="merged_layer" if fields.get("projector_use_layernorm", bool) else "none",
        norm_eps=EPS,
        activation=fields.choice("projector_hidden_act", ACTIVATIONS),
        biases=("up", "down") if fields.get("projector_bias", bool) else (),
    )
    tower = fields.inner("vision_config")
    tower.allow_only("model_type", "siglip2_vision_model")
    vision = with_images(folder, vision_of(tower, -1, True, connector))
    # there is no processor: its defaults, for the tower's tokens
    how = vision.images
    if isinstance(how, AsIs):
        unit = vision.patch * connector.merge
        how = ResizeOrTiles(vision.patch, connector.merge, tile=16 * unit).with_tokens()
    if isinstance(how, ResizeOrTiles) and how.begin:
        how = replace(
            how,
            begin=folder.special_token("image_start_token", how.begin),
            whole=folder.special_token("image_thumbnail_token", how.whole),
            end=folder.special_token("image_end_token", how.end),
        )
    return ModelConfig(llm, {"vision": replace(vision, images=how)})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder)
    parts = {
        "norm": norm(f"{projector}layer_norm"),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    return whole_layout(folder, model, TensorNames(parts), projector)
