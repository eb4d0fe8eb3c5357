"""A process that reads stays below 1.5 GB, whatever a file of a few megabytes unpacks to."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
from PIL import Image

LIMIT = 1_500_000_000  # bytes
GIB = 1 << 30

# Reads what is at a path, says what became of it, and ends with the peak of its memory in kB.
READ = """
import sys
from pathlib import Path
from mmjax.config import ParquetSource, WebDatasetSource
from mmjax.data.media.decode_clips import decode_clip
from mmjax.data.media.decode_images import decode_image
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES
from mmjax.data.storage.archives import MediaFolder
kind, path, cache = sys.argv[1], sys.argv[2], Path(sys.argv[3])
try:
    if kind == "image":
        decode_image(Path(path).read_bytes())
    elif kind == "clip":
        decode_clip(Path(path).read_bytes(), 16_000)
    elif kind == "archive":
        MediaFolder(path, "refuse", cache).find("a.png").read()
    else:
        parquet = ParquetSource(path, question="q", answer="a", images="i")
        source = parquet if kind == "parquet" else WebDatasetSource(path, window=4)
        records = open_conversations(source, "train", cache, "data.sources.mine", 32.0)
        facts = read_facts(records, PROBES, cache)
        print(facts.reason)
        records.conversation(0)
except Exception as error:
    print(type(error).__name__, str(error)[:300])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def compressed_shard(path: Path) -> None:
    """Four members of 1 GiB."""
    with (
        gzip.open(path, "wb", compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name in ("0.jpg", "0.txt", "1.mp4", "1.json"):
            member = tarfile.TarInfo(name)
            member.size = GIB
            archive.addfile(member, io.BufferedReader(Zeros()))


class Zeros(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def many_members(path: Path) -> None:
    """3 million empty members in a few MB."""
    header = tarfile.TarInfo("a.txt").tobuf()
    with gzip.open(path, "wb", compresslevel=1) as packed:
        for _ in range(3000):
            packed.write(header * 1000)


def zip_of_one(path: Path) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.png", "w") as member,
    ):
        for _ in range(500):
            member.write(bytes(1_000_000))


def flac(path: Path) -> None:
    """20 minutes of 8 channels at 192 kHz: 7 GB."""
    with soundfile.SoundFile(path, "w", 192_000, 8, format="FLAC") as clip:
        for _ in range(1200):
            clip.write(np.zeros((192_000, 8), np.int16))


def dictionary(path: Path) -> None:
    indices = pyarrow.array(np.zeros(100_000, np.int32))
    text = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 1_000_000]))
    image = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([b"x" * 1_000_000]))
    pyarrow.parquet.write_table(
        pyarrow.table({"q": text[:300], "a": text[:300], "i": image[:300]}), path
    )


def picture(kind: str, **options: object) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        pixels = np.zeros((9990, 10_010, 3), np.uint8)
        pixels[::7] = 90
        image = Image.fromarray(pixels)
        (image.convert("CMYK") if "cmyk" in options else image).save(path, kind, **options)

    return save


def text_chunk(path: Path) -> None:
    """A PNG whose text unpacks to 1 GB."""
    file = io.BytesIO()
    Image.new("RGB", (10, 10)).save(file, "PNG")
    data = file.getvalue()
    pack = zlib.compressobj(9)
    body = (
        b"zTXtComment\0\0"
        + b"".join(pack.compress(bytes(1_000_000)) for _ in range(1000))
        + pack.flush()
    )
    chunk = (len(body) - 4).to_bytes(4) + body + zlib.crc32(body).to_bytes(4)
    path.write_bytes(data[:33] + chunk + data[33:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "name", "write"),
    [
        ("shard", "a.tar.gz", compressed_shard),
        ("shard", "b.tar.gz", many_members),
        ("archive", "a.zip", zip_of_one),
        ("clip", "a.flac", flac),
        ("parquet", "a.parquet", dictionary),
        ("image", "a.png", picture("PNG", compress_level=1)),
        ("image", "a.jpg", picture("JPEG", progressive=True, subsampling=0)),
        ("image", "b.jpg", picture("JPEG", cmyk=True)),
        ("image", "a.tif", picture("TIFF", compression="tiff_deflate")),
        ("image", "b.png", text_chunk),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_that_reads_stays_below_its_bound(kind, name, write, tmp_path: Path) -> None:
    write(tmp_path / name)
    command = [sys.executable, "-c", READ, kind, str(tmp_path / name), str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    *said, peak = ended.stdout.splitlines()
    assert int(peak) * 1024 < LIMIT, said
