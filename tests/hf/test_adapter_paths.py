"""Adapters go by the modules that transformers makes of a checkpoint, however old its names."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import drawn
import numpy as np
import peft
import pytest
import torch
import transformers
from omni_families import FAMILIES as OMNI
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from mmjax.config import DecoderConfig, ModelConfig
from mmjax.hf.families import CHECKPOINTS, encoder_from_hf, from_hf, layout_of, module_names_of
from mmjax.hf.folder import HfFolder
from mmjax.hf.layout import TRANSPOSED
from mmjax.hf.writing import module_path

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
CLIP, SIGLIP = ({"model_type": f"{kind}_vision_model", **SIZES} for kind in ("clip", "siglip"))
PIXTRAL = {"model_type": "pixtral", **SIZES}
SPEECH = {
    "decoder_layers": 1,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 1,
    "vocab_size": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# classes that transformers has not
NOT_THERE = ("internlm2", "internvl_chat", "evaclip", "evaclip_vision_model")


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def around(
    kind: str, tower: dict, text: dict = TEXT, **own: object
) -> transformers.PreTrainedConfig:
    """Make the config of a class around a tower and a text."""
    made = transformers.AutoConfig.for_model(
        kind, vision_config=dict(tower), text_config=dict(text), **own
    )
    made.image_token_id = 5
    return made


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    **{name: lambda name=name: drawn.decoder(rng(), name.removesuffix("_text") if name == "gemma3_text" else name)
       for name in ("gemma3_text", *(name for name in drawn.DECODERS if name != "gemma3"))},
    "llava": lambda: around("llava", CLIP),
    "llava_next": lambda: around("llava_next", CLIP),
    "llava_next_video": lambda: around("llava_next_video", CLIP, video_token_index=6),
    "llava_onevision": lambda: around("llava_onevision", SIGLIP, video_token_index=6),
    "glm4v": lambda: drawn.glm4v(rng(), "glm4v", image_token_id=5),
    "glm46v": lambda: drawn.glm4v(rng(), "glm46v", image_token_id=5),
    "glmga": lambda: drawn.glm4v(rng(), "glmga", image_token_id=5),
    "glm4v_moe": lambda: drawn.glm4v(rng(), "glm4v_moe", image_token_id=5),
    "glm_ocr": lambda: drawn.glm4v(rng(), "glm_ocr", image_token_id=5),
    "idefics3": lambda: around("idefics3", SIZES, TEXT | {"model_type": "llama"}),
    "smolvlm": lambda: around("smolvlm", SIZES, TEXT | {"model_type": "llama"}),
    "mistral3": lambda: around("mistral3", PIXTRAL, TEXT | {"model_type": "mistral"}),
    "lighton_ocr": lambda: drawn.lighton_ocr(rng(), image_token_id=5),
    "kimi_k25": lambda: drawn.kimi_k25(rng(), image_token_id=5),
    "muse_glimmer": lambda: drawn.muse_glimmer(rng(), image_token_id=5, video_token_id=6),
    "deepseek_vl": lambda: drawn.deepseek_vl(rng(), image_token_id=5),
    "deepseek_ocr2": lambda: drawn.deepseek_ocr2(rng(), image_token_id=5),
    "paddleocr_vl": lambda: drawn.paddleocr_vl(rng(), image_token_id=5),
    "video_llama_3": lambda: drawn.video_llama_3(rng(), 64, image_token_id=5),
    **{name: lambda name=name: drawn.minicpm(rng(), name, 64, image_token_id=5, video_token_id=6)
       for name in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")},
    "lfm2_vl": lambda: drawn.lfm2_vl(rng(), image_token_id=5),
    "llama4": lambda: drawn.llama4(rng(), image_token_index=5),
    "janus": lambda: drawn.janus(rng(), image_token_id=5),
    "gemma3": lambda: drawn.gemma3(rng(), image_token_index=5),
    "gemma4": lambda: drawn.gemma4(rng(), image_token_id=5, video_token_id=6, audio_token_id=7),
    "gemma4_unified": lambda: drawn.gemma4_unified(rng(), image_token_id=5, video_token_id=6, audio_token_id=7),
    "shieldgemma2": lambda: drawn.shieldgemma2(rng(), image_token_index=5),
    "paligemma": lambda: drawn.paligemma(rng(), image_token_index=5),
    "video_llava": lambda: around("video_llava", CLIP, video_token_index=6),
    "vipllava": lambda: around("vipllava", CLIP, vision_feature_layer=[-1, 1]),
    "internvl": lambda: around("internvl", SIZES),
    **{name: lambda name=name: drawn.cohere_vision(rng(), name, image_token_id=5)
       for name in ("aya_vision", "cohere2_vision")},
    **{name: lambda name=name: getattr(drawn, name)(rng())
       for name in ("qwen2_vl", "qwen2_5_vl", "exaone4_5", "qwen3_vl", "cosmos3_omni", "qwen3_5", "qwen3_vl_moe",
                    "qwen3_5_moe")},
    "hyperclovax_vision_v2": lambda: drawn.hyperclovax(rng()),
    **{f"{name}_thinker": lambda name=name: OMNI[name].draw(rng()) for name in OMNI},
    **{name: lambda name=name: OMNI[name].whole[1](thinker_config=OMNI[name].draw(rng()).to_dict(),
                                                   enable_audio_output=False) for name in OMNI},
    "clip": lambda: around("clip", CLIP, SIZES | {"vocab_size": 64}),
    "clip_vision_model": lambda: transformers.CLIPVisionConfig(**SIZES),
    "siglip": lambda: around("siglip", SIGLIP, SIZES | {"vocab_size": 64}),
    "siglip_vision_model": lambda: transformers.SiglipVisionConfig(**SIZES),
    "pixtral": lambda: drawn.pixtral_tower(rng()),
    "internvl_vision": lambda: transformers.AutoConfig.for_model("internvl_vision", **SIZES),
    "dinov2": lambda: drawn.dinov2_tower(rng()),
    "dinov2_with_registers": lambda: drawn.dinov2_tower(rng(), registers=True),
    "qwen2_audio": lambda: transformers.Qwen2AudioConfig(audio_config=drawn.audio_tower(rng()), text_config=TEXT),
    "qwen3_asr": lambda: drawn.qwen3_asr(rng()),
    "voxtral": lambda: drawn.voxtral(rng(), audio_token_id=5),
    "glmasr": lambda: drawn.glmasr(rng(), audio_token_id=5),
    "qwen2_audio_encoder": lambda: transformers.Qwen2AudioEncoderConfig(**drawn.audio_tower(rng())),
    "whisper": lambda: transformers.WhisperConfig(**drawn.audio_tower(rng()) | SPEECH | TOKENS),
}  # fmt: skip
CLASSES = {
    "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
    "glmasr": transformers.GlmAsrForConditionalGeneration,
    "voxtral": transformers.VoxtralForConditionalGeneration,
    "qwen3_asr": transformers.Qwen3ASRForConditionalGeneration,
    "qwen2_audio_encoder": transformers.Qwen2AudioEncoder,
    "whisper": transformers.WhisperForConditionalGeneration,
    **{f"{name}_thinker": family.thinker for name, family in OMNI.items()},
    **{name: family.whole[0] for name, family in OMNI.items()},
}


def class_of(config: transformers.PreTrainedConfig) -> type:
    """Find the class that loads such a checkpoint."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise AssertionError(config.model_type)


def adaptable(folder: HfFolder, model: ModelConfig) -> list[str]:
    """Name the tensors of the layers that may have adapters, or be trained whole beside them."""
    leaves = [
        parts["weight"]
        for names in layout_of(folder, model).modules.values()
        for path, parts in names.by_module.items()
        if "weight" in parts and not path.endswith("router")
    ]
    patterns = [
        leaf.key for leaf in leaves if leaf.order == TRANSPOSED and not (leaf.rows or leaf.experts)
    ]
    return [key for key in folder.tensors for pattern in patterns if fnmatchcase(key, pattern)]


def test_the_paths_of_every_family_are_checked():
    assert set(CONFIGS) == set(CHECKPOINTS) - set(NOT_THERE)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_linear_layer_has_the_path_of_its_module(family: str, tmp_path: Path):
    config = CONFIGS[family]()
    there = CLASSES.get(family) or class_of(config)
    model = there(config)
    model.save_pretrained(tmp_path)
    if CHECKPOINTS[family].read:
        ours = from_hf(tmp_path)
    else:
        ours = ModelConfig(
            DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9), {"eyes": encoder_from_hf(tmp_path)}
        )
    folder = HfFolder.open(tmp_path)
    keys = adaptable(folder, ours)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert keys or family == "gpt2"  # whose matrices are no linear layers there
    paths = {module_path(key, module_names_of(folder)) for key in keys}
    assert paths <= linear
    if family in ("smolvlm", "qwen2_5_omni"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(paths)))
        assert sum(name.endswith("lora_A") for name, _ in adapted.named_modules()) == len(paths)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
            "model.vision_tower.encoder.layers.0.mlp.fc1",
        ),
        ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("visual.blocks.0.attn.proj", "model.visual.blocks.0.attn.proj"),
        ("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_old_names_are_known(key, path):
    assert module_path(f"{key}.weight", "wrapped") == path
    assert module_path(f"{key}.weight", "named") == key
