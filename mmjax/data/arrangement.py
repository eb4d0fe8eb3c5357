"""Which tokens of an image's items the LLM sees, in what order: LLaVA-NeXT's rows of tiles (`pack_image_features`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mmjax.config import AnyRes, AudioConfig, VisionConfig
from mmjax.data.image_items import Size, best_pinpoint
from mmjax.errors import BadMedia

NOTHING, NEWLINE = -1, -2  # in `Arrangement.token`: no token, and the connector's newline
CORNERS = 4  # tokens that one position may be made of, as between the corners of a square
LEAST_SHRINK = 1.1  # of each side: images that would shrink by less stay as they are


class Arrangement(NamedTuple):
    """The tokens of one image, each the sum of up to four of those that the encoder made of its items, by shares."""

    token: np.ndarray  # int32 [n, 4]: their numbers, all items one after the other; NEWLINE, NOTHING
    share: np.ndarray  # float32 [n, 4]

    def __len__(self) -> int:
        return len(self.token)


def interpolates(encoder: VisionConfig | AudioConfig) -> bool:
    """Whether a position of the LLM may be made of several tokens of an encoder."""
    how = encoder.images if isinstance(encoder, VisionConfig) else None
    return bool(encoder.callbacks.before_llm) or (isinstance(how, AnyRes) and how.most_tiles > 0)


def before_llm(encoder: VisionConfig) -> BeforeLlm | None:
    """The function by which an encoder's own images are arranged; None: all tokens of an item follow each other."""
    how = encoder.images
    if isinstance(how, AnyRes) and how.order == "rows":
        return partial(any_res_rows, how, encoder.connector.newline)
    return None


# Of an image's (height, width) in pixels, and of the rows and columns of the tokens of each of its items.
BeforeLlm = Callable[[Size, Sequence[Size]], Arrangement]


def in_order(token: np.ndarray) -> Arrangement:
    """These tokens `[n]`, each as it is."""
    four = np.full((token.size, CORNERS), NOTHING, np.int32)
    four[:, 0] = token.reshape(-1)
    return Arrangement(four, np.tile(np.float32([1, 0, 0, 0]), (token.size, 1)))


def any_res_rows(how: AnyRes, newline: bool, size: Size, grids: Sequence[Size]) -> Arrangement:
    """The whole image's tokens, then the rows of the image that the tiles make up, each with a newline if there is one.

    size: (height, width) of the image in pixels. grids: rows and columns of the tokens of each item. BadMedia for an
    image that would be interpolated to nothing.
    """
    base = grids[0][0] * grids[0][1]
    whole, ends = in_order(np.arange(base)), in_order(np.full(int(newline), NEWLINE))
    if len(grids) == 1:
        return _one_after_another(whole, ends)
    rows, columns = (side // how.tile for side in best_pinpoint(how, size))
    height, width = grids[1]
    table = base + np.arange(rows * columns * height * width).reshape(rows, columns, height, width)
    table = unpadded(table.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), size)
    lines, shape = in_order(table), table.shape
    shrink = math.sqrt(table.size / (how.most_tiles * height * width)) if how.most_tiles else 1.0
    if shrink > LEAST_SHRINK:
        shape = int(table.shape[0] // shrink), int(table.shape[1] // shrink)
        if not min(shape):
            raise BadMedia(f"of an image of {size[0]} x {size[1]} pixels nothing is left when it is interpolated")
        lines = interpolated(table, shape)
    return _one_after_another(whole, _ended(lines, shape, ends))


def _one_after_another(first: Arrangement, second: Arrangement) -> Arrangement:
    return Arrangement(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def _ended(lines: Arrangement, shape: Size, ends: Arrangement) -> Arrangement:
    """Rows of tokens, `shape` of them, with the same tokens behind each."""

    def ended(line: np.ndarray, end: np.ndarray) -> np.ndarray:
        behind = np.broadcast_to(end, (shape[0], *end.shape))
        return np.concatenate([line.reshape(*shape, CORNERS), behind], axis=1).reshape(-1, CORNERS)

    return Arrangement(*(ended(*pair) for pair in zip(lines, ends, strict=True)))


def unpadded(table: np.ndarray, size: Size) -> np.ndarray:
    """The part `[r, c]` of a canvas of tokens `[R, C]` that shows an image of (height, width) and not its padding."""
    rows, columns = table.shape
    height, width = size
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return table[cut : rows - cut]
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return table[:, cut : columns - cut]


def interpolated(table: np.ndarray, size: Size) -> Arrangement:
    """A table of tokens `[R, C]` bilinearly resized to (rows, columns), row by row: PyTorch's `align_corners=False`."""
    (top, bottom, down), (left, right, across) = (_between(*pair) for pair in zip(table.shape, size, strict=True))
    token = np.stack([table[np.ix_(r, c)] for r in (top, bottom) for c in (left, right)], axis=-1)
    share = np.stack([np.outer(a, b) for a in (1 - down, down) for b in (1 - across, across)], axis=-1)
    return Arrangement(token.reshape(-1, CORNERS).astype(np.int32), share.reshape(-1, CORNERS).astype(np.float32))


def _between(have: int, want: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every place along a side: the two places of the source that it lies between, and how near the second is."""
    at = np.maximum((np.arange(want) + 0.5) * (have / want) - 0.5, 0)
    first = at.astype(np.int64)
    return first, np.minimum(first + 1, have - 1), at - first
