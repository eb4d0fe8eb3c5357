"""Image files become the pixels that transformers' load_image gives, their headers tell the size, and bad ones why."""

from __future__ import annotations

import io
import math
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from image_shapes import picture
from PIL import Image, ImageOps
from transformers.image_utils import load_image

from mmjax.config import MediaLimits
from mmjax.data.media import decode_images
from mmjax.data.media.decode import check_media_size
from mmjax.data.media.decode_images import ADAM7, decode_image, read_image_size
from mmjax.errors import BadMedia, UserError

HEIGHT, WIDTH = 61, 90
LOSSLESS = ("PNG", "GIF", "BMP", "TIFF")


class Counting(io.BytesIO):
    """A file that counts the bytes read from it."""

    taken = 0

    def read(self, count: int | None = -1) -> bytes:
        got = super().read(count)
        self.taken += len(got)
        return got


def image(mode: str = "RGB") -> Image.Image:
    """A picture of one of Pillow's modes."""
    if mode == "I;16":
        return Image.fromarray(picture(HEIGHT, WIDTH)[..., 0].astype(np.uint16) * 7)
    if mode == "RGBA":
        return Image.fromarray(
            np.concatenate([picture(HEIGHT, WIDTH), picture(HEIGHT, WIDTH)[..., :1]], axis=2)
        )
    if mode == "LA":
        return image("RGBA").convert("LA")
    return Image.fromarray(picture(HEIGHT, WIDTH)).convert(mode)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def turned(orientation: int, format: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image(), format, exif=exif)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def check_as_transformers(data: bytes, folder) -> None:
    path = folder / "image"
    path.write_bytes(data)
    expected = np.asarray(load_image(str(path)))
    made = decode_image(data)
    assert made.dtype == np.uint8
    np.testing.assert_array_equal(made, expected)
    assert read_image_size(io.BytesIO(data)) == expected.shape[:2]


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
        *(("PNG", mode) for mode in ("RGB", "L", "1", "P", "RGBA", "LA")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("GIF", mode) for mode in ("P", "L", "1")),
        *(("BMP", mode) for mode in ("RGB", "L", "1", "P")),
        *(("TIFF", mode) for mode in ("RGB", "L", "1", "P", "RGBA", "CMYK")),
    ],
)
def test_every_mode_has_the_pixels_of_transformers(format, mode, tmp_path):
    check_as_transformers(encoded(image(mode), format), tmp_path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_as_exif_says(format, orientation, tmp_path):
    data = turned(orientation, format)
    check_as_transformers(data, tmp_path)
    assert decode_image(data).shape[:2] == ((WIDTH, HEIGHT) if orientation > 4 else (HEIGHT, WIDTH))


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {"progressive": True}),
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"save_all": True, "append_images": [Image.new("RGB", (WIDTH, HEIGHT), "red")]}),
        ("GIF", {"save_all": True, "append_images": [Image.new("RGB", (WIDTH, HEIGHT), "red")]}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("MPO", {"save_all": True, "append_images": [Image.new("RGB", (WIDTH, HEIGHT), "red")]}),
    ],
)
def test_variants_of_a_format_and_first_frames_have_the_pixels_of_transformers(
    format, options, tmp_path
):
    check_as_transformers(encoded(image(), format, **options), tmp_path)


def test_an_orientation_in_xmp_counts_too(tmp_path):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for data in (encoded(image(), "JPEG", xmp=xmp), encoded(image(), "WEBP", xmp=xmp)):
        check_as_transformers(data, tmp_path)
        assert decode_image(data).shape == (WIDTH, HEIGHT, 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_size_costs_less_than_two_kilobytes_however_large_the_file(format):
    large = Image.fromarray(picture(700, 900))
    file = Counting(encoded(large, format))
    assert len(file.getvalue()) > 40_000
    assert read_image_size(file) == (700, 900)
    assert file.taken < 2048


@pytest.mark.exhaustive
def test_one_core_reads_the_sizes_of_two_thousand_files_in_a_second(tmp_path):
    data = turned(6, "JPEG")
    paths = [tmp_path / f"{number}.jpg" for number in range(400)]
    for path in paths:
        path.write_bytes(data)
    started = time.process_time()
    for path in paths:
        with path.open("rb") as file:
            assert read_image_size(file) == (WIDTH, HEIGHT)
    assert time.process_time() - started < len(paths) / 2000


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_cut_file_is_bad_or_whole_never_half_an_image(format):
    data = encoded(image(), format)
    whole, reasons = decode_image(data), set()
    for cut in [*range(1, 60), *np.linspace(60, len(data) - 1, 60).astype(int)]:
        try:
            made = decode_image(data[:cut])
        except BadMedia as error:
            reasons.add(str(error))
        else:  # only what follows the pixels was cut off
            np.testing.assert_array_equal(made, whole)
            assert cut > 0.9 * len(data)
    assert reasons
    assert not any("\n" in reason or " at 0x" in reason for reason in reasons)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_bytes_that_were_overwritten_never_end_in_anything_but_an_image_or_bad_media(format):
    data, rng = encoded(image(), format), np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            broken[at] = rng.integers(256)
        try:
            made = decode_image(bytes(broken))
        except BadMedia:
            continue
        assert made.shape[:2] == read_image_size(io.BytesIO(bytes(broken)))


def test_a_changed_byte_of_a_png_is_found():
    data = bytearray(encoded(image(), "PNG"))
    data[len(data) // 2] ^= 1
    with pytest.raises(BadMedia, match=r"^(corrupt|truncated) PNG"):
        decode_image(bytes(data))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("interlaced", [False, True])
def test_a_png_that_lacks_rows_is_refused_and_a_black_one_is_not(mode, interlaced):
    """Its stream and its checksums are whole: Pillow leaves the missing rows black, without a word."""
    data = encoded(Image.new(mode, (WIDTH, HEIGHT)), "PNG")
    head = bytearray(data[: data.index(b"IDAT") - 4])
    head[28] = interlaced
    head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
    bits = head[24] * {"LA": 2, "RGB": 3, "RGBA": 4}.get(mode, 1)
    rows = [
        bytes(1 + math.ceil(math.ceil((WIDTH - x) / dx) * bits / 8))
        for x, y, dx, dy in (ADAM7 if interlaced else [(0, 0, 1, 1)])
        for _ in range(y, HEIGHT, dy)
    ]

    def with_rows(count: int) -> bytes:
        body = png_chunk(b"IDAT", zlib.compress(b"".join(rows[:count])))
        return bytes(head) + body + png_chunk(b"IEND", b"")

    assert not decode_image(with_rows(len(rows))).any()
    for count in (len(rows) // 2, len(rows) - 1):
        with pytest.raises(BadMedia, match="truncated PNG"):
            decode_image(with_rows(count))


def test_a_png_whose_checksums_are_wrong_is_refused_though_all_its_rows_can_be_inflated():
    """Pillow stops where it has its rows: the checksum behind them goes unread."""
    rows = b"".join(b"\0" + bytes([200] * 12) for _ in range(4))
    stream, kept = zlib.compress(rows, 0), io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(kept, "PNG")
    header = kept.getvalue()[: 8 + 25]

    pixels, end = png_chunk(b"IDAT", stream), png_chunk(b"IEND", b"")
    assert (decode_image(header + pixels + end) == 200).all()
    damaged = header + pixels[:-4] + bytes(4) + end
    assert np.asarray(Image.open(io.BytesIO(damaged))).all()
    with pytest.raises(
        BadMedia, match="damaged PNG: the checksum of its IDAT chunk at byte 33 is wrong"
    ):
        decode_image(damaged)
    with pytest.raises(BadMedia, match="truncated PNG"):
        decode_image(header + pixels)


def tag(number: int, kind: int, count: int, value: int) -> bytes:
    return struct.pack("<HHII", number, kind, count, value)


def with_exif(*tags: bytes, format: str = "JPEG") -> bytes:
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(tags) + bytes(4)
    return encoded(image(), format, exif=exif)


def with_a_cut_tag() -> bytes:
    """A TIFF whose description, its last tag's value, is said to be much longer than the file."""
    data = encoded(image(), "TIFF", description="A cat.")
    at = data.index(struct.pack("<HH", 270, 2))
    return data[: at + 4] + struct.pack("<I", 1 << 20) + data[at + 8 :]


TURN_CUT_OFF = tag(0x010F, 2, 5000, 26), tag(0x0112, 3, 1, 6)


@pytest.mark.parametrize(
    "data",
    [with_exif(*TURN_CUT_OFF), with_exif(*TURN_CUT_OFF, format="PNG"), with_a_cut_tag()],
    ids=["JPEG", "PNG", "TIFF"],
)
def test_metadata_that_pillow_warns_of_make_an_image_bad_in_whatever_thread_it_is_read(data):
    """With an orientation that cannot be read an image would lie on its side without a word."""

    def reason(_: int) -> str:
        with pytest.raises(
            BadMedia, match=r"^a \w+ with damaged metadata \(.*\); write it again"
        ) as raised:
            decode_image(data)
        return str(raised.value)

    with ThreadPoolExecutor(4) as pool:
        (told,) = set(pool.map(reason, range(20)))
    assert "\n" not in told


def test_what_pillow_advises_and_what_others_read_with_it_is_no_error():
    palette = image("P")
    data = encoded(palette, "PNG", transparency=bytes(range(200)))
    assert decode_image(data).shape == (HEIGHT, WIDTH, 3)
    two_for_one = with_exif(tag(0x0112, 3, 2, 6 | 6 << 16))
    assert decode_image(two_for_one).shape == (WIDTH, HEIGHT, 3)
    with pytest.warns(UserWarning, match="EXIF|tag"):
        Image.open(io.BytesIO(with_exif(*TURN_CUT_OFF))).getexif()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_libjpeg_warns_of_is_refused(mode, progressive):
    data = encoded(image(mode), "JPEG", progressive=progressive)
    start = data.index(b"\xff\xda") + 200
    for damaged in (
        data[:start] + bytes(300) + data[start + 300 :],
        data[:start] + data[start + 300 :],
    ):
        Image.open(io.BytesIO(damaged)).load()  # Pillow makes an image of it
        with pytest.raises(
            BadMedia, match=r"corrupt JPEG: .*(Corrupt JPEG data|premature end|Premature)"
        ):
            decode_image(damaged)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_16_bits_becomes_its_high_byte_where_transformers_makes_white_of_it(
    format, tmp_path
):
    grey = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    path = tmp_path / "image"
    path.write_bytes(encoded(Image.fromarray(grey), format))
    np.testing.assert_array_equal(
        decode_image(path.read_bytes()), np.repeat(grey[..., None] >> 8, 3, axis=2)
    )
    assert (np.asarray(load_image(str(path)))[..., 0] == np.minimum(grey, 255)).all()


def photo() -> Image.Image:
    """A smooth picture, of which lossy formats keep much."""
    y, x = np.mgrid[0:61, 0:90]
    return Image.fromarray(np.stack([2 * x, 3 * y, x + y], -1).astype(np.uint8))


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_photos_of_phones_are_read_upright(format, orientation, tmp_path):
    if format == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert read_image_size(io.BytesIO(data)) == expected.shape[:2]
    np.testing.assert_array_equal(decode_image(data), expected)
    for cut in range(40, len(data), 97):
        with pytest.raises(BadMedia):
            decode_image(data[:cut])


def test_without_pillow_heif_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decode_images._register_heif.cache_clear()
    with pytest.raises(
        UserError, match=r'the data has HEIC photos, .*: pip install "mmjax\[heif\]"'
    ):
        read_image_size(io.BytesIO(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)))
    decode_images._register_heif.cache_clear()


def tiffs() -> dict[str, bytes]:
    one_bit = photo().convert("1")
    kinds = {
        "jpeg": photo(),
        "tiff_lzw": photo(),
        "tiff_deflate": photo(),
        "group4": one_bit,
        "packbits": one_bit,
    }
    return {kind: encoded(image, "TIFF", compression=kind) for kind, image in kinds.items()}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    spoiled = bytearray(data)
    at = int(rng.integers(8, len(data) - 64))
    spoiled[at : at + 20] = rng.bytes(20)
    return bytes(spoiled)


def test_a_tiff_that_libtiff_complains_of_is_refused_and_nothing_comes_to_the_screen(capfd):
    """Of JPEG and fax Pillow raises nothing, and prints some of what libtiff says."""
    rng = np.random.default_rng(0)
    reasons = []
    for data in tiffs().values():
        decode_image(data)
        for _ in range(12):
            try:
                decode_image(damaged(data, rng))
            except BadMedia as error:
                reasons.append(str(error))
    assert any("JPEG data" in reason for reason in reasons)
    assert any("Premature EOL" in reason or "Bad code word" in reason for reason in reasons)
    assert capfd.readouterr() == ("", "")


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("tiffcp"), reason="needs libtiff-tools")
def test_tiffs_are_refused_exactly_where_tiffcp_complains(tmp_path):
    rng = np.random.default_rng(1)
    for kind, data in tiffs().items():
        for _ in range(60):
            spoiled = damaged(data, rng)
            (tmp_path / "a.tif").write_bytes(spoiled)
            theirs = subprocess.run(
                ["tiffcp", tmp_path / "a.tif", tmp_path / "b.tif"], capture_output=True
            )
            refusal = ""
            try:
                decode_image(spoiled)
            except BadMedia as error:
                refusal = str(error)
            assert bool(theirs.stderr) == bool(refusal), (kind, theirs.stderr, refusal)


def test_a_png_that_inflates_to_more_than_its_rows_is_not_inflated_whole():
    header = struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, 0)
    bomb = png_chunk(b"IDAT", zlib.compress(bytes(100_000_000), 9))
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + bomb + png_chunk(b"IEND", b"")
    tracemalloc.start()
    decode_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_jpeg_of_a_thousand_scans_is_refused():
    data = encoded(photo(), "JPEG", progressive=True)
    with pytest.raises(BadMedia, match="a JPEG of more than 500 scans"):
        decode_image(data[:-2] + 500 * b"\xff\xda\0\x0c\x03" + data[-2:])


def test_an_image_of_floats_is_refused():
    data = encoded(
        Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)), "TIFF"
    )
    with pytest.raises(
        BadMedia, match="a TIFF of floats, whose values from 0 to 1 would all be black"
    ):
        decode_image(data)


def test_what_is_no_image_says_so():
    for data in (
        b"<html>not found</html>",
        b"\0" * 100,
        b"RIFF0000WAVEfmt ",
        b"%PDF-1.7",
        b"\x80\x04cposix\nsystem\n",
    ):
        with pytest.raises(BadMedia, match="no image of a known format"):
            read_image_size(io.BytesIO(data))
    with pytest.raises(BadMedia, match=r"an empty file \(0 bytes\)"):
        decode_image(b"")


@pytest.mark.parametrize(("format", "at", "size"), [("PNG", 16, 8), ("GIF", 6, 4), ("BMP", 18, 8)])
def test_an_image_without_pixels_says_so(format, at, size):
    data = encoded(image("P"), format)
    with pytest.raises(BadMedia, match="an image of 0 x 0 pixels is empty"):
        read_image_size(io.BytesIO(data[:at] + bytes(size) + data[at + size :]))


def test_a_decompression_bomb_is_refused_by_its_header_alone():
    header = struct.pack(">IIBBBBB", 10_000, 10_001, 1, 0, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", b"nothing that can be inflated")
    )
    with pytest.raises(
        BadMedia, match="10001 x 10000 pixels has more than 100000000 of them: a decompression bomb"
    ):
        decode_image(data)
    assert read_image_size(io.BytesIO(data)) == (10_001, 10_000)
    with pytest.raises(BadMedia) as permitted:
        decode_image(data, MediaLimits(pixels=200_000_000))
    assert "bomb" not in str(permitted.value)


@pytest.mark.parametrize(
    ("size", "limits", "reason"),
    [
        ((1, 5000), MediaLimits(), "5000 x 1 pixels: one side is more than 200 times the other"),
        ((5000, 1), MediaLimits(), "1 x 5000 pixels: one side is more than 200 times the other"),
        ((7, 9), MediaLimits(min_side=8), "9 x 7 pixels has a side of less than 8"),
        ((7, 90), MediaLimits(max_side=80), "90 x 7 pixels has a side of more than 80"),
        ((50, 50), MediaLimits(pixels=2499), "50 x 50 pixels has more than 2499 of them"),
    ],
)
def test_sizes_beyond_the_limits_say_which(size, limits, reason):
    data = encoded(Image.new("RGB", size), "PNG")
    with pytest.raises(BadMedia, match=reason):
        decode_image(data, limits)
    with pytest.raises(BadMedia, match=reason):
        check_media_size("image", read_image_size(io.BytesIO(data)), limits)


def test_exif_after_the_pixels_may_turn_an_image_over_but_not_on_its_side(tmp_path):
    plain, end = encoded(image(), "PNG"), png_chunk(b"IEND", b"")
    assert plain.endswith(end)
    for orientation, message in ((3, None), (6, "only after its pixels that it lies on its side")):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = plain.removesuffix(end) + png_chunk(b"eXIf", exif.tobytes()[6:]) + end
        if message is None:
            check_as_transformers(data, tmp_path)
            continue
        with pytest.raises(BadMedia, match=message):
            decode_image(data)


def test_an_error_of_the_file_itself_is_no_bad_media():
    class Lost(io.BytesIO):
        good, reads = 0, 0

        def read(self, count: int | None = -1) -> bytes:
            self.reads += 1
            if self.reads > self.good:
                raise ConnectionResetError("lost")
            return super().read(count)

    for format, good in (("JPEG", 2), ("PNG", 2), ("WEBP", 1), ("TIFF", 0)):
        Lost.good = good
        with pytest.raises(ConnectionResetError, match="lost"):
            read_image_size(Lost(encoded(image(), format)))


def test_a_png_whose_chunks_are_out_of_order_and_a_bmp_of_colours_that_it_lacks_are_bad():
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
    packed = zlib.compress(bytes([0, 9, 9, 9, 9]) * 4)
    text, end = png_chunk(b"tEXt", b"a\0b"), png_chunk(b"IEND", b"")
    halves = png_chunk(b"IDAT", packed[:6]), png_chunk(b"IDAT", packed[6:])
    start = b"\x89PNG\r\n\x1a\n"
    assert (decode_image(start + header + text + b"".join(halves) + end) == 9).all()
    with pytest.raises(BadMedia, match="it does not begin with its only IHDR chunk"):
        decode_image(start + text + header + b"".join(halves) + end)
    with pytest.raises(BadMedia, match="other chunks are between those of its pixels"):
        decode_image(start + header + b"".join(halves) + text + png_chunk(b"IDAT", b"x") + end)
    with pytest.raises(BadMedia, match="it has a chunk 'QRST', which no reader knows"):
        decode_image(start + header + png_chunk(b"QRST", b"") + b"".join(halves) + end)
    palette = b"".join(bytes((k, 0, 0, 0)) for k in range(3))
    sizes = struct.pack("<IiiHHIIiiII", 40, 4, 1, 1, 8, 0, 4, 0, 0, 3, 0)
    body = sizes + palette
    for pixels, message in (
        (b"\0\1\2\2", None),
        (b"\0\1\2\3", "a colour beyond the 3 of its palette"),
    ):
        data = struct.pack("<2sIHHI", b"BM", 18 + len(body), 0, 0, 14 + len(body)) + body + pixels
        with pytest.raises(BadMedia, match=message) if message else nullcontext():
            decode_image(data)


@pytest.mark.parametrize(
    "spoiled", ["pixels that do not go with their checksum", "half of the pixels", "no end"]
)
def test_the_pixels_of_an_animated_png_are_whole_though_pillow_reads_none_to_its_end(
    spoiled,
) -> None:
    noise = [
        Image.fromarray(np.random.default_rng(k).integers(1, 256, (24, 32, 3), np.uint8))
        for k in range(2)
    ]
    file = io.BytesIO()
    noise[0].save(file, "PNG", save_all=True, append_images=noise[1:])
    whole = file.getvalue()
    assert np.array_equal(decode_image(whole), np.asarray(noise[0]))
    start = whole.index(b"IDAT")
    end = start + 4 + int.from_bytes(whole[start - 4 : start])
    packed = whole[start + 4 : end]
    pixels = zlib.decompress(packed)
    packed = {
        "half of the pixels": zlib.compress(pixels[: len(pixels) // 2]),
        "no end": packed[:-4],
    }.get(spoiled, zlib.compress(pixels[:-1] + b"\0")[:-4] + packed[-4:])
    chunk = b"IDAT" + packed
    head = len(packed).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    with pytest.raises(BadMedia, match=r"truncated PNG|incorrect data check|broken data stream"):
        decode_image(whole[: start - 4] + head + whole[end + 4 :])
