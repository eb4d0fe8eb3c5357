"""Batches as transformers' own processors and collators make them of conversations with images, of tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import drawn
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import DataCollatorWithFlattening, TokenizersBackend
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

WORDS = ["a", "cat", "sits", "on", "the", "mat", "looks", "at", "its", "dog", "12", "apples"]
CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
CHATML_TURN = "<|im_start|>assistant\n", "<|im_end|>"
IDEFICS = (
    *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}{{ ':' }}"
    "{% for part in message.content %}{{ ' ' + part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role.upper() + ':' }}{% for part in message.content %}"
    "{{ ' ' + part.text if part.type == 'text' else ' <image>\n' }}{% endfor %}"
    "{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SIGNS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@dataclass
class Made:
    """A family's folder, its processor, and what begins and ends an answer."""

    folder: Path
    processor: Any
    config: Any
    turn: tuple[str, str]
    talks: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def placeholders(self) -> list[int]:
        names = ("image_token_id", "image_token_index", "video_token_id")
        ids = [getattr(self.config, name, None) for name in names]
        return [number for number in ids if number is not None]


def without_video(processor: type) -> type:
    """A processor as it is, but for videos, whose part needs torchvision."""
    check = {"check_argument_for_proper_class": lambda self, name, part: type(part)}
    return type(processor.__name__, (processor,), check)


def finish(
    folder: Path, config: Any, tokenizer: Any, images: Any, processor: Any, **said: Any
) -> Any:
    """Write what mmjax reads of a folder."""
    text = config.text_config
    text.vocab_size = len(tokenizer)
    text.max_position_embeddings = 4096
    text.pad_token_id = config.pad_token_id = None
    config.architectures = [
        f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"
    ]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    said["processor_class"] = type(processor).__name__
    (folder / "processor_config.json").write_text(json.dumps(said))
    return processor


def qwen(kind: str) -> Callable[[Path, np.random.Generator], Made]:
    def make(folder: Path, rng: np.random.Generator) -> Made:
        tokenizer = TokenizersBackend(
            tokenizer_object=checkpoints.byte_level(checkpoints.QWEN_VL), **CHATML
        )
        names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        names |= {
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
        config = getattr(drawn, kind)(rng, **ids)
        vision = config.vision_config
        unit = (vision.patch_size * vision.spatial_merge_size) ** 2
        images = Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            size={"shortest_edge": unit, "longest_edge": 12 * unit},
        )
        cls = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
        processor = without_video(getattr(transformers, f"{cls}Processor"))(
            images, tokenizer, None, chat_template=checkpoints.QWEN2_VL
        )
        finish(folder, config, tokenizer, images, processor)
        return Made(folder, processor, config, CHATML_TURN)

    return make


def llava(folder: Path, rng: np.random.Generator) -> Made:
    return _llava(
        folder, rng, transformers.LlavaConfig, transformers.LlavaProcessor, CLIPImageProcessorPil
    )


def llava_next(folder: Path, rng: np.random.Generator) -> Made:
    points = [[24, 12], [12, 24], [24, 24], [12, 36]]
    own = {"image_grid_pinpoints": points}
    return _llava(
        folder,
        rng,
        transformers.LlavaNextConfig,
        transformers.LlavaNextProcessor,
        LlavaNextImageProcessorPil,
        **own,
    )


def _llava(folder, rng, kind, processor, image_processor, **own) -> Made:
    backend = checkpoints.byte_level(("<s>", "</s>", "<pad>", "<image>"))
    tokenizer = TokenizersBackend(tokenizer_object=backend, **SIGNS)
    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
    }
    vision = transformers.CLIPVisionConfig(**tower, image_size=12, patch_size=4)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = kind(
        vision_config=vision,
        text_config=drawn.decoder(rng, "llama"),
        image_token_index=image,
        **own,
    )
    images = image_processor(
        size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}, **own
    )
    said = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    made = processor(images, tokenizer, chat_template=LLAVA_TEMPLATE, **said)
    finish(folder, config, tokenizer, images, made, image_token="<image>", **said)
    return Made(folder, made, config, ("ASSISTANT:", "</s>"))


def gemma3(folder: Path, rng: np.random.Generator) -> Made:
    names = dict(
        zip(("boi_token", "eoi_token", "image_token"), checkpoints.GEMMA_IMAGES, strict=True)
    )
    tokenizer = TokenizersBackend(
        tokenizer_object=checkpoints.gemma(checkpoints.GEMMA_IMAGES),
        eos_token="<eos>", bos_token="<bos>", pad_token="<pad>", extra_special_tokens=names,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    config = drawn.gemma3(rng, image_token_index=image)
    while config.mm_tokens_per_image == 1:
        config = drawn.gemma3(rng, image_token_index=image)
    side = config.vision_config.image_size
    images = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    count = config.mm_tokens_per_image
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=checkpoints.GEMMA3, image_seq_length=count
    )
    finish(folder, config, tokenizer, images, processor, image_seq_length=count)
    return Made(folder, processor, config, ("<start_of_turn>model\n", "<end_of_turn>"))


def internvl(folder: Path, rng: np.random.Generator) -> Made:
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    backend = checkpoints.byte_level(checkpoints.INTERNVL)
    tokenizer = TokenizersBackend(tokenizer_object=backend, **CHATML, extra_special_tokens=names)
    vision, own = drawn.intern_tower(rng)
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=drawn.decoder(rng, "qwen2"), image_token_id=image, **own
    )
    side = vision.image_size[0]
    merged = round(vision.patch_size[0] / own["downsample_ratio"])
    count = (side // merged) ** 2
    images = GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = without_video(transformers.InternVLProcessor)(
        images, tokenizer, None, image_seq_length=count, chat_template=checkpoints.INTERNVL_HF
    )
    finish(folder, config, tokenizer, images, processor, image_seq_length=count)
    return Made(folder, processor, config, CHATML_TURN)


def idefics3(folder: Path, rng: np.random.Generator) -> Made:
    tokenizer = TokenizersBackend(
        tokenizer_object=checkpoints.byte_level(IDEFICS), eos_token="<end_of_utterance>", pad_token="<|im_start|>"
    )  # fmt: skip
    config = drawn.idefics3(
        rng, "idefics3", image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    vision = config.vision_config
    merged = vision.patch_size * config.scale_factor
    side = merged * -(-vision.image_size // merged)
    vision.image_size = side
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side}
    )
    count = (side // merged) ** 2
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=count, chat_template=IDEFICS_TEMPLATE
    )
    finish(folder, config, tokenizer, images, processor, image_seq_len=count)
    return Made(folder, processor, config, ("Assistant:", "<end_of_utterance>"))


FAMILIES: dict[str, Callable[[Path, np.random.Generator], Made]] = {
    **{kind: qwen(kind) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "llava": llava,
    "llava_next": llava_next,
    "gemma3": gemma3,
    "internvl": internvl,
    "idefics3": idefics3,
}


# --------------------------------------------------------------------------------------------------
# data


def write_talks(made: Made, rng: np.random.Generator, count: int = 12) -> None:
    """Conversations of one to three turns with images of odd sizes, some of whose questions are the same."""
    folder = made.folder
    number = 0
    say = lambda: " ".join(rng.choice(WORDS, int(rng.integers(2, 9))))  # noqa: E731
    for index in range(count):
        talk: list[dict[str, Any]] = []
        for turn in range(int(rng.integers(1, 4))):
            parts: list[dict[str, Any]] = []
            # the first is text alone
            for _ in range(0 if not index else int(rng.integers(not turn, 3))):
                sides = rng.integers(20, 90, 2)
                blocks = rng.integers(0, 256, (*rng.integers(2, 6, 2), 3)).astype(np.uint8)
                path = folder / f"{number}.png"
                Image.fromarray(blocks).resize(sides.tolist(), Image.Resampling.NEAREST).save(path)
                parts.append({"type": "image", "path": path.name})
                number += 1
            asked = "What is in the picture?" if index % 3 == 1 else f"{say()}?"
            parts.append({"type": "text", "text": asked})
            answer = [{"type": "text", "text": "A cat." if index % 3 == 1 else f"{say()}."}]
            talk += [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        made.talks.append(talk)
    lines = [json.dumps({"messages": talk}) for talk in made.talks]
    (folder / "talks.jsonl").write_text("\n".join(lines) + "\n")


def words_of(made: Made) -> list[str]:
    """The words of a command, which name the checkpoint and the data."""
    data = made.folder / "talks.jsonl"
    return [
        "llava_style",
        f"checkpoint={made.folder}",
        f"data={data}",
        f"images={made.folder}",
        "data.sources.chat=messages",
        f"data.cache={made.folder / 'cache'}",
    ]


# --------------------------------------------------------------------------------------------------
# batches

Arrays = dict[str, np.ndarray]


def pictures_of(made: Made, talk: Sequence[dict[str, Any]]) -> list[Image.Image]:
    paths = [p["path"] for message in talk for p in message["content"] if p["type"] == "image"]
    return [Image.open(made.folder / path).convert("RGB") for path in paths]


def text_of(made: Made, talk: Sequence[dict[str, Any]]) -> str:
    return made.processor.apply_chat_template(list(talk), tokenize=False)


def labels_of(made: Made, ids: np.ndarray) -> np.ndarray:
    """Labels of the answers and their ends, found by what begins and ends a turn."""
    begin = np.array(made.tokenizer(made.turn[0], add_special_tokens=False)["input_ids"])
    end = made.tokenizer.convert_tokens_to_ids(made.turn[1])
    labels = np.full_like(ids, -100)
    for row, label in zip(ids, labels, strict=True):
        for first in range(len(row) - len(begin)):
            if np.array_equal(row[first : first + len(begin)], begin):
                start = first + len(begin)
                stop = start + int(np.argmax(row[start:] == end)) + 1
                label[start:stop] = row[start:stop]
    return labels


def rope_of(made: Made, arrays: Arrays) -> np.ndarray | None:
    """Positions by the class's own get_rope_index, `[3, B, T]`, where it has one."""
    kind = type(made.config).__name__.removesuffix("Config")
    cls = getattr(transformers, f"{kind}Model")
    if not hasattr(cls, "get_rope_index"):
        return None
    with torch.device("meta"):
        model = cls(made.config)
    names = (
        "mm_token_type_ids",
        "image_grid_thw",
        "attention_mask",
        "video_grid_thw",
        "second_per_grid_ts",
    )
    given = {name: torch.from_numpy(arrays[name]) for name in names if name in arrays}
    return model.get_rope_index(torch.from_numpy(arrays["input_ids"]), **given)[0].numpy()


def padded(made: Made, samples: Sequence[int], side: str) -> Arrays:
    """What the processor makes of several conversations at once. side: left or right."""
    talks = [made.talks[sample] for sample in samples]
    made.tokenizer.padding_side = side
    images = [pictures_of(made, talk) for talk in talks]
    out = made.processor(
        text=[text_of(made, talk) for talk in talks],
        images=images if any(images) else None,
        padding=True,
        return_tensors="np",
        **({"add_special_tokens": False}),
    )
    arrays = {name: np.asarray(values) for name, values in out.items()}
    arrays["labels"] = labels_of(made, arrays["input_ids"])
    arrays["labels"][arrays["attention_mask"] == 0] = -100
    if (positions := rope_of(made, arrays)) is not None:
        arrays["position_ids"] = positions
    else:
        counted = arrays["attention_mask"].cumsum(-1) - 1
        arrays["position_ids"] = np.where(arrays["attention_mask"] == 0, 1, counted)
    return arrays


def packed(made: Made, samples: Sequence[int]) -> Arrays:
    """The samples in one row, by DataCollatorWithFlattening."""
    return flattened([padded(made, [sample], "right") for sample in samples])


def flattened(alone: Sequence[Arrays]) -> Arrays:
    features = [
        {"input_ids": one["input_ids"][0].tolist(), "labels": one["labels"][0].tolist()}
        for one in alone
    ]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="np")
    arrays = {name: np.asarray(values) for name, values in collate(features).items()}
    text = np.concatenate([np.arange(one["input_ids"].shape[1]) for one in alone])[None]
    if alone[0]["position_ids"].ndim == 3:
        by_axis = np.concatenate([one["position_ids"][-3:] for one in alone], axis=-1)
        arrays["position_ids"] = np.concatenate([text[None], by_axis])
    for name in sorted({name for one in alone for name in one} - {*arrays, "attention_mask"}):
        values = [one[name] for one in alone if name in one]
        if name.startswith("pixel") and any("pixel_attention_mask" in one for one in alone):
            values = [value[0] for value in values]  # Idefics3's, by row
        if name == "pixel_values" and values[0].ndim > 3:
            # of images of several sizes, or of several tiles
            largest = np.max([value.shape[1:] for value in values], axis=0)
            values = [
                np.pad(
                    v,
                    [
                        (0, 0),
                        *((0, int(most) - n) for most, n in zip(largest, v.shape[1:], strict=True)),
                    ],
                )
                for v in values
            ]
        text_like = name in ("mm_token_type_ids", "token_type_ids")
        arrays[name] = np.concatenate(values, axis=-1 if text_like else 0)
    return arrays
