"""Decode files of images and clips to pixels and samples, and read their headers alone.

Images: JPEG, PNG, WebP, GIF, BMP and TIFF, the first frame or page. They are turned as EXIF says, then it is Pillow's
`convert("RGB")`, as in transformers' `load_image`. (So transparency is dropped, and 16-bit grey beyond 255 is white.)
Clips: WAV, FLAC, Ogg (Vorbis, Opus) and MP3; channels averaged, then resampled by soxr, as transformers' `load_audio`.
Whatever is wrong with a file is a `BadMedia`, also what Pillow and libsndfile pass over without a word: damaged data of
a JPEG, missing rows, more samples than a header claims; and metadata that Pillow only warns of. An error of reading it
(a lost connection) is passed on.
"""

from __future__ import annotations

import io
import math
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import simplejpeg
import soundfile
import soxr
from PIL import Image, ImageOps

from mmjax.config import MediaLimits
from mmjax.errors import BadMedia

# Sizes are checked here, from the header, against our own limits; Pillow's would warn below and refuse above its own.
Image.MAX_IMAGE_PIXELS = None
# What a user's own code has Pillow read is the user's affair; a worker would print each of these once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# Advice of Pillow, and what leaves every pixel as it is: of two values for one the first, of an MPO its first image.
HARMLESS = "Palette images with|Couldn't allocate palette|XMP data cannot|Metadata Warning, tag|.* malformed MPO file"

IMAGE_STARTS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
CLIP_STARTS = {b"fLaC": "FLAC", b"OggS": "OGG", b"ID3": "MP3"}
# Where the header of a format has width and height, for files that Pillow refuses because one of them is 0.
EXTENTS = {"PNG": ">16xII", "GIF": "<6xHH", "BMP": "<18xii"}
ADAM7 = (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
ORIENTATION = 0x0112  # EXIF's and TIFF's tag; 5 to 8 lie on their side
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
UNKNOWN_LENGTH = 1 << 62  # frames, of a stream that did not know its length when its header was written
UNKNOWN_SIZE = 0x7FFF0000  # bytes or more, that a WAV's header claims for the same reason
TAIL = 65_307  # bytes of the longest Ogg page
SHORTEST = 0.001  # seconds; a shorter clip is a mistake


# ----------------------------------------------------------------------------------------------------------- images


def image_size(file: BinaryIO, limits: MediaLimits | None = None) -> tuple[int, int]:
    """(height, width) of an image as it is shown, from the header of a seekable file (best a buffered one).

    BadMedia for what is no image of a known format, or is beyond the limits (None = the defaults).
    """
    reads = _Reads(file)
    height, width = _guarded(reads, _image_kind(reads), _stored_size)
    check_size(height, width, limits)
    return height, width


def decode_image(data: bytes, limits: MediaLimits | None = None) -> np.ndarray:
    """The pixels of an image file, uint8 `[height, width, 3]` (read only), of the size that `image_size` says.

    BadMedia as `image_size`, and for a file that is truncated or corrupt.
    """
    size = image_size(io.BytesIO(data), limits)
    reads = _Reads(io.BytesIO(data))
    pixels = _guarded(reads, _image_kind(reads), _pixels)
    if pixels.shape[:2] != size:
        raise BadMedia("it says only after its pixels that it lies on its side; write its EXIF before them")
    return pixels


def check_size(height: int, width: int, limits: MediaLimits | None = None) -> None:
    """BadMedia for an image of that size, if it is empty or beyond the limits."""
    limits, given = limits or MediaLimits(), f"an image of {height} x {width} pixels"
    short, long = sorted((height, width))
    if short < 1:
        raise BadMedia(f"{given} is empty")
    if short < limits.min_side:
        raise BadMedia(f"{given} has a side of less than {limits.min_side}")
    if long > limits.max_side:
        raise BadMedia(f"{given} has a side of more than {limits.max_side}")
    if height * width > limits.pixels:
        raise BadMedia(f"{given} has more than {limits.pixels} of them: a decompression bomb")
    if long > limits.aspect * short:
        raise BadMedia(f"{given}: one side is more than {limits.aspect:g} times the other")


def _image_kind(reads: _Reads) -> str:
    head = reads.start(32)
    if not head:
        raise BadMedia("an empty file (0 bytes)")
    kind = next((kind for start, kind in IMAGE_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        kind = "WebP"
    if kind is None:
        raise BadMedia("no image of a known format (JPEG, PNG, WebP, GIF, BMP, TIFF)")
    if kind in EXTENTS and len(head) >= struct.calcsize(EXTENTS[kind]):
        width, height = struct.unpack_from(EXTENTS[kind], head)
        if width == 0 or height == 0:
            raise BadMedia(f"an image of {height} x {width} pixels is empty")
    return kind


def _stored_size(reads: _Reads, kind: str) -> tuple[int, int]:
    """(height, width) once it is turned."""
    if kind == "WebP" and (size := _webp_size(reads)):
        return size
    with _opened(reads, kind) as image:
        width, height = image.size
        # Of the plain class: PNG's own would decode the whole image, for EXIF that may come after it.
        orientation = Image.Image.getexif(image).get(ORIENTATION, 1)
        if kind == "TIFF":
            width, height = image.tag_v2[256], image.tag_v2[257]  # as stored; `size` may be turned already
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _webp_size(reads: _Reads) -> tuple[int, int] | None:
    """(height, width) of a WebP that no metadata can turn; None where Pillow has to look, which reads all of it."""
    head = reads.start(30)
    (size,) = struct.unpack_from("<I", head, 4)
    if size + 8 > reads.seek(0, io.SEEK_END):
        raise BadMedia("truncated WebP: it is shorter than its header says")
    chunk, body = head[12:16], head[20:]
    if chunk == b"VP8X" and not body[0] & 0b1100:  # neither EXIF nor XMP
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if chunk == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return height & 0x3FFF, width & 0x3FFF
    return None


def _pixels(reads: _Reads, kind: str) -> np.ndarray:
    with _opened(reads, kind) as image:
        if image.mode == "F":
            raise BadMedia(f"a {kind} of floats, whose values from 0 to 1 would all be black; write it in 8 bits")
        if kind == "JPEG":
            return _jpeg_pixels(reads, image)
        image.load()
        if kind == "PNG":
            chunks = list(_png_chunks(reads))  # Pillow passes over damaged pixels that can be inflated
            # Rows that a PNG lacks stay as Pillow has made them, without a word: black ones are counted in its data.
            if image.info.get("interlace") or not np.asarray(_last_row(image)).any():
                _check_rows(chunks, image.size)
        ImageOps.exif_transpose(image, in_place=True)
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _jpeg_pixels(reads: _Reads, image: Image.Image) -> np.ndarray:
    """The same pixels as Pillow's, by a decoder that takes libjpeg's warnings for what they are: damaged data."""
    reads.seek(0)
    data, turn = reads.read(), TURNS.get(image.getexif().get(ORIENTATION, 1))
    if image.mode == "CMYK":  # Pillow alone turns it into RGB
        simplejpeg.decode_jpeg(data, "CMYK", strict=True)
        turned = image if turn is None else image.transpose(turn)
        return np.asarray(turned.convert("RGB"))
    pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True)
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))


def _last_row(image: Image.Image) -> Image.Image:
    return image.crop((0, image.height - 1, image.width, image.height))


def _png_chunks(reads: _Reads) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of every chunk of a PNG up to its end. Raises BadMedia where a checksum is wrong."""
    reads.seek(0)
    data, at, name = reads.read(), 8, b""
    while name != b"IEND":
        length, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        end = at + 8 + length
        if len(data) < end + 4:
            raise BadMedia("truncated PNG: it ends without an end")
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise BadMedia(f"damaged PNG: the checksum of its {name.decode('latin-1')} chunk at byte {at} is wrong")
        yield name, data[at + 8 : end]
        at = end + 4


def _check_rows(chunks: Sequence[tuple[bytes, bytes]], size: tuple[int, int]) -> None:
    """BadMedia for a PNG whose data is shorter than its (width, height) need."""
    header, inflate = chunks[0][1], zlib.decompressobj()
    bits, color, interlaced = header[8], header[9], header[12]
    pixel = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    found = sum(len(inflate.decompress(content)) for name, content in chunks if name == b"IDAT")
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    extents = [(math.ceil((size[0] - x) / dx), math.ceil((size[1] - y) / dy)) for x, y, dx, dy in passes]
    wanted = sum(rows * (1 + math.ceil(columns * pixel / 8)) for columns, rows in extents if columns > 0 and rows > 0)
    if found < wanted:
        raise BadMedia(f"truncated PNG: it has {found} of {wanted} bytes of pixels")


def _opened(reads: _Reads, kind: str) -> Image.Image:
    reads.seek(0)
    return Image.open(reads, formats=(kind.upper(),))


# ------------------------------------------------------------------------------------------------------------ clips


class ClipFacts(NamedTuple):
    """The header of a clip."""

    frames: int  # samples of each channel
    sample_rate: int  # Hz


def clip_facts(file: BinaryIO, limits: MediaLimits | None = None) -> ClipFacts:
    """Length and sample rate of a clip, from the header of a seekable file (of an Ogg file also from its end).

    BadMedia for what is no clip of a known format, is empty, does not say its length, or is longer than the limits.
    """
    reads = _Reads(file)
    facts = _guarded(reads, _clip_kind(reads), _clip_facts)
    if facts.frames >= UNKNOWN_LENGTH:
        raise BadMedia("it does not say its length; encode it again")
    if facts.frames < 1 or facts.sample_rate < 1:
        raise BadMedia("a clip of 0 samples is empty")
    if facts.frames < SHORTEST * facts.sample_rate:
        raise BadMedia(
            f"a clip of {facts.frames} samples at {facts.sample_rate} Hz is shorter than {1e3 * SHORTEST:g} ms"
        )
    longest = (limits or MediaLimits()).seconds
    if facts.frames > longest * facts.sample_rate:
        raise BadMedia(f"a clip of {facts.frames / facts.sample_rate:.1f} s is longer than {longest:g} s")
    return facts


def clip_samples(facts: ClipFacts, sample_rate: int) -> int:
    """Samples of a clip once it is resampled to that rate."""
    return -(-facts.frames * sample_rate // facts.sample_rate)


def decode_clip(data: bytes, sample_rate: int, limits: MediaLimits | None = None) -> np.ndarray:
    """The samples of a clip's file at that rate, one channel, float32 `[clip_samples]` in about -1..1.

    BadMedia as `clip_facts`, and for a file that is truncated or corrupt, or holds NaN.
    """
    facts = clip_facts(io.BytesIO(data), limits)
    reads = _Reads(io.BytesIO(data))
    kind = _clip_kind(reads)
    if kind == "OGG":
        _check_last_page(data)
    channels = _guarded(reads, kind, _channels)
    if channels.shape[1] != facts.frames:
        raise BadMedia(f"truncated {kind}: {channels.shape[1]} of {facts.frames} samples")
    wave = channels.mean(axis=0) if len(channels) > 1 else channels[0]
    if not np.isfinite(wave).all():
        raise BadMedia("it holds samples that are not finite")
    if facts.sample_rate != sample_rate:
        wave = soxr.resample(wave, facts.sample_rate, sample_rate, quality="HQ")
        samples = clip_samples(facts, sample_rate)
        wave = np.pad(wave, (0, max(0, samples - len(wave))))[:samples]
    return np.ascontiguousarray(wave, np.float32)


def _clip_kind(reads: _Reads) -> str:
    head = reads.start(16)
    if not head:
        raise BadMedia("an empty file (0 bytes)")
    kind = next((kind for start, kind in CLIP_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        kind = "WAV"
    elif head[0] == 0xFF and head[1:] and head[1] >= 0xE0:
        kind = "MP3"
    if kind is None:
        raise BadMedia("no clip of a known format (WAV, FLAC, Ogg, MP3)")
    return kind


def _clip_facts(reads: _Reads, kind: str) -> ClipFacts:
    if kind == "MP3":
        _check_tells_length(reads)
    if kind == "WAV":
        _check_chunks(reads)
    reads.seek(0)
    with soundfile.SoundFile(reads) as clip:
        if kind == "WAV" and (said := re.search(r"^data : (\d+) \(should be (\d+)\)", clip.extra_info, re.MULTILINE)):
            claimed, there = map(int, said.groups())
            if there < claimed < UNKNOWN_SIZE:
                raise BadMedia(f"truncated WAV: {there} of {claimed} bytes of samples")
        return ClipFacts(clip.frames, clip.samplerate)


def _check_chunks(reads: _Reads) -> None:
    """BadMedia for a WAV with bytes behind its samples that are no chunk: its header was not mended at the end."""
    whole, at = reads.seek(0, io.SEEK_END), 12
    samples = 0
    while at + 8 <= whole:
        head = reads.start(8, at)
        name, size = head[:4], int.from_bytes(head[4:], "little")
        if samples and (at + 8 + size > whole or not (name.isascii() and name.decode().isprintable())):
            if any(reads.start(1024, at)):  # zeros fill a block up
                raise BadMedia(f"a WAV that claims {samples} bytes of samples, and {whole - at} more bytes follow them")
            return
        if name == b"data":
            if size >= UNKNOWN_SIZE:
                return
            samples = size
        at += 8 + size + size % 2


def _check_tells_length(reads: _Reads) -> None:
    """BadMedia for an MP3 whose first frame does not say how many follow: libsndfile would guess, and stop there."""
    head, tag = reads.start(10), 0
    if head[:3] == b"ID3":
        tag = 10 + sum((byte & 0x7F) << 7 * place for place, byte in enumerate(reversed(head[6:10])))
    first = reads.start(1024, tag)
    if not any(name in first for name in (b"Xing", b"Info", b"VBRI")):
        raise BadMedia("an MP3 that does not say its length (no Xing, Info or VBRI header); encode it again")


def _channels(reads: _Reads, kind: str) -> np.ndarray:
    """float32 `[channel, sample]`."""
    reads.seek(0)
    with soundfile.SoundFile(reads) as clip:
        return clip.read(dtype="float32", always_2d=True).T


def _check_last_page(data: bytes) -> None:
    """BadMedia for an Ogg file that ends within a page, which its decoder would drop without a word."""
    start = data.rfind(b"OggS", -TAIL)
    segments = data[start + 26] if start >= 0 and start + 26 < len(data) else 255
    if start < 0 or start + 27 + segments + sum(data[start + 27 : start + 27 + segments]) > len(data):
        raise BadMedia("truncated OGG: its last page is not whole")


# ---------------------------------------------------------------------------------------------------------- warnings


_this_thread = threading.local()


class _OfFilesReadHere(type):
    """Makes a class the superclass of UserWarning in a thread that reads a file of a data set, and nowhere else.

    A filter of warnings holds for all threads, and so would one of `catch_warnings`; headers are read in many.
    """

    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_this_thread, "reads", False) and issubclass(category, UserWarning)


class _DamagedMetadata(UserWarning, metaclass=_OfFilesReadHere):
    pass


@contextmanager
def _pillow_warnings_raised() -> Iterator[None]:
    """Raise what Pillow warns of in this thread, unless it is harmless."""
    if warnings.filters[0][2] is not _DamagedMetadata:
        warnings.filterwarnings("error", f"(?!{HARMLESS})", _DamagedMetadata, r"PIL\.")
    _this_thread.reads = True
    try:
        yield
    finally:
        _this_thread.reads = False


# ------------------------------------------------------------------------------------------------------------ files


class _Reads:
    """A file as Pillow and soundfile read it: what cannot be read ends it for them, and the error is kept for us."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failed: Exception | None = None

    def start(self, count: int, offset: int = 0) -> bytes:
        """Some bytes for ourselves; raises what goes wrong."""
        self.seek(offset)
        got = self.read(count)
        if self.failed:
            raise self.failed
        return got

    def read(self, count: int = -1) -> bytes:
        return self._kept(b"", self.file.read, count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._kept(0, self.file.seek, offset, whence)

    def tell(self) -> int:
        return self._kept(0, self.file.tell)

    def _kept(self, end: Any, method: Callable[..., Any], *arguments: int) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            self.failed = self.failed or error
            return end


def _guarded(reads: _Reads, kind: str, read: Callable[[_Reads, str], Any]) -> Any:
    """Call `read` and turn every error into BadMedia, except errors of reading the file itself."""
    try:
        with _pillow_warnings_raised():
            value = read(reads, kind)
    except Exception as error:  # libraries raise nearly everything on bytes that are not what they should be
        if isinstance(error, BadMedia) and reads.failed is None:
            raise
        raise reads.failed or BadMedia(_reason(kind, error)) from None
    if reads.failed:
        raise reads.failed
    return value


def _reason(kind: str, error: Exception) -> str:
    said = str(error).partition("\n")[0]
    if isinstance(error, UserWarning):
        return f"a {kind} with damaged metadata ({' '.join(said.split()).rstrip('.')}); write it again without them"
    if isinstance(error, EOFError) or "truncated" in said.lower():
        return f"truncated {kind}"
    if isinstance(error, Image.UnidentifiedImageError | soundfile.SoundFileError) and " object at " in said:
        return f"corrupt or truncated {kind}: its header cannot be read"
    return f"corrupt {kind}: {said or type(error).__name__}"
