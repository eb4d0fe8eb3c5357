"""Lay an image's slices out on one canvas of positions, its thumbnail stretched over them, as MiniCPM-V 4.7 does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmjax.data.sample import Item, Sample, Text

Grid = tuple[int, int, int]  # times, rows and columns of an item's tokens
NO_ID = np.iinfo(np.int64).min  # in the place of a token's, of items


class Crop(NamedTuple):
    """An image or a slice among a sample's tokens."""

    begin: int
    end: int
    rows: int  # of tokens
    columns: int

    def grid(self, height: int, width: int) -> np.ndarray:
        """Return (t, y, x) of each token, int `[n, 3]`, spread over a canvas of this size."""
        axes = [0], _spread(self.rows, height), _spread(self.columns, width)
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


def _spread(count: int, length: int) -> np.ndarray:
    # float32 from both ends, as torch.linspace: which way a half is rounded depends on it
    index = np.arange(count, dtype=np.float32)
    last = np.float32(length - 1)
    step = last / np.float32(max(count - 1, 1))
    places = np.where(index < max(count // 2, 1), step * index, last - step * index[::-1])
    return np.round(places).astype(int)


def sample_canvas(
    sample: Sample, lengths: Sequence[int], grids: Sequence[Grid | None], markers: Sequence[int]
) -> np.ndarray:
    """Return the positions (t, y, x) of a sample's tokens, int `[n, 3]`: each branch goes on as if it were alone.

    lengths: of its segments. grids: of its items; None: it is a clip, whose tokens count as text.
    ValueError where positions are given, or images are shown otherwise than whole.
    """
    ids = np.full(sum(lengths), NO_ID)
    branches: dict[int, list[tuple[int, int, Grid | None]]] = {0: []}
    begin = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        is_text = isinstance(segment, Text)
        is_whole = is_text or (isinstance(segment, Item) and not segment.part)
        if segment.start is not None or not is_whole:
            raise ValueError(
                "model.llm.canvas_markers gives positions to text and to whole images alone; leave out the positions "
                "of its segments, and show images with images=slices"
            )
        if is_text:
            ids[begin : begin + n] = segment.tokens
        branch = branches.setdefault(segment.branch if is_text else 0, branches[0].copy())
        branch.append((begin, n, None if is_text else grids[segment.number]))
        begin += n
    positions = np.zeros((len(ids), 3), int)
    # branch 0 last, so that its own are what others have put before theirs
    for branch in reversed(branches.values()):
        crops, end = [], 0
        for _, n, grid in branch:
            if grid is not None:
                crops.append(Crop(end, end + n, *grid[1:]))
            end += n
        index = np.concatenate([np.arange(begin, begin + n) for begin, n, _ in branch])
        positions[index] = canvas_positions(ids[index], crops, markers)
    return positions


def canvas_positions(ids: np.ndarray, crops: Sequence[Crop], markers: Sequence[int]) -> np.ndarray:
    """Return the positions (t, y, x) of a sample's tokens, int `[n, 3]`.

    ids: int64 `[n]`, NO_ID at items. markers: as in `DecoderConfig.canvas_markers`. An image with
    2 x 2 slices of 2 x 2 tokens behind three tokens of text, `<image>` the last (rows and columns):

        <image> 1,1   thumbnail 2,2 2,5 5,2 5,5   </image> 6,6
        <slice> 2,2   2,2 2,3 3,2 3,3   </slice> 3,3   <slice> 2,4   2,4 2,5 3,4 3,5   </slice> 3,5
        line break 3,6   <slice> 4,2 ...   text goes on at 7
    """
    positions = np.arange(len(ids))[:, None].repeat(3, axis=1)
    images: list[list[Crop]] = []
    for crop in crops:
        if images and ids[crop.begin - 1] == markers[0]:
            images[-1].append(crop)
        else:
            images.append([crop])
    touched = {crop.end for crop in crops}
    done = origin = 0
    for whole, *slices in images:
        # The token before an image is its `<image>`. Of one that begins the sample that is, as in
        # transformers, the sample's last, which is written again below.
        start = whole.begin - (whole.begin not in touched)
        text = max(start - done, 0)
        positions[done : done + text] = origin + np.arange(text)[:, None]
        origin += text
        done = (slices or [whole])[-1].end
        while done < len(ids) and ids[done] in markers:
            done += 1
        first, columns, rows = _table(slices or [whole])
        height, width = rows * first.rows, columns * first.columns
        positions[start:done] = origin
        positions[start, 1:] = max(origin - 1, 0)
        if whole.end < done:
            positions[whole.end, 1:] = origin + height, origin + width
        positions[whole.begin : whole.end] = origin + whole.grid(height, width)
        for number, crop in enumerate(slices):
            row, column = divmod(number, columns)
            corner = np.array([0, row * first.rows, column * first.columns])
            grid = origin + corner + crop.grid(crop.rows, crop.columns)
            positions[crop.begin - 1, 1:] = grid[0, 1:]
            if crop.end < done:
                positions[crop.end, 1:] = grid[-1, 1:]
            positions[crop.begin : crop.end] = grid
        for number, (crop, following) in enumerate(pairwise(slices)):
            bottom = (number // columns + 1) * first.rows - 1
            between = positions[crop.end + 1 : following.begin - 1]
            between[:, 1:] = origin + bottom, origin + width
        origin += max(height, width) + 1
    positions[done:] = origin + np.arange(len(ids) - done)[:, None]
    return positions


def _table(slices: Sequence[Crop]) -> tuple[Crop, int, int]:
    """Return the first slice, and how many there are along a row and a column; a line break ends a row."""
    gaps = (following.begin - crop.end for crop, following in pairwise(slices))
    columns = next((n for n, gap in enumerate(gaps, start=1) if gap > 2), len(slices))
    if len(slices) % columns:
        columns = len(slices)
    return slices[0], columns, len(slices) // columns
