"""Qwen2-VL to Qwen3.5, EXAONE 4.5 and HyperCLOVA X: what their configs say, where their tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmjax.config import (
    ConnectorConfig,
    DecoderConfig,
    ModelConfig,
    Qwen2Video,
    Qwen3Video,
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
    LeafTensors,
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
from mmjax.hf.vision import axial_theta, with_images

NAME = "vision"  # of the encoder
EPS = 1e-6  # of all norms of the vision tower, written in no config
# What the tensors of a vision tower begin with, new and old; of Qwen2.5-Omni, whole, inside its
# thinker.
VISION_FIRST = (
    *("model.visual.", "visual.", "thinker.model.visual.", "thinker.visual."),
    "model.vision_model.",
    "",  # Cosmos 3
)
PROJECTORS = ("model.vision_projector", "model.projector")  # of HyperCLOVA X


@dataclass(frozen=True)
class Family:
    """A family of checkpoints."""

    decoder: str  # the text decoder that its LLM is
    sections: tuple[int, ...]  # (): tokens of images have positions as text has
    interleaved: bool
    # of the text's fields, those that the class takes otherwise than a config says
    fixed: Mapping[str, Any]
    tower: Callable[[Fields, VisionConfig], VisionConfig]
    mean: tuple[float, ...]  # of its image processor
    std: tuple[float, ...]
    videos: Qwen2Video | Qwen3Video  # where a folder has no video processor
    projector: bool = False  # a matrix makes the LLM's tokens of what the merger makes


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says: "llm" and the encoder "vision".

    Raises UserError for a field that is missing or not supported.
    """
    return read_family(folder, fields, FAMILIES[fields.get("model_type", str)])


def read_family(folder: HfFolder, fields: Fields, family: Family) -> ModelConfig:
    """The same of a config of this family."""
    vision = _renamed(fields.inner("vision_config"))
    llm = _llm(fields, family)
    outputs = vision.size("out_hidden_size")
    if not family.projector and outputs != llm.width:
        raise UserError(
            f"{vision.where}: out_hidden_size={outputs}, but the text's hidden_size is {llm.width}"
        )
    merge = vision.size("spatial_merge_size")
    width = vision.size("hidden_size")
    # The MLP of the patch merger has the width of what is merged.
    connector = ConnectorConfig(
        merge=merge,
        mlp_width=merge**2 * width,
        norm_eps=EPS,
        activation="gelu",
        output_width=outputs if family.projector else 0,
    )
    tower = VisionConfig(
        attention="auto",
        layers=vision.size("depth"),
        width=width,
        heads=vision.size("num_heads"),
        mlp_width=vision.size("intermediate_size"),
        patch=vision.size("patch_size"),
        channels=vision.size("in_channels"),
        frames=vision.size("temporal_patch_size"),
        mean=family.mean,
        std=family.std,
        head_norm=False,
        norm_eps=EPS,
        activation=vision.choice("hidden_act", ACTIVATIONS),
        biases=(*QKV, "output", "up", "down"),
        connector=connector,
    )
    prepared = with_images(folder, family.tower(vision, tower))
    videos = read_videos(folder.path, prepared, family.videos)
    if isinstance(videos, Qwen2Video):
        # Qwen2-VL's class has no such field: it counts temporal patches.
        videos = replace(videos, tokens_per_second=vision.get("tokens_per_second", float, 0.0))
    return ModelConfig(llm, {NAME: replace(prepared, videos=videos)})


def encoder_of(folder: HfFolder, fields: Fields) -> VisionConfig:
    """The vision tower alone, for another LLM: without a deepstack, whose mergers know the layers of their own."""
    tower = read(folder, fields).encoders[NAME]
    return replace(tower, deepstack=(), connector=ConnectorConfig(merge=tower.connector.merge))


def _renamed(vision: Fields) -> Fields:
    """Give the vision fields of Qwen2-VL, which calls the tower's width `embed_dim`, the names of its successors."""
    if vision.get("model_type", str) != "qwen2_vl_vision":
        return vision
    width = vision.size("embed_dim")
    names = {
        "hidden_size": width,
        "out_hidden_size": vision.size("hidden_size"),
        "intermediate_size": width * vision.get("mlp_ratio", int),
    }
    return Fields(vision.values | names, vision.where)


def _llm(fields: Fields, family: Family) -> DecoderConfig:
    text = fields.inner("text_config")
    if not family.sections:  # whose class takes a text of any kind
        text.allow_only("model_type", family.decoder)
    text = replace(text, values={**text.values, **family.fixed, "model_type": family.decoder})
    llm = decoder_of(text, tables_are_tied(fields))
    if not family.sections:
        return replace(llm, rope_sections=(), rope_interleaved=False)
    return in_sections(llm, text.where, family.sections, family.interleaved)


def in_sections(
    llm: DecoderConfig, where: str, default: tuple[int, ...], interleaved: bool
) -> DecoderConfig:
    """Check a decoder's rotary sections of t, y and x, or set the default ones. Raises UserError for other numbers."""
    pairs = llm.rotary_pairs
    sections = llm.rope_sections or default
    if len(sections) != 3:
        raise UserError(
            f"{where}: mrope_section={list(sections)} must have three numbers: of t, y and x"
        )
    if interleaved:
        # Turns beyond the last channel pair are none, and the first axis has every pair that no
        # other takes. How many of the pairs axis, axis + 3, ... lie below both bounds, as in
        # `axis_of_pair`.
        y, x = (len(range(axis, min(3 * sections[axis], pairs), 3)) for axis in (1, 2))
        sections = pairs - y - x, y, x
    if sum(sections) != pairs:
        raise UserError(
            f"{where}: mrope_section={list(sections)} must add up to {pairs}, the channel pairs that RoPE turns"
        )
    return replace(llm, rope_sections=sections, rope_interleaved=interleaved)


def _qwen2(vision: Fields, plain: VisionConfig) -> VisionConfig:
    return replace(
        plain,
        positions=RotaryGrid(axial_theta(vision, plain.width // plain.heads)),
        embed_bias=False,
    )


def _qwen2_5(vision: Fields, plain: VisionConfig) -> VisionConfig:
    size = vision.size("window_size")
    merge = plain.connector.merge
    full_attention = vision.get("fullatt_block_indexes", list[int])
    # A window is given in pixels and holds whole tokens: 112 pixels of patches of 14, merged by 2,
    # are 4 tokens a side.
    merged = size // merge // plain.patch  # tokens along one side of a window
    if merged < 1:
        raise UserError(
            f"{vision.where}: window_size={size} is smaller than a merged patch of {merge * plain.patch}"
        )
    return replace(
        plain,
        positions=RotaryGrid(axial_theta(vision, plain.width // plain.heads)),
        window=merged * merge,
        windowed=tuple(i for i in range(plain.layers) if i not in full_attention),
        embed_bias=False,
        norm="rms",
        gated=True,
        biases=(*plain.biases, "gate"),
        connector=replace(plain.connector, norm="rms"),
    )


def _exaone4_5(vision: Fields, plain: VisionConfig) -> VisionConfig:
    return replace(_qwen2_5(vision, plain), kv_heads=vision.size("num_key_value_heads"))


def _hyperclovax(vision: Fields, plain: VisionConfig) -> VisionConfig:
    vision.allow_only("model_type", "qwen2_5_vl_vision")
    return _qwen2_5(vision, plain)


def _qwen3(vision: Fields, plain: VisionConfig) -> VisionConfig:
    places = vision.size("num_position_embeddings")
    deep = vision.get("deepstack_visual_indexes", list[int], [])
    side = round(places**0.5)
    if side**2 != places:
        raise UserError(
            f"{vision.where}: num_position_embeddings={places} is no square of a number"
        )
    if deep != sorted(set(deep)):
        raise UserError(
            f"{vision.where}: deepstack_visual_indexes={deep} is not in the order of the layers"
        )
    return replace(
        plain,
        positions=StretchedGrid(side, axial_theta(vision, plain.width // plain.heads)),
        deepstack=tuple(i for i in deep if i < plain.layers),
    )


def _qwen3_5(vision: Fields, plain: VisionConfig) -> VisionConfig:
    vision.allow_only("deepstack_visual_indexes", [])
    return _qwen3(vision, plain)


QWEN2_VIDEO = Qwen2Video(total_pixels=24_576 * 28 * 28)  # of Qwen's own tools
NO_WINDOWS = {"use_sliding_window": False, "layer_types": None}
FAMILIES = {
    "qwen2_5_vl": Family(
        decoder="qwen2",
        sections=(16, 24, 24),
        interleaved=False,
        fixed={},
        tower=_qwen2_5,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        videos=QWEN2_VIDEO,
    ),
    "qwen3_vl": Family(
        decoder="qwen3",
        sections=(24, 20, 20),
        interleaved=True,
        fixed=NO_WINDOWS,
        tower=_qwen3,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        videos=Qwen3Video(),
    ),
}
FAMILIES["qwen2_vl"] = replace(FAMILIES["qwen2_5_vl"], tower=_qwen2)
FAMILIES["exaone4_5"] = replace(
    FAMILIES["qwen2_5_vl"], decoder="exaone4", sections=(), tower=_exaone4_5
)
FAMILIES["hyperclovax_vision_v2"] = replace(
    FAMILIES["exaone4_5"], decoder="hyperclovax", tower=_hyperclovax, projector=True
)
FAMILIES["qwen3_5"] = replace(
    FAMILIES["qwen3_vl"], decoder="qwen3_5_text", sections=(11, 11, 10), fixed={}, tower=_qwen3_5
)
FAMILIES["qwen3_vl_moe"] = replace(
    FAMILIES["qwen3_vl"], decoder="qwen3_moe", fixed=NO_WINDOWS | {"norm_topk_prob": True}
)
FAMILIES["cosmos3_omni"] = FAMILIES["qwen3_vl"]
FAMILIES["qwen3_5_moe"] = replace(FAMILIES["qwen3_5"], decoder="qwen3_5_moe_text")


# --------------------------------------------------------------------------------------------------
# tensors


def find_visual(folder: HfFolder) -> str:
    """Find what the tensors of a vision tower begin with. Raises UserError where there is none."""
    first = next((p for p in VISION_FIRST if f"{p}patch_embed.proj.weight" in folder.tensors), None)
    if first is None:
        raise UserError(
            f"{folder.path} has no vision tower: no tensor is called [...]visual.patch_embed.proj.weight"
        )
    return first


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors. "llm" may be another's; an encoder that takes its weights from here may have any name."""
    decoder = decoder_layout(folder, model)
    first = find_visual(folder)
    parts = dict(decoder.modules)
    prefixes = dict(decoder.prefixes)
    unused = decoder.unused
    # Without the prefix in Qwen3-Omni.
    deepstack = (
        "merger_list."
        if f"{first}merger_list.0.ln_q.weight" in folder.tensors
        else "deepstack_merger_list."
    )
    mergers = f"{first}merger.", f"{first}{deepstack}"
    for name, config in model.encoders.items():
        taken = {
            Path(weights).expanduser()
            for weights in (config.weights, config.connector.weights)
            if weights
        }
        if folder.path not in taken or config.modality != "image":
            continue
        fused = f"{first}blocks.0.attn.qkv.weight" in folder.tensors
        merger = _merger_parts(mergers, f"{first}merger.ln_q.weight" in folder.tensors)
        projector = tuple(p for p in PROJECTORS if f"{p}.weight" in folder.tensors)
        if projector:
            merger["output"] = linear(projector[0])
        parts |= {
            name: _vision_parts(first, config, fused),
            f"{name}.connector": TensorNames(merger),
        }
        tower = tuple(f"{first}{part}" for part in ("blocks.", "patch_embed.", "pos_embed."))
        prefixes |= {name: tower, f"{name}.connector": (*mergers, *projector)}
        # The checkpoint has mergers for all of its own deepstack layers, the model perhaps for
        # fewer.
        thinker = folder.config.get("thinker_config", folder.config)  # of an Omni model
        listed = len(thinker.get("vision_config", {}).get("deepstack_visual_indexes", ()))
        unused += tuple(f"{mergers[1]}{n}.*" for n in range(len(config.deepstack), listed))
    return Layout(parts, prefixes, unused)


def _vision_parts(first: str, config: VisionConfig, fused: bool) -> TensorNames:
    layer = f"{first}blocks.*"
    # Qwen2-VL's MLP is called `fc1` and `fc2`; what tells it from Qwen3-VL's are its positions.
    named = "" if isinstance(config.positions, RotaryGrid) else "linear_"
    mlp = GATED_MLP if config.gated else {"up": f"{named}fc1", "down": f"{named}fc2"}
    parts = {
        # Stored [width, channel, frame, row, column].
        # Ours: frame, row, column, channel.
        "embed.patches": convolution(f"{first}patch_embed.proj", (2, 3, 4, 1, 0)),
        "embed.positions": table(f"{first}pos_embed"),
        "layers.*.attention_norm": norm(f"{layer}.norm1"),
        "layers.*.attention.output": linear(f"{layer}.attn.proj"),
        "layers.*.mlp_norm": norm(f"{layer}.norm2"),
    }
    thirds = {name: linear(f"{layer}.attn.{name[0]}") for name in QKV}  # of Qwen2.5-Omni
    if fused:
        keys = config.key_heads * config.head_width
        widths = {"query": config.width, "key": keys, "value": keys}
        thirds = fused_parts(linear(f"{layer}.attn.qkv"), **widths)
    parts |= below(ATTENTION, thirds) | linears("layers.*.mlp", f"{layer}.mlp", **mlp)
    return TensorNames(parts)


def _merger_parts(mergers: tuple[str, str], numbered: bool) -> dict[str, LeafTensors]:
    """Locate a patch merger, and those of a deepstack. numbered: the layers of their MLPs have no names (Qwen2-VL)."""
    names = ("ln_q", "mlp.0", "mlp.2") if numbered else ("norm", "linear_fc1", "linear_fc2")
    parts: dict[str, LeafTensors] = {}
    for ours, first in (("", mergers[0]), ("deeper.*.", f"{mergers[1]}*.")):
        parts[f"{ours}norm"] = norm(f"{first}{names[0]}")
        parts[f"{ours}mlp.up"] = linear(f"{first}{names[1]}")
        parts[f"{ours}mlp.down"] = linear(f"{first}{names[2]}")
    return parts
