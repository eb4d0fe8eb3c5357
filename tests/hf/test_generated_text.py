"""Many prompts answered at once are what transformers writes after each of them alone, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import drawn
import jax
import numpy as np
import pytest
import test_any_res
import test_gemma4
import test_gemma4_unified
import test_glm4v
import test_kimi
import test_minicpm
import test_muse
import test_paddleocr
import test_pixtral
import test_qwen_vl
import test_video_llama
import torch
import transformers
from parity import loaded, random_model
from parity_samples import Given, Part, given, is_text
from test_any_res import NEXT, ONEVISION, inputs, processor_of, saved
from test_audio_towers import AUDIO_TOKEN, HOP, clip, features_there, qwen2_audio, words
from test_decoders import COMMON, random_decoder
from test_qwen_vl import (
    GRIDS,
    inputs_of,
    qwen2_5,
    qwen3,
    qwen3_5,
    qwen3_vl_moe,
    random_whole,
    samples_of,
)
from test_vision_language import IMAGE, LLAMA, MEAN, QWEN2, SIDE, STD, TOWER, VOCAB, samples, save

from mmjax.config import MeshConfig
from mmjax.hf.families import from_hf
from mmjax.inference.generator import Answer, Generator
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.devices import CompileCounter

DEFAULT_MAX_TOKENS = 7
Inputs = Callable[[Sequence[Part]], dict[str, Any]]  # of transformers' model, for one prompt


def answered(
    folder,
    prompts: Sequence[Sequence[Part]],
    ends: Sequence[int],
    written: Mapping[str, Sequence[int]] | None = None,
) -> list[Answer]:
    model, params, config = loaded(folder)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    generator = Generator(
        model,
        mesh,
        ShardingRules(),
        ends,
        lambda tokens: " ".join(map(str, tokens)),
        max_tokens=DEFAULT_MAX_TOKENS,
    )
    return generator.answers(params, replace(given(config, prompts, written), trained="none"))


def written_there(model: torch.nn.Module, inputs: dict[str, Any]) -> list[int]:
    ids = inputs["input_ids"]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    given = {"attention_mask": torch.ones_like(ids)} | inputs
    with torch.no_grad():
        return model.generate(**given, do_sample=False, max_new_tokens=DEFAULT_MAX_TOKENS)[
            0, ids.shape[1] :
        ].tolist()


def check(
    model: torch.nn.Module,
    folder,
    prompts: Sequence[Sequence[Part]],
    inputs: Inputs,
    written: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Tokens of two answers end them all: what is written is what is there up to the first such token.

    written: tokens of the texts between an image's.
    """
    there = [written_there(model, inputs(prompt)) for prompt in prompts]
    ends = [there[0][2], there[-1][4]]
    stop = [
        next((k + 1 for k, token in enumerate(tokens) if token in ends), DEFAULT_MAX_TOKENS)
        for tokens in there
    ]
    here = answered(folder, prompts, ends, written)
    assert [list(a.tokens) for a in here] == [
        tokens[:n] for tokens, n in zip(there, stop, strict=True)
    ]
    assert [a.ended for a in here] == [
        tokens[n - 1] in ends for tokens, n in zip(there, stop, strict=True)
    ]
    assert len({a.tokens for a in here}) > 1


def text_last(prompts: Sequence[Sequence[Part]]) -> list[Sequence[Part]]:
    """End prompts with text: behind a final image transformers' own loop takes the first token for more of it."""
    return [prompt if is_text(prompt[-1]) else [*prompt, np.array([7, 8])] for prompt in prompts]


def token_ids(prompt: Sequence[Part]) -> dict[str, Any]:
    return {"input_ids": torch.tensor(np.concatenate(prompt))[None].long()}


def texts(vocab: int) -> list[list[Part]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(1, vocab, n)] for n in (14, 7, 11, 1, 3, 15)]


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG |= {
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
}
LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "kv_lora_rank": 14,
    "q_lora_rank": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "pad_token_id": 0,
}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 6,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LLAMA4 = {
    "attention_chunk_size": 6,
    "no_rope_layer_interval": 2,
    "floor_scale": 3,
    "attn_scale": 0.5,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 40,
    "head_dim": 12,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LOCAL = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": [*LOCAL, *LOCAL],
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 97,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


@pytest.mark.default_cases(
    "gemma2",
    "llama longrope",
    "llama dynamic",
    "opt",
    "gemma3",
    "gemma4",
    "cohere2",
    "mistral4",
    "gpt_oss",
    "lfm2",
    "llama4",
)
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (
            transformers.Gemma2Config,
            {"head_dim": 20, "sliding_window": 6, "query_pre_attn_scalar": 13, **CAPS},
        ),
        (
            transformers.Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        (transformers.LlamaConfig, {"rope_parameters": LONG}),
        (transformers.LlamaConfig, {"rope_parameters": DYNAMIC, "max_position_embeddings": 12}),
        (transformers.Qwen3Config, {"head_dim": 24}),
        (transformers.OPTConfig, {"ffn_dim": 40, "pad_token_id": 0}),
        (transformers.GPT2Config, {"bos_token_id": 2, "eos_token_id": 2}),
        (
            transformers.Gemma3TextConfig,
            {"head_dim": 20, "sliding_window": 6, "layer_types": LOCAL},
        ),
        (transformers.Gemma4TextConfig, GEMMA4),
        (
            transformers.Gemma4TextConfig,
            GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0} | EXPERTS,
        ),
        (
            transformers.Cohere2Config,
            {"sliding_window": 6, "sliding_window_pattern": 2, "eos_token_id": 2},
        ),
        (transformers.Exaone4Config, {"sliding_window": 6, "sliding_window_pattern": 2}),
        (
            transformers.Lfm2Config,
            {"full_attn_idxs": [1], "conv_bias": True, "pad_token_id": 0, "conv_L_cache": 4},
        ),
        (transformers.Llama4TextConfig, LLAMA4),
        (
            transformers.GptOssConfig,
            {"head_dim": 12, "sliding_window": 6, "num_local_experts": 3, "num_experts_per_tok": 2},
        ),
        (
            transformers.HyperCLOVAXConfig,
            {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
        ),
        (transformers.DeepseekV3Config, LATENT),
        (transformers.Mistral4Config, LATENT | {"rope_parameters": GROWING, "q_lora_rank": None}),
    ],
    ids=[
        "gemma2",
        "qwen2 late windows",
        "llama longrope",
        "llama dynamic",
        "qwen3",
        "opt",
        "gpt2",
        "gemma3",
        "gemma4",
        "gemma4 experts",
        "cohere2",
        "exaone4",
        "lfm2",
        "llama4",
        "gpt_oss",
        "hyperclovax",
        "deepseek_v3",
        "mistral4",
    ],
)
def test_a_decoder_writes_what_it_writes_there_beyond_its_windows_too(kind, own, tmp_path):
    model = random_decoder(kind(**COMMON | own))
    model.save_pretrained(tmp_path)
    check(model, tmp_path, texts(97), token_ids)


def with_images(tokens_per_image: int) -> Inputs:
    def inputs(prompt: Sequence[Part]) -> dict[str, Any]:
        tokens = [part if is_text(part) else np.full(tokens_per_image, IMAGE) for part in prompt]
        images = [(part / 255 - MEAN) / STD for part in prompt if not is_text(part)]
        pixels = (
            torch.tensor(np.stack(images).transpose(0, 3, 1, 2), dtype=torch.float32)
            if images
            else None
        )
        return token_ids(tokens) | ({} if pixels is None else {"pixel_values": pixels})

    return inputs


@pytest.mark.default_cases("Llava")
@pytest.mark.parametrize("name", ["Llava", "VipLlava", "VideoLlava"])
def test_llava_and_vipllava_write_what_they_write_there(name, tmp_path):
    own = {"vision_feature_layer": [3, 1]} if name == "VipLlava" else {}
    vision = transformers.CLIPVisionConfig(**TOWER)
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=LLAMA, image_token_index=IMAGE, **own
    )
    model = random_model(config, getattr(transformers, f"{name}ForConditionalGeneration"))
    save(model, tmp_path)
    check(model, tmp_path, samples() + samples(seed=1), with_images((SIDE // 4) ** 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["deepseek_vl", "janus"])
def test_deepseek_vl_and_janus_write_what_they_write_there(family, tmp_path):
    config = getattr(drawn, family)(np.random.default_rng(1), VOCAB, image_token_id=IMAGE)
    kind = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    model = random_model(config, kind)
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    save(model, tmp_path, side)
    prompts = samples(side) + samples(side, seed=1)
    check(model, tmp_path, prompts, with_images((side // patch) ** 2))


def test_paligemma_writes_what_it_writes_there_after_a_prompt_that_attends_both_ways(tmp_path):
    text = transformers.Gemma2Config(
        **COMMON | {"vocab_size": 61, "head_dim": 20, "sliding_window": 6}
    )
    vision = transformers.SiglipVisionConfig(**TOWER, vision_use_head=False)
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        projection_dim=text.hidden_size,
    )
    model = random_model(config, transformers.PaliGemmaForConditionalGeneration)
    save(model, tmp_path)

    def inputs(prompt: Sequence[Part]) -> dict[str, Any]:
        made = with_images((SIDE // 4) ** 2)(prompt)
        return made | {"token_type_ids": torch.zeros_like(made["input_ids"])}

    check(model, tmp_path, samples(), inputs)


def test_internvl_writes_what_it_writes_there_with_one_tile_or_several(tmp_path):
    vision = transformers.InternVLVisionConfig(**TOWER)
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=QWEN2, image_token_id=IMAGE
    )
    model = random_model(config, transformers.InternVLForConditionalGeneration)
    save(model, tmp_path)
    check(model, tmp_path, samples(), with_images((SIDE // 8) ** 2))


@pytest.mark.default_cases("LlavaOnevision")
@pytest.mark.parametrize("name", ["LlavaNext", "LlavaOnevision"])
def test_llava_next_and_onevision_write_what_they_write_there_of_images_in_tiles(name, tmp_path):
    variant = {"LlavaNext": NEXT, "LlavaOnevision": ONEVISION}[name]
    processor = processor_of(variant, getattr(test_any_res, f"{name}ImageProcessorPil"))
    kinds = (
        getattr(transformers, f"{name}Config"),
        getattr(transformers, f"{name}ForConditionalGeneration"),
    )
    model = saved(variant, *kinds, processor, tmp_path)
    of = lambda prompt: inputs(model, prompt, processor, name == "LlavaOnevision")  # noqa: E731
    check(model, tmp_path, test_any_res.samples(), of)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", test_pixtral.WHOLE)
def test_pixtral_and_mistral3_write_what_they_write_there_after_images_of_several_sizes(
    family, tmp_path
):
    model, processor, unit = test_pixtral.made(family, 1, tmp_path)
    rows = family != "lighton_ocr"
    of = lambda prompt: test_pixtral.inputs_of(prompt, processor, unit, rows)  # noqa: E731
    check(model, tmp_path, test_pixtral.samples(unit), of, test_pixtral.TOKENS)


@pytest.mark.exhaustive
def test_video_llama_writes_what_it_writes_there_after_images_of_several_sizes(tmp_path):
    model = test_video_llama.made(2, tmp_path, 2)
    unit = 2 * model.config.vision_config.patch_size
    prompts = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check(model, tmp_path, prompts, test_video_llama.inputs_of(model, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["minicpmv4_6", "minicpmv4_7"])
def test_minicpm_writes_what_it_writes_there_after_images_of_several_sizes(family, tmp_path):
    model = test_minicpm.made(3, tmp_path, family)
    unit = test_minicpm.unit_of(tmp_path)
    prompts = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    if family == "minicpmv4_7":
        sliced = test_minicpm.sliced_samples(unit, 1)  # which end with a slice at times
        prompts += [[*parts, np.append(last, [7, 8])] for *parts, last in sliced]
        prompts = text_last(prompts)
    check(model, tmp_path, prompts, test_minicpm.inputs_of(model, tmp_path))


def glm(family, seed):
    return random_whole(test_glm4v.config_of(family, seed), test_glm4v.WHOLE[family])


def qwen_like(family, seed):
    draw, kind = test_qwen_vl.WHOLE[family]
    tokens = {"image_token_id": test_qwen_vl.IMAGE, "video_token_id": test_qwen_vl.VIDEO}
    config = draw(np.random.default_rng(seed), **tokens)
    if family == "cosmos3_omni":  # whose cache there has windows that its layers have not
        config.text_config.sliding_window = None
    return random_whole(config, kind)


MADE = {
    "qwen2_5": qwen2_5,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "glm4v": partial(glm, "glm4v", 4),
    "glm4v_moe": partial(glm, "glm4v_moe", 6),
    "glm_ocr": partial(glm, "glm_ocr", 1),
    "exaone4_5": partial(qwen_like, "exaone4_5", 1),
    "hyperclovax_vision_v2": partial(qwen_like, "hyperclovax_vision_v2", 2),
    "qwen3_vl_moe": qwen3_vl_moe,
    "cosmos3_omni": partial(qwen_like, "cosmos3_omni", 1),
    "glmga": partial(glm, "glmga", 1),
    "qwen2_vl": partial(qwen_like, "qwen2_vl", 1),
}


@pytest.mark.default_cases("qwen3_5")
@pytest.mark.parametrize("name", MADE)
def test_qwen_vl_and_its_like_write_what_they_write_there_after_images_of_several_sizes(
    name, tmp_path
):
    model = MADE[name]()
    model.save_pretrained(tmp_path)
    vision = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    prompts = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check(model, tmp_path, text_last(prompts), inputs_of(model, tmp_path))


@pytest.mark.exhaustive
def test_paddleocr_vl_writes_what_it_writes_there_after_images_of_several_sizes(tmp_path):
    model = test_paddleocr.made(1, tmp_path)
    vision = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    prompts = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check(model, tmp_path, text_last(prompts), test_paddleocr.inputs_of(model, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_gemma4_writes_what_it_writes_there_after_images_and_clips(seed, tmp_path, monkeypatch):
    test_gemma4.hear_few_bins(monkeypatch)
    model = test_gemma4.made(seed, tmp_path)
    with torch.no_grad():  # so that tokens of media are not written
        model.get_output_embeddings().weight[test_gemma4.IMAGE - 2 :] = 0
    model.save_pretrained(tmp_path)
    prompts = [*test_gemma4.samples(model), *test_gemma4.samples(model, seed=1)]
    check(model, tmp_path, prompts, lambda prompt: test_gemma4.inputs(model, prompt))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gemma4_without_towers_writes_what_it_writes_there_after_images_and_clips(seed, tmp_path):
    there = test_gemma4_unified
    model = there.made(seed, tmp_path)
    with torch.no_grad():  # so that tokens of media are not written
        model.get_output_embeddings().weight[there.IMAGE - 2 :] = 0
    model.save_pretrained(tmp_path)
    prompts = [*there.samples(model), *there.samples(model, seed=1)]
    check(model, tmp_path, prompts, lambda prompt: there.inputs(model, prompt))


@pytest.mark.exhaustive
def test_kimi_writes_what_it_writes_there_after_images_of_several_sizes(tmp_path):
    model = test_kimi.made(1, tmp_path)
    vision = model.config.vision_config
    unit = vision.patch_size * vision.merge_kernel_size[0]
    prompts = text_last(samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1))
    check(model, tmp_path, prompts, test_kimi.inputs_of(model, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_muse_glimmer_writes_what_it_writes_there_after_images_of_several_sizes(seed, tmp_path):
    model = test_muse.made(seed, tmp_path)
    with torch.no_grad():  # so that tokens of media are not written
        model.get_output_embeddings().weight[test_muse.IMAGE :] = 0
    model.save_pretrained(tmp_path)
    unit = test_muse.unit_of(model)
    prompts = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check(model, tmp_path, prompts, test_muse.inputs_of(model, tmp_path))


def test_qwen2_audio_writes_what_it_writes_there_after_clips_of_several_lengths(tmp_path):
    model = qwen2_audio(tmp_path)
    encoder = from_hf(tmp_path).encoders["audio"]
    prompts = [
        [words(0, 3), clip(9_000), words(1, 4)],
        [words(2, 6)],
        [clip(17 * HOP), words(3, 2), clip(11_000), words(4, 3)],
        [words(5, 2), clip(7_777), words(6, 5)],
    ]

    def inputs(prompt: Sequence[Part]) -> dict[str, Any]:
        clips = [part for part in prompt if not is_text(part)]
        features = features_there(encoder, clips) if clips else {}
        frames = features["feature_attention_mask"].sum(-1).tolist() if clips else []
        left = iter(np.full(((n - 1) // 2 + 1 - 2) // 2 + 1, AUDIO_TOKEN) for n in frames)
        return token_ids([part if is_text(part) else next(left) for part in prompt]) | features

    check(model, tmp_path, prompts, inputs)


@pytest.mark.exhaustive
def test_shapes_are_few(tmp_path):
    random_model(transformers.Qwen2Config(**COMMON)).save_pretrained(tmp_path)
    model, params, _ = loaded(tmp_path)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    generator = Generator(model, mesh, ShardingRules(), (), str, max_tokens=4)
    rng = np.random.default_rng(0)
    of = lambda lengths: Given([[rng.integers(1, 97, n)] for n in lengths])  # noqa: E731
    generator.answers(params, of([15, 20, 40]))
    counter = CompileCounter()
    assert len(generator.answers(params, of([1, 7, 33, 16]))) == 4
    assert counter.requested <= 2  # three prompts of at most 16 tokens are a batch of four rows
    counter = CompileCounter()
    generator.answers(params, of([2, 16, 5, 17, 48]))
    assert counter.requested == 0
