"""Kimi K2.5 computes what transformers computes of packed images of any size and text."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import drawn
import numpy as np
import peft
import pytest
import test_paddleocr
import torch
import transformers
from fine_tuning import moved
from parity_samples import check_samples
from safetensors.torch import load_file, save_file
from test_qwen_vl import IMAGE, random_whole, samples_of, theirs

from mmjax import export
from mmjax.config import LoraConfig, PaddedResize
from mmjax.data.media.image_transforms import prepare_image, prepared_sizes
from mmjax.data.media.preparations import preparation
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.hf.writing import has_module, module_path

# What transformers writes where a published checkpoint has other names.
WRITTEN = {
    r"^language_model\.model\.blocks\.": "language_model.model.layers.",
    r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    r"^model\.mm_projector\.": "mm_projector.",
}


def save(model, folder):
    """Write a model with the names of published checkpoints."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for written, published in WRITTEN.items():
        tensors = {re.sub(written, published, key): x for key, x in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def made(seed, folder):
    """A random model in a folder, with one or the other names."""
    config = drawn.kimi_k25(np.random.default_rng(seed), image_token_id=IMAGE)
    model = random_whole(config, transformers.Kimi_K25ForConditionalGeneration)
    (save if seed % 2 == 0 else type(model).save_pretrained)(model, folder)
    return model


def inputs_of(model, folder):
    """What transformers' model takes for a sample."""
    inputs = test_paddleocr.inputs_of(model, folder)
    return lambda parts: {k: v for k, v in inputs(parts).items() if k != "mm_token_type_ids"}


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    vision = model.config.vision_config
    samples = samples_of(vision.patch_size * vision.merge_kernel_size[0])
    check_samples(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"pos_emb_width": 9}, "pos_emb_width=9 is not supported"),
        ({"merge_kernel_size": [2, 1]}, "must be two equal numbers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not"),
    ],
)
def test_what_would_be_another_model_is_refused(own, message, tmp_path):
    made(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def sizes_there():
    """The function that computes an image's sizes, of a module that wants torchvision."""
    folder = Path(transformers.__file__).parent / "models/kimi_k25"
    tree = ast.parse((folder / "image_processing_kimi_k25.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {"math": math}
    exec(compile(tree, str(folder), "exec"), names)
    return names["navit_resize"]


def test_images_have_the_sizes_that_its_processor_gives_them_and_black_around(tmp_path):
    model = made(0, tmp_path)
    vision = model.config.vision_config
    merge = vision.merge_kernel_size[0]
    said = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": merge,
        "max_patches": 40,
        "size": {"max_height": 9, "max_width": 9},
    }
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    how = from_hf(tmp_path).encoders["vision"].images
    assert how == PaddedResize(vision.patch_size, merge, max_patches=40, max_side=9)
    prepare = lambda image, images: preparation(how).items(how, image, images)  # noqa: E731
    rng = np.random.default_rng(0)
    for size in [*rng.integers(1, 90, (200, 2)).tolist(), [1, 400], [300, 2]]:
        inner, padded = sizes_there()(*size, vision.patch_size, merge, 40, 9)
        assert prepared_sizes(prepare, tuple(size)) == (padded,)
        (pixels,) = prepare_image(prepare, np.full((*size, 3), 200, np.uint8))
        assert (pixels[: inner[0], : inner[1]] == 200).all()
        assert pixels.sum() == 200 * 3 * math.prod(inner)
    path.write_text(json.dumps(said | {"size": {"max_height": 9, "max_width": 8}}))
    with pytest.raises(UserError, match="give the same max_height and max_width"):
        from_hf(tmp_path)


ADAPTED = ("llm.*.attention.*", "vision.*.output", "vision.*.mlp.*", "vision.connector.*")


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", [0, 1])
def test_adapters_compute_in_peft_what_the_merged_folder_computes(seed, tmp_path):
    made(seed, tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run", lora={"all": LoraConfig(ADAPTED, 4, 6.0)})
    export.export(run, tmp_path / "merged")
    export.export(run, tmp_path / "adapter", adapter=True)
    kind = transformers.Kimi_K25ForConditionalGeneration
    # some of the drawn widths are not what torch's grouped products take
    merged, source = (
        kind.from_pretrained(tmp_path / name, experts_implementation="eager").eval()
        for name in ("merged", "source")
    )
    vision = source.config.vision_config
    samples = samples_of(vision.patch_size * vision.merge_kernel_size[0])
    inputs = inputs_of(source, tmp_path / "source")(samples[0])
    with torch.no_grad():
        before, wanted = source(**inputs).logits, merged(**inputs).logits
        found = peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval()(**inputs).logits
    assert (before - wanted).abs().max() > 0.01
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


def test_adapters_of_the_matrices_that_are_three_in_transformers_are_refused(tmp_path):
    made(0, tmp_path / "source")
    adapters = {"all": LoraConfig(("vision.*.query",), 4, 6.0)}
    run = moved(tmp_path / "source", tmp_path / "run", lora=adapters)
    with pytest.raises(UserError, match=r"wqkv.weight is no linear layer's own weight there"):
        export.export(run, tmp_path / "out", adapter=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_trained_whole_has_the_name_of_its_module_or_none(seed, tmp_path):
    model = made(seed, tmp_path)
    keys = set(load_file(tmp_path / "model.safetensors"))
    whole = {key for key in keys if has_module(key)}
    assert {
        key.rpartition(".")[0].rpartition(".")[2] for key in keys - whole if "vision" in key
    } == {
        "wqkv",
        "pos_emb",
    }
    modules = dict(model.named_modules())
    assert {module_path(key.removesuffix(".bias"), "wrapped") for key in whole} <= set(modules)
