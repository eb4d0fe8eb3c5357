"""Llama 4 with images: a tower with a class token and 2D RoPE, squares of patches through three matrices, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import AsIs, CanvasTiles, ConnectorConfig, LearnedGrid, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear, linears
from mmjax.hf.llava import find_projector, whole_layout
from mmjax.hf.vision import part_of_one, vision_of, with_images

TOWER = "vision_model."
ADAPTER = f"{TOWER}vision_adapter."
# of the tower without the adapter
INSIDE = ("model.", "patch_embedding.", "class_embedding", "positional_embedding_vlm", "layernorm_")


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a Llama 4's config says. Raises UserError for what is missing or not supported."""
    tower = fields.inner("vision_config")
    merge = part_of_one(tower, "pixel_shuffle_ratio")
    # The adapter's MLP reads squares of patches, and its matrices are as wide as each other.
    tower.allow_only("intermediate_size", merge**2 * tower.size("hidden_size"))
    width = tower.size("projector_output_dim")
    for name in ("projector_input_dim", "vision_output_dim"):
        tower.allow_only(name, width)
    connector = ConnectorConfig(
        merge=merge,
        mlp_width=width,
        norm="none",
        activation="gelu",
        biases=(),
        output_width=width,
        output_activation=True,
    )
    vision = with_images(folder, vision_of(tower, -1, True, connector))
    grid = vision.positions
    assert isinstance(grid, LearnedGrid)
    if grid.rows % merge:
        raise UserError(
            f"{tower.where}: image_size={grid.rows * vision.patch} has {grid.rows} patches a side, which are no whole "
            f"squares of {merge} x {merge}"
        )
    # there is no processor: its defaults, for the tower's tiles
    if isinstance(vision.images, AsIs):
        how = CanvasTiles(tile=grid.rows * vision.patch).with_tokens()
        vision = replace(vision, images=how)
    # The text has the word on its tables.
    return ModelConfig(decoder_of(fields.inner("text_config")), {"vision": vision})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder)
    parts = {
        **linears("mlp", f"{ADAPTER}mlp", up="fc1", down="fc2"),
        "output": linear(f"{projector}linear_1"),
    }
    whole = whole_layout(folder, model, TensorNames(parts), projector, ADAPTER)
    inside = tuple(f"{TOWER}{name}" for name in INSIDE)
    return replace(whole, prefixes={**whole.prefixes, "vision": inside})
