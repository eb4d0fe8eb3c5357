"""From a decoded image or clip to what an encoder reads, and how long that will be before anything is decoded."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, LearnedGrid, LogMel, VisionConfig
from mmjax.data.clip_items import CONV_STRIDE, clip_frames, clip_size
from mmjax.errors import BadMedia


class ItemSize(NamedTuple):
    """How long one item is, known from its size alone."""

    positions: int  # in the encoder, padded to whole windows (vision) or to the total stride (audio); the class token
    tokens: int  # in the LLM
    valid: int  # positions that hold something of the item, or of the silence after it that convolutions reach


class Prepared(NamedTuple):
    """One item as an encoder reads it: `n` is `ItemSize.positions`."""

    values: np.ndarray  # [n, F]: pixels, uint8, or log-mel bins, float32
    coordinates: np.ndarray  # int32 [n, 3]: (t, y, x)
    valid: np.ndarray  # bool [n]


def positions_per_token(encoder: VisionConfig | AudioConfig) -> int:
    """Positions of an encoder's row that become one token of the LLM."""
    merge = encoder.connector.merge
    return merge * merge if isinstance(encoder, VisionConfig) else CONV_STRIDE * encoder.pool * merge


def hidden_tokens(encoder: VisionConfig | AudioConfig) -> int:
    """Tokens at the end of each item that an encoder makes for itself and the LLM does not see.

    The class token's; of clips, one for the silence after them, or for positions that are too few to be pooled.
    """
    if isinstance(encoder, VisionConfig):
        return int(encoder.class_token)
    how = encoder.clips
    return int(encoder.pool > 1 or (not isinstance(how, LogMel) and how.attended == "clip"))


def item_size(encoder: VisionConfig | AudioConfig, size: tuple[int, ...]) -> ItemSize:
    """Length of an item of `size` ((height, width) in pixels, (samples,) of a clip).

    ValueError if it is empty; BadMedia, which is one, if it reaches beyond what positions were learned of, and for a
    clip that is too short or too long.
    """
    if any(extent < 1 for extent in size):
        raise ValueError(f"an item of size {size} is empty")
    merge = encoder.connector.merge
    if isinstance(encoder, VisionConfig):
        height, width = patch_grid(encoder, size)
        _check_grid(encoder, size, height, width)
        _check_positions(encoder, size, max(-(-height // merge), -(-width // merge)))
        windows, own = -(-height // merge) * -(-width // merge), hidden_tokens(encoder)
        return ItemSize((windows + own) * merge * merge, windows, height * width + own)
    clip = clip_size(encoder, size[0])
    tokens = -(-(clip.positions // encoder.pool) // merge)
    if not tokens:
        raise BadMedia(f"a clip of {size[0]} samples is too short: the encoder makes no token of it")
    _check_positions(encoder, size, tokens)
    return ItemSize((tokens + hidden_tokens(encoder)) * positions_per_token(encoder), tokens, clip.held)


def token_grid(encoder: VisionConfig, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Times, rows and columns of the LLM's tokens of an image of (height, width) in pixels."""
    rows, columns = (-(-patches // encoder.connector.merge) for patches in patch_grid(encoder, size))
    return 1, rows, columns


def patch_grid(encoder: VisionConfig, size: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the patches of an image of (height, width) in pixels.

    Whole patches alone where positions are a learned grid, as the convolutions of CLIP, SigLIP and InternViT see them:
    what is left over at the bottom and the right is dropped. Elsewhere black fills the last patches up.
    """
    if isinstance(encoder.positions, LearnedGrid):
        return size[0] // encoder.patch, size[1] // encoder.patch
    return -(-size[0] // encoder.patch), -(-size[1] // encoder.patch)


def _check_grid(encoder: VisionConfig, size: tuple[int, ...], height: int, width: int) -> None:
    grid = encoder.positions
    if not min(height, width):
        raise ValueError(f"an image of {size[0]} x {size[1]} pixels has not one patch of {encoder.patch}")
    if isinstance(grid, LearnedGrid) and (height > grid.rows or width > grid.columns):
        raise BadMedia(
            f"an image of {size[0]} x {size[1]} pixels has {height} x {width} patches, the encoder learned positions "
            f"of {grid.rows} x {grid.columns}; prepare images smaller"
        )


def _check_positions(encoder: VisionConfig | AudioConfig, size: tuple[int, ...], longest: int) -> None:
    # Beyond the table JAX would silently take its last entry.
    grid = encoder.connector.position_grid
    if grid and longest > grid:
        raise BadMedia(
            f"an item of size {size} has {longest} tokens along one side, connector.position_grid is {grid}; raise it"
        )


def prepare(encoder: VisionConfig | AudioConfig, array: np.ndarray) -> Prepared:
    """Patches of an image (uint8 `[H, W, C]`) or log-mel frames of a clip (float `[n]`), as long as `item_size` says.

    ValueError for an empty item, or one of another shape, type or number of channels than the encoder takes.
    """
    if isinstance(encoder, VisionConfig):
        if array.ndim != 3 or array.shape[2] != encoder.channels:
            raise ValueError(f"an image of shape {array.shape} is not [height, width, {encoder.channels}]")
        rows, columns = patch_grid(encoder, array.shape[:2])
        array = array[: rows * encoder.patch, : columns * encoder.patch]
        found = patches(array, encoder.patch, encoder.connector.merge)
        return _with_class_token(found, encoder.connector.merge) if encoder.class_token else found
    frames = clip_frames(encoder, array)
    positions = item_size(encoder, array.shape).positions
    values = np.zeros((positions, encoder.mels), np.float32)
    values[: len(frames)] = frames
    coordinates = np.zeros((positions, 3), np.int32)
    coordinates[:, 0] = np.arange(positions)
    coordinates[clip_size(encoder, len(array)).frames :, 1] = -1
    return Prepared(values, coordinates, coordinates[:, 0] < len(frames))


def patches(image: np.ndarray, patch: int, merge: int) -> Prepared:
    """Patches of a uint8 `[H, W, C]` image in merge order: values uint8 `[n, patch * patch * C]`.

    Black (0) fills the image up to whole patches, and the grid up to whole merge x merge windows; a patch that holds no
    pixel of the image is not valid. Windows follow each other row by row, and so do the patches inside a window.
    """
    values = patchify(image, patch, merge)
    height, width, _ = image.shape
    coordinates, valid = _merge_order(-(-height // patch), -(-width // patch), merge)
    return Prepared(values, coordinates, valid)


def patchify(image: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Patches uint8 `[n, patch * patch * C]` of a uint8 `[H, W, C]` image, ordered and filled with black as `patches`.

    Within a patch: row, column, channel.
    """
    if image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError(f"an image must be uint8 [height, width, channels], not {image.dtype} {list(image.shape)}")
    if image.size == 0:
        raise ValueError(f"an image of shape {image.shape} is empty")
    height, width, channels = image.shape
    rows, columns = -(-height // (patch * merge)), -(-width // (patch * merge))
    if (height, width) != (rows * patch * merge, columns * patch * merge):
        canvas = np.zeros((rows * patch * merge, columns * patch * merge, channels), np.uint8)
        canvas[:height, :width] = image
        image = canvas
    windows = image.reshape(rows, merge, patch, columns, merge, patch, channels).transpose(0, 3, 1, 4, 2, 5, 6)
    return windows.reshape(-1, patch * patch * channels)


def _with_class_token(found: Prepared, merge: int) -> Prepared:
    """One more window at the end: the class token, whose row and column are -1, and padding."""
    window = merge * merge
    values = np.concatenate([found.values, np.zeros((window, found.values.shape[1]), np.uint8)])
    coordinates = np.concatenate([found.coordinates, np.tile(np.int32([[0, -1, -1]]), (window, 1))])
    return Prepared(values, coordinates, np.concatenate([found.valid, np.arange(window) == 0]))


@functools.lru_cache(maxsize=1024)
def _merge_order(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates int32 `[n, 3]` and validity `[n]` of a grid of patches in merge order; read-only, they are shared."""
    rows, columns = -(-height // merge) * merge, -(-width // merge) * merge
    grid = np.zeros((rows, columns, 3), np.int32)
    grid[..., 1] = np.arange(rows)[:, None]
    grid[..., 2] = np.arange(columns)
    windows = grid.reshape(rows // merge, merge, columns // merge, merge, 3).transpose(0, 2, 1, 3, 4)
    coordinates = np.ascontiguousarray(windows.reshape(-1, 3))
    valid = (coordinates[:, 1] < height) & (coordinates[:, 2] < width)
    coordinates.flags.writeable = valid.flags.writeable = False
    return coordinates, valid
