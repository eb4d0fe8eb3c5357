"""Gemma 3: a SigLIP tower, the mean of each square of patches, one matrix, a decoder with windows."""

from __future__ import annotations

import math
from dataclasses import replace

from mmjax.config import ConnectorConfig, LearnedGrid, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, TensorSlice, norm
from mmjax.hf.llava import PROJECTORS, text_of, whole_layout
from mmjax.hf.vision import vision_of, with_images

FAMILIES = ("gemma3", "shieldgemma2")  # the second answers whether an image breaks a policy
WEIGHT = "mm_input_projection_weight"


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of an image-and-text Gemma 3 says.

    Raises UserError where an image has more tokens than a window, which would cut its bidirectional
    attention.
    """
    llm = text_of(fields)
    tower = vision_of(fields.inner("vision_config"), -1, True, ConnectorConfig())
    tokens = fields.size("mm_tokens_per_image")
    if llm.windowed and tokens > llm.window:
        raise UserError(f"{fields.where}: mm_tokens_per_image={tokens} is more than text_config.sliding_window="
                        f"{llm.window}, so windows would cut images, which is not supported")  # fmt: skip
    grid = tower.positions
    assert isinstance(grid, LearnedGrid)
    side = math.isqrt(tokens)
    if side**2 != tokens or grid.rows != grid.columns or grid.rows % side:
        raise UserError(f"{fields.where}: mm_tokens_per_image={tokens}: {grid.rows} x {grid.columns} patches are no "
                        "whole number of squares for as many tokens, which is not supported")  # fmt: skip
    connector = ConnectorConfig(
        merge=grid.rows // side,
        merging="mean",
        mlp_width=0,
        norm="merged_rms",
        norm_offset=1.0,
        biases=(),
    )
    vision = with_images(folder, replace(tower, connector=connector))
    return ModelConfig(replace(llm, items="bidirectional"), {"vision": vision})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = next((p for p in PROJECTORS if f"{p}{WEIGHT}" in folder.tensors), PROJECTORS[-1])
    parts = {
        "norm": norm(f"{projector}mm_soft_emb_norm"),
        "linear": {"weight": TensorSlice(f"{projector}{WEIGHT}")},
    }
    return whole_layout(folder, model, TensorNames(parts), projector)
