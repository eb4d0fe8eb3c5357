"""Name the placeholders of images, clips and videos in the texts of a Hugging Face folder, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mmjax.config import Placeholder
from mmjax.data.text.tokenizer import tokenizer_config
from mmjax.disk import read_json


def folder_placeholders(folder: str, named: Mapping[str, str]) -> dict[str, Placeholder]:
    """Return the placeholder of each medium for a Hugging Face folder; `named` are its tokenizer's special tokens.

    Empty for a text-only model, or an unknown family.
    """
    path = Path(folder)
    processor = read_json(path / "processor_config.json", {})
    # The tokenizer's names override the processor's.
    named = {
        k: v for k, v in processor.items() if k.endswith("_token") and isinstance(v, str)
    } | dict(named)
    # The texts are those that the families' processors in transformers write, unless the folder
    # names others.
    for family in folder_families(path, processor):
        match family:
            case "pixtral" | "mistral3":
                return {"image": Placeholder(named.get("image_token", "[IMG]"))}
            case "llavaonevision":
                video = Placeholder(named.get("video_token", "<video>"))
                return {"image": Placeholder(named.get("image_token", "<image>")), "video": video}
            case "deepseekvl":
                return {"image": Placeholder(named.get("image_token", "<image_placeholder>"))}
            case "janus":
                return {
                    "image": Placeholder(
                        named.get("image_token", "<image_placeholder>"),
                        before=named.get("boi_token", "<begin_of_image>"),
                        after=named.get("eoi_token", "<end_of_image>"),
                    )
                }
            case "paddleocrvl":
                return {"image": Placeholder(named.get("image_token", "<|IMAGE_PLACEHOLDER|>"))}
            case "lightonocr" | "videollama3" | "minicpmv46" | "minicpmv47" | "minicpmocr":
                return {"image": Placeholder(named.get("image_token", "<|image_pad|>"))}
            case "llama4":
                return {"image": Placeholder(named.get("image_token", "<|image|>"), "<|patch|>")}
            case "museglimmer":
                return {
                    "image": Placeholder("<|patch|>", "", "<|image_start|>", "<|image_end|>"),
                    "video": Placeholder("<|video|>"),
                }
            case "kimik25":
                return {"image": Placeholder(named.get("image_token", "<|media_pad|>"))}
            case (
                "llava"
                | "videollava"
                | "llavanext"
                | "llavanextvideo"
                | "vipllava"
                | "idefics3"
                | "smolvlm"
                | "lfm2vl"
                | "deepseekocr2"
            ):
                return {"image": Placeholder(named.get("image_token", "<image>"))}
            case "paligemma":
                return {"image": Placeholder(named.get("image_token", "<image>"))}
            case "glm4v" | "glm4vmoe" | "glmocr":
                image = Placeholder(named.get("image_token", "<|image|>"))
                # Each temporal patch is written as an image is.
                begin, end = "<|begin_of_image|>", "<|end_of_image|>"
                written = named.get("video_token", "<|video|>")
                return {
                    "image": image,
                    "video": Placeholder(written, image.written, before=begin, after=end),
                }
            case "glm46v" | "glmga":
                return {"image": Placeholder(named.get("image_token", "<|image|>"))}
            case "qwen2vl" | "qwen25vl" | "exaone45" | "hyperclovaxvisionv2":
                video = Placeholder(named.get("video_token", "<|video_pad|>"))
                return {
                    "image": Placeholder(named.get("image_token", "<|image_pad|>")),
                    "video": video,
                }
            case "qwen3vl" | "qwen3vlmoe" | "cosmos3omni" | "qwen35" | "qwen35moe":
                # Every temporal patch has a vision span of its own, inside the video's, which the
                # template writes.
                video = Placeholder(
                    named.get("video_token", "<|video_pad|>"),
                    before=named.get("vision_start_token", "<|vision_start|>"),
                    after=named.get("vision_end_token", "<|vision_end|>"),
                )
                return {
                    "image": Placeholder(named.get("image_token", "<|image_pad|>")),
                    "video": video,
                }
            case "qwen25omni" | "qwen25omnithinker":
                names = {kind: f"<|{kind.upper()}|>" for kind in ("image", "audio", "video")}
                return _with_sound(named, names, "<|audio_bos|>", "<|audio_eos|>")
            case "qwen3omnimoe" | "qwen3omnimoethinker":
                names = {kind: f"<|{kind}_pad|>" for kind in ("image", "audio", "video")}
                return _with_sound(named, names, "<|audio_start|>", "<|audio_end|>")
            case "qwen2audio":
                return {"audio": Placeholder(named.get("audio_token", "<|AUDIO|>"))}
            case "cohere2vision":
                return {"image": Placeholder(named.get("image_token", "<|IMG_PATCH|>"))}
            case "ayavision":
                token = named.get("img_patch_token", "<|IMG_PATCH|>")
                return {"image": Placeholder(named.get("image_token", "<image>"), token)}
            case "glmasr":
                return {"audio": Placeholder(named.get("audio_token", "<|pad|>"))}
            case "voxtral":
                return {"audio": Placeholder("[AUDIO]", before="[BEGIN_AUDIO]")}
            case "qwen3asr":
                return {"audio": Placeholder(named.get("audio_token", "<|audio_pad|>"))}
            case "internvl":
                image = Placeholder(
                    named.get("context_image_token", "<IMG_CONTEXT>"),
                    before=named.get("start_image_token", "<img>"),
                    after=named.get("end_image_token", "</img>"),
                )
                # Each frame is written as an image is.
                video = replace(
                    image, written=named.get("video_token", "<video>"), token=image.written
                )
                return {"image": image, "video": video}
            case "gemma3" | "shieldgemma2":
                begin = named.get("boi_token", "<start_of_image>")
                end = named.get("eoi_token", "<end_of_image>")
                token = named.get("image_token", "<image_soft_token>")
                return {
                    "image": Placeholder(begin, token, before=f"\n\n{begin}", after=f"{end}\n\n")
                }
            case "gemma4" | "gemma4unified":
                token = named.get("image_token", "<|image|>")
                begin = named.get("boi_token", "<|image>")
                end = named.get("eoi_token", "<image|>")
                clip = Placeholder(
                    named.get("audio_token", "<|audio|>"),
                    before=named.get("boa_token", "<|audio>"),
                    after=named.get("eoa_token", "<audio|>"),
                )
                return {"image": Placeholder(token, before=begin, after=end), "audio": clip}
            case "internvlchat":
                return {"image": Placeholder("<image>", "<IMG_CONTEXT>", "<img>", "</img>")}
    return {}


def _with_sound(
    named: Mapping[str, str], tokens: Mapping[str, str], begin: str, end: str
) -> dict[str, Placeholder]:
    """Return the placeholders of a Qwen-Omni, by these names unless the folder has others."""
    kinds = {kind: Placeholder(named.get(f"{kind}_token", token)) for kind, token in tokens.items()}
    begin = named.get("audio_bos_token", begin)
    end = named.get("audio_eos_token", end)
    return kinds | {"video": replace(kinds["video"], sound_before=begin, sound_after=end)}


def folder_families(path: Path, processor: Mapping[str, object]) -> list[str]:
    """List the names of the model in the folder's files: "Qwen2_5_VLProcessor" and "qwen2_5_vl" become "qwen25vl"."""
    config = read_json(path / "config.json", {})
    tower = config.get("vision_config")
    # Pixtral-12B is a LLaVA but for its tower.
    is_pixtral = isinstance(tower, dict) and tower.get("model_type") == "pixtral"
    names = ["pixtral" if is_pixtral else config.get("model_type")]
    for config in (
        processor,
        read_json(path / "preprocessor_config.json", {}),
        tokenizer_config(str(path)),
    ):
        names.append(config.get("processor_class"))
    return [str(name).replace("_", "").lower().removesuffix("processor") for name in names if name]
