"""Gemma 4 computes what transformers computes of packed images of any shape and text."""

from __future__ import annotations

import json
from functools import partial

import drawn
import numpy as np
import peft
import pytest
import torch
import transformers
from fine_tuning import moved
from parity import random_model
from parity_samples import check_samples, check_ten_steps, is_text
from test_audio_towers import clip

from mmjax import export
from mmjax.config import LoraConfig, PatchBudget, UsmMel
from mmjax.errors import UserError
from mmjax.hf import gemma4
from mmjax.hf.families import from_hf
from mmjax.hf.processors import read_audio_processing

VOCAB, IMAGE, CLIP = 61, 60, 58
MELS = 16
EXTRACTOR = transformers.Gemma4AudioFeatureExtractor(feature_size=MELS)
GRIDS = [(3, 1), (1, 1), (2, 3), (1, 2), (3, 3)]  # of tokens


@pytest.fixture(autouse=True)
def hears_few_bins(monkeypatch):
    hear_few_bins(monkeypatch)


def hear_few_bins(monkeypatch):
    """Make fewer bins of clips where a folder says nothing: with 128, a ReLU's input would always be nearly 0."""
    monkeypatch.setattr(gemma4, "UsmMel", lambda: UsmMel(mels=MELS))


def made(seed, folder, **own):
    """A random model in a folder."""
    config = drawn.gemma4(
        np.random.default_rng(seed),
        VOCAB,
        MELS,
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        audio_token_id=CLIP,
        **own,
    )
    model = random_model(config, transformers.Gemma4ForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def samples(model, seed=0):
    """Text alone; one image; two images with text between; an image first."""
    rng = np.random.default_rng(seed)
    vision = model.config.vision_config
    unit = vision.patch_size * vision.pooling_kernel_size
    grids = iter([grid for grid in GRIDS if max(grid) * vision.pooling_kernel_size < 10])

    def image():
        rows, columns = next(grids)
        return rng.integers(0, 256, (rows * unit, columns * unit, 3), np.uint8)

    words = lambda n: rng.integers(1, IMAGE - 2, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), image(), words(5)],
        [words(2), image(), words(1), image(), words(4)],
        [image(), words(6)],
        [words(2), clip(9_000), words(3), clip(161), words(1)],
        [clip(8_001), words(2), image(), words(4)],
    ]


def inputs(model, sample):
    """What transformers' model takes for a sample, whose images are patches row by row."""
    vision = model.config.vision_config
    side, merge = vision.patch_size, vision.pooling_kernel_size
    tokens = []
    patches = []
    places = []
    clips = []
    for part in sample:
        if is_text(part):
            tokens += part.tolist()
            continue
        if part.ndim == 1:
            clips.append(part)
            frames = EXTRACTOR([part])["input_features_mask"][0].sum()
            tokens += [CLIP] * -(-int(frames) // 4)
            continue
        rows, columns = part.shape[0] // side, part.shape[1] // side
        tokens += [IMAGE] * (rows * columns // merge**2)
        cut = (part / 255).reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        patches.append(cut.reshape(rows * columns, -1))
        places.append(
            np.stack(np.unravel_index(np.arange(rows * columns), (rows, columns))[::-1], 1)
        )
    given = {"input_ids": torch.tensor([tokens])}
    if patches:
        longest = max(map(len, patches))
        pad = lambda x, value: np.pad(x, ((0, longest - len(x)), (0, 0)), constant_values=value)  # noqa: E731
        given |= {
            "pixel_values": torch.tensor(
                np.stack([pad(x, 0) for x in patches]), dtype=torch.float32
            ),
            "image_position_ids": torch.tensor(np.stack([pad(x, -1) for x in places])),
            "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
        }
    return given | (EXTRACTOR(clips, return_tensors="pt") if clips else {})


def theirs(model, sample):
    # whose last layers, if they share keys and take no vectors of tokens, fail at keeping fewer
    every = {"use_cache": False, "output_hidden_states": True}
    return model(**inputs(model, sample), **every).logits[0]


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_gemma4_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    check_samples(model, tmp_path, samples(model), theirs)


def test_adapters_of_clipped_layers_compute_in_peft_what_the_merged_folder_computes(tmp_path):
    made(0, tmp_path / "source")
    adapted = ("llm.*.attention.*", "vision.*.attention.*", "vision.*.mlp.*", "*.connector.*")
    lora = {"all": LoraConfig((*adapted, "audio.layers.*"), 4, 6.0)}
    # whose scales of channels are no module's in PEFT's terms
    encoders = from_hf(tmp_path / "source", freeze=["audio"]).encoders
    run = moved(tmp_path / "source", tmp_path / "run", lora=lora, encoders=encoders)
    export.export(run, tmp_path / "merged")
    export.export(run, tmp_path / "adapter", adapter=True)
    # some of the drawn widths are not what torch's grouped products take
    kind = partial(transformers.Gemma4ForConditionalGeneration.from_pretrained,
                   experts_implementation="eager")  # fmt: skip
    merged, source = (kind(tmp_path / name).eval() for name in ("merged", "source"))
    sample = samples(source)[-1]
    with torch.no_grad():
        before, wanted = theirs(source, sample), theirs(merged, sample)
        found = theirs(peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval(), sample)
    assert (before - wanted).abs().max() > 0.01
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)
    bounds = [name for name in merged.state_dict() if name.endswith("put_max")]
    assert bounds
    assert all(torch.equal(merged.state_dict()[n], source.state_dict()[n]) for n in bounds)


@pytest.mark.exhaustive
def test_ten_steps_of_gemma4_have_the_losses_that_torch_has(tmp_path):
    model = made(0, tmp_path)
    check_ten_steps(model, tmp_path, samples(model), theirs)


def test_clips_are_those_of_the_folders_extractor(tmp_path):
    made(0, tmp_path)
    said = EXTRACTOR.to_dict() | {"frame_length_ms": 30.0, "max_frequency": 7000.0}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(
        json.dumps(said | {"image_processor_type": "Gemma4ImageProcessor"}, default=float)
    )
    clips = read_audio_processing(tmp_path, gemma4.EXTRACTOR, UsmMel)
    assert clips == UsmMel(MELS, window=480, high=7000.0)


def test_images_are_those_of_the_folders_processor_and_pixels_are_moved_as_the_tower_does(tmp_path):
    vision = made(0, tmp_path).config.vision_config
    said = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": vision.patch_size,
        "pooling_kernel_size": vision.pooling_kernel_size,
        "max_soft_tokens": 70,
    }
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["sliding_window"] = 70
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = from_hf(tmp_path).encoders["vision"]
    unit = vision.patch_size * vision.pooling_kernel_size
    assert read.images == PatchBudget(unit, 70)
    assert (read.mean, read.std) == ((0.5,) * 3, (0.5,) * 3)
    path.write_text(json.dumps(said | {"patch_size": vision.patch_size + 1}))
    with pytest.raises(UserError, match="make patch_size times pooling_kernel_size the same"):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("vision_config", {"pooling_kernel_size": 1}, "pooling_kernel_size=1 is not supported"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not"),
        ("vision_config", {"head_dim": 4}, "head_dim=4 is not supported"),
        ("audio_config", {"attention_context_left": 1}, "attention_context_left=1 and"),
        ("audio_config", {"attention_invalid_logits_value": -1e4}, "logits_value=-10000.0"),
        ("audio_config", {"subsampling_conv_channels": [8, 4]}, "which are 4 of 16"),
        (
            "text_config",
            {"use_bidirectional_attention": "vision", "layer_types": None, "sliding_window": 69},
            "sliding_window=69 is less than an image's max_soft_tokens=70",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(part, own, message, tmp_path):
    config = made(0, tmp_path).config
    vision = config.vision_config
    said = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
    said |= {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    config = json.loads((tmp_path / "config.json").read_text())
    config[part] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)
