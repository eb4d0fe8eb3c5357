"""Qwen3-ASR, Voxtral and GLM-ASR: an encoder of clips of any length, a projector of two layers, a decoder."""

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
GLM_MERGE = 4  # positions of a token, which its class counts whatever its config says


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


def read_merged(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a Voxtral or a GLM-ASR says: an encoder, so many positions of which are one token.

    Raises UserError where the positions of a window are no whole tokens.
    """
    is_glm = fields.get("model_type", str) == "glmasr"
    llm = text_of(fields)
    audio = encoder_of(folder, fields)
    merge, rest = divmod(audio.mlp_width, audio.width)
    positions = audio.clips.window_frames // audio.stride
    if rest or not merge or positions % merge or (is_glm and merge != GLM_MERGE):
        known = f"{GLM_MERGE} times hidden_size" if is_glm else "a multiple of hidden_size"
        raise UserError(
            f"{fields.where}: audio_config: intermediate_size={audio.mlp_width} is a token's width, which must be "
            f"{known} ({audio.width}), and the {positions} positions of a window whole tokens"
        )
    connector = ConnectorConfig(
        merge=merge,
        mlp_width=2 * llm.width if is_glm else llm.width,
        norm="none",
        activation=fields.choice("projector_hidden_act", ACTIVATIONS),
        biases=("up", "down") if is_glm else (),
    )
    return ModelConfig(llm, {AUDIO: replace(audio, connector=connector)})
