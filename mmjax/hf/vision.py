"""Vision towers: CLIP, EVA-CLIP, SigLIP, SigLIP 2, Janus, Pixtral, DINOv2, InternViT in both its layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmjax.config import (
    AlternatingGrid,
    AxisTables,
    Biased,
    ConnectorConfig,
    FractionalGrid,
    LearnedGrid,
    ModelConfig,
    PixtralResize,
    RotaryGrid,
    StretchedGrid,
    VisionConfig,
)
from mmjax.errors import UserError
from mmjax.hf.class_defaults import processor_defaults
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames
from mmjax.hf.names import ACTIVATIONS, QKV
from mmjax.hf.processors import CLIP_MEAN, CLIP_STD, has_processor, read_image_processing
from mmjax.hf.vision_tensors import (
    MASK_TOKEN,
    POOLING_HEAD,
    clip_parts,
    dinov2_parts,
    gemma4_parts,
    intern_parts,
    llama4_parts,
    minicpm_parts,
    open_intern_parts,
    pixtral_parts,
    siglip2_parts,
)

ALL_BIASES: tuple[Biased, ...] = (*QKV, "output", "up", "down")
TOWERS = (
    "model.vision_tower.",
    "vision_tower.",
    "model.image_tower.",
    "image_tower.",
    "model.vision_encoder.",
    "model.vision_model.",
    "model.visual.",
    "visual.",
    "",
)


@dataclass(frozen=True)
class Tower:
    """A kind of vision tower."""

    read: Callable[[Fields], VisionConfig]  # all its layers
    marker: str  # a tensor that it has, below its prefix
    parts: Callable[[VisionConfig, str], TensorNames]  # below a prefix
    # tensors of a pooling head, which the LLM's features do not need, below the prefix
    unused: tuple[str, ...] = ()


def vision_of(
    fields: Fields,
    feature_layer: int | list[int],
    final_norm: bool,
    connector: ConnectorConfig,
) -> VisionConfig:
    """The tower that a vision config says, up to the last layer whose output a connector reads.

    feature_layer: as transformers counts: 0 the embedding, -1 the last layer; several are read side
    by side. final_norm: whether the norm after the last layer counts as part of it. Raises
    UserError for an unknown kind, or a layer that there is not.
    """
    kind = kind_of(fields)
    tower = TOWERS_BY_KIND[kind].read(fields)
    read = []
    for layer in [feature_layer] if isinstance(feature_layer, int) else feature_layer:
        # Of 24 layers, -2 is the output of the first 24 + 1 - 2 = 23.
        layers = layer if layer >= 0 else tower.layers + 1 + layer
        if not 1 <= layers <= tower.layers:
            raise UserError(
                f"{fields.where}: feature layer {layer} is none of {tower.layers} layers"
            )
        read.append(layers)
    if not read:
        raise UserError(f"{fields.where}: no feature layer is named; name one at least")
    return replace(
        tower,
        layers=max(read),
        head_norm=tower.head_norm and final_norm,
        connector=connector,
        feature_layers=tuple(layers - 1 for layers in read) if read[1:] else (),
    )


def kind_of(fields: Fields) -> str:
    """The kind of a vision config."""
    kind = fields.get("model_type", str)
    if kind not in TOWERS_BY_KIND:
        raise UserError(f"{fields.where}: model_type={kind!r} is no vision tower that can be read; known: "
                        f"{', '.join(TOWERS_BY_KIND)}")  # fmt: skip
    return kind


def part_of_one(fields: Fields, name: str) -> int:
    """Read the n of a ratio 1/n of pixel shuffle: neighbours per axis that become one token."""
    ratio = fields.get(name, float)
    merge = round(1 / ratio) if ratio > 0 else 0
    if merge < 1 or abs(merge * ratio - 1) > 1e-6:
        raise UserError(
            f"{fields.where}: {name}={ratio} is no part 1/n of one, which is not supported"
        )
    return merge


def find_tower(folder: HfFolder, kind: str) -> str:
    """The prefix of a vision tower in a checkpoint. Raises UserError where there is none."""
    marker = TOWERS_BY_KIND[kind].marker
    for prefix in TOWERS:
        for inner in (prefix, f"{prefix}vision_model."):
            if f"{inner}{marker}" in folder.tensors:
                return inner
    raise UserError(f"{folder.path} has no {kind}: no tensor is called [...]{marker}")


def vision_parts(config: VisionConfig, kind: str, prefix: str) -> TensorNames:
    """Locate a tower's parameters below a prefix."""
    return TOWERS_BY_KIND[kind].parts(config, prefix)


def unused_in(config: VisionConfig, fields: Fields, prefix: str) -> tuple[str, ...]:
    """List the tower's tensors that nothing here reads: what comes after the layer whose output is read.

    fields: of the vision config, which says how many layers the whole tower has.
    """
    tower = TOWERS_BY_KIND[kind_of(fields)]
    full_tower = tower.read(fields)
    parts = tower.parts(config, prefix).by_module
    per_layer = [
        part.key for leaves in parts.values() for part in leaves.values() if "*" in part.key
    ]
    # Layers behind the one whose output the LLM reads are in the checkpoint and in no model.
    later = [
        key.replace("*", str(i))
        for i in range(config.layers, full_tower.layers)
        for key in per_layer
    ]
    final_norm = [] if config.head_norm else [part.key for part in parts.get("head", {}).values()]
    return (*later, *final_norm, *(f"{prefix}{name}" for name in tower.unused))


# -------------------------------------------------------------------------------------------------
# CLIP and SigLIP


def _clip(fields: Fields) -> VisionConfig:
    return _two_norms(fields, class_token=True)


def _evaclip(fields: Fields) -> VisionConfig:
    for name in ("rope", "naiveswiglu", "subln", "global_average_pool"):  # of EVA-02's own layout
        fields.allow_only(name, False)
    biased = [name for name in QKV if fields.get(f"{name[0]}_bias", bool)]
    return replace(
        _two_norms(fields, class_token=True),
        embed_bias=True,
        embed_norm=False,
        norm="rms" if fields.get("use_rms_norm", bool) else "layer",
        norm_place="after" if fields.get("post_layernorm", bool) else "before",
        biases=(*biased, "output", "up", "down"),
    )


def _siglip(fields: Fields) -> VisionConfig:
    return _two_norms(fields, class_token=False)


def _janus(fields: Fields) -> VisionConfig:
    fields.allow_only("use_qk_norm", False)  # of heads that are as wide as the tower
    width = int(fields.size("hidden_size") * fields.get("mlp_ratio", (int, float)))
    plain = _siglip(replace(fields, values={**fields.values, "intermediate_size": width}))
    biased = fields.get("attention_bias", bool)
    return replace(plain, biases=ALL_BIASES if biased else ("output", "up", "down"))


def _paddleocr(fields: Fields) -> VisionConfig:
    plain = _siglip(fields)
    side = fields.size("image_size") // plain.patch
    theta = axial_theta(fields, plain.width // plain.heads)
    return replace(plain, positions=StretchedGrid(side, theta, filter="bilinear_edges"))


def _video_llama_3(fields: Fields) -> VisionConfig:
    plain = _siglip_of_any_size(fields)
    return replace(plain, positions=RotaryGrid(axial_theta(fields, plain.head_width)))


def _siglip2(fields: Fields) -> VisionConfig:
    count = fields.size("num_patches")
    side = math.isqrt(count)
    if side**2 != count:
        raise UserError(
            f"{fields.where}: num_patches={count} is no square, whose positions are not supported"
        )
    grid = LearnedGrid(side, side, interpolation="bilinear")
    return replace(_siglip_of_any_size(fields), positions=grid)


def _siglip_of_any_size(fields: Fields) -> VisionConfig:
    # Its class has no field for the size of images.
    size = {"image_size": fields.get("patch_size", (int, list))}
    return _siglip(replace(fields, values={**size, **fields.values}))


def _idefics3(fields: Fields) -> VisionConfig:
    plain = _siglip(fields)
    grid = plain.positions
    if not isinstance(grid, LearnedGrid) or grid.rows != grid.columns:
        raise UserError(f"{fields.where}: image_size must be one number")
    return replace(plain, positions=FractionalGrid(grid.rows))


def _two_norms(fields: Fields, class_token: bool) -> VisionConfig:
    patch, grid = _patches(fields)
    return _tower(
        fields,
        mlp_width=fields.size("intermediate_size"),
        patch=patch,
        positions=grid,
        class_token=class_token,
        embed_bias=not class_token,
        embed_norm=class_token,
        norm_eps=fields.get("layer_norm_eps", float),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        biases=ALL_BIASES,
    )


def _tower(fields: Fields, **settings: Any) -> VisionConfig:
    """Build the config of a tower from the fields that all have, and these settings."""
    return VisionConfig(
        attention="auto",
        layers=fields.size("num_hidden_layers"),
        width=fields.size("hidden_size"),
        heads=fields.size("num_attention_heads"),
        channels=fields.size("num_channels", 3),
        **settings,
    )


def _patches(fields: Fields) -> tuple[int, LearnedGrid]:
    """The side of a patch and the grid of an image, both square where one number is given."""
    size, side = fields.get("image_size", (int, list)), fields.get("patch_size", (int, list))
    if isinstance(size, list) and len(size) != 2:
        raise UserError(
            f"{fields.where}: image_size={size} must be one number, or height and width"
        )
    rows, columns = size if isinstance(size, list) else (size, size)
    sides = side if isinstance(side, list) else [side, side]
    if any(not isinstance(n, int) or n < 1 for n in (rows, columns, *sides)):
        raise UserError(
            f"{fields.where}: image_size={size} and patch_size={side} must be whole numbers from 1"
        )
    if len(set(sides)) != 1:
        raise UserError(f"{fields.where}: patch_size={sides} is not square, which is not supported")
    return sides[0], LearnedGrid(rows // sides[0], columns // sides[0])


# --------------------------------------------------------------------------------------------------
# Pixtral

PIXTRAL_EPS = 1e-5  # of all its norms, written in no config


def axial_theta(fields: Fields, head_width: int) -> float:
    """Read the base of a tower's 2D RoPE. Raises UserError where it would turn heads of another width."""
    fields.allow_only("head_dim", head_width)
    place = next(
        (name for name in ("rope_scaling", "rope_parameters") if fields.get(name, dict, {})),
        "rope_parameters",
    )
    rope = Fields(fields.get(place, dict, {}), f"{fields.where}: {place}")
    rope.allow_only("rope_type", "axial", "default")
    rope.allow_only("type", "axial", "default")
    return rope.get("rope_theta", float, fields.get("rope_theta", float))


def _pixtral(fields: Fields) -> VisionConfig:
    head_width = fields.size("hidden_size") // fields.size("num_attention_heads")
    return _tower(
        fields,
        mlp_width=fields.size("intermediate_size"),
        patch=fields.size("patch_size"),
        positions=AlternatingGrid(axial_theta(fields, head_width)),
        embed_bias=False,
        embed_norm=True,
        head_norm=False,
        norm="rms",
        norm_eps=PIXTRAL_EPS,
        activation=fields.choice("hidden_act", ACTIVATIONS),
        gated=True,
        biases=(),
    )


# --------------------------------------------------------------------------------------------------
# InternViT


def _intern(fields: Fields) -> VisionConfig:
    fields.allow_only("use_absolute_position_embeddings", True)
    fields.allow_only("use_mask_token", False)
    plain = _intern_vit(fields, fields.get("attention_bias", bool), fields.get("use_qk_norm", bool))
    # The norm after the last layer is a LayerNorm whatever `norm_type` says.
    final = not fields.get("use_mean_pooling", bool)
    return replace(
        plain, head_norm=final, head_norm_type="layer" if final and plain.norm == "rms" else "same"
    )


def _intern_vit(fields: Fields, biased: bool, normed: bool) -> VisionConfig:
    """Read the fields that both layouts share."""
    patch, grid = _patches(fields)
    return _tower(
        fields,
        mlp_width=fields.size("intermediate_size"),
        patch=patch,
        positions=grid,
        class_token=True,
        norm=fields.choice("norm_type", {"layer_norm": "layer", "rms_norm": "rms"}),
        norm_eps=fields.get("layer_norm_eps", float),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        biases=ALL_BIASES if biased else ("output", "up", "down"),
        qk_norm="width" if normed else "none",
        layer_scale=True,
        head_norm=False,
    )


def _open_intern(fields: Fields) -> VisionConfig:
    plain = _intern_vit(fields, fields.get("qkv_bias", bool), fields.get("qk_normalization", bool))
    return replace(plain, qk_norm_eps=plain.norm_eps)


# --------------------------------------------------------------------------------------------------
# DINOv2


def _dinov2(fields: Fields) -> VisionConfig:
    return _self_distilled(fields, "bicubic", 0)


def _dinov2_with_registers(fields: Fields) -> VisionConfig:
    return _self_distilled(fields, "antialiased", fields.get("num_register_tokens", int))


def _self_distilled(
    fields: Fields, interpolation: Literal["bicubic", "antialiased"], registers: int
) -> VisionConfig:
    patch, grid = _patches(fields)
    if grid.rows != grid.columns:
        raise UserError(f"{fields.where}: image_size={fields.get('image_size', (int, list))} is no square, whose "
                        "positions are not supported")  # fmt: skip
    gated = fields.get("use_swiglu_ffn", bool)
    mlp_width = int(fields.size("hidden_size") * fields.get("mlp_ratio", (int, float)))
    return _tower(
        fields,
        # Two thirds with a gate, rounded up to a multiple of 8.
        mlp_width=-(-int(mlp_width * 2 / 3) // 8) * 8 if gated else mlp_width,
        patch=patch,
        positions=replace(grid, interpolation=interpolation),
        class_token=True,
        registers=registers,
        norm_eps=fields.get("layer_norm_eps", float),
        activation="silu" if gated else fields.choice("hidden_act", ACTIVATIONS),
        gated=gated,
        biases=(
            *(QKV if fields.get("qkv_bias", bool) else ()),
            "output",
            *(("gate",) if gated else ()),
            "up",
            "down",
        ),
        layer_scale=True,
    )


# --------------------------------------------------------------------------------------------------
# Gemma 4


def _gemma4(fields: Fields) -> VisionConfig:
    head_width = fields.size("hidden_size") // fields.size("num_attention_heads")
    theta = axial_theta(fields, head_width)
    eps = fields.get("rms_norm_eps", float)
    return _tower(
        fields,
        kv_heads=fields.size("num_key_value_heads"),
        mlp_width=fields.size("intermediate_size"),
        patch=fields.size("patch_size"),
        positions=AxisTables(fields.size("position_embedding_size"), theta),
        embed_bias=False,
        head_norm=False,
        norm="rms",
        norm_eps=eps,
        norm_place="both",
        activation=fields.choice("hidden_activation", ACTIVATIONS),
        gated=True,
        biases=(),
        qk_norm="head",
        qk_norm_eps=eps,
        value_norm=True,
        attention_scale=1.0,
        clipped_linears=fields.get("use_clipped_linears", bool),
    )


# --------------------------------------------------------------------------------------------------
# Llama 4

LLAMA4_EPS = 1e-5  # of PyTorch's LayerNorm; the config's is not read


def _llama4(fields: Fields) -> VisionConfig:
    patch = fields.size("patch_size")
    side = fields.size("image_size") // patch
    head_width = fields.size("hidden_size") // fields.size("num_attention_heads")
    theta = axial_theta(fields, head_width)
    return _tower(
        fields,
        mlp_width=fields.size("intermediate_size"),
        patch=patch,
        positions=LearnedGrid(side, side, theta=theta, class_last=True),
        class_token=True,
        embed_bias=False,
        embed_norm=True,
        norm_eps=LLAMA4_EPS,
        activation="gelu",
        biases=ALL_BIASES,
    )


TOWERS_BY_KIND = {
    "clip_vision_model": Tower(_clip, "pre_layrnorm.weight", clip_parts),
    "evaclip_vision_model": Tower(_evaclip, "embeddings.class_embedding", clip_parts),
    "siglip_vision_model": Tower(
        _siglip, "embeddings.position_embedding.weight", clip_parts, POOLING_HEAD
    ),
    "siglip2_vision_model": Tower(
        _siglip2, "embeddings.position_embedding.weight", siglip2_parts, POOLING_HEAD
    ),
    "janus_vision_model": Tower(
        _janus,
        "embeddings.position_embedding.weight",
        partial(clip_parts, output="projection_layer"),
    ),
    "paddleocr_vl_vision": Tower(
        _paddleocr,
        "embeddings.position_embedding.weight",
        clip_parts,
        (*POOLING_HEAD, "embeddings.packing_position_embedding.weight"),
    ),
    "video_llama_3_vision": Tower(_video_llama_3, "embeddings.patch_embedding.weight", clip_parts),
    **dict.fromkeys(
        ("idefics3_vision", "smolvlm_vision"),
        Tower(_idefics3, "embeddings.position_embedding.weight", clip_parts),
    ),
    **dict.fromkeys(
        ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"),
        Tower(_idefics3, "embeddings.position_embedding.weight", minicpm_parts),
    ),
    "pixtral": Tower(_pixtral, "patch_conv.weight", pixtral_parts),
    "dinov2": Tower(_dinov2, "embeddings.cls_token", dinov2_parts, MASK_TOKEN),
    "dinov2_with_registers": Tower(
        _dinov2_with_registers, "embeddings.register_tokens", dinov2_parts, MASK_TOKEN
    ),
    "internvl_vision": Tower(_intern, "embeddings.cls_token", intern_parts),
    "llama4_vision_model": Tower(_llama4, "patch_embedding.linear.weight", llama4_parts),
    "gemma4_vision": Tower(_gemma4, "patch_embedder.input_proj.weight", gemma4_parts),
    "intern_vit_6b": Tower(_open_intern, "embeddings.class_embedding", open_intern_parts),
}


def with_images(folder: HfFolder, vision: VisionConfig) -> VisionConfig:
    """The tower with what the folder says of how its images are prepared; as it is where it says nothing.

    Raises UserError where the processor's images are not those that the tower has positions and
    patches for.
    """
    if not has_processor(folder.path) and folder.config["model_type"] != "internvl_chat":
        return vision
    how, mean, std, rescale, file = read_image_processing(folder.path)
    # Here pixels are divided by 255, there multiplied by `rescale`.
    # (x * rescale - mean) / std = (x / 255 - mean / (255 * rescale)) / (std / (255 * rescale)).
    mean, std = (tuple(x / (255 * rescale) for x in numbers) for numbers in (mean, std))
    where = f"{file} does not go with {folder.path / 'config.json'}"
    how = how.fitted(where, vision.patch, vision.token_side, vision.positions.kind)
    _check_item_size(where, how.item_size, vision)
    return replace(vision, images=how, mean=mean, std=std)


def with_pixtral_images(folder: HfFolder, vision: VisionConfig) -> VisionConfig:
    """The tower with its images as the folder says; as Pixtral's processor prepares them where it says nothing."""
    texts = processor_defaults("PixtralProcessor")
    how = PixtralResize(
        unit=vision.patch * vision.connector.merge,
        row_end=texts["image_break_token"],
        end=texts["image_end_token"],
    )
    return with_images(folder, replace(vision, images=how, mean=CLIP_MEAN, std=CLIP_STD))


def _check_item_size(where: str, size: tuple[int, ...], vision: VisionConfig) -> None:
    """Raise UserError unless images of one size have the patches of a tower's learned positions. size: (): they vary.

    where: begins the message.
    """
    grid = vision.positions
    if not size or not isinstance(grid, LearnedGrid) or grid.interpolation != "none":
        return
    height, width = size
    rows, columns = height // vision.patch, width // vision.patch
    if (rows, columns) != (grid.rows, grid.columns):
        raise UserError(
            f"{where}: it makes images of {height} x {width} pixels, {rows} x {columns} patches of {vision.patch}, the "
            f"tower has positions of {grid.rows} x {grid.columns} patches, which are not interpolated; make the "
            "processor's size and the tower's image_size the same"
        )


# --------------------------------------------------------------------------------------------------
# towers alone

# Kinds of folders, and the layer whose output is read: the last but one where LLaVA reads that.
ALONE = {
    "clip": -2,
    "clip_vision_model": -2,
    "evaclip": -2,
    "evaclip_vision_model": -2,
    "siglip": -2,
    "siglip_vision_model": -2,
    "pixtral": -1,
    "internvl_vision": -1,
    "dinov2": -1,
    "dinov2_with_registers": -1,
}


def encoder_of(folder: HfFolder, fields: Fields) -> VisionConfig:
    """The tower of a folder that is one, or of CLIP or SigLIP with their text towers."""
    inner = _tower_alone(fields)
    layer = ALONE[fields.get("model_type", str)]
    tower = with_images(folder, vision_of(inner, layer, layer == -1, ConnectorConfig()))
    return replace(tower, images=tower.images.without_tokens())


def encoder_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tower of a checkpoint; all else there, such as CLIP's text tower, is left alone."""
    fields = folder.fields
    tower = _tower_alone(fields)
    kind = kind_of(tower)
    prefix = find_tower(folder, kind)
    name, config = next(
        (name, e)
        for name, e in model.encoders.items()
        if e.weights and Path(e.weights) == folder.path
    )
    unread = tuple(key for key in folder.tensors if not key.startswith(prefix))
    parts = vision_parts(config, kind, prefix)
    return Layout({name: parts}, {name: (prefix,)}, unread + unused_in(config, tower, prefix))


def _tower_alone(fields: Fields) -> Fields:
    """Return the fields of a folder's tower, with its kind."""
    return (
        fields if fields.get("model_type", str) in TOWERS_BY_KIND else fields.inner("vision_config")
    )
