"""Read from a Hugging Face checkpoint's folder how its images, clips and videos are prepared.

Read as transformers reads it: `processor_config.json` where it holds the processors itself, else
`preprocessor_config.json`; what is missing there, or null, is the processor's own default. A field that changes
pixels or frames is honoured or refused by name. OpenGVLab's `internvl_chat` folders say it in `config.json` alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.config import (
    AnyRes,
    DynamicTiles,
    Filter,
    FixedSize,
    Glm4Video,
    ImagePreparation,
    PanAndScan,
    PixtralResize,
    Qwen2Video,
    Qwen3Video,
    SmartResize,
    SplitTiles,
    UniformVideo,
    VisionConfig,
    WhisperMel,
)
from mmjax.disk import read_json
from mmjax.errors import UserError
from mmjax.hf.class_defaults import complete_config, processor_defaults, processor_names
from mmjax.hf.folder import Fields, note

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# A processor's `resample` is an index into these.
FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's number

RENAMED = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}  # as the first Qwen2.5-VL checkpoints call it


class ImageProcessing(NamedTuple):
    """The preparation of an encoder's pixels: the items of `how`, then `(item * rescale - mean) / std`."""

    preparation: ImagePreparation
    mean: tuple[float, ...]  # red, green, blue
    std: tuple[float, ...]
    rescale: float


def read_image_processing(folder: Path) -> ImageProcessing:
    """Read how a checkpoint's images are prepared. Raises UserError, naming file and field, for what is unknown."""
    config = read_json(folder / "config.json", {})
    if config.get("model_type") == "internvl_chat":
        where = str(folder / "config.json")
        return _internvl_chat(_ProcessorFields(complete_config(config, where), where))
    _, fields, processor_class = _fields(folder, "image_processor")
    kind = _kind(fields)
    fields = fields.over(processor_defaults(kind))
    if kind == "Qwen2VLImageProcessor":
        how = _smart_resize(fields)
    elif kind == "GotOcr2ImageProcessor":
        # Where InternVL's processor calls it, that one's own default wins over the field.
        tiled = processor_class == "InternVLProcessor" or config.get("model_type") == "internvl"
        how = _tiles(fields, tiled or fields.flag("crop_to_patches"))
    elif kind in ("Glm4vImageProcessor", "Glm46VImageProcessor"):
        # An image counts as a temporal patch against the bounds.
        how = replace(_smart_resize(fields), frames=fields.count("temporal_patch_size"))
    elif kind in ("Idefics3ImageProcessor", "SmolVLMImageProcessor"):
        how = _split_tiles(fields)
    elif kind == "PixtralImageProcessor":
        how = _pixtral_resize(fields, folder)
    elif kind in ("LlavaNextImageProcessor", "LlavaOnevisionImageProcessor"):
        how = _any_res(fields, several="tiles" if kind == "LlavaNextImageProcessor" else "square")
    elif kind == "Gemma3ImageProcessor" and fields.flag("do_pan_and_scan"):
        how = _pan_and_scan(fields)
    else:
        how = _fixed_size(fields, pads=kind == "LlavaImageProcessor")
    normalized = fields.flag("do_normalize")
    return ImageProcessing(
        how,
        fields.channels("image_mean") if normalized else (0.0, 0.0, 0.0),
        fields.channels("image_std") if normalized else (1.0, 1.0, 1.0),
        fields.number("rescale_factor") if fields.flag("do_rescale") else 1.0,
    )


def image_processor_file(folder: Path) -> Path:
    """Name the file of a checkpoint's folder that `read_image_processing` reads."""
    config = read_json(folder / "config.json", {})
    if config.get("model_type") == "internvl_chat":
        return folder / "config.json"
    return _fields(folder, "image_processor")[0]


def read_video_processing(folder: Path, family: str, vision: VisionConfig) -> Qwen2Video | Qwen3Video:
    """Read how the videos of a Qwen-VL checkpoint are prepared, where frames at a rate are taken.

    family: "Qwen2VL" or "Qwen3VL", whose processor's defaults hold; without a video processor in the folder those of
    Qwen's own tools. Raises UserError, naming file and field, for what is unknown or not the tower's.
    """
    fields = _video_fields(folder, family)
    if fields is None:
        return Qwen2Video(total_pixels=24_576 * 28 * 28) if family == "Qwen2VL" else Qwen3Video()
    _check_patches(fields, vision)
    if fields.value("num_frames") is not None:
        raise fields.refused("num_frames", "frames are taken by fps; set it to null")
    min_pixels, max_pixels = _pixel_bounds(fields)
    unit = (fields.count("patch_size") * fields.count("merge_size")) ** 2  # pixels of a token
    capped = fields.flag("cap_pixels_per_frame")
    tokens = fields.count("max_video_tokens")
    sampling = {
        # Qwen's own tools take 2 frames per second where a folder does not say; transformers then takes every frame.
        "fps": fields.number("fps", Qwen2Video().fps),
        "min_frames": fields.count("min_frames"),
        "max_frames": fields.count("max_frames"),
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "filter": _filter(fields),
    }
    if family == "Qwen3VL":
        return Qwen3Video(**sampling, frame_pixels=tokens * unit if capped else 0)
    return Qwen2Video(**sampling, total_pixels=int(tokens * unit * 0.9) if capped else 0)


def read_glm4_videos(folder: Path, vision: VisionConfig) -> Glm4Video:
    """Read how the videos of a GLM-4.1V checkpoint are prepared.

    Raises UserError, naming file and field, for what is unknown or not the tower's.
    """
    fields = _video_fields(folder, "Glm4v")
    if fields is None:
        return Glm4Video()
    _check_patches(fields, vision)
    min_pixels, max_pixels = _pixel_bounds(fields)
    return Glm4Video(
        fps=fields.number("fps"),
        seconds=fields.count("max_duration"),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        filter=_filter(fields),
    )


def read_internvl_videos(folder: Path, vision: VisionConfig, tile: tuple[int, int]) -> UniformVideo:
    """Read how the videos of an InternVL checkpoint are prepared: one tile for each frame, numbered in the text.

    Raises UserError, naming file and field, for what is unknown or not the tower's.
    """
    fields = _video_fields(folder, "InternVL")
    label = "\nFrame{}: "
    if fields is None:
        return UniformVideo(size=tile, label=label)
    _check_normalization(fields, vision)
    if fields.flag("do_center_crop") or not fields.flag("do_resize"):
        raise fields.refused("do_resize", "frames must be resized, and not cropped; set do_center_crop to false")
    if (size := fields.height_and_width("size")) != tile:
        raise fields.refused("size", f"the tower has tiles of {tile[0]} x {tile[1]} pixels; make them the same")
    if fields.value("fps") is not None:
        raise fields.refused("fps", "a fixed number of frames is taken, num_frames; set it to null")
    if fields.value("initial_shift") not in (None, True):
        raise fields.refused("initial_shift", "only true is known")
    frames = fields.count("num_frames", UniformVideo().frames)
    return UniformVideo(frames=frames, size=size, label=label, filter=_filter(fields))


def read_onevision_videos(folder: Path, vision: VisionConfig, side: int) -> UniformVideo:
    """Read how the videos of a LLaVA-OneVision checkpoint are prepared: frames of one size, a quarter of their tokens.

    Its processor takes all frames that it is given; here they are `num_frames`, 32 where it names none, as the model
    was trained. Raises UserError, naming file and field, for what is unknown or not the tower's.
    """
    default = UniformVideo(frames=32, size=(side, side), taken="first", shrink=2)
    fields = _video_fields(folder, "LlavaOnevision")
    if fields is None:
        return default
    _check_normalization(fields, vision)
    if fields.flag("do_center_crop") or not fields.flag("do_resize"):
        raise fields.refused("do_resize", "frames must be resized, and not cropped; set do_center_crop to false")
    if (size := fields.height_and_width("size")) != default.size:
        raise fields.refused("size", f"the tower has images of {side} x {side} pixels; make them the same")
    if fields.value("fps") is not None:
        raise fields.refused("fps", "a fixed number of frames is taken, num_frames; set it to null")
    frames = default.frames if fields.value("num_frames") is None else fields.count("num_frames")
    return replace(default, frames=frames, size=size, filter=_filter(fields))


def _video_fields(folder: Path, family: str) -> _ProcessorFields | None:
    """The fields of a folder's video processor over its family's defaults; None where the folder has none."""
    file = folder / "video_preprocessor_config.json"
    around = read_json(folder / "processor_config.json", {}).get("video_processor")
    if isinstance(around, dict):
        fields = _ProcessorFields(around, f"{folder / 'processor_config.json'}: video_processor")
    elif file.exists():
        fields = _ProcessorFields(read_json(file, {}), str(file))
    else:
        return None
    if fields.value("video_processor_type") not in (None, f"{family}VideoProcessor"):
        raise fields.refused("video_processor_type", f"known is {family}VideoProcessor")
    return fields.over(processor_defaults(f"{family}VideoProcessor"))


def _check_patches(fields: _ProcessorFields, vision: VisionConfig) -> None:
    """Raise UserError where frames are not resized, patched and normalised as the tower wants them."""
    tower = {"patch_size": vision.patch, "merge_size": vision.connector.merge, "temporal_patch_size": vision.frames}
    for name, expected in tower.items():
        if fields.count(name) != expected:
            raise fields.refused(name, f"the tower has {expected}; make them the same")
    if not fields.flag("do_resize"):
        raise fields.refused("do_resize", "frames that are not whole merge windows cannot be patched; set it to true")
    _check_normalization(fields, vision)


def _check_normalization(fields: _ProcessorFields, vision: VisionConfig) -> None:
    """Raise UserError where frames are not normalised as the tower's images are."""
    if not (fields.flag("do_normalize") and fields.flag("do_rescale")):
        raise fields.refused("do_normalize", "frames must be rescaled and normalised as images are")
    scale = 255 * fields.number("rescale_factor")
    for name, numbers in (("image_mean", vision.mean), ("image_std", vision.std)):
        if not np.allclose(np.array(fields.channels(name)) / scale, numbers, rtol=1e-6):
            raise fields.refused(name, f"the tower's images have {list(numbers)}; make them the same")


def read_audio_processing(folder: Path) -> WhisperMel:
    """Read how a checkpoint's clips are prepared. Raises UserError, naming file and field, for what is unknown."""
    _, fields, _ = _fields(folder, "feature_extractor", "audio_processor")
    kind = fields.value("feature_extractor_type")
    if kind != "WhisperFeatureExtractor":
        raise fields.refused("feature_extractor_type", "known is WhisperFeatureExtractor")
    fields = fields.over(processor_defaults("WhisperFeatureExtractor"))
    for name in ("dither", "padding_value"):
        if fields.value(name):
            raise fields.refused(name, "only 0 is known")
    if fields.value("padding_side") not in (None, "right"):
        raise fields.refused("padding_side", "only 'right' is known")
    how = WhisperMel(
        mels=fields.count("feature_size"),
        sample_rate=fields.count("sampling_rate"),
        window=fields.count("n_fft"),
        hop=fields.count("hop_length"),
        seconds=fields.count("chunk_length"),
    )
    if how.sample_rate != 16_000:  # the extractor's filters end at 8 kHz whatever the rate
        raise fields.refused("sampling_rate", "only 16000 is known")
    if how.window % 2:
        raise fields.refused("n_fft", "only even windows are known")
    return how


# ------------------------------------------------------------------------------------------- one processor at a time


def _fixed_size(fields: _ProcessorFields, pads: bool) -> FixedSize:
    if fields.flag("do_pad") and not pads:
        raise fields.refused("do_pad", "only LlavaImageProcessor pads; set it to false")
    if fields.flag("use_square_size"):
        raise fields.refused("use_square_size", "give height and width in size instead")
    return FixedSize(
        square=_background(fields) if fields.flag("do_pad") else (),
        resize=fields.extent("size") if fields.flag("do_resize") else (),
        crop=fields.height_and_width("crop_size") if fields.flag("do_center_crop") else (),
        filter=_filter(fields),
    )


def _pan_and_scan(fields: _ProcessorFields) -> PanAndScan:
    if not fields.flag("do_resize"):
        raise fields.refused("do_resize", "an image and its crops must be of one size; set it to true")
    note(
        f"{fields.where}: do_pan_and_scan=true is followed; Gemma3Processor of transformers ignores it unless the call "
        "says it too, and an image then has fewer tokens there"
    )
    return PanAndScan(
        resize=fields.height_and_width("size"),
        min_crop=fields.count("pan_and_scan_min_crop_size"),
        max_crops=fields.count("pan_and_scan_max_num_crops"),
        min_ratio=fields.number("pan_and_scan_min_ratio_to_activate"),
        filter=_filter(fields),
    )


def _smart_resize(fields: _ProcessorFields) -> SmartResize:
    if not fields.flag("do_resize"):
        raise fields.refused("do_resize", "images that are not whole merge windows cannot be patched; set it to true")
    min_pixels, max_pixels = _pixel_bounds(fields)
    return SmartResize(
        patch=fields.count("patch_size"),
        merge=fields.count("merge_size"),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        filter=_filter(fields),
    )


def _split_tiles(fields: _ProcessorFields) -> SplitTiles:
    sizes = {name: fields.value(name) for name in ("size", "max_image_size")}
    edges = {name: size.get("longest_edge") if isinstance(size, dict) else None for name, size in sizes.items()}
    if not _is_count(edges["max_image_size"]):
        raise fields.refused("max_image_size", "give longest_edge, in pixels of a tile")
    resize = fields.height_and_width("size") if edges["size"] is None else (edges["size"],)
    if not all(map(_is_count, resize)):
        raise fields.refused("size", "give longest_edge, or height and width")
    return SplitTiles(
        tile=edges["max_image_size"],
        resize=resize if fields.flag("do_resize") else (),
        split=fields.flag("do_image_splitting"),
        filter=_filter(fields),
    )


def _pixtral_resize(fields: _ProcessorFields, folder: Path) -> PixtralResize:
    if not fields.flag("do_resize"):
        raise fields.refused("do_resize", "images that are not whole tokens cannot be patched; set it to true")
    if fields.flag("do_center_crop"):
        raise fields.refused("do_center_crop", "images are not cropped; set it to false")
    size = fields.value("size")
    if isinstance(size, dict) and size.get("longest_edge"):
        fields = _ProcessorFields({**fields.values, "size": size["longest_edge"]}, fields.where)
    sides = fields.value("patch_size")
    sides = set(sides.values()) if isinstance(sides, dict) else {sides}
    if len(sides) != 1 or not _is_count(unit := sides.pop()):
        raise fields.refused("patch_size", "give one whole number above 0")
    path = folder / "processor_config.json"
    around = _ProcessorFields(read_json(path, {}), str(path)).over(processor_defaults("PixtralProcessor"))
    if around.value("processor_class") == "PixtralProcessor":
        # The processor around it gives the image processor the size of merged patches.
        unit = around.count("patch_size") * around.count("spatial_merge_size")
    return PixtralResize(
        unit=unit,
        box=fields.height_and_width("size"),
        row_end=around.get("image_break_token", str),
        end=around.get("image_end_token", str),
        filter=_filter(fields),
    )


def _pixel_bounds(fields: _ProcessorFields) -> tuple[int, int]:
    """Read the least and the most pixels of what Qwen-VL's resizing makes."""
    size = fields.value("size")
    if not isinstance(size, dict):
        raise fields.refused("size", "give shortest_edge and longest_edge, in pixels of the image")
    bounds = []
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        # Three spellings over the years; the one at the top level wins, as in transformers.
        candidates = [value for value in (fields.value(name), size.get(edge), size.get(name)) if value is not None]
        if not candidates or not _is_count(candidates[0]):
            raise fields.refused("size", f"give {edge}, in pixels of the image")
        bounds.append(candidates[0])
    return bounds[0], bounds[1]


def _tiles(fields: _ProcessorFields, tiled: bool) -> DynamicTiles | FixedSize:
    size = fields.height_and_width("size")
    min_tiles, max_tiles = fields.count("min_patches"), fields.count("max_patches")
    if tiled and max_tiles > 1:
        return DynamicTiles(tile=size, min_tiles=min_tiles, max_tiles=max_tiles, filter=_filter(fields))
    return FixedSize(resize=size if fields.flag("do_resize") else (), crop=(), filter=_filter(fields))


def _any_res(fields: _ProcessorFields, several: str) -> AnyRes:
    size = fields.extent("size")
    tile = size[0]
    cropped = fields.value("crop_size") is not None
    if len({*size, *(fields.height_and_width("crop_size") if cropped else ())}) != 1:
        crop = f"; crop_size is {fields.value('crop_size')}" if cropped else ""
        raise fields.refused("size", f"tiles must be square, and size and crop_size the same{crop}")
    pinpoints = fields.value("image_grid_pinpoints")
    fits = isinstance(pinpoints, list) and len(pinpoints) > 0
    for point in pinpoints if fits else ():
        fits &= isinstance(point, list) and len(point) == 2 and all(_is_count(s) and s % tile == 0 for s in point)
    if not fits:
        raise fields.refused("image_grid_pinpoints", f"give [height, width] of each, in multiples of size, {tile}")
    names = tuple(f"{height}x{width}" for height, width in pinpoints)
    return AnyRes(tile=tile, pinpoints=names, several=several, background=_background(fields), filter=_filter(fields))


def _internvl_chat(fields: _ProcessorFields) -> ImageProcessing:
    """Read image processing from the config."""
    # Their code never reads the `preprocessor_config.json` beside it. Their fine-tuning gives each of a sample's
    # several images its share of `max_dynamic_patch`; this is one image's.
    if fields.flag("pad2square"):
        raise fields.refused("pad2square", "only false is known")
    side = fields.count("force_image_size", fields.inner("vision_config").get("image_size", int))
    how: ImagePreparation = FixedSize(resize=(side, side), crop=())
    if fields.flag("dynamic_image_size"):
        how = DynamicTiles(
            tile=(side, side),
            min_tiles=fields.count("min_dynamic_patch"),
            max_tiles=fields.count("max_dynamic_patch"),
            thumbnail=fields.flag("use_thumbnail"),
        )
    return ImageProcessing(how, IMAGENET_MEAN, IMAGENET_STD, 1 / 255)


def _background(fields: _ProcessorFields) -> tuple[int, ...]:
    return tuple(int(mean * 255) for mean in fields.channels("image_mean"))


def _filter(fields: _ProcessorFields) -> Filter:
    number = fields.value("resample")
    if type(number) is not int or not 0 <= number < len(FILTERS):
        raise fields.refused("resample", f"give Pillow's number, 0 to {len(FILTERS) - 1}")
    return FILTERS[number]


# ------------------------------------------------------------------------------------------------------------ files


class _ProcessorFields(Fields):
    """The fields of one processor, refused with the remedy."""

    def value(self, name: str) -> Any:
        # JSON's null is a missing field.
        return self.values.get(name)

    def refused(self, name: str, remedy: str) -> UserError:
        return UserError(f"{self.where}: {name}={self.value(name)!r}: {remedy}")

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if value is not None and type(value) is not bool:
            raise self.refused(name, "give true or false")
        return bool(value)

    def count(self, name: str, null: int | None = None) -> int:
        value = self.value(name)
        value = null if value is None else value
        if not _is_count(value):
            raise self.refused(name, "give a whole number above 0")
        return value

    def number(self, name: str, null: float | None = None) -> float:
        value = self.value(name)
        value = null if value is None else value
        if type(value) not in (int, float):
            raise self.refused(name, "give a number")
        return float(value)

    def channels(self, name: str) -> tuple[float, ...]:
        value = self.value(name)
        values = tuple(value) if isinstance(value, list | tuple) else (value,) * 3
        if len(values) != 3 or any(type(v) not in (int, float) for v in values):
            raise self.refused(name, "give three numbers: red, green, blue")
        return tuple(map(float, values))

    def extent(self, name: str) -> tuple[int, ...]:
        """(shortest edge,) or (height, width)."""
        value = self.value(name)
        if isinstance(value, dict):
            value = {key: side for key, side in value.items() if side is not None}
        if isinstance(value, dict) and set(value) == {"shortest_edge"}:
            sides: tuple[Any, ...] = (value["shortest_edge"],)
        elif isinstance(value, dict):
            sides = (value["height"], value["width"]) if set(value) == {"height", "width"} else ()
        elif isinstance(value, list):
            sides = tuple(value) if len(value) == 2 else ()
        else:
            sides = (value, value) if self.flag("default_to_square") or name == "crop_size" else (value,)
        if not sides or not all(_is_count(side) for side in sides):
            raise self.refused(name, "give height and width, or shortest_edge alone")
        return sides

    def height_and_width(self, name: str) -> tuple[int, int]:
        sides = self.extent(name)
        if len(sides) != 2:
            raise self.refused(name, "give height and width")
        return sides[0], sides[1]


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _fields(folder: Path, *parts: str) -> tuple[Path, _ProcessorFields, str]:
    """The fields of a folder's processor for one modality, by its names.

    Also returns the file that holds them, and the class of the processor around it.
    """
    processor_file = folder / "processor_config.json"
    around = read_json(processor_file, {})
    modality_file = folder / "preprocessor_config.json"
    preprocessor = read_json(modality_file, {})
    processor_class = around.get("processor_class") or preprocessor.get("processor_class") or ""
    for part in parts:
        if isinstance(around.get(part), dict):
            return processor_file, _ProcessorFields(around[part], f"{processor_file}: {part}"), processor_class
    if not modality_file.exists():
        raise UserError(f"{folder}: no preprocessor_config.json, and no {parts[0]} in a processor_config.json; add one")
    return modality_file, _ProcessorFields(preprocessor, str(modality_file)), processor_class


def _kind(fields: _ProcessorFields) -> str:
    key = "image_processor_type" if fields.value("image_processor_type") else "feature_extractor_type"
    name = str(fields.value(key))
    # Fast and slow processors have the same fields, and older checkpoints call a processor a feature extractor.
    kind = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    kind = RENAMED.get(kind, kind)
    if kind not in (known := processor_names("ImageProcessor")):
        raise fields.refused(key, f"known are {', '.join(known)}")
    return kind
