"""Audio: Whisper's encoder, its kin, and whole Qwen2-Audio checkpoints. What configs say, where tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmjax.config import (
    AudioConfig,
    ConnectorConfig,
    ModelConfig,
    PlainRope,
    RotaryTime,
    StoredTable,
    WhisperMel,
)
from mmjax.errors import UserError
from mmjax.hf.class_defaults import processor_defaults
from mmjax.hf.decoder_tensors import decoder_parts, find_decoder
from mmjax.hf.decoders import FAMILIES
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import (
    Layout,
    LeafTensors,
    TensorNames,
    convolution,
    linear,
    linears,
    norm,
    table,
)
from mmjax.hf.llava import find_projector, text_of
from mmjax.hf.names import ACTIVATIONS, ATTENTION, PROJECTIONS
from mmjax.hf.processors import has_processor, read_audio_processing
from mmjax.hf.rope import rope_of

TOWERS = ("model.audio_tower.", "audio_tower.", "model.encoder.", "encoder.", "")
POSITIONS_PER_SECOND = 50  # a hop of 10 ms, and a convolution of stride 2
# By the family of their thinkers; positions are of chunks.
OMNI = {
    "qwen2_5_omni": "qwen2_5_omni_audio_encoder",
    "qwen3_omni_moe": "qwen3_omni_moe_audio_encoder",
}
WHISPER_SIZES = {
    "layers": "encoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "mlp_width": "encoder_ffn_dim",
}
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
}


@dataclass(frozen=True)
class Kind:
    """A kind of audio encoder: the names of its fields, and how it takes clips."""

    sizes: Mapping[str, str] = field(default_factory=lambda: WHISPER_SIZES)
    positions: str = "max_source_positions"
    activation: str = "activation_function"
    extractor: str = "WhisperFeatureExtractor"
    seconds: int = 0  # that clips may have where there is no extractor; 0: of the positions
    clips: Mapping[str, Any] = field(default_factory=dict)  # fields of `WhisperMel`
    pool: int = 2


ENCODERS = {
    "whisper": Kind(clips={"attended": "window"}, pool=1),
    "qwen2_audio_encoder": Kind(),
    **dict.fromkeys(OMNI.values(), Kind(seconds=300)),
    "qwen3_asr_encoder": Kind(
        positions="max_position_embeddings", extractor="Qwen3ASRFeatureExtractor"
    ),
    "voxtral_encoder": Kind(SIZES, clips={"attended": "window", "longer": "whole"}, pool=1),
    "glmasr_encoder": Kind(
        SIZES,
        positions="max_position_embeddings",
        activation="hidden_act",
        seconds=30,
        clips={"attended": "window", "longer": "split", "shown": "clip"},
        pool=1,
    ),
}
# By whether it is Qwen2-Audio's: our names of the layers of a projector, and those there.
PROJECTOR_LAYERS = (
    {"mlp.up": "linear_1", "mlp.down": "linear_2"},
    {"linear": "linear"},
)


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a Qwen2-Audio config says, its encoder called "audio"."""
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    return ModelConfig(
        text_of(fields), {"audio": replace(encoder_of(folder, fields), connector=connector)}
    )


def encoder_of(folder: HfFolder, fields: Fields) -> AudioConfig:
    """The audio encoder that a checkpoint's config says.

    As in transformers, Whisper's layers see the whole window with its silence, those of Qwen2-Audio
    clips alone. Raises UserError for a kind that is not in `ENCODERS`, and for a field that is not
    supported.
    """
    kind = fields.get("model_type", str)
    if kind in ("qwen2_audio", "voxtral", "glmasr"):
        return encoder_of(folder, fields.inner("audio_config"))
    if kind not in ENCODERS:
        raise UserError(
            f"{fields.where}: model_type={kind!r} is no audio encoder; known: {', '.join(ENCODERS)}"
        )
    how = ENCODERS[kind]
    positions = fields.size(how.positions)
    longest = how.seconds * POSITIONS_PER_SECOND or positions
    clips = _clips(folder, fields.size("num_mel_bins"), longest, how.extractor)
    encoder = AudioConfig(
        attention="auto",
        **{ours: fields.size(theirs) for ours, theirs in how.sizes.items()},
        clips=replace(clips, **how.clips),
        positions=StoredTable(positions),
        activation=fields.choice(how.activation, ACTIVATIONS),
        stem_activation="gelu",
        pool=how.pool,
    )
    if kind == "voxtral_encoder":
        return _in_windows(encoder, fields, positions)
    return _with_rope(encoder, fields) if kind == "glmasr_encoder" else encoder


def _with_rope(encoder: AudioConfig, fields: Fields) -> AudioConfig:
    """Return an encoder with rotary positions in place of a table. Raises UserError for RoPE that is not plain."""
    fields.allow_only("num_key_value_heads", encoder.heads)
    fields.allow_only("head_dim", encoder.head_width)
    rope = rope_of(fields, FAMILIES["glm4"])  # whose config says it alike
    width = int(encoder.head_width * rope.share)
    if not isinstance(rope.scaling, PlainRope) or rope.sections or width % 2 or not width:
        raise UserError(
            f"{fields.where}: rope_parameters: known is rope_type='default' over an even number of channels, which "
            f"{rope.share} of {encoder.head_width} must be"
        )
    return replace(encoder, positions=RotaryTime(rope.theta, width))


def _in_windows(encoder: AudioConfig, fields: Fields, positions: int) -> AudioConfig:
    """Return an encoder of the windows of a clip, each apart, which are as long as it has positions."""
    clips, frames = encoder.clips, encoder.stride * positions
    seconds, rest = divmod(frames * clips.hop, clips.sample_rate)
    if rest:
        raise UserError(
            f"{fields.where}: max_source_positions={positions} are {frames * clips.hop} samples, no whole seconds, "
            "which is not supported"
        )
    return replace(encoder, clips=replace(clips, seconds=seconds, longer="whole"), chunk=frames)


def _clips(folder: HfFolder, mels: int, positions: int, extractor: str) -> WhisperMel:
    """Read how clips are prepared; without a feature extractor, they are as long as the encoder has positions."""
    if not has_processor(folder.path):
        return WhisperMel(
            mels=mels,
            seconds=max(1, -(-positions // POSITIONS_PER_SECOND)),
            shortest=processor_defaults(extractor).get("min_length", 0),
        )
    how = read_audio_processing(folder.path, extractor)
    if how.mels != mels:
        raise UserError(
            f"{folder.path}: its feature extractor makes {how.mels} bins (feature_size), its config.json says "
            f"num_mel_bins={mels}; make them the same"
        )
    return how


# --------------------------------------------------------------------------------------------------
# tensors


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of a checkpoint of an encoder, a projector and a decoder, whichever of them a model has."""
    name = _name(folder, model)
    tower = find_tower(folder)
    inner, output = find_decoder(folder)
    names = PROJECTOR_LAYERS[folder.fields.get("model_type", str) == "qwen2_audio"]
    projector = find_projector(folder, next(iter(names.values())))
    connector = {ours: linear(f"{projector}{theirs}") for ours, theirs in names.items()}
    return Layout(
        {
            "llm": decoder_parts(model.llm, folder),
            name: encoder_parts(folder, tower),
            f"{name}.connector": TensorNames(connector),
        },
        {"llm": (inner, output), name: (tower,), f"{name}.connector": (projector,)},
        (f"{output}.weight",) if model.llm.tied else (),
    )


def encoder_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the encoder of a checkpoint; all else there, such as Whisper's decoder, is left alone."""
    name = _name(folder, model)
    tower = find_tower(folder)
    unused = tuple(key for key in folder.tensors if not key.startswith(tower))
    return Layout({name: encoder_parts(folder, tower)}, {name: (tower,)}, unused)


def _name(folder: HfFolder, model: ModelConfig) -> str:
    """Return the name of the model's encoder that comes from this folder."""
    return next(
        (
            name
            for name, e in model.encoders.items()
            if e.weights and Path(e.weights) == folder.path
        ),
        "audio",
    )


def find_tower(folder: HfFolder) -> str:
    """The prefix of an audio encoder in a checkpoint. Raises UserError where there is none."""
    first = "conv2d1" if folder.fields.get("model_type", str) == "qwen3_asr" else "conv1"
    prefix = next((p for p in TOWERS if f"{p}{first}.weight" in folder.tensors), None)
    if prefix is None:
        raise UserError(
            f"{folder.path} has no audio encoder: no tensor is called [...]{first}.weight"
        )
    return prefix


def encoder_parts(folder: HfFolder, tower: str) -> TensorNames:
    """Locate an audio encoder's parameters under the prefix `tower`."""
    head = "ln_post" if f"{tower}ln_post.weight" in folder.tensors else "layer_norm"
    layer = f"{tower}layers.*."
    taps_first = (2, 1, 0)  # stored [width, channel, tap]
    parts = {
        "embed.first": convolution(f"{tower}conv1", taps_first),
        "embed.second": convolution(f"{tower}conv2", taps_first),
        "embed.positions": table(f"{tower}embed_positions"),
        "layers.*.attention_norm": norm(f"{layer}self_attn_layer_norm"),
        **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output="out_proj"),
        "layers.*.mlp_norm": norm(f"{layer}final_layer_norm"),
        "layers.*.mlp.up": linear(f"{layer}fc1"),
        "layers.*.mlp.down": linear(f"{layer}fc2"),
        "head": norm(f"{tower}{head}"),
    }
    if folder.fields.get("model_type", str) == "glmasr":
        parts |= {
            "layers.*.attention_norm": norm(f"{layer}input_layernorm"),
            "layers.*.attention.output": linear(f"{layer}self_attn.o_proj"),
            "layers.*.mlp_norm": norm(f"{layer}post_attention_layernorm"),
            "layers.*.mlp.up": linear(f"{layer}mlp.fc1"),
            "layers.*.mlp.down": linear(f"{layer}mlp.fc2"),
            "head": norm(f"{tower}norm"),
        }
    is_2d = f"{tower}conv2d1.weight" in folder.tensors
    return TensorNames(parts | stem_parts(tower) if is_2d else parts)


def stem_parts(tower: str) -> dict[str, LeafTensors]:
    """Locate 2D convolutions, stored [width, channel, bin, time], and the matrix behind them."""
    names = {"first": "conv2d1", "second": "conv2d2", "third": "conv2d3"}
    parts = {
        f"embed.{ours}": convolution(f"{tower}{theirs}", (2, 3, 1, 0))
        for ours, theirs in names.items()
    }
    return parts | {"embed.output": linear(f"{tower}conv_out")}
