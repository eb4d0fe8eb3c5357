"""Gemma 4 with its towers of images and of clips, or without (`gemma4_unified`); videos are not read."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    AudioConfig,
    AxisTables,
    ConformerConfig,
    ConnectorConfig,
    DecoderConfig,
    ModelConfig,
    PatchBudget,
    UsmMel,
    VisionConfig,
    Waveform,
)
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import (
    Layout,
    TensorNames,
    TensorSlice,
    array,
    convolution,
    linear,
    norm,
)
from mmjax.hf.llava import whole_layout
from mmjax.hf.names import ACTIVATIONS, ATTENTION, PROJECTIONS
from mmjax.hf.processors import read_audio_processing, says_clips
from mmjax.hf.vision import vision_of, with_images
from mmjax.hf.vision_tensors import clippable_linears

PROJECTOR = "model.embed_vision."
EYES = "model.vision_embedder."  # of those without towers
STANDARD = "model.vision_tower.std_"  # what a tower's numbers of every channel begin with
EARS, EARS_PROJECTOR = "model.audio_tower.", "model.embed_audio."
EARS_OUTPUT = f"{EARS}output_proj"
MLP_OF_WIDTH = 4  # times the width, as its class has it
BINS_OF_WIDTH = 4  # channels of the first convolution of a bin behind both
LAYER_NORM_EPS = 1e-5  # of PyTorch's LayerNorm; no config says it
EXTRACTOR = "Gemma4AudioFeatureExtractor"
UNIFIED_EXTRACTOR = "Gemma4UnifiedAudioFeatureExtractor"


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that reads images, clips and texts of a Gemma 4."""
    text = fields.inner("text_config")
    unified = fields.get("model_type", str) == "gemma4_unified"
    llm = decoder_of(text, tables_are_tied(fields))
    note(f"{fields.where}: videos are not supported")
    encoders: dict[str, VisionConfig | AudioConfig] = {}
    if fields.values.get("vision_config") is not None:
        read_vision = _patches if unified else _vision
        encoders["vision"] = vision = read_vision(folder, fields.inner("vision_config"))
        if text.values.get("use_bidirectional_attention") == "vision":
            _check_window(fields, llm, vision)
            # Its class lets images attend both ways in layers without a window too.
            llm = replace(llm, items="images" if unified else "in_windows")
    if fields.values.get("audio_config") is not None:
        read_audio = _frames if unified else _audio
        encoders["audio"] = read_audio(folder, fields.inner("audio_config"))
    return ModelConfig(llm, encoders)


def _vision(folder: HfFolder, fields: Fields) -> VisionConfig:
    plain = vision_of(fields, -1, False, ConnectorConfig())
    if (merge := fields.size("pooling_kernel_size")) == 1:
        raise UserError(
            f"{fields.where}: pooling_kernel_size=1 is not supported; there the tower in transformers drops every token"
        )
    connector = ConnectorConfig(
        merge=merge,
        merging="mean",
        feature_scale=plain.width**0.5,
        standardize=fields.get("standardize", bool),
        norm="merged_unscaled",
        mlp_width=0,
        biases=(),
    )
    # Pixels as the processor makes them, by default from 0 to 1, become 2 x - 1 in the tower.
    vision = with_images(folder, replace(plain, connector=connector, mean=(0.0,), std=(1.0,)))
    return replace(
        vision,
        mean=tuple(m + s / 2 for m, s in zip(vision.mean, vision.std, strict=True)),
        std=tuple(s / 2 for s in vision.std),
    )


def _check_window(fields: Fields, llm: DecoderConfig, vision: VisionConfig) -> None:
    """Raise UserError where an image may have more tokens than a window, which would cut how it attends both ways."""
    how = vision.images
    if isinstance(how, PatchBudget) and llm.windowed and how.max_tokens > llm.window:
        raise UserError(
            f"{fields.where}: text_config.sliding_window={llm.window} is less than an image's "
            f"max_soft_tokens={how.max_tokens}, so windows would cut images, which is not supported"
        )


def _audio(folder: HfFolder, fields: Fields) -> AudioConfig:
    clips = (
        read_audio_processing(folder.path, EXTRACTOR, UsmMel)
        if says_clips(folder.path)
        else UsmMel()
    )
    before, behind = (fields.get(f"attention_context_{side}", int) for side in ("left", "right"))
    if before < 2 or behind < 0:
        raise UserError(
            f"{fields.where}: attention_context_left={before} and attention_context_right={behind}: known are 2 "
            "and more, with which a position attends itself, and 0 and more"
        )
    # A score that far below all others has no part in a softmax.
    fields.allow_only("attention_invalid_logits_value", -1e9)
    channels = fields.get("subsampling_conv_channels", list[int])
    if len(channels) != 2 or channels[0] // BINS_OF_WIDTH != -(-clips.mels // 4):
        raise UserError(
            f"{fields.where}: subsampling_conv_channels={channels}: the class takes the first of two, over "
            f"{BINS_OF_WIDTH}, for the bins behind both convolutions, which are {-(-clips.mels // 4)} of {clips.mels}"
        )
    width = fields.size("hidden_size")
    context = fields.size("attention_chunk_size") + before - 1 + behind
    return AudioConfig(
        layers=fields.size("num_hidden_layers"),
        width=width,
        heads=fields.size("num_attention_heads"),
        mlp_width=MLP_OF_WIDTH * width,
        clips=clips,
        norm_eps=fields.get("rms_norm_eps", float),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        stem_activation="relu",
        attention="auto",
        clipped_linears=fields.get("use_clipped_linears", bool),
        conformer=ConformerConfig(
            past=before - 2,
            future=max(behind - 1, 0),
            nearest=context // 2 - (before - 1),
            score_cap=fields.get("attention_logit_cap", float),
            taps=fields.size("conv_kernel_size"),
            mlp_share=fields.get("residual_weight", float),
            limit=fields.get("gradient_clipping", float),
            stem_widths=tuple(channels),
        ),
        connector=ConnectorConfig(
            merge=1,
            merger_width=fields.size("output_proj_dims"),
            merger_bias=True,
            norm="merger_unscaled",
            mlp_width=0,
            biases=(),
        ),
    )


def _patches(folder: HfFolder, fields: Fields) -> VisionConfig:
    """Read how a matrix and norms make tokens of squares of pixels. Raises UserError for widths that differ."""
    width = fields.size("mm_embed_dim")
    fields.allow_only("output_proj_dims", width)
    patch = fields.size("patch_size") * fields.size("pooling_kernel_size")
    fields.allow_only("model_patch_size", patch)
    vision = VisionConfig(
        layers=1,
        width=width,
        heads=1,
        mlp_width=0,
        patch=patch,
        mean=(0.0,),
        std=(1.0,),
        positions=AxisTables(fields.size("mm_posemb_size")),
        patch_norm=True,
        embed_norm=True,
        embed_norm_first=True,
        head_norm=False,
        norm_eps=LAYER_NORM_EPS,
        connector=ConnectorConfig(
            merge=1,
            norm="merged_unscaled",
            norm_eps=fields.get("rms_norm_eps", float),
            mlp_width=0,
            biases=(),
        ),
    )
    return with_images(folder, vision)


def _frames(folder: HfFolder, fields: Fields) -> AudioConfig:
    """Read how a norm and a matrix make tokens of samples. Raises UserError for an extractor of other frames."""
    width = fields.size("audio_embed_dim")
    for name in ("hidden_size", "output_proj_dims", "audio_samples_per_token"):
        fields.allow_only(name, width)
    clips = Waveform(width)
    if says_clips(folder.path):
        clips = read_audio_processing(folder.path, UNIFIED_EXTRACTOR, Waveform)
    if clips.samples != width:
        raise UserError(
            f"{fields.where}: audio_embed_dim={width}, but the folder's extractor says "
            f"audio_samples_per_token={clips.samples}; make them the same"
        )
    return AudioConfig(
        layers=1,
        width=width,
        heads=1,
        mlp_width=0,
        clips=clips,
        norm_eps=fields.get("rms_norm_eps", float),
        connector=ConnectorConfig(merge=1, norm="none", mlp_width=0, biases=()),
    )


def unified_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of texts, images and clips without towers."""
    patches = {
        "embed.patch_norm": norm(f"{EYES}patch_ln1"),
        "embed.patches": linear(f"{EYES}patch_dense"),
        "embed.norm": norm(f"{EYES}patch_ln2"),
        # Stored `[side, 2, width]`: of each column, then row.
        "embed.positions": array(f"{EYES}pos_embedding", (1, 0, 2)),
        "layers.*.norm": norm(f"{EYES}pos_norm"),
    }
    result = decoder_layout(folder, model)
    for name, parts, *prefixes in (
        ("vision", patches, EYES, PROJECTOR),
        ("audio", {}, EARS, EARS_PROJECTOR),
    ):
        connector = {"linear": linear(f"{prefixes[1]}embedding_projection")}
        modules = {name: TensorNames(parts), f"{name}.connector": TensorNames(connector)}
        begins = {key: (prefix,) for key, prefix in zip(modules, prefixes, strict=True)}
        if name not in model.encoders:
            result = replace(
                result, unused=(*result.unused, *(f"{prefix}*" for prefix in prefixes))
            )
            continue
        result = replace(
            result, modules={**result.modules, **modules}, prefixes={**result.prefixes, **begins}
        )
    return result


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of texts, images and clips; those of a tower that the model has not are left alone."""
    if "vision" in model.encoders:
        parts = {
            "standardization": {
                name: TensorSlice(f"{STANDARD}{name}") for name in ("bias", "scale")
            },
            "linear": linear(f"{PROJECTOR}embedding_projection"),
        }
        result = whole_layout(folder, model, TensorNames(parts), PROJECTOR, STANDARD)
    else:
        result = decoder_layout(folder, model)
        tower = ("model.vision_tower.*", f"{PROJECTOR}*")
        result = replace(result, unused=(*result.unused, *tower))
    if "audio" not in model.encoders:
        return replace(result, unused=(*result.unused, f"{EARS}*", f"{EARS_PROJECTOR}*"))
    connector = {
        "merger": linear(EARS_OUTPUT),
        "linear": linear(f"{EARS_PROJECTOR}embedding_projection"),
    }
    modules = {"audio": _audio_parts(), "audio.connector": TensorNames(connector)}
    prefixes = {
        "audio": (f"{EARS}subsample_conv_projection.", f"{EARS}layers."),
        "audio.connector": (EARS_OUTPUT, EARS_PROJECTOR),
    }
    return replace(
        result, modules={**result.modules, **modules}, prefixes={**result.prefixes, **prefixes}
    )


def _audio_parts() -> TensorNames:
    """Name the tensors of the tower of clips."""
    stem, layer = f"{EARS}subsample_conv_projection.", f"{EARS}layers.*."
    time_and_bins = (3, 2, 1, 0)  # from [width, channel, time, bin]; ours: bin, time, channel
    attention = {**PROJECTIONS, "output": "post"}
    parts = {
        "embed.output": linear(f"{stem}input_proj_linear"),
        f"{ATTENTION}_norm": norm(f"{layer}norm_pre_attn"),
        ATTENTION: {"channel_scale": TensorSlice(f"{layer}self_attn.per_dim_scale")},
        **clippable_linears(ATTENTION, f"{layer}self_attn", **attention),
        f"{ATTENTION}.distance_key": linear(f"{layer}self_attn.relative_k_proj"),
        f"{ATTENTION}_after": norm(f"{layer}norm_post_attn"),
        "layers.*.convolution.norm": norm(f"{layer}lconv1d.pre_layer_norm"),
        **clippable_linears(
            "layers.*.convolution", f"{layer}lconv1d", input="linear_start", output="linear_end"
        ),
        "layers.*.convolution.filter": array(f"{layer}lconv1d.depthwise_conv1d.weight", (2, 0, 1)),
        "layers.*.convolution.filter_norm": norm(f"{layer}lconv1d.conv_norm"),
        "layers.*.norm": norm(f"{layer}norm_out"),
    }
    for n, name in enumerate(("first", "second")):
        mlp = f"{layer}feed_forward{n + 1}"
        parts |= {
            f"embed.{name}": convolution(f"{stem}layer{n}.conv", time_and_bins),
            f"embed.{name}_norm": norm(f"{stem}layer{n}.norm"),
            f"layers.*.{name}.norm": norm(f"{mlp}.pre_layer_norm"),
            **clippable_linears(f"layers.*.{name}.mlp", mlp, up="ffw_layer_1", down="ffw_layer_2"),
            f"layers.*.{name}.norm_after": norm(f"{mlp}.post_layer_norm"),
        }
    return TensorNames(parts)
