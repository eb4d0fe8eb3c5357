"""LLaVA-NeXT and LLaVA-OneVision compute what transformers computes: images in tiles, by rows with newlines."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

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
from parity_samples import check_samples, given, is_text
from PIL import Image
from safetensors.torch import load_file, save_file
from test_vision_language import IMAGE, TEXT
from transformers import (
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from mmjax.config import AnyRes, MeshConfig
from mmjax.cost.table import parameters
from mmjax.errors import BadMedia, UserError
from mmjax.export import export
from mmjax.hf.families import from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings

TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
CLIP, SIGLIP = (
    lambda **own: CLIPVisionConfig(**TOWER | {"image_size": 12, "patch_size": 4} | own),
    lambda **own: SiglipVisionConfig(
        **TOWER | {"image_size": 12, "patch_size": 4, "vision_use_head": False} | own
    ),
)
QWEN2, LLAMA = transformers.Qwen2Config(**TEXT), transformers.LlamaConfig(**TEXT)
GRIDS = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))


@dataclass(frozen=True)
class Variant:
    vision: transformers.PreTrainedConfig
    text: transformers.PreTrainedConfig
    own: dict
    grids: tuple = GRIDS


NEXT = Variant(CLIP(), LLAMA, {})
ONEVISION = Variant(
    SIGLIP(image_size=13, patch_size=4),
    transformers.Qwen2Config(**TEXT, tie_word_embeddings=True),
    {
        "vision_aspect_ratio": "anyres_max_1",
        "vision_feature_layer": -2,
        "tie_word_embeddings": True,
    },
    tuple((rows, columns) for rows in range(1, 4) for columns in range(1, 4)),
)
SHAPES = ((40, 40), (20, 90), (90, 20), (1, 40), (61, 1), (37, 50))


def samples(shapes=SHAPES):
    """Text alone, an image of each shape in a sample of its own, several in one."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, IMAGE, n)  # noqa: E731
    alone = [[words(2 + n % 3), picture(*shape), words(4)] for n, shape in enumerate(shapes)]
    return [[words(7)], *alone, [words(1), picture(30, 44), words(2), picture(50, 20), words(3)]]


def processor_of(variant, kind):
    tile = variant.vision.image_size
    points = [[rows * tile, columns * tile] for rows, columns in variant.grids]
    size = {"size": {"shortest_edge": tile}, "crop_size": {"height": tile, "width": tile}}
    if kind is LlavaOnevisionImageProcessorPil:
        size = {"size": {"height": tile, "width": tile}}
    return kind(
        **size, image_grid_pinpoints=points, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3]
    )


def theirs(processor, several):
    """Logits of one sample, of whose images the processor makes the tiles."""

    return lambda model, sample: model(
        **inputs(model, sample, processor, several), use_cache=False
    ).logits[0]


def inputs(model, sample, processor, several):
    """What the model there takes for one sample."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    made = processor([images] if several else images, return_tensors="pt")
    with torch.no_grad():
        lengths = iter([len(feature) for feature in model.get_image_features(**made).pooler_output])
    tokens = [part if is_text(part) else np.full(next(lengths), IMAGE) for part in sample]
    return {"input_ids": torch.tensor(np.concatenate(tokens))[None].long(), **made}


def saved(variant, config, model, processor, folder):
    """A random model in a folder with its processor."""
    points = processor.image_grid_pinpoints
    config = config(
        vision_config=variant.vision,
        text_config=variant.text,
        image_token_index=IMAGE,
        image_grid_pinpoints=points,
        **variant.own,
    )
    model = random_model(config, model)
    with torch.no_grad():
        model.model.image_newline.normal_(0, 1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def check(variant, config, model, processor, folder):
    """Compare the samples that both take: an image of one row may have none left, here as there."""
    model = saved(variant, config, model, processor, folder)
    several = isinstance(processor, LlavaOnevisionImageProcessorPil)
    there, here = theirs(processor, several), given(from_hf(folder), samples())
    taken = []
    for number, sample in enumerate(samples()):
        try:
            here.media(number)
        except BadMedia:
            with pytest.raises(RuntimeError, match="sizes should be greater than 0"):
                there(model, sample)
        else:
            taken.append(sample)
    assert len(taken) >= len(SHAPES)
    return check_samples(model, folder, taken, there)


def drawn_variant(seed, most_tiles):
    """A tower, a text and the grids of tiles that images may have, all of a seed."""
    rng = np.random.default_rng(seed)
    vision, own = drawn.two_norm_tower(rng, most=3)
    if most_tiles:
        own |= {"vision_aspect_ratio": f"anyres_max_{drawn.between(rng, 1, 9)}"}
    grids = [(rows, columns) for rows in range(1, 5) for columns in range(1, 5)]
    chosen = rng.permutation(len(grids))[: drawn.between(rng, 2, len(grids))]
    text = drawn.any_decoder(rng, IMAGE + 1)
    own["tie_word_embeddings"] = text.tie_word_embeddings
    return Variant(vision, text, own, tuple(grids[i] for i in sorted(chosen)))


@pytest.mark.default_cases("LlavaNext-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["LlavaNext", "LlavaNextVideo"])
def test_llava_next_is_what_transformers_makes_of_it(name, seed, tmp_path):
    variant = drawn_variant(seed, most_tiles=False)
    if name == "LlavaNextVideo":
        variant.own["video_token_index"] = IMAGE - 1
    processor = processor_of(variant, LlavaNextImageProcessorPil)
    kinds = (
        getattr(transformers, f"{name}{end}") for end in ("Config", "ForConditionalGeneration")
    )
    batch = check(variant, *kinds, processor, tmp_path)
    assert isinstance(batch.text.slots["vision"], np.ndarray)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_llava_onevision_is_what_transformers_makes_of_it(seed, tmp_path):
    variant = drawn_variant(seed, most_tiles=True)
    processor = processor_of(variant, LlavaOnevisionImageProcessorPil)
    check(
        variant, LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, processor, tmp_path
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["LlavaNext", "LlavaOnevision"])
def test_a_run_is_exported_as_it_was_read_and_transformers_computes_with_it(name, tmp_path):
    variant = {"LlavaNext": NEXT, "LlavaOnevision": ONEVISION}[name]
    processor = processor_of(variant, globals()[f"{name}ImageProcessorPil"])
    kinds = (
        getattr(transformers, f"{name}Config"),
        getattr(transformers, f"{name}ForConditionalGeneration"),
    )
    before = saved(variant, *kinds, processor, tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run")
    export(run, tmp_path / "out")
    there = kinds[1].from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert not torch.equal(there.model.image_newline, before.model.image_newline)
    check_samples(there, tmp_path / "out", samples(), theirs(processor, name == "LlavaOnevision"))
    _, written, _ = loaded(tmp_path / "out")
    folder = RunFolder(run)
    model = Model.build(folder.read_config().model, jnp.float32)
    shardings = parameter_shardings(
        model, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    )
    trained = restore_parameters(
        folder.checkpoints, checkpoint_step(folder.checkpoints), model, shardings
    )
    jax.tree.map(np.testing.assert_array_equal, written, trained)


def saved_next(folder, **own):
    variant = NEXT
    processor = processor_of(variant, LlavaNextImageProcessorPil)
    points = processor.image_grid_pinpoints
    given = {
        "vision_config": variant.vision,
        "text_config": variant.text,
        "image_token_index": IMAGE,
    }
    random_model(
        LlavaNextConfig(**given | {"image_grid_pinpoints": points}),
        LlavaNextForConditionalGeneration,
    ).save_pretrained(folder)
    processor.save_pretrained(folder)
    edit(folder / "config.json", **own)


def edit(path, **own):
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


def test_names_of_tensors_may_be_old_or_new(tmp_path):
    saved_next(tmp_path)
    _, before, config = loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    new = "model.image_newline" in tensors
    for old, name in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        old, name = (name, old) if new else (old, name)
        tensors = {
            name + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()
        }
    for part in ("vision_tower.", "multi_modal_projector.", "image_newline"):
        old, name = (f"model.{part}", part) if new else (part, f"model.{part}")
        tensors = {
            name + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()
        }
    assert ("model.image_newline" in tensors) != new
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path)[1], before)
    newline = config.encoders["vision"].connector
    without = replace(config.encoders["vision"], connector=replace(newline, newline=False))
    counted = [
        parameters(replace(config, encoders={"vision": e}))
        for e in (config.encoders["vision"], without)
    ]
    assert counted[0]["vision.connector"] - counted[1]["vision.connector"] == config.llm.width


def test_without_a_processor_images_are_prepared_by_the_defaults_of_its_class(tmp_path):
    saved_next(tmp_path)
    read = from_hf(tmp_path).encoders["vision"]
    (tmp_path / "preprocessor_config.json").unlink()
    alone = from_hf(tmp_path).encoders["vision"]
    assert alone.images == replace(read.images, background=AnyRes().background)
    np.testing.assert_allclose(alone.mean, (0.48145466, 0.4578275, 0.40821073))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"image_grid_pinpoints": [[12, 24]]},
            "image_grid_pinpoints differs from that of the folder's",
        ),
        ({"vision_feature_layer": []}, "no feature layer is named; name one at least"),
        ({"vision_feature_layer": [-1, 0]}, "feature layer 0 is none of"),
        (
            {"vision_feature_select_strategy": "full"},
            "shows the LLM the class token, which is not supported",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(own, message, tmp_path):
    saved_next(tmp_path, **own)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_images_that_are_not_in_tiles_or_not_counted_in_them_are_refused(tmp_path):
    saved_next(tmp_path, model_type="llava_onevision", vision_aspect_ratio="anyres")
    with pytest.raises(
        UserError, match="vision_aspect_ratio='anyres' is not supported; known: 'anyres_max_9'"
    ):
        from_hf(tmp_path)
    edit(
        tmp_path / "preprocessor_config.json",
        image_processor_type="CLIPImageProcessor",
        do_pad=False,
    )
    with pytest.raises(
        UserError, match="its images come in tiles, but the folder's image processor makes none"
    ):
        from_hf(tmp_path)
