"""A checkpoint's folder says how its images and clips are prepared: read, they come out as from transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cohere_tiles import Cohere2VisionImageProcessor
from image_shapes import picture
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    VideoLlama3ImageProcessorPil,
)
from transformers.models.video_llava.image_processing_video_llava import VideoLlavaImageProcessor

from mmjax.config import (
    DynamicTiles,
    FixedSize,
    PatchBudget,
    Slices,
    SmartResize,
    TilesAndSquare,
    UsmMel,
    WhisperMel,
)
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.patches import patchify
from mmjax.data.media.preparations import before_encoder
from mmjax.data.media.preparations.whisper_mel import compute_frames
from mmjax.errors import UserError
from mmjax.hf.processors import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    read_audio_processing,
    read_image_processing,
)

PAN = {
    "do_pan_and_scan": True,
    "size": {"height": 30, "width": 42},
    "pan_and_scan_min_crop_size": 1,
}
PAN |= {"pan_and_scan_max_num_crops": 5, "pan_and_scan_min_ratio_to_activate": 1.2}
SHAPES = ((60, 90), (91, 37), (1, 40), (512, 640))
LARGE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
PROCESSORS = {
    "CLIPImageProcessor": (CLIPImageProcessorPil, LARGE),
    "BitImageProcessor": (BitImageProcessorPil, LARGE),
    "SiglipImageProcessor": (
        SiglipImageProcessorPil,
        {"size": {"height": 48, "width": 40}, "resample": 2},
    ),
    "LlavaImageProcessor": (
        LlavaImageProcessorPil,
        LARGE | {"do_pad": True, "image_mean": [0.1, 0.9, 0.5]},
    ),
    "LlavaNextImageProcessor": (
        LlavaNextImageProcessorPil,
        LARGE | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    ),
    "LlavaOnevisionImageProcessor": (
        LlavaOnevisionImageProcessorPil,
        {
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [84, 56], [56, 84]],
        },
    ),
    "Qwen2VLImageProcessor": (
        Qwen2VLImageProcessorPil,
        {
            "size": {"shortest_edge": 1024, "longest_edge": 9000},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
        },
    ),
    "Glm4vImageProcessor": (
        Glm4vImageProcessorPil,
        {
            "size": {"shortest_edge": 4096, "longest_edge": 30_001},
            "patch_size": 12,
            "merge_size": 3,
        },
    ),
    "Glm46VImageProcessor": (
        Glm46VImageProcessorPil,
        {"size": {"shortest_edge": 2048, "longest_edge": 90_000}},
    ),
    "Idefics3ImageProcessor": (
        Idefics3ImageProcessorPil,
        {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 28}},
    ),
    "SmolVLMImageProcessor": (
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 101}, "max_image_size": {"longest_edge": 42}},
    ),
    "PixtralImageProcessor": (
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 100}, "patch_size": 8},
    ),
    "DeepseekVLImageProcessor": (
        DeepseekVLImageProcessorPil,
        {"size": {"height": 40, "width": 40}, "min_size": 5, "image_mean": [0.5, 0.4, 0.3]},
    ),
    "DeepseekOcr2ImageProcessor": (
        DeepseekOcr2ImageProcessorPil,
        {
            "size": {"height": 44, "width": 44},
            "tile_size": 36,
            "background_color": [9, 200, 70],
            "image_std": [0.5, 0.4, 0.3],
        },
    ),
    "JanusImageProcessor": (JanusImageProcessorPil, {"size": {"height": 36, "width": 36}}),
    "PaddleOCRVLImageProcessor": (
        PaddleOCRVLImageProcessorPil,
        {"size": {"shortest_edge": 2048, "longest_edge": 90_000}},
    ),
    "VideoLlama3ImageProcessor": (
        VideoLlama3ImageProcessorPil,
        {"size": {"shortest_edge": 1024, "longest_edge": 9000}, "merge_size": 2},
    ),
    "MiniCPMV4_6ImageProcessor": (
        MiniCPMV4_6ImageProcessorPil,
        {"patch_size": 4, "scale_resolution": 48, "max_slice_nums": 6},
    ),
    "Gemma3ImageProcessor": (Gemma3ImageProcessorPil, {"size": {"height": 40, "width": 40}}),
    "Gemma4ImageProcessor": (
        Gemma4ImageProcessorPil,
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
    ),
    "GotOcr2ImageProcessor": (
        GotOcr2ImageProcessorPil,
        {
            "size": {"height": 40, "width": 40},
            "crop_to_patches": True,
            "max_patches": 6,
            "min_patches": 2,
        },
    ),
    "Cohere2VisionImageProcessor": (
        Cohere2VisionImageProcessor,
        {"size": {"height": 40, "width": 40}, "max_patches": 6, "min_patches": 2},
    ),
}


def write(folder: Path, name: str, tree: Any) -> Path:
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return folder


def check(folder: Path, processor: Any) -> None:
    """What the folder says makes the pixel values that the processor makes, normalised and all."""
    how, mean, std, rescale, _ = read_image_processing(folder)
    for shape in SHAPES:
        expected = np.asarray(processor([Image.fromarray(picture(*shape))])["pixel_values"])
        if isinstance(how, SmartResize):
            (item,) = prepare_image(before_encoder(how), picture(*shape))
            merge = 1 if how.widened else how.merge  # PaddleOCR-VL's are in rows
            made = patchify(item, how.patch, merge).reshape(-1, how.patch, how.patch, 3)
            expected = expected.reshape(len(made), 3, -1, how.patch, how.patch)[:, :, 0].transpose(
                0, 2, 3, 1
            )
        elif isinstance(how, Slices):
            patch = processor.patch_size
            items = prepare_image(before_encoder(how), picture(*shape))
            made = np.concatenate([patchify(item, patch, 1) for item in items])
            made = made.reshape(-1, patch, patch, 3)
            expected = expected.reshape(3, patch, len(made), patch).transpose(2, 1, 3, 0)
        elif isinstance(how, PatchBudget):
            patch = processor.patch_size
            (item,) = prepare_image(before_encoder(how), picture(*shape))
            made = patchify(item, patch, 1).reshape(-1, patch, patch, 3)
            expected = expected.reshape(-1, patch, patch, 3)
            assert not expected[len(made) :].any()  # padding
            expected = expected[: len(made)]
        elif isinstance(how, TilesAndSquare):
            there = processor([Image.fromarray(picture(*shape))])
            made = prepare_image(before_encoder(how), picture(*shape))
            wanted = [*there.get("pixel_values_local", []), *there["pixel_values"]]
            assert [item.shape[:2] for item in made] == [item.shape[1:] for item in wanted]
            made = np.concatenate([item.reshape(-1, 3) for item in made])
            expected = np.concatenate([x.reshape(3, -1) for x in wanted], axis=1).T
        else:
            made = np.stack(prepare_image(before_encoder(how), picture(*shape)))
            expected = expected.reshape(-1, *expected.shape[-3:]).transpose(0, 2, 3, 1)
        np.testing.assert_allclose(
            (made * rescale - np.array(mean)) / np.array(std), expected, atol=2e-6
        )


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_transformers_saved_is_read(name, tmp_path):
    cls, options = PROCESSORS[name]
    processor = cls(**options)
    processor.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"]
        == name
    )
    check(tmp_path, processor)


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_inside_processor_config_win_over_the_file_beside_it(name, tmp_path):
    cls, options = PROCESSORS[name]
    write(
        tmp_path,
        "preprocessor_config.json",
        {"image_processor_type": "CLIPImageProcessor", "size": 7},
    )
    write(
        tmp_path,
        "processor_config.json",
        {"image_processor": cls(**options).to_dict(), "processor_class": "Other"},
    )
    check(tmp_path, cls(**options))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_fields_that_are_missing_or_null_are_the_processors_own_defaults(name, suffix, tmp_path):
    nothing = dict.fromkeys(
        ("size", "crop_size", "image_mean", "do_normalize", "rescale_factor", "resample")
    )
    # LLaVA-NeXT's own default resolutions do not fit its own default size.
    needed = (
        {"image_grid_pinpoints": [[224, 448], [448, 448]]}
        if name == "LlavaNextImageProcessor"
        else {}
    )
    write(
        tmp_path,
        "preprocessor_config.json",
        {"image_processor_type": name + suffix} | nothing | needed,
    )
    check(tmp_path, PROCESSORS[name][0](**needed))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CLIPImageProcessor", {"size": 50, "crop_size": 44}),
        ("CLIPImageProcessor", {"size": [50, 60], "do_center_crop": False}),
        ("CLIPImageProcessor", {"do_resize": False, "crop_size": 60, "do_normalize": False}),
        (
            "SiglipImageProcessor",
            {"do_rescale": False, "image_std": [2.0, 3.0, 4.0], "resample": 1},
        ),
        ("SiglipImageProcessor", {"rescale_factor": 0.01, "do_center_crop": True, "crop_size": 30}),
        (
            "LlavaImageProcessor",
            {"do_pad": True, "size": {"height": 40, "width": 50}, "do_center_crop": False},
        ),
        ("Qwen2VLImageProcessor", {"min_pixels": 900, "max_pixels": 5000, "merge_size": 1}),
        (
            "Qwen2VLImageProcessor",
            {"min_pixels": 900, "size": {"shortest_edge": 5, "longest_edge": 6000}},
        ),
        (
            "PixtralImageProcessor",
            {"size": {"height": 70, "width": 90}, "patch_size": {"height": 7, "width": 7}},
        ),
        ("PixtralImageProcessor", {"size": 44, "do_pad": False}),
        (
            "Idefics3ImageProcessor",
            {"do_image_splitting": False, "max_image_size": {"longest_edge": 40}},
        ),
        (
            "Idefics3ImageProcessor",
            {"size": {"height": 60, "width": 50}, "max_image_size": {"longest_edge": 40}},
        ),
        (
            "SmolVLMImageProcessor",
            {"do_resize": False, "max_image_size": {"longest_edge": 300}, "resample": 3},
        ),
        ("Gemma3ImageProcessor", PAN | {"pan_and_scan_min_crop_size": 16}),
        (
            "Gemma3ImageProcessor",
            PAN | {"pan_and_scan_min_crop_size": 30, "pan_and_scan_max_num_crops": 2},
        ),
        ("Gemma3ImageProcessor", PAN | {"pan_and_scan_min_ratio_to_activate": 1.5, "resample": 3}),
        ("MiniCPMV4_6ImageProcessor", {"downsample_mode": "4x", "scale_resolution": 100}),
        ("MiniCPMV4_6ImageProcessor", {"slice_mode": False, "use_image_id": False}),
        ("GotOcr2ImageProcessor", {"size": 44}),
        ("Cohere2VisionImageProcessor", {"size": 44, "crop_to_patches": False}),
        ("GotOcr2ImageProcessor", {"size": 44, "crop_to_patches": True, "max_patches": 1}),
        (
            "LlavaNextImageProcessor",
            {"size": 224, "image_grid_pinpoints": [[224, 448]], "do_resize": False},
        ),
    ],
)
def test_every_way_to_write_a_field_is_read_as_transformers_reads_it(name, options, tmp_path):
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": name} | options)
    check(tmp_path, PROCESSORS[name][0](**options))


def test_pan_and_scan_is_said_for_the_class_around_it_ignores_it(tmp_path, capsys):
    write(
        tmp_path, "preprocessor_config.json", {"image_processor_type": "Gemma3ImageProcessor"} | PAN
    )
    read_image_processing(tmp_path)
    assert (
        "do_pan_and_scan=true is followed; Gemma3Processor of transformers ignores it"
        in capsys.readouterr().err
    )


def test_older_names_are_known(tmp_path):
    write(
        tmp_path,
        "preprocessor_config.json",
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 60},
    )
    check(tmp_path, CLIPImageProcessorPil(size=60))
    write(
        tmp_path, "preprocessor_config.json", {"image_processor_type": "VideoLlavaImageProcessor"}
    )
    how = read_image_processing(tmp_path)
    there = VideoLlavaImageProcessor()
    for shape in (SHAPES[0], SHAPES[1], SHAPES[3]):  # it takes a side of one pixel for channels
        (made,) = prepare_image(before_encoder(how.preparation), picture(*shape))
        (expected,) = there([Image.fromarray(picture(*shape))])["pixel_values_images"]
        made = (made * how.rescale - np.array(how.mean)) / np.array(how.std)
        np.testing.assert_allclose(made, expected.transpose(1, 2, 0), atol=2e-6)
    old = {
        "image_processor_type": "Qwen2_5_VLImageProcessor",
        "size": {"min_pixels": 900, "max_pixels": 9000},
    }
    write(tmp_path, "preprocessor_config.json", old)
    check(tmp_path, Qwen2VLImageProcessorPil(min_pixels=900, max_pixels=9000))


@pytest.mark.parametrize("says", ["processor_config", "preprocessor_config", "config"])
@pytest.mark.parametrize(
    ("around", "kind"), [("InternVLProcessor", "internvl"), ("AyaVisionProcessor", "aya_vision")]
)
def test_internvls_and_ayas_processors_tile_whatever_the_image_processor_says(
    around, kind, says, tmp_path
):
    fields = {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": False, "size": 40}
    named = {"processor_class": around}
    write(
        tmp_path,
        "preprocessor_config.json",
        fields | (named if says == "preprocessor_config" else {}),
    )
    if says == "processor_config":
        write(tmp_path, "processor_config.json", named | {"image_seq_length": 256})
    if says == "config":
        write(tmp_path, "config.json", {"model_type": kind})
    check(tmp_path, GotOcr2ImageProcessorPil(crop_to_patches=True, size=40))


def test_opengvlabs_folders_are_read_from_their_config_alone(tmp_path):
    config = {
        "model_type": "internvl_chat",
        "force_image_size": 448,
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
    }
    tiles = config | {
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "pad2square": False,
        "downsample_ratio": 0.5,
    }
    write(
        tmp_path,
        "preprocessor_config.json",
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448},
    )
    read = read_image_processing(write(tmp_path, "config.json", tiles))
    assert read[:4] == (DynamicTiles(), IMAGENET_MEAN, IMAGENET_STD, 1 / 255)
    least = {
        "model_type": "internvl_chat",
        "dynamic_image_size": True,
        "vision_config": {"image_size": 224},
    }
    read = read_image_processing(write(tmp_path, "config.json", least))
    assert read.preparation == DynamicTiles(tile=(224, 224), max_tiles=6, thumbnail=False)
    read = read_image_processing(write(tmp_path, "config.json", config))
    assert read.preparation == FixedSize(resize=(448, 448), crop=())
    with pytest.raises(UserError, match=r"config\.json: pad2square=True: only false is known"):
        read_image_processing(write(tmp_path, "config.json", tiles | {"pad2square": True}))
    read = read_image_processing(write(tmp_path, "config.json", {"model_type": "internvl_chat"}))
    # its tower's class has images of 224 pixels
    assert read.preparation == FixedSize(resize=(224, 224), crop=())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ViTImageProcessor",
            {},
            "image_processor_type='ViTImageProcessor': known are CLIPImageProcessor",
        ),
        ("CLIPImageProcessor", {"do_pad": True}, "do_pad=True: only LlavaImageProcessor pads"),
        (
            "CLIPImageProcessor",
            {"use_square_size": True},
            "use_square_size=True: give height and width",
        ),
        (
            "CLIPImageProcessor",
            {"size": {"longest_edge": 9}},
            "size={'longest_edge': 9}: give height and width, or",
        ),
        (
            "CLIPImageProcessor",
            {"size": {"shortest_edge": 9, "longest_edge": 20}},
            "give height and width, or",
        ),
        (
            "CLIPImageProcessor",
            {"size": 22.5},
            "size=22.5: give height and width, or shortest_edge",
        ),
        ("CLIPImageProcessor", {"size": 0}, "size=0: give height and width, or shortest_edge"),
        (
            "CLIPImageProcessor",
            {"crop_size": {"shortest_edge": 9}},
            "crop_size={'shortest_edge': 9}: give height and",
        ),
        (
            "CLIPImageProcessor",
            {"resample": "bicubic"},
            "resample='bicubic': give Pillow's number, 0 to 5",
        ),
        ("CLIPImageProcessor", {"image_mean": [0.5]}, "image_mean=[0.5]: give three numbers"),
        (
            "DeepseekOcr2ImageProcessor",
            {"size": {"height": 9, "width": 8}},
            "size={'height': 9, 'width': 8}: give the same height and width",
        ),
        (
            "DeepseekOcr2ImageProcessor",
            {"background_color": [127]},
            "background_color=[127]: give red, green and blue, from 0 to 255",
        ),
        ("CLIPImageProcessor", {"do_resize": "yes"}, "do_resize='yes': give true or false"),
        ("CLIPImageProcessor", {"rescale_factor": "1"}, "rescale_factor='1': give a number"),
        (
            "Qwen2VLImageProcessor",
            {"do_resize": False},
            "do_resize=False: images that are not whole merge windows",
        ),
        ("Qwen2VLImageProcessor", {"size": 500}, "size=500: give shortest_edge and longest_edge"),
        ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 500}}, "give longest_edge, in pixels"),
        ("Qwen2VLImageProcessor", {"patch_size": 0}, "patch_size=0: give a whole number above 0"),
        (
            "Idefics3ImageProcessor",
            {"max_image_size": 40},
            "max_image_size=40: give longest_edge, in pixels of a tile",
        ),
        (
            "SmolVLMImageProcessor",
            {"size": {"shortest_edge": 9}},
            "size={'shortest_edge': 9}: give height and width",
        ),
        (
            "PixtralImageProcessor",
            {"do_resize": False},
            "do_resize=False: images that are not whole tokens",
        ),
        (
            "PixtralImageProcessor",
            {"do_center_crop": True},
            "do_center_crop=True: images are not cropped",
        ),
        (
            "PixtralImageProcessor",
            {"size": {"shortest_edge": 9}},
            "size={'shortest_edge': 9}: give height and width",
        ),
        (
            "PixtralImageProcessor",
            {"patch_size": {"height": 7, "width": 8}},
            "give one whole number above 0",
        ),
        (
            "Gemma3ImageProcessor",
            {"do_pan_and_scan": True},
            "pan_and_scan_min_crop_size=None: give a whole number",
        ),
        (
            "Gemma3ImageProcessor",
            PAN | {"do_resize": False},
            "do_resize=False: an image and its crops must be of one",
        ),
        (
            "GotOcr2ImageProcessor",
            {"size": {"shortest_edge": 9}},
            "size={'shortest_edge': 9}: give height and width",
        ),
        (
            "LlavaNextImageProcessor",
            {"size": 336},
            "size and crop_size the same; crop_size is {'height': 224",
        ),
        (
            "LlavaNextImageProcessor",
            {"image_grid_pinpoints": [[300, 448]]},
            "in multiples of size, 224",
        ),
        ("LlavaNextImageProcessor", {"image_grid_pinpoints": []}, "give [height, width] of each"),
        (
            "LlavaOnevisionImageProcessor",
            {"size": [384, 400]},
            "size=[384, 400]: tiles must be square",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_file_and_field(name, options, message, tmp_path):
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": name} | options)
    with pytest.raises(UserError) as caught:
        read_image_processing(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'preprocessor_config.json'}: ")
    assert message in str(caught.value)


def test_a_folder_without_a_processor_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"no preprocessor_config\.json, and no image_processor in"):
        read_image_processing(tmp_path)
    for content, reason in (
        ("{", "is no JSON: .*; get the file again"),
        ("[]", "holds no JSON object"),
    ):
        with pytest.raises(UserError, match=reason):
            read_image_processing(write(tmp_path, "preprocessor_config.json", content))
    write(tmp_path, "preprocessor_config.json", {})
    nested = {"image_processor": {"image_processor_type": "CLIPImageProcessor", "size": -1}}
    with pytest.raises(UserError, match=r"processor_config\.json: image_processor: size=-1"):
        read_image_processing(write(tmp_path, "processor_config.json", nested))


@pytest.mark.parametrize("nested", [False, True])
def test_whispers_extractor_is_read(nested, tmp_path):
    extractor = WhisperFeatureExtractor(feature_size=40, hop_length=100, chunk_length=3, n_fft=300)
    if nested:
        write(tmp_path, "processor_config.json", {"feature_extractor": extractor.to_dict()})
    else:
        extractor.save_pretrained(tmp_path)
    how = read_audio_processing(tmp_path)
    assert how == WhisperMel(mels=40, hop=100, seconds=3, window=300)
    wave = np.random.default_rng(0).normal(0, 0.1, 20_000).astype(np.float32)
    expected = extractor(wave, sampling_rate=16_000, return_tensors="np")["input_features"][0].T
    np.testing.assert_allclose(compute_frames(how, wave, 3000), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dither": 0.1}, "dither=0.1: only 0 is known"),
        ({"padding_value": 1.0}, "padding_value=1.0: only 0 is known"),
        ({"padding_side": "left"}, "padding_side='left': only 'right' is known"),
        ({"sampling_rate": 8000}, "sampling_rate=8000: only 16000 is known"),
        ({"n_fft": 401}, "n_fft=401: only even windows are known"),
        ({"feature_size": "80"}, "feature_size='80': give a whole number above 0"),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "known is WhisperFeatureExtractor"),
    ],
)
def test_what_is_not_known_of_clips_is_refused_by_field(field, message, tmp_path):
    write(
        tmp_path,
        "preprocessor_config.json",
        {"feature_extractor_type": "WhisperFeatureExtractor"} | field,
    )
    with pytest.raises(UserError) as caught:
        read_audio_processing(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dither": 0.1}, "dither=0.1: only 0 is known"),
        ({"preemphasis": 0.97}, "preemphasis=0.97: only 0 is known"),
        ({"fft_overdrive": True}, "fft_overdrive=True: only False is known"),
        ({"input_scale_factor": 2.0}, "input_scale_factor=2.0: only 1 is known"),
        ({"per_bin_mean": [0.0] * 128}, "only None is known"),
        ({"padding_side": "left"}, "padding_side='left': only 'right' is known"),
        ({"sampling_rate": 8000}, "sampling_rate=8000: only 16000 is known"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "known is Gemma4AudioFeatureExtr"),
    ],
)
def test_what_is_not_known_of_gemma4s_clips_is_refused_by_field(field, message, tmp_path):
    name = "Gemma4AudioFeatureExtractor"
    said = {"feature_extractor_type": name}
    write(tmp_path, "preprocessor_config.json", said)
    assert read_audio_processing(tmp_path, name, UsmMel) == UsmMel()
    write(tmp_path, "preprocessor_config.json", said | field)
    with pytest.raises(UserError) as caught:
        read_audio_processing(tmp_path, name, UsmMel)
    assert message in str(caught.value)


def test_whispers_defaults_are_its_own(tmp_path):
    write(
        tmp_path, "preprocessor_config.json", {"feature_extractor_type": "WhisperFeatureExtractor"}
    )
    extractor, how = WhisperFeatureExtractor(), read_audio_processing(tmp_path)
    given = (extractor.feature_size, extractor.sampling_rate, extractor.n_fft, extractor.hop_length)
    assert (how.mels, how.sample_rate, how.window, how.hop, how.seconds) == (
        *given,
        extractor.chunk_length,
    )
