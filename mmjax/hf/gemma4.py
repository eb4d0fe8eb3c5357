"""Gemma 4 with its towers: its text is read; what sees and hears is left as it is."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ModelConfig
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import Layout

LEFT = tuple(
    f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The LLM of a Gemma 4 checkpoint, which is trained on texts. Raises UserError for a text of another family."""
    text = fields.inner("text_config")
    text.allow_only("model_type", "gemma4_text")
    note(
        f"{fields.where}: images, videos and clips are not supported, its text is read alone; an export copies the "
        "towers as they are"
    )
    return ModelConfig(decoder_of(text, tables_are_tied(fields)))


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of the text; those of the towers are left alone."""
    whole = decoder_layout(folder, model)
    return replace(whole, unused=(*whole.unused, *(f"{part}*" for part in LEFT)))
