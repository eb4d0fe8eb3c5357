"""LLaVA-1.5 and InternVL compute what transformers computes, with images of one size or in tiles."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import drawn
import jax
import numpy as np
import pytest
import torch
import transformers
from parity import leave_out_defaults, loaded, random_model
from parity_samples import (
    Given,
    check_packed,
    check_samples,
    check_ten_steps,
    is_text,
    packed_source,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
    VipLlavaForConditionalGeneration,
)

from mmjax.config import AsIs, DynamicTiles, NoVideo
from mmjax.errors import UserError
from mmjax.hf.families import encoder_from_hf, from_hf

VOCAB, IMAGE = 61, 60
SIDE = 16  # pixels
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
TOWER |= {"image_size": SIDE, "patch_size": 4}
QWEN2, LLAMA = transformers.Qwen2Config(**TEXT), transformers.LlamaConfig(**TEXT)


def samples(side=SIDE, seed=0):
    """Text alone; one image; two images with text between; an image first."""
    rng = np.random.default_rng(seed)
    words = lambda n: rng.integers(1, IMAGE, n)  # noqa: E731
    image = lambda: rng.integers(0, 256, (side, side, 3), np.uint8)  # noqa: E731
    return [
        [words(9)],
        [words(3), image(), words(5)],
        [words(2), image(), words(1), image(), words(4)],
        [image(), words(6)],
    ]


def theirs(tokens_per_image, token_types=False, prefix=False):
    def logits(model, sample):
        tokens = [part if is_text(part) else np.full(tokens_per_image, IMAGE) for part in sample]
        images = [(part / 255 - MEAN) / STD for part in sample if not is_text(part)]
        inputs = {}
        if images:
            inputs["pixel_values"] = torch.tensor(
                np.stack(images).transpose(0, 3, 1, 2), dtype=torch.float32
            )
        ids = torch.tensor(np.concatenate(tokens))[None].long()
        if token_types:  # by which Gemma knows which tokens are an image's
            inputs["token_type_ids"] = (ids == IMAGE).long()
        # by which PaliGemma knows where the answer begins: its last part, or behind its first token
        if prefix:
            answer = len(tokens[-1]) if tokens[1:] else len(tokens[0]) - 1
            inputs["token_type_ids"] = (torch.arange(ids.shape[1]) >= ids.shape[1] - answer).long()[
                None
            ]
        return model(input_ids=ids, use_cache=False, **inputs).logits[0]

    return logits


def save(model, folder, side=SIDE):
    model.save_pretrained(folder)
    processor = {"image_processor_type": "CLIPImageProcessor", "image_mean": MEAN, "image_std": STD}
    processor |= {"size": {"height": side, "width": side}, "do_center_crop": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_a_llava_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(seed, tmp_path):
    rng = np.random.default_rng(seed)
    vision, own = drawn.two_norm_tower(rng)
    if seed % 2:  # the class's own, which the config then leaves out
        vision.num_attention_heads, vision.hidden_size = 12, 24
    config = LlavaConfig(
        vision_config=vision,
        text_config=drawn.any_decoder(rng, VOCAB),
        image_token_index=IMAGE,
        **own,
    )
    model = random_model(config, LlavaForConditionalGeneration)
    side = vision.image_size
    save(model, tmp_path, side)
    leave_out_defaults(tmp_path)
    check_samples(model, tmp_path, samples(side), theirs((side // vision.patch_size) ** 2))


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_vipllava_is_what_transformers_makes_of_it_with_features_of_several_layers(seed, tmp_path):
    config = drawn.vipllava(np.random.default_rng(seed), VOCAB, image_token_index=IMAGE)
    model = random_model(config, VipLlavaForConditionalGeneration)
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    save(model, tmp_path, side)
    leave_out_defaults(tmp_path)
    check_samples(model, tmp_path, samples(side), theirs((side // patch) ** 2))


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_video_llava_is_what_transformers_makes_of_it_but_its_videos(seed, tmp_path, capsys):
    rng = np.random.default_rng(seed)
    vision, own = drawn.two_norm_tower(rng)
    text = drawn.any_decoder(rng, VOCAB)
    config = transformers.VideoLlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, video_token_index=0, **own
    )
    model = random_model(config, transformers.VideoLlavaForConditionalGeneration)
    save(model, tmp_path, vision.image_size)
    tokens = (vision.image_size // vision.patch_size) ** 2
    check_samples(model, tmp_path, samples(vision.image_size), theirs(tokens))
    assert "its tower of videos is not read" in capsys.readouterr().err


@pytest.mark.default_cases("any-0", "gpt_oss-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("text", ["any", "gpt_oss"])
def test_internvl_is_what_transformers_makes_of_it(text, seed, tmp_path):
    rng = np.random.default_rng(seed)
    vision, own = drawn.intern_tower(rng)
    text = drawn.any_decoder(rng, VOCAB) if text == "any" else drawn.decoder(rng, text, VOCAB)
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, **own)
    model = random_model(config, InternVLForConditionalGeneration)
    side, patch = vision.image_size[0], vision.patch_size[0]
    save(model, tmp_path, side)
    tokens = round(side // patch * config.downsample_ratio) ** 2
    check_samples(model, tmp_path, samples(side), theirs(tokens))


@pytest.mark.default_cases("deepseek_vl-0", "janus-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", ["deepseek_vl", "janus"])
def test_deepseek_vl_and_janus_are_what_transformers_makes_of_them(family, seed, tmp_path):
    config = getattr(drawn, family)(np.random.default_rng(seed), VOCAB, image_token_id=IMAGE)
    model = random_model(config, AutoModelForImageTextToText._model_mapping[type(config)])
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    save(model, tmp_path, side)
    check_samples(model, tmp_path, samples(side), theirs((side // patch) ** 2))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ({"depth": 3}, "depth=3 is not supported; known: 1, 2"),
        ({"projection_dim": 7}, "projection_dim=7, but the text's hidden_size is"),
    ],
)
def test_another_janus_is_refused(own, message, tmp_path):
    config = drawn.janus(np.random.default_rng(0), VOCAB).to_dict()
    config["vision_config"] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(4))
def test_shieldgemma2_is_the_gemma3_that_transformers_makes_of_it(seed, tmp_path):
    config = drawn.shieldgemma2(np.random.default_rng(seed), VOCAB, image_token_index=IMAGE)
    model = random_model(config, Gemma3ForConditionalGeneration)
    side = config.vision_config.image_size
    save(model, tmp_path, side)
    check_samples(
        model, tmp_path, samples(side), theirs(config.mm_tokens_per_image, token_types=True)
    )


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_gemma3_is_what_transformers_makes_of_it_and_its_images_attend_both_ways(seed, tmp_path):
    rng = np.random.default_rng(seed)
    config = drawn.gemma3(rng, VOCAB, image_token_index=IMAGE)
    model = random_model(config, Gemma3ForConditionalGeneration)
    side = config.vision_config.image_size
    save(model, tmp_path, side)
    check_samples(
        model, tmp_path, samples(side), theirs(config.mm_tokens_per_image, token_types=True)
    )


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_paligemma_is_what_transformers_makes_of_it_and_its_prompts_attend_both_ways(
    seed, tmp_path
):
    rng = np.random.default_rng(seed)
    config = drawn.paligemma(rng, VOCAB, image_token_index=IMAGE)
    model = random_model(config, PaliGemmaForConditionalGeneration)
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    save(model, tmp_path, side)
    ours, params, read = loaded(tmp_path)
    pieces = samples(side)
    made = packed_source(read, Given(pieces, trained="last"))
    check_packed(model, ours, params, made, pieces, theirs((side // patch) ** 2, prefix=True))


@pytest.mark.exhaustive
def test_ten_steps_of_gemma3_have_the_losses_that_torch_has(tmp_path):
    config = drawn.gemma3(np.random.default_rng(3), VOCAB, image_token_index=IMAGE)
    model = random_model(config, Gemma3ForConditionalGeneration)
    side = config.vision_config.image_size
    save(model, tmp_path, side)
    check_ten_steps(
        model, tmp_path, samples(side), theirs(config.mm_tokens_per_image, token_types=True)
    )


def test_gemma3_with_images_longer_than_a_window_is_refused(tmp_path):
    config = drawn.gemma3(np.random.default_rng(0), VOCAB, image_token_index=IMAGE)
    config.text_config.sliding_window, config.mm_tokens_per_image = 3, 4
    config.text_config.layer_types = ["sliding_attention"] * config.text_config.num_hidden_layers
    config.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"mm_tokens_per_image=4 is more than text_config.sliding_window=3"
    ):
        from_hf(tmp_path)


CLIP_CROP = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 12, "width": SIDE},
}
GOT = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}}
SMALLER_TILES = {"image_processor_type": "LlavaNextImageProcessor", "size": 8, "crop_size": 8}


@pytest.mark.parametrize(
    ("config", "processor", "made"),
    [
        (
            LlavaConfig(vision_config=CLIPVisionConfig(**TOWER), text_config=LLAMA),
            CLIP_CROP,
            "12 x 16 pixels, 3 x 4",
        ),
        (CLIPVisionConfig(**TOWER), CLIP_CROP, "12 x 16 pixels, 3 x 4"),
        (
            InternVLConfig(vision_config=InternVLVisionConfig(**TOWER), text_config=QWEN2),
            GOT | {"crop_to_patches": True},
            "32 x 32 pixels, 8 x 8",
        ),
        (InternVLVisionConfig(**TOWER), GOT, "32 x 32 pixels, 8 x 8"),
        (
            transformers.LlavaNextConfig(
                vision_config=CLIPVisionConfig(**TOWER), text_config=LLAMA
            ),
            SMALLER_TILES | {"image_grid_pinpoints": [[8, 16]]},
            "8 x 8 pixels, 2 x 2",
        ),
    ],
)
def test_a_processor_of_another_size_than_the_towers_is_refused_with_both_files_and_values(
    config, processor, made, tmp_path
):
    config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    read = encoder_from_hf if hasattr(config, "patch_size") else from_hf
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    files = f"{tmp_path / 'preprocessor_config.json'} does not go with {tmp_path / 'config.json'}: "
    assert str(caught.value).startswith(f"{files}it makes images of {made}")
    assert "the tower has positions of 4 x 4 patches" in str(caught.value)


TOWERS = {  # where a tower's layers and its final norm lie, and tensors that its LLM needs none of
    "clip": (
        LlavaConfig(vision_config=CLIPVisionConfig(**TOWER), text_config=LLAMA),
        "encoder.layers.2.mlp.fc1",
        "post_layernorm",
    ),
    "siglip": (
        LlavaConfig(
            vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False),
            text_config=LLAMA,
            vision_feature_select_strategy="full",
        ),
        "encoder.layers.2.mlp.fc1",
        "post_layernorm",
    ),
    "internvl": (
        InternVLConfig(
            vision_config=InternVLVisionConfig(**TOWER), text_config=QWEN2, vision_feature_layer=-2
        ),
        "encoder.layer.2.mlp.fc1",
        "layernorm",
    ),
}


@pytest.mark.default_cases("internvl")
@pytest.mark.parametrize("kind", TOWERS)
def test_tensors_that_no_feature_needs_are_let_be_by_their_exact_names(kind, tmp_path):
    config, last, final = TOWERS[kind]
    model_of = (
        InternVLForConditionalGeneration if kind == "internvl" else LlavaForConditionalGeneration
    )
    save(random_model(config, model_of), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    tower = next(key for key in names if key.endswith(f"{last}.weight")).removesuffix(
        f"{last}.weight"
    )
    unneeded = {f"{tower}{final}.weight", f"{tower}{final}.bias", f"{tower}{last}.weight"}
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({key: torch.ones(24) for key in unneeded})
    )
    loaded(tmp_path)
    for stray in (
        f"{tower}{final}.scale",
        f"{tower}{last}.turn",
        f"{tower}{last.replace('2', '3')}.weight",
    ):
        edit_tensors(tmp_path, lambda tensors, stray=stray: tensors.update({stray: torch.ones(24)}))
        with pytest.raises(
            UserError, match=re.escape(f"1 tensors that this model lacks, such as {stray}")
        ):
            loaded(tmp_path)
        edit_tensors(tmp_path, lambda tensors, stray=stray: tensors.pop(stray))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


OPEN_NAMES = (
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (
        r"^vision_tower\.embeddings\.patch_embeddings\.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    (
        r"^vision_tower\.embeddings\.position_embeddings",
        "vision_model.embeddings.position_embedding",
    ),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer", ".attn.proj"),
    (r"\.attention\.([qk])_norm", r".attn.\1_norm"),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"\.lambda_([12])", r".ls\1"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)


def open_layout(folder):
    """Rewrite a folder of transformers' layout in OpenGVLab's own."""
    tensors, opened = load_file(folder / "model.safetensors"), {}
    for key, tensor in tensors.items():
        for pattern, name in OPEN_NAMES:
            key = re.sub(pattern, name, key)
        opened[key] = tensor
    for kind in ("weight", "bias"):
        for query in [
            k
            for k in opened
            if k.endswith(f".attention.q_proj.{kind}") and k.startswith("vision_model")
        ]:
            three = [opened.pop(query.replace("q_proj", f"{x}_proj")) for x in "qkv"]
            opened[query.replace("attention.q_proj", "attn.qkv")] = torch.cat(three)
    save_file(opened, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    side = vision["image_size"][0]
    vision |= {
        "image_size": side,
        "patch_size": vision["patch_size"][0],
        "model_type": "intern_vit_6b",
    }
    vision |= {
        "qkv_bias": vision.pop("attention_bias"),
        "qk_normalization": vision.pop("use_qk_norm"),
    }
    opened = {
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": vision,
    }
    opened |= {
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "force_image_size": side,
    }
    opened |= {
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "use_thumbnail": True,
        "dynamic_image_size": True,
    }
    (folder / "config.json").write_text(json.dumps(opened))


def test_a_size_that_opengvlabs_config_forces_on_another_tower_is_refused(tmp_path):
    config = {"model_type": "internvl_chat", "ps_version": "v2", "force_image_size": 336}
    config |= {"llm_config": {"model_type": "qwen2"}, "vision_config": {"image_size": 448}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"force_image_size=336 differs from vision_config\.image_size"
    ):
        from_hf(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_opengvlabs_own_layout_is_the_same_model(tied, tmp_path):
    own = {} if tied else {"use_qk_norm": True, "attention_bias": True, "norm_type": "rms_norm"}
    text = transformers.Qwen2Config if tied else transformers.Qwen3Config  # InternVL3, and 3.5
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**TOWER | own),
        text_config=text(**TEXT, tie_word_embeddings=tied),
        image_token_id=IMAGE,
        tie_word_embeddings=tied,
    )
    random_model(config, InternVLForConditionalGeneration).save_pretrained(tmp_path)
    _, there, own = loaded(tmp_path)
    open_layout(tmp_path)
    _, here, opened = loaded(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, here, there)
    tower = opened.encoders["vision"]
    assert isinstance(tower.images, DynamicTiles)
    assert replace(tower, images=AsIs(), mean=(0.5,), std=(0.5,)) == replace(
        own.encoders["vision"], videos=NoVideo()
    )
    assert opened.llm == own.llm
