"""Speech models: an encoder of clips of any length, a projector of two layers, a decoder. Qwen3-ASR."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ModelConfig
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.llava import text_of
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
