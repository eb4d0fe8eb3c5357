"""Arrange the tokens of an image's or a video's items for the LLM.

LLaVA-NeXT's rows of tiles (`pack_image_features`) and LLaVA-OneVision's shrunk frames (`apply_pooling`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mmjax.config import AnyRes, AudioConfig, UniformVideo, VisionConfig
from mmjax.data.media.image_transforms import Size, select_best_resolution
from mmjax.data.sample import CORNERS, NEWLINE, NO_TOKEN, TokenLayout
from mmjax.errors import BadMedia

MIN_SHRINK = 1.1  # of each side: images that would shrink by less are not interpolated


# (image (height, width) in pixels, (rows, columns) of tokens of each of its items) -> TokenLayout
BeforeLlm = Callable[[Size, Sequence[Size]], TokenLayout]


def interpolates_tokens(encoder: VisionConfig | AudioConfig) -> bool:
    """Return whether a position of the LLM may be made of several tokens of an encoder."""
    if encoder.callbacks.before_llm:
        return True
    if not isinstance(encoder, VisionConfig):
        return False
    images = encoder.images
    return (isinstance(images, AnyRes) and images.most_tiles > 0) or shrinks_frames(encoder)


def shrinks_frames(encoder: VisionConfig) -> bool:
    """Return whether the tokens of a video's frames are interpolated."""
    return isinstance(encoder.videos, UniformVideo) and encoder.videos.shrink > 1


def before_llm(encoder: VisionConfig) -> BeforeLlm | None:
    """Return the function that arranges an encoder's images; None: all tokens of an item follow each other."""
    images = encoder.images
    if isinstance(images, AnyRes) and images.order == "rows":
        return partial(any_res_rows, images, encoder.connector.newline)
    return None


def layout_in_order(token: np.ndarray) -> TokenLayout:
    """Arrange these tokens `[n]` one by one, without interpolation."""
    corners = np.full((token.size, CORNERS), NO_TOKEN, np.int32)
    corners[:, 0] = token.reshape(-1)
    return TokenLayout(corners, np.tile(np.float32([1, 0, 0, 0]), (token.size, 1)))


def any_res_rows(config: AnyRes, newline: bool, size: Size, grids: Sequence[Size]) -> TokenLayout:
    """Arrange the whole image's tokens, then the rows of the image that its tiles make up, a newline after each if any.

    size: (height, width) of the image in pixels. grids: rows and columns of the tokens of each item. Raises BadMedia
    for an image that would be interpolated to nothing.
    """
    base = grids[0][0] * grids[0][1]
    overview = layout_in_order(np.arange(base))
    newlines = layout_in_order(np.full(int(newline), NEWLINE))
    if len(grids) == 1:
        return _concatenated(overview, newlines)
    rows, columns = (side // config.tile for side in select_best_resolution(config, size))
    height, width = grids[1]
    # Tokens are numbered tile by tile; the table has them as they lie in the image: for 1 x 2 tiles of 2 x 2 tokens,
    # after base, 0 1 4 5 in its first row and 2 3 6 7 in its second.
    table = base + np.arange(rows * columns * height * width).reshape(rows, columns, height, width)
    table = unpad_tokens(table.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), size)
    shape = table.shape
    lines = layout_in_order(table)
    shrink = math.sqrt(table.size / (config.most_tiles * height * width)) if config.most_tiles else 1.0
    if shrink > MIN_SHRINK:
        shape = int(table.shape[0] // shrink), int(table.shape[1] // shrink)
        if not min(shape):
            raise BadMedia(f"of an image of {size[0]} x {size[1]} pixels nothing is left when it is interpolated")
        lines = interpolate_tokens(table, shape)
    if newline:
        line_ends = np.arange(1, shape[0] + 1) * shape[1]
        lines = TokenLayout(
            token=np.insert(lines.token, line_ends, newlines.token, axis=0),
            share=np.insert(lines.share, line_ends, newlines.share, axis=0),
        )
    return _concatenated(overview, lines)


def shrunk_frames(shrink: int, newline: bool, grids: Sequence[Size]) -> TokenLayout:
    """Arrange the tokens of a video's frames, interpolated to sides `shrink` times shorter, and at the end a newline.

    grids: rows and columns of the tokens of each frame.
    """
    layout = layout_in_order(np.zeros(0, np.int32))
    first = 0
    for rows, columns in grids:
        table = first + np.arange(rows * columns).reshape(rows, columns)
        layout = _concatenated(layout, interpolate_tokens(table, (-(-rows // shrink), -(-columns // shrink))))
        first += rows * columns
    return _concatenated(layout, layout_in_order(np.full(int(newline), NEWLINE)))


def _concatenated(first: TokenLayout, second: TokenLayout) -> TokenLayout:
    return TokenLayout(np.concatenate([first.token, second.token]), np.concatenate([first.share, second.share]))


def unpad_tokens(table: np.ndarray, size: Size) -> np.ndarray:
    """Cut from a canvas of tokens `[R, C]` the part `[r, c]` that shows an image of (height, width)."""
    rows, columns = table.shape
    height, width = size
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return table[cut : rows - cut]
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return table[:, cut : columns - cut]


def interpolate_tokens(table: np.ndarray, size: Size) -> TokenLayout:
    """Resize a table of tokens `[R, C]` bilinearly to (rows, columns): PyTorch's `align_corners=False`."""
    (rows, row_shares), (columns, column_shares) = map(_linear, table.shape, size)
    token = np.stack([table[np.ix_(r, c)] for r in rows for c in columns], axis=-1)
    share = np.stack([np.outer(r, c) for r in row_shares for c in column_shares], axis=-1)
    return TokenLayout(token.reshape(-1, CORNERS).astype(np.int32), share.reshape(-1, CORNERS).astype(np.float32))


def _linear(have: int, want: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for `want` points along a side of `have` tokens both neighbours `[2, want]`, and their shares."""
    # Pixel centres are at k + 0.5 (align_corners=False): for 4 -> 2 the points are 0.5 and 2.5.
    point = np.maximum((np.arange(want) + 0.5) * (have / want) - 0.5, 0)
    first = point.astype(np.int64)
    return np.stack([first, np.minimum(first + 1, have - 1)]), np.stack([1 - (point - first), point - first])
