"""Gemma 4 without towers computes what transformers computes of packed images, clips and texts."""

from __future__ import annotations

import json

import drawn
import numpy as np
import peft
import pytest
import torch
import transformers
from fine_tuning import moved
from parity import random_model
from parity_samples import check_samples, check_ten_steps, is_text
from PIL import Image
from pillow_processors import Gemma4UnifiedImageProcessor
from test_audio_towers import clip

from mmjax import export
from mmjax.config import LoraConfig, PatchBudget, Waveform
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.patches import patchify
from mmjax.data.media.preparations import before_encoder
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

VOCAB, IMAGE, CLIP = 61, 60, 58
GRIDS = [(3, 1), (1, 1), (2, 3), (1, 2), (3, 3)]  # of tokens


def made(seed, folder, **own):
    """A random model in a folder."""
    config = drawn.gemma4_unified(
        np.random.default_rng(seed),
        VOCAB,
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        audio_token_id=CLIP,
        **own,
    )
    model = random_model(config, transformers.Gemma4UnifiedForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def processor_of(model, **own):
    vision = model.config.vision_config
    sizes = {name: getattr(vision, name) for name in ("patch_size", "pooling_kernel_size")}
    return Gemma4UnifiedImageProcessor(max_soft_tokens=70, **sizes, **own)


def samples(model, seed=0):
    """Text alone; one image; two images with text between; an image first; clips of whole frames and others."""
    rng = np.random.default_rng(seed)
    vision, frame = model.config.vision_config, model.config.audio_config.audio_embed_dim
    unit = vision.patch_size * vision.pooling_kernel_size
    grids = iter(GRIDS)

    def image():
        rows, columns = next(grids)
        return rng.integers(0, 256, (rows * unit, columns * unit, 3), np.uint8)

    words = lambda n: rng.integers(1, IMAGE - 2, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), image(), words(5)],
        [words(2), image(), words(1), image(), words(4)],
        [image(), words(6)],
        [words(2), clip(3 * frame), words(3), clip(1), words(1)],
        [clip(12 * frame + 1), words(2), image(), words(4)],
    ]


def inputs(model, sample):
    """What transformers' model takes for a sample, by its own processors."""
    tokens, pictures, clips = [], [], []
    unit = model.config.vision_config.model_patch_size
    frame = model.config.audio_config.audio_embed_dim
    for part in sample:
        if is_text(part):
            tokens += part.tolist()
        elif part.ndim == 1:
            clips.append(part)
            tokens += [CLIP] * -(-len(part) // frame)
        else:
            pictures.append(Image.fromarray(part))
            tokens += [IMAGE] * (part.shape[0] * part.shape[1] // unit**2)
    given = {"input_ids": torch.tensor([tokens])}
    given["mm_token_type_ids"] = (given["input_ids"] == IMAGE) + 3 * (given["input_ids"] == CLIP)
    if pictures:
        images = processor_of(model, do_resize=False)(pictures)
        given |= {name: images[name] for name in ("pixel_values", "image_position_ids")}
    extractor = transformers.Gemma4UnifiedAudioFeatureExtractor(
        feature_size=frame, audio_samples_per_token=frame
    )
    return given | (extractor(clips, return_tensors="pt") if clips else {})


def theirs(model, sample):
    every = {"use_cache": False, "output_hidden_states": True}
    return model(**inputs(model, sample), **every).logits[0]


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_gemma4_without_towers_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    check_samples(model, tmp_path, samples(model), theirs)


@pytest.mark.exhaustive
def test_ten_steps_without_towers_have_the_losses_that_torch_has(tmp_path):
    model = made(2, tmp_path)
    check_ten_steps(model, tmp_path, samples(model), theirs)


def test_adapters_and_layers_trained_whole_compute_in_peft_what_the_merged_folder_computes(
    tmp_path,
):
    made(0, tmp_path / "source")
    lora = {"all": LoraConfig(("llm.*.attention.*", "*.connector.*"), 4, 6.0)}
    # The embedding of images and its norms are no linear layers of layers, and clips have none.
    encoders = from_hf(tmp_path / "source", freeze=["vision", "audio"]).encoders
    run = moved(tmp_path / "source", tmp_path / "run", lora=lora, encoders=encoders)
    export.export(run, tmp_path / "merged")
    export.export(run, tmp_path / "adapter", adapter=True)
    kind = transformers.Gemma4UnifiedForConditionalGeneration.from_pretrained
    merged, source = (kind(tmp_path / name).eval() for name in ("merged", "source"))
    sample = samples(source)[-1]
    with torch.no_grad():
        before, wanted = theirs(source, sample), theirs(merged, sample)
        found = theirs(peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval(), sample)
    assert (before - wanted).abs().max() > 0.01
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


def test_images_are_those_of_the_folders_processor(tmp_path):
    model = made(0, tmp_path)
    processor = processor_of(model)
    processor.save(tmp_path)
    vision = from_hf(tmp_path).encoders["vision"]
    assert vision.images == PatchBudget(vision.patch, 70)
    for size in ((40, 70), (11, 250), (333, 29)):
        image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        (item,) = prepare_image(before_encoder(vision.images), image)
        made_there = processor([Image.fromarray(image)])
        count = int(made_there["num_soft_tokens_per_image"][0])
        rows, columns = (side // vision.patch for side in item.shape[:2])
        assert count == rows * columns
        places = np.stack(np.unravel_index(np.arange(count), (rows, columns))[::-1], 1)
        np.testing.assert_array_equal(made_there["image_position_ids"][0, :count], places)
        ours = patchify(item, vision.patch, 1).reshape(count, -1) / 255
        np.testing.assert_allclose(made_there["pixel_values"][0, :count], ours, atol=2e-6)


def test_clips_are_those_of_the_folders_extractor(tmp_path):
    frame = made(0, tmp_path).config.audio_config.audio_embed_dim
    said = {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "sampling_rate": 8000}
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"feature_extractor": said | {"audio_samples_per_token": frame}}))
    config = json.loads((tmp_path / "config.json").read_text()) | {"vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_hf(tmp_path).encoders["audio"].clips == Waveform(frame, 8000)
    for own, message in (
        ({}, "the folder's extractor says audio_samples_per_token=640; make them the same"),
        ({"padding_value": 1.0}, "padding_value=1.0: only 0 is known"),
        ({"padding_side": "left"}, "padding_side='left': only right is known"),
    ):
        path.write_text(json.dumps({"feature_extractor": said | own}))
        with pytest.raises(UserError, match=message):
            from_hf(tmp_path)


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("vision_config", {"output_proj_dims": 9}, "output_proj_dims=9 is not supported; known: "),
        ("vision_config", {"model_patch_size": 9}, "model_patch_size=9 is not supported; known: "),
        ("audio_config", {"hidden_size": 9}, "hidden_size=9 is not supported; known: "),
        (
            "text_config",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention='all'",
        ),
        (
            "text_config",
            {"use_bidirectional_attention": "vision", "sliding_window": 69},
            "sliding_window=69 is less than an image's max_soft_tokens=70",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(part, own, message, tmp_path):
    model = made(0, tmp_path)
    processor_of(model).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[part] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize("absent", ["vision_config", "audio_config"])
def test_a_folder_without_images_or_without_clips_is_read_and_its_tensors_left_alone(
    absent, tmp_path
):
    model = made(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {absent: None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    axes = 1 if absent == "vision_config" else 3  # of the media that are read
    read = [x for x in samples(model) if all(is_text(p) or p.ndim == axes for p in x)]
    check_samples(model, tmp_path, read, theirs)
