"""The text between the tokens of an image is what the processors of transformers write, and is counted."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import drawn
import numpy as np
import pytest
import torch
from checkpoints import byte_level, save
from PIL import Image
from pillow_processors import Lfm2VlImageProcessor, Llama4ImageProcessor
from transformers import (
    AutoTokenizer,
    AyaVisionProcessor,
    Cohere2VisionProcessor,
    Idefics3Processor,
    JanusProcessor,
    Lfm2VlProcessor,
    Llama4Processor,
    MiniCPMV4_6Processor,
    MiniCPMV4_7Config,
    MiniCPMV4_7Model,
    MiniCPMV4_7Processor,
    SmolVLMProcessor,
)
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)

from mmjax.config import (
    ChatFormat,
    ConnectorConfig,
    DynamicTiles,
    FixedSize,
    MessagesSource,
    PixtralResize,
    SplitTiles,
    VisionConfig,
)
from mmjax.data.loading.canvas import sample_canvas
from mmjax.data.media.patches import item_size, token_grid
from mmjax.data.sample import Item, Text
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.opening import open_conversations
from mmjax.data.text.load_chat import load_chat
from mmjax.hf.families import from_hf

SIZES = ((33, 50), (20, 90), (64, 40))  # of images, in pixels
PIXTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' }}{% for part in "
    "message.content %}{{ part.text if part.type == 'text' else '[IMG]' }}{% endfor %}{{ '[/INST]' }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)


FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
IDEFICS = (
    "<|im_start|>",
    "<end_of_utterance>",
    FAKE,
    "<image>",
    WHOLE,
    *(f"<row_1_col_{k}>" for k in (1, 2, 3)),
)
IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}"
    "{% if message.content[0].type == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


COHERE = (
    *("<|user|>", "<|assistant|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    *("<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"),
)
COHERE_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else 'IMAGE' }}{% endfor %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


JANUS = ("<image_placeholder>", "<begin_of_image>", "<end_of_image>", "<|User|>", "<eos>")
JANUS_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|User|>' }}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<image_placeholder>' }}{% endfor %}{{ '\n\n' }}"
    "{% else %}{{ message.content + '<eos>' }}{% endif %}{% endfor %}"
)


MINICPM_NAMES = (
    *("image_token", "video_token", "image_start_token", "image_end_token"),
    *("slice_start_token", "slice_end_token", "image_id_start_token", "image_id_end_token"),
)
MINICPM = (
    *("<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>"),
    *("<image_id>", "</image_id>", "<|User|>", "<eos>"),
)


LFM2_NAMES = ("image_token", "image_start_token", "image_end_token", "image_thumbnail_token")
LFM2 = (
    *("<image>", "<|image_start|>", "<|image_end|>", "<|whole|>", "<|User|>", "<eos>"),
    *(f"<|img_row_{row}_col_1|>" for row in (1, 2)),
)


LLAMA4 = (
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|User|>", "<eos>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)


def conversation(folder: Path) -> list[dict]:
    """One of several images, whose files are written."""
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"{number}.png")
    image = lambda number: {"type": "image", "path": f"{number}.png"}  # noqa: E731
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    return [
        {"role": "user", "content": [image(0), text("What is in the picture?")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [text("And in "), image(1), text("\n"), image(2)]},
        {"role": "assistant", "content": "Two dogs."},
    ]


def source_of(folder: Path, encoder: VisionConfig, talk: list[dict]) -> ChatSource:
    """The conversation as data, with the folder's tokenizer and template."""
    (folder / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    source = MessagesSource(str(folder / "talks.jsonl"))
    reopen = partial(open_conversations, source, "train", folder / "cache", "data.sources.x")
    return ChatSource(
        reopen, load_chat(ChatFormat(str(folder))), {"vision": encoder}, folder / "cache"
    )


def ids_and_weights(
    source: ChatSource, encoder: VisionConfig, image: int
) -> tuple[list[int], np.ndarray]:
    """The tokens of the sample, the image's token for each of an image's, and their weights."""
    sizes = [size for _, size in source.facts(0).items]
    ids, weights = [], []
    for segment in source.sample(0).segments:
        if isinstance(segment, Text):
            ids += segment.tokens.tolist()
            weights += segment.weights.tolist()
            continue
        assert isinstance(segment, Item)
        begin, end = segment.part or (0, item_size(encoder, sizes[segment.number]).tokens)
        ids += [image] * (end - begin)
        weights += [0.0] * (end - begin)
    return ids, np.array(weights)


def test_pixtrals_rows_end_as_its_processor_ends_them(tmp_path: Path) -> None:
    save(tmp_path, byte_level(PIXTRAL), PIXTRAL_TEMPLATE, bos_token="<s>", eos_token="</s>")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llava", "vision_config": {"model_type": "pixtral"}}'
    )
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    how = PixtralResize(unit=8, box=(60, 60), row_end="[IMG_BREAK]", end="[IMG_END]")
    encoder = VisionConfig(1, 8, 1, 8, 4, images=how, connector=ConnectorConfig(merge=2))
    talk = conversation(tmp_path)
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    # of the images in tokens: 20 x 90 pixels shrink to 13 x 60
    for rows, columns in ((5, 7), (2, 8), (8, 5)):
        row = "<image>" * columns
        text = text.replace("[IMG]", "[IMG_BREAK]".join([row] * rows) + "[IMG_END]", 1)
    wanted = tokenizer(text.replace("<image>", "[IMG]"), add_special_tokens=False)["input_ids"]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids("[IMG]"))
    assert ids == wanted
    facts = source.facts(0)
    assert facts.text_tokens + sum(
        item_size(encoder, size).tokens for _, size in facts.items
    ) == len(ids)
    assert tokenizer.decode(np.array(ids)[weights > 0]) == "A cat.</s>Two dogs.</s>"


@pytest.mark.parametrize("processor", [Idefics3Processor, SmolVLMProcessor])
@pytest.mark.parametrize("split", [True, False])
def test_tiles_are_labelled_as_the_processors_label_them(
    processor: type, split: bool, tmp_path: Path
) -> None:
    save(tmp_path, byte_level(IDEFICS), IDEFICS_TEMPLATE, eos_token="<end_of_utterance>")
    kind = {Idefics3Processor: "idefics3", SmolVLMProcessor: "smolvlm"}[processor]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    labels = {"marker": FAKE, "label": "<row_{row}_col_{column}>", "whole": WHOLE}
    how = SplitTiles(tile=16, resize=(40,), split=split, **labels)
    encoder = VisionConfig(1, 8, 1, 8, 4, images=how, connector=ConnectorConfig(merge=2))
    talk = conversation(tmp_path)
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for answer in talk[1::2]:  # this template takes lists alone
        answer["content"] = [{"type": "text", "text": answer["content"]}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    names = {
        "fake_image_token": FAKE,
        "global_image_tag": WHOLE,
        "global_image_token": WHOLE,
        "image_token": "<tile>",
    }
    there = SimpleNamespace(**names, image_seq_len=4)
    # Of 27 x 40, 9 x 40 (10, as it is odd) and 40 x 25 pixels.
    grids = ((2, 3), (1, 3), (3, 2)) if split else ((0, 0),) * 3
    for rows, columns in grids:
        written = processor.replace_image_token(there, {"rows": [[rows]], "cols": [[columns]]}, 0)
        text = text.replace("<image>", written, 1)
    wanted = tokenizer(text.replace("<tile>", "<image>"), add_special_tokens=False)["input_ids"]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids("<image>"))
    assert ids == wanted
    facts = source.facts(0)
    assert len(facts.items) == sum(rows * columns + 1 for rows, columns in grids)
    assert facts.text_tokens + 4 * len(facts.items) == len(ids)
    assert (
        tokenizer.decode(np.array(ids)[weights > 0])
        == " A cat.<end_of_utterance> Two dogs.<end_of_utterance>"
    )


@pytest.mark.parametrize("system", [True, False])
def test_januss_images_and_texts_begin_and_end_as_its_processor_writes_them(
    system: bool, tmp_path: Path
) -> None:
    named = dict(zip(("image_token", "boi_token", "eoi_token"), JANUS, strict=False))
    save(tmp_path, byte_level(JANUS), JANUS_TEMPLATE, eos_token=JANUS[-1], **named)
    (tmp_path / "config.json").write_text('{"model_type": "janus"}')
    how = FixedSize(square="127,127,127", resize=(8, 8), crop=(), fit=2)
    encoder = VisionConfig(1, 8, 1, 8, 4, images=how, connector=ConnectorConfig(merge=1))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens=named)
    images = JanusImageProcessorPil(size={"height": 8, "width": 8}, min_size=2)
    options = {"num_image_tokens": 4, "use_default_system_prompt": system}
    processor = JanusProcessor(images, tokenizer, chat_template=JANUS_TEMPLATE, **options)
    (tmp_path / "processor_config.json").write_text(json.dumps(processor.to_dict()))
    talk = conversation(tmp_path)
    source = source_of(tmp_path, encoder, talk)
    text = processor.apply_chat_template(talk, tokenize=False)
    pictures = [Image.open(tmp_path / f"{number}.png") for number in range(3)]
    wanted = processor(text=text, images=pictures, add_special_tokens=False)["input_ids"][0]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids(JANUS[0]))
    assert ids == list(wanted)
    assert source.facts(0).text_tokens + 4 * 3 == len(ids)
    assert tokenizer.decode(np.array(ids)[weights > 0]) == "A cat.<eos>Two dogs.<eos>"


@pytest.mark.parametrize("options", [{}, {"use_image_id": False, "downsample_mode": "4x"}])
@pytest.mark.parametrize("processor", [MiniCPMV4_6Processor, MiniCPMV4_7Processor])
def test_minicpms_images_are_numbered_and_sliced_as_its_processor_writes_them(
    processor: type, options: dict, tmp_path: Path
) -> None:
    named = dict(zip(MINICPM_NAMES, MINICPM, strict=False))
    template = JANUS_TEMPLATE.replace("<image_placeholder>", MINICPM[0])
    save(tmp_path, byte_level(MINICPM), template, eos_token=MINICPM[-1], **named)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens=named)
    own = {"patch_size": 2, "scale_resolution": 20, "max_slice_nums": 6, **options}
    images = MiniCPMV4_6ImageProcessorPil(**own)
    mode = own.get("downsample_mode", "16x")
    family = processor.__name__.removesuffix("Processor").lower()
    ids = {"image_token_id": 0, "video_token_id": 1}
    if family == "minicpmv4_7":
        texts = {f"{name.removesuffix('_token')}_id": named[name] for name in MINICPM_NAMES[2:6]}
        for name, text in (*texts.items(), ("newline_id", "\n")):
            (ids[name],) = tokenizer(text, add_special_tokens=False)["input_ids"]
    config = drawn.minicpm(np.random.default_rng(0), family, downsample_mode=mode, **ids)
    config.vision_config.patch_size = 2
    config.save_pretrained(tmp_path)
    images.save_pretrained(tmp_path)
    talk = conversation(tmp_path)
    encoder = from_hf(tmp_path).encoders["vision"]
    source = source_of(tmp_path, encoder, talk)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    pictures = [Image.open(tmp_path / f"{number}.png") for number in range(3)]
    there = SimpleNamespace(**named, slice_mode=True)
    made = images(pictures)
    divisor = {"image_token_divisor": encoder.token_side**2}
    written = [processor.replace_image_token(there, made, n, **divisor) for n in range(3)]
    if own.get("use_image_id", True):
        written = MiniCPMV4_6Processor._prepend_local_ids(there, [text], written, MINICPM[0])
    for one in written:
        text = text.replace(MINICPM[0], one.replace(MINICPM[0], "<tile>"), 1)
    wanted = tokenizer(text.replace("<tile>", MINICPM[0]), add_special_tokens=False)["input_ids"]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids(MINICPM[0]))
    assert ids == wanted
    facts = source.facts(0)
    assert facts.text_tokens + sum(item_size(encoder, s).tokens for _, s in facts.items) == len(ids)
    assert len(facts.items) > 9
    if family == "minicpmv4_7":
        check_canvas(tmp_path, source, wanted, tokenizer.convert_tokens_to_ids(MINICPM[0]), made)
    assert tokenizer.decode(np.array(ids)[weights > 0]) == "A cat.<eos>Two dogs.<eos>"


def check_canvas(folder: Path, source: ChatSource, ids: list[int], image: int, made: dict) -> None:
    """Compare positions of a sample with those that the folder's model has there of the same tokens."""
    model = from_hf(folder)
    facts, sample = source.facts(0), source.sample(0)
    grids = [token_grid(model.encoders["vision"], size) for _, size in facts.items]
    lengths = [
        len(segment.tokens) if isinstance(segment, Text) else math.prod(grids[segment.number])
        for segment in sample.segments
    ]
    with torch.device("meta"):
        there = MiniCPMV4_7Model(MiniCPMV4_7Config.from_pretrained(folder))
    tokens, sizes = torch.tensor([ids]), torch.as_tensor(np.array(made["target_sizes"]))
    positions, _ = there.get_rope_index(tokens, (tokens == image).int(), sizes)
    here = sample_canvas(sample, lengths, grids, model.llm.canvas_markers)
    np.testing.assert_array_equal(here, positions[:, 0].T)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_thumbnail": False}, {"do_image_splitting": False}])
def test_lfm2s_large_images_are_cut_and_labelled_as_its_processor_writes_them(
    options: dict, special: bool, tmp_path: Path
) -> None:
    named = dict(zip(LFM2_NAMES, LFM2, strict=False))
    template = JANUS_TEMPLATE.replace("<image_placeholder>", "<image>")
    save(tmp_path, byte_level(LFM2), template, eos_token="<eos>", **named)
    config = drawn.lfm2_vl(np.random.default_rng(0), downsample_factor=3).to_dict()
    config["vision_config"]["patch_size"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"tile_size": 18, "encoder_patch_size": 2, "downsample_factor": 3}
    sizes |= {"min_image_tokens": 5, "max_image_tokens": 26, "max_tiles": 5, **options}
    images = Lfm2VlImageProcessor(**sizes)
    images.save(tmp_path)
    around = {"processor_class": "Lfm2VlProcessor", "use_image_special_tokens": special}
    (tmp_path / "processor_config.json").write_text(json.dumps(around))
    talk = conversation(tmp_path)
    encoder = from_hf(tmp_path).encoders["vision"]
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens=named)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    made = images([Image.open(tmp_path / f"{number}.png") for number in range(3)])
    there = object.__new__(Lfm2VlProcessor)
    vars(there).update(named | {"image_token": "<tile>", "image_processor": images})
    for number in range(3):
        one = there.replace_image_token(made, number, use_image_special_tokens=special)
        text = text.replace("<image>", one, 1)
    wanted = tokenizer(text.replace("<tile>", "<image>"), add_special_tokens=False)["input_ids"]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids("<image>"))
    assert ids == wanted
    facts = source.facts(0)
    assert facts.text_tokens + sum(item_size(encoder, s).tokens for _, s in facts.items) == len(ids)
    assert len(facts.items) == len(made["spatial_shapes"])
    assert (len(facts.items) > 3) == images.do_image_splitting
    assert tokenizer.decode(np.array(ids)[weights > 0]) == "A cat.<eos>Two dogs.<eos>"


@pytest.mark.parametrize("most", [1, 6])
def test_llama4s_tiles_are_separated_as_its_processor_writes_them(
    most: int, tmp_path: Path
) -> None:
    template = JANUS_TEMPLATE.replace("<image_placeholder>", "<|image|>")
    save(tmp_path, byte_level(LLAMA4), template, eos_token="<eos>")
    config = drawn.llama4(np.random.default_rng(3)).to_dict()
    side = config["vision_config"]["image_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = Llama4ImageProcessor(size={"height": side, "width": side}, max_patches=most)
    images.save(tmp_path)
    talk = conversation(tmp_path)
    encoder = from_hf(tmp_path).encoders["vision"]
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    made = images([Image.open(tmp_path / f"{number}.png") for number in range(3)])
    there = object.__new__(Llama4Processor)
    there.patch_size, there.downsample_ratio = encoder.patch, encoder.connector.merge**2
    written = [there.replace_image_token(made, number) for number in range(3)]
    first, *others = text.split("<|image|>")
    text = first + "".join(a + b for a, b in zip(written, others, strict=True))
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids, weights = ids_and_weights(source, encoder, tokenizer.convert_tokens_to_ids("<|patch|>"))
    assert ids == wanted
    facts = source.facts(0)
    assert facts.text_tokens + sum(item_size(encoder, s).tokens for _, s in facts.items) == len(ids)
    assert len(facts.items) == len(made["pixel_values"])
    assert (len(facts.items) > 3) == (most > 1)
    assert tokenizer.decode(np.array(ids)[weights > 0]) == "A cat.<eos>Two dogs.<eos>"


@pytest.mark.parametrize("processor", [AyaVisionProcessor, Cohere2VisionProcessor])
@pytest.mark.parametrize("most", [1, 4])
def test_coheres_tiles_have_the_texts_that_its_processors_write(
    processor: type, most: int, tmp_path: Path
) -> None:
    is_aya = processor is AyaVisionProcessor
    written = "<image>" if is_aya else "<|IMG_PATCH|>"
    template = COHERE_TEMPLATE.replace("IMAGE", written)
    save(tmp_path, byte_level(COHERE), template, eos_token="<|END_OF_TURN_TOKEN|>")
    kind = "aya_vision" if is_aya else "cohere2_vision"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    own = (
        {"label": "TILE_{tile}", "whole": "TILE_GLOBAL"}
        if is_aya
        else {"tile_end": "<|IMG_LINE_BREAK|>"}
    )
    begin, end = COHERE[3:5]
    how = DynamicTiles(tile=(16, 16), max_tiles=most, begin=begin, end=end, **own)
    encoder = VisionConfig(1, 8, 1, 8, 4, images=how, connector=ConnectorConfig(merge=2))
    talk = conversation(tmp_path)
    source = source_of(tmp_path, encoder, talk)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for answer in talk[1::2]:  # this template takes lists alone
        answer["content"] = [{"type": "text", "text": answer["content"]}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    names = {"start_of_img_token": begin, "end_of_img_token": end, "img_patch_token": "<tile>"}
    names |= {"tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"}
    names |= {"boi_token": begin, "eoi_token": end, "image_token": "<tile>"}
    there = SimpleNamespace(
        **names, img_line_break_token=COHERE[6], img_size=16, patch_size=8 if is_aya else 2
    )
    # 1 x 2, 1 x 4 and 2 x 1 tiles, and the whole of each image
    counts = (1, 1, 1) if most == 1 else (3, 5, 3)
    for count in counts:
        expected = processor.replace_image_token(there, {"num_patches": [count]}, 0)
        text = text.replace(written, expected, 1)
    wanted = tokenizer(text.replace("<tile>", "<|IMG_PATCH|>"), add_special_tokens=False)
    ids, weights = ids_and_weights(
        source, encoder, tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>")
    )
    assert ids == wanted["input_ids"]
    assert len(source.facts(0).items) == sum(counts)
    trained = tokenizer.decode(np.array(ids)[weights > 0])
    assert trained == "A cat.<|END_OF_TURN_TOKEN|>Two dogs.<|END_OF_TURN_TOKEN|>"
