"""MiniCPM-V computes what transformers computes of packed images of any size and text, and learns the same."""

from __future__ import annotations

import json

import drawn
import numpy as np
import pytest
import torch
import transformers
from parity_samples import check_samples, check_ten_steps, is_text
from test_qwen_vl import GRIDS, IMAGE, SMOOTH, VIDEO, random_whole, samples_of, theirs

from mmjax.config import Slices
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

WHOLE = {
    "minicpmv4_6": transformers.MiniCPMV4_6ForConditionalGeneration,
    "minicpmv4_7": transformers.MiniCPMV4_7ForConditionalGeneration,
    "minicpm_ocr": transformers.MiniCPMOcrForConditionalGeneration,
}
# Tokens of the texts around images and slices, behind those that samples draw.
BEGIN, END, SLICE, SLICE_END, BREAK = range(92, 97)
MARKERS = {
    "image_start_id": BEGIN,
    "image_end_id": END,
    "slice_start_id": SLICE,
    "slice_end_id": SLICE_END,
    "newline_id": BREAK,
}


def made(seed, folder, family="minicpmv4_6", **own):
    """A random model in a folder."""
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= MARKERS if family == "minicpmv4_7" else {}
    config = drawn.minicpm(np.random.default_rng(seed), family, **tokens, **own)
    model = random_whole(config, WHOLE[family])
    model.save_pretrained(folder)
    return model


def inputs_of(model, folder):
    """What transformers' model takes for a sample: patches side by side, and the sizes of their grids."""
    vision = from_hf(folder).encoders["vision"]
    side, merge = vision.patch, vision.token_side

    def inputs(parts):
        tokens, patches, grids = [], [], []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
                continue
            rows, columns = part.shape[0] // side, part.shape[1] // side
            tokens += [IMAGE] * (rows * columns // merge**2)
            pixels = ((part / 255 - vision.mean) / vision.std).transpose(2, 0, 1)
            cut = pixels.reshape(3, rows, side, columns, side).transpose(0, 2, 1, 3, 4)
            patches.append(cut.reshape(3, side, -1))
            grids.append([rows, columns])
        given = {"input_ids": torch.tensor([tokens])}
        if grids:
            pixels = np.concatenate(patches, axis=-1)[None]
            given["pixel_values"] = torch.tensor(pixels, dtype=torch.float32)
            given["target_sizes"] = torch.tensor(grids, dtype=torch.int32)
            if model.config.model_type == "minicpmv4_7":
                given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
        return given

    return inputs


def sliced_samples(unit, seed):
    """Images in slices: one in a text, some without a token between them that is no marker, and at a sample's end."""
    rng = np.random.default_rng(seed)
    text = lambda least, most: rng.integers(1, 89, rng.integers(least, most + 1))  # noqa: E731

    def crop(rows, columns):
        return rng.integers(0, 256, (rows * unit, columns * unit, 3)).astype(np.uint8)

    def image():
        """Tokens and crops of an image, with up to 3 x 3 slices."""
        grid, size = rng.integers(1, 4, 2), rng.integers(1, 4, 2)
        slices = range(np.prod(grid) if rng.integers(4) else 0)
        parts = [[BEGIN], crop(*rng.integers(1, 5, 2)), [END]]
        for number in slices:
            if number and number % grid[1] == 0:
                parts.append([BREAK])
            parts += [[SLICE], crop(*size), [SLICE_END]]
        return parts

    lone = text(1, 3), crop(2, 3), text(1, 1), crop(3, 1)  # without markers
    samples = [
        [text(2, 5), *image(), text(1, 4), *image(), text(2, 3)],
        [*image(), *image(), [BREAK], *image(), text(2, 4)],
        [text(7, 7)],
        [crop(2, 2), [END, BREAK, BREAK], text(1, 3), *image()],
        [*lone, [BREAK], text(0, 2), *image(), text(2, 2)],
    ]
    return [list(joined(parts)) for parts in samples]


def joined(parts):
    """Parts of a sample with neighbouring stretches of tokens as one."""
    tokens = []
    for part in parts:
        if np.ndim(part) == 3:
            yield from [np.array(tokens, int)] if tokens else []
            tokens = []
            yield part
        else:
            tokens += list(part)
    yield from [np.array(tokens, int)] if tokens else []


def unit_of(folder):
    """The side of a token in pixels."""
    vision = from_hf(folder).encoders["vision"]
    return vision.patch * vision.token_side


@pytest.mark.default_cases("minicpmv4_6-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_is_what_transformers_makes_of_it(family, seed, tmp_path):
    model = made(seed, tmp_path, family)
    samples = samples_of(unit_of(tmp_path))
    check_samples(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_slices_lie_on_a_canvas_as_transformers_places_them(seed, tmp_path):
    model = made(seed, tmp_path, "minicpmv4_7")
    samples = sliced_samples(unit_of(tmp_path), seed)
    inputs = inputs_of(model, tmp_path)
    text = check_samples(model, tmp_path, samples, theirs(inputs)).text
    for number, parts in enumerate(samples):
        given = inputs(parts)
        here = text.position[0][text.owner[0] == number]
        names = ("mm_token_type_ids", "target_sizes")
        if names[0] not in given:
            np.testing.assert_array_equal(here, np.arange(len(here))[:, None].repeat(3, 1))
            continue
        there, _ = model.model.get_rope_index(
            given["input_ids"], **{name: given[name] for name in names}
        )
        np.testing.assert_array_equal(here, there[:, 0].T)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["minicpmv4_6", "minicpmv4_7"])
def test_ten_steps_of_adamw_have_the_losses_that_torch_has(family, tmp_path):
    rng = np.random.default_rng(0)
    text = drawn.decoder(rng, "qwen3_5_text", **SMOOTH, tie_word_embeddings=True)
    if family == "minicpmv4_7":
        text.rope_parameters |= {"rope_type": "default", "mrope_section": [1, 1, 0]}
    model = made(1, tmp_path, family, text_config=text, downsample_mode="16x")
    unit = unit_of(tmp_path)
    samples = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    if family == "minicpmv4_7":
        samples = sliced_samples(unit, 0)
    check_ten_steps(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("", {"merger_times": 2}, "merger_times=2 is not supported; known: 1"),
        ("", {"merge_kernel_size": [4, 1]}, "merge_kernel_size=.* is not supported"),
        ("", {"downsample_mode": "64x"}, "downsample_mode='64x' is not supported"),
        ("", {"insert_layer_id": 9}, "insert_layer_id=9 is none of the tower's . layers"),
        ("vision_config", {"window_kernel_size": [4, 4]}, "window_kernel_size=.* is not supported"),
        (
            "text_config",
            {"model_type": "qwen3"},
            "text_config: model_type='qwen3' is not supported",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(part, own, message, tmp_path):
    config = drawn.minicpm(np.random.default_rng(0), "minicpmv4_7").to_dict()
    (config[part] if part else config).update(own)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"small_image_upsize": "adaptive"}, "'adaptive': known are always, never"),
        ({"do_resize": False}, "do_resize=False.*set it to true"),
        ({"downsample_mode": "64x"}, "downsample_mode='64x': known are 16x, 4x"),
        ({"downsample_mode": "4x"}, "multiples of 12 pixels, the tower has tokens of 24"),
    ],
)
def test_other_processors_are_refused(own, message, tmp_path):
    config = drawn.minicpm(np.random.default_rng(0), "minicpmv4_6").to_dict()
    config["vision_config"]["patch_size"] = 6
    config["downsample_mode"] = "16x"
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"image_processor_type": "MiniCPMOcrImageProcessor", "patch_size": 6}
    said["downsample_mode"] = "16x"
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    texts = ("<image_id>{image}</image_id><image>", "</image>", "<slice>", "</slice>")
    assert from_hf(tmp_path).encoders["vision"].images == Slices(24, 448, 9, *texts)
    path.write_text(json.dumps(said | own))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)
