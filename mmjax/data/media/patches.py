"""Cut images and latents into patches, compute log-mel frames of clips; positions and tokens of all by size alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mmjax.batch import COLUMN, ROW, TIME
from mmjax.config import (
    AudioConfig,
    AxisTables,
    Encoder,
    Generator,
    LearnedGrid,
    StoredTable,
    VisionConfig,
)
from mmjax.config.generators import GeneratorFacts
from mmjax.data.media.preparations import preparation
from mmjax.errors import BadMedia

Encoders = Mapping[str, Encoder]  # by name, in the model's order
# by name, in the model's order: encoders, then generators
ItemModules = Mapping[str, Encoder | Generator]


class ItemSize(NamedTuple):
    """Sequence lengths of one item, computed from its size alone."""

    # in the encoder, padded to whole merge windows (vision) or to the total stride (audio)
    positions: int
    tokens: int  # in the LLM
    # positions that hold data: patches, class token and registers, or frames that the convolutions
    # read
    valid: int


class ItemInput(NamedTuple):
    """One item as an encoder's input, or as what a generator learns to make; `n` is `ItemSize.positions`."""

    values: np.ndarray  # [n, F]: pixels, uint8; or log-mel bins or latents, float32
    coordinates: np.ndarray  # int32 [n, 3]: (t, y, x)
    valid: np.ndarray  # bool [n]


@functools.singledispatch
def item_size(module: Encoder | Generator, size: tuple[int, ...]) -> ItemSize:
    """Compute the lengths of an item of `size`.

    That is (height, width) in pixels, (frames, height, width) of a video's temporal patch, or
    (samples,) of a clip.

    Raises ValueError for an empty item, and BadMedia (a ValueError) beyond the learned positions,
    for a clip that is too short or too long, and for an image that a generator cannot make.
    """
    raise TypeError(f"{type(module).__name__} takes no items")


@functools.singledispatch
def item_input(module: Encoder | Generator, array: np.ndarray) -> ItemInput:
    """Convert an item to its part of a batch's row, as many positions as `item_size` says.

    array: an image, uint8 `[H, W, C]`, or a temporal patch of a video, uint8 `[frames, H, W, C]`,
    becomes patches; a clip, float `[n]`, log-mel frames; an image to be made, uint8 `[H, W, C]`, or
    its latents, float32 `[h, w, C]`, patches row by row.

    Raises ValueError for an empty item, or a shape, type or number of channels that the module does
    not take.
    """
    raise TypeError(f"{type(module).__name__} takes no items")


class ItemPlaces(NamedTuple):
    """Hold where the positions of one item are, as in `ItemInput`."""

    coordinates: np.ndarray
    valid: np.ndarray


@functools.singledispatch
def item_places(encoder: Encoder, size: tuple[int, ...]) -> ItemPlaces:
    """Compute where the positions of an item of `size` are, as `item_input` does from its content."""
    raise TypeError(f"{type(encoder).__name__} encodes no items")


def _check_extent(size: tuple[int, ...]) -> None:
    if any(extent < 1 for extent in size):
        raise ValueError(f"an item of size {size} is empty")


# --------------------------------------------------------------------------------------------------
# images to be made


@item_size.register
def _(generator: GeneratorFacts, size: tuple[int, ...]) -> ItemSize:
    _check_extent(size)
    patches = math.prod(latent_grid(generator, size))
    return ItemSize(patches, generator.queries, patches)


def latent_grid(generator: Generator, size: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of the patches that a generator makes for an image of (height, width) in pixels."""
    unit = generator.patch * generator.latents.factor
    height, width = size
    pixels = f"an image to be made of {height} x {width} pixels"
    if height % unit or width % unit:
        raise BadMedia(
            f"{pixels} is not in whole patches of {unit} x {unit}; prepare images in whole patches"
        )
    rows = height // unit
    columns = width // unit
    latents = height // generator.latents.factor, width // generator.latents.factor
    # One program encodes all images in the step, and a UNet's blocks have the shapes of one size.
    is_fixed = generator.step_vae or not generator.is_stack
    fixed = generator.image_size if is_fixed else latents
    if latents != fixed:
        actual, required = (" x ".join(map(str, size)) for size in (latents, fixed))
        raise BadMedia(
            f"{pixels} is {actual} latents, the generator's size {required}; prepare images for it"
        )
    if rows * columns < generator.min_patches:
        raise BadMedia(
            f"{pixels} is {rows * columns} patches, fewer than the generator's min_patches"
        )
    return rows, columns


@item_input.register
def _(generator: GeneratorFacts, array: np.ndarray) -> ItemInput:
    vae = generator.step_vae
    channels = vae.image_channels if vae else generator.latents.channels
    dtype = np.uint8 if generator.takes_pixels else np.float32
    if array.ndim != 3 or array.shape[2] != channels or array.dtype != dtype:
        layout = f"{np.dtype(dtype)} [height, width, {channels}]"
        raise ValueError(f"an image to be made is {array.dtype} {list(array.shape)}, not {layout}")
    factor = 1 if vae else generator.latents.factor
    rows, columns = latent_grid(generator, tuple(side * factor for side in array.shape[:2]))
    # In a patch: row, column, channel.
    patches = array.reshape(rows, array.shape[0] // rows, columns, -1, channels).swapaxes(1, 2)
    coordinates, valid = merge_order(rows, columns, 1)
    return ItemInput(patches.reshape(rows * columns, -1), coordinates, valid)


# --------------------------------------------------------------------------------------------------
# images that are seen


@item_size.register
def _(encoder: VisionConfig, size: tuple[int, ...]) -> ItemSize:
    _check_extent(size)
    if len(size) == 3 and not (encoder.takes_videos and size[0] == encoder.frames):
        takes = (
            f"{encoder.frames} frame(s) of one at a time" if encoder.takes_videos else "no videos"
        )
        raise ValueError(f"an item of size {size} is of a video, and the encoder takes {takes}")
    size = size[-2:]
    merge = encoder.token_side
    height, width = patch_grid(encoder, size)
    _check_grid(encoder, size, height, width)
    _check_squares(encoder, size, height, width)
    _check_positions(encoder, size, max(-(-height // merge), -(-width // merge)))
    tokens = -(-height // merge) * -(-width // merge)
    return ItemSize(
        (tokens + encoder.hidden_tokens) * merge * merge,
        tokens,
        height * width + encoder.own_tokens,
    )


def token_grid(encoder: VisionConfig, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Return times, rows and columns of the LLM's tokens of an image, or temporal patch, of (..., height, width)."""
    rows, columns = (
        -(-patches // encoder.token_side) for patches in patch_grid(encoder, size[-2:])
    )
    return 1, rows, columns


def patch_grid(encoder: VisionConfig, size: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of the patches of an image of (height, width) in pixels.

    With a learned grid of positions only whole patches count, as in the convolutions of CLIP,
    SigLIP and InternViT, and of Pixtral: the remainder at the bottom and the right is dropped.
    Otherwise the last patches are padded with black.
    """
    # Convolutions with stride = patch drop a remainder.
    if encoder.positions.counts != "all":
        return size[0] // encoder.patch, size[1] // encoder.patch
    return -(-size[0] // encoder.patch), -(-size[1] // encoder.patch)


def _check_grid(encoder: VisionConfig, size: tuple[int, ...], height: int, width: int) -> None:
    grid = encoder.positions
    if not min(height, width):
        raise BadMedia(
            f"an image of {size[0]} x {size[1]} pixels has not one patch of {encoder.patch}"
        )
    match grid:
        case LearnedGrid(rows=rows, columns=columns, interpolation="none"):
            pass
        case AxisTables(side=rows):
            columns = rows
        case _:
            return
    if height > rows or width > columns:
        raise BadMedia(
            f"an image of {size[0]} x {size[1]} pixels has {height} x {width} patches, the encoder learned positions "
            f"of {rows} x {columns}; prepare images smaller"
        )


def _check_squares(encoder: VisionConfig, size: tuple[int, ...], height: int, width: int) -> None:
    merge = encoder.token_side
    pixels = f"an image of {size[0]} x {size[1]} pixels has {height} x {width} patches"
    longest = encoder.relative_side
    if longest and max(height, width) > longest:
        raise BadMedia(f"{pixels}, the encoder takes {longest} a side; prepare images smaller")
    if encoder.query_layers:
        sides = [merge * side for side in encoder.query_layers.sides]
        if height != width or height not in sides:
            known = ", ".join(f"{side} x {side}" for side in sides)
            raise BadMedia(
                f"{pixels}, the encoder has queries for {known}; prepare images in these sizes"
            )
    # Mistral 3 drops what is no whole window behind its tower, which has seen it, and Idefics3
    # refuses it.
    if encoder.positions.counts == "squares" and (height % merge or width % merge):
        raise BadMedia(
            f"{pixels}, which are no whole squares of {merge} x {merge}; prepare images in whole squares"
        )


def _check_positions(
    encoder: VisionConfig | AudioConfig, size: tuple[int, ...], longest: int
) -> None:
    # beyond this table JAX would silently clamp to its last entry
    grid = encoder.connector.position_grid
    if grid and longest > grid:
        raise BadMedia(
            f"an item of size {size} has {longest} tokens along one side, connector.position_grid is {grid}; raise it"
        )


@item_input.register
def _(encoder: VisionConfig, array: np.ndarray) -> ItemInput:
    frames = array[None] if array.ndim == 3 else array
    if frames.ndim != 4 or frames.shape[3] != encoder.channels:
        raise ValueError(
            f"an image of shape {array.shape} is not [height, width, {encoder.channels}]"
        )
    rows, columns = patch_grid(encoder, frames.shape[1:3])
    frames = frames[:, : rows * encoder.patch, : columns * encoder.patch]
    # In a patch: frame, row, column, channel.
    merges = encoder.connector.merge, encoder.inner_merge
    parts = [patchify(frame, encoder.patch, *merges) for frame in frames]
    # A still image is repeated where the batch has room for the frames of videos.
    repeats = encoder.patch_values // (len(frames) * encoder.patch**2 * encoder.channels)
    if repeats * len(frames) * encoder.patch**2 * encoder.channels != encoder.patch_values:
        raise ValueError(
            f"it has {len(frames)} frames; the encoder takes {encoder.frames} of a video at a time"
        )
    values = np.concatenate(parts * repeats, axis=1)
    coordinates, valid = item_places(encoder, frames.shape[1:3])
    own = np.zeros((len(valid) - len(values), values.shape[1]), np.uint8)
    return ItemInput(np.concatenate([values, own]) if len(own) else values, coordinates, valid)


@item_places.register
def _(encoder: VisionConfig, size: tuple[int, ...]) -> ItemPlaces:
    rows, columns = patch_grid(encoder, size[-2:])
    coordinates, valid = merge_order(rows, columns, encoder.connector.merge, encoder.inner_merge)
    if not encoder.class_token:
        return ItemPlaces(coordinates, valid)
    # Windows with the class token, the registers and padding: in row -1, and in columns -1, -2, ..
    number = np.arange(encoder.hidden_tokens * encoder.connector.merge**2, dtype=np.int32)
    places = np.stack([np.zeros_like(number), np.full_like(number, -1), -1 - number], axis=1)
    return ItemPlaces(
        np.concatenate([coordinates, places]),
        np.concatenate([valid, number < encoder.own_tokens]),
    )


def to_patches(image: np.ndarray, patch: int, merge: int, inner: int = 1) -> ItemInput:
    """Cut a uint8 `[H, W, C]` image into patches in merge order: values uint8 `[n, patch * patch * C]`.

    The image is padded with black (0) to whole patches, and the grid to whole merge x merge
    windows; a patch without a pixel of the image is not valid. Windows follow each other row by
    row, and so do the patches inside a window: with merge 2 a grid of 2 x 4 patches has the order 0
    1 4 5, 2 3 6 7. With inner > 1 a window has merge x merge windows of inner x inner patches.
    """
    height, width, _ = image.shape
    coordinates, valid = merge_order(-(-height // patch), -(-width // patch), merge, inner)
    return ItemInput(patchify(image, patch, merge, inner), coordinates, valid)


def patchify(image: np.ndarray, patch: int, merge: int, inner: int = 1) -> np.ndarray:
    """Cut a uint8 `[H, W, C]` image into patches `[n, patch * patch * C]`, ordered and padded as in `to_patches`.

    Within a patch: row, column, channel.
    """
    if image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError(
            f"an image must be uint8 [height, width, channels], not {image.dtype} {list(image.shape)}"
        )
    if image.size == 0:
        raise ValueError(f"an image of shape {image.shape} is empty")
    height, width, channels = image.shape
    window = patch * merge * inner
    # -height % window is what is missing to a multiple: -10 % 28 = 18.
    if height % window or width % window:
        image = np.pad(image, ((0, -height % window), (0, -width % window), (0, 0)))
    rows, columns = (side // window for side in image.shape[:2])
    sides = merge, inner, patch
    windows = image.reshape(rows, *sides, columns, *sides, channels).transpose(
        0, 4, 1, 5, 2, 6, 3, 7, 8
    )
    return windows.reshape(-1, patch * patch * channels)


@functools.lru_cache(maxsize=1024)
def merge_order(
    height: int, width: int, merge: int, inner: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates int32 `[n, 3]` and validity `[n]` of a patch grid in merge order; read-only, since cached."""
    window = merge * inner
    rows, columns = (-(-side // window) for side in (height, width))  # of windows
    grid = np.zeros((rows * window, columns * window, 3), np.int32)
    grid[..., ROW] = np.arange(rows * window)[:, None]
    grid[..., COLUMN] = np.arange(columns * window)
    windows = grid.reshape(rows, merge, inner, columns, merge, inner, 3)
    windows = windows.transpose(0, 3, 1, 4, 2, 5, 6)
    coordinates = np.ascontiguousarray(windows.reshape(-1, 3))
    valid = (coordinates[:, ROW] < height) & (coordinates[:, COLUMN] < width)
    # lru_cache returns the same arrays to all callers.
    coordinates.flags.writeable = valid.flags.writeable = False
    return coordinates, valid


# --------------------------------------------------------------------------------------------------
# clips


@item_size.register
def _(encoder: AudioConfig, size: tuple[int, ...]) -> ItemSize:
    _check_extent(size)
    clip = clip_size(encoder, size[0])
    # Pooling drops a remainder, as average pooling does; merging pads one.
    tokens = -(-(clip.positions // encoder.pool) // encoder.connector.merge)
    if not tokens:
        raise BadMedia(
            f"a clip of {size[0]} samples is too short: the encoder makes no token of it"
        )
    _check_positions(encoder, size, tokens)
    positions = (tokens + encoder.hidden_tokens) * encoder.positions_per_token
    return ItemSize(positions, tokens, clip.input_frames)


@item_input.register
def _(encoder: AudioConfig, array: np.ndarray) -> ItemInput:
    frames = log_mel_frames(encoder, array)
    places = item_places(encoder, array.shape)
    columns = frame_columns(encoder, clip_size(encoder, len(array)).input_frames)
    values = np.zeros((len(places.valid), encoder.mels), np.float32)
    values[columns[: len(frames)]] = frames
    return ItemInput(values, *places)


@item_places.register
def _(encoder: AudioConfig, size: tuple[int, ...]) -> ItemPlaces:
    positions = item_size(encoder, size).positions
    clip = clip_size(encoder, size[0])
    columns = frame_columns(encoder, clip.input_frames)
    valid = np.zeros(positions, bool)
    valid[columns] = True
    coordinates = np.zeros((positions, 3), np.int32)
    coordinates[:, TIME] = np.arange(positions)
    # Row -1 marks frames that the convolutions read but that make no position of the layers.
    coordinates[:, ROW] = -1
    coordinates[columns[: clip.frames], ROW] = 0
    return ItemPlaces(coordinates, valid)


def shown_tokens(encoder: AudioConfig, pieces: Sequence[int]) -> np.ndarray | None:
    """Number the tokens of a clip's pieces, of so many samples each, that the LLM sees, int `[n]`; None: all.

    Of windows of 4 tokens, of which a clip fills one and a half, these are 0 1 2 3 4 5. Raises
    BadMedia for a clip that is too short for any.
    """
    if encoder.clips.shown == "all":
        return None
    alone = replace(encoder, clips=replace(encoder.clips, attended="clip"))
    counts = [clip_size(alone, samples).positions // encoder.token_positions for samples in pieces]
    firsts = np.cumsum([0, *(item_size(encoder, (samples,)).tokens for samples in pieces)])
    if not sum(counts):
        raise BadMedia(
            f"a clip of {sum(pieces)} samples is too short: the encoder makes no token of it"
        )
    return np.concatenate([first + np.arange(n) for first, n in zip(firsts, counts, strict=False)])


class ClipSize(NamedTuple):
    """Frame counts of one clip, computed from its number of samples."""

    frames: int  # that become positions of the layers
    # frames and, behind them, those of the padding silence that only the convolutions read
    input_frames: int
    positions: int  # in the encoder's layers


def clip_size(encoder: AudioConfig, samples: int) -> ClipSize:
    """Compute the frame counts of a clip of so many samples.

    Raises BadMedia for a clip that is longer than the window of `clips` or the encoder's table of
    positions.
    """
    clips = encoder.clips
    table = encoder.positions
    # Positions of chunks begin anew.
    stored = isinstance(table, StoredTable) and not encoder.chunk
    longest = table.positions * encoder.stride if stored else math.inf
    frames, input_frames = preparation(clips).count_frames(clips, encoder, samples, longest)
    if frames > longest:
        raise BadMedia(
            f"a clip of {frames} frames is longer than the {longest} of which the encoder has positions"
        )
    return ClipSize(frames, input_frames, encoder.count_positions(frames))


def frame_columns(encoder: AudioConfig, frames: int) -> np.ndarray:
    """Return where the frames of a clip stand in its part of a row, int `[frames]`: chunks begin with a position."""
    if not encoder.chunk:
        return np.arange(frames)
    chunk, index = np.divmod(np.arange(frames), encoder.chunk)
    return chunk * encoder.chunk_positions * encoder.stride + index


def log_mel_frames(encoder: AudioConfig, wave: np.ndarray) -> np.ndarray:
    """Compute frames float32 `[n, mels]` of a clip float `[samples]`: the first of `clip_size`'s input frames.

    The others are zeros.
    """
    size = clip_size(encoder, len(wave))
    # Convolutions within chunks read no silence behind what the layers attend.
    count = size.frames if encoder.chunk else size.input_frames
    return preparation(encoder.clips).compute_frames(encoder.clips, wave, count)


def split_clip(encoder: AudioConfig, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip of so many samples into items, (start, stop). Raises BadMedia for one that is too long, or empty."""
    return preparation(encoder.clips).split(encoder.clips, samples)
