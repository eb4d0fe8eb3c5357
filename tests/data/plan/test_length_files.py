"""Lengths that stand in for data."""

from __future__ import annotations

import numpy as np
from made import AUDIO, VISION

from mmjax.data.media.patches import positions_per_token
from mmjax.data.plan.length_index import index_of_lengths

ENCODERS = {"vision": VISION, "audio": AUDIO}


def test_an_index_of_lengths_holds_whole_tokens_of_items_and_the_rest_as_text():
    lengths = {"llm_tokens": np.array([50, 20, 3]), "vision": np.array([10, 0, 40]), "audio": np.array([0, 7, 0])}
    index = index_of_lengths(lengths, ENCODERS)
    per_token = index.positions_per_token
    assert per_token.tolist() == [positions_per_token(e) for e in ENCODERS.values()]
    assert index.item_encoder.tolist() == [0, 1, 0]
    assert index.item_useful.tolist() == [10, 14, 40]  # the audio encoder's layers see every second frame
    of_item = per_token[[0, 1, 0]]
    assert index.item_positions.tolist() == [-(-n // p) * p for n, p in zip([10, 14, 40], of_item, strict=True)]
    tokens = index.item_positions // of_item
    assert index.item_tokens.tolist() == tokens.tolist()
    assert index.llm_tokens.tolist()[:2] == [50, 20]
    assert index.llm_tokens[2] == max(3, tokens[2] + 1), "a sample has some text"
    assert (index.text_tokens + np.array([tokens[0], tokens[1], tokens[2]])).tolist() == index.llm_tokens.tolist()
    assert index.totals[:, 1].tolist() == [index.item_positions[0], 0, index.item_positions[2]]
