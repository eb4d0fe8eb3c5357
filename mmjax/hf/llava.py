"""LLaVA-1.5: a CLIP or SigLIP tower, an MLP on each of its patches, a decoder."""

from __future__ import annotations

from mmjax.config import ConnectorConfig, DecoderConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.decoders import ACTIVATIONS, decoder_of, decoder_parts, find_decoder
from mmjax.hf.fields import Fields
from mmjax.hf.folder import HfFolder
from mmjax.hf.layout import Layout
from mmjax.hf.parts import Parts, linear
from mmjax.hf.vision import find_tower, kind_of, unused_in, vision_of, vision_parts, with_images

PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.")
CLIP_L = {  # the tower that the config's class documents as its default
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a LLaVA config says."""
    llm = text_of(fields, "llama")
    layer = fields.get("vision_feature_layer", (int, list), -2)
    if isinstance(layer, list):
        raise UserError(f"{fields.where}: vision_feature_layer={layer} names several layers, which is not supported")
    biased = fields.get("multimodal_projector_bias", bool, True)
    connector = ConnectorConfig(
        merge=1,
        mlp_width=llm.width,
        norm="none",
        activation=fields.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        biases=("up", "down") if biased else (),
    )
    vision = vision_of(tower_fields(fields, CLIP_L), layer, False, connector)
    if vision.class_token:
        fields.refuse("vision_feature_select_strategy", "default")
    elif fields.get("vision_feature_select_strategy", str, "default") == "default":
        raise UserError(
            f"{fields.where}: vision_feature_select_strategy='default' drops the first patch of a tower without class "
            "token, which is not supported; say 'full'"
        )
    return ModelConfig(llm, {"vision": with_images(folder, vision)})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Where a LLaVA checkpoint's tensors lie."""
    projector = next((p for p in PROJECTORS if f"{p}linear_1.weight" in folder.tensors), PROJECTORS[-1])
    connector = {"mlp.up": linear(f"{projector}linear_1"), "mlp.down": linear(f"{projector}linear_2")}
    kind = kind_of(tower_fields(Fields(folder.config, str(folder.path / "config.json")), CLIP_L))
    return whole_layout(folder, model, kind, Parts(connector), projector)


def text_of(fields: Fields, kind: str) -> DecoderConfig:
    """The decoder of a config with a `text_config`, whose kind is by default this one.

    Its tables are one where either says so.
    """
    given = fields.get("text_config", dict, {})
    text = Fields({"model_type": kind, **given}, f"{fields.where}: text_config")
    tied = fields.get("tie_word_embeddings", bool, False) or text.get("tie_word_embeddings", bool, False)
    return decoder_of(text, tied)


def tower_fields(fields: Fields, default: dict[str, object]) -> Fields:
    """The `vision_config`; the class's default where there is none."""
    given = fields.get("vision_config", dict, {})
    same = given.get("model_type", default.get("model_type")) == default.get("model_type")
    return Fields((default if same else {}) | given, f"{fields.where}: vision_config")


def whole_layout(folder: HfFolder, model: ModelConfig, kind: str, connector: Parts, projector: str) -> Layout:
    """The layout of a checkpoint of one vision tower, a projector and a decoder."""
    inner, output = find_decoder(folder)
    vision, tower = model.encoders["vision"], find_tower(folder, kind)
    tables = (f"{output}.weight",) if model.llm.tied else ()
    return Layout(
        {
            "llm": decoder_parts(model.llm, inner, output),
            "vision": vision_parts(vision, kind, tower),
            "vision.connector": connector,
        },
        {"llm": (inner, output), "vision": (tower,), "vision.connector": (projector,)},
        tables + unused_in(vision, kind, tower),
    )
