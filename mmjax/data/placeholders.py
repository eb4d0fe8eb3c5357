"""How images and clips stand in the text of each family of checkpoints, as their processors write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmjax.config import Placeholder
from mmjax.data.conversation import BadSample
from mmjax.data.template import Rendered, Span
from mmjax.data.tokenizer import read_json, tokenizer_config


def folder_placeholders(folder: str, named: Mapping[str, str]) -> dict[str, Placeholder]:
    """By medium, for the family of a Hugging Face folder; `named` are its tokenizer's special tokens.

    Empty for a folder of a model that takes nothing but text, or of a family that is not known.
    """
    path = Path(folder)
    processor = read_json(path / "processor_config.json")
    named = {k: v for k, v in processor.items() if k.endswith("_token") and isinstance(v, str)} | dict(named)
    for family in _families(path, processor):
        match family:
            case "llava" | "llavanext" | "llavaonevision":
                return {"image": Placeholder(named.get("image_token", "<image>"))}
            case "qwen2vl" | "qwen25vl" | "qwen3vl":
                return {"image": Placeholder(named.get("image_token", "<|image_pad|>"))}
            case "qwen2audio":
                return {"audio": Placeholder(named.get("audio_token", "<|AUDIO|>"))}
            case "internvl":
                before, after = named.get("start_image_token", "<img>"), named.get("end_image_token", "</img>")
                return {"image": Placeholder(named.get("context_image_token", "<IMG_CONTEXT>"), "", before, after)}
            case "internvlchat":
                return {"image": Placeholder("<image>", "<IMG_CONTEXT>", "<img>", "</img>")}
    return {}


def _families(path: Path, processor: Mapping[str, object]) -> list[str]:
    """What the folder's files call the model: "Qwen2_5_VLProcessor" and "qwen2_5_vl" are both "qwen25vl"."""
    names = [read_json(path / "config.json").get("model_type")]
    for config in (processor, read_json(path / "preprocessor_config.json"), tokenizer_config(str(path))):
        names.append(config.get("processor_class"))
    return [str(name).replace("_", "").lower().removesuffix("processor") for name in names if name]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of these texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted({t for t in texts if t}, key=len, reverse=True))) or "(?!)")


@dataclass(frozen=True)
class Line:
    """A conversation's text as it is tokenized: one token for each medium."""

    text: str
    answers: tuple[Span, ...]  # that train
    weights: tuple[float, ...]  # of these
    prompts: tuple[int, ...]  # where the prompts of these end
    media: tuple[Span, ...]  # with what stands around them
    kinds: tuple[str, ...]  # of these media


def write_media(rendered: Rendered, places: Mapping[str, Placeholder], written: re.Pattern[str]) -> Line:
    """Put each medium's one token, and what belongs around it, where the template wrote it. `written` finds those."""
    kinds = {p.written: kind for kind, p in places.items()}
    pieces, media, found, moved = [], [], [], [(0, 0)]
    length = last = 0
    for match in written.finditer(rendered.text):
        place = places[kinds[match[0]]]
        expansion = place.before + (place.token or place.written) + place.after
        pieces += rendered.text[last : match.start()], expansion
        length += match.start() - last
        media.append((length, length + len(expansion)))
        found.append(kinds[match[0]])
        length, last = length + len(expansion), match.end()
        moved.append((last, length - last))
    starts, shifts = np.array(moved).T

    def move(at: int) -> int:
        return at + int(shifts[np.searchsorted(starts, at, side="right") - 1])

    answers = tuple((move(begin), move(end)) for begin, end in rendered.answers)
    text = "".join([*pieces, rendered.text[last:]])
    prompts = tuple(map(move, rendered.prompts))
    return Line(text, answers, rendered.weights, prompts, media=tuple(media), kinds=tuple(found))


def check_places(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises BadSample unless there is a place for each medium."""
    for kind in dict.fromkeys([*found, *wanted]):
        if found.count(kind) != wanted.count(kind):
            raise BadSample(
                f"its text has {found.count(kind)} places for {wanted.count(kind)} media of the kind {kind}: "
                "the chat template does not write each of them once"
            )
