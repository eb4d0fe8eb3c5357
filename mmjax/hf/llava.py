"""LLaVA-1.5 to -OneVision, ViP-LLaVA, Pixtral, DeepSeek-VL, Janus, VideoLLaMA 3: a tower, an MLP, a decoder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mmjax.config import (
    AlternatingGrid,
    AnyRes,
    AsIs,
    ConnectorConfig,
    DecoderConfig,
    LearnedGrid,
    ModelConfig,
    SmartResize,
    UniformVideo,
    VisionConfig,
)
from mmjax.errors import UserError
from mmjax.hf.class_defaults import processor_defaults
from mmjax.hf.decoder_tensors import decoder_parts, find_decoder
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import Layout, TensorNames, TensorSlice, linear, linears, norm
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.processors import (
    CLIP_MEAN,
    CLIP_STD,
    has_processor,
    read_image_processing,
    read_videos,
)
from mmjax.hf.vision import (
    find_tower,
    kind_of,
    unused_in,
    vision_of,
    vision_parts,
    with_images,
    with_pixtral_images,
)

PROJECTORS = (
    "model.vision_projection.",
    "model.aligner.",
    "model.projector.",
    "mlp_AR.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
)
MAKES_IMAGES = ("model.vqmodel.", "model.generation_")  # of Janus
VIDEO_TOWERS = ("model.video_tower.", "video_tower.")  # of Video-LLaVA
NEWLINES = ("model.image_newline", "image_newline")


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, and how it takes images."""

    processor: str = ""  # of images in tiles, whose rows end with a newline
    max_tiles: str = ""  # the field that says from how many on they are interpolated


FAMILIES = {
    "llava": Family(),
    "vipllava": Family(),
    "video_llava": Family(),
    "llava_next": Family("LlavaNextImageProcessor"),
    "llava_next_video": Family("LlavaNextImageProcessor"),
    "llava_onevision": Family("LlavaOnevisionImageProcessor", max_tiles="vision_aspect_ratio"),
}


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    family = FAMILIES[fields.get("model_type", str)]
    fields.allow_only("spatial_pool_mode", "average", "max")  # of videos, which are not read
    llm = text_of(fields)
    layers = fields.get("vision_feature_layer", (int, list[int]))
    # ViP-LLaVA's projector begins with a norm, and its class has no fields for biases and features.
    eps = fields.get("projector_layernorm_eps", float, 0.0)
    biased = fields.get("multimodal_projector_bias", bool, True)
    connector = ConnectorConfig(
        merge=1,
        mlp_width=llm.width,
        norm="layer" if eps else "none",
        norm_eps=eps,
        activation=fields.choice("projector_hidden_act", ACTIVATIONS),
        biases=("up", "down") if biased else (),
        newline=bool(family.processor),
    )
    vision = vision_of(fields.inner("vision_config"), layers, False, connector)
    _check_features(fields, vision)
    if isinstance(vision.positions, AlternatingGrid) and not family.processor:
        return ModelConfig(llm, {"vision": with_pixtral_images(folder, vision)})
    vision = with_images(folder, vision)
    if family.processor:
        vision = _by_rows(fields, vision, family)
    if family.max_tiles:
        # 32 frames where the processor names no number, as the model was trained.
        default = UniformVideo(frames=32, size=vision.images.item_size, taken="first", shrink=2)
        vision = replace(vision, videos=read_videos(folder.path, vision, default))
    return ModelConfig(llm, {"vision": vision})


def _check_features(fields: Fields, vision: VisionConfig) -> None:
    """Raise UserError unless the LLM sees all patches of the tower, and no class token."""
    if vision.registers:
        raise UserError(f"{fields.where}: the LLM sees the {vision.registers} registers of its tower, which is not "
                        "supported")  # fmt: skip
    features = fields.get("vision_feature_select_strategy", str, "default")
    expected = "default" if vision.class_token else "full"
    if features != expected:
        what = (
            "shows the LLM the class token"
            if vision.class_token
            else "drops the first patch of an image"
        )
        raise UserError(
            f"{fields.where}: vision_feature_select_strategy={features!r} {what}, which is not supported; say "
            f"{expected!r}"
        )


def _by_rows(fields: Fields, vision: VisionConfig, family: Family) -> VisionConfig:
    """The tower with images in tiles that the LLM sees by rows. What the folder's processor says must be the same."""
    grid = vision.positions
    if not isinstance(grid, LearnedGrid):
        raise UserError(
            f"{fields.where}: images in tiles need a CLIP or SigLIP tower, which vision_config is not"
        )
    # Null says those of the class's image processor.
    points = fields.get(
        "image_grid_pinpoints",
        list[list[int]],
        processor_defaults(family.processor)["image_grid_pinpoints"],
    )
    pinpoints = tuple("x".join(map(str, point)) for point in points)
    how = vision.images
    if isinstance(how, AsIs):  # there is no processor: its defaults
        tile = fields.inner("vision_config").get("image_size", int)
        how = AnyRes(tile=tile, several="square" if family.max_tiles else "tiles")
        vision = replace(vision, mean=CLIP_MEAN, std=CLIP_STD)
    elif not isinstance(how, AnyRes):
        raise UserError(
            f"{fields.where}: its images come in tiles, but the folder's image processor makes none"
        )
    elif how.pinpoints != pinpoints:
        raise UserError(
            f"{fields.where}: image_grid_pinpoints differs from that of the folder's image processor"
        )
    max_tiles = 0
    if family.max_tiles:
        aspect_ratio = fields.get(family.max_tiles, str)
        if not (match := re.fullmatch(r"anyres_max_([1-9]\d*)", aspect_ratio)):
            raise UserError(
                f"{fields.where}: {family.max_tiles}={aspect_ratio!r} is not supported; known: 'anyres_max_9'"
            )
        max_tiles = int(match[1])
    return replace(
        vision, images=replace(how, pinpoints=pinpoints, order="rows", most_tiles=max_tiles)
    )


def read_deepseek(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a DeepSeek-VL of one tower says."""
    llm = text_of(fields)
    connector = ConnectorConfig(merge=1, mlp_width=llm.width, norm="none", activation="gelu")
    vision = vision_of(fields.inner("vision_config"), -1, True, connector)
    return ModelConfig(llm, {"vision": with_images(folder, vision)})


def deepseek_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder, "linear1")
    parts = {"mlp.up": linear(f"{projector}linear1"), "mlp.down": linear(f"{projector}linear2")}
    return whole_layout(folder, model, TensorNames(parts), projector)


def read_janus(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that reads images and texts of a Janus, whose config says one that makes images too."""
    tower = fields.inner("vision_config")
    llm = text_of(fields)
    if (outputs := tower.size("projection_dim")) != llm.width:
        raise UserError(
            f"{tower.where}: projection_dim={outputs}, but the text's hidden_size is {llm.width}"
        )
    tower.allow_only("depth", 1, 2)  # matrices
    is_mlp = tower.size("depth") == 2
    connector = ConnectorConfig(
        merge=1,
        mlp_width=llm.width if is_mlp else 0,
        norm="none",
        activation=tower.choice("hidden_act", ACTIVATIONS),
        biases=("up", "down") if is_mlp else ("down",),
    )
    vision = vision_of(tower, -1, True, connector)
    return ModelConfig(llm, {"vision": with_images(folder, vision)})


def janus_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of what reads images; those of what makes them are left alone."""
    projector = find_projector(folder, "fc1")
    first = linear(f"{projector}fc1")
    parts = {"mlp.up": first, "mlp.down": linear(f"{projector}hidden_layers.0")}
    if not model.encoders["vision"].connector.mlp_width:
        parts = {"linear": first}
    whole = whole_layout(folder, model, TensorNames(parts), projector)
    if any(key.startswith(MAKES_IMAGES) for key in folder.tensors):
        note(
            f"{folder.path}: tensors of making images are not read; an export copies them as they are"
        )
    return replace(whole, unused=(*whole.unused, *(f"{first}*" for first in MAKES_IMAGES)))


def read_video_llama(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that reads images and texts of a VideoLLaMA 3, whose image processor says how patches are merged."""
    llm = text_of(fields)
    merge = 1
    if has_processor(folder.path):
        how, *_, file = read_image_processing(folder.path)
        merge = how.merge if isinstance(how, SmartResize) else 1
        if merge > 2:  # a bilinear interpolation, which is the mean of so many alone
            raise UserError(f"{file}: merge_size={merge} is not supported; known: 1, 2")
    connector = ConnectorConfig(
        merge=merge, merging="mean", mlp_width=llm.width, norm="none", activation="gelu"
    )
    vision = vision_of(fields.inner("vision_config"), -1, True, connector)
    return ModelConfig(llm, {"vision": with_images(folder, vision)})


def video_llama_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = find_projector(folder, "readout.0")
    parts = linears("mlp", f"{projector}readout", up="0", down="2")
    return whole_layout(folder, model, TensorNames(parts), projector)


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    fields = folder.fields
    family = FAMILIES[fields.get("model_type", str)]
    projector = find_projector(folder)
    connector = {
        "norm": norm(f"{projector}projector_layernorm"),
        "mlp.up": linear(f"{projector}linear_1"),
        "mlp.down": linear(f"{projector}linear_2"),
    }
    begins = (projector,)
    if family.processor:
        newline = next((key for key in NEWLINES if key in folder.tensors), NEWLINES[-1])
        connector["newline"] = {"weight": TensorSlice(newline, (0,))}
        begins += (newline,)
    whole = whole_layout(folder, model, TensorNames(connector), *begins)
    if fields.get("model_type", str) != "video_llava":
        return whole
    note(f"{folder.path}: its tower of videos is not read; an export copies it as it is")
    return replace(whole, unused=(*whole.unused, *(f"{first}*" for first in VIDEO_TOWERS)))


def find_projector(folder: HfFolder, first: str = "linear_1") -> str:
    """Find what the tensors of a projector begin with; the last known where there are none. first: its first layer."""
    return next((p for p in PROJECTORS if f"{p}{first}.weight" in folder.tensors), PROJECTORS[-1])


def feature_layer(fields: Fields) -> int:
    """Read the number of the tower's layer whose output the LLM sees. Raises UserError for several."""
    layer = fields.get("vision_feature_layer", (int, list[int]))
    if isinstance(layer, list):
        raise UserError(
            f"{fields.where}: vision_feature_layer={layer} names several layers, which is not supported"
        )
    return layer


def text_of(fields: Fields) -> DecoderConfig:
    """The decoder of a config with a `text_config`."""
    # Logits have no cap and no scale, for the output table belongs to the class around it.
    llm = decoder_of(fields.inner("text_config"), tables_are_tied(fields))
    return replace(llm, logit_cap=0.0, logit_scale=1.0)


def whole_layout(
    folder: HfFolder, model: ModelConfig, connector: TensorNames, *projector: str
) -> Layout:
    """Build the layout of a checkpoint of one vision tower, a projector and a decoder.

    projector: what the tensors of the projector begin with.
    """
    fields = folder.fields.inner("vision_config")
    inner, output = find_decoder(folder)
    kind = kind_of(fields)
    vision = model.encoders["vision"]
    tower = find_tower(folder, kind)
    tables = (f"{output}.weight",) if model.llm.tied else ()
    return Layout(
        {
            "llm": decoder_parts(model.llm, folder),
            "vision": vision_parts(vision, kind, tower),
            "vision.connector": connector,
        },
        {"llm": (inner, output), "vision": (tower,), "vision.connector": projector},
        tables + unused_in(vision, fields, tower),
    )
