"""Idefics3 and SmolVLM: a SigLIP tower for tiles of any size, pixel shuffle, one matrix, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import AsIs, ConnectorConfig, FractionalGrid, ModelConfig, SplitTiles
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear
from mmjax.hf.llava import text_of, whole_layout
from mmjax.hf.vision import vision_of, with_images

FAMILIES = ("idefics3", "smolvlm")
CONNECTORS = ("model.connector.", "connector.")
PROJECTION = "modality_projection.proj"


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    llm = text_of(fields)
    connector = ConnectorConfig(
        merge=fields.size("scale_factor"), mlp_width=0, norm="none", biases=()
    )
    vision = with_images(folder, vision_of(fields.inner("vision_config"), -1, True, connector))
    # there is no processor: its defaults, for the tower's tiles
    if isinstance(vision.images, AsIs):
        assert isinstance(vision.positions, FractionalGrid)
        tile = vision.positions.side * vision.patch
        vision = replace(vision, images=SplitTiles(tile=tile, resize=(4 * tile,)))
    if isinstance(vision.images, SplitTiles):
        # As the families' processors write them, by these very names.
        label = "<row_{row}_col_{column}>"
        texts = {"marker": "<fake_token_around_image>", "label": label, "whole": "<global-img>"}
        vision = replace(vision, images=replace(vision.images, **texts))
    return ModelConfig(llm, {"vision": vision})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    first = next(
        (p for p in CONNECTORS if f"{p}{PROJECTION}.weight" in folder.tensors), CONNECTORS[-1]
    )
    parts = TensorNames({"linear": linear(f"{first}{PROJECTION}")})
    return whole_layout(folder, model, parts, first)
