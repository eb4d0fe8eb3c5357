"""Arrange tables of tokens for the LLM: in order, without those of padding, interpolated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmjax.data.media.image_transforms import Size
from mmjax.data.sample import CORNERS, NO_TOKEN, TokenLayout

# (image (height, width) in pixels, (rows, columns) of tokens of each of its items) -> TokenLayout
BeforeLlm = Callable[[Size, Sequence[Size]], TokenLayout]


def layout_in_order(token: np.ndarray) -> TokenLayout:
    """Arrange these tokens `[n]` one by one, without interpolation."""
    corners = np.full((token.size, CORNERS), NO_TOKEN, np.int32)
    corners[:, 0] = token.reshape(-1)
    return TokenLayout(corners, np.tile(np.float32([1, 0, 0, 0]), (token.size, 1)))


def concatenated(first: TokenLayout, second: TokenLayout) -> TokenLayout:
    """Arrange the tokens of one layout, then those of another."""
    return TokenLayout(
        np.concatenate([first.token, second.token]), np.concatenate([first.share, second.share])
    )


def unpad_tokens(table: np.ndarray, size: Size) -> np.ndarray:
    """Cut from a canvas of tokens `[R, C]` the part `[r, c]` that shows an image of (height, width)."""
    # An image of 300 x 1000 on a canvas of 24 x 24 tokens fills its width, and 24 * .3 = 7.2 rows:
    # 8 are cut off above and below, and 8 stay. Rounded to 7 digits as in transformers.
    rows, columns = table.shape
    height, width = size
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return table[cut : rows - cut]
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return table[:, cut : columns - cut]


def interpolate_tokens(table: np.ndarray, size: Size) -> TokenLayout:
    """Resize a table of tokens `[R, C]` bilinearly to (rows, columns): PyTorch's `align_corners=False`."""
    # Each new token is a mean of 4 old ones, the corners (upper, lower) x (left, right); [rows,
    # columns, 4] of token numbers and of shares, which add up to 1.
    (rows, row_shares), (columns, column_shares) = map(_linear, table.shape, size)
    token = np.stack([table[np.ix_(r, c)] for r in rows for c in columns], axis=-1)
    share = np.stack([np.outer(r, c) for r in row_shares for c in column_shares], axis=-1)
    return TokenLayout(
        token.reshape(-1, CORNERS).astype(np.int32), share.reshape(-1, CORNERS).astype(np.float32)
    )


def _linear(have: int, want: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for `want` points along a side of `have` tokens both neighbours `[2, want]`, and their shares."""
    # Pixel centres are at k + 0.5 (align_corners=False): for 4 -> 2 the points are 0.5 and 2.5.
    point = np.maximum((np.arange(want) + 0.5) * (have / want) - 0.5, 0)
    first = point.astype(np.int64)
    return np.stack([first, np.minimum(first + 1, have - 1)]), np.stack(
        [1 - (point - first), point - first]
    )
