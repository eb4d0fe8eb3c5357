"""Qwen2.5-Omni's thinker: Qwen2.5-VL's tower, Whisper's encoder in chunks, a decoder whose positions are time.

A whole checkpoint has a talker and a vocoder (`talker.*`, `token2wav.*`) behind it, which speak what the thinker
writes. They are not read, and an export copies them as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmjax.config import AudioConfig, ConnectorConfig, ModelConfig, Qwen2Video, Sinusoids, VisionConfig
from mmjax.errors import UserError
from mmjax.hf import qwen_vl
from mmjax.hf.audio import OMNI, encoder_of, encoder_parts
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import Layout, TensorNames, linear

THINKER = "qwen2_5_omni_thinker"
FAMILY = replace(
    qwen_vl.FAMILIES["qwen2_5_vl"],
    text={
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1_000_000.0,
    },
)
AUDIO = "audio"  # the name of the encoder
AUDIO_FIRST = ("model.audio_tower.", "audio_tower.", "thinker.model.audio_tower.", "thinker.audio_tower.")
SPEAKERS = ("talker.", "token2wav.")


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The thinker that a config says: "llm" and the encoders "vision" and "audio".

    Raises UserError for a field that is missing or not supported.
    """
    thinker = fields if fields.get("model_type", str) == THINKER else fields.inner("thinker_config")
    model = qwen_vl.read_family(folder, _untied(thinker), FAMILY)
    vision = model.encoders[qwen_vl.NAME]
    assert isinstance(vision, VisionConfig)
    assert isinstance(vision.videos, Qwen2Video)
    per_second = thinker.get("position_id_per_seconds", int, 25)
    chunk = int(per_second * thinker.get("seconds_per_chunk", float, 2.0))
    videos = replace(
        vision.videos,
        tokens_per_second=float(per_second),
        seconds="nominal",
        text_after="time",
        sound_chunk=chunk,
    )
    encoders = {qwen_vl.NAME: replace(vision, videos=videos), AUDIO: _audio(folder, thinker, model.llm.width)}
    return replace(model, encoders=encoders)


def _untied(thinker: Fields) -> Fields:
    """The fields with a text config that says nothing of its tables, of which only the thinker's own word counts."""
    text = {**thinker.get("text_config", dict, {}), "tie_word_embeddings": None}
    return Fields({**thinker.values, "text_config": text}, thinker.where)


def _audio(folder: HfFolder, thinker: Fields, outputs: int) -> AudioConfig:
    values = thinker.get("audio_config", dict, {})
    fields = Fields({**values, "model_type": OMNI}, f"{thinker.where}: audio_config")
    if (width := fields.get("output_dim", int, 3584)) != outputs:
        raise UserError(f"{fields.where}: output_dim={width}, but the text's hidden_size is {outputs}")
    half = fields.get("n_window", int, 100)
    table = fields.get("max_source_positions", int, 1500)
    if not 1 <= half <= table:
        raise UserError(f"{fields.where}: n_window={half}, but there are positions 1 to max_source_positions={table}")
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    return replace(encoder_of(folder, fields), positions=Sinusoids(), chunk=2 * half, connector=connector)


# ---------------------------------------------------------------------------------------------------------- tensors


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of the thinker. Says so where there are others, which are not read."""
    tower = next((p for p in AUDIO_FIRST if f"{p}conv1.weight" in folder.tensors), None)
    if tower is None:
        raise UserError(f"{folder.path} has no audio encoder: no tensor is called [...]audio_tower.conv1.weight")
    if speakers := [first for first in SPEAKERS if any(key.startswith(first) for key in folder.tensors)]:
        listed = ", ".join(f"{first}*" for first in speakers)
        note(f"{folder.path}: {listed} (which speak the answers) are not read; an export copies them as they are")
    thinker = qwen_vl.layout(folder, model)
    name = next((name for name, e in model.encoders.items() if _from(folder, e)), AUDIO)
    projector = f"{tower}proj"
    tensors = tuple(key for key in folder.tensors if key.startswith(tower) and not key.startswith(projector))
    parts = {name: encoder_parts(tower, "ln_post"), f"{name}.connector": TensorNames({"linear": linear(projector)})}
    prefixes = {name: tensors, f"{name}.connector": (projector,)}
    unused = (f"{tower}audio_bos_eos_token.weight", *(f"{first}*" for first in SPEAKERS))
    return Layout({**thinker.modules, **parts}, {**thinker.prefixes, **prefixes}, (*thinker.unused, *unused))


def _from(folder: HfFolder, encoder: AudioConfig | VisionConfig) -> bool:
    weights = encoder.weights or encoder.connector.weights
    return isinstance(encoder, AudioConfig) and bool(weights) and Path(weights).expanduser() == folder.path
