"""Images in tiles stand in the text as transformers' processors write them: as many tokens, where it has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from any_res_folder import image_of, save_next, save_onevision, save_questions
from transformers import AutoTokenizer, LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from mmjax.config import (
    AnyRes,
    AsIs,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LlavaSource,
    Samples,
    TrainingConfig,
)
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.media.preparations import any_res
from mmjax.data.media.token_layout import interpolate_tokens, layout_in_order
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import NEWLINE, ArrangedItems, Sample, SampleLengths, Text
from mmjax.data.sources.opening import open_sources
from mmjax.errors import BadMedia, UserError
from mmjax.hf.families import from_hf


class WithoutVideo(LlavaOnevisionProcessor):
    """That of transformers, whose videos need torchvision."""

    def check_argument_for_proper_class(self, *_):
        return None


KINDS = {
    "next": (save_next, LlavaNextProcessor, LlavaNextImageProcessorPil),
    "onevision": (save_onevision, WithoutVideo, LlavaOnevisionImageProcessorPil),
}


def config_of(checkpoint, data) -> Config:
    source = LlavaSource(str(data), images=str(data.parent / "images"))
    sources = DataConfig(
        {"chat": source}, chat=ChatFormat(str(checkpoint)), cache=str(data.parent / "cache")
    )
    batch = BatchConfig(Samples(4), {"llm": 1, "vision": 1})
    return Config("any_res", sources, batch, from_hf(checkpoint), TrainingConfig(1))


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_are_those_of_the_processor_token_by_token(kind, tmp_path):
    save, whole, images = KINDS[kind]
    checkpoint, data = save(tmp_path), save_questions(tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    given = json.loads((checkpoint / "processor_config.json").read_text()) | {
        "processor_class": None
    }
    template = {"chat_template": tokenizer.chat_template}
    processor = whole(images.from_pretrained(checkpoint), tokenizer, **given | template)
    source = open_sources(config_of(checkpoint, data), "train", tmp_path)["chat"]
    image = tokenizer.convert_tokens_to_ids("<image>")
    for n, record in enumerate(json.loads(data.read_text())):
        content = [{"type": "image"}] * len(record["image"])
        asked = record["conversations"][0]["value"].replace("<image>", "")
        turns = [
            {"role": "user", "content": [*content, {"type": "text", "text": asked}]},
            {"role": "assistant", "content": record["conversations"][1]["value"]},
        ]
        text = processor.apply_chat_template(turns)
        pictures = [image_of(tmp_path / "data", name) for name in record["image"]]
        wanted = processor(text=[text], images=[pictures] if kind == "onevision" else pictures)[
            "input_ids"
        ][0]
        ours = []
        for segment in source.sample(n).segments:
            ours += (
                segment.tokens.tolist()
                if isinstance(segment, Text)
                else [image] * len(segment.tokens)
            )
        assert ours == list(wanted)
        facts = source.facts(n)
        assert facts.text_tokens + facts.item_tokens == len(ours)


def test_tokens_are_interpolated_as_pytorch_does():
    rng = np.random.default_rng(0)
    for (rows, columns), size in (
        ((5, 7), (3, 4)),
        ((9, 4), (7, 1)),
        ((6, 6), (6, 5)),
        ((1, 30), (1, 20)),
    ):
        values = rng.normal(size=(3, rows, columns)).astype(np.float32)
        wanted = torch.nn.functional.interpolate(torch.tensor(values)[None], size, mode="bilinear")[
            0
        ].numpy()
        made = interpolate_tokens(np.arange(rows * columns).reshape(rows, columns), size)
        found = (values.reshape(3, -1)[:, made.token] * made.share).sum(-1)
        np.testing.assert_allclose(found, wanted.reshape(3, -1), atol=1e-6)


def test_an_image_of_one_tile_has_one_newline_and_no_newline_where_there_is_none():
    how = AnyRes(tile=8, pinpoints=("8x16",), order="rows")
    assert any_res.layout(how, True, (30, 30), [(2, 2)]).token[:, 0].tolist() == [
        0,
        1,
        2,
        3,
        NEWLINE,
    ]
    rows = any_res.layout(how, False, (8, 16), [(2, 2)] * 3).token[:, 0].tolist()
    assert rows == [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]


def test_an_image_of_which_interpolation_leaves_nothing_is_bad():
    how = AnyRes(tile=8, pinpoints=("8x64",), order="rows", most_tiles=1)
    with pytest.raises(BadMedia, match="of an image of 1 x 90 pixels nothing is left"):
        any_res.layout(how, True, (1, 90), [(3, 3)] * 9)


@pytest.mark.parametrize(
    ("token", "newline", "message"),
    [
        ([0, 18], True, "its items from 0 on have 18 tokens, and it places those from 0 to 18"),
        ([0, NEWLINE], False, "it places newlines, and connector.newline of 'vision' is false"),
    ],
)
def test_tokens_that_are_not_there_cannot_be_placed(token, newline, message, tmp_path):
    config = config_of(save_next(tmp_path), save_questions(tmp_path / "data"))
    if not newline:
        eyes = config.model.encoders["vision"]
        plain = replace(eyes, connector=replace(eyes.connector, newline=False), images=AsIs())
        config = replace(config, model=replace(config.model, encoders={"vision": plain}))
    arranged = ArrangedItems("vision", 0, 2, layout_in_order(np.array(token)))
    sources = {"one": Arranging(arranged)}
    index = build_index(sources, config.model.encoders)
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.array([0]), None))
    with pytest.raises(UserError, match=message):
        pack_microbatch(plan, BatchLayout.of(config.model), reader_of(sources, index))


@dataclass(frozen=True)
class Arranging:
    """One sample of two tiles, arranged so."""

    arranged: ArrangedItems

    def __len__(self) -> int:
        return 1

    def fingerprint(self) -> str:
        return "one"

    def facts(self, index: int) -> SampleLengths:
        return SampleLengths(2, (("vision", (12, 12)),) * 2, len(self.arranged.tokens))

    def sample(self, index: int) -> Sample:
        return Sample((self.arranged, Text(np.int32([3, 4]), np.ones(2, np.float32))))

    def item(self, index: int, number: int) -> np.ndarray:
        return np.zeros((12, 12, 3), np.uint8)
