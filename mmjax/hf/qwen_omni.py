"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: a Qwen-VL's tower, an audio encoder in chunks, positions that are time.

Qwen2.5-Omni has Qwen2.5-VL's tower and Whisper's encoder, Qwen3-Omni Qwen3-VL's tower, 2D
convolutions before Whisper's layers, and experts. A whole checkpoint has a talker and a vocoder
(`talker.*`, `token2wav.*`, `code2wav.*`) behind it, which speak what the thinker writes. They are
not read, and an export copies them as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmjax.config import (
    AudioConfig,
    ConnectorConfig,
    ModelConfig,
    Sinusoids,
    VisionConfig,
)
from mmjax.errors import UserError
from mmjax.hf import qwen_vl
from mmjax.hf.audio import encoder_of, encoder_parts
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import Layout, TensorNames, linear

FAMILIES = {
    "qwen2_5_omni": qwen_vl.FAMILIES["qwen2_5_vl"],
    "qwen3_omni_moe": replace(
        qwen_vl.FAMILIES["qwen3_vl_moe"], fixed=qwen_vl.NO_WINDOWS, videos=qwen_vl.QWEN2_VIDEO
    ),
}
THINKER = "_thinker"  # what the type of a thinker alone ends with
KINDS = (*FAMILIES, *(f"{family}{THINKER}" for family in FAMILIES))
AUDIO = "audio"  # the name of the encoder
AUDIO_FIRST = (
    "model.audio_tower.",
    "audio_tower.",
    "thinker.model.audio_tower.",
    "thinker.audio_tower.",
)
SPEAKERS = ("talker.", "token2wav.", "code2wav.")
CHUNK_POSITIONS = 13  # that transformers counts of a chunk of Qwen3-Omni's, whatever its frames


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The thinker that a config says: "llm" and the encoders "vision" and "audio".

    Raises UserError for a field that is missing or not supported.
    """
    kind = fields.get("model_type", str)
    family = kind.removesuffix(THINKER)
    thinker = fields if kind.endswith(THINKER) else fields.inner("thinker_config")
    model = qwen_vl.read_family(folder, thinker, FAMILIES[family])
    vision = model.encoders[qwen_vl.NAME]
    per_second = thinker.get("position_id_per_seconds", int)
    videos = replace(
        vision.videos, tokens_per_second=float(per_second), seconds="nominal", text_after="time"
    )
    if family == "qwen2_5_omni":
        chunk = int(per_second * thinker.get("seconds_per_chunk", float))
        videos = replace(videos, sound_chunk=chunk)
        audio = _whisper_in_chunks(folder, thinker.inner("audio_config"), model.llm.width)
    else:
        videos = replace(videos, turns="patches")
        audio = convolved_chunks(folder, thinker.inner("audio_config"), model.llm.width)
    return replace(model, encoders={qwen_vl.NAME: replace(vision, videos=videos), AUDIO: audio})


def _whisper_in_chunks(folder: HfFolder, fields: Fields, outputs: int) -> AudioConfig:
    _check_outputs(fields, outputs)
    half = fields.get("n_window", int)
    table = fields.get("max_source_positions", int)
    if not 1 <= half <= table:
        raise UserError(
            f"{fields.where}: n_window={half}, but there are positions 1 to max_source_positions={table}"
        )
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    return replace(
        encoder_of(folder, fields), positions=Sinusoids(), chunk=2 * half, connector=connector
    )


def convolved_chunks(
    folder: HfFolder, fields: Fields, outputs: int, table: str = "max_source_positions"
) -> AudioConfig:
    """Read Qwen3-Omni's encoder. Clips are not padded with silence, so each ends with its own mirror image.

    table: the field that says of how many positions of a chunk there are sinusoids.
    """
    _check_outputs(fields, outputs)
    half = fields.size("n_window")
    attended = fields.get("n_window_infer", int)
    plain = encoder_of(folder, fields)
    encoder = replace(
        plain,
        clips=replace(plain.clips, end="mirror"),
        positions=Sinusoids(),
        pool=1,
        chunk=2 * half,
        stem_width=fields.size("downsample_hidden_size"),
        attended_chunks=attended // (2 * half),
        key_bias=True,
        connector=ConnectorConfig(
            merge=1, mlp_width=plain.width, norm="none", activation=plain.activation
        ),
    )
    if encoder.chunk_positions != CHUNK_POSITIONS:
        raise UserError(
            f"{fields.where}: n_window={half}: only chunks of {CHUNK_POSITIONS} positions are known, 49 to 52"
        )
    if not encoder.attended_chunks:
        raise UserError(
            f"{fields.where}: n_window_infer={attended} is less than a chunk of {2 * half} frames"
        )
    if (known := fields.get(table, int)) < CHUNK_POSITIONS:
        raise UserError(
            f"{fields.where}: {table}={known}, but a chunk has {CHUNK_POSITIONS} positions"
        )
    return encoder


def _check_outputs(fields: Fields, outputs: int) -> None:
    if (width := fields.get("output_dim", int)) != outputs:
        raise UserError(
            f"{fields.where}: output_dim={width}, but the text's hidden_size is {outputs}"
        )


# --------------------------------------------------------------------------------------------------
# tensors


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of the thinker. Says so where there are others, which are not read."""
    tower = next((p for p in AUDIO_FIRST if f"{p}ln_post.weight" in folder.tensors), None)
    if tower is None:
        raise UserError(
            f"{folder.path} has no audio encoder: no tensor is called [...]audio_tower.ln_post.weight"
        )
    if speakers := [
        first for first in SPEAKERS if any(key.startswith(first) for key in folder.tensors)
    ]:
        listed = ", ".join(f"{first}*" for first in speakers)
        note(
            f"{folder.path}: {listed} (which speak the answers) are not read; an export copies them as they are"
        )
    thinker = qwen_vl.layout(folder, model)
    name = next((name for name, e in model.encoders.items() if _from(folder, e)), AUDIO)
    projector = f"{tower}proj"
    tensors = tuple(
        key for key in folder.tensors if key.startswith(tower) and not key.startswith(projector)
    )
    connector = {"linear": linear(projector)}
    if f"{projector}1.weight" in folder.tensors:
        connector = {"mlp.up": linear(f"{projector}1"), "mlp.down": linear(f"{projector}2")}
    parts = {name: encoder_parts(folder, tower), f"{name}.connector": TensorNames(connector)}
    prefixes = {name: tensors, f"{name}.connector": (projector,)}
    unused = (f"{tower}audio_bos_eos_token.weight", *(f"{first}*" for first in SPEAKERS))
    return Layout(
        {**thinker.modules, **parts}, {**thinker.prefixes, **prefixes}, (*thinker.unused, *unused)
    )


def _from(folder: HfFolder, encoder: AudioConfig | VisionConfig) -> bool:
    weights = encoder.weights or encoder.connector.weights
    return (
        encoder.modality == "audio" and bool(weights) and Path(weights).expanduser() == folder.path
    )
