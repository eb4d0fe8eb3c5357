"""Decode image and audio files to pixels and samples, and read their sizes from headers alone (videos: `video.py`).

Images: JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF and HEIC; the first frame or page. EXIF orientation is applied, then
Pillow's `convert("RGB")`, as in transformers' `load_image`. (So transparency is dropped.) Grey of 16 bits becomes its
high byte, as Pillow has 16-bit colours, where `convert` makes white of all above 255.
Clips: WAV, FLAC, Ogg (Vorbis, Opus), MP3, and where PyAV is installed M4A; channels averaged, then resampled by soxr,
as in transformers' `load_audio`. Every fault of a file raises `BadMedia`, including those that Pillow and libsndfile
ignore: damaged JPEG data, missing rows, more samples than the header claims, and metadata that Pillow only warns of.
I/O errors while reading (a lost connection) propagate unchanged.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import simplejpeg
import soundfile
import soxr
from PIL import Image, features

from mmjax.config import MediaLimits
from mmjax.data.media import tiff
from mmjax.data.media.mp3 import decode_mp3, is_mp3, read_mp3_header
from mmjax.errors import BadMedia, UserError

Probe = Callable[[BinaryIO], tuple[int, int]]  # reads the size of an image or clip, or a video's packed header

# `check_size` applies our own limits to the header; Pillow's would warn below and refuse above a bound of its own.
Image.MAX_IMAGE_PIXELS = None
# Warnings about files that user code opens are silenced: each worker process would print them once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# What Pillow logs of a file is what it raises, too.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
# Advice, and faults that change no pixel: a repeated tag (the first counts), a malformed MPO (its first image counts).
HARMLESS = "Palette images with|Couldn't allocate palette|XMP data cannot|Metadata Warning, tag|.* malformed MPO file"

IMAGE_STARTS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",  # with offsets of 64 bits
    b"MM\0+": "TIFF",
}
# Brands in the first box of a photo in the container of MP4, by the codec of its pixels.
AVIF_BRANDS = (b"avif", b"avis")
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
MAX_PIXELS = {"WEBP": 50_000_000, "AVIF": 50_000_000, "HEIC": 50_000_000}  # whose decoders need 20 bytes for each
MAX_SCANS = 500  # of a JPEG, each of which passes over all of its pixels
_BRANDS = {"AVIF": AVIF_BRANDS, "HEIC": HEIF_BRANDS}
INFLATED = 1 << 22  # bytes of a PNG that are inflated at a time
BAND = 1024  # rows that are converted at a time
UNKNOWN_FRAME = 1 << 16  # bytes of a FLAC's last frame at most, where its header does not say
CLIP_STARTS = {b"fLaC": "FLAC", b"OggS": "OGG"}
# struct formats of (width, height) in a header, for files that Pillow refuses because one of them is 0.
EXTENTS = {"PNG": ">16xII", "GIF": "<6xHH", "BMP": "<18xii"}
CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")  # chunks of a PNG
# PNG interlacing: first x, first y, step of x and of y of each of its seven passes.
ADAM7 = (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
ORIENTATION = 0x0112  # EXIF and TIFF tag; 5 to 8 swap height and width
# Of pixels [height, width, 3], by the orientation that they have.
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}
UNKNOWN_LENGTH = 1 << 62  # frames; libsndfile's length of a stream whose header was written before its end was known
UNKNOWN_SIZE = 0x7FFF0000  # bytes; a WAV header claims at least this for the same reason
BLOCK = 1 << 20  # samples of all channels that are decoded at a time
MIN_SECONDS = 0.001  # a shorter clip is a mistake


class VideoHeader(NamedTuple):
    """Frames, size and rate of a video, by its container."""

    frames: int
    height: int  # of a frame, upright
    width: int
    rate: Fraction  # frames per second, in the mean; 0 where it is not known: a list of images

    def packed(self) -> tuple[int, int]:
        """Pack into two int64, as other media have two sizes: frames, height and width; and the rate."""
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


# ----------------------------------------------------------------------------------------------------------- limits


def limit_violations(kind: str, sizes: np.ndarray, limits: MediaLimits) -> dict[str, np.ndarray]:
    """Test (height, width) of images, (frames, rate) of clips, or packed headers of videos, int64 `[..., 2]`, against
    every limit of the kind.

    Returns bool `[...]`, whether the limit is violated, by the words that say so.
    """
    sizes = np.asarray(sizes)
    if kind == "video":
        first, second = np.moveaxis(sizes.astype(np.int64), -1, 0)
        # Seconds are frames over a rate of (second >> 32) / (second & mask); lists of images have none.
        seconds = (first >> 32) * (second & 0xFFFF_FFFF) / np.maximum(second >> 32, 1)
        long = {f" is longer than {limits.seconds:g} s": (second >> 32 > 0) & (seconds > limits.seconds)}
        return long | limit_violations("image", np.stack([first >> 16 & 0xFFFF, first & 0xFFFF], axis=-1), limits)
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
        f" has more than {limits.pixels} of them: a decompression bomb": first * second > limits.pixels,
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
    return f"an image of {size[0]} x {size[1]} pixels" if kind == "image" else f"a clip of {size[0] / size[1]:.1f} s"


# ----------------------------------------------------------------------------------------------------------- images


def read_image_size(file: BinaryIO) -> tuple[int, int]:
    """Read (height, width) of an image, orientation applied, from the header of a seekable (best a buffered) file.

    Raises BadMedia for an unknown format, and for an image without pixels.
    """
    reader = _FileReader(file)
    kind = _image_kind(reader)
    height, width = _call_decoder(reader, kind, _stored_size)
    if min(height, width) < 1:
        raise BadMedia(f"an image of {height} x {width} pixels is empty")
    if height * width > MAX_PIXELS.get(kind, height * width):
        raise BadMedia(f"a {kind} of {height} x {width} pixels, more than {MAX_PIXELS[kind]:,} of them; write a JPEG")
    return height, width


def decode_image(data: bytes, limits: MediaLimits = MediaLimits()) -> np.ndarray:
    """Decode an image file to pixels, uint8 `[height, width, 3]`, read only, of the size of `read_image_size`.

    Raises BadMedia as `read_image_size`, for a size beyond the limits, and for a truncated or corrupt file.
    """
    size = read_image_size(io.BytesIO(data))
    check_media_size("image", size, limits)
    reader = _FileReader(io.BytesIO(data))
    pixels = _call_decoder(reader, _image_kind(reader), _pixels)
    if pixels.shape[:2] != size:
        raise BadMedia("it says only after its pixels that it lies on its side; write its EXIF before them")
    return pixels


def image_kind(head: bytes) -> str | None:
    """Tell the format of an image by the first 32 bytes of its file; None for what is no image."""
    kind = next((kind for start, kind in IMAGE_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        # The main brand may be a general one, behind which compatible ones follow.
        brands = [head[8:12]] + [head[k : k + 4] for k in range(16, min(len(head), int.from_bytes(head[:4])), 4)]
        if brands[0] in (b"mif1", b"msf1", *AVIF_BRANDS, *HEIF_BRANDS):
            return next((k for b in brands for k in ("AVIF", "HEIC") if b in _BRANDS[k]), None)
    return kind


def _image_kind(reader: _FileReader) -> str:
    head = _head(reader)
    if (kind := image_kind(head)) is None:
        raise BadMedia("no image of a known format (JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC)")
    if kind == "AVIF" and not features.check("avif"):
        raise UserError("the data has AVIF images, which this Pillow cannot decode: pip install -U pillow")
    if kind == "HEIC":
        _register_heif()
    if kind in EXTENTS and len(head) >= struct.calcsize(EXTENTS[kind]):
        width, height = struct.unpack_from(EXTENTS[kind], head)
        if width == 0 or height == 0:
            raise BadMedia(f"an image of {height} x {width} pixels is empty")
    return kind


def _stored_size(reader: _FileReader, kind: str) -> tuple[int, int]:
    """Return (height, width) with the orientation applied."""
    if kind == "WEBP" and (size := _webp_size(reader)):
        return size
    with _open_image(reader, kind) as image:
        width, height = image.size
        # The base class's method: PNG's override decodes the whole image, to reach EXIF that may come after it.
        orientation = Image.Image.getexif(image).get(ORIENTATION, 1)
        if kind == "TIFF":
            width = image.tag_v2[256]  # as stored; Pillow may have applied the orientation to `size` already
            height = image.tag_v2[257]
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _webp_size(reader: _FileReader) -> tuple[int, int] | None:
    """Read (height, width) of a WebP without EXIF or XMP; None where only Pillow, which reads all of it, can tell."""
    head = reader.start(30)
    (size,) = struct.unpack_from("<I", head, 4)
    if size + 8 > reader.seek(0, io.SEEK_END):
        raise BadMedia("truncated WebP: it is shorter than its header says")
    chunk = head[12:16]
    body = head[20:]
    if chunk == b"VP8X" and not body[0] & 0b1100:  # neither EXIF nor XMP
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if chunk == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return height & 0x3FFF, width & 0x3FFF
    return None


def _pixels(reader: _FileReader, kind: str) -> np.ndarray:
    with tiff.lock if kind == "TIFF" else nullcontext(), _open_image(reader, kind) as image:
        if image.mode == "F":
            raise BadMedia(f"a {kind} of floats, whose values from 0 to 1 would all be black; write it in 8 bits")
        if image.mode == "I" and kind != "PNG":
            raise BadMedia(f"a {kind} of 32-bit numbers; write it in 8 or 16 bits")
        if kind == "JPEG":
            return _jpeg_pixels(reader, image)
        if kind == "TIFF":
            reader.seek(0)
            tiff.check_tiff(reader.read())
        # Of a BMP, before Pillow fills its palette up to 256 colours.
        colours = len(image.palette.palette) // len(image.palette.rawmode) if image.palette and kind == "BMP" else 256
        image.load()
        if image.mode == "P" and image.getextrema()[1] >= colours:
            raise BadMedia(f"corrupt {kind}: it has pixels of a colour beyond the {colours} of its palette")
        if kind == "PNG":
            chunks = list(_png_chunks(reader))  # checks checksums: Pillow accepts any damage that still inflates
            names = [name for name, _ in chunks]
            _check_png_order(names)
            # Pillow silently leaves missing rows black. Inflating again is slow, so only if the last row is black
            # (or, interlaced, any row may be missing), or of an animation, of which it reads no picture to its end.
            last_row = image.crop((0, image.height - 1, image.width, image.height))
            if image.info.get("interlace") or b"acTL" in names or not np.asarray(last_row).any():
                _check_png_rows(chunks, image.size)
        pixels = _rgb(image)
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    return _turned(pixels, turn)


def _rgb(image: Image.Image) -> np.ndarray:
    """Convert to RGB, uint8 `[height, width, 3]`, in bands: a large image has no room for more copies of it."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, BAND):
        band = image.crop((0, top, image.width, min(top + BAND, image.height)))
        if image.mode.startswith("I"):
            pixels[top : top + BAND] = (np.asarray(band).astype(np.int32) >> 8)[..., None]
        else:
            pixels[top : top + BAND] = np.asarray(band.convert("RGB"))
    return pixels


def _turned(pixels: np.ndarray, turn: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
    turned = pixels if turn is None else np.ascontiguousarray(turn(pixels))
    turned.flags.writeable = False
    return turned


def _jpeg_pixels(reader: _FileReader, image: Image.Image) -> np.ndarray:
    """Decode to the same pixels as Pillow, but with libjpeg's warnings (damaged data) raised as errors."""
    reader.seek(0)
    data = reader.read()
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise BadMedia(f"a JPEG of more than {MAX_SCANS} scans")
    turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    if image.mode == "CMYK":  # simplejpeg checks the data, but only Pillow converts CMYK to RGB
        simplejpeg.decode_jpeg(data, "CMYK", strict=True)
        return _turned(_rgb(image), turn)
    return _turned(simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True), turn)


def _png_chunks(reader: _FileReader) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of every chunk of a PNG up to IEND. Raises BadMedia where a checksum is wrong."""
    reader.seek(0)
    data = memoryview(reader.read())
    name = b""
    start = 8  # behind the signature; a chunk is length (4 bytes), name (4), content, checksum of name and content (4)
    while name != b"IEND":
        end = start + 8 + int.from_bytes(data[start : start + 4])
        name = bytes(data[start + 4 : start + 8])
        if len(data) < end + 4:
            raise BadMedia("truncated PNG: it ends without an end")
        if zlib.crc32(data[start + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise BadMedia(f"damaged PNG: the checksum of its {name.decode('latin-1')} chunk at byte {start} is wrong")
        yield name, data[start + 8 : end]
        start = end + 4


def _check_png_order(names: Sequence[bytes]) -> None:
    """Raise BadMedia unless a PNG begins with its one header, and its pixels are in chunks that follow each other.

    A chunk whose name begins with a capital letter is needed to read the others: one that is not known is bad.
    """
    if unknown := [name for name in names if not name[0] & 0x20 and name not in CRITICAL]:
        raise BadMedia(f"corrupt PNG: it has a chunk {unknown[0].decode('latin-1')!r}, which no reader knows")
    if names[0] != b"IHDR" or names.count(b"IHDR") > 1:
        raise BadMedia("corrupt PNG: it does not begin with its only IHDR chunk")
    first = names.index(b"IDAT") if b"IDAT" in names else 0
    if names.count(b"IDAT") != names[first : first + names.count(b"IDAT")].count(b"IDAT"):
        raise BadMedia("corrupt PNG: other chunks are between those of its pixels")


def _check_png_rows(chunks: Sequence[tuple[bytes, memoryview]], size: tuple[int, int]) -> None:
    """Raise BadMedia for a PNG with less pixel data than its (width, height) needs, or whose data has no end."""
    header = chunks[0][1]  # IHDR: width (4 bytes), height (4), bit depth, color type, compression, filter, interlacing
    pixel_bits = header[8] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[header[9]]
    passes = ADAM7 if header[12] else ((0, 0, 1, 1),)
    extents = [(math.ceil((size[0] - x) / dx), math.ceil((size[1] - y) / dy)) for x, y, dx, dy in passes]
    # Each row of each pass begins with a byte that names its filter.
    expected = sum(
        rows * (1 + math.ceil(columns * pixel_bits / 8)) for columns, rows in extents if columns > 0 and rows > 0
    )
    inflate = zlib.decompressobj()
    actual = 0
    for packed in (content for name, content in chunks if name == b"IDAT"):
        while packed and actual <= expected and not inflate.eof:
            actual += len(inflate.decompress(packed, INFLATED))
            packed = inflate.unconsumed_tail
    if actual < expected:
        raise BadMedia(f"truncated PNG: it has {actual} of {expected} bytes of pixels")
    if actual == expected and not inflate.eof:  # the end, which has a checksum of the pixels, is there too
        raise BadMedia("truncated PNG: its compressed pixels have no end")


def _open_image(reader: _FileReader, kind: str) -> Image.Image:
    reader.seek(0)
    return Image.open(reader, formats=("HEIF" if kind == "HEIC" else kind,))


@cache
def _register_heif() -> None:
    """Let Pillow open HEIC. Raises UserError where pillow-heif is not installed."""
    try:
        import pillow_heif
    except ImportError:
        raise UserError('the data has HEIC photos, which pillow-heif decodes: pip install "mmjax[heif]"') from None
    pillow_heif.register_heif_opener(thumbnails=False)


# ------------------------------------------------------------------------------------------------------------ clips


class ClipHeader(NamedTuple):
    """Length and sample rate of a clip, from its header."""

    frames: int  # samples of each channel
    sample_rate: int  # Hz


def read_clip_header(file: BinaryIO) -> ClipHeader:
    """Read length and sample rate of a clip from the header of a seekable file (for Ogg also from its end).

    Raises BadMedia for an unknown format, an unknown length, and an empty clip.
    """
    reader = _FileReader(file)
    return check_clip_header(_call_decoder(reader, _clip_kind(reader), _clip_facts))


def check_clip_header(facts: ClipHeader) -> ClipHeader:
    """Return a header. Raises BadMedia for an unknown length, and an empty clip."""
    if facts.frames >= UNKNOWN_LENGTH:
        raise BadMedia("it does not say its length; encode it again")
    if facts.frames < 1 or facts.sample_rate < 1:
        raise BadMedia("a clip of 0 samples is empty")
    if facts.frames < MIN_SECONDS * facts.sample_rate:
        raise BadMedia(
            f"a clip of {facts.frames} samples at {facts.sample_rate} Hz is shorter than {1e3 * MIN_SECONDS:g} ms"
        )
    return facts


def resampled_length(facts: ClipHeader, sample_rate: int) -> int:
    """Return a clip's length in samples after resampling to that rate."""
    return -(-facts.frames * sample_rate // facts.sample_rate)


def decode_clip(data: bytes, sample_rate: int, limits: MediaLimits = MediaLimits()) -> np.ndarray:
    """Decode a clip's file to mono samples at that rate, float32 `[clip_samples]` in about -1..1.

    Raises BadMedia as `read_clip_header`, for a clip beyond the limits, and for a file that is truncated, corrupt or
    holds NaN.
    """
    facts = read_clip_header(io.BytesIO(data))
    check_media_size("audio", facts, limits)
    reader = _FileReader(io.BytesIO(data))
    kind = _clip_kind(reader)
    if kind == "OGG":
        _check_ogg_pages(data)
    return _call_decoder(reader, kind, partial(_mono, facts=facts, sample_rate=sample_rate))


def resample(blocks: Iterable[np.ndarray], facts: ClipHeader, sample_rate: int) -> np.ndarray:
    """Resample blocks of mono samples to that rate, float32 of the length that `resampled_length` says.

    The samples are those of `soxr.resample` of all blocks at once.
    """
    samples = resampled_length(facts, sample_rate)
    wave = np.zeros(samples, np.float32)
    stream = None
    if facts.sample_rate != sample_rate:
        stream = soxr.ResampleStream(facts.sample_rate, sample_rate, 1, dtype="float32", quality="HQ")
    position = 0
    # The last block is empty: only it ends the stream.
    for block, last in chain(((block, False) for block in blocks), [(np.empty(0, np.float32), True)]):
        block = np.ascontiguousarray(block, np.float32)
        made = block if stream is None else stream.resample_chunk(block, last)
        made = made[: samples - position]
        wave[position : position + len(made)] = made
        position += len(made)
    return wave


def _clip_kind(reader: _FileReader) -> str:
    head = _head(reader)
    kind = next((kind for start, kind in CLIP_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        kind = "WAV"
    elif is_mp3(head):
        kind = "MP3"
    if kind is None:
        raise BadMedia("no clip of a known format (WAV, FLAC, Ogg, MP3, M4A)")
    return kind


def _clip_facts(reader: _FileReader, kind: str) -> ClipHeader:
    if kind == "MP3":
        return ClipHeader(*read_mp3_header(reader))
    if kind == "WAV":
        _check_wav_chunks(reader)
    reader.seek(0)
    with soundfile.SoundFile(reader) as clip:
        # libsndfile corrects a wrong data size by itself and only logs it.
        if kind == "WAV" and (log := re.search(r"^data : (\d+) \(should be (\d+)\)", clip.extra_info, re.MULTILINE)):
            claimed, actual = map(int, log.groups())
            if actual < claimed < UNKNOWN_SIZE:
                raise BadMedia(f"truncated WAV: {actual} of {claimed} bytes of samples")
        return ClipHeader(clip.frames, clip.samplerate)


def _check_wav_chunks(reader: _FileReader) -> None:
    """Raise BadMedia for a WAV with bytes behind its samples that are no chunk: a writer did not update its header."""
    file_size = reader.seek(0, io.SEEK_END)
    position = 12  # behind RIFF, a size and WAVE; a chunk is name (4 bytes), size (4), content, padded to even length
    samples = 0
    while position + 8 <= file_size:
        name, size = struct.unpack("<4sI", reader.start(8, position))
        if samples and (position + 8 + size > file_size or not (name.isascii() and name.decode().isprintable())):
            if any(reader.start(1024, position)):  # zeros are padding
                raise BadMedia(
                    f"a WAV that claims {samples} bytes of samples, and {file_size - position} more bytes follow them"
                )
            return
        if name == b"data":
            if size >= UNKNOWN_SIZE:
                return
            samples = size
        position += 8 + size + size % 2


def _mono(reader: _FileReader, kind: str, facts: ClipHeader, sample_rate: int) -> np.ndarray:
    """Decode a clip block by block, its channels averaged, and resample it."""
    reader.seek(0)
    count = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal count
        for block in decode_mp3(reader.read()) if kind == "MP3" else _blocks(reader, kind):
            count += len(block)
            if not np.isfinite(block).all():
                raise BadMedia("it holds samples that are not finite")
            yield block
            if count > facts.frames:
                return

    wave = resample(counted(), facts, sample_rate)
    if count != facts.frames:
        raise BadMedia(f"truncated {kind}: {count} of {facts.frames} samples")
    return wave


def _blocks(reader: _FileReader, kind: str) -> Iterator[np.ndarray]:
    head = reader.start(42)
    reader.seek(0)
    with soundfile.SoundFile(reader) as clip:
        read = partial(clip.read, max(1, BLOCK // clip.channels), always_2d=True)
        blocks = _checked_flac(read, head) if kind == "FLAC" else _read_all(read)
        for block in blocks:
            yield block.T.mean(axis=0) if clip.channels > 1 else block[:, 0]
    if kind == "FLAC":
        _check_flac_end(reader, head)


def _read_all(read: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    while len(block := read("float32")):
        yield block


def _checked_flac(read: Callable[[str], np.ndarray], head: bytes) -> Iterator[np.ndarray]:
    """Yield the samples of a FLAC, as libsndfile converts them, float32 `[samples, channels]`.

    Raises BadMedia where they are not those of its checksum (MD5 of all samples), which libFLAC alone does not compare.
    head: "fLaC", 4 bytes, 10 of sizes, 20 bits of the rate, 3 of channels - 1, 5 of bits - 1, 36 of the length, MD5.
    """
    bits = (int.from_bytes(head[18:26]) >> 36 & 31) + 1
    expected = head[26:42]
    md5 = hashlib.md5(usedforsecurity=False)
    while len(block := read("int32")):
        samples = (block >> 32 - bits).astype("<i4")
        md5.update(samples.view(np.uint8).reshape(-1, 4)[:, : -(-bits // 8)].tobytes())
        yield block.astype(np.float32) * np.float32(2.0**-31)
    if any(expected) and md5.digest() != expected:
        raise BadMedia("corrupt FLAC: its samples are not those of its checksum")


def _check_flac_end(reader: _FileReader, head: bytes) -> None:
    """Raise BadMedia for a FLAC with bytes behind its last frame, which libFLAC takes for a lost frame.

    head: as above; 3 of its bytes are the size of the longest frame, 0 where the writer did not know it. A frame begins
    with 14 set bits and a 0, and ends with a checksum by which that of the whole is 0; with zeros behind, too.
    """
    longest = int.from_bytes(head[15:18]) or UNKNOWN_FRAME
    size = reader.seek(0, io.SEEK_END)
    tail = reader.start(min(longest, size), size - min(longest, size))
    starts = [match.start() for match in re.finditer(rb"\xff[\xf8\xf9]", tail)]
    # From the last on: almost always the frame that ends the file.
    if tail.endswith(bytes(16)) or not any(_crc16(tail[start:]) == 0 for start in reversed(starts)):
        raise BadMedia("corrupt FLAC: other bytes follow its last frame")


def _crc16(data: bytes) -> int:
    """Compute FLAC's checksum of a frame, of the polynomial 0x8005."""
    table = _crc16_table()
    crc = 0
    for byte in data:
        crc = (crc << 8 & 0xFFFF) ^ table[crc >> 8 ^ byte]
    return crc


@cache
def _crc16_table() -> list[int]:
    """Return the remainders of all bytes, as of 16 more bits behind them."""
    table = list(range(0, 1 << 16, 1 << 8))
    for _ in range(8):
        table = [(crc << 1 ^ (0x8005 if crc & 0x8000 else 0)) & 0xFFFF for crc in table]
    return table


def _check_ogg_pages(data: bytes) -> None:
    """Raise BadMedia for an Ogg file with a page that is cut off, missing or damaged, which decoders drop silently.

    A page: "OggS", 10 bytes, its stream's number (4 bytes), its own number (4), a checksum (4), the number of segments,
    the length of each segment, the segments.
    """
    start = 0
    numbers: dict[bytes, int] = {}  # of the last page of each stream
    while start < len(data):
        segments = data[start + 26] if start + 26 < len(data) else 0
        end = start + 27 + segments + sum(data[start + 27 : start + 27 + segments])
        if data[start : start + 4] != b"OggS":
            raise BadMedia(f"corrupt OGG: no page begins at byte {start}")
        if end > len(data) or start + 27 > len(data):
            raise BadMedia("truncated OGG: its last page is not whole")
        page = data[start : start + 22] + bytes(4) + data[start + 26 : end]
        stream, number, checksum = data[start + 14 : start + 18], *struct.unpack_from("<II", data, start + 18)
        if _ogg_checksum(page) != checksum:
            raise BadMedia(f"corrupt OGG: the checksum of its page at byte {start} is wrong")
        if number != numbers.get(stream, number - 1) + 1:
            raise BadMedia(f"corrupt OGG: pages are missing before byte {start}")
        numbers[stream] = number
        start = end


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # the bits of each byte in reverse


def _ogg_checksum(page: bytes) -> int:
    """Compute a CRC-32 as Ogg has it: zlib's polynomial, but highest bits first and nothing inverted."""
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)


# ---------------------------------------------------------------------------------------------------------- warnings


_thread = threading.local()


class _ReadingThreadOnly(type):
    """Make a class a superclass of UserWarning, but only in a thread that is reading a file of a data set.

    Warning filters, those of `catch_warnings` too, hold for all threads, and headers are read in many.
    """

    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_thread, "reading", False) and issubclass(category, UserWarning)


class _DamagedMetadata(UserWarning, metaclass=_ReadingThreadOnly):
    pass


@contextmanager
def _raise_pillow_warnings() -> Iterator[None]:
    """Raise Pillow's warnings in this thread as errors, unless they are harmless."""
    if warnings.filters[0][2] is not _DamagedMetadata:  # other code may have prepended or reset filters since
        warnings.filterwarnings("error", f"(?!{HARMLESS})", _DamagedMetadata, r"PIL\.")
    _thread.reading = True
    try:
        yield
    finally:
        _thread.reading = False


# ------------------------------------------------------------------------------------------------------------ files


class _FileReader:
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


def _head(reader: _FileReader) -> bytes:
    """Read the first bytes of a file, which tell its format. Raises BadMedia for an empty file."""
    if not (head := reader.start(32)):
        raise BadMedia("an empty file (0 bytes)")
    return head


def _call_decoder(reader: _FileReader, kind: str, read: Callable[[_FileReader, str], Any]) -> Any:
    """Call `read` and turn every error into BadMedia, except I/O errors of the file itself."""
    try:
        with _raise_pillow_warnings():
            value = read(reader, kind)
    except UserError:
        raise
    except Exception as error:  # libraries raise nearly everything on bytes that are not what they should be
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
    if isinstance(error, Image.UnidentifiedImageError | soundfile.SoundFileError) and " object at " in text:
        return f"corrupt or truncated {kind}: its header cannot be read"
    return f"corrupt {kind}: {text or type(error).__name__}"
