"""Lay an image's slices out on one canvas of positions, the whole image stretched over them, as MiniCPM-V 4.7 does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmjax.data.sample import ArrangedItems, Item, Sample, Text

FIRST_ITEM = -(2**32)  # in the place of a token's id, of item 0; one less: of item 1
Grid = tuple[int, int, int]  # times, rows and columns of an item's tokens


class Crop(NamedTuple):
    """A whole image or a slice, by its tokens' indices."""

    begin: int
    end: int
    size: np.ndarray  # rows and columns of tokens

    def inside(self, canvas: np.ndarray) -> np.ndarray:
        """Return positions of its tokens, spread over so many rows and columns, int `[n, 3]`."""
        grid = np.meshgrid(0, *map(_spread, self.size, canvas), indexing="ij")
        return np.stack(grid, axis=-1).reshape(-1, 3)


def sample_canvas(
    sample: Sample, lengths: Sequence[int], grids: Sequence[Grid | None], markers: Sequence[int]
) -> np.ndarray:
    """Return the positions (t, y, x) of a sample's tokens, int `[n, 3]`: each branch goes on as if it were alone.

    lengths: of its segments. grids: of its items; None: it is a clip, whose tokens count as text.
    ValueError where positions are given, or images are shown otherwise than whole.
    """
    ids = np.concatenate([_ids(*pair) for pair in zip(sample.segments, lengths, strict=True)])
    branch = np.repeat([getattr(part, "branch", 0) for part in sample.segments], lengths)
    positions = np.zeros((len(ids), 3), int)
    # branch 0 last, so that its own are what others have put before theirs
    for number in sorted(set(branch.tolist()), reverse=True):
        stream = (branch == 0) | (branch == number)
        positions[stream] = canvas_positions(ids[stream], grids, markers)
    return positions


def _ids(segment: Text | Item | ArrangedItems, length: int) -> np.ndarray:
    if (
        segment.start is not None
        or isinstance(segment, ArrangedItems)
        or getattr(segment, "part", ())
    ):
        raise ValueError(
            "model.llm.canvas_markers gives positions to text and to whole images alone; leave out the positions of "
            "its segments, and show images with images=slices"
        )
    if isinstance(segment, Text):
        return segment.tokens
    return np.full(length, FIRST_ITEM - segment.number)


def canvas_positions(
    ids: np.ndarray, grids: Sequence[Grid | None], markers: Sequence[int]
) -> np.ndarray:
    """Return the positions (t, y, x) of tokens, int `[n, 3]`.

    ids: int `[n]`, `FIRST_ITEM` - k at tokens of item k, whose grid is the k-th. markers: as in
    `DecoderConfig.canvas_markers`. An image with 2 x 2 slices of 2 x 2 tokens behind three tokens
    of text, `<image>` the last (rows and columns):

        <image> 1,1   whole 2,2 2,5 5,2 5,5   </image> 6,6
        <slice> 2,2   2,2 2,3 3,2 3,3   </slice> 3,3   <slice> 2,4   2,4 2,5 3,4 3,5   </slice> 3,5
        line break 3,6   <slice> 4,2 ...   text goes on at 7
    """
    images: list[list[Crop]] = []
    for begin in np.flatnonzero(np.diff(ids, prepend=0) * (ids <= FIRST_ITEM)).tolist():
        if (grid := grids[FIRST_ITEM - ids[begin]]) is not None:
            size = np.array(grid[1:])
            crop = Crop(begin, begin + size.prod(), size)
            if images and ids[begin - 1] == markers[0]:
                images[-1].append(crop)
            else:
                images.append([crop])
    positions = np.arange(len(ids))[:, None].repeat(3, axis=1)
    done = origin = 0
    for whole, *slices in images:
        # The token before an image is its `<image>`, unless it is another image's. Of an image that
        # begins the sample it is the last there, as in transformers, which is written again below.
        before = ids[whole.begin - 1 : whole.begin]
        start = whole.begin - (not (before <= FIRST_ITEM).any())
        text = np.arange(max(start - done, 0))
        positions[done : done + len(text)] = origin + text[:, None]
        origin += len(text)
        table = slices or [whole]
        done = table[-1].end
        while done < len(ids) and ids[done] in markers:
            done += 1
        columns = _columns(table)
        size = table[0].size
        canvas = size * (len(table) // columns, columns)
        positions[start:done] = origin
        positions[start, 1:] = max(origin - 1, 0)
        positions[whole.begin : whole.end] = origin + whole.inside(canvas)
        positions[whole.end : done][:1, 1:] = origin + canvas
        for number, crop in enumerate(slices):
            corner = origin + size * divmod(number, columns)
            positions[crop.begin - 1, 1:] = corner
            positions[crop.begin : crop.end] = crop.inside(crop.size) + np.array([origin, *corner])
            positions[crop.end : done][:1, 1:] = corner + crop.size - 1
        for number, (crop, following) in enumerate(pairwise(slices)):
            edge = (number // columns + 1) * size[0] - 1, canvas[1]
            positions[crop.end + 1 : following.begin - 1, 1:] = origin + np.array(edge)
        origin += canvas.max() + 1
    positions[done:] = origin + np.arange(len(ids) - done)[:, None]
    return positions


def _columns(slices: Sequence[Crop]) -> int:
    """Count the slices of a row, behind which stands a line break."""
    gaps = (following.begin - crop.end for crop, following in pairwise(slices))
    columns = next((n for n, gap in enumerate(gaps, start=1) if gap > 2), len(slices))
    return len(slices) if len(slices) % columns else columns


def _spread(count: int, length: int) -> np.ndarray:
    """Return places for so many tokens from 0 to `length` - 1, rounded as those of torch.linspace."""
    # float32 from both ends: which way a half is rounded depends on it
    index = np.arange(count, dtype=np.float32)
    last = np.float32(length - 1)
    step = last / np.float32(max(count - 1, 1))
    places = np.where(index < max(count // 2, 1), step * index, last - step * index[::-1])
    return places.round().astype(int)
