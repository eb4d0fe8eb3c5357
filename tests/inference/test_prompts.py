"""Prompts: a question packed as its sample is in training, up to the answer; samples that can be used."""

from __future__ import annotations

import numpy as np
import pytest
from made import plan_of

from mmjax.config import EmbeddedSource
from mmjax.config.loading import default_config, load
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.length_index import build_index
from mmjax.data.sample import BadSample
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.inference.prompts import QuestionPrompts, Selection, select_usable

CONFIG = load(default_config())


def some() -> EmbeddedDataset:
    return EmbeddedDataset(EmbeddedSource(), "test", 0)


def alone(source: EmbeddedDataset | QuestionPrompts, sample: int):
    """One sample in a microbatch of its own."""
    index = build_index({"it": source}, CONFIG.model.encoders)
    parts = index.parts(np.array([sample]))
    plan = plan_of(
        parts, np.zeros(len(parts.module), np.int32), (256, 512, 512), np.array([sample])
    )
    return pack_microbatch(plan, BatchLayout.of(CONFIG.model), reader_of({"it": source}, index))


def test_a_prompt_is_packed_as_its_sample_is_in_training_up_to_the_answer():
    source = some()
    prompts = QuestionPrompts(source)
    for sample in range(12):
        trained, asked = alone(source, sample), alone(prompts, sample)
        answer = len(source.question(sample).answer) + 1
        end = int((trained.text.sample[0] >= 0).sum()) - answer
        assert int((asked.text.sample[0] >= 0).sum()) == end
        for field in ("token", "position", "kind", "sees", "span", "sample", "pos"):
            got, expected = (
                getattr(asked.text, field)[0, :end],
                getattr(trained.text, field)[0, :end],
            )
            np.testing.assert_array_equal(got, expected, err_msg=field)
        for encoder, items in trained.items.items():
            np.testing.assert_array_equal(asked.items[encoder].values, items.values)
            np.testing.assert_array_equal(
                asked.text.slots[encoder][0, :end], trained.text.slots[encoder][0, :end]
            )


def test_a_selection_has_the_samples_of_several_sources_in_their_order():
    first, second = some(), QuestionPrompts(some())
    chosen = Selection([(second, 5), (first, 3)])
    assert len(chosen) == 2
    assert chosen.facts(0) == second.facts(5)
    assert chosen.facts(1) == first.facts(3)
    np.testing.assert_array_equal(
        chosen.sample(1).segments[-1].tokens, first.sample(3).segments[-1].tokens
    )
    assert chosen.fingerprint() != Selection([(second, 5), (first, 4)]).fingerprint()


def test_samples_behind_the_last_one_used_are_not_looked_at():
    seen = []

    def check(sample: int) -> None:
        seen.append(sample)
        if sample % 2:
            raise BadSample(f"{sample} is odd")

    assert select_usable(range(100), check, 3) == ([0, 2, 4], {1: "1 is odd", 3: "3 is odd"})
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sample", range(3))
def test_the_facts_of_a_prompt_are_its_tokens(sample):
    prompts = QuestionPrompts(some())
    assert prompts.facts(sample).text_tokens == sum(
        len(segment.tokens)
        for segment in prompts.sample(sample).segments
        if hasattr(segment, "tokens")
    )
