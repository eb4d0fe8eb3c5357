"""Muse Glimmer computes what transformers computes of packed images, videos and texts."""

from __future__ import annotations
import __future__

import ast
import itertools
import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn
import numpy as np
import peft
import pytest
import torch
import transformers
from checkpoints import CHATML, QWEN2_VL, byte_level, save
from fine_tuning import moved
from parity import loaded
from parity_samples import check_packed, check_samples, check_ten_steps, is_text, packed_source
from test_qwen_vl import GRIDS, IMAGE, VIDEO, random_whole, samples_of, theirs
from test_video import conversations, source_of
from transformers import MuseGlimmerProcessor
from transformers.video_utils import VideoMetadata, load_video

from mmjax import export
from mmjax.config import CappedGrid, LoraConfig, MuseVideo, VisionConfig
from mmjax.data.media.decode import VideoHeader
from mmjax.data.media.image_transforms import prepared_sizes
from mmjax.data.media.preparations import before_encoder, sample_video
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

LIBRARY = Path(transformers.__file__).parent / "models/muse_glimmer"
TOKENS = (
    *CHATML,
    "<|image_start|>",
    "<|patch|>",
    "<|image_end|>",
    "<|vid_start|>",
    "<|video|>",
    "<|vid_frame_separator|>",
    "<|vid_end|>",
)
TEMPLATE = QWEN2_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|patch|>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|video|>"
)
RATES = (Fraction(30), Fraction(30_000, 1001), Fraction(25), Fraction(450, 367), Fraction(60))


@cache
def there(file: str, name: str) -> Any:
    """A function of a module that wants torchvision."""
    nodes = ast.walk(ast.parse((LIBRARY / file).read_text()))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    names = {"itertools": itertools, "math": math, "torch": torch}
    module = ast.Module(found[:1], [])
    flags = __future__.annotations.compiler_flag
    exec(compile(module, file, "exec", flags=flags), names)
    return names[name]


def resized(*sizes: int) -> tuple[int, int]:
    """The size that transformers gives an image: of height, width, pixels of a token, most tokens."""
    return there("image_processing_muse_glimmer.py", "smart_resize")(*sizes)


def frames_there(metadata: VideoMetadata, unit: int, fps: float, most: int) -> np.ndarray:
    """The frames that transformers takes of a video."""
    given = SimpleNamespace(fps=fps, num_frames=most)
    sample = there("video_processing_muse_glimmer.py", "sample_frames")
    return sample(given, metadata, temporal_patch_size=unit).numpy()


def written_there(grid: Any, metadata: VideoMetadata, unit: int, merge: int) -> str:
    """The text that transformers writes for a video."""
    videos = SimpleNamespace(
        merge_size=merge, temporal_patch_size=unit, frame_timestamp_format="Time: {timestamp:.1f}s"
    )
    processor = SimpleNamespace(
        video_processor=videos,
        video_token="<|video|>",
        video_sep_token="<|vid_frame_separator|>",
        video_start_token="<|vid_start|>",
        video_end_token="<|vid_end|>",
    )
    given = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    return MuseGlimmerProcessor.replace_video_token(processor, given, 0)


def made(seed, folder, vocab=97, **tokens):
    """A random model in a folder."""
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO} | tokens
    config = drawn.muse_glimmer(np.random.default_rng(seed), vocab, **ids)
    model = random_whole(config, transformers.MuseGlimmerForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def unit_of(model):
    """Pixels of a side of a token."""
    vision = model.config.vision_config
    return vision.patch_size * vision.merge_size


def patches_of(frames, encoder):
    """The rows of patches of frames `[n, h, w, 3]` as its processors cut them, and their grid."""
    side, unit = encoder.patch, encoder.frames
    count, height, width, _ = frames.shape
    grid = count // unit, height // side, width // side
    pixels = (frames / 255 - encoder.mean) / encoder.std
    parts = pixels.reshape(grid[0], unit, grid[1], side, grid[2], side, 3)
    parts = parts.transpose(0, 2, 4, 1, 6, 3, 5).reshape(math.prod(grid), -1)
    return torch.tensor(parts, dtype=torch.float32), grid


def media_of(images, videos, encoder):
    """The inputs that transformers' model takes for images and videos, `[n, h, w, 3]` each."""
    given = {}
    for kind, name, media in (("image", "", images), ("video", "_videos", videos)):
        if media:
            patches, grids = zip(*(patches_of(frames, encoder) for frames in media), strict=True)
            given |= {f"pixel_values{name}": torch.cat(patches)}
            given |= {f"{kind}_grid_thw": torch.tensor(grids)}
    return given


def inputs_of(model, folder):
    """What transformers' model takes for a sample of images and texts."""
    encoder = from_hf(folder).encoders["vision"]
    unit = unit_of(model)

    def inputs(parts):
        tokens, images = [], []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
                continue
            images.append(np.stack([part] * encoder.frames))
            tokens += [IMAGE] * (part.shape[0] * part.shape[1] // unit**2)
        return {"input_ids": torch.tensor([tokens])} | media_of(images, [], encoder)

    return inputs


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_a_whole_model_is_what_transformers_makes_of_it(seed, tmp_path):
    model = made(seed, tmp_path)
    check_samples(model, tmp_path, samples_of(unit_of(model)), theirs(inputs_of(model, tmp_path)))


@pytest.mark.exhaustive
def test_ten_steps_of_adamw_have_the_losses_that_torch_has(tmp_path):
    model = made(2, tmp_path)
    samples = samples_of(unit_of(model)) + samples_of(unit_of(model), GRIDS[::-1], seed=1)
    check_ten_steps(model, tmp_path, samples, theirs(inputs_of(model, tmp_path)))


ADAPTED = ("llm.*.attention.*", "llm.*.mlp.*", "vision.*")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1])
def test_adapters_compute_in_peft_what_the_merged_folder_computes(seed, tmp_path):
    made(seed, tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run", lora={"all": LoraConfig(ADAPTED, 4, 6.0)})
    export.export(run, tmp_path / "merged")
    export.export(run, tmp_path / "adapter", adapter=True)
    kind = transformers.MuseGlimmerForConditionalGeneration.from_pretrained
    merged, source = (kind(tmp_path / name).eval() for name in ("merged", "source"))
    inputs = inputs_of(source, tmp_path / "source")(samples_of(unit_of(source))[0])
    with torch.no_grad():
        before, wanted = source(**inputs).logits, merged(**inputs).logits
        found = peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval()(**inputs).logits
    assert (before - wanted).abs().max() > 0.01
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("vision_config", {"pos_emb_width": 9}, "pos_emb_width=9 is not supported"),
        ("vision_config", {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 is not supported"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not"),
        ("text_config", {"layer_rope_theta": [7]}, "layer_rope_theta must give each of .* 0 or "),
        ("text_config", {"post_norm_eps": 0.0}, "post_norm_eps=0.0 must be above 0"),
    ],
)
def test_what_would_be_another_model_is_refused(part, own, message, tmp_path):
    made(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[part] |= own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def processors(folder, model, images=None, videos=None):
    """Write the processors of a model's folder."""
    vision = model.config.vision_config
    same = {"patch_size": vision.patch_size, "merge_size": vision.merge_size}
    same["temporal_patch_size"] = vision.patch_temporal
    said = {
        "image_processor": {"image_processor_type": "MuseGlimmerImageProcessor"},
        "video_processor": {"video_processor_type": "MuseGlimmerVideoProcessor"},
    }
    for name, own in (("image_processor", images), ("video_processor", videos)):
        said[name] |= same | (own or {})
    (folder / "processor_config.json").write_text(json.dumps(said))


def test_images_have_the_sizes_that_its_processor_gives_them(tmp_path):
    model = made(0, tmp_path)
    vision = model.config.vision_config
    processors(tmp_path, model, {"max_image_tokens": 40})
    how = from_hf(tmp_path).encoders["vision"].images
    assert how == CappedGrid(vision.patch_size, vision.merge_size, 40)
    rng = np.random.default_rng(0)
    for size in [*rng.integers(1, 300, (500, 2)).tolist(), [1, 900], [2000, 2], [36, 36]]:
        wanted = resized(*size, unit_of(model), 40)
        assert prepared_sizes(before_encoder(how), tuple(size)) == (wanted,)


@pytest.mark.exhaustive
def test_frames_sizes_and_times_of_videos_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        count = int(rng.integers(1, [60, 3000, 300_000][rng.integers(3)]))
        height, width = rng.integers(20, 900, 2).tolist()
        header = VideoHeader(count, height, width, rng.choice(RATES))
        fps, unit = float(rng.choice([0.5, 1, 2, 10])), int(rng.integers(1, 4))
        how = MuseVideo(fps=fps, max_frames=int(rng.integers(1, 120)))
        ours = sample_video(VisionConfig(1, 8, 1, 8, 14, frames=unit, videos=how), header)
        metadata = VideoMetadata(count, fps=float(header.rate))
        indices = frames_there(metadata, unit, fps, how.max_frames)
        metadata.frames_indices = indices
        wanted = np.pad(indices, (0, -len(indices) % unit), mode="edge")
        np.testing.assert_array_equal(ours.indices, wanted)
        assert ours.size == resized(height, width, 28, how.max_tokens)
        grid = len(wanted) // unit, ours.size[0] // 14, ours.size[1] // 14
        text = written_there(grid, metadata, unit, 2)
        assert text.replace("<|video|>" * (grid[1] * grid[2] // 4), "|") == "|".join(ours.texts)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"do_sample_frames": False}, "do_sample_frames=False: frames are taken by fps"),
        ({"frame_timestamp_format": "{timestamp}"}, "only 'Time: {timestamp:.1f}s' is known"),
    ],
)
def test_other_frames_and_texts_of_videos_are_refused(own, message, tmp_path):
    processors(tmp_path, made(0, tmp_path), videos=own)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_packed_videos_and_images_are_what_transformers_makes_of_each(seed, tmp_path):
    """Tokens equal, logits and gradients to 1e-4, of real files through our own loader."""
    rng = np.random.default_rng(seed)
    backend = byte_level(TOKENS)
    image, video = map(backend.token_to_id, ("<|patch|>", "<|video|>"))
    ids = {"image_token_id": image, "video_token_id": video}
    model = made(seed, tmp_path, backend.get_vocab_size(), **ids)
    processors(tmp_path, model, {"max_image_tokens": 9}, {"max_video_frame_tokens": 6, "fps": 3})
    save(tmp_path, backend, TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    talks = conversations(rng, tmp_path)
    ours, params, config = loaded(tmp_path)
    encoder = config.encoders["vision"]
    source = source_of(tmp_path, config, talks)
    batch = packed_source(config, source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = []
    for index, talk in enumerate(talks):
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        contents = [m["content"] for m in talk if isinstance(m["content"], list)]
        images, videos, number = [], [], 0
        for part in itertools.chain(*contents):
            if part["type"] == "image":
                images.append(np.stack([source.item(index, number)] * encoder.frames))
                number += 1
                _, rows, columns = patches_of(images[-1], encoder)[1]
                tokens = "<image>" * (rows * columns // encoder.connector.merge**2)
                text = text.replace("<|patch|>", f"<|image_start|>{tokens}<|image_end|>", 1)
            if part["type"] == "video":
                sample = lambda metadata: frames_there(metadata, encoder.frames, 3, 96)  # noqa: E731
                _, metadata = load_video(str(tmp_path / part["video"]), sample_indices_fn=sample)
                count = -(-len(metadata.frames_indices) // encoder.frames)
                videos.append(
                    np.concatenate([source.item(index, number + k) for k in range(count)])
                )
                number += count
                grid = patches_of(videos[-1], encoder)[1]
                written = written_there(grid, metadata, encoder.frames, encoder.connector.merge)
                text = text.replace("<|video|>", written.replace("<|video|>", "<video>"), 1)
        text = text.replace("<image>", "<|patch|>").replace("<video>", "<|video|>")
        tokens = np.array(tokenizer(text)["input_ids"])
        here = batch.text.owner[0] == index
        is_medium = np.isin(tokens, (image, video))
        np.testing.assert_array_equal(batch.text.slots["vision"][0, here] >= 0, is_medium)
        np.testing.assert_array_equal(batch.text.token[0, here][~is_medium], tokens[~is_medium])
        given.append({"input_ids": torch.tensor(tokens[None])} | media_of(images, videos, encoder))
    compute = lambda model, inputs: model(**inputs, use_cache=False).logits[0]  # noqa: E731
    check_packed(model, ours, params, batch, given, compute)
