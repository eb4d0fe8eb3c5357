"""DeepSeek-OCR 2 computes what transformers computes of packed images in tiles and of text."""

from __future__ import annotations

import inspect
import json
import textwrap
from types import SimpleNamespace

import drawn
import numpy as np
import pytest
import torch
import transformers
from checkpoints import byte_level, save
from image_shapes import picture
from parity import leave_out_defaults, random_model
from parity_samples import check_samples, is_text
from PIL import Image
from test_generated_text import check
from test_image_texts import JANUS_TEMPLATE, conversation, source_of
from transformers import AutoTokenizer, DeepseekOcr2Processor
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)

from mmjax.config import (
    ConnectorConfig,
    LearnedGrid,
    QueryLayers,
    TilesAndSquare,
    VisionConfig,
)
from mmjax.data.media.patches import item_size
from mmjax.data.sample import Text
from mmjax.errors import BadMedia, UserError
from mmjax.hf import deepseek_ocr
from mmjax.hf.families import from_hf

VOCAB, IMAGE = 61, 60


@pytest.fixture
def small(monkeypatch):
    """Classes, here and there, with queries for squares of 2 and 3 tokens a side in place of 12 and 16."""
    there = modeling_deepseek_ocr2.DeepseekOcr2VisionModel
    source = textwrap.dedent(inspect.getsource(there.forward)).replace("144", "4")
    names = dict(vars(modeling_deepseek_ocr2))
    exec(source.replace("@auto_docstring\n", ""), names)
    plain = there.__init__

    def init(self, config):
        plain(self, config)
        for name, count in (("query_768_resolution", 4), ("query_1024_resolution", 9)):
            setattr(self, name, torch.nn.Embedding(count, config.encoder_config.hidden_size))

    monkeypatch.setattr(there, "__init__", init)
    monkeypatch.setattr(there, "forward", names["forward"])
    monkeypatch.setattr(deepseek_ocr, "SIDES", {2: "query_768", 3: "query_1024"})


def made(seed, folder, **own):
    """A random model in a folder with its processor."""
    rng = np.random.default_rng(seed)
    config = drawn.deepseek_ocr2(rng, VOCAB, image_token_id=IMAGE, **own)
    model = random_model(config, transformers.DeepseekOcr2ForConditionalGeneration)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    patch = config.vision_config.sam_config.patch_size
    tile, square = (side * 4 * patch for side in deepseek_ocr.SIDES)
    square = drawn.pick(rng, tile, square, square)
    processor = DeepseekOcr2ImageProcessorPil(
        size={"height": square, "width": square},
        tile_size=tile,
        background_color=[90, 127, 200],
        image_mean=[0.5, 0.45, 0.4],
        image_std=[0.5, 0.3, 0.25],
    )
    processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": patch}))
    return model, processor


def samples(tile):
    """Text alone; an image of one tile, and one of several, between texts."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, 50, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), picture(tile // 2, tile), words(5)],
        [words(2), picture(tile + 1, tile // 3), words(4)],
    ]


def inputs_of(sample, processor, patch):
    """What the model there takes for one sample."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    made = processor(images, return_tensors="pt")
    whole, tile = ((n // patch // 4) ** 2 for n in (processor.size.height, processor.tile_size))
    counts = iter(made["num_local_patches"].tolist())
    ids = []
    for part in sample:
        ids += part.tolist() if is_text(part) else [IMAGE] * (next(counts) * tile + whole + 1)
    return {"input_ids": torch.tensor([ids]), **made}


def check_whole(seed, folder):
    model, processor = made(seed, folder)
    patch = model.config.vision_config.sam_config.patch_size
    theirs = lambda model, sample: model(  # noqa: E731
        **inputs_of(sample, processor, patch), use_cache=False
    ).logits[0]
    check_samples(model, folder, samples(processor.tile_size), theirs, {})


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(
    seed, tmp_path, small
):
    check_whole(seed, tmp_path)


@pytest.mark.exhaustive
def test_a_model_with_as_many_queries_as_its_class_has_is_what_transformers_makes_of_it(tmp_path):
    check_whole(1, tmp_path)


@pytest.mark.exhaustive
def test_it_writes_what_it_writes_there(tmp_path, small):
    model, processor = made(1, tmp_path)
    patch = model.config.vision_config.sam_config.patch_size
    prompts = samples(processor.tile_size)
    check(model, tmp_path, prompts, lambda prompt: inputs_of(prompt, processor, patch), {})


def test_an_image_has_the_tokens_that_its_processor_writes(tmp_path):
    template = JANUS_TEMPLATE.replace("<image_placeholder>", "<image>")
    save(tmp_path, byte_level(("<image>", "<|User|>", "<eos>")), template, eos_token="<eos>")
    config = drawn.deepseek_ocr2(np.random.default_rng(0)).to_dict()
    config["vision_config"]["sam_config"]["patch_size"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = DeepseekOcr2ImageProcessorPil(size={"height": 64, "width": 64}, tile_size=48)
    images.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"patch_size": 1}')
    talk = conversation(tmp_path)
    encoder = from_hf(tmp_path).encoders["vision"]
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    made = images([Image.open(tmp_path / f"{number}.png") for number in range(3)])
    there = SimpleNamespace(
        patch_size=1, downsample_ratio=4, image_processor=images, image_token="<tile>"
    )
    for number in range(3):
        written = DeepseekOcr2Processor.replace_image_token(there, made, number)
        text = text.replace("<image>", written, 1)
    wanted = tokenizer(text.replace("<tile>", "<image>"), add_special_tokens=False)["input_ids"]
    image = tokenizer.convert_tokens_to_ids("<image>")
    ids = []
    for segment in source.sample(0).segments:
        is_text = isinstance(segment, Text)
        ids += segment.tokens.tolist() if is_text else [image] * len(segment.tokens.token)
    assert ids == wanted
    counts = made["num_local_patches"]
    assert len(source.facts(0).items) == sum(counts) + 3
    assert min(counts) < max(counts)


def config_of(folder, part=(), **own):
    """The config of a folder, of which a part says something else."""
    config = drawn.deepseek_ocr2(np.random.default_rng(0)).to_dict()
    inner = config
    for name in part:
        inner = inner[name]
    inner |= own
    (folder / "config.json").write_text(json.dumps(config))
    return config


SAM, ENCODER = ("vision_config", "sam_config"), ("vision_config", "encoder_config")


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        (SAM, {"use_abs_pos": False}, "use_abs_pos=False is not supported; known: True"),
        (SAM, {"use_rel_pos": False}, "use_rel_pos=False is not supported; known: True"),
        (SAM, {"downsample_channels": [4, 5]}, "the second as many as the encoder's hidden_size"),
        (ENCODER, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (ENCODER, {"is_causal": False}, "is_causal=False is not supported"),
        (ENCODER, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        (("text_config",), {"mlp_layer_types": ["odd"] * 9}, "layers dense or sparse"),
        (("text_config",), {"mlp_bias": True}, "mlp_bias=True is not supported; known: False"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(part, own, message, tmp_path):
    config = config_of(tmp_path, part)
    unit = 4 * config["vision_config"]["sam_config"]["patch_size"]
    images = from_hf(tmp_path).encoders["vision"].images
    assert images == TilesAndSquare(tile=12 * unit, square=16 * unit, unit=unit)
    config_of(tmp_path, part, **own)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"tile_size": 40}, "tile_size=40, and the tower queries for images of 48 and 64 pixels"),
        ({"size": {"height": 60, "width": 60}}, "size=60, and the tower queries for images of"),
        ({"image_processor_type": "CLIPImageProcessor"}, "the folder's image processor makes none"),
    ],
)
def test_other_processors_are_refused(own, message, tmp_path):
    config_of(tmp_path, SAM, patch_size=1)
    said = {"image_processor_type": "DeepseekOcr2ImageProcessor", "tile_size": 48}
    said["size"] = {"height": 64, "width": 64}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    with pytest.raises(UserError, match="counts tokens of 64 pixels a side, the tower has tokens"):
        from_hf(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"patch_size": 1}')
    assert from_hf(tmp_path).encoders["vision"].images == TilesAndSquare(48, 64, 4)
    path.write_text(json.dumps(said | own))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_images_without_queries_of_their_size_are_refused():
    layers = QueryLayers(8, 1, 1, 8, sides=(2, 3))
    grid = LearnedGrid(9, 9, interpolation="antialiased")
    own = {"merge_after": 1, "query_layers": layers, "relative_side": 12, "positions": grid}
    eyes = VisionConfig(2, 8, 1, 8, 2, connector=ConnectorConfig(merge=1), **own)
    eyes.check("eyes")
    assert [item_size(eyes, (side, side)).tokens for side in (16, 24)] == [4, 9]
    for size in ((16, 24), (8, 8), (32, 32)):
        with pytest.raises(BadMedia, match=r"takes 12 a side|has queries for 8 x 8, 12 x 12"):
            item_size(eyes, size)
