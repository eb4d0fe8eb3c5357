"""Gemma 4 with its towers: texts and images are read; what hears, and sees videos, is left as it is."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, DecoderConfig, ModelConfig, PatchBudget, VisionConfig
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder, note
from mmjax.hf.layout import Layout, TensorNames, TensorSlice, linear
from mmjax.hf.llava import whole_layout
from mmjax.hf.vision import vision_of, with_images

PROJECTOR = "model.embed_vision."
STANDARD = "model.vision_tower.std_"  # what a tower's numbers of every channel begin with
LEFT = ("model.audio_tower.*", "model.embed_audio.*")  # without images also those of its tower


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that reads images and texts of a Gemma 4. Raises UserError for a text of another family."""
    text = fields.inner("text_config")
    text.allow_only("model_type", "gemma4_text")
    llm = decoder_of(text, tables_are_tied(fields))
    note(
        f"{fields.where}: videos and clips are not supported; an export copies their towers as they are"
    )
    if fields.values.get("vision_config") is None:
        return ModelConfig(llm)
    vision = _vision(folder, fields.inner("vision_config"))
    if text.values.get("use_bidirectional_attention") == "vision":
        _check_window(fields, llm, vision)
        llm = replace(llm, items="in_windows")
    return ModelConfig(llm, {"vision": vision})


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


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of texts and images; those of clips are left alone."""
    if not model.encoders:
        whole = decoder_layout(folder, model)
        tower = ("model.vision_tower.*", f"{PROJECTOR}*")
        return replace(whole, unused=(*whole.unused, *LEFT, *tower))
    parts = {
        "standardization": {name: TensorSlice(f"{STANDARD}{name}") for name in ("bias", "scale")},
        "linear": linear(f"{PROJECTOR}embedding_projection"),
    }
    whole = whole_layout(folder, model, TensorNames(parts), PROJECTOR, STANDARD)
    return replace(whole, unused=(*whole.unused, *LEFT))
