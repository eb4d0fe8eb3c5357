"""Pixtral and Mistral 3 compute what transformers computes, with text between the rows of an image's tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from fine_tuning import moved
from image_shapes import picture
from parity import loaded, random_model
from parity_samples import check_samples, check_ten_steps, is_text
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mmjax.config import MeshConfig, PixtralResize
from mmjax.data.media.patches import item_size
from mmjax.errors import BadMedia, UserError
from mmjax.export import export
from mmjax.hf.families import encoder_from_hf, from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings

VOCAB, IMAGE, ROW_END, END = 61, 60, 59, 58
TOKENS = {"[IMG_BREAK]": [ROW_END], "[IMG_END]": [END]}
WHOLE = {
    "pixtral": (drawn.pixtral, transformers.LlavaForConditionalGeneration),
    "mistral3": (drawn.mistral3, transformers.Mistral3ForConditionalGeneration),
    "mistral4": (
        partial(drawn.mistral3, text="mistral4"),
        transformers.Mistral3ForConditionalGeneration,
    ),
    "lighton_ocr": (drawn.lighton_ocr, transformers.LightOnOcrForConditionalGeneration),
}


def made(family, seed, folder):
    """A random model in a folder with its processors, and the processor of images as it is called there."""
    draw, kind = WHOLE[family]
    name = "image_token_id" if family == "lighton_ocr" else "image_token_index"
    config = draw(np.random.default_rng(seed), VOCAB, **{name: IMAGE})
    for part in (config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    model = random_model(config, kind)
    model.save_pretrained(folder)
    patch, merge = config.vision_config.patch_size, getattr(config, "spatial_merge_size", 1)
    processor = PixtralImageProcessorPil(
        patch_size=patch * merge,
        size={"longest_edge": 5 * patch * merge - 1},
        image_std=[0.2, 0.25, 0.3],
    )
    processor.save_pretrained(folder)
    around = {
        "processor_class": "LightOnOcrProcessor" if family == "lighton_ocr" else "PixtralProcessor",
        "patch_size": patch,
        "spatial_merge_size": merge,
    }
    (folder / "processor_config.json").write_text(json.dumps(around))
    return model, processor, patch * merge


def samples(unit):
    """Text alone; an image of each of several shapes, and two in a sample."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, END, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), picture(2 * unit, 9 * unit), words(5)],
        [words(2), picture(unit, unit), words(1), picture(2 * unit + 1, 3 * unit), words(4)],
        [words(1), picture(7 * unit, 4 * unit), words(6)],
    ]


def inputs_of(sample, processor, unit, rows=True):
    """What the model there takes for one sample, whose images' tokens stand in rows as PixtralProcessor writes them.

    rows: with text between them.
    """
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    made = processor(images, return_tensors="pt") if images else {}
    sizes, tokens = iter(made["image_sizes"].tolist() if images else ()), []
    for part in sample:
        if is_text(part):
            tokens += part.tolist()
            continue
        height, width = next(sizes)
        tokens += ([IMAGE] * (width // unit) + [ROW_END] * rows) * (height // unit)
        if rows:
            tokens[-1] = END
    return {"input_ids": torch.tensor([tokens]), **made}


def theirs(processor, unit, rows=True):
    """Logits of one sample."""
    return lambda model, sample: model(
        **inputs_of(sample, processor, unit, rows), use_cache=False
    ).logits[0]


@pytest.mark.default_cases("mistral3-1", "mistral4-1")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_is_what_transformers_makes_of_it(family, seed, tmp_path):
    model, processor, unit = made(family, seed, tmp_path)
    rows = family != "lighton_ocr"
    check_samples(model, tmp_path, samples(unit), theirs(processor, unit, rows), TOKENS)


@pytest.mark.exhaustive
def test_ten_steps_of_a_ministral3_have_the_losses_that_torch_has(tmp_path):
    config = drawn.mistral3(np.random.default_rng(4), VOCAB, image_token_index=IMAGE)
    assert config.text_config.model_type == "ministral3"
    model = random_model(config, transformers.Mistral3ForConditionalGeneration)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    texts = [[rng.integers(1, END, n)] for n in (9, 24, 3, 17)]
    check_ten_steps(model, tmp_path, texts, theirs(None, 1))


@pytest.mark.exhaustive
def test_a_run_is_exported_as_it_was_read_and_transformers_computes_with_it(tmp_path):
    _, processor, unit = made("mistral3", 3, tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run")
    export(run, tmp_path / "out")
    kind = transformers.Mistral3ForConditionalGeneration
    there = kind.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    check_samples(there, tmp_path / "out", samples(unit), theirs(processor, unit), TOKENS)
    folder = RunFolder(run)
    model = Model.build(folder.read_config().model, jnp.float32)
    shardings = parameter_shardings(
        model, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    )
    trained = restore_parameters(
        folder.checkpoints, checkpoint_step(folder.checkpoints), model, shardings
    )
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path / "out")[1], trained)


def edit(path, **own):
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


def test_images_come_in_whole_tokens_whatever_the_folder_says_of_them(tmp_path):
    model, _, unit = made("mistral3", 2, tmp_path)
    patch = model.config.vision_config.patch_size
    assert unit > patch
    read = from_hf(tmp_path).encoders["vision"].images
    assert (read.unit, read.box, read.row_end, read.end) == (
        unit,
        (5 * unit - 1,) * 2,
        "[IMG_BREAK]",
        "[IMG_END]",
    )
    edit(tmp_path / "processor_config.json", patch_size=patch + 1, image_break_token="|")
    with pytest.raises(
        UserError,
        match=f"multiples of {unit // patch * (patch + 1)} pixels, the tower has tokens of",
    ):
        from_hf(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    # as one that knows nothing of merging says it
    edit(tmp_path / "preprocessor_config.json", patch_size=patch)
    assert from_hf(tmp_path).encoders["vision"].images == read
    (tmp_path / "preprocessor_config.json").unlink()
    assert from_hf(tmp_path).encoders["vision"].images == replace(read, box=(1024, 1024))
    with pytest.raises(BadMedia, match="which are no whole squares"):
        item_size(from_hf(tmp_path).encoders["vision"], (unit + patch, unit))


def test_an_encoder_alone_writes_no_text_that_other_llms_lack(tmp_path):
    transformers.PixtralVisionConfig().save_pretrained(tmp_path)
    PixtralImageProcessorPil().save_pretrained(tmp_path)
    assert encoder_from_hf(tmp_path).images == PixtralResize(unit=32)


@pytest.mark.parametrize(
    ("where", "own", "message"),
    [
        ("", {"vision_feature_layer": [-2, -1]}, "names several layers"),
        ("vision_config", {"head_dim": 99}, "vision_config: head_dim=99 is not supported"),
        (
            "vision_config",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: rope_type='yarn' is not supp",
        ),
        (
            "vision_config",
            {"model_type": "clip_vision_model"},
            "model_type='clip_vision_model' is not supported",
        ),
        ("vision_config", {"patch_size": [4, 4]}, "patch_size=.* is no int"),
    ],
)
def test_what_would_be_another_model_is_refused(where, own, message, tmp_path):
    made("mistral3", 0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", **({where: config[where] | own} if where else own))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    whole = transformers.Mistral3Config()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    model = from_hf(tmp_path)
    text, vision, tower = whole.text_config, whole.vision_config, model.encoders["vision"]
    assert (model.llm.layers, model.llm.width, model.llm.mlp_width) == (
        40,
        text.hidden_size,
        text.intermediate_size,
    )
    assert (model.llm.rope_theta, model.llm.norm_eps, model.llm.window) == (
        1e9,
        text.rms_norm_eps,
        0,
    )
    assert (tower.patch, tower.layers, tower.heads, tower.width) == (
        vision.patch_size,
        24,
        16,
        vision.hidden_size,
    )
    assert (tower.connector.merge, model.llm.tied, tower.positions.theta) == (
        2,
        whole.tie_word_embeddings,
        1e4,
    )
