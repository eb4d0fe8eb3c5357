"""Decode image files to pixels, and read their sizes from headers alone.

JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF and HEIC; the first frame or page. EXIF orientation is
applied, then Pillow's `convert("RGB")`, as in transformers' `load_image`. (So transparency is
dropped.) Grey of 16 bits becomes its high byte, as Pillow has 16-bit colours, where `convert` makes
white of all above 255. Faults that Pillow ignores are errors: damaged JPEG data, missing rows, and
metadata that it only warns of.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import BinaryIO

import numpy as np
import simplejpeg
from PIL import Image, features

from mmjax.config import MediaLimits
from mmjax.data.media import tiff
from mmjax.data.media.decode import FileReader, call_decoder, check_media_size, read_head
from mmjax.errors import BadMedia, UserError

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
# whose decoders need 20 bytes for each
MAX_PIXELS = {"WEBP": 50_000_000, "AVIF": 50_000_000, "HEIC": 50_000_000}
MAX_SCANS = 500  # of a JPEG, each of which passes over all of its pixels
_BRANDS = {"AVIF": AVIF_BRANDS, "HEIC": HEIF_BRANDS}
INFLATED = 1 << 22  # bytes of a PNG that are inflated at a time
BAND = 1024  # rows that are converted at a time
# struct formats of (width, height) in a header, for files that Pillow refuses because one of them
# is 0.
EXTENTS = {"PNG": ">16xII", "GIF": "<6xHH", "BMP": "<18xii"}
CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")  # chunks of a PNG
# PNG interlacing: first x, first y, step of x and of y of each of its seven passes.
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
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


def read_image_size(file: BinaryIO) -> tuple[int, int]:
    """Read (height, width) of an image, orientation applied, from the header of a seekable (best a buffered) file.

    Raises BadMedia for an unknown format, and for an image without pixels.
    """
    reader = FileReader(file)
    kind = _image_kind(reader)
    height, width = call_decoder(reader, kind, _stored_size)
    if min(height, width) < 1:
        raise BadMedia(f"an image of {height} x {width} pixels is empty")
    if height * width > MAX_PIXELS.get(kind, height * width):
        raise BadMedia(
            f"a {kind} of {height} x {width} pixels, more than {MAX_PIXELS[kind]:,} of them; write a JPEG"
        )
    return height, width


def decode_image(data: bytes, limits: MediaLimits = MediaLimits()) -> np.ndarray:
    """Decode an image file to pixels, uint8 `[height, width, 3]`, read only, of the size of `read_image_size`.

    Raises BadMedia as `read_image_size`, for a size beyond the limits, and for a truncated or
    corrupt file.
    """
    size = read_image_size(io.BytesIO(data))
    check_media_size("image", size, limits)
    reader = FileReader(io.BytesIO(data))
    pixels = call_decoder(reader, _image_kind(reader), _pixels)
    if pixels.shape[:2] != size:
        raise BadMedia(
            "it says only after its pixels that it lies on its side; write its EXIF before them"
        )
    return pixels


def image_kind(head: bytes) -> str | None:
    """Detect the format of an image from the first 32 bytes of its file; None where it is no image."""
    kind = next((kind for start, kind in IMAGE_STARTS.items() if head.startswith(start)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        # The main brand may be a general one, behind which compatible ones follow.
        brands = [head[8:12]] + [
            head[k : k + 4] for k in range(16, min(len(head), int.from_bytes(head[:4])), 4)
        ]
        if brands[0] in (b"mif1", b"msf1", *AVIF_BRANDS, *HEIF_BRANDS):
            return next((k for b in brands for k in ("AVIF", "HEIC") if b in _BRANDS[k]), None)
    return kind


def _image_kind(reader: FileReader) -> str:
    head = read_head(reader)
    if (kind := image_kind(head)) is None:
        raise BadMedia("no image of a known format (JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC)")
    if kind == "AVIF" and not features.check("avif"):
        raise UserError(
            "the data has AVIF images, which this Pillow cannot decode: pip install -U pillow"
        )
    if kind == "HEIC":
        _register_heif()
    if kind in EXTENTS and len(head) >= struct.calcsize(EXTENTS[kind]):
        width, height = struct.unpack_from(EXTENTS[kind], head)
        if width == 0 or height == 0:
            raise BadMedia(f"an image of {height} x {width} pixels is empty")
    return kind


def _stored_size(reader: FileReader, kind: str) -> tuple[int, int]:
    """Return (height, width) with the orientation applied."""
    if kind == "WEBP" and (size := _webp_size(reader)):
        return size
    with _open_image(reader, kind) as image:
        width, height = image.size
        # The base class's method: PNG's override decodes the whole image, to reach EXIF that may
        # come after it.
        orientation = Image.Image.getexif(image).get(ORIENTATION, 1)
        if kind == "TIFF":
            # as stored; Pillow may have applied the orientation to `size` already
            width = image.tag_v2[256]
            height = image.tag_v2[257]
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _webp_size(reader: FileReader) -> tuple[int, int] | None:
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


def _pixels(reader: FileReader, kind: str) -> np.ndarray:
    with tiff.lock if kind == "TIFF" else nullcontext(), _open_image(reader, kind) as image:
        if image.mode == "F":
            raise BadMedia(
                f"a {kind} of floats, whose values from 0 to 1 would all be black; write it in 8 bits"
            )
        if image.mode == "I" and kind != "PNG":
            raise BadMedia(f"a {kind} of 32-bit numbers; write it in 8 or 16 bits")
        if kind == "JPEG":
            return _jpeg_pixels(reader, image)
        if kind == "TIFF":
            reader.seek(0)
            tiff.check_tiff(reader.read())
        # Of a BMP, before Pillow fills its palette up to 256 colours.
        colours = (
            len(image.palette.palette) // len(image.palette.rawmode)
            if image.palette and kind == "BMP"
            else 256
        )
        image.load()
        if image.mode == "P" and image.getextrema()[1] >= colours:
            raise BadMedia(
                f"corrupt {kind}: it has pixels of a colour beyond the {colours} of its palette"
            )
        if kind == "PNG":
            # checks checksums: Pillow accepts any damage that still inflates
            chunks = list(_png_chunks(reader))
            names = [name for name, _ in chunks]
            _check_png_order(names)
            # Pillow silently leaves missing rows black. Inflating again is slow, so only if the
            # last row is black (or, interlaced, any row may be missing), or of an animation, of
            # which it reads no picture to its end.
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


def _jpeg_pixels(reader: FileReader, image: Image.Image) -> np.ndarray:
    """Decode to the same pixels as Pillow, but with libjpeg's warnings (damaged data) raised as errors."""
    reader.seek(0)
    data = reader.read()
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise BadMedia(f"a JPEG of more than {MAX_SCANS} scans")
    turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    if image.mode == "CMYK":  # simplejpeg checks the data, but only Pillow converts CMYK to RGB
        simplejpeg.decode_jpeg(data, "CMYK", strict=True)
        return _turned(_rgb(image), turn)
    return _turned(
        simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True), turn
    )


def _png_chunks(reader: FileReader) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of every chunk of a PNG up to IEND. Raises BadMedia where a checksum is wrong."""
    reader.seek(0)
    data = memoryview(reader.read())
    name = b""
    # behind the signature; a chunk is length (4 bytes), name (4), content, checksum of name and
    # content (4)
    start = 8
    while name != b"IEND":
        end = start + 8 + int.from_bytes(data[start : start + 4])
        name = bytes(data[start + 4 : start + 8])
        if len(data) < end + 4:
            raise BadMedia("truncated PNG: it ends without an end")
        if zlib.crc32(data[start + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise BadMedia(
                f"damaged PNG: the checksum of its {name.decode('latin-1')} chunk at byte {start} is wrong"
            )
        yield name, data[start + 8 : end]
        start = end + 4


def _check_png_order(names: Sequence[bytes]) -> None:
    """Raise BadMedia unless a PNG begins with its one header, and its pixels are in chunks that follow each other.

    A chunk whose name begins with a capital letter is needed to read the others: one that is not
    known is bad.
    """
    if unknown := [name for name in names if not name[0] & 0x20 and name not in CRITICAL]:
        raise BadMedia(
            f"corrupt PNG: it has a chunk {unknown[0].decode('latin-1')!r}, which no reader knows"
        )
    if names[0] != b"IHDR" or names.count(b"IHDR") > 1:
        raise BadMedia("corrupt PNG: it does not begin with its only IHDR chunk")
    first = names.index(b"IDAT") if b"IDAT" in names else 0
    if names.count(b"IDAT") != names[first : first + names.count(b"IDAT")].count(b"IDAT"):
        raise BadMedia("corrupt PNG: other chunks are between those of its pixels")


def _check_png_rows(chunks: Sequence[tuple[bytes, memoryview]], size: tuple[int, int]) -> None:
    """Raise BadMedia for a PNG with less pixel data than its (width, height) needs, or whose data has no end."""
    # IHDR: width (4 bytes), height (4), bit depth, color type, compression, filter, interlacing
    header = chunks[0][1]
    pixel_bits = header[8] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[header[9]]
    passes = ADAM7 if header[12] else ((0, 0, 1, 1),)
    extents = [
        (math.ceil((size[0] - x) / dx), math.ceil((size[1] - y) / dy)) for x, y, dx, dy in passes
    ]
    # Each row of each pass begins with a byte that names its filter.
    expected = sum(
        rows * (1 + math.ceil(columns * pixel_bits / 8))
        for columns, rows in extents
        if columns > 0 and rows > 0
    )
    inflate = zlib.decompressobj()
    actual = 0
    for packed in (content for name, content in chunks if name == b"IDAT"):
        while packed and actual <= expected and not inflate.eof:
            actual += len(inflate.decompress(packed, INFLATED))
            packed = inflate.unconsumed_tail
    if actual < expected:
        raise BadMedia(f"truncated PNG: it has {actual} of {expected} bytes of pixels")
    # the end, which has a checksum of the pixels, is there too
    if actual == expected and not inflate.eof:
        raise BadMedia("truncated PNG: its compressed pixels have no end")


def _open_image(reader: FileReader, kind: str) -> Image.Image:
    reader.seek(0)
    return Image.open(reader, formats=("HEIF" if kind == "HEIC" else kind,))


@cache
def _register_heif() -> None:
    """Let Pillow open HEIC. Raises UserError where pillow-heif is not installed."""
    try:
        import pillow_heif
    except ImportError:
        raise UserError(
            'the data has HEIC photos, which pillow-heif decodes: pip install "mmjax[heif]"'
        ) from None
    pillow_heif.register_heif_opener(thumbnails=False)
