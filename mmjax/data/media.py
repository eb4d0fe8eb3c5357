"""From a decoded image or clip to what an encoder reads, and how long that will be before anything is decoded."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, LearnedGrid, VisionConfig

CONV_STRIDE = 2  # of the audio encoder's second convolution
RANGE = 8.0  # decades of power that log-mel keeps below the clip's loudest bin, as Whisper
QUIET = -2.0  # log10 power; a clip whose loudest bin is below this stays quiet instead of being raised to full scale


class ItemSize(NamedTuple):
    """How long one item is, known from its size alone."""

    positions: int  # in the encoder, padded to whole windows (vision) or to the total stride (audio); the class token
    tokens: int  # in the LLM
    valid: int  # positions that hold something of the item


class Prepared(NamedTuple):
    """One item as an encoder reads it: `n` is `ItemSize.positions`."""

    values: np.ndarray  # [n, F]: pixels, uint8, or log-mel bins, float32
    coordinates: np.ndarray  # int32 [n, 3]: (t, y, x)
    valid: np.ndarray  # bool [n]


def positions_per_token(encoder: VisionConfig | AudioConfig) -> int:
    """Positions of an encoder's row that become one token of the LLM."""
    merge = encoder.connector.merge
    return merge * merge if isinstance(encoder, VisionConfig) else CONV_STRIDE * merge


def hidden_tokens(encoder: VisionConfig | AudioConfig) -> int:
    """Tokens at the end of each item that an encoder makes for itself and the LLM does not see: the class token's."""
    return int(isinstance(encoder, VisionConfig) and encoder.class_token)


def item_size(encoder: VisionConfig | AudioConfig, size: tuple[int, ...]) -> ItemSize:
    """Length of an item of `size` ((height, width) in pixels, (samples,) of a clip).

    ValueError if it is empty, or reaches beyond the connector's learned positions.
    """
    if any(extent < 1 for extent in size):
        raise ValueError(f"an item of size {size} is empty")
    merge = encoder.connector.merge
    if isinstance(encoder, VisionConfig):
        height, width = (-(-extent // encoder.patch) for extent in size)
        _check_grid(encoder, size, height, width)
        _check_positions(encoder, size, max(-(-height // merge), -(-width // merge)))
        windows, own = -(-height // merge) * -(-width // merge), hidden_tokens(encoder)
        return ItemSize((windows + own) * merge * merge, windows, height * width + own)
    frames = frame_count(size[0], encoder.window, encoder.hop)
    tokens = -(-frames // (CONV_STRIDE * merge))
    _check_positions(encoder, size, tokens)
    return ItemSize(tokens * CONV_STRIDE * merge, tokens, frames)


def token_grid(encoder: VisionConfig, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Times, rows and columns of the LLM's tokens of an image of (height, width) in pixels."""
    rows, columns = (-(-extent // (encoder.patch * encoder.connector.merge)) for extent in size)
    return 1, rows, columns


def _check_grid(encoder: VisionConfig, size: tuple[int, ...], height: int, width: int) -> None:
    grid = encoder.positions
    if isinstance(grid, LearnedGrid) and (height > grid.rows or width > grid.columns):
        raise ValueError(
            f"an image of {size[0]} x {size[1]} pixels has {height} x {width} patches, the encoder learned positions "
            f"of {grid.rows} x {grid.columns}; prepare images smaller"
        )


def _check_positions(encoder: VisionConfig | AudioConfig, size: tuple[int, ...], longest: int) -> None:
    # Beyond the table JAX would silently take its last entry.
    grid = encoder.connector.position_grid
    if grid and longest > grid:
        raise ValueError(
            f"an item of size {size} has {longest} tokens along one side, connector.position_grid is {grid}; raise it"
        )


def prepare(encoder: VisionConfig | AudioConfig, array: np.ndarray) -> Prepared:
    """Patches of an image (uint8 `[H, W, C]`) or log-mel frames of a clip (float `[n]`), as long as `item_size` says.

    ValueError for an empty item, or one of another shape, type or number of channels than the encoder takes.
    """
    if isinstance(encoder, VisionConfig):
        if array.ndim != 3 or array.shape[2] != encoder.channels:
            raise ValueError(f"an image of shape {array.shape} is not [height, width, {encoder.channels}]")
        found = patches(array, encoder.patch, encoder.connector.merge)
        return _with_class_token(found, encoder.connector.merge) if encoder.class_token else found
    frames = log_mel(array, encoder.sample_rate, encoder.window, encoder.hop, encoder.mels)
    positions = item_size(encoder, array.shape).positions
    values = np.zeros((positions, encoder.mels), np.float32)
    values[: len(frames)] = frames
    coordinates = np.zeros((positions, 3), np.int32)
    coordinates[:, 0] = np.arange(positions)
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


def frame_count(samples: int, window: int, hop: int) -> int:
    """Frames of a clip: the first starts at sample 0, and the last reaches the clip's end (zeros fill it up)."""
    return 1 + max(0, -(-(samples - window) // hop))


def log_mel(wave: np.ndarray, sample_rate: int, window: int, hop: int, mels: int) -> np.ndarray:
    """Log-mel frames float32 `[frame_count, mels]` of a clip `[n]`: Hann window, power, Slaney mel filters, log10.

    As Whisper's, clamped to 8 decades below the loudest bin, but laid out from there: the loudest bin is 1, and two
    decades are one unit, so that gain does not matter and a tone stands well off the noise around it. A silent clip is
    -3 everywhere.
    """
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"a clip must be floats [samples], not {wave.dtype} {list(wave.shape)}")
    if wave.size == 0:
        raise ValueError("a clip of 0 samples is empty")
    count = frame_count(wave.size, window, hop)
    padded = np.zeros((count - 1) * hop + window, np.float32)
    padded[: wave.size] = wave
    taper, filters = _hann(window), mel_filters(sample_rate, window, mels)
    frames = np.lib.stride_tricks.as_strided(padded, (count, window), (padded.strides[0] * hop, padded.strides[0]))
    spectrum = np.fft.rfft(frames * taper)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    decades = np.log10(np.maximum(power @ filters, np.float32(1e-10)))
    loudest = max(float(decades.max()), QUIET)
    return (np.maximum(decades, loudest - RANGE) - loudest) / np.float32(2) + np.float32(1)


@functools.cache
def _hann(window: int) -> np.ndarray:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)


@functools.cache
def mel_filters(sample_rate: int, window: int, mels: int) -> np.ndarray:
    """Triangular filters float32 `[window // 2 + 1, mels]`, evenly spaced in Slaney's mel, of equal area in Hz."""
    logarithmic, step = 15.0, np.log(6.4) / 27  # linear up to 1 kHz (15 mel), then 27 mel for a factor of 6.4
    nyquist = sample_rate / 2
    top = nyquist * 3 / 200 if nyquist < 1000 else logarithmic + np.log(nyquist / 1000) / step
    mel = np.linspace(0, top, mels + 2)
    edges = np.where(mel < logarithmic, mel * 200 / 3, 1000 * np.exp(step * (mel - logarithmic)))
    bins = np.arange(window // 2 + 1) * sample_rate / window
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)
