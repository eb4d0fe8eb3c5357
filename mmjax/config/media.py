"""How images and clips are prepared, and which are bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# ------------------------------------------------------------------------------------------- how images are prepared

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # Pillow's


@dataclass(frozen=True)
class AsIs:
    """An image's own pixels, not resized: black fills it up to whole patches."""

    kind: Literal["as_is"] = "as_is"


@dataclass(frozen=True)
class FixedSize:
    """One item of one size, as for CLIP, SigLIP and LLaVA-1.5: padded to a square, then resized, then cropped."""

    square: tuple[int, ...] = ()  # red, green and blue of what first pads the image to a square; () = does not
    resize: tuple[int, ...] = (224,)  # to this shortest edge, or to (height, width); () = does not
    crop: tuple[int, ...] = (224, 224)  # height and width about the centre, black beyond the image; () = does not
    filter: Filter = "bicubic"  # that resizes
    kind: Literal["fixed_size"] = "fixed_size"


@dataclass(frozen=True)
class SmartResize:
    """One item near the image's own size and shape, of whole merge windows, as for Qwen-VL."""

    patch: int = 14  # pixels per side of the encoder's patches
    merge: int = 2  # patches per side of a merge window
    min_pixels: int = 56 * 56  # of the resized image
    max_pixels: int = 28 * 28 * 1280  # of the resized image
    filter: Filter = "bicubic"  # that resizes
    kind: Literal["smart_resize"] = "smart_resize"


@dataclass(frozen=True)
class DynamicTiles:
    """The grid of tiles nearest to the image's shape, then the whole image as one more tile, as for InternVL."""

    tile: tuple[int, ...] = (448, 448)  # height and width
    min_tiles: int = 1  # of an image, the thumbnail not counted
    max_tiles: int = 12  # of an image, the thumbnail not counted
    thumbnail: bool = True  # the whole image as the last tile, wherever there are several
    filter: Filter = "bicubic"  # that resizes
    kind: Literal["dynamic_tiles"] = "dynamic_tiles"


@dataclass(frozen=True)
class AnyRes:
    """The whole image as one tile, then the tiles of the best of some resolutions, as for LLaVA-NeXT and -OneVision.

    The LLM sees the tokens of the tiles tile by tile, or by the rows of the image that they make up, without what is
    only padding, and `connector.newline` behind each.
    """

    tile: int = 336  # pixels per side
    pinpoints: tuple[str, ...] = ("336x672", "672x336", "672x672", "1008x336", "336x1008")  # height x width
    several: Literal["tiles", "square"] = (
        "tiles"  # of a sample with several images: each as ever, or padded to a square
    )
    background: tuple[int, ...] = (122, 116, 104)  # red, green and blue of that padding
    filter: Filter = "bicubic"  # that resizes
    order: Literal["tiles", "rows"] = "tiles"  # of an image's tokens: tile by tile, or by the rows of the image
    most_tiles: int = 0  # rows with over 1.21 times as many tokens as these have are interpolated to as many; 0 = never
    kind: Literal["any_res"] = "any_res"


ImagePreparation = AsIs | FixedSize | SmartResize | DynamicTiles | AnyRes


# -------------------------------------------------------------------------------------------- how audio is prepared


@dataclass(frozen=True)
class LogMel:
    """Log-mel frames of a clip alone, of any length, laid out from its loudest bin."""

    mels: int = 80  # bins per frame
    sample_rate: int = 16_000  # Hz
    window: int = 400  # samples
    hop: int = 160  # samples
    kind: Literal["log_mel"] = "log_mel"


@dataclass(frozen=True)
class WhisperMel:
    """Log-mel frames as Whisper's extractor makes them of a window of `seconds`, silent after the clip's end."""

    mels: int = 80  # bins per frame
    sample_rate: int = 16_000  # Hz
    window: int = 400  # samples
    hop: int = 160  # samples
    seconds: int = 30  # length of the window
    longer: Literal["refuse", "split"] = "refuse"  # a clip beyond the window is bad, or several items in turn
    # What an encoder's layers see and make tokens of: the clip alone, as Qwen2-Audio, or the window with its silence,
    # as Whisper. Models from checkpoints have their family's.
    attended: Literal["clip", "window"] = "clip"
    kind: Literal["whisper_mel"] = "whisper_mel"


AudioPreparation = LogMel | WhisperMel


# ------------------------------------------------------------------------------------------------- what is bad media


@dataclass(frozen=True)
class MediaLimits:
    """What an image or a clip may measure; beyond, it counts as bad. Checked before anything is decoded."""

    pixels: int = 100_000_000  # of an image, also while it is prepared
    min_side: int = 1  # pixels
    max_side: int = 65_535  # pixels
    aspect: float = 200.0  # the longer side over the shorter one
    seconds: float = 3600.0  # of a clip
