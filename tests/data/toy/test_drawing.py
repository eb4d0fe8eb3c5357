"""Prompts to draw digits, and what judges drawn ones."""

from __future__ import annotations

import numpy as np

from mmjax.data.sample import Item, Text
from mmjax.data.toy.dataset import decode_characters
from mmjax.data.toy.digits import digits_by_label
from mmjax.data.toy.drawing import drawings, name_digits


def test_a_sample_is_a_prompt_and_a_picture_of_its_digits():
    source = drawings("train", samples=50, max_digits=2)
    for index in range(50):
        text, item = source.sample(index).segments
        assert isinstance(text, Text)
        assert isinstance(item, Item)
        assert decode_characters(text.tokens.tolist()) == f"draw {source.strip(index).text}"
        assert not text.weights.any()
        facts = source.facts(index)
        assert facts.text_tokens == len(text.tokens)
        (name, size) = facts.items[0]
        assert (name, *size) == ("picture", *source.item(index, 0).shape[:2])
        np.testing.assert_array_equal(source.item(index, 0), source.item(index, 0))


def test_splits_share_no_digit_and_samples_depend_on_seed_and_index():
    digits = {
        split: {d for n in range(300) for d in drawings(split).strip(n).digits}
        for split in ("train", "test")
    }
    assert not digits["train"] & digits["test"]
    assert digits["test"] <= {d for of_label in digits_by_label("test") for d in of_label}
    assert [drawings("train", seed=1).prompt(n) for n in range(20)] != [
        drawings("train").prompt(n) for n in range(20)
    ]


def test_held_out_digits_are_named_rightly_and_those_of_other_prompts_are_not():
    source = drawings("test")
    right = [source.judge(n, source.item(n, 0)) for n in range(200)]
    assert np.mean(right) > 0.95
    swapped = [source.judge(source.partner(n), source.item(n, 0)) for n in range(200)]
    assert np.mean(swapped) < 0.2
    assert name_digits(source.item(0, 0)) == source.strip(0).text
