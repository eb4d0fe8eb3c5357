"""Config of images: the fields of each kind, their check, and how they are read from transformers' processors.

The items, texts and order of tokens that a kind makes are a file of
`mmjax/data/media/preparations`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from mmjax.config.checks import check, listed, ordered
from mmjax.config.processor_fields import Filter, ProcessorFields, is_count
from mmjax.config.ranges import (
    Color,
    NonNegativeInt,
    OptionalSize,
    PositiveFloat,
    PositiveInt,
    Size,
)
from mmjax.errors import UserError


class ImageKind:
    """Base of the ways to prepare images, for a vision tower or to be made by a generator.

    `from_hf` of a kind reads the fields of one of `hf_processors`. It raises UserError, naming file
    and field, for what is unknown.
    """

    hf_processors = ()  # image processors of transformers that are read as this kind
    hf_note = ""  # what to tell a user whose processor is read as this kind
    picture_size = ()  # height and width of every image that is one item of one size; (): of any
    text_fields = ()  # names of its fields that are written between an image's tokens
    arranges_tokens = False  # an image's tokens do not follow each other item by item
    interpolates = False  # a position of the LLM may be made of several tokens
    rounds_pixels = False  # normalised pixels, and all on the way to them, are rounded to bfloat16

    @property
    def writes_texts(self) -> bool:
        """Return whether text is written between an image's tokens."""
        return any(getattr(self, name) for name in self.text_fields)

    @property
    def item_size(self) -> tuple[int, ...]:
        """Return height and width of every item where all have one size, else ()."""
        return self.picture_size

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> Self:
        """Return the preparation for a tower with such patches, of which merge x merge are a token, and positions.

        positions: the kind of the tower's. Raises UserError, which `where` begins, where its images
        are not the tower's.
        """
        return self

    def without_tokens(self) -> Self:
        """Return the preparation for an LLM that lacks the special tokens of the checkpoint's."""
        return replace(self, **dict.fromkeys(self.text_fields, ""))


@dataclass(frozen=True)
class AsIs(ImageKind):
    """The image's own pixels, not resized, padded with black to whole patches."""

    kind: Literal["as_is"] = "as_is"


@dataclass(frozen=True)
class FixedSize(ImageKind):
    """One item of a fixed size, as for CLIP, SigLIP and LLaVA-1.5: padded to a square, resized and cropped."""

    square: Color = ()  # red, green and blue of the padding to a square; (): no padding
    # to this shortest edge, or to (height, width); (): no resizing
    resize: tuple[int, ...] = (224,)
    # height and width of a centre crop, black beyond the image; (): no crop
    crop: OptionalSize = (224, 224)
    filter: Filter = "bicubic"  # of resizing
    # shortest edge at least of an image that is resized to fit `resize` in its own shape, before it
    # is padded; 0: padded first
    fit: NonNegativeInt = 0
    kind: Literal["fixed_size"] = "fixed_size"

    hf_processors = (
        "CLIPImageProcessor",
        "SiglipImageProcessor",
        "BitImageProcessor",
        "LlavaImageProcessor",
        "DeepseekVLImageProcessor",
        "JanusImageProcessor",
    )

    @property
    def picture_size(self) -> tuple[int, ...]:
        """Return height and width of every image; () where only its shortest edge is given."""
        size = self.crop or self.resize
        return size if len(size) == 2 else ()

    def check(self, where: str) -> None:
        setting = f"{where}.resize={listed(self.resize)}"
        check(
            len(self.resize) <= 2,
            f"{setting}: give the shortest edge, or height and width, or nothing",
        )
        check(min(self.resize, default=1) > 0, f"{setting}: must be more than 0")
        check(
            not self.fit or (len(set(self.resize)) == 1 and len(self.resize) == 2 and self.square),
            f"{where}.fit={self.fit}: images are fitted into a square and padded; give square, and resize with two "
            "equal sides",
        )

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> FixedSize:
        if fields.name in ("DeepseekVLImageProcessor", "JanusImageProcessor"):
            return cls._fitted_from_hf(fields)
        if fields.flag("do_pad") and fields.name != "LlavaImageProcessor":
            raise fields.refused("do_pad", "only LlavaImageProcessor pads; set it to false")
        if fields.flag("use_square_size"):
            raise fields.refused("use_square_size", "give height and width in size instead")
        return cls(
            square=fields.background() if fields.flag("do_pad") else (),
            resize=fields.extent("size") if fields.flag("do_resize") else (),
            crop=fields.height_and_width("crop_size") if fields.flag("do_center_crop") else (),
            filter=fields.filter(),
        )

    @classmethod
    def _fitted_from_hf(cls, fields: ProcessorFields) -> FixedSize:
        for name in ("do_resize", "do_pad"):
            if not fields.flag(name):
                raise fields.refused(name, "images must have one size; set it to true")
        resize = fields.height_and_width("size")
        if len(set(resize)) != 1:
            raise fields.refused("size", "give the same height and width")
        return cls(
            square=fields.background(),
            resize=resize,
            crop=(),
            filter=fields.filter(),
            fit=fields.count("min_size"),
        )


@dataclass(frozen=True)
class SmartResize(ImageKind):
    """One item of about the image's own size and shape, in whole merge windows, as for Qwen-VL."""

    patch: PositiveInt = 14  # pixels per side of the encoder's patches
    merge: PositiveInt = 2  # patches per side of a merge window
    min_pixels: PositiveInt = 56 * 56  # of the resized image
    max_pixels: int = 28 * 28 * 1280  # of the resized image
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["smart_resize"] = "smart_resize"
    # frames that an image counts as, against bounds of all their pixels, and its sides enlarged to
    # a window first, as for GLM-4.1V; 0: neither
    frames: NonNegativeInt = 0
    # its sides are enlarged to a window first, one after the other, as for PaddleOCR-VL
    widened: bool = False

    hf_processors = (
        "Qwen2VLImageProcessor",
        "Glm4vImageProcessor",
        "Glm46VImageProcessor",
        "GlmgaImageProcessor",
        "PaddleOCRVLImageProcessor",
        "VideoLlama3ImageProcessor",
    )

    def check(self, where: str) -> None:
        ordered(where, self, "min_pixels", "max_pixels")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> SmartResize:
        if not fields.flag("do_resize"):
            whole = "images that are not whole merge windows cannot be patched"
            raise fields.refused("do_resize", f"{whole}; set it to true")
        widened = fields.name == "PaddleOCRVLImageProcessor"
        still = widened or fields.name == "VideoLlama3ImageProcessor"
        if still and fields.count("temporal_patch_size") != 1:
            raise fields.refused("temporal_patch_size", "its tower takes still images; set it to 1")
        if fields.name == "GlmgaImageProcessor" and fields.count("patch_expand_factor") != 1:
            whole = "images are resized to whole merge windows; set it to 1"
            raise fields.refused("patch_expand_factor", whole)
        return cls(
            patch=fields.count("patch_size"),
            merge=fields.count("merge_size"),
            **fields.pixel_bounds(),
            filter=fields.filter(),
            # GLM's counts an image as a temporal patch against the bounds.
            frames=fields.count("temporal_patch_size") if fields.name.startswith("Glm") else 0,
            widened=widened,
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> SmartResize:
        if positions in ("rotary", "stretched"):
            _check_patches(where, self, patch, merge)
        return self


@dataclass(frozen=True)
class PaddedResize(ImageKind):
    """One item shrunk to a number of patches in the image's own shape, padded to whole tokens, as for Kimi K2.5."""

    patch: PositiveInt = 14  # pixels per side of the encoder's patches
    merge: PositiveInt = 2  # patches per side of an LLM token
    # patches of the resized image, at most; smaller images are not enlarged
    max_patches: PositiveInt = 16384
    max_side: PositiveInt = 512  # patches of one of its sides, at most
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["padded_resize"] = "padded_resize"

    hf_processors = ("Kimi_K25ImageProcessor",)

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> PaddedResize:
        fields.check_resizes()
        size = fields.value("size")
        sides = {size.get("max_height"), size.get("max_width")} if isinstance(size, dict) else set()
        if len(sides) != 1 or not is_count(side := sides.pop()):
            raise fields.refused("size", "give the same max_height and max_width, in patches")
        return cls(
            patch=fields.count("patch_size"),
            merge=fields.count("merge_size"),
            max_patches=fields.count("max_patches"),
            max_side=side,
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> PaddedResize:
        _check_patches(where, self, patch, merge)
        return self


def _check_patches(
    where: str, how: SmartResize | PaddedResize | CappedGrid, patch: int, merge: int
) -> None:
    """Raise UserError where a preparation's patches are not the tower's."""
    if (how.patch, how.merge) != (patch, merge):
        raise UserError(
            f"{where}: it makes patches of {how.patch} pixels and merges {how.merge} x {how.merge} of them, the "
            f"tower has patches of {patch} and merges {merge} x {merge}; make patch_size and merge_size the same"
        )


@dataclass(frozen=True)
class CappedGrid(ImageKind):
    """One item of about its own size in whole tokens, a capped number of them, as for Muse Glimmer."""

    patch: PositiveInt = 14  # pixels per side of the encoder's patches
    merge: PositiveInt = 2  # patches per side of an LLM token
    max_tokens: PositiveInt = 4096  # of an image
    filter: Filter = "lanczos"  # of resizing
    kind: Literal["capped_grid"] = "capped_grid"

    hf_processors = ("MuseGlimmerImageProcessor",)

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> CappedGrid:
        fields.check_resizes()
        return cls(
            patch=fields.count("patch_size"),
            merge=fields.count("merge_size"),
            max_tokens=fields.count("max_image_tokens"),
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> CappedGrid:
        _check_patches(where, self, patch, merge)
        return self


@dataclass(frozen=True)
class PixtralResize(ImageKind):
    """One item of about the image's own shape, shrunk into a box, in whole tokens, as for Pixtral and Mistral 3."""

    unit: PositiveInt = 16  # pixels per side of an LLM token
    # height and width; smaller images are not enlarged, but to whole tokens
    box: Size = (1024, 1024)
    row_end: str = ""  # text behind every row of an image's tokens but the last
    end: str = ""  # text behind the last row
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["pixtral_resize"] = "pixtral_resize"

    hf_processors = ("PixtralImageProcessor",)
    text_fields = ("row_end", "end")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> PixtralResize:
        fields.check_resizes()
        if fields.flag("do_center_crop"):
            raise fields.refused("do_center_crop", "images are not cropped; set it to false")
        if edge := fields.longest_edge("size"):
            fields = replace(fields, values={**fields.values, "size": edge})
        sides = fields.value("patch_size")
        sides = set(sides.values()) if isinstance(sides, dict) else {sides}
        if len(sides) != 1 or not is_count(unit := sides.pop()):
            raise fields.refused("patch_size", "give one whole number above 0")
        caller = fields.caller
        if caller.value("processor_class") == "PixtralProcessor":
            # The processor around it gives the image processor the size of merged patches.
            unit = caller.count("patch_size") * caller.count("spatial_merge_size")
        return cls(
            unit=unit,
            box=fields.height_and_width("size"),
            row_end=caller.text("image_break_token"),
            end=caller.text("image_end_token"),
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> PixtralResize:
        unit = patch * merge
        if self.unit not in (patch, unit):
            raise UserError(
                f"{where}: it makes images in multiples of {self.unit} pixels, the tower has tokens of {unit}; make "
                "patch_size times spatial_merge_size the same"
            )
        # An image processor without one around it does not say how patches are merged.
        return replace(self, unit=unit)


@dataclass(frozen=True)
class DynamicTiles(ImageKind):
    """The grid of tiles closest to the image's shape or size, then the whole image as a thumbnail, as for InternVL."""

    tile: Size = (448, 448)  # height and width
    min_tiles: PositiveInt = 1  # per image, not counting the thumbnail
    max_tiles: int = 12  # per image, not counting the thumbnail
    thumbnail: bool = True  # adds the whole image as the last tile of an image of several tiles
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["dynamic_tiles"] = "dynamic_tiles"
    # the grid nearest to the image's shape, or that which enlarges the image least, where all are
    # smaller shrinks it least
    grid_by: Literal["shape", "scale"] = "shape"
    label: str = ""  # text before each tile, with {tile} for its number from 1 on
    whole: str = ""  # the same before the thumbnail, or an image that is a single tile
    tile_end: str = ""  # text behind each tile, and behind the thumbnail
    begin: str = ""  # text before all of an image
    end: str = ""  # text behind all of it

    hf_processors = ("GotOcr2ImageProcessor", "Cohere2VisionImageProcessor")
    text_fields = ("label", "whole", "tile_end", "begin", "end")

    @property
    def item_size(self) -> tuple[int, ...]:
        return self.tile

    def check(self, where: str) -> None:
        ordered(where, self, "min_tiles", "max_tiles")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> DynamicTiles | FixedSize:
        # Where InternVL's or Aya's processor calls it, that one's own default wins over the field.
        calling = fields.caller.name in ("InternVLProcessor", "AyaVisionProcessor")
        tiled = calling or fields.flag("crop_to_patches")
        size = fields.height_and_width("size")
        # Of Command A Vision the least number is not read.
        by_scale = fields.name == "Cohere2VisionImageProcessor"
        min_tiles = 1 if by_scale else fields.count("min_patches")
        max_tiles = fields.count("max_patches") if tiled else 1
        if not fields.flag("do_resize") and not (tiled and by_scale) and max_tiles == 1:
            return FixedSize(resize=(), crop=(), filter=fields.filter())
        return cls(
            tile=size,
            min_tiles=min_tiles if max_tiles > 1 else 1,
            max_tiles=max_tiles,
            filter=fields.filter(),
            grid_by="scale" if by_scale else "shape",
        )

    @classmethod
    def from_internvl_chat(cls, fields: ProcessorFields, side: int) -> DynamicTiles | FixedSize:
        """Read the config of OpenGVLab's `internvl_chat`. side: pixels of its tower's images.

        Their code never reads the `preprocessor_config.json` beside it. Their fine-tuning gives
        each of a sample's several images its share of `max_dynamic_patch`; this is one image's.
        """
        if fields.flag("pad2square"):
            raise fields.refused("pad2square", "only false is known")
        side = fields.count("force_image_size", side)
        if not fields.flag("dynamic_image_size"):
            return FixedSize(resize=(side, side), crop=())
        return cls(
            tile=(side, side),
            min_tiles=fields.count("min_dynamic_patch"),
            max_tiles=fields.count("max_dynamic_patch"),
            thumbnail=fields.flag("use_thumbnail"),
        )


@dataclass(frozen=True)
class AnyRes(ImageKind):
    """The whole image as one tile, then tiles of the best-fitting resolution, as for LLaVA-NeXT and -OneVision.

    The LLM sees tokens tile by tile, or by rows of the image that the tiles make up: without those
    of padding only, and with `connector.newline` behind each row.
    """

    tile: PositiveInt = 336  # pixels per side
    # height x width
    pinpoints: tuple[str, ...] = ("336x672", "672x336", "672x672", "1008x336", "336x1008")
    # images of a sample with several: tiled like single ones, or padded to a square
    several: Literal["tiles", "square"] = "tiles"
    background: Color = (122, 116, 104)  # red, green and blue of that padding
    filter: Filter = "bicubic"  # of resizing
    # of an image's tokens: tile by tile, or by rows of the image
    order: Literal["tiles", "rows"] = "tiles"
    # images with over 1.21 times the tokens of so many tiles are interpolated to those; 0: never
    most_tiles: NonNegativeInt = 0
    kind: Literal["any_res"] = "any_res"

    hf_processors = ("LlavaNextImageProcessor", "LlavaOnevisionImageProcessor")

    @property
    def item_size(self) -> tuple[int, ...]:
        return self.tile, self.tile

    @property
    def arranges_tokens(self) -> bool:
        """Return whether an image's tokens do not follow each other item by item."""
        return self.order == "rows"

    @property
    def interpolates(self) -> bool:
        """Return whether a position of the LLM may be made of several tokens."""
        return self.most_tiles > 0

    def check(self, where: str) -> None:
        by_rows = self.order == "rows" or not self.most_tiles
        check(
            by_rows,
            f"{where}.most_tiles={self.most_tiles}: it is rows that are interpolated; choose order=rows",
        )
        check(
            bool(self.pinpoints),
            f"{where}.pinpoints is empty; name some, such as {2 * self.tile}x{self.tile}",
        )
        for pinpoint in self.pinpoints:
            sides = map(
                int, pinpoint.split("x") if re.fullmatch("[0-9]+x[0-9]+", pinpoint) else ("0",)
            )
            fits = all(side > 0 and side % self.tile == 0 for side in sides)
            check(
                fits,
                f"{where}.pinpoints: {pinpoint!r} is no HEIGHTxWIDTH in multiples of tile={self.tile}",
            )

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> AnyRes:
        size = fields.extent("size")
        tile = size[0]
        cropped = fields.value("crop_size") is not None
        if len({*size, *(fields.height_and_width("crop_size") if cropped else ())}) != 1:
            crop = f"; crop_size is {fields.value('crop_size')}" if cropped else ""
            raise fields.refused(
                "size", f"tiles must be square, and size and crop_size the same{crop}"
            )
        pinpoints = fields.value("image_grid_pinpoints")
        fits = isinstance(pinpoints, list) and len(pinpoints) > 0
        for point in pinpoints if fits else ():
            fits &= (
                isinstance(point, list)
                and len(point) == 2
                and all(is_count(s) and s % tile == 0 for s in point)
            )
        if not fits:
            raise fields.refused(
                "image_grid_pinpoints",
                f"give [height, width] of each, in multiples of size, {tile}",
            )
        return cls(
            tile=tile,
            pinpoints=tuple(f"{height}x{width}" for height, width in pinpoints),
            several="tiles" if fields.name == "LlavaNextImageProcessor" else "square",
            background=fields.background(),
            filter=fields.filter(),
        )


@dataclass(frozen=True)
class SplitTiles(ImageKind):
    """Square tiles of an enlarged image, row by row, then the whole image as one more, as for Idefics3 and SmolVLM."""

    tile: PositiveInt = 364  # pixels per side
    # to this longest edge, or to (height, width), before it is cut; (): as it is
    resize: tuple[int, ...] = (1456,)
    split: bool = True  # false: the whole image alone
    # text before each tile, and behind the last; with it rows end with a line break
    marker: str = ""
    label: str = ""  # text behind the marker, with {row} and {column} of the tile from 1 on
    whole: str = ""  # the same of the whole image
    filter: Filter = "lanczos"  # of resizing
    kind: Literal["split_tiles"] = "split_tiles"

    hf_processors = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    text_fields = ("marker", "label", "whole")

    @property
    def item_size(self) -> tuple[int, ...]:
        return self.tile, self.tile

    def check(self, where: str) -> None:
        fits = len(self.resize) <= 2 and min(self.resize, default=1) > 0
        check(
            fits,
            f"{where}.resize={listed(self.resize)}: give the longest edge, or height and width, or nothing",
        )

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> SplitTiles:
        tile, edge = (fields.longest_edge(name) for name in ("max_image_size", "size"))
        if not is_count(tile):
            raise fields.refused("max_image_size", "give longest_edge, in pixels of a tile")
        resize = fields.height_and_width("size") if edge is None else (edge,)
        if not all(map(is_count, resize)):
            raise fields.refused("size", "give longest_edge, or height and width")
        return cls(
            tile=tile,
            resize=resize if fields.flag("do_resize") else (),
            split=fields.flag("do_image_splitting"),
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> SplitTiles:
        if positions == "fractional" and self.tile // patch % merge:
            raise UserError(
                f"{where}: it makes tiles of {self.tile} pixels, {self.tile // patch} patches a side, which do not "
                f"divide into squares of {merge} x {merge}; make max_image_size a multiple of {merge * patch}"
            )
        return self


@dataclass(frozen=True)
class PanAndScan(ImageKind):
    """The whole image, then crops side by side where it is long or tall, as for Gemma 3, with text before each."""

    resize: Size = (896, 896)  # of the image and of its crops: height and width
    min_crop: PositiveInt = 256  # pixels of a crop's shorter side; with less, an image has no crops
    max_crops: PositiveInt = 4  # per image
    # longer side over shorter side, from which on an image has crops
    min_ratio: PositiveFloat = 1.2
    filter: Filter = "bilinear"  # of resizing
    kind: Literal["pan_and_scan"] = "pan_and_scan"

    hf_processors = ("Gemma3ImageProcessor",)
    hf_note = (
        "do_pan_and_scan=true is followed; Gemma3Processor of transformers ignores it unless the call says it too, and "
        "an image then has fewer tokens there"
    )
    writes_texts = True

    @property
    def item_size(self) -> tuple[int, ...]:
        return self.resize

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> PanAndScan | FixedSize:
        if not fields.flag("do_pan_and_scan"):
            return FixedSize.from_hf(fields)
        if not fields.flag("do_resize"):
            raise fields.refused(
                "do_resize", "an image and its crops must be of one size; set it to true"
            )
        return cls(
            resize=fields.height_and_width("size"),
            min_crop=fields.count("pan_and_scan_min_crop_size"),
            max_crops=fields.count("pan_and_scan_max_num_crops"),
            min_ratio=fields.number("pan_and_scan_min_ratio_to_activate"),
            filter=fields.filter(),
        )


@dataclass(frozen=True)
class Slices(ImageKind):
    """The whole image, then slices of an enlarged one where it is large, all in whole tokens, as for MiniCPM-V."""

    unit: PositiveInt = 56  # pixels per side of an LLM token
    side: PositiveInt = 448  # of a square that has about as many pixels as each item
    max_slices: PositiveInt = 9  # per image; 1: the whole image alone
    begin: str = ""  # text before the whole image, with {image} for its number in its sample
    end: str = ""  # text behind the whole image
    slice_begin: str = ""  # text before each slice
    slice_end: str = ""  # text behind each slice
    enlarged: bool = True  # whole images that are smaller than that square are
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["slices"] = "slices"

    hf_processors = ("MiniCPMV4_6ImageProcessor", "MiniCPMOcrImageProcessor")
    text_fields = ("begin", "end", "slice_begin", "slice_end")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> Slices:
        if not fields.flag("do_resize"):
            raise fields.refused(
                "do_resize", "images that are not whole tokens cannot be merged; set it to true"
            )
        sides = {"16x": 4, "4x": 2}  # patches of a token
        if (mode := fields.text("downsample_mode")) not in sides:
            raise fields.refused("downsample_mode", f"known are {', '.join(sides)}")
        enlarged = fields.value("small_image_upsize", null="always")
        if enlarged not in ("always", "never"):
            raise fields.refused("small_image_upsize", "known are always, never")
        return cls(
            unit=fields.count("patch_size") * sides[mode],
            side=fields.count("scale_resolution"),
            max_slices=fields.count("max_slice_nums") if fields.flag("slice_mode") else 1,
            begin="{image}" if fields.flag("use_image_id") else "",
            enlarged=enlarged == "always",
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> Slices:
        if self.unit != patch * merge and positions == "fractional":
            raise UserError(
                f"{where}: it makes images in multiples of {self.unit} pixels, the tower has tokens of "
                f"{patch * merge}; make patch_size and downsample_mode the same"
            )
        return self


@dataclass(frozen=True)
class ResizeOrTiles(ImageKind):
    """One item of about the image's own shape; of a large image tiles first, as for LFM2-VL."""

    patch: PositiveInt = 16  # pixels per side of the encoder's patches
    merge: PositiveInt = 2  # patches per side of an LLM token
    min_tokens: PositiveInt = 64  # of the resized image
    max_tokens: int = 256  # of the resized image
    # images with more than so many times the pixels of max_tokens are cut into tiles
    tolerance: PositiveFloat = 2.0
    tile: PositiveInt = 512  # pixels per side
    min_tiles: PositiveInt = 2  # of an image that is cut, not counting the whole of it
    max_tiles: int = 10  # the same at most; 1: no image is cut
    thumbnail: bool = True  # adds the whole image, resized, behind its tiles
    begin: str = ""  # text before all of an image
    # text before each tile, with {row} and {column} of it from 1 on
    label: str = ""
    whole: str = ""  # text before the whole image behind its tiles
    end: str = ""  # text behind all of an image
    filter: Filter = "bilinear"  # of resizing
    kind: Literal["resize_or_tiles"] = "resize_or_tiles"

    hf_processors = ("Lfm2VlImageProcessor",)
    text_fields = ("begin", "label", "whole", "end")

    def check(self, where: str) -> None:
        ordered(where, self, "min_tokens", "max_tokens")
        if self.max_tiles == 1:
            return
        ordered(where, self, "min_tiles", "max_tiles")
        check(
            self.min_tiles > 1,
            f"{where}.min_tiles=1: an image that is cut has several tiles; use at least 2",
        )
        unit = self.patch * self.merge
        check(
            self.tile % unit == 0,
            f"{where}.tile={self.tile}: tiles are whole tokens; use a multiple of patch * merge, {unit}",
        )

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> ResizeOrTiles:
        patch, merge = fields.count("encoder_patch_size"), fields.count("downsample_factor")
        least, most = fields.count("min_tiles"), fields.count("max_tiles")
        split = fields.flag("do_image_splitting") and (least, most) != (1, 1)
        if split and least == 1:
            several = "of a large image as one tile the class counts tokens that it does not make"
            raise fields.refused("min_tiles", f"{several}; set it to 2")
        if split and least > most:
            raise fields.refused("min_tiles", f"set it to at most max_tiles={most}")
        tile = fields.count("tile_size")
        if split and tile % (patch * merge):
            raise fields.refused("tile_size", f"give a multiple of {patch * merge}, whole tokens")
        made = cls(
            patch=patch,
            merge=merge,
            min_tokens=fields.count("min_image_tokens"),
            max_tokens=fields.count("max_image_tokens"),
            tolerance=fields.number("max_pixels_tolerance"),
            tile=tile,
            min_tiles=least,
            max_tiles=most if split else 1,
            thumbnail=fields.flag("use_thumbnail"),
            filter=fields.filter(),
        )
        written = fields.caller.value("use_image_special_tokens", null=True)
        return made.with_tokens() if written else made

    def with_tokens(self) -> ResizeOrTiles:
        """Return the preparation with the texts that LFM2-VL's processor writes."""
        return replace(
            self,
            begin="<|image_start|>",
            label="<|img_row_{row}_col_{column}|>",
            whole="<|img_thumbnail|>",
            end="<|image_end|>",
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> ResizeOrTiles:
        if (self.patch, self.merge) != (patch, merge):
            raise UserError(
                f"{where}: it makes patches of {self.patch} pixels and tokens of {self.merge} x {self.merge} of them, "
                f"the tower has patches of {patch} and tokens of {merge} x {merge}; make encoder_patch_size and "
                "downsample_factor the same"
            )
        return self


@dataclass(frozen=True)
class PatchBudget(ImageKind):
    """One item of about the image's own shape, in whole tokens, as large as a number of them allows (Gemma 4)."""

    unit: PositiveInt = 48  # pixels per side of an LLM token
    max_tokens: PositiveInt = 280  # of an image
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["patch_budget"] = "patch_budget"

    hf_processors = ("Gemma4ImageProcessor", "Gemma4UnifiedImageProcessor")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> PatchBudget:
        if not fields.flag("do_resize"):
            raise fields.refused(
                "do_resize", "images that are not whole tokens cannot be merged; set it to true"
            )
        tokens = fields.count("max_soft_tokens")
        if tokens not in (known := (70, 140, 280, 560, 1120)):
            raise fields.refused("max_soft_tokens", f"known are {listed(known)}")
        return cls(
            unit=fields.count("patch_size") * fields.count("pooling_kernel_size"),
            max_tokens=tokens,
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> PatchBudget:
        if self.unit != patch * merge and positions == "axis_tables":
            raise UserError(
                f"{where}: it makes images in multiples of {self.unit} pixels, the tower has tokens of "
                f"{patch * merge}; make patch_size times pooling_kernel_size the same"
            )
        return self


@dataclass(frozen=True)
class CanvasTiles(ImageKind):
    """Tiles of an image in its own shape, padded to whole ones, then the whole image as one more, as for Llama 4.

    Their grid is that which can enlarge the image least, where all are smaller that which shrinks it least.
    """

    tile: PositiveInt = 336  # pixels per side
    max_tiles: PositiveInt = 16  # per image, not counting the whole image
    # to the largest grid; else the grid is that which is nearest, and no side is enlarged beyond a
    # tile's
    enlarged: bool = False
    begin: str = ""  # text before all of an image
    tile_end: str = ""  # text behind each tile but the last of its row
    row_end: str = ""  # text behind the last tile of a row
    whole: str = ""  # text before the whole image behind its tiles, or one that is a single tile
    end: str = ""  # text behind all of an image
    filter: Filter = "bilinear"  # of resizing
    kind: Literal["canvas_tiles"] = "canvas_tiles"

    hf_processors = ("Llama4ImageProcessor",)
    text_fields = ("begin", "tile_end", "row_end", "whole", "end")
    rounds_pixels = True

    @property
    def item_size(self) -> tuple[int, ...]:
        return self.tile, self.tile

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> CanvasTiles:
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not fields.flag(name):
                raise fields.refused(name, "its class prepares no images otherwise; set it to true")
        if fields.number("rescale_factor") != 1 / 255:
            raise fields.refused("rescale_factor", "only 1 / 255 is known, by which it rounds")
        size = fields.height_and_width("size")
        if len(set(size)) != 1:
            raise fields.refused("size", "give the same height and width")
        if (filter := fields.filter()) not in ("bilinear", "bicubic"):
            raise fields.refused("resample", "known are 2 and 3, bilinear and bicubic")
        return cls(
            tile=size[0],
            max_tiles=fields.count("max_patches"),
            enlarged=fields.flag("resize_to_max_canvas"),
            filter=filter,
        ).with_tokens()

    def with_tokens(self) -> CanvasTiles:
        """Return the preparation with the texts that Llama 4's processor writes, by these very names."""
        return replace(
            self,
            begin="<|image_start|>",
            tile_end="<|tile_x_separator|>",
            row_end="<|tile_y_separator|>",
            whole="<|image|>",
            end="<|image_end|>",
        )


@dataclass(frozen=True)
class TilesAndSquare(ImageKind):
    """Tiles of a large image, then the whole of it in its own shape, padded to a larger square (DeepSeek-OCR 2).

    The LLM sees their tokens in this order, and `connector.newline` behind them.
    """

    tile: PositiveInt = 768  # pixels per side
    square: PositiveInt = 1024  # of the whole image, pixels per side
    unit: PositiveInt = 64  # pixels per side of an LLM token
    # per image whose longer side is longer than a tile's; others have none
    min_tiles: PositiveInt = 2
    max_tiles: int = 6  # the same at most
    background: Color = (127, 127, 127)  # red, green and blue of the padding
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["tiles_and_square"] = "tiles_and_square"

    hf_processors = ("DeepseekOcr2ImageProcessor",)
    arranges_tokens = True

    def check(self, where: str) -> None:
        ordered(where, self, "min_tiles", "max_tiles")

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> TilesAndSquare:
        # The processor around it tiles all images, into its own numbers of tiles, whatever fields say.
        size = fields.height_and_width("size")
        if len(set(size)) != 1:
            raise fields.refused("size", "give the same height and width")
        color = fields.value("background_color")
        shades = isinstance(color, list) and all(type(x) is int and 0 <= x < 256 for x in color)
        if not shades or len(color) != 3:
            raise fields.refused("background_color", "give red, green and blue, from 0 to 255")
        caller = fields.caller
        return cls(
            tile=fields.count("tile_size"),
            square=size[0],
            unit=caller.count("patch_size") * caller.count("downsample_ratio"),
            background=tuple(color),
            filter=fields.filter(),
        )

    def fitted(self, where: str, patch: int, merge: int, positions: str) -> TilesAndSquare:
        if self.unit != patch * merge:
            raise UserError(
                f"{where}: it counts tokens of {self.unit} pixels a side, the tower has tokens of {patch * merge}; "
                "make patch_size times downsample_ratio the same"
            )
        return self


ImagePreparation = (
    AsIs
    | FixedSize
    | SmartResize
    | DynamicTiles
    | AnyRes
    | PaddedResize
    | PixtralResize
    | SplitTiles
    | PanAndScan
    | Slices
    | ResizeOrTiles
    | PatchBudget
    | CappedGrid
    | CanvasTiles
    | TilesAndSquare
)
