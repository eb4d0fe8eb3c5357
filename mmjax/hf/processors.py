"""Read from a Hugging Face checkpoint's folder how its images, clips and videos are prepared.

Read as transformers reads it: `processor_config.json` where it holds the processors itself, else
`preprocessor_config.json`; what is missing there, or null, is the processor's own default. A field
that changes pixels or frames is honoured or refused by name. OpenGVLab's `internvl_chat` folders
say it in `config.json` alone. What the fields of a processor mean is said by the kind that it is
read as, in `mmjax/config`: `images.py`, `videos.py` and `clips.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args

import numpy as np

from mmjax.config import (
    DynamicTiles,
    ImagePreparation,
    UsmMel,
    VideoPreparation,
    VisionConfig,
    Waveform,
    WhisperMel,
)
from mmjax.config.processor_fields import ProcessorFields
from mmjax.disk import read_json
from mmjax.errors import UserError
from mmjax.hf.class_defaults import complete_config, processor_defaults, processor_names
from mmjax.hf.folder import Fields, note

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# as the first Qwen2.5-VL checkpoints call it, and a copy of another
RENAMED = {
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "VideoLlavaImageProcessor": "CLIPImageProcessor",
}
# models whose processor is that one whatever files say
CALLERS = {"internvl": "InternVLProcessor", "aya_vision": "AyaVisionProcessor"}
Clips = TypeVar("Clips", WhisperMel, UsmMel, Waveform)
IMAGE_KINDS = {name: kind for kind in get_args(ImagePreparation) for name in kind.hf_processors}


class ImageProcessing(NamedTuple):
    """The preparation of an encoder's pixels: the items of `how`, then `(item * rescale - mean) / std`."""

    preparation: ImagePreparation
    mean: tuple[float, ...]  # red, green, blue
    std: tuple[float, ...]
    rescale: float
    file: Path  # that says so


def has_processor(folder: Path) -> bool:
    """Return whether a checkpoint's folder says how its images or clips are prepared."""
    return any(
        (folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")
    )


def read_image_processing(folder: Path) -> ImageProcessing:
    """Read how a checkpoint's images are prepared. Raises UserError, naming file and field, for what is unknown."""
    config = read_json(folder / "config.json", {})
    if config.get("model_type") == "internvl_chat":
        where = str(folder / "config.json")
        config = complete_config(config, where)
        side = Fields(config, where).inner("vision_config").get("image_size", int)
        how = DynamicTiles.from_internvl_chat(ProcessorFields(config, where), side)
        return ImageProcessing(how, IMAGENET_MEAN, IMAGENET_STD, 1 / 255, folder / "config.json")
    file, fields = _fields(folder, "image_processor")
    fields = _with_class(fields, CALLERS.get(config.get("model_type")))
    how = IMAGE_KINDS[fields.name].from_hf(fields)
    if how.hf_note:
        note(f"{fields.where}: {how.hf_note}")
    normalized = fields.flag("do_normalize")
    return ImageProcessing(
        how,
        fields.channels("image_mean") if normalized else (0.0, 0.0, 0.0),
        fields.channels("image_std") if normalized else (1.0, 1.0, 1.0),
        fields.number("rescale_factor") if fields.flag("do_rescale") else 1.0,
        file,
    )


def read_videos(folder: Path, vision: VisionConfig, default: VideoPreparation) -> VideoPreparation:
    """Read how a checkpoint's videos are prepared; without a video processor in the folder, as `default` says.

    Raises UserError, naming file and field, for what is unknown or not the tower's.
    """
    file = folder / "video_preprocessor_config.json"
    around = read_json(folder / "processor_config.json", {}).get("video_processor")
    if isinstance(around, dict):
        fields = ProcessorFields(around, f"{folder / 'processor_config.json'}: video_processor")
    elif file.exists():
        fields = ProcessorFields(read_json(file, {}), str(file))
    else:
        return default
    if fields.value("video_processor_type") not in (None, default.hf_processor):
        raise fields.refused("video_processor_type", f"known is {default.hf_processor}")
    fields = fields.over(processor_defaults(default.hf_processor))
    if default.hf_patches:
        _check_patches(fields, vision)
    _check_normalization(fields, vision)
    return default.from_hf(fields)


def _check_patches(fields: ProcessorFields, vision: VisionConfig) -> None:
    """Raise UserError where frames are not resized and patched as the tower wants them."""
    tower = {
        "patch_size": vision.patch,
        "merge_size": vision.connector.merge,
        "temporal_patch_size": vision.frames,
    }
    for name, expected in tower.items():
        if fields.count(name) != expected:
            raise fields.refused(name, f"the tower has {expected}; make them the same")
    if not fields.flag("do_resize"):
        raise fields.refused(
            "do_resize", "frames that are not whole merge windows cannot be patched; set it to true"
        )


def _check_normalization(fields: ProcessorFields, vision: VisionConfig) -> None:
    """Raise UserError where frames are not normalised as the tower's images are."""
    if not (fields.flag("do_normalize") and fields.flag("do_rescale")):
        raise fields.refused("do_normalize", "frames must be rescaled and normalised as images are")
    scale = 255 * fields.number("rescale_factor")
    for name, numbers in (("image_mean", vision.mean), ("image_std", vision.std)):
        if not np.allclose(np.array(fields.channels(name)) / scale, numbers, rtol=1e-6):
            raise fields.refused(
                name, f"the tower's images have {list(numbers)}; make them the same"
            )


def says_clips(folder: Path) -> bool:
    """Return whether a checkpoint's folder says how its clips are prepared."""
    if not has_processor(folder):
        return False
    _, fields = _fields(folder, "feature_extractor", "audio_processor")
    return fields.value("feature_extractor_type") is not None


def read_audio_processing(
    folder: Path, known: str = "WhisperFeatureExtractor", kind: type[Clips] = WhisperMel
) -> Clips:
    """Read how a checkpoint's clips are prepared. known: the class of its extractor, which is read as this kind.

    Raises UserError, naming file and field, for what is unknown.
    """
    _, fields = _fields(folder, "feature_extractor", "audio_processor")
    if fields.value("feature_extractor_type") != known:
        raise fields.refused("feature_extractor_type", f"known is {known}")
    return kind.from_hf(fields.over(processor_defaults(known)))


# --------------------------------------------------------------------------------------------------
# files


def _fields(folder: Path, *parts: str) -> tuple[Path, ProcessorFields]:
    """The fields of a folder's processor for one modality, by its names, and the file that holds them."""
    processor_file = folder / "processor_config.json"
    around = read_json(processor_file, {})
    modality_file = folder / "preprocessor_config.json"
    preprocessor = read_json(modality_file, {})
    name = around.get("processor_class") or preprocessor.get("processor_class") or ""
    caller = ProcessorFields(around, str(processor_file), name)
    for part in parts:
        if isinstance(around.get(part), dict):
            return processor_file, ProcessorFields(
                around[part], f"{processor_file}: {part}", caller=caller
            )
    if not modality_file.exists():
        raise UserError(
            f"{folder}: no preprocessor_config.json, and no {parts[0]} in a processor_config.json; add one"
        )
    return modality_file, ProcessorFields(preprocessor, str(modality_file), caller=caller)


def _with_class(fields: ProcessorFields, caller: str | None) -> ProcessorFields:
    """The fields of an image processor with its class and the defaults of that, and of the processor around it.

    caller: the class of that where it is known.
    """
    key = (
        "image_processor_type" if fields.value("image_processor_type") else "feature_extractor_type"
    )
    name = str(fields.value(key))
    # Fast and slow processors have the same fields, and older checkpoints call a processor a
    # feature extractor.
    name = (
        name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    )
    name = RENAMED.get(name, name)
    if name not in (known := processor_names("ImageProcessor")):
        raise fields.refused(key, f"known are {', '.join(known)}")
    around = fields.caller.over(processor_defaults(name.replace("ImageProcessor", "Processor")))
    around = replace(around, name=caller or around.name)
    return replace(fields.over(processor_defaults(name)), name=name, caller=around)
