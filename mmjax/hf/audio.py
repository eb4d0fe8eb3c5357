"""Audio: Whisper's encoder, its kin, and whole Qwen2-Audio checkpoints. What configs say, where tensors lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmjax.config import AudioConfig, ConnectorConfig, ModelConfig, StoredTable, WhisperMel
from mmjax.errors import UserError
from mmjax.hf.class_defaults import processor_defaults
from mmjax.hf.decoder_tensors import decoder_parts, find_decoder
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

TOWERS = ("model.audio_tower.", "audio_tower.", "model.encoder.", "encoder.", "")
POSITIONS_PER_SECOND = 50  # a hop of 10 ms, and a convolution of stride 2
# By the family of their thinkers; positions are of chunks.
OMNI = {
    "qwen2_5_omni": "qwen2_5_omni_audio_encoder",
    "qwen3_omni_moe": "qwen3_omni_moe_audio_encoder",
}
QWEN3_ASR = "qwen3_asr_encoder"
ENCODERS = ("whisper", "qwen2_audio_encoder", *OMNI.values(), QWEN3_ASR)
# By whether it is Qwen2-Audio's: our names of the layers of a projector, and those there.
PROJECTOR_LAYERS = (
    {"mlp.up": "linear_1", "mlp.down": "linear_2"},
    {"linear": "linear"},
)
EXTRACTORS = {QWEN3_ASR: "Qwen3ASRFeatureExtractor"}  # of the others Whisper's


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
    if kind == "qwen2_audio":
        return encoder_of(folder, fields.inner("audio_config"))
    if kind not in ENCODERS:
        raise UserError(
            f"{fields.where}: model_type={kind!r} is no audio encoder; known: {', '.join(ENCODERS)}"
        )
    positions = fields.size(
        "max_position_embeddings" if kind == QWEN3_ASR else "max_source_positions"
    )
    # Clips of the thinkers may be of five minutes.
    longest = 300 * POSITIONS_PER_SECOND if kind in OMNI.values() else positions
    extractor = EXTRACTORS.get(kind, "WhisperFeatureExtractor")
    clips = _clips(folder, fields.size("num_mel_bins"), longest, extractor)
    return AudioConfig(
        attention="auto",
        layers=fields.size("encoder_layers"),
        width=fields.size("d_model"),
        heads=fields.size("encoder_attention_heads"),
        mlp_width=fields.size("encoder_ffn_dim"),
        clips=replace(clips, attended="window" if kind == "whisper" else "clip"),
        positions=StoredTable(positions),
        activation=fields.choice("activation_function", ACTIVATIONS),
        stem_activation="gelu",
        pool=1 if kind == "whisper" else 2,
    )


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
