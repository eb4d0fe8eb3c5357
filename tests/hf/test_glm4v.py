"""GLM-4.1V, GLM-4.6V and GLM-OCR compute what transformers computes of packed images and text."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import transformers
from parity_samples import check_ten_steps
from test_qwen_vl import GRIDS, IMAGE, VIDEO, check, inputs_of, random_whole, samples_of, theirs

from mmjax.config import SmartResize
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

WHOLE = {
    "glm4v": transformers.Glm4vForConditionalGeneration,
    "glm46v": transformers.Glm46VForConditionalGeneration,
    "glmga": transformers.Glm46VForConditionalGeneration,
    "glm4v_moe": transformers.Glm4vMoeForConditionalGeneration,
    "glm_ocr": transformers.GlmOcrForConditionalGeneration,
}


def config_of(family, seed):
    return drawn.glm4v(
        np.random.default_rng(seed), family, image_token_id=IMAGE, video_token_id=VIDEO
    )


def made(family, seed, folder):
    """A random model in a folder."""
    model = random_whole(config_of(family, seed), WHOLE[family])
    model.save_pretrained(folder)
    return model


@pytest.mark.default_cases("glm4v-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_is_what_transformers_makes_of_it(family, seed, tmp_path):
    check(made(family, seed, tmp_path), tmp_path)


@pytest.mark.exhaustive
def test_ten_steps_of_adamw_have_the_losses_that_torch_has(tmp_path):
    model = made("glm4v_moe", 6, tmp_path)
    experts = from_hf(tmp_path).llm.experts
    assert experts.layers
    assert experts.groups > 1
    vision = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    samples = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check_ten_steps(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))


def edit(path, **own):
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


@pytest.mark.parametrize(
    ("where", "own", "message"),
    [
        (
            "vision_config",
            {"out_hidden_size": 7},
            "out_hidden_size=7, but the text's hidden_size is",
        ),
        (
            "vision_config",
            {"hidden_act": "mish"},
            "vision_config: hidden_act='mish' is not supported",
        ),
        (
            "vision_config",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: rope_type='yarn' is not supp",
        ),
        ("text_config", {"head_dim": 99}, "text_config: head_dim=99 is not supported"),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [1]}},
            "must have three numbers: of t, y and x",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(where, own, message, tmp_path):
    made("glm4v", 0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", **{where: config[where] | own})
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_a_processor_of_other_patches_is_refused_and_an_image_counts_as_a_temporal_patch(tmp_path):
    vision = made("glm46v", 1, tmp_path).config.vision_config
    said = {"image_processor_type": "Glm46VImageProcessor", "patch_size": vision.patch_size}
    said |= {"merge_size": vision.spatial_merge_size, "temporal_patch_size": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    how = from_hf(tmp_path).encoders["vision"].images
    assert how == SmartResize(
        vision.patch_size, vision.spatial_merge_size, 112 * 112, 28 * 28 * 15_000, frames=3
    )
    edit(tmp_path / "preprocessor_config.json", patch_size=vision.patch_size + 1)
    with pytest.raises(UserError, match="make patch_size and merge_size the same"):
        from_hf(tmp_path)


def test_images_in_whole_multiples_of_merge_windows_are_refused(tmp_path):
    vision = made("glmga", 1, tmp_path).config.vision_config
    said = {"image_processor_type": "GlmgaImageProcessor", "patch_size": vision.patch_size}
    said |= {"merge_size": vision.spatial_merge_size, "patch_expand_factor": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"patch_expand_factor=2.*set it to 1"):
        from_hf(tmp_path)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    for kind, whole in (
        ("glm4v", transformers.Glm4vConfig()),
        ("glm46v", transformers.Glm46VConfig()),
    ):
        # of all channels the default sections are too few, there too
        half = {"partial_rotary_factor": 0.5}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": half}))
        model = from_hf(tmp_path)
        llm, tower, text, vision = (
            model.llm,
            model.encoders["vision"],
            whole.text_config,
            whole.vision_config,
        )
        assert (llm.layers, llm.width, llm.mlp_width) == (
            40,
            text.hidden_size,
            text.intermediate_size,
        )
        assert (llm.heads, llm.kv_heads, llm.vocab) == (
            32,
            text.num_key_value_heads,
            text.vocab_size,
        )
        assert (llm.norm_eps, llm.rope_theta, llm.biases) == (
            text.rms_norm_eps,
            1e4,
            ("query", "key", "value"),
        )
        assert (tower.layers, tower.width, tower.mlp_width) == (
            vision.depth,
            vision.hidden_size,
            4096,
        )
        assert (tower.patch, tower.frames, tower.positions.side) == (vision.patch_size, 2, 24)
        assert (tower.connector.mlp_width, tower.connector.merge) == (vision.intermediate_size, 2)
