"""Qwen3-ASR and Voxtral: an encoder of clips of any length, a projector of two layers, a decoder."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.audio import encoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.llava import text_of
from mmjax.hf.names import ACTIVATIONS
from mmjax.hf.qwen_omni import AUDIO, convolved_chunks

ALIGNER = "Qwen3ASRForTokenClassification"


def read_qwen3_asr(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a Qwen3-ASR says: Qwen3-Omni's encoder, whose chunks are all padded to one size.

    Raises UserError for its forced aligner, which classifies tokens, and for Qwen's own layout.
    """
    if ALIGNER in fields.get("architectures", list[str], []):
        raise UserError(
            f"{fields.where}: architectures={ALIGNER} (forced alignment) is not supported; known: "
            "Qwen3ASRForConditionalGeneration"
        )
    if "thinker_config" in fields.values:
        raise UserError(
            f"{fields.where}: thinker_config is of Qwen's own layout; take the checkpoint of that name with -hf"
        )
    llm = text_of(fields)
    audio = convolved_chunks(
        folder, fields.inner("audio_config"), llm.width, "max_position_embeddings"
    )
    clips = replace(audio.clips, longer="whole")
    return ModelConfig(llm, {AUDIO: replace(audio, clips=clips, padded_chunks=True)})


def read_voxtral(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a Voxtral says: Whisper's encoder, so many positions of which are one token.

    Raises UserError where the positions of a window are no whole tokens.
    """
    llm = text_of(fields)
    audio = encoder_of(folder, fields)
    merge, rest = divmod(audio.mlp_width, audio.width)
    if rest or not merge or audio.chunk_positions % merge:
        raise UserError(
            f"{fields.where}: audio_config: intermediate_size={audio.mlp_width} is a token's width, and "
            f"max_source_positions={audio.chunk_positions} of {audio.width} channels are no whole tokens"
        )
    connector = ConnectorConfig(
        merge=merge,
        mlp_width=llm.width,
        norm="none",
        activation=fields.choice("projector_hidden_act", ACTIVATIONS),
        biases=(),
    )
    return ModelConfig(llm, {AUDIO: replace(audio, connector=connector)})
