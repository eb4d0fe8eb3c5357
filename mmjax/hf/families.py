"""Read a model's config from a Hugging Face folder, and locate the tensors of each of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmjax.config import DecoderConfig, Encoder, ModelConfig
from mmjax.config.codec import did_you_mean
from mmjax.config.model import module_names
from mmjax.errors import UserError
from mmjax.hf import (
    audio,
    cohere,
    cosmos,
    decoders,
    deepseek_ocr,
    gemma3,
    gemma4,
    glm4v,
    gpt,
    idefics3,
    internvl,
    kimi,
    lfm2_vl,
    llama4,
    llava,
    minicpm,
    mistral3,
    muse,
    paddleocr,
    paligemma,
    qwen_omni,
    qwen_vl,
    speech,
    vision,
)
from mmjax.hf.class_defaults import multimodal_classes
from mmjax.hf.decoder_tensors import decoder_layout, embedding_of, find_decoder
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import CLASS_NAME, Fields, HfFolder
from mmjax.hf.generators import generator_layout
from mmjax.hf.layout import Layout
from mmjax.hf.writing import ModuleNames
from mmjax.hub import checkpoint_folder

ROWS = 4096  # of the tables of the vocabulary that are compared at a time


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one kind: the model that a config says, where its tensors lie, and the encoder that it says."""

    read: Callable[[HfFolder, Fields], ModelConfig] | None  # None: there is no decoder
    layout: Callable[[HfFolder, ModelConfig], Layout]
    encoder: Callable[[HfFolder, Fields], Encoder] | None = None  # to be had alone
    # Where the class that loads a checkpoint has the module of a tensor: by the tensor's name, or
    # where wrapping classes have moved their parts since.
    modules: ModuleNames = "wrapped"


def _decoder(folder: HfFolder, fields: Fields) -> ModelConfig:
    # Of text alone all three coordinates of a position are one number, so that sections change
    # nothing.
    return ModelConfig(replace(decoder_of(fields), rope_sections=(), rope_interleaved=False))


CHECKPOINTS = {
    **dict.fromkeys(
        (*decoders.FAMILIES, *gpt.FAMILIES),
        Checkpoints(_decoder, decoder_layout, modules="decoder"),
    ),
    **dict.fromkeys(llava.FAMILIES, Checkpoints(llava.read, llava.layout)),
    **dict.fromkeys(glm4v.FAMILIES, Checkpoints(glm4v.read, glm4v.layout)),
    **dict.fromkeys(
        idefics3.FAMILIES, Checkpoints(idefics3.read, idefics3.layout, modules="named")
    ),
    "llama4": Checkpoints(llama4.read, llama4.layout, modules="named"),
    "lfm2_vl": Checkpoints(lfm2_vl.read, lfm2_vl.layout),
    "deepseek_ocr2": Checkpoints(deepseek_ocr.read, deepseek_ocr.layout),
    "deepseek_vl": Checkpoints(llava.read_deepseek, llava.deepseek_layout, modules="named"),
    "janus": Checkpoints(llava.read_janus, llava.janus_layout, modules="named"),
    "video_llama_3": Checkpoints(llava.read_video_llama, llava.video_llama_layout, modules="named"),
    **dict.fromkeys(minicpm.FAMILIES, Checkpoints(minicpm.read, minicpm.layout, modules="named")),
    "mistral3": Checkpoints(mistral3.read, mistral3.layout),
    "lighton_ocr": Checkpoints(mistral3.read_lighton, mistral3.layout, modules="named"),
    **dict.fromkeys(gemma3.FAMILIES, Checkpoints(gemma3.read, gemma3.layout)),
    "gemma4": Checkpoints(gemma4.read, gemma4.layout, modules="named"),
    "gemma4_unified": Checkpoints(gemma4.read, gemma4.unified_layout, modules="unified"),
    "paddleocr_vl": Checkpoints(paddleocr.read, paddleocr.layout),
    "kimi_k25": Checkpoints(kimi.read, kimi.layout),
    "muse_glimmer": Checkpoints(muse.read, muse.layout, modules="named"),
    "paligemma": Checkpoints(paligemma.read, paligemma.layout),
    "internvl": Checkpoints(internvl.read, internvl.layout),
    **dict.fromkeys(cohere.FAMILIES, Checkpoints(cohere.read, cohere.layout)),
    "internvl_chat": Checkpoints(internvl.read_chat, internvl.layout_chat, modules="named"),
    **dict.fromkeys(
        qwen_vl.FAMILIES, Checkpoints(qwen_vl.read, qwen_vl.layout, qwen_vl.encoder_of)
    ),
    "cosmos3_omni": Checkpoints(qwen_vl.read, cosmos.layout, qwen_vl.encoder_of),
    **dict.fromkeys(qwen_omni.KINDS, Checkpoints(qwen_omni.read, qwen_omni.layout)),
    **dict.fromkeys(
        vision.ALONE, Checkpoints(None, vision.encoder_layout, vision.encoder_of, "named")
    ),
    "qwen2_audio": Checkpoints(audio.read, audio.layout, audio.encoder_of),
    "qwen3_asr": Checkpoints(speech.read_qwen3_asr, audio.layout),
    **dict.fromkeys(
        ("voxtral", "glmasr"), Checkpoints(speech.read_merged, audio.layout, audio.encoder_of)
    ),
    "qwen2_audio_encoder": Checkpoints(None, audio.encoder_layout, audio.encoder_of, "named"),
    "whisper": Checkpoints(None, audio.encoder_layout, audio.encoder_of, "named"),
}


def from_hf(folder: str | Path, freeze: Sequence[str] = ()) -> ModelConfig:
    """The model of a Hugging Face folder, whose weights it will start from: the whole model section of a config.

    folder: may be a name on the Hub (`mmjax.hub`); the model then names the folder in the cache.
    freeze: modules that are not trained: "llm", an encoder's name, "<encoder>.connector". Raises
    UserError for a folder, family or field that cannot be read, naming it.
    """
    opened = HfFolder.open(checkpoint_folder(folder).absolute())
    kind = _kind(opened)
    if kind.read is None:
        raise UserError(
            f"{opened.path} has an encoder, and no decoder that can be read; see encoder_from_hf"
        )
    model = kind.read(opened, opened.fields)
    model = replace(model, llm=replace(model.llm, tied=_tied(opened, model.llm)))
    return frozen(_from(model, str(opened.path)), freeze)


def encoder_from_hf(folder: str | Path) -> Encoder:
    """The encoder of a Hugging Face folder, whose weights it will start from, with a connector that starts at random.

    Of a CLIP or SigLIP tower, whose last layer was trained for another end, all layers but that
    one. Raises UserError for a folder, family or field that cannot be read, naming it.
    """
    opened = HfFolder.open(checkpoint_folder(folder).absolute())
    encoder = _kind(opened).encoder
    if encoder is None:
        known = ", ".join(name for name, kind in CHECKPOINTS.items() if kind.encoder)
        raise UserError(
            f"{opened.path} has no encoder that can be read alone; known are those of {known}"
        )
    return replace(encoder(opened, opened.fields), weights=str(opened.path))


def compose(
    encoders: Mapping[str, Encoder], language_model: ModelConfig, freeze: Sequence[str] = ()
) -> ModelConfig:
    """Encoders and an LLM that were trained apart, as one model (Cornstarch's MultimodalModule, 5.1).

    Connectors without weights are new: as wide inside as the LLM where they do not say. freeze: as
    in `from_hf`.
    """
    width = language_model.llm.width
    fitted = {
        name: e
        if e.connector.weights
        else replace(e, connector=replace(e.connector, mlp_width=width))
        for name, e in encoders.items()
    }
    return frozen(replace(language_model, encoders={**language_model.encoders, **fitted}), freeze)


def layout_of(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the modules that this model takes from a folder."""
    if CLASS_NAME in folder.config:
        return generator_layout(folder, model)
    return _kind(folder).layout(folder, model)


def module_names_of(folder: HfFolder) -> ModuleNames:
    """Say how the class that loads a folder names its modules, for adapters beside it."""
    return "named" if CLASS_NAME in folder.config else _kind(folder).modules


def frozen(model: ModelConfig, freeze: Sequence[str]) -> ModelConfig:
    """The model with these modules, and no others, frozen. Raises UserError for a module that it does not have."""
    modules = module_names(model)
    for name in freeze:
        if name not in modules:
            raise UserError(f"freeze: there is no module {name!r}{did_you_mean(name, modules)}")
    encoders = {
        name: replace(
            e,
            frozen=name in freeze,
            connector=replace(e.connector, frozen=f"{name}.connector" in freeze),
        )
        for name, e in model.encoders.items()
    }
    return replace(model, llm=replace(model.llm, frozen="llm" in freeze), encoders=encoders)


def _kind(folder: HfFolder) -> Checkpoints:
    kind = folder.fields.get("model_type", str)
    if kind not in CHECKPOINTS:
        known = ", ".join(CHECKPOINTS)
        if there := multimodal_classes().get(kind):
            known = f"the nearest to {there['class']} is {there['nearest']}; all: {known}"
        raise UserError(
            f"{folder.fields.where}: model_type={kind!r} cannot be read; known: {known}"
        )
    return CHECKPOINTS[kind]


def _from(model: ModelConfig, folder: str) -> ModelConfig:
    """The model with this folder's weights in every module."""
    encoders = {
        name: replace(e, weights=folder, connector=replace(e.connector, weights=folder))
        for name, e in model.encoders.items()
    }
    return replace(model, llm=replace(model.llm, weights=folder), encoders=encoders)


def _tied(folder: HfFolder, llm: DecoderConfig) -> bool:
    """Return whether the tables are one. Where a config says so and both are stored and differ, they are not.

    Checkpoints of before transformers kept them apart (Qwen2-Audio) lack the second, and their text
    config says so.
    """
    text = folder.config.get("text_config")
    says_so = isinstance(text, dict) and text.get("tie_word_embeddings") is True
    if not (folder.has_weights and (llm.tied or says_so)):
        return llm.tied
    inner, output = find_decoder(folder)
    first, second = embedding_of(folder, inner), f"{output}.weight"
    if second not in folder.tensors:
        return True
    if not llm.tied:
        return False
    if folder.stored(first).shape != folder.stored(second).shape:
        return False
    # Some rows at a time: a whole table can be gigabytes.
    starts = range(0, folder.stored(first).shape[0], ROWS)
    parts = (
        (folder.read(key, slice(row, row + ROWS)) for key in (first, second)) for row in starts
    )
    return all(np.array_equal(*pair) for pair in parts)
