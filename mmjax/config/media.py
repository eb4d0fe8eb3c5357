"""Config of media: how an encoder's images, videos and clips are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # Pillow's


@dataclass(frozen=True)
class AsIs:
    """The image's own pixels, not resized, padded with black to whole patches."""

    kind: Literal["as_is"] = "as_is"


@dataclass(frozen=True)
class FixedSize:
    """One item of a fixed size, as for CLIP, SigLIP and LLaVA-1.5: padded to a square, resized and cropped."""

    square: tuple[int, ...] = ()  # red, green and blue of the padding to a square; (): no padding
    resize: tuple[int, ...] = (224,)  # to this shortest edge, or to (height, width); (): no resizing
    crop: tuple[int, ...] = (224, 224)  # height and width of a centre crop, black beyond the image; (): no crop
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["fixed_size"] = "fixed_size"


@dataclass(frozen=True)
class SmartResize:
    """One item of about the image's own size and shape, in whole merge windows, as for Qwen-VL."""

    patch: int = 14  # pixels per side of the encoder's patches
    merge: int = 2  # patches per side of a merge window
    min_pixels: int = 56 * 56  # of the resized image
    max_pixels: int = 28 * 28 * 1280  # of the resized image
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["smart_resize"] = "smart_resize"
    # frames that an image counts as, against bounds of all their pixels, and its sides enlarged to a window first, as
    # for GLM-4.1V; 0: neither
    frames: int = 0


@dataclass(frozen=True)
class DynamicTiles:
    """The grid of tiles closest to the image's shape, then the whole image as a thumbnail tile, as for InternVL."""

    tile: tuple[int, ...] = (448, 448)  # height and width
    min_tiles: int = 1  # per image, not counting the thumbnail
    max_tiles: int = 12  # per image, not counting the thumbnail
    thumbnail: bool = True  # adds the whole image as the last tile of an image of several tiles
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["dynamic_tiles"] = "dynamic_tiles"


@dataclass(frozen=True)
class AnyRes:
    """The whole image as one tile, then tiles of the best-fitting resolution, as for LLaVA-NeXT and -OneVision.

    The LLM sees tokens tile by tile, or by rows of the image that the tiles make up: without those of padding only, and
    with `connector.newline` behind each row.
    """

    tile: int = 336  # pixels per side
    pinpoints: tuple[str, ...] = ("336x672", "672x336", "672x672", "1008x336", "336x1008")  # height x width
    # images of a sample with several: tiled like single ones, or padded to a square
    several: Literal["tiles", "square"] = "tiles"
    background: tuple[int, ...] = (122, 116, 104)  # red, green and blue of that padding
    filter: Filter = "bicubic"  # of resizing
    order: Literal["tiles", "rows"] = "tiles"  # of an image's tokens: tile by tile, or by rows of the image
    most_tiles: int = 0  # images with over 1.21 times the tokens of so many tiles are interpolated to those; 0: never
    kind: Literal["any_res"] = "any_res"


@dataclass(frozen=True)
class PixtralResize:
    """One item of about the image's own shape, shrunk into a box, in whole tokens, as for Pixtral and Mistral 3."""

    unit: int = 16  # pixels per side of an LLM token
    box: tuple[int, ...] = (1024, 1024)  # height and width; smaller images are not enlarged, but to whole tokens
    row_end: str = ""  # text behind every row of an image's tokens but the last
    end: str = ""  # text behind the last row
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["pixtral_resize"] = "pixtral_resize"


@dataclass(frozen=True)
class SplitTiles:
    """Square tiles of an enlarged image, row by row, then the whole image as one more, as for Idefics3 and SmolVLM."""

    tile: int = 364  # pixels per side
    resize: tuple[int, ...] = (1456,)  # to this longest edge, or to (height, width), before it is cut; (): as it is
    split: bool = True  # false: the whole image alone
    marker: str = ""  # text before each tile, and behind the last; with it rows end with a line break
    label: str = ""  # text behind the marker, with {row} and {column} of the tile from 1 on
    whole: str = ""  # the same of the whole image
    filter: Filter = "lanczos"  # of resizing
    kind: Literal["split_tiles"] = "split_tiles"


@dataclass(frozen=True)
class PanAndScan:
    """The whole image, then crops side by side where it is long or tall, as for Gemma 3, with text before each."""

    resize: tuple[int, ...] = (896, 896)  # of the image and of its crops: height and width
    min_crop: int = 256  # pixels of a crop's shorter side; with less, an image has no crops
    max_crops: int = 4  # per image
    min_ratio: float = 1.2  # longer side over shorter side, from which on an image has crops
    filter: Filter = "bilinear"  # of resizing
    kind: Literal["pan_and_scan"] = "pan_and_scan"


ImagePreparation = AsIs | FixedSize | SmartResize | DynamicTiles | AnyRes | PixtralResize | SplitTiles | PanAndScan


@dataclass(frozen=True)
class NoVideo:
    """The encoder takes no videos."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Qwen2Video:
    """Frames at a rate, with bounds on the pixels of each, as for Qwen2.5-VL; their time is a rotary position."""

    fps: float = 2.0  # frames taken per second of the video
    min_frames: int = 4  # taken of a video that has them
    max_frames: int = 768  # taken of any video
    min_pixels: int = 128 * 28 * 28  # of a resized frame
    max_pixels: int = 768 * 28 * 28  # of a resized frame
    total_pixels: int = 0  # of all temporal patches, which get equal shares, but no less than min_pixels; 0: no limit
    tokens_per_second: float = 4.0  # rotary positions along t for each second; 0: one for each temporal patch
    filter: Filter = "bicubic"  # of resizing
    seconds: Literal["sampled", "nominal"] = "sampled"  # of a temporal patch: of the frames taken, or by `fps` alone
    text_after: Literal["space", "time"] = "space"  # text goes on behind a video's rows and columns, or its time too
    sound: str = ""  # encoder of the videos' own sound, whose tokens are interleaved with the frames'; empty: not read
    sound_chunk: int = 50  # rotary positions along t of the chunks of frames and sound that take turns
    kind: Literal["qwen2_video"] = "qwen2_video"
    # frames and sound take turns in chunks (Qwen2.5-Omni), or each temporal patch comes before the sound from its time
    # on (Qwen3-Omni, which counts parts of positions: patches must take whole ones)
    turns: Literal["chunks", "patches"] = "chunks"


@dataclass(frozen=True)
class Qwen3Video:
    """Frames at a rate, with bounds on the pixels of all together, as for Qwen3-VL; their time is written as text."""

    fps: float = 2.0  # frames taken per second of the video
    min_frames: int = 4  # taken of a video that has them
    max_frames: int = 768  # taken of any video
    min_pixels: int = 128 * 32 * 32  # of all resized frames
    max_pixels: int = 768 * 32 * 32  # of all resized frames
    frame_pixels: int = 0  # of a resized frame; 0: no limit of its own
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["qwen3_video"] = "qwen3_video"


@dataclass(frozen=True)
class UniformVideo:
    """The same number of frames of every video, all of one size, as for InternVL and LLaVA-OneVision."""

    frames: int = 8  # taken of a video, one of each of so many equal parts
    size: tuple[int, ...] = (448, 448)  # height and width of a resized frame; (): the video's own
    # text before each temporal patch, with {} for its number from 1 on; the first's is without line breaks at its start
    label: str = ""
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["uniform_video"] = "uniform_video"
    taken: Literal["middle", "first"] = "middle"  # frame of a part
    shrink: int = 1  # by which each side of a frame's tokens is divided, rounded up: interpolated bilinearly


VideoPreparation = NoVideo | Qwen2Video | Qwen3Video | UniformVideo


@dataclass(frozen=True)
class LogMel:
    """Log-mel frames of a clip of any length, normalised by its loudest bin."""

    mels: int = 80  # bins per frame
    sample_rate: int = 16_000  # Hz
    window: int = 400  # samples
    hop: int = 160  # samples
    kind: Literal["log_mel"] = "log_mel"


@dataclass(frozen=True)
class WhisperMel:
    """Log-mel frames of Whisper's extractor, in windows of `seconds` padded with silence."""

    mels: int = 80  # bins per frame
    sample_rate: int = 16_000  # Hz
    window: int = 400  # samples
    hop: int = 160  # samples
    seconds: int = 30  # length of the window
    longer: Literal["refuse", "split"] = "refuse"  # a clip longer than the window is bad, or becomes several items
    # frames that the encoder's layers attend to and output tokens for: the clip's, as in Qwen2-Audio, or the window's
    # with its silence, as in Whisper; models from checkpoints have their family's
    attended: Literal["clip", "window"] = "clip"
    kind: Literal["whisper_mel"] = "whisper_mel"
    # behind a clip: silence up to the window's end; or its mirror image, and what is no whole hop makes no frame
    end: Literal["silence", "mirror"] = "silence"


AudioPreparation = LogMel | WhisperMel
