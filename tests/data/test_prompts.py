"""Prompts: every question once, packed as it is in training, with room for its answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made import config, image, plan_of

from mmjax.config import EmbeddedSource
from mmjax.config_files import default_config, load
from mmjax.data.conversation import BadSample
from mmjax.data.embedded import EmbeddedDataset, encode
from mmjax.data.index import build_index
from mmjax.data.loader import reader_of
from mmjax.data.packing import pack_microbatch
from mmjax.data.prompts import PROMPTS_PER_BATCH, PromptLoader, Prompts, read_answers
from mmjax.data.sample import Facts, Item, Question, Sample, Text
from mmjax.data.text_rows import Arrays
from mmjax.errors import BadMedia, UserError


class Some(EmbeddedDataset):
    """The first samples of a split."""

    def __init__(self, split: str, count: int = 130) -> None:
        super().__init__(EmbeddedSource(), split, 0)
        self.count = count

    def __len__(self) -> int:
        return self.count


CONFIG = load(default_config())
SOURCES = {f"{split}/embedded": Some(split) for split in ("validation", "test")}
LOADER = PromptLoader(SOURCES, CONFIG)


def test_every_question_asked_lies_in_exactly_one_batch_of_one_shape():
    asked = [3, 0, 99, 17, *range(30, 129)]
    found, shapes = [], set()
    for source in SOURCES:
        for lies, batch in LOADER.batches(source, asked):
            found.append(lies[lies >= 0])
            shapes.add((batch.text.token.shape, *(items.values.shape for items in batch.items.values())))
            assert np.all(lies[lies.max(1) < 0] == -1)
    assert sorted(np.concatenate(found).tolist()) == sorted(2 * asked)
    assert len(shapes) == 1
    assert len(found) < 2 * len(asked) / PROMPTS_PER_BATCH * 2


def test_answers_are_read_from_where_they_are_written():
    for source, dataset in SOURCES.items():
        read = {}
        for lies, batch in LOADER.batches(source, range(100)):
            tokens = batch.text.token.copy()
            for row, slot in np.argwhere(lies >= 0):
                answer = np.append(encode(dataset.question(lies[row, slot]).answer), 1)
                at = np.flatnonzero((batch.text.sample[row] == slot) & (batch.text.weight[row] > 0)) + 1
                tokens[row, at[: len(answer)]] = answer
                tokens[row, at[len(answer) :]] = 5  # behind the end: not read
            read |= read_answers(tokens, batch, lies, dataset)
        assert read == {i: dataset.question(i).answer for i in range(100)}


def test_an_unanswered_question_has_no_answer():
    answers = {}
    for lies, batch in LOADER.batches("test/embedded", range(20)):
        answers |= read_answers(batch.text.token, batch, lies, SOURCES["test/embedded"])
    assert answers == dict.fromkeys(range(20), "")


def alone(source: EmbeddedDataset | Prompts, sample: int):
    """One sample in a microbatch of its own."""
    index = build_index({"it": source}, CONFIG.model.encoders)
    parts = index.parts(np.array([sample]))
    plan = plan_of(parts, np.zeros(len(parts.module), np.int32), (256, 512, 512), np.array([sample]))
    return pack_microbatch(plan, Arrays.of(CONFIG.model), reader_of({"it": source}, index))


def test_a_prompt_is_packed_as_its_sample_is_in_training_up_to_the_answer():
    source = Some("test", count=12)
    prompts = Prompts(source, room=20)
    for sample in range(12):
        trained, asked = alone(source, sample), alone(prompts, sample)
        answer = len(source.question(sample).answer) + 1
        end = int((trained.text.sample[0] >= 0).sum())
        for field in ("position", "kind", "sees", "span", "sample", "pos"):
            got, expected = getattr(asked.text, field)[0, :end], getattr(trained.text, field)[0, :end]
            np.testing.assert_array_equal(got, expected, err_msg=field)
        np.testing.assert_array_equal(asked.text.token[0, : end - answer], trained.text.token[0, : end - answer])
        assert not asked.text.token[0, end - answer :].any()
        predicts = np.flatnonzero(trained.text.weight[0])
        assert np.flatnonzero(asked.text.weight[0])[: len(predicts)].tolist() == predicts.tolist()
        for encoder, items in trained.items.items():
            np.testing.assert_array_equal(asked.items[encoder].values, items.values)
            np.testing.assert_array_equal(asked.text.slots[encoder], trained.text.slots[encoder])


class Pictures:
    """Questions about one image of 16 x 16 pixels or several of 24 x 16, then two words, or none where asked for."""

    def __init__(self, *images: int, words: bool = True) -> None:
        self.images, self.words = images, words

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        return "pictures"

    def facts(self, index: int) -> Facts:
        return Facts(2, (("vision", (24 if self.images[index] > 1 else 16, 16)),) * self.images[index])

    def question(self, index: int) -> Question:
        items = [Item("vision", n) for n in range(self.images[index])]
        words = [Text(np.array([3, 4], np.int32), np.zeros(2, np.float32))] if self.words else []
        return Question("image", "image.any", Sample((*items, *words)), "a", ("vision",))

    def sample(self, index: int) -> Sample:
        return self.question(index).prompt

    def item(self, index: int, number: int) -> np.ndarray:
        return image(np.random.default_rng(number), 24 if self.images[index] > 1 else 16, 16)


def test_a_prompt_that_ends_with_an_item_is_refused():
    with pytest.raises(UserError, match="prompt of sample 0 ends with an item"):
        PromptLoader({"test/pictures": Pictures(1, words=False)}, config())


def test_a_prompt_that_fits_no_rows_is_refused_by_name():
    made = config()
    made = replace(made, batch=replace(made.batch, rows={"llm": 3, "vision": 4, "audio": 1}))
    with pytest.raises(UserError, match=r"sample test/pictures\[1\] fits no packed row; lower batch.rows"):
        PromptLoader({"test/pictures": Pictures(1, 5)}, made)
    made.batch.rows["vision"] = 1
    assert sum((lies >= 0).sum() for lies, _ in PromptLoader({"it": Pictures(1, 5)}, made).batches("it", range(2))) == 2


SEEN = next(i for i in range(9, 130) if Some("test").facts(i).items)


class Torn(Some):
    """One sample has no file, and one image is cut off, which only decoding tells."""

    def facts(self, index: int) -> Facts:
        if index == 4:
            raise BadSample("its file is missing")
        return super().facts(index)

    def item(self, index: int, number: int) -> np.ndarray:
        if index == SEEN:
            raise BadMedia("image file is truncated")
        return super().item(index, number)


def test_questions_that_cannot_be_read_are_left_out_and_named():
    loader = PromptLoader({"test/torn": Torn("test", 40)}, CONFIG)
    assert loader.left_out == {"test/torn[4]": "its file is missing"}
    assert loader.usable("test/torn") == [i for i in range(40) if i != 4]
    found = [lies[lies >= 0].tolist() for lies, _ in loader.batches("test/torn", range(40))]
    assert sorted(i for of in found for i in of) == [i for i in range(40) if i not in (4, SEEN)]
    assert loader.left_out[f"test/torn[{SEEN}]"].endswith("image file is truncated")
    assert loader.usable("test/torn") == [i for i in range(40) if i not in (4, SEEN)]


def test_where_bad_samples_are_fatal_a_question_that_cannot_be_read_is():
    fatal = replace(CONFIG, data=replace(CONFIG.data, on_bad_sample="raise"))
    with pytest.raises(UserError, match=r"test/torn\[4\] cannot be asked: its file is missing; mend it"):
        PromptLoader({"test/torn": Torn("test", 40)}, fatal)
