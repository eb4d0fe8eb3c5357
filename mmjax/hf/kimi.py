"""Kimi K2.5: a MoonViT for images of any size, an MLP on squares of its patches, a DeepSeek-V3."""

from __future__ import annotations

from mmjax.config import ConnectorConfig, ModelConfig, StretchedGrid, VisionConfig
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import (
    Layout,
    TensorNames,
    array,
    below,
    convolution,
    fused_parts,
    linear,
    norm,
)
from mmjax.hf.llava import text_of
from mmjax.hf.names import ACTIVATIONS, ATTENTION, QKV
from mmjax.hf.vision import ALL_BIASES, axial_theta, with_images
from mmjax.hf.vision_tensors import PATCHES

EPS = 1e-5  # of the tower's norms, written in no config
TOWER = "vision_tower."
# as published, and as transformers writes them
PATCH_EMBEDS = (f"{TOWER}patch_embed.proj", f"{TOWER}encoder.patch_embed.proj")
PROJECTORS = ("mm_projector.", "model.mm_projector.")


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a Kimi K2.5's config says. Raises UserError for what is missing or not supported."""
    tower = _tower(fields)
    return ModelConfig(text_of(fields), {"vision": with_images(folder, tower)})


def _tower(fields: Fields) -> VisionConfig:
    vision = fields.inner("vision_config")
    width, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
    side = vision.size("pos_emb_height")
    vision.allow_only("pos_emb_width", side)
    merged = vision.get("merge_kernel_size", list[int])
    if len(merged) != 2 or merged[0] != merged[1] or merged[0] < 1:
        raise UserError(
            f"{vision.where}: merge_kernel_size={merged} must be two equal numbers of patches"
        )
    fields.allow_only("projection_hidden_size", width)
    connector = ConnectorConfig(
        merge=merged[0],
        mlp_width=merged[0] ** 2 * width,
        norm_eps=fields.get("projection_layer_norm_eps", float),
        activation="gelu",
    )
    return VisionConfig(
        attention="auto",
        layers=vision.size("num_hidden_layers"),
        width=width,
        heads=heads,
        mlp_width=vision.size("intermediate_size"),
        patch=vision.size("patch_size"),
        positions=StretchedGrid(
            side, axial_theta(vision, width // heads), filter="bicubic", neighbours=True
        ),
        norm_eps=EPS,
        activation=vision.choice("hidden_act", ACTIVATIONS),
        biases=ALL_BIASES,
        connector=connector,
    )


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    decoder = decoder_layout(folder, model)
    layer = f"{TOWER}encoder.blocks.*."
    patches = next(key for key in PATCH_EMBEDS if f"{key}.weight" in folder.tensors)
    first = next(key for key in PROJECTORS if f"{key}pre_norm.weight" in folder.tensors)
    thirds = fused_parts(
        linear(f"{layer}wqkv"), **dict.fromkeys(QKV, model.encoders["vision"].width)
    )
    vision = {
        "embed.patches": convolution(patches, PATCHES),
        "embed.positions": array(f"{TOWER}patch_embed.pos_emb.weight", (0, 1, 2)),
        "layers.*.attention_norm": norm(f"{layer}norm0"),
        **below(ATTENTION, thirds),
        "layers.*.attention.output": linear(f"{layer}wo"),
        "layers.*.mlp_norm": norm(f"{layer}norm1"),
        "layers.*.mlp.up": linear(f"{layer}mlp.fc0"),
        "layers.*.mlp.down": linear(f"{layer}mlp.fc1"),
        "head": norm(f"{TOWER}encoder.final_layernorm"),
    }
    connector = {
        "norm": norm(f"{first}pre_norm"),
        "mlp.up": linear("mm_projector.proj.0"),
        "mlp.down": linear("mm_projector.proj.2"),
    }
    return Layout(
        {
            **decoder.modules,
            "vision": TensorNames(vision),
            "vision.connector": TensorNames(connector),
        },
        {**decoder.prefixes, "vision": (TOWER,), "vision.connector": PROJECTORS},
        decoder.unused,
    )
