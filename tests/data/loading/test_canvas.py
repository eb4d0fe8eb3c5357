"""Positions of images in slices are those that MiniCPM-V 4.7 has in transformers, and of each branch as if alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from mmjax.data.loading.canvas import FIRST_ITEM, Grid, canvas_positions, sample_canvas
from mmjax.data.sample import ArrangedItems, Item, Sample, Text, TokenLayout

IMAGE = 9  # what transformers has at the tokens of images
NAMES = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")
MARKERS = (3, 4, 1, 2, 5)
SLICE, SLICE_END, BEGIN, END, BREAK = MARKERS
Parts = list[list[int] | tuple[int, int]]  # tokens, and rows and columns of crops


@pytest.fixture(scope="module")
def model() -> transformers.MiniCPMV4_7Model:
    """One of no size, of whose computations positions alone are called."""
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 10}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = transformers.MiniCPMV4_7Config(
        text_config={"model_type": "qwen3_5_text"} | text, vision_config=vision, insert_layer_id=0
    )
    with torch.device("meta"):
        return transformers.MiniCPMV4_7Model(config)


def like_a_processor(rng: np.random.Generator) -> Parts:
    """Images in slices with what the processor writes around them, one of a size of its own at times."""
    parts: Parts = []
    for _ in range(rng.integers(1, 4)):
        words = (BEGIN, END, SLICE, SLICE_END, BREAK, 7) if rng.random() < 0.3 else (7, 8)
        parts += [[*rng.choice(words, rng.integers(0, 4)), BEGIN], tuple(rng.integers(1, 5, 2))]
        parts.append([END])
        rows, columns = rng.integers(0, 4), rng.integers(1, 4)
        size = rng.integers(1, 4, 2)
        for number in range(rows * columns):
            parts.append([BREAK] * bool(number and number % columns == 0) + [SLICE])
            parts.append(tuple(size if rng.random() < 0.95 else rng.integers(1, 4, 2)))
            parts.append([SLICE_END])
    return [*parts, list(rng.choice([BEGIN, END, BREAK, 7, 8], rng.integers(0, 5)))]


def at_random(rng: np.random.Generator) -> Parts:
    """Crops with any tokens between them, and none before the first at times."""
    parts: Parts = []
    for number in range(rng.integers(1, 5)):
        parts.append(list(rng.choice([*MARKERS, 7], rng.integers(number > 0, 6))))
        parts.append(tuple(rng.integers(1, 4, 2)))
    return [*parts, list(rng.choice([*MARKERS, 7, 7], rng.integers(0, 6)))]


def ids_and_grids(parts: Parts) -> tuple[np.ndarray, list[Grid]]:
    ids, grids = [], []
    for part in parts:
        if isinstance(part, tuple):
            ids += [FIRST_ITEM - len(grids)] * math.prod(map(int, part))
            grids.append((1, *part))
        else:
            ids += part
    return np.array(ids, np.int64), grids


@pytest.mark.parametrize("draw", [like_a_processor, at_random])
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_positions_are_those_of_transformers_whatever_stands_between_images(model, draw, mode):
    rng = np.random.default_rng(0)
    merge = {"16x": 4, "4x": 2}[mode]
    for _ in range(200):
        markers = [-1 if rng.random() < 0.05 else marker for marker in MARKERS]
        for name, marker in zip(NAMES, markers, strict=True):
            setattr(model.config, name, None if marker == -1 else marker)
        ids, grids = ids_and_grids(draw(rng))
        is_image = torch.tensor(ids <= FIRST_ITEM)
        sizes = merge * torch.tensor(np.array(grids)[:, 1:])
        there, _ = model.get_rope_index(
            torch.where(is_image, IMAGE, torch.tensor(ids))[None],
            is_image[None].int(),
            sizes,
            downsample_mode=mode,
        )
        np.testing.assert_array_equal(canvas_positions(ids, grids, markers), there[:, 0].T)


def test_an_image_is_spread_over_the_canvas_of_its_slices_as_torch_rounds():
    for rows in range(1, 41):
        for height in range(1, 131):
            parts: Parts = [[BEGIN], (rows, 1), [END, SLICE], (height, 1), [SLICE_END]]
            _, y, _ = canvas_positions(*ids_and_grids(parts), MARKERS)[1 : rows + 1].T
            there = torch.linspace(0, height - 1, rows).round().long()
            np.testing.assert_array_equal(y, there, str((rows, height)))


def test_images_that_touch_stand_behind_each_other():
    parts: Parts = [[7], (2, 2), (1, 3), [7]]
    _, y, x = canvas_positions(*ids_and_grids(parts), MARKERS).T
    assert y.tolist() == [0, *(0, 0, 1, 1), *(3, 3, 3), 7]
    assert x.tolist() == [0, *(0, 1, 0, 1), *(3, 4, 5), 7]


def text(tokens: list[int], branch: int = 0) -> Text:
    return Text(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), branch)


def test_each_branch_has_the_positions_that_it_has_alone_behind_the_prompt():
    sample = Sample(
        (
            text([7, BEGIN]),
            Item("vision", 0),
            text([END, SLICE]),
            Item("vision", 1),
            text([SLICE_END, BREAK, 7], branch=1),
            text([8, 8], branch=2),
            text([7], branch=2),
        )
    )
    grids = [(1, 3, 2), (1, 2, 4)]
    lengths = [2, 6, 2, 8, 3, 2, 1]
    positions = sample_canvas(sample, lengths, grids, MARKERS)
    prompt: Parts = [[7, BEGIN], (3, 2), [END, SLICE], (2, 4)]
    for answer, span in (([SLICE_END, BREAK, 7], slice(18, 21)), ([8, 8, 7], slice(21, 24))):
        alone = canvas_positions(*ids_and_grids([*prompt, answer]), MARKERS)
        np.testing.assert_array_equal(positions[span], alone[18:])
        np.testing.assert_array_equal(positions[:18], alone[:18])


@pytest.mark.parametrize(
    "segment",
    [
        Item("vision", 0, start=3),
        Item("vision", 0, part=(0, 2)),
        ArrangedItems(
            "vision", 0, 1, TokenLayout(np.zeros((4, 4), np.int32), np.ones((4, 4), np.float32))
        ),
    ],
    ids=["positions", "parts", "arranged"],
)
def test_what_has_no_place_on_a_canvas_is_refused(segment):
    with pytest.raises(ValueError, match=r"model\.llm\.canvas_markers gives .* images=slices"):
        sample_canvas(Sample((text([7]), segment)), [1, 4], [(1, 2, 2)], MARKERS)
