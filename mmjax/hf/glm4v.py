"""GLM-4.1V and GLM-4.6V-Flash: a tower with bicubic positions, a patch merger of its own, a GLM-4 decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, DecoderConfig, ModelConfig, StretchedGrid, VisionConfig
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_parts, find_decoder, unused_in_decoder
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, convolution, fused_parts, linear, norm, table
from mmjax.hf.names import ACTIVATIONS, QKV
from mmjax.hf.processors import CLIP_MEAN, CLIP_STD, read_glm4_videos
from mmjax.hf.qwen_vl import VISION_FIRST, axial_theta, in_sections
from mmjax.hf.vision import PATCHES, with_images

FAMILIES = ("glm4v", "glm46v")
TEXT = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}  # beside GLM-4's
SECTIONS = (8, 12, 12)
VISION = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13_696,
}


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    vision = Fields(fields.get("vision_config", dict, {}), f"{fields.where}: vision_config").over(VISION)
    llm = _llm(fields)
    outputs = vision.get("out_hidden_size", int)
    if outputs != llm.width:
        raise UserError(f"{vision.where}: out_hidden_size={outputs}, but the text's hidden_size is {llm.width}")
    activation = vision.choice("hidden_act", ACTIVATIONS)
    connector = ConnectorConfig(
        merge=vision.get("spatial_merge_size", int),
        mlp_width=vision.get("intermediate_size", int),
        norm="none",
        activation=activation,
        biases=(),
        merger_width=outputs,
        merger_bias=True,
        projection=True,
        gated=True,
    )
    patch = vision.get("patch_size", int)
    tower = VisionConfig(
        attention="auto",
        layers=vision.get("depth", int),
        width=vision.get("hidden_size", int),
        heads=vision.get("num_heads", int),
        mlp_width=outputs,  # the MLPs of the layers have it, that of the merger has intermediate_size
        patch=patch,
        channels=vision.get("in_channels", int),
        frames=vision.get("temporal_patch_size", int),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=StretchedGrid(vision.get("image_size", int) // patch, axial_theta(vision), filter="bicubic"),
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
        tower = replace(tower, videos=read_glm4_videos(folder.path, tower))
    return ModelConfig(llm, {"vision": tower})


def _llm(fields: Fields) -> DecoderConfig:
    text = Fields(fields.get("text_config", dict, {}), f"{fields.where}: text_config")
    heads, width = text.get("num_attention_heads", int, 32), text.get("hidden_size", int, 4096)
    text.refuse("head_dim", width // heads)  # attention ignores it, and RoPE does not
    # A GLM-4 whose heads are of the width's share, and whose queries, keys and values have biases.
    values = {**text.values, "model_type": "glm4", "head_dim": width // heads, "attention_bias": True}
    text = Fields(values, text.where)
    tied = fields.get("tie_word_embeddings", bool, False) or text.get("tie_word_embeddings", bool, False)
    return in_sections(decoder_of(text.over(TEXT), tied), text.where, SECTIONS, False)


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    inner, output = find_decoder(folder)
    first = next((p for p in VISION_FIRST if f"{p}patch_embed.proj.weight" in folder.tensors), None)
    if first is None:
        raise UserError(f"{folder.path} has no vision tower: no tensor is called [...]visual.patch_embed.proj.weight")
    begins = f"{first}downsample.", f"{first}merger."
    tower = tuple(key for key in folder.tensors if key.startswith(first) and not key.startswith(begins))
    unused = (*unused_in_decoder(folder), *((f"{output}.weight",) if model.llm.tied else ()))
    return Layout(
        {
            "llm": decoder_parts(model.llm, folder),
            "vision": _vision_parts(first, model.encoders["vision"]),
            "vision.connector": _connector_parts(first),
        },
        {"llm": (inner, output), "vision": tower, "vision.connector": begins},
        unused,
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
            **{f"layers.*.attention.{name}": third for name, third in thirds.items()},
            "layers.*.attention.output": linear(f"{layer}.attn.proj"),
            "layers.*.mlp_norm": norm(f"{layer}.norm2"),
            **{f"layers.*.mlp.{name}": linear(f"{layer}.mlp.{name}_proj") for name in ("gate", "up", "down")},
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
            **{f"mlp.{name}": linear(f"{merger}.{name}_proj") for name in ("gate", "up", "down")},
        }
    )
