"""The thinkers of Qwen2.5-Omni and Qwen3-Omni compute what transformers computes of all media in one row."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn
import jax
import numpy as np
import pytest
import soundfile
import torch
import transformers
from checkpoints import CHATML, byte_level, save
from clips_made import frames_of, write_video
from fine_tuning import moved
from omni_families import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    FAMILIES,
    IMAGE,
    VISION_START,
    Family,
    rate_of,
    rope_index,
    template_of,
    thinker,
)
from parity import loaded
from parity_samples import check_packed, check_samples, is_text, packed_source
from PIL import Image
from safetensors.torch import load_file, save_file
from test_audio_towers import HOP, RATE, clip
from test_export import check_beside
from test_video import patches_there, qwen2_indices, source_of
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax import export
from mmjax.config.ranges import check_section
from mmjax.errors import UserError
from mmjax.hf.families import from_hf


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 89, count)


class There:
    """The inputs that transformers makes of a sample: stretches of tokens, images and clips."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = FAMILIES[family]
        self.encoders = from_hf(folder).encoders
        vision = self.encoders["vision"]
        self.processor = Qwen2VLImageProcessorPil(
            patch_size=vision.patch, merge_size=vision.connector.merge, temporal_patch_size=vision.frames,
            image_mean=list(vision.mean), image_std=list(vision.std), do_resize=False,
        )  # fmt: skip

    def inputs(self, parts) -> dict[str, torch.Tensor]:
        unit = self.encoders["vision"].patch * self.encoders["vision"].connector.merge
        images = [part for part in parts if part.ndim == 3]
        clips = [part for part in parts if part.ndim == 1 and not is_text(part)]
        audio = self.encoders["audio"]
        inputs = self.family.features(audio, clips) if clips else {}
        frames = inputs["feature_attention_mask"].sum(-1).tolist() if clips else []
        lengths = iter([self.family.audio_tokens(n, audio.chunk // 2) for n in frames])
        tokens: list[int] = []
        for part in parts:
            if is_text(part):
                tokens += part.tolist()
            elif part.ndim == 3:
                tokens += [IMAGE] * (part.shape[0] // unit * (part.shape[1] // unit))
            else:
                tokens += [AUDIO] * int(next(lengths))
        if images:
            processed = self.processor(images, return_tensors="pt")
            inputs |= {
                "pixel_values": processed["pixel_values"].float(),
                "image_grid_thw": processed["image_grid_thw"],
            }
        ids = torch.tensor([tokens])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def samples_of(folder: Path, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """Clips of many chunks and of less than one beside images, and a text."""
    encoders = from_hf(folder).encoders
    unit = encoders["vision"].patch * encoders["vision"].connector.merge
    chunk = encoders["audio"].chunk * HOP
    image = lambda rows, columns: rng.integers(0, 256, (rows * unit, columns * unit, 3)).astype(  # noqa: E731
        np.uint8
    )
    see, hear, end = np.array([VISION_START]), np.array([AUDIO_START]), np.array([AUDIO_END])
    return [
        [
            words(0, 3),
            see,
            image(2, 3),
            words(1, 2),
            hear,
            clip(2 * chunk + 5 * HOP),
            end,
            words(2, 3),
        ],
        [words(3, 6)],
        [hear, clip(chunk), end, words(4, 2), hear, clip(7 * HOP - 3), end, words(5, 3)],
        [
            words(6, 2),
            hear,
            clip(3 * chunk + HOP),
            end,
            see,
            image(5, 1),
            words(7, 1),
            see,
            image(2, 2),
            words(8, 2),
        ],
    ]


@pytest.mark.default_cases("qwen2_5_omni-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_thinker_is_what_transformers_makes_of_it_images_and_clips_in_one_row(
    family, seed, tmp_path
):
    rng = np.random.default_rng(seed)
    model = thinker(rng, family)
    model.save_pretrained(tmp_path)
    there_inputs = There(tmp_path, family)
    samples = samples_of(tmp_path, rng)
    batch = check_samples(
        model,
        tmp_path,
        samples,
        lambda model, parts: model(**there_inputs.inputs(parts), use_cache=False).logits[0],
    )
    for number, parts in enumerate(samples):
        inputs = there_inputs.inputs(parts)
        audio = (
            inputs["feature_attention_mask"].sum(1) if "feature_attention_mask" in inputs else None
        )
        positions, _ = rope_index(model)(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            None,
            inputs["attention_mask"],
            False,
            audio,
        )
        np.testing.assert_array_equal(
            batch.text.position[0][batch.text.owner[0] == number], positions[:, 0].T.numpy()
        )


def folder_of(rng: np.random.Generator, folder: Path, family: str) -> torch.nn.Module:
    """A checkpoint of drawn sizes with a real tokenizer, a chat template and processors."""
    names, marks = FAMILIES[family].names, FAMILIES[family].marks
    backend = byte_level((*CHATML, *names.values(), *marks))
    ids = {kind: backend.token_to_id(token) for kind, token in names.items()}
    ids |= {"see": backend.token_to_id(marks[0]), "hear": backend.token_to_id(marks[2])}
    model = thinker(rng, family, backend.get_vocab_size(), **ids)
    config = model.config
    model.save_pretrained(folder)
    save(
        folder,
        backend,
        template_of(FAMILIES[family]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    vision = config.vision_config
    unit = (vision.patch_size * vision.spatial_merge_size) ** 2
    patches = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    pixels = patches | {"temporal_patch_size": vision.temporal_patch_size}
    pixels |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": unit,
        "max_pixels": 6 * unit,
    }
    mels = config.audio_config.num_mel_bins
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": mels,
        "chunk_length": 300,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images | audio | pixels))
    videos = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": unit, "longest_edge": 6 * unit},
    }
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(videos | pixels | {"fps": rate_of(config)})
    )
    return model


# Frames, frames per second and samples of sound.
VIDEOS = {
    "0.mp4": (9, 10, 20_000),
    "1.mp4": (17, 5, 90_000),
    "2.mkv": (24, 8, 60_000),
    "3.mp4": (7, 3, 100_000),
}


def conversations(rng: np.random.Generator, folder: Path) -> list[list[dict[str, Any]]]:
    """Samples with a video, with two and an image between, with none, with a clip, and with a video at the end.

    All videos have sound, which may end before the frames or after.
    """
    for name, (count, rate, samples) in VIDEOS.items():
        sound = clip(samples)[None]
        write_video(
            folder / name, frames_of(rng, count, *(8 * rng.integers(3, 9, 2))), rate, sound=sound
        )
    Image.fromarray(frames_of(rng, 1, 33, 50)[0]).save(folder / "a.png")
    soundfile.write(folder / "a.wav", clip(12_345), RATE)
    video = lambda k: {"type": "video", "video": list(VIDEOS)[k]}  # noqa: E731
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    answer = lambda words: {"role": "assistant", "content": words}  # noqa: E731
    image, sound = {"type": "image", "path": "a.png"}, {"type": "audio", "audio": "a.wav"}
    return [
        [{"role": "user", "content": [video(0), text("What?")]}, answer("A cat.")],
        [
            {"role": "user", "content": [text("See"), video(1), image, text("and"), video(2)]},
            answer("Two."),
        ],
        [{"role": "user", "content": "How many?"}, answer("12 apples")],
        [{"role": "user", "content": [sound, text("The dog?"), video(3)]}, answer("It looks.")],
    ]


class TalksThere:
    """The inputs that transformers makes of a conversation, from frames, images and clips that are decoded here."""

    def __init__(
        self, folder: Path, source: Any, model: torch.nn.Module, sound: bool, family: Family
    ) -> None:
        self.source, self.model, self.sound, self.family = source, model, sound, family
        self.fps = rate_of(model.config)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.encoders = from_hf(folder).encoders

    def inputs(self, index: int, talk: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        vision = self.model.config.vision_config
        text = self.tokenizer.apply_chat_template(talk, tokenize=False)
        images, videos, clips = [], [], []
        parts = [
            part
            for message in talk
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        number = 0
        for part in (part for part in parts if part["type"] != "text"):
            item = self.source.item(index, number)
            if part["type"] == "audio":
                clips.append(item)
                tokens, number = self.audio_tokens(item), number + 1
            elif part["type"] == "image":
                images.append(np.stack([item] * vision.temporal_patch_size))
                tokens, number = self.tokens(images[-1]), number + 1
            else:
                count = math.ceil(self.frames(part["video"]) / vision.temporal_patch_size)
                videos.append(
                    np.concatenate([self.source.item(index, number + k) for k in range(count)])
                )
                tokens, number = self.tokens(videos[-1]), number + count
                if self.sound:
                    clips.append(self.source.item(index, number))
                    text = text.replace(
                        self.family.video, self.interleaved(videos[-1], clips[-1]), 1
                    )
                    number += 1
                    continue
            text = text.replace(self.family.names[part["type"]], f"<{part['type']}>" * tokens, 1)
        for kind, token in self.family.names.items():
            text = text.replace(f"<{kind}>", token)
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, arrays in (("image", images), ("video", videos)):
            if arrays:
                suffix = "" if name == "image" else "_videos"
                inputs[f"pixel_values{suffix}"] = torch.cat(
                    [patches_there(a, vision) for a in arrays]
                )
                inputs[f"{name}_grid_thw"] = torch.tensor([self.grid(a) for a in arrays])
        if videos:
            inputs["video_second_per_grid"] = torch.tensor(
                [vision.temporal_patch_size / self.fps] * len(videos)
            )
        return inputs | (self.family.features(self.encoders["audio"], clips) if clips else {})

    def audio_tokens(self, wave: np.ndarray) -> int:
        audio = self.encoders["audio"]
        frames = int(self.family.features(audio, [wave])["feature_attention_mask"].sum())
        return self.family.audio_tokens(frames, audio.chunk // 2)

    def interleaved(self, frames: np.ndarray, wave: np.ndarray) -> str:
        """What takes the place of the template's token, by the processor there."""
        vision, config = self.model.config.vision_config, self.model.config
        processor = SimpleNamespace(
            audio_bos_token=self.family.marks[2], audio_eos_token=self.family.marks[3], audio_token="<audio>",
            video_token="<video>", video_processor=SimpleNamespace(merge_size=vision.spatial_merge_size),
            get_chunked_index=partial(self.family.processor.get_chunked_index, None),
        )  # fmt: skip
        seconds = vision.temporal_patch_size / self.fps
        videos = {
            "video_grid_thw": torch.tensor([self.grid(frames)]),
            "video_second_per_grid": [seconds],
        }
        audio = {"num_audio_tokens": [self.audio_tokens(wave)]}
        # Qwen2.5-Omni's alone
        chunks = {"seconds_per_chunk": getattr(config, "seconds_per_chunk", None)}
        return self.family.processor.replace_video_with_audio_token(
            processor,
            videos,
            0,
            audio,
            0,
            position_id_per_seconds=config.position_id_per_seconds,
            **chunks,
        )

    def frames(self, name: str) -> int:
        count, rate, _ = VIDEOS[name]
        return len(
            qwen2_indices(
                count, rate, self.fps, unit=self.model.config.vision_config.temporal_patch_size
            )
        )

    def grid(self, frames: np.ndarray) -> list[int]:
        vision = self.model.config.vision_config
        return [
            len(frames) // vision.temporal_patch_size,
            *(side // vision.patch_size for side in frames.shape[1:3]),
        ]

    def tokens(self, frames: np.ndarray) -> int:
        return math.prod(self.grid(frames)) // self.model.config.vision_config.spatial_merge_size**2

    def positions(self, inputs: dict[str, torch.Tensor]) -> np.ndarray:
        audio = (
            inputs["feature_attention_mask"].sum(1) if "feature_attention_mask" in inputs else None
        )
        grids = (inputs.get("image_grid_thw"), inputs.get("video_grid_thw"))
        seconds = inputs.get("video_second_per_grid")
        positions, _ = rope_index(self.model)(
            inputs["input_ids"], *grids, inputs["attention_mask"], self.sound, audio, seconds
        )
        return positions[:, 0].T.numpy()


def logits_of(sound: bool, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs, use_audio_in_video=sound, use_cache=False).logits[0]


@pytest.mark.default_cases("qwen3_omni_moe-sound-0")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sound", [True, False], ids=["sound", "silent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_videos_and_clips_are_what_transformers_makes_of_each(
    family: str, sound: bool, seed: int, tmp_path: Path
) -> None:
    """Tokens and positions equal, logits and gradients to 1e-4, of real files through our own loader."""
    rng = np.random.default_rng(seed)
    model_there = folder_of(rng, tmp_path, family)
    talks = conversations(rng, tmp_path)
    ours, params, model = loaded(tmp_path)
    if sound:
        vision = model.encoders["vision"]
        vision = replace(vision, videos=replace(vision.videos, sound="audio"))
        model = replace(model, encoders=model.encoders | {"vision": vision})
    source = source_of(tmp_path, model, talks)
    batch = packed_source(model, source)
    talks_there = TalksThere(tmp_path, source, model_there, sound, FAMILIES[family])
    model_inputs = [talks_there.inputs(index, talk) for index, talk in enumerate(talks)]
    text = batch.text
    media_ids = talks_there.tokenizer.convert_tokens_to_ids(list(FAMILIES[family].names.values()))
    for number, inputs in enumerate(model_inputs):
        span = text.owner[0] == number
        media = (text.slots["vision"][0, span] >= 0) | (text.slots["audio"][0, span] >= 0)
        ids = inputs["input_ids"][0].numpy()
        np.testing.assert_array_equal(np.isin(ids, media_ids), media)
        np.testing.assert_array_equal(text.token[0, span][~media], ids[~media])
        np.testing.assert_array_equal(text.position[0, span], talks_there.positions(inputs))
    check_packed(model_there, ours, params, batch, model_inputs, partial(logits_of, sound))


@pytest.mark.default_cases("qwen2_5_omni")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_gives_its_thinker_and_is_exported_with_its_talker(
    family: str, tmp_path: Path, capsys: Any
) -> None:
    thinker_alone = thinker(np.random.default_rng(2), family)
    thinker_alone.save_pretrained(tmp_path / "alone")
    kind, config = FAMILIES[family].whole
    checkpoint = kind(
        config(thinker_config=thinker_alone.config.to_dict(), enable_audio_output=False)
    )
    checkpoint.thinker.load_state_dict(thinker_alone.state_dict())
    checkpoint.save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    vocoder = {
        "qwen2_5_omni": "token2wav.bigvgan.bias",
        "qwen3_omni_moe": "code2wav.decoder.0.bias",
    }[family]
    spoken = {"talker.codec_head.weight": torch.randn(3, 5), vocoder: torch.randn(7)}
    save_file(load_file(path) | spoken, path, metadata={"format": "pt"})
    run = moved(tmp_path / "whole", tmp_path / "run")
    said = f"talker.*, {vocoder.split('.')[0]}.* (which speak the answers) are not read"
    assert said in capsys.readouterr().err
    jax.tree.map(
        np.testing.assert_array_equal, loaded(tmp_path / "alone")[1], loaded(tmp_path / "whole")[1]
    )
    export.export(run, tmp_path / "out")
    check_beside(tmp_path / "whole", tmp_path / "out")
    source, written = load_file(path), load_file(tmp_path / "out" / "model.safetensors")
    # Qwen2.5-Omni's marks of sound, which nothing reads, and mergers of layers that the tower does
    # not have.
    indexes = getattr(thinker_alone.config.vision_config, "deepstack_visual_indexes", ())
    unread = [
        n for n, layer in enumerate(indexes) if layer >= thinker_alone.config.vision_config.depth
    ]
    prefixes = (
        "thinker.audio_tower.audio_bos_eos_token",
        *(f"thinker.visual.merger_list.{n}." for n in unread),
    )
    unchanged = {*spoken, *(key for key in source if key.startswith(prefixes))}
    assert {key for key in source if torch.equal(source[key], written[key])} == unchanged
    again = FAMILIES[family].thinker.from_pretrained(tmp_path / "out")
    again.save_pretrained(tmp_path / "again")
    for key, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, written[key]), key


@pytest.mark.parametrize(
    ("family", "part", "change", "message"),
    [
        (
            "qwen2_5_omni",
            "audio_config",
            {"output_dim": 7},
            r"audio_config: output_dim=7, but the text's hidden_size",
        ),
        (
            "qwen2_5_omni",
            "audio_config",
            {"n_window": 0},
            r"n_window=0, but there are positions 1 to",
        ),
        (
            "qwen2_5_omni",
            "audio_config",
            {"activation_function": "mish"},
            r"activation_function='mish' is not",
        ),
        ("qwen2_5_omni", "vision_config", {"out_hidden_size": 7}, r"out_hidden_size=7"),
        (
            "qwen3_omni_moe",
            "audio_config",
            {"n_window": 48},
            r"n_window=48: only chunks of 13 positions are known",
        ),
        (
            "qwen3_omni_moe",
            "audio_config",
            {"n_window_infer": 90},
            r"n_window_infer=90 is less than a chunk",
        ),
        (
            "qwen3_omni_moe",
            "audio_config",
            {"max_source_positions": 12},
            r"max_source_positions=12, but a chunk has 13",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_field(tmp_path, family, part, change, message):
    config = FAMILIES[family].draw(np.random.default_rng(0)).to_dict()
    config[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    default = transformers.Qwen2_5OmniThinkerConfig()
    sparse = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"vision_config": {}, "text_config": {}},
    }
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    model = from_hf(tmp_path)
    text, audio, ears = default.text_config, default.audio_config, model.encoders["audio"]
    assert (model.llm.layers, model.llm.width, model.llm.heads) == (
        28,
        text.hidden_size,
        text.num_attention_heads,
    )
    assert (model.llm.kv_heads, model.llm.mlp_width) == (
        text.num_key_value_heads,
        text.intermediate_size,
    )
    assert (model.llm.rope_theta, model.llm.rope_sections, model.llm.tied) == (
        1e6,
        (16, 24, 24),
        False,
    )
    assert (ears.layers, ears.width, ears.heads) == (
        audio.encoder_layers,
        audio.d_model,
        audio.encoder_attention_heads,
    )
    assert (ears.mlp_width, ears.mels, ears.chunk) == (
        audio.encoder_ffn_dim,
        audio.num_mel_bins,
        2 * audio.n_window,
    )
    videos = model.encoders["vision"].videos
    assert (videos.tokens_per_second, videos.seconds, videos.text_after) == (
        25.0,
        "nominal",
        "time",
    )


def test_what_qwen3_omnis_config_leaves_out_is_what_transformers_takes(tmp_path):
    default = transformers.Qwen3OmniMoeThinkerConfig()
    text, audio, tower = default.text_config, default.audio_config, default.vision_config
    # The default width of the text there is not that of the encoders' outputs.
    sparse = {"vision_config": {}, "text_config": {"hidden_size": tower.out_hidden_size}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": sparse})
    )
    model = from_hf(tmp_path)
    llm, eyes, ears = model.llm, model.encoders["vision"], model.encoders["audio"]
    assert (llm.layers, llm.heads, llm.head_width) == (
        text.num_hidden_layers,
        text.num_attention_heads,
        128,
    )
    assert (llm.kv_heads, llm.vocab, llm.norm_eps) == (
        text.num_key_value_heads,
        text.vocab_size,
        text.rms_norm_eps,
    )
    assert (llm.rope_theta, llm.rope_sections, llm.tied) == (
        text.default_theta,
        (24, 20, 20),
        False,
    )
    experts = (llm.experts.count, llm.experts.per_token, llm.experts.width, llm.experts.normalized)
    assert experts == (
        text.num_experts,
        text.num_experts_per_tok,
        text.moe_intermediate_size,
        text.norm_topk_prob,
    )
    assert (eyes.layers, eyes.width, eyes.deepstack) == (
        tower.depth,
        tower.hidden_size,
        tower.deepstack_visual_indexes,
    )
    assert (ears.layers, ears.width, ears.chunk) == (
        audio.encoder_layers,
        audio.d_model,
        2 * audio.n_window,
    )
    assert (ears.stem_width, ears.attended_chunks) == (
        audio.downsample_hidden_size,
        audio.n_window_infer // ears.chunk,
    )
    assert (eyes.videos.tokens_per_second, eyes.videos.turns) == (
        default.position_id_per_seconds,
        "patches",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sound": "ears"},
            r"videos\.sound=ears: name an audio encoder with clips.shown=all \(audio\)",
        ),
        ({"sound": "audio", "seconds": "sampled"}, r"videos\.seconds=sampled: sound takes turns"),
        (
            {"sound": "audio", "fps": 0.25},
            r"videos\.fps=0\.25: a temporal patch takes .* more than sound_chunk=",
        ),
        (
            {"turns": "patches", "fps": 7.0},
            r"videos\.fps=7: a temporal patch takes .* at which it takes whole ones",
        ),
    ],
)
def test_sound_that_cannot_take_turns_with_frames_is_refused(tmp_path, change, message):
    drawn.qwen2_5_omni(np.random.default_rng(0)).save_pretrained(tmp_path)
    model = from_hf(tmp_path)
    vision = model.encoders["vision"]
    vision = replace(vision, videos=replace(vision.videos, **change))
    with pytest.raises(UserError, match=message):
        check_section(replace(model, encoders=model.encoders | {"vision": vision}), "model")
