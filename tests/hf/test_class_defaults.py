"""What a config leaves out is what its class in transformers or diffusers makes of it, for every class and field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import class_defaults
import class_walk
import diffusers
import pytest
import transformers
from class_walk import Finding, walk

from mmjax.config import ModelConfig
from mmjax.errors import UserError
from mmjax.hf.families import encoder_from_hf, from_hf


def release(version: str) -> str:
    """Return the part of a version whose classes have the same fields: 5.24 of 5.24.1."""
    return ".".join(version.split(".")[:2])


def faults(findings: list[Finding | None]) -> list[Finding]:
    return [finding for finding in findings if finding is not None]


def same_table(made: dict[str, Any], *left_out: str) -> None:
    """Hold a table equal to the stored one, but for these parts of an entry; of another version, what both have."""
    stored = json.loads(class_defaults.TABLE.read_text())
    for section, library in (
        ("configs", transformers),
        ("processors", transformers),
        ("generators", diffusers),
    ):
        version = stored["diffusers" if section == "generators" else "transformers"]
        equal = release(version) == release(library.__version__)
        names = made[section].keys() & stored[section].keys()
        assert not equal or made[section].keys() == stored[section].keys()
        for name in names:
            now, then = made[section][name], stored[section][name]
            if equal:
                assert now | dict.fromkeys(left_out) == then | dict.fromkeys(left_out), name
            else:
                # Fields may have come or gone; what a released checkpoint leaves out stays what it
                # was.
                now, then = now.get("defaults", now), then.get("defaults", then)
                assert {k: now[k] for k in now.keys() & then.keys()} == {
                    k: then[k] for k in now.keys() & then.keys()
                }


def test_the_table_of_defaults_is_what_the_classes_say():
    same_table(class_defaults.table(nulls=False), "nullable")


@pytest.mark.exhaustive
def test_the_fields_that_may_be_null_are_those_of_the_classes():
    same_table(class_defaults.table())


@pytest.mark.parametrize("kind", class_walk.KINDS)
@pytest.mark.default_cases("smolvlm", "glm4v", "siglip")
def test_fields_that_are_missing_are_what_the_class_makes_of_them(kind, tmp_path):
    findings = list(walk(tmp_path, kind, set(), changes=("missing",)))
    assert len(findings) > 5
    assert faults(findings) == []


@pytest.mark.exhaustive
def test_no_class_differs_with_any_field_missing_null_or_changed(tmp_path):
    seen: set[str] = set()
    findings = [finding for kind in class_walk.KINDS for finding in walk(tmp_path, kind, seen)]
    assert len(findings) > 10_000
    assert faults(findings) == []


def config_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, **copy.deepcopy(fields)}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return from_hf(folder)


@pytest.mark.parametrize("own", [{}, {"hidden_activation": None}, {"hidden_activation": "gelu"}])
def test_a_gemmas_gelu_is_its_releases_approximation(own, tmp_path):
    config = config_of("gemma", hidden_act="gelu", **own)
    assert transformers.AutoConfig.for_model(**config).hidden_act == "gelu_pytorch_tanh"
    assert read(tmp_path, config).llm.activation == "gelu_tanh"


def test_the_omni_tower_has_its_hidden_size_whatever_embed_dim_says(tmp_path):
    tower = {
        "embed_dim": 1280,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "depth": 32,
        "in_chans": 3,
    }
    thinker = {
        "vision_config": tower,
        "text_config": {"tie_word_embeddings": False},
        "audio_config": {},
    }
    vision = read(tmp_path, config_of("qwen2_5_omni", thinker_config=thinker)).encoders["vision"]
    assert (vision.width, vision.mlp_width, vision.heads) == (1280, 3420, 16)


def test_glms_first_configs_have_the_fields_of_their_text_beside_its_tower(tmp_path):
    flat = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 99,
        "partial_rotary_factor": 0.5,
    }
    rope = {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}
    tower = {"out_hidden_size": 2048}
    llm = read(tmp_path, config_of("glm4v", vision_config=tower, **flat, **rope)).llm
    assert (llm.width, llm.heads, llm.vocab, llm.rotary_width) == (2048, 16, 99, 64)
    assert llm.rope_sections == (8, 12, 12)


def test_glms_key_heads_that_are_null_are_as_many_as_its_heads(tmp_path):
    text = {"num_key_value_heads": None, "partial_rotary_factor": 0.5}
    assert transformers.Glm4vTextConfig(**text).num_key_value_heads == 32
    assert read(tmp_path, config_of("glm4v", text_config=text)).llm.kv_heads == 32


def test_what_a_clips_vision_config_dict_says_wins(tmp_path):
    config = config_of(
        "clip", vision_config={"hidden_size": 64}, vision_config_dict={"num_hidden_layers": 3}
    )
    there = transformers.AutoConfig.for_model(**copy.deepcopy(config)).vision_config
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = encoder_from_hf(tmp_path)
    assert (here.width, here.layers + 1) == (there.hidden_size, there.num_hidden_layers) == (768, 3)


@pytest.mark.parametrize(("part", "heads"), [("missing", 16), ("empty", 12), ("null", 16)])
def test_a_tower_that_is_not_there_is_another_than_one_that_says_nothing(part, heads, tmp_path):
    own = {"missing": {}, "empty": {"vision_config": {}}, "null": {"vision_config": None}}[part]
    assert (
        transformers.AutoConfig.for_model(
            "llava", **copy.deepcopy(own)
        ).vision_config.num_attention_heads
        == heads
    )
    assert read(tmp_path, config_of("llava", **own)).encoders["vision"].heads == heads


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("llama", hidden_size=None), "hidden_size=null"),
        (config_of("llama", is_causal=False), "is_causal"),
        (config_of("llama", num_attention_heads=0), "num_attention_heads=0"),
        (config_of("qwen3", per_layer_config={"0": {"hidden_size": 8}}), "per_layer_config"),
        (
            config_of("phi3", partial_rotary_factor=0.6, hidden_size=384, num_attention_heads=32),
            "odd number",
        ),
        (config_of("paligemma", projection_dim=64), "projection_dim=64"),
        (config_of("internvl", downsample_ratio=0.0), "downsample_ratio"),
    ],
)
def test_fields_that_would_change_what_is_computed_are_refused_by_name(config, words, tmp_path):
    with pytest.raises(UserError, match=words):
        read(tmp_path, config)
