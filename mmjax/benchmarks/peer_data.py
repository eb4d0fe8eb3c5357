"""The records, images, tokenizer and sizes of `peer`, all made from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RECORDS = "records.jsonl"
IMAGES = "images"

# --------------------------------------------------------------------------------------------------
# sizes


@dataclass(frozen=True)
class Size:
    """Layers and widths of a Qwen2.5-VL. Heads of the LLM are 64 wide, or what `head` says; patches have 14 pixels."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    vision_layers: int
    vision_width: int
    vision_mlp: int
    vision_heads: int
    window: int = 112  # pixels: 8 x 8 patches
    vocab: int = 8192  # rows of the embedding, some more than there are tokens
    tied: bool = True


SIZES = {
    "small": Size(
        layers=4,
        width=256,
        mlp=704,
        heads=4,
        kv_heads=2,
        vision_layers=4,
        vision_width=192,
        vision_mlp=512,
        vision_heads=3,
    ),  # 7.8 million parameters
    "mid": Size(
        layers=8,
        width=384,
        mlp=1056,
        heads=6,
        kv_heads=2,
        vision_layers=4,
        vision_width=256,
        vision_mlp=688,
        vision_heads=4,
    ),  # 20.9 million
    "3b": Size(
        layers=36,
        width=2048,
        mlp=11_008,
        heads=16,
        kv_heads=2,
        vision_layers=32,
        vision_width=1280,
        vision_mlp=3420,
        vision_heads=16,
        vocab=151_936,
    ),  # Qwen2.5-VL-3B
    "7b": Size(
        layers=28,
        width=3584,
        mlp=18_944,
        heads=28,
        kv_heads=4,
        vision_layers=32,
        vision_width=1280,
        vision_mlp=3420,
        vision_heads=16,
        vocab=152_064,
        tied=False,
    ),  # Qwen2.5-VL-7B
    "tiny": Size(
        layers=2,
        width=64,
        mlp=96,
        heads=2,
        kv_heads=1,
        vision_layers=2,
        vision_width=32,
        vision_mlp=48,
        vision_heads=2,
    ),
}
PATCH = 14  # pixels
MERGED = 2 * PATCH  # pixels of a token's side

# --------------------------------------------------------------------------------------------------
# records


Draw = Callable[[np.random.Generator], tuple[np.ndarray, int]]


def _uneven(
    rng: np.random.Generator, low: int, high: int, median: float, longest: int
) -> tuple[np.ndarray, int]:
    """Draw 0 to 3 images of `low` to `high` pixels a side, and a lognormal text of so many words in the median."""
    sides = rng.integers(low, high, (rng.integers(4), 2), endpoint=True)
    return sides, _lognormal(rng, median, 1.0, longest)


def _near_equal(
    rng: np.random.Generator, side: tuple[int, int], words: tuple[int, int]
) -> tuple[np.ndarray, int]:
    """Draw one image of about as many pixels a side, and about as many words."""
    sides = rng.integers(*side, (1, 2), endpoint=True)
    return sides, int(rng.integers(*words, endpoint=True))


def _text(rng: np.random.Generator, median: float, longest: int) -> tuple[np.ndarray, int]:
    """Draw a lognormal text."""
    return np.zeros((0, 2), np.int64), _lognormal(rng, median, 0.8, longest)


def _tiny(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draw 0 to 2 images of 28 to 84 pixels a side, and a few words."""
    sides = rng.integers(28, 84, (rng.integers(3), 2), endpoint=True)
    return sides, int(rng.integers(6, 24))


def _lognormal(rng: np.random.Generator, median: float, sigma: float, longest: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), 6, longest))


# of a set's record: the sides of its images, height and width in pixels, and the words of its text
DATA: dict[str, Draw] = {
    "uneven": partial(_uneven, low=56, high=448, median=60, longest=1000),
    "near-equal": partial(_near_equal, side=(224, 280), words=(55, 75)),
    "text": partial(_text, median=120, longest=1000),
    "tiny": _tiny,
    # for GPUs
    "large-uneven": partial(_uneven, low=224, high=1344, median=200, longest=2000),
    "large-near-equal": partial(_near_equal, side=(672, 728), words=(180, 220)),
    "large-text": partial(_text, median=400, longest=2000),
}


def write_records(folder: Path, name: str, count: int, seed: int) -> None:
    """Write a set's records as ShareGPT has them, and their images as JPEG files."""
    rng = np.random.default_rng((seed, *name.encode()))
    (folder / IMAGES).mkdir(parents=True)
    lines = []
    for number in range(count):
        sides, words = DATA[name](rng)
        question = words // 3
        images = [f"{number:04}_{k}.jpg" for k in range(len(sides))]
        for file, (height, width) in zip(images, sides.tolist(), strict=True):
            _draw_image(rng, height, width).save(folder / IMAGES / file, quality=90)
        markers = "<image>\n" * len(images)
        asked = {"from": "human", "value": markers + _draw_words(rng, question)}
        answered = {"from": "gpt", "value": _draw_words(rng, words - question)}
        lines.append(json.dumps({"conversations": [asked, answered], "images": images}))
    (folder / RECORDS).write_text("\n".join(lines) + "\n")


def _draw_image(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Draw noise of coarse squares, which compresses like a photo."""
    coarse = rng.integers(0, 256, (-(-height // 14), -(-width // 14), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


# --------------------------------------------------------------------------------------------------
# tokenizer

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
_ENDINGS = _SYLLABLES[:70]
_SPACE, _LINE_BREAK = "Ġ", "Ċ"  # as byte-level BPE writes them


def tokenizer_json() -> dict[str, Any]:
    """Return a byte-level BPE that has a token for every word of two syllables with a space before it."""
    merges = [(syllable[0], syllable[1]) for syllable in _SYLLABLES]
    merges += [(_SPACE, syllable) for syllable in _SYLLABLES]
    merges += [(_SPACE + first, second) for first in _SYLLABLES for second in _ENDINGS]
    characters = [*map(chr, range(33, 127)), _SPACE, _LINE_BREAK]
    tokens = [*characters, *("".join(merge) for merge in merges)]
    added = [
        {
            "id": len(tokens) + k,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for k, token in enumerate(SPECIAL)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: k for k, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def _draw_words(rng: np.random.Generator, count: int) -> str:
    """Draw words, a token each but the first, which has no space before it."""
    firsts = rng.integers(len(_SYLLABLES), size=count)
    endings = rng.integers(len(_ENDINGS), size=count)
    return " ".join(
        _SYLLABLES[first] + _ENDINGS[ending] for first, ending in zip(firsts, endings, strict=True)
    )
