"""Videos as Qwen-VL and GLM-4.1V have them in transformers: frames, sizes, tokens, positions, logits, gradients."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from checkpoints import INTERNVL, INTERNVL_HF, LLAVA_ONEVISION, QWEN2_VL, QWEN_VL, byte_level, save
from clips_made import frames_of, write_video
from drawn import decoder, glm4v, intern_tower, qwen2_5_vl, qwen3_vl, two_norm_tower
from parity import loaded, random_model
from parity_samples import check_packed, packed_source
from transformers import Glm4vProcessor, InternVLProcessor, Qwen3VLProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm4v.video_processing_glm4v import smart_resize as glm4_resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen2_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_resize
from transformers.video_utils import VideoMetadata, default_sample_indices_fn, load_video

from mmjax import train
from mmjax.config import (
    ChatFormat,
    Glm4Video,
    MessagesSource,
    ModelConfig,
    Qwen2Video,
    Qwen3Video,
    VisionConfig,
)
from mmjax.config.loading import find_config, load
from mmjax.data.media.decode import VideoHeader
from mmjax.data.media.preparations import sample_video
from mmjax.data.media.video import decode_video
from mmjax.data.media.video_header import read_video_header
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.opening import open_conversations
from mmjax.data.text.load_chat import load_chat
from mmjax.errors import UserError
from mmjax.hf.families import from_hf

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
GLM4_IMAGE, GLM4_VIDEO = "<|image|>", "<|video|>"
GLM4_MARKS = tuple(
    f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")
)
GLM4_TEMPLATE = QWEN2_VL
for kind, token in (("image", IMAGE), ("video", VIDEO)):
    written = f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>"
    GLM4_TEMPLATE = GLM4_TEMPLATE.replace(f"<|vision_start|>{token}<|vision_end|>", written)
RATES = (Fraction(30), Fraction(30_000, 1001), Fraction(25), Fraction(450, 367), Fraction(60))


def qwen2_indices(
    frames: int, rate: float, fps: float, least: int = 4, most: int = 768, unit: int = 2
) -> np.ndarray:
    """What Qwen2VLVideoProcessor.sample_frames computes; its module needs torchvision."""
    most = math.floor(min(most, frames) / unit) * unit
    count = math.floor(min(max(frames / rate * fps, least), most, frames) / unit) * unit
    indices = torch.arange(0, frames, frames / count).int().numpy()
    return indices[indices < frames]  # rounding may add one that is not there


def qwen3_indices(
    frames: int, rate: float, fps: float, least: int = 4, most: int = 768
) -> np.ndarray:
    processor = SimpleNamespace(fps=fps, min_frames=least, max_frames=most)
    return Qwen3VLVideoProcessor.sample_frames(
        processor, VideoMetadata(total_num_frames=frames, fps=rate)
    )


def glm4_indices(frames: int, rate: float, fps: float, longest: int = 300) -> np.ndarray:
    processor = SimpleNamespace(fps=fps, max_duration=longest)
    metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
    return Glm4vVideoProcessor.sample_frames(processor, metadata)


def whole(indices: np.ndarray) -> np.ndarray:
    return np.pad(indices, (0, len(indices) % 2), mode="edge")


@pytest.mark.parametrize("seed", range(4))
def test_frames_sizes_and_times_are_those_of_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(150):
        header = VideoHeader(
            int(rng.integers(2, [60, 3000][rng.integers(2)])),
            *rng.integers(20, 1200, 2).tolist(),
            rng.choice(RATES),
        )
        fps, rate = float(rng.choice([0.5, 1, 2, 3, 10])), float(header.rate)
        size = (header.height, header.width)
        capped = bool(rng.integers(2))

        how = Qwen2Video(fps=fps, total_pixels=20_000_000 * capped, tokens_per_second=2.0)
        ours = sample_video(VisionConfig(1, 8, 1, 8, 14, frames=2, videos=how), header)
        indices = qwen2_indices(header.frames, rate, fps)
        most = how.max_pixels
        if capped:
            most = max(min(most, how.total_pixels * 2 // len(indices)), int(how.min_pixels * 1.05))
        np.testing.assert_array_equal(ours.indices, whole(indices))
        assert ours.size == qwen2_resize(*size, 28, how.min_pixels, most)
        metadata = VideoMetadata(header.frames, fps=rate, frames_indices=indices)
        seconds = torch.tensor([2 / metadata.sampled_fps])[0]
        assert ours.times == tuple(
            (torch.arange(len(ours.indices) // 2) * (2.0 * seconds)).long().tolist()
        )

        how = Qwen3Video(fps=fps, frame_pixels=60_000 * capped)
        ours = sample_video(VisionConfig(1, 8, 1, 8, 16, frames=2, videos=how), header)
        indices = qwen3_indices(header.frames, rate, fps)
        most = how.max_pixels
        if capped:
            most = len(indices) * max(
                min(how.frame_pixels, most // len(indices)), int(how.min_pixels * 1.05)
            )
        np.testing.assert_array_equal(ours.indices, whole(indices))
        assert ours.size == qwen3_resize(len(indices), *size, 2, 32, how.min_pixels, most)
        there = Qwen3VLProcessor._calculate_timestamps(None, indices.tolist(), rate)
        assert ours.texts == (*(f"<{time:.1f} seconds>" for time in there), "")

        how = Glm4Video(fps=fps, seconds=int(rng.integers(5, 300)), max_pixels=30_000_000)
        ours = sample_video(VisionConfig(1, 8, 1, 8, 14, frames=2, videos=how), header)
        indices = glm4_indices(header.frames, rate, fps, how.seconds)
        np.testing.assert_array_equal(ours.indices, indices)
        assert ours.size == glm4_resize(len(indices), *size, 2, 28, how.min_pixels, how.max_pixels)
        assert ours.texts == ("", *(str(int(index / rate)) for index in indices[::2].tolist()))


# Of transformers' own processors (5.24 with torchvision 0.28, defaults but for fps): frames, rate,
# height, width, fps; then the first and the last index, how many, the grid, and the ends of what it
# wrote or its seconds per grid.
MADE_THERE = {
    "Qwen2VL": {
        (50, 30.0, 96, 128, 4.0): (0, 41, 6, (3, 20, 28), 0.5555555820465088),
        (331, 25.0, 240, 416, 2.0): (0, 318, 26, (13, 18, 30), 1.0184615850448608),
        (90, 29.97, 130, 90, 1.0): (0, 67, 4, (2, 28, 20), 1.5015015602111816),
    },
    "Qwen3VL": {
        (50, 30.0, 96, 128, 4.0): (0, 49, 6, (3, 8, 12), ("<0.2 seconds>", "<1.5 seconds>")),
        (331, 25.0, 240, 416, 2.0): (0, 330, 26, (13, 8, 14), ("<0.3 seconds>", "<12.9 seconds>")),
        (90, 29.97, 130, 90, 1.0): (0, 89, 4, (2, 14, 10), ("<0.5 seconds>", "<2.5 seconds>")),
    },
}


@pytest.mark.parametrize("family", MADE_THERE)
def test_videos_are_sampled_as_transformers_own_processors_did(family: str) -> None:
    for (frames, rate, height, width, fps), (first, last, count, grid, time) in MADE_THERE[
        family
    ].items():
        header = VideoHeader(frames, height, width, Fraction(str(rate)))
        patch = 14 if family == "Qwen2VL" else 16
        how = (Qwen2Video if family == "Qwen2VL" else Qwen3Video)(fps=fps)
        made = sample_video(VisionConfig(1, 8, 1, 8, patch, frames=2, videos=how), header)
        assert (made.indices[0], made.indices[-1], len(made.indices)) == (first, last, count)
        assert (count // 2, made.size[0] // patch, made.size[1] // patch) == grid
        if family == "Qwen2VL":
            assert made.times == tuple(int(4 * time * k) for k in range(count // 2))
        else:
            assert (made.texts[0], made.texts[-2]) == time


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_decoded_frames_are_those_that_transformers_loads(
    codec: str, ending: str, tmp_path: Path
) -> None:
    """Pillow's bicubic filter here, torch's there: both of fixed point, and at most a few levels apart."""
    rng = np.random.default_rng(0)
    path = write_video(
        tmp_path / f"a.{ending}", frames_of(rng, 41, 90, 130), 25, codec, key_every=7
    )
    copy = (
        path
        if ending == "mp4"
        else write_video(tmp_path / "a.mp4", frames_of(rng, 1, 90, 130), 25, codec)
    )
    how = Qwen2Video(fps=5.0, min_pixels=28 * 28, max_pixels=28 * 28 * 6)
    encoder = VisionConfig(1, 8, 1, 8, 14, frames=2, videos=how)
    with path.open("rb") as file:
        header = VideoHeader.unpacked(read_video_header(file))
        file.seek(0)
        ours = np.concatenate(decode_video(file, encoder))
    assert (header.frames, header.height, header.width, header.rate) == (41, 90, 130, 25)
    indices = qwen2_indices(41, 25.0, 5.0)
    if ending == "mkv":  # transformers counts no frames of it
        import av

        with av.open(str(path)) as container:
            shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        video = np.stack([shown[k] for k in indices])
    else:
        video, _ = load_video(str(copy), sample_indices_fn=lambda metadata: indices)
    size = qwen2_resize(90, 130, 28, how.min_pixels, how.max_pixels)
    frames = torch.from_numpy(video).permute(0, 3, 1, 2)
    resized = (
        torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True)
        .permute(0, 2, 3, 1)
        .numpy()
    )
    assert ours.shape == resized.shape
    difference = np.abs(ours.astype(int) - resized)
    assert difference.max() <= 4
    assert difference.mean() < 0.3


def folder_of(kind: str, rng: np.random.Generator, folder: Path) -> torch.nn.Module:
    """A checkpoint of drawn sizes with a real tokenizer, a chat template and processors."""
    backend = byte_level(
        (*QWEN_VL, GLM4_IMAGE, GLM4_VIDEO, *GLM4_MARKS) if kind == "glm4v" else QWEN_VL
    )
    tokens = (GLM4_IMAGE, GLM4_VIDEO) if kind == "glm4v" else (IMAGE, VIDEO)
    names = ("image_token_id", "video_token_id")
    ids = {name: backend.token_to_id(token) for name, token in zip(names, tokens, strict=True)}
    draw = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "glm4v": partial(glm4v, family="glm4v")}
    config = draw[kind](rng, **ids)
    config.text_config.vocab_size = backend.get_vocab_size()
    config.text_config.max_position_embeddings = 4096
    for part in (config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    classes = {
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "glm4v": transformers.Glm4vForConditionalGeneration,
    }
    model = random_model(config, classes[kind])
    model.save_pretrained(folder)
    save(
        folder,
        backend,
        GLM4_TEMPLATE if kind == "glm4v" else QWEN2_VL,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    vision = config.vision_config
    patches = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    patches["temporal_patch_size"] = vision.temporal_patch_size
    unit = (vision.patch_size * vision.spatial_merge_size) ** 2
    family = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v"}[kind]
    images = {
        "image_processor_type": f"{'Glm4v' if kind == 'glm4v' else 'Qwen2VL'}ImageProcessor",
        "size": {"shortest_edge": unit, "longest_edge": 6 * unit * (2 if kind == "glm4v" else 1)},
    }
    videos = {
        "video_processor_type": f"{family}VideoProcessor",
        "size": {
            "shortest_edge": 2 * unit,
            "longest_edge": (7 if kind == "qwen2_5_vl" else 40) * unit,
        },
        "fps": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    same = patches | {name: videos[name] for name in ("image_mean", "image_std")}
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": images | same, "video_processor": videos | same})
    )
    return model


def conversations(rng: np.random.Generator, folder: Path) -> list[list[dict[str, Any]]]:
    """Samples with a video, with two and an image between, with none, and with a video that ends a question."""
    paths = []
    for number, (count, rate) in enumerate(
        [(9, 10), (17, Fraction(30_000, 1001)), (24, 5), (7, 3)]
    ):
        frames = frames_of(rng, count, *(8 * rng.integers(3, 9, 2)))
        codec = ("mpeg4", "libx264")[number % 2]
        paths.append(write_video(folder / f"{number}.mp4", frames, rate, codec).name)
    from PIL import Image

    Image.fromarray(frames_of(rng, 1, 33, 50)[0]).save(folder / "a.png")
    video = lambda k: {"type": "video", "video": paths[k]}  # noqa: E731
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    answer = lambda words: {"role": "assistant", "content": words}  # noqa: E731
    image = {"type": "image", "path": "a.png"}
    return [
        [{"role": "user", "content": [video(0), text("What?")]}, answer("A cat.")],
        [
            {"role": "user", "content": [text("See"), video(1), image, text("and"), video(2)]},
            answer("Two."),
        ],
        [{"role": "user", "content": "How many?"}, answer("12 apples")],
        [{"role": "user", "content": [text("The dog?"), video(3)]}, answer("It looks.")],
    ]


def source_of(folder: Path, model: ModelConfig, talks: list[list[dict[str, Any]]]) -> ChatSource:
    (folder / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    cache = folder / "cache"
    source = MessagesSource(str(folder / "talks.jsonl"))
    reopen = partial(open_conversations, source, "train", cache, "data.sources.x")
    return ChatSource(reopen, load_chat(ChatFormat(str(folder))), model.encoders, cache)


def patches_there(video: np.ndarray, vision: Any) -> torch.Tensor:
    """Rescale, normalise and cut frames `[n, h, w, 3]` as Qwen's video processors do."""
    patch, merge = vision.patch_size, vision.spatial_merge_size
    pixels = (torch.from_numpy(video).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    count, channels, height, width = pixels.shape
    unit = vision.temporal_patch_size
    rows, columns = height // patch, width // patch
    parts = pixels.view(
        count // unit, unit, channels, rows // merge, merge, patch, columns // merge, merge, patch
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # fmt: skip
    return parts.reshape(count // unit * rows * columns, -1)


class There:
    """The inputs that transformers makes of a sample, from the frames and images that are decoded here."""

    def __init__(self, kind: str, folder: Path, source: ChatSource, model: torch.nn.Module) -> None:
        self.kind, self.source, self.vision = kind, source, model.config.vision_config
        self.tokens = (GLM4_IMAGE, GLM4_VIDEO) if kind == "glm4v" else (IMAGE, VIDEO)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.folder = folder
        self.unit = model.config.vision_config.temporal_patch_size

    def inputs(self, index: int, talk: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Also holds the frames' number and size equal to those there."""
        text = self.tokenizer.apply_chat_template(talk, tokenize=False)
        images, videos, seconds = [], [], []
        merged = self.vision.spatial_merge_size * self.vision.patch_size
        parts = [
            part
            for message in talk
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        number = 0
        for part in (part for part in parts if part["type"] != "text"):
            if part["type"] == "image":
                item = self.source.item(index, number)
                images.append(np.stack([item] * self.unit))
                number += 1
                tokens = item.shape[0] // merged * (item.shape[1] // merged)
                text = text.replace(self.tokens[0], "<image>" * tokens, 1)
                continue
            _, metadata = load_video(
                str(self.folder / part["video"]), sample_indices_fn=self.sample
            )
            count = math.ceil(len(metadata.frames_indices) / self.unit)
            patches = [self.source.item(index, number + k) for k in range(count)]
            number += len(patches)
            videos.append(np.concatenate(patches))
            seconds.append(self.unit / metadata.sampled_fps)
            grid = [
                len(patches),
                *(side // self.vision.patch_size for side in patches[0].shape[1:3]),
            ]
            text = text.replace(self.tokens[1], self.written(grid, metadata), 1)
        # A frame of GLM-4.1V is as many tokens of an image.
        text = text.replace("<image>", self.tokens[0])
        text = text.replace("<video>", self.tokens[0 if self.kind == "glm4v" else 1])
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        types = (ids == self.id(self.tokens[0])).int() + 2 * (ids == self.id(self.tokens[1])).int()
        if self.kind == "glm4v":
            types = types * (2 if videos else 1)
        made: dict[str, torch.Tensor] = {"input_ids": ids, "mm_token_type_ids": types}
        for name, arrays in (("", images), ("_videos", videos)):
            if arrays:
                sides = [
                    [
                        len(a) // self.unit,
                        *(side // self.vision.patch_size for side in a.shape[1:3]),
                    ]
                    for a in arrays
                ]
                made[f"pixel_values{name}"] = torch.cat(
                    [patches_there(a, self.vision) for a in arrays]
                )
                made["image_grid_thw" if not name else "video_grid_thw"] = torch.tensor(sides)
        if videos and self.kind == "qwen2_5_vl":
            made["second_per_grid_ts"] = torch.tensor(seconds)
        return made

    def id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def sample(self, metadata: VideoMetadata) -> np.ndarray:
        if self.kind == "qwen3_vl":
            return qwen3_indices(metadata.total_num_frames, metadata.fps, 3.0)
        if self.kind == "glm4v":
            return glm4_indices(metadata.total_num_frames, metadata.fps, 3.0)
        return qwen2_indices(metadata.total_num_frames, metadata.fps, 3.0, unit=self.unit)

    def written(self, grid: list[int], metadata: VideoMetadata) -> str:
        """What takes the place of the template's token, by the processor there where it writes more than tokens."""
        if self.kind == "qwen2_5_vl":
            return "<video>" * (math.prod(grid) // self.vision.spatial_merge_size**2)
        processor = SimpleNamespace(
            video_processor=SimpleNamespace(
                merge_size=self.vision.spatial_merge_size, temporal_patch_size=self.unit
            ),
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
            video_token="<video>",
            _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
        )
        given = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
        if self.kind == "glm4v":
            processor.image_token = "<video>"
            processor.replace_frame_token_id = partial(
                Glm4vProcessor.replace_frame_token_id, processor
            )
            return Glm4vProcessor.replace_video_token(processor, given, 0)
        return Qwen3VLProcessor.replace_video_token(processor, given, 0)


@pytest.mark.default_cases("qwen3_vl-0")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_packed_videos_are_what_transformers_makes_of_each(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Tokens and positions equal, logits and gradients to 1e-4, of real files through our own loader."""
    rng = np.random.default_rng(seed)
    there = folder_of(kind, rng, tmp_path)
    talks = conversations(rng, tmp_path)
    if kind == "glm4v":  # there it takes no image beside a video
        image = talks[1][0]["content"].pop(2)
        talks.append(
            [{"role": "user", "content": [image]}, {"role": "assistant", "content": "Red."}]
        )
    ours, params, model = loaded(tmp_path)
    source = source_of(tmp_path, model, talks)
    batch = packed_source(model, source)
    inputs = There(kind, tmp_path, source, there)
    made = [inputs.inputs(index, talk) for index, talk in enumerate(talks)]
    text = batch.text
    for number, given in enumerate(made):
        here = text.owner[0] == number
        media = text.slots["vision"][0, here] >= 0
        ids = given["input_ids"][0].numpy()
        np.testing.assert_array_equal(
            np.isin(ids, [inputs.id(token) for token in inputs.tokens]), media
        )
        np.testing.assert_array_equal(text.token[0, here][~media], ids[~media])
        grids = {k: v for k, v in given.items() if k.endswith("thw") or k == "second_per_grid_ts"}
        if text.position.ndim == 3:
            wanted, _ = there.model.get_rope_index(
                given["input_ids"], given["mm_token_type_ids"], **grids
            )
            np.testing.assert_array_equal(text.position[0, here], wanted[:, 0].T.numpy())
    check_packed(
        there,
        ours,
        params,
        batch,
        made,
        lambda model, given: model(**given, use_cache=False).logits[0],
    )


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(6))
def test_internvl_has_a_numbered_tile_for_each_frame(seed: int, tmp_path: Path) -> None:
    """Tokens equal, logits and gradients to 1e-4, of two videos and a text in one row."""
    rng = np.random.default_rng(seed)
    vision, own = intern_tower(rng)
    backend = byte_level(INTERNVL)
    words, image = backend.get_vocab_size(), backend.token_to_id("<IMG_CONTEXT>")
    text = decoder(rng, "qwen2", words)
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=image, **own
    )
    there = random_model(config, transformers.InternVLForConditionalGeneration)
    there.save_pretrained(tmp_path)
    save(tmp_path, backend, INTERNVL_HF, eos_token="<|im_end|>")
    side = vision.image_size[0]
    same = {
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    images = {"image_processor_type": "GotOcr2ImageProcessor", "min_patches": 1, "max_patches": 1}
    videos = {"video_processor_type": "InternVLVideoProcessor", "num_frames": 3}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": images | same, "video_processor": videos | same})
    )
    paths = [
        write_video(tmp_path / f"{k}.mp4", frames_of(rng, 10 + 7 * k, 32, 40), 10) for k in range(2)
    ]
    parts = lambda path: [{"type": "video", "video": path.name}, {"type": "text", "text": "What?"}]  # noqa: E731
    answer = {"role": "assistant", "content": "A cat."}
    talks = [[{"role": "user", "content": parts(path)}, answer] for path in paths]
    talks.insert(1, [{"role": "user", "content": "How many?"}, answer])
    ours, params, model = loaded(tmp_path)
    source = source_of(tmp_path, model, talks)
    batch = packed_source(model, source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = model.encoders["vision"].patch * model.encoders["vision"].connector.merge
    processor = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>",
        image_seq_length=(side // tokens) ** 2,
    )  # fmt: skip
    made = []
    for index, talk in enumerate(talks):
        frames = [source.item(index, k)[0] for k in range(3 * (index != 1))]
        pixels = (
            torch.from_numpy(np.array(frames)).float().permute(0, 3, 1, 2) / 255 if frames else None
        )
        line = tokenizer.apply_chat_template(talk, tokenize=False)
        if frames:
            written = InternVLProcessor.replace_video_token(
                processor, {"pixel_values_videos": [pixels]}, 0
            )
            line = line.replace("<video>", written)
        given = {"input_ids": torch.tensor([tokenizer(line)["input_ids"]])}
        ids, here = given["input_ids"][0].numpy(), batch.text.owner[0] == index
        np.testing.assert_array_equal(batch.text.token[0, here], np.where(ids == image, 0, ids))
        made.append(given | ({"pixel_values": (pixels - 0.5) / 0.25} if frames else {}))
    assert [
        sample_video(
            model.encoders["vision"], VideoHeader(n, 32, 40, Fraction(10))
        ).indices.tolist()
        for n in (10, 17)
    ] == [torch.arange(n / 3 / 2, n, n / 3).int().tolist() for n in (10, 17)]
    check_packed(
        there,
        ours,
        params,
        batch,
        made,
        lambda model, given: model(**given, use_cache=False).logits[0],
    )


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(6))
def test_llava_onevision_has_a_quarter_of_the_tokens_of_each_frame_and_a_newline(
    seed: int, tmp_path: Path
) -> None:
    """Tokens equal, logits and gradients to 1e-4, of two videos and a text in one row."""
    rng = np.random.default_rng(seed)
    backend = byte_level(("<|im_start|>", "<|im_end|>", "<image>", "<video>"))
    vision, own = two_norm_tower(rng, most=5)
    video = backend.token_to_id("<video>")
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision, text_config=decoder(rng, "qwen2", backend.get_vocab_size()), video_token_index=video,
        image_token_index=backend.token_to_id("<image>"), image_grid_pinpoints=[[vision.image_size] * 2], **own,
    )  # fmt: skip
    there = random_model(config, transformers.LlavaOnevisionForConditionalGeneration)
    there.save_pretrained(tmp_path)
    save(tmp_path, backend, LLAVA_ONEVISION, eos_token="<|im_end|>")
    side = vision.image_size
    same = {
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_grid_pinpoints": [[side, side]],
    }
    videos = {"video_processor_type": "LlavaOnevisionVideoProcessor", "num_frames": 3}
    whole = {"processor_class": "LlavaOnevisionProcessor", "image_processor": images | same}
    (tmp_path / "processor_config.json").write_text(
        json.dumps(whole | {"video_processor": videos | same})
    )
    paths = [
        write_video(tmp_path / f"{k}.mp4", frames_of(rng, 10 + 7 * k, 32, 40), 10) for k in range(2)
    ]
    parts = lambda path: [{"type": "video", "video": path.name}, {"type": "text", "text": "What?"}]  # noqa: E731
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    talks = [[{"role": "user", "content": parts(path)}, answer] for path in paths]
    talks.insert(1, [{"role": "user", "content": parts(paths[0])[1:]}, answer])
    ours, params, model = loaded(tmp_path)
    source = source_of(tmp_path, model, talks)
    batch = packed_source(model, source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    made = []
    for index, talk in enumerate(talks):
        frames = [source.item(index, k)[0] for k in range(3 * (index != 1))]
        pixels = (
            torch.from_numpy(np.array(frames)).float().permute(0, 3, 1, 2) / 255 if frames else None
        )
        pooled = math.ceil(side // vision.patch_size / 2)
        line = tokenizer.apply_chat_template(talk, tokenize=False)
        line = line.replace("<video>", "<video>" * (3 * pooled**2 + 1))
        given = {"input_ids": torch.tensor([tokenizer(line)["input_ids"]])}
        ids, here = given["input_ids"][0].numpy(), batch.text.owner[0] == index
        np.testing.assert_array_equal(batch.text.token[0, here], np.where(ids == video, 0, ids))
        made.append(
            given | ({"pixel_values_videos": (pixels[None] - 0.5) / 0.25} if frames else {})
        )
    for count in (10, 17):
        ours_there = default_sample_indices_fn(VideoMetadata(count), num_frames=3)
        header = VideoHeader(count, 32, 40, Fraction(10))
        np.testing.assert_array_equal(
            sample_video(model.encoders["vision"], header).indices, ours_there
        )
    check_packed(
        there,
        ours,
        params,
        batch,
        made,
        lambda model, given: model(**given, use_cache=False).logits[0],
    )


def test_a_folder_says_how_videos_are_sampled(tmp_path: Path) -> None:
    folder_of("qwen2_5_vl", np.random.default_rng(0), tmp_path)
    how = from_hf(tmp_path).encoders["vision"].videos
    assert isinstance(how, Qwen2Video)
    assert how.fps == 3.0
    path = tmp_path / "processor_config.json"
    said = json.loads(path.read_text())
    for change, message in (
        ({"video_processor_type": "X"}, "video_processor_type='X'"),
        ({"patch_size": 99}, "patch_size=99"),
        ({"num_frames": 8}, "num_frames=8"),
        ({"do_resize": False}, "do_resize=False"),
        ({"image_mean": [0.1, 0.5, 0.5]}, "image_mean"),
    ):
        path.write_text(json.dumps(said | {"video_processor": said["video_processor"] | change}))
        with pytest.raises(UserError, match=message):
            from_hf(tmp_path)
    path.write_text(json.dumps({"image_processor": said["image_processor"]}))
    assert from_hf(tmp_path).encoders["vision"].videos.total_pixels == 24_576 * 28 * 28


@pytest.mark.exhaustive
def test_a_run_trains_on_videos_and_names_those_that_cannot_be_decoded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder_of("qwen2_5_vl", rng, tmp_path)
    for number in range(4):
        write_video(tmp_path / f"{number}.mkv", frames_of(rng, 9, 32, 40), 10)
    content = write_video(tmp_path / "bad.mkv", frames_of(rng, 60, 32, 40), 10).read_bytes()
    (tmp_path / "bad.mkv").write_bytes(content[: len(content) // 2])
    turns = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "A cat."}]
    names = ["bad.mkv" if number == 5 else f"{number % 4}.mkv" for number in range(24)]
    records = [{"video": name, "conversations": turns} for name in names]
    (tmp_path / "data.json").write_text(json.dumps(records))
    words = {
        "checkpoint": tmp_path, "data": tmp_path / "data.json", "training.steps": 4, "training.precision": "float32",
        "training.evaluate_every": 0, "training.checkpoint_every": 0, "schedule.warmup": 1, "batch.size.count": 8,
        "batch.rows.llm": 1, "batch.rows.vision": 1, "mesh.fsdp": 1, "device": "cpu", "data.workers": 0,
        "data.max_bad_share": 0.5, "data.cache": tmp_path / "cache", "run": tmp_path / "run",
    }  # fmt: skip
    config = load("llava_style", [f"{name}={value}" for name, value in words.items()])
    train.train(config, find_config("llava_style"), devices=jax.devices()[:1])
    (line,) = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["sample"] == "chat[5]"
    assert "truncated video" in json.loads(line)["reason"]
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [entry["loss"] for entry in metrics if "loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
