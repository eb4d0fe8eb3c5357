"""Lengths that stand in for data."""

from __future__ import annotations

import numpy as np
from made import AUDIO, VISION

from mmjax.config import UnetConfig
from mmjax.data.plan.length_files import index_of_lengths, interleaved_corpus

ENCODERS = {"vision": VISION, "audio": AUDIO}


def test_an_index_of_lengths_holds_whole_tokens_of_items_and_the_rest_as_text():
    lengths = {
        "llm_tokens": np.array([50, 20, 3]),
        "vision": np.array([10, 0, 40]),
        "audio": np.array([0, 7, 0]),
    }
    index = index_of_lengths(lengths, ENCODERS)
    per_token = index.positions_per_token
    assert per_token.tolist() == [e.positions_per_token for e in ENCODERS.values()]
    assert index.item_encoder.tolist() == [0, 1, 0]
    # the audio encoder's layers see every second frame
    assert index.item_useful.tolist() == [10, 14, 40]
    of_item = per_token[[0, 1, 0]]
    assert index.item_positions.tolist() == [
        -(-n // p) * p for n, p in zip([10, 14, 40], of_item, strict=True)
    ]
    tokens = index.item_positions // of_item
    assert index.item_tokens.tolist() == tokens.tolist()
    assert index.llm_tokens.tolist()[:2] == [50, 20]
    assert index.llm_tokens[2] == max(3, tokens[2] + 1), "a sample has some text"
    assert (
        index.text_tokens + np.array([tokens[0], tokens[1], tokens[2]])
    ).tolist() == index.llm_tokens.tolist()
    assert index.totals[:, 1].tolist() == [index.item_positions[0], 0, index.item_positions[2]]


def test_what_a_unet_is_to_make_is_cut_into_images_of_its_size():
    unet = UnetConfig(condition_width=8, size=(8, 16), queries=5)
    lengths = {
        "llm_tokens": np.array([50, 20, 3]),
        "vision": np.array([10, 0, 0]),
        "picture": np.array([256, 0, 128]),
    }
    index = index_of_lengths(lengths, {"vision": VISION, "picture": unet})
    assert index.item_start.tolist() == [0, 3, 3, 4]
    assert index.item_encoder.tolist() == [0, 1, 1, 1]
    assert index.item_positions[1:].tolist() == index.item_useful[1:].tolist() == [128, 128, 128]
    assert index.item_tokens[1:].tolist() == [5, 5, 5]
    assert index.totals[:, 2].tolist() == [256, 0, 128]
    assert index.llm_tokens.tolist() == [50, 20, 6]


def test_interleaved_sequences_hold_at_most_8192_tokens_and_whole_images():
    modules = {"vision": VISION, "picture": UnetConfig(condition_width=8, size=(8, 16), queries=77)}
    lengths = interleaved_corpus(500, 0, modules)
    images, rest = np.divmod(lengths["picture"], 128)
    assert not rest.any()
    assert images.max() > 5 > images.min()
    assert 4000 < lengths["llm_tokens"].mean() < lengths["llm_tokens"].max() <= 8192
    assert (lengths["vision"] + 77 * images < lengths["llm_tokens"]).all()
    index = index_of_lengths(lengths, modules)
    assert (index.item_encoder == 1).sum() == images.sum()
