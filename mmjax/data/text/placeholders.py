"""The text that stands for images and clips in each family of checkpoints, as their processors write it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmjax.config import Placeholder
from mmjax.data.conversation import BadSample
from mmjax.data.text.chat_template import RenderedChat, Span
from mmjax.data.text.tokenizer import read_json, tokenizer_config


def folder_placeholders(folder: str, named: Mapping[str, str]) -> dict[str, Placeholder]:
    """Return the placeholder of each medium for a Hugging Face folder; `named` are its tokenizer's special tokens.

    Empty for a text-only model, or an unknown family.
    """
    path = Path(folder)
    processor = read_json(path / "processor_config.json")
    # The tokenizer's names override the processor's.
    named = {k: v for k, v in processor.items() if k.endswith("_token") and isinstance(v, str)} | dict(named)
    # The texts are those that the families' processors in transformers write, unless the folder names others.
    for family in _families(path, processor):
        match family:
            case "llava" | "llavanext" | "llavaonevision":
                return {"image": Placeholder(named.get("image_token", "<image>"))}
            case "qwen2vl" | "qwen25vl" | "qwen3vl":
                return {"image": Placeholder(named.get("image_token", "<|image_pad|>"))}
            case "qwen2audio":
                return {"audio": Placeholder(named.get("audio_token", "<|AUDIO|>"))}
            case "internvl":
                return {
                    "image": Placeholder(
                        named.get("context_image_token", "<IMG_CONTEXT>"),
                        before=named.get("start_image_token", "<img>"),
                        after=named.get("end_image_token", "</img>"),
                    )
                }
            case "internvlchat":
                return {"image": Placeholder("<image>", "<IMG_CONTEXT>", "<img>", "</img>")}
    return {}


def _families(path: Path, processor: Mapping[str, object]) -> list[str]:
    """List the names of the model in the folder's files: "Qwen2_5_VLProcessor" and "qwen2_5_vl" become "qwen25vl"."""
    names = [read_json(path / "config.json").get("model_type")]
    for config in (processor, read_json(path / "preprocessor_config.json"), tokenizer_config(str(path))):
        names.append(config.get("processor_class"))
    return [str(name).replace("_", "").lower().removesuffix("processor") for name in names if name]


def compile_any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds any of these texts, longer ones first."""
    return re.compile("|".join(map(re.escape, sorted({t for t in texts if t}, key=len, reverse=True))) or "(?!)")


@dataclass(frozen=True)
class TokenizerInput:
    """A conversation's text as it is tokenized, with one token for each medium."""

    text: str
    answers: tuple[Span, ...]  # that are trained on
    weights: tuple[float, ...]  # of these answers
    prompts: tuple[int, ...]  # ends of these answers' prompts
    media: tuple[Span, ...]  # including the text around them, such as <img> and </img>
    kinds: tuple[str, ...]  # of these media


def write_media(rendered: RenderedChat, places: Mapping[str, Placeholder], written: re.Pattern[str]) -> TokenizerInput:
    """Replace what the template wrote for each medium, found by `written`, with its token and the text around it."""
    kind_of = {p.written: kind for kind, p in places.items()}
    pieces = []
    media = []
    kinds = []
    length = last = 0  # of the new text, and in the rendered one
    # From position `starts[k]` of the rendered text on, positions move by `shifts[k]`: where "<image>" becomes "<img>"
    # in "a<image>b", b moves from 8 to 6, so the second entries are 8 and -2.
    starts = [0]
    shifts = [0]
    for match in written.finditer(rendered.text):
        kind = kind_of[match[0]]
        expansion = places[kind].before + (places[kind].token or places[kind].written) + places[kind].after
        pieces += rendered.text[last : match.start()], expansion
        length += match.start() - last
        media.append((length, length + len(expansion)))
        kinds.append(kind)
        length += len(expansion)
        last = match.end()
        starts.append(last)
        shifts.append(length - last)

    def move(position: int) -> int:
        return position + shifts[bisect_right(starts, position) - 1]

    return TokenizerInput(
        text="".join([*pieces, rendered.text[last:]]),
        answers=tuple((move(begin), move(end)) for begin, end in rendered.answers),
        weights=rendered.weights,
        prompts=tuple(map(move, rendered.prompts)),
        media=tuple(media),
        kinds=tuple(kinds),
    )


def check_places(places: Sequence[str], media: Sequence[str]) -> None:
    """Raise BadSample unless there is one place for each medium; both are lists of kinds."""
    for kind in dict.fromkeys([*places, *media]):
        if places.count(kind) != media.count(kind):
            raise BadSample(
                f"its text has {places.count(kind)} places for {media.count(kind)} media of the kind {kind}: "
                "the chat template does not write each of them once"
            )
