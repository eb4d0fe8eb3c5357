"""EVA-CLIP computes what its formulas say in torch, several images in one row, and is written as it was read."""

from __future__ import annotations

import json
from dataclasses import replace

import drawn
import numpy as np
import pytest
from evaclip import EvaClipVisionModel
from fine_tuning import moved_run, save_checkpoint, tuning
from parity import random_model
from parity_samples import check_tower, pixels
from safetensors.torch import load_file

from mmjax.errors import UserError
from mmjax.export import export
from mmjax.hf.families import compose, encoder_from_hf


def saved(rng: np.random.Generator, folder) -> EvaClipVisionModel:
    model = random_model(drawn.evaclip_tower(rng), EvaClipVisionModel)
    model.save_pretrained(folder)
    return model


def edit(folder, change) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def as_clip(config: dict) -> dict:
    """The config as BAAI writes it: of CLIP by name, of its own code by its classes, with a text tower."""
    vision = config | {"model_type": "clip_vision_model"}
    classes = {
        "architectures": ["EvaCLIPModel"],
        "auto_map": {"AutoModel": "modeling_evaclip.EvaCLIPModel"},
    }
    return {
        "model_type": "clip",
        "vision_config": vision,
        "text_config": {"hidden_size": 8},
    } | classes


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_images_in_one_row_are_what_the_formulas_make_of_each(seed, tmp_path):
    rng = np.random.default_rng(seed)
    model = saved(rng, tmp_path)
    side = model.config.image_size // model.config.patch_size * model.config.patch_size
    pictures = [rng.integers(0, 256, (side, side, 3), np.uint8) for _ in range(5)]
    if seed % 2:
        edit(tmp_path, as_clip)
    rows = side // model.config.patch_size
    merge = next(merge for merge in (3, 2, 1) if rows % merge == 0)
    check_tower(
        model,
        tmp_path,
        lambda picture: model.hidden_states(pixels(picture))[-2][0],
        pictures,
        rng,
        merge,
    )


def test_a_folder_of_clip_by_name_is_read_by_the_class_of_its_code(tmp_path):
    saved(np.random.default_rng(0), tmp_path)
    plain = encoder_from_hf(tmp_path)
    edit(tmp_path, as_clip)
    assert encoder_from_hf(tmp_path) == plain
    edit(
        tmp_path,
        lambda config: config | {"model_type": "evaclip", "architectures": None, "auto_map": None},
    )
    edit(
        tmp_path,
        lambda config: config | {"vision_config": config["vision_config"] | {"model_type": None}},
    )
    assert encoder_from_hf(tmp_path) == plain
    assert not plain.embed_norm
    assert plain.embed_bias


@pytest.mark.parametrize("name", ["rope", "naiveswiglu", "subln", "global_average_pool"])
def test_what_only_eva_02s_own_layout_has_is_refused(name, tmp_path):
    saved(np.random.default_rng(0), tmp_path)
    edit(tmp_path, lambda config: config | {name: False})
    encoder_from_hf(tmp_path)
    edit(tmp_path, lambda config: config | {name: True})
    with pytest.raises(UserError, match=rf"{name}=True is not supported; known: False"):
        encoder_from_hf(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_is_exported_tensor_by_tensor_as_it_was_read(seed, tmp_path):
    tower, llm, run = (tmp_path / name for name in ("tower", "llm", "run"))
    saved(np.random.default_rng(seed), tower)
    edit(tower, as_clip)
    save_checkpoint(llm)
    config = tuning(llm, run)
    moved_run(replace(config, model=compose({"vision": encoder_from_hf(tower)}, config.model)))
    export(run, tmp_path / "out")
    written = tmp_path / "out" / json.loads((tmp_path / "out" / "parts.json").read_text())["vision"]
    before, after = load_file(tower / "model.safetensors"), load_file(written / "model.safetensors")
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in before.items()}
    read = encoder_from_hf(written).layers
    unread = {name for name in before if f"layers.{read}." in name or "post_layernorm" in name}
    assert {name for name in before if (before[name] == after[name]).all()} == unread
