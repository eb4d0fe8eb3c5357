"""GLM-4.1V and GLM-4.6V-Flash: a tower with bicubic positions, a patch merger of its own, a GLM-4 decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    ConnectorConfig,
    DecoderConfig,
    Glm4Video,
    ModelConfig,
    StretchedGrid,
    VisionConfig,
)
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import (
    Layout,
    TensorNames,
    below,
    convolution,
    fused_parts,
    linear,
    linears,
    norm,
    table,
)
from mmjax.hf.names import ACTIVATIONS, ATTENTION, GATED_MLP, QKV
from mmjax.hf.processors import CLIP_MEAN, CLIP_STD, read_videos
from mmjax.hf.qwen_vl import find_visual, in_sections
from mmjax.hf.vision import axial_theta, with_images
from mmjax.hf.vision_tensors import PATCHES

FAMILIES = ("glm4v", "glm46v")
SECTIONS = (8, 12, 12)


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    vision = fields.inner("vision_config")
    llm = _llm(fields)
    outputs = vision.size("out_hidden_size")
    if outputs != llm.width:
        raise UserError(
            f"{vision.where}: out_hidden_size={outputs}, but the text's hidden_size is {llm.width}"
        )
    activation = vision.choice("hidden_act", ACTIVATIONS)
    connector = ConnectorConfig(
        merge=vision.size("spatial_merge_size"),
        mlp_width=vision.size("intermediate_size"),
        norm="none",
        activation=activation,
        biases=(),
        merger_width=outputs,
        merger_bias=True,
        projection=True,
        gated=True,
    )
    patch = vision.size("patch_size")
    width, heads = vision.size("hidden_size"), vision.size("num_heads")
    tower = VisionConfig(
        attention="auto",
        layers=vision.size("depth"),
        width=width,
        heads=heads,
        # the MLPs of the layers have it, that of the merger has intermediate_size
        mlp_width=outputs,
        patch=patch,
        channels=vision.size("in_channels"),
        frames=vision.size("temporal_patch_size"),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=StretchedGrid(
            vision.get("image_size", int) // patch,
            axial_theta(vision, width // heads),
            filter="bicubic",
        ),
        embed_norm=True,
        embed_norm_first=True,
        norm="rms",
        norm_eps=vision.get("rms_norm_eps", float),
        activation=activation,
        gated=True,
        biases=QKV if vision.get("attention_bias", bool) else (),
        connector=connector,
    )
    tower = with_images(folder, tower)
    if fields.get("model_type", str) == "glm4v":  # GLM-4.6V takes frames at rates of its own
        tower = replace(tower, videos=read_videos(folder.path, tower, Glm4Video()))
    return ModelConfig(llm, {"vision": tower})


def _llm(fields: Fields) -> DecoderConfig:
    text = fields.inner("text_config")
    heads, width = text.size("num_attention_heads"), text.size("hidden_size")
    text.allow_only("head_dim", width // heads)  # attention ignores it, and RoPE does not
    # A GLM-4 whose heads are of the width's share, and whose queries, keys and values have biases.
    fixed = {"model_type": "glm4", "head_dim": width // heads, "attention_bias": True}
    # RoPE turns all channels unless a config says else
    values = {"partial_rotary_factor": 1.0, **text.values, **fixed}
    llm = decoder_of(replace(text, values=values), tables_are_tied(fields))
    return in_sections(llm, text.where, SECTIONS, False)


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    decoder = decoder_layout(folder, model)
    first = find_visual(folder)
    begins = f"{first}downsample.", f"{first}merger."
    tower = tuple(
        key for key in folder.tensors if key.startswith(first) and not key.startswith(begins)
    )
    return Layout(
        {
            **decoder.modules,
            "vision": _vision_parts(first, model.encoders["vision"]),
            "vision.connector": _connector_parts(first),
        },
        {**decoder.prefixes, "vision": tower, "vision.connector": begins},
        decoder.unused,
    )


def _vision_parts(first: str, config: VisionConfig) -> TensorNames:
    layer = f"{first}blocks.*"
    thirds = fused_parts(linear(f"{layer}.attn.qkv"), **dict.fromkeys(QKV, config.width))
    return TensorNames(
        {
            # Stored [width, channel, frame, row, column]; ours: frame, row, column, channel.
            "embed.patches": convolution(f"{first}patch_embed.proj", (2, 3, 4, 1, 0)),
            "embed.positions": table(f"{first}embeddings.position_embedding"),
            "embed.norm": norm(f"{first}post_conv_layernorm"),
            "layers.*.attention_norm": norm(f"{layer}.norm1"),
            **below(ATTENTION, thirds),
            "layers.*.attention.output": linear(f"{layer}.attn.proj"),
            "layers.*.mlp_norm": norm(f"{layer}.norm2"),
            **linears("layers.*.mlp", f"{layer}.mlp", **GATED_MLP),
            "head": norm(f"{first}post_layernorm"),
        }
    )


def _connector_parts(first: str) -> TensorNames:
    merger = f"{first}merger"
    return TensorNames(
        {
            "merger": convolution(f"{first}downsample", PATCHES),
            "projection": linear(f"{merger}.proj"),
            "projection_norm": norm(f"{merger}.post_projection_norm"),
            **linears("mlp", merger, **GATED_MLP),
        }
    )
