"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: a tower, a patch merger of its own, a GLM-4 decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    ConnectorConfig,
    DecoderConfig,
    Glm4Video,
    ModelConfig,
    RotaryGrid,
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

FAMILIES = ("glm4v", "glm46v", "glmga", "glm4v_moe", "glm_ocr")
STILL = ("glm46v", "glmga")  # whose frames are taken at rates of their own
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
    tower = (_ocr_tower if fields.get("model_type", str) == "glm_ocr" else _tower)(vision)
    tower = with_images(folder, tower)
    if fields.get("model_type", str) not in STILL:
        tower = replace(tower, videos=read_videos(folder.path, tower, Glm4Video()))
    return ModelConfig(llm, {"vision": tower})


def _tower(vision: Fields) -> VisionConfig:
    """Read a tower with learned positions, interpolated bicubically."""
    plain = _plain_tower(vision)
    positions = StretchedGrid(
        vision.get("image_size", int) // plain.patch, plain.positions.theta, filter="bicubic"
    )
    return replace(
        plain,
        # the MLPs of the layers have it, that of the merger has intermediate_size
        mlp_width=plain.connector.merger_width,
        positions=positions,
        embed_norm=True,
        embed_norm_first=True,
        biases=QKV if vision.get("attention_bias", bool) else (),
        connector=replace(plain.connector, mlp_width=vision.size("intermediate_size")),
    )


def _ocr_tower(vision: Fields) -> VisionConfig:
    """Read a tower whose positions are RoPE's alone, and whose queries and keys are normed."""
    plain = _plain_tower(vision)
    biased = vision.get("attention_bias", bool)
    return replace(
        plain,
        biases=(*QKV, "output", "gate", "up", "down") if biased else (),
        qk_norm="head",
        qk_norm_eps=plain.norm_eps,
        connector=replace(plain.connector, mlp_width=plain.connector.merger_width * plain.channels),
    )


def _plain_tower(vision: Fields) -> VisionConfig:
    """Read what the towers have in common."""
    activation = vision.choice("hidden_act", ACTIVATIONS)
    width, heads = vision.size("hidden_size"), vision.size("num_heads")
    connector = ConnectorConfig(
        merge=vision.size("spatial_merge_size"),
        norm="none",
        activation=activation,
        biases=(),
        merger_width=vision.size("out_hidden_size"),
        merger_bias=True,
        projection=True,
        gated=True,
    )
    return VisionConfig(
        attention="auto",
        layers=vision.size("depth"),
        width=width,
        heads=heads,
        mlp_width=vision.size("intermediate_size"),
        patch=vision.size("patch_size"),
        channels=vision.size("in_channels"),
        frames=vision.size("temporal_patch_size"),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=RotaryGrid(axial_theta(vision, width // heads)),
        norm="rms",
        norm_eps=vision.get("rms_norm_eps", float),
        activation=activation,
        gated=True,
        connector=connector,
    )


def _llm(fields: Fields) -> DecoderConfig:
    text = fields.inner("text_config")
    match fields.get("model_type", str):
        case "glm4v_moe":
            own = {"model_type": "glm4_moe", "use_qk_norm": False}
        case "glm_ocr":
            own = {"model_type": "glm4", "attention_bias": False}
        case _:
            # A GLM-4 whose heads are of the width's share, and whose queries, keys and values have
            # biases. Attention ignores another width of heads, and RoPE does not.
            share = text.size("hidden_size") // text.size("num_attention_heads")
            text.allow_only("head_dim", share)
            own = {"model_type": "glm4", "attention_bias": True, "head_dim": share}
    # RoPE turns all channels unless a config says else
    values = {"partial_rotary_factor": 1.0, **text.values, **own}
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
            "layers.*.attention.query_norm": norm(f"{layer}.attn.q_norm"),
            "layers.*.attention.key_norm": norm(f"{layer}.attn.k_norm"),
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
