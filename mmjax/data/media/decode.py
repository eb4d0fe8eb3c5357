"""Read files of media: headers of videos, limits of sizes, and one kind of error for all that decoders raise.

Every fault of a file raises `BadMedia`, also those that Pillow and libsndfile ignore or only warn
of. I/O errors while reading (a lost connection) propagate unchanged. Images: `decode_images`;
clips: `decode_clips`; videos: `video`.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import soundfile
from PIL import Image

from mmjax.config import MediaLimits
from mmjax.errors import BadMedia, UserError

# reads the size of an image or clip, or a video's packed header
Probe = Callable[[BinaryIO], tuple[int, int]]

# `check_size` applies our own limits to the header; Pillow's would warn below and refuse above a
# bound of its own.
Image.MAX_IMAGE_PIXELS = None
# Warnings about files that user code opens are silenced: each worker process would print them once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# What Pillow logs of a file is what it raises, too.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
# Advice, and faults that change no pixel: a repeated tag (the first counts), a malformed MPO (its
# first image counts).
HARMLESS = "Palette images with|Couldn't allocate palette|XMP data cannot|Metadata Warning, tag|.* malformed MPO file"


class VideoHeader(NamedTuple):
    """Frames, size and rate of a video, by its container."""

    frames: int
    height: int  # of a frame, upright
    width: int
    rate: Fraction  # frames per second, in the mean; 0 where it is not known: a list of images

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of a frame."""
        return self.height, self.width

    def packed(self) -> tuple[int, int]:
        """Pack into two int64, as other media have two sizes: frames, height and width; and the rate."""
        # first: frames (32 bits), height (16), width (16). second: the rate's two terms, 32 bits
        # each.
        sides = self.height << 16 | self.width
        return self.frames << 32 | sides, self.rate.numerator << 32 | self.rate.denominator

    @classmethod
    def unpacked(cls, size: tuple[int, int]) -> VideoHeader:
        """Undo `packed`."""
        return cls(
            frames=size[0] >> 32,
            height=size[0] >> 16 & 0xFFFF,
            width=size[0] & 0xFFFF,
            rate=Fraction(size[1] >> 32, size[1] & 0xFFFF_FFFF),
        )


class SampledVideo(NamedTuple):
    """The frames that are taken of a video; each `VisionConfig.frames` of them are a temporal patch, and an item."""

    indices: np.ndarray  # int64 [n]: frames of the video, ascending; a multiple of a temporal patch
    size: tuple[int, int]  # height and width of a frame, resized
    times: tuple[int, ...] = ()  # rotary positions of the temporal patches along t
    # that is written before the first temporal patch, between two, and behind the last
    texts: tuple[str, ...] = ()


@cache
def decoder_versions() -> tuple[str, ...]:
    """Return the versions of what decodes and prepares media: libraries, and a hash of the code here."""
    code = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return Image.__version__, soundfile.__version__, np.__version__, code.hexdigest()


def filled(indices: np.ndarray, unit: int) -> np.ndarray:
    """Repeat the last frame until the last temporal patch, of `unit` frames, is whole."""
    return np.pad(indices, (0, -len(indices) % unit), mode="edge")


# --------------------------------------------------------------------------------------------------
# limits


def limit_violations(kind: str, sizes: np.ndarray, limits: MediaLimits) -> dict[str, np.ndarray]:
    """Test the sizes of media, int64 `[..., 2]`, against every limit of their kind.

    sizes: (height, width) of images, (frames, rate) of clips, packed headers of videos. Returns
    bool `[...]`, whether the limit is violated, by the words that say so.
    """
    sizes = np.asarray(sizes)
    if kind == "video":
        first, second = np.moveaxis(sizes.astype(np.int64), -1, 0)
        # Seconds are frames over a rate of (second >> 32) / (second & mask); lists of images have
        # none.
        seconds = (first >> 32) * (second & 0xFFFF_FFFF) / np.maximum(second >> 32, 1)
        long = {
            f" is longer than {limits.seconds:g} s": (second >> 32 > 0) & (seconds > limits.seconds)
        }
        return long | limit_violations(
            "image", np.stack([first >> 16 & 0xFFFF, first & 0xFFFF], axis=-1), limits
        )
    sizes = sizes.astype(float)  # the product of a hostile file's sides overflows int64
    first = sizes[..., 0]
    second = sizes[..., 1]
    if kind in ("audio", "sound"):
        return {f" is longer than {limits.seconds:g} s": first > limits.seconds * second}
    short = np.minimum(first, second)
    long = np.maximum(first, second)
    return {
        f" has a side of less than {limits.min_side}": short < limits.min_side,
        f" has a side of more than {limits.max_side}": long > limits.max_side,
        f" has more than {limits.pixels} of them: a decompression bomb": first * second
        > limits.pixels,
        f": one side is more than {limits.aspect:g} times the other": long > limits.aspect * short,
    }


def check_media_size(kind: str, size: tuple[int, int], limits: MediaLimits) -> None:
    """Raise BadMedia if an image of (height, width), a clip of (frames, rate), or a video is beyond the limits."""
    for reason, violated in limit_violations(kind, size, limits).items():
        if violated:
            raise BadMedia(_described(kind, size) + reason)


def _described(kind: str, size: tuple[int, int]) -> str:
    if kind == "video":
        header = VideoHeader.unpacked(size)
        seconds = f" of {float(header.frames / header.rate):.1f} s" if header.rate else ""
        return f"a video{seconds} of {header.height} x {header.width} pixels"
    return (
        f"an image of {size[0]} x {size[1]} pixels"
        if kind == "image"
        else f"a clip of {size[0] / size[1]:.1f} s"
    )


# --------------------------------------------------------------------------------------------------
# warnings


_thread = threading.local()


class _ReadingThreadOnly(type):
    """Make a class a superclass of UserWarning, but only in a thread that is reading a file of a data set.

    Warning filters, those of `catch_warnings` too, hold for all threads, and headers are read in
    many.
    """

    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_thread, "reading", False) and issubclass(category, UserWarning)


class _DamagedMetadata(UserWarning, metaclass=_ReadingThreadOnly):
    pass


@contextmanager
def _raise_pillow_warnings() -> Iterator[None]:
    """Raise Pillow's warnings in this thread as errors, unless they are harmless."""
    # other code may have prepended or reset filters since
    if warnings.filters[0][2] is not _DamagedMetadata:
        warnings.filterwarnings("error", f"(?!{HARMLESS})", _DamagedMetadata, r"PIL\.")
    _thread.reading = True
    try:
        yield
    finally:
        _thread.reading = False


# --------------------------------------------------------------------------------------------------
# files


class FileReader:
    """Wrap a file for Pillow and soundfile: an I/O error reads as the end of the file for them and is stored for us."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failed: Exception | None = None

    def start(self, count: int, offset: int = 0) -> bytes:
        """Read `count` bytes from `offset` on; raises any I/O error."""
        self.seek(offset)
        data = self.read(count)
        if self.failed:
            raise self.failed
        return data

    def read(self, count: int = -1) -> bytes:
        return self._call(b"", self.file.read, count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._call(0, self.file.seek, offset, whence)

    def tell(self) -> int:
        return self._call(0, self.file.tell)

    def _call(self, at_end: Any, method: Callable[..., Any], *arguments: int) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            self.failed = self.failed or error
            return at_end


def read_head(reader: FileReader) -> bytes:
    """Read the first bytes of a file, which tell its format. Raises BadMedia for an empty file."""
    if not (head := reader.start(32)):
        raise BadMedia("an empty file (0 bytes)")
    return head


def call_decoder(reader: FileReader, kind: str, read: Callable[[FileReader, str], Any]) -> Any:
    """Call `read` and turn every error into BadMedia, except I/O errors of the file itself."""
    try:
        with _raise_pillow_warnings():
            value = read(reader, kind)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # libraries raise nearly everything on bytes that are not what they should be
        if isinstance(error, BadMedia) and reader.failed is None:
            raise
        raise reader.failed or BadMedia(_reason(kind, error)) from None
    if reader.failed:
        raise reader.failed
    return value


def _reason(kind: str, error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if isinstance(error, UserWarning):
        return f"a {kind} with damaged metadata ({' '.join(text.split()).rstrip('.')}); write it again without them"
    if isinstance(error, EOFError) or "truncated" in text.lower():
        return f"truncated {kind}"
    # Both libraries name the Python object where they cannot name a fault.
    if (
        isinstance(error, Image.UnidentifiedImageError | soundfile.SoundFileError)
        and " object at " in text
    ):
        return f"corrupt or truncated {kind}: its header cannot be read"
    return f"corrupt {kind}: {text or type(error).__name__}"
