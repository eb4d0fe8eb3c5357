"""Latents of images that a frozen VAE made once, by source: memory-mapped by data workers.

Of every latent the mean and the log variance are stored, before they are scaled, so that training
draws other latents of an image in every epoch, as the field does. Shards have consecutive samples
and are written whole or not at all, so that a killed command goes on where it was. Every image has
a checksum of its own, which is verified whenever it is
read: stores are too large to be hashed at every start.
"""

from __future__ import annotations

import fcntl
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.config import VaeLatents
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import hash_strings
from mmjax.disk import read_sealed, remove_path, write_sealed
from mmjax.errors import BadMedia, UserError
from mmjax.startup import activity

DESCRIPTION = "made_of.json"
NAMES = ("items", "bad", "reasons", "values")  # arrays of a shard
VALUES = np.dtype(np.float16)  # more exact than bfloat16, and means are within 100
# Where the mean of an image begins in the shard's values, behind which its log variance lies; and
# their checksum. Images are numbered among those of their sample that the generator makes, whatever
# other modules see of it.
ITEM = np.dtype(
    [
        ("sample", np.int64),
        ("image", np.int64),
        ("start", np.int64),
        ("shape", np.int64, 3),
        ("checksum", np.int64),
    ]
)
BAD = np.dtype([("sample", np.int64), ("retry", np.bool_)])

_VERSION = "1"


class Moments(NamedTuple):
    """Mean and log variance of an image's latents `[h, w, c]`, not scaled."""

    mean: np.ndarray
    log_variance: np.ndarray

    def draw(self, latents: VaeLatents, rng: np.random.Generator | None = None) -> np.ndarray:
        """Draw scaled latents, float32 `[h, w, c]`; without a random generator return their mean, scaled."""
        drawn = self.mean.astype(np.float32)
        if rng is not None:
            deviation = np.exp(0.5 * self.log_variance.astype(np.float32))
            drawn = drawn + deviation * rng.standard_normal(drawn.shape, np.float32)
        return ((drawn - latents.shift) * latents.scale).astype(np.float32)


@dataclass(frozen=True)
class BadImages:
    """A sample whose images have no latents, and why."""

    sample: int
    reason: str
    retry: bool = False  # a file could not be read, which may pass


@dataclass(frozen=True)
class MadeOf:
    """Everything that the latents of a source depend on, and for whom they are."""

    source: str  # name of the source and its split
    generator: str  # name of the generator
    records: str  # fingerprint of the source
    images: str  # how images are prepared
    vae: str  # fingerprint of the VAE

    def folder(self, cache: Path) -> Path:
        """Return the folder of these latents in a cache; the names of source and generator do not count."""
        return cache / "latents" / hash_strings(self.records, self.images, self.vae, _VERSION)

    def others(self, cache: Path) -> list[tuple[str, Path]]:
        """List what has changed since each other store of this source and generator was made, and their folders."""
        subjects = {"records": "the data", "images": "the preparation of images", "vae": "the VAE"}
        stores = []
        for path in sorted((cache / "latents").glob(f"*/{DESCRIPTION}")):
            record = read_sealed(path) or {}
            if (record.get("source"), record.get("generator")) == (self.source, self.generator):
                changes = [
                    what for key, what in subjects.items() if record.get(key) != getattr(self, key)
                ]
                stores += [(" and ".join(changes), path.parent)] if changes else []
        return stores


class Contents(NamedTuple):
    """Everything that a store holds."""

    images: int
    size: int  # bytes
    bad: list[BadImages]


@dataclass(frozen=True)
class LatentStore:
    """A folder of the latents of one source's images, to which shards are added."""

    folder: Path
    samples: int  # of the source

    @contextmanager
    def being_made(self, made_of: MadeOf) -> Iterator[None]:
        """Hold the store for this process to add shards. Raises UserError where another one does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(self.folder / DESCRIPTION, asdict(made_of))
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written: {error.strerror or error}; make room there, or make it writable"
            ) from None
        with lock:
            try:
                # Released when the file is closed, also by the end of the process.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"{self.folder}: another process makes these latents; wait for it, or end it"
                ) from None
            yield

    def remaining(self) -> list[range]:
        """Return the samples without a shard, after removing shards that are damaged or lack what could not be read.

        All shards are read and verified.
        """
        # of a process that was killed
        for path in [*self.folder.glob("*.partial"), *self.folder.glob("*.old")]:
            remove_path(path)
        listed = shards(self.folder)
        sound = []
        with activity("verifying latents", len(listed)) as verified:
            for verified.done, samples in enumerate(listed, start=1):
                path = shard_folder(self.folder, samples)
                arrays = open_arrays_if_sound(path, NAMES)
                if arrays is None or arrays["bad"]["retry"].any():
                    remove_path(path)
                else:
                    sound.append(samples)
        return gaps(sound, self.samples)

    def write(
        self, samples: range, images: Mapping[tuple[int, int], Moments], bad: Sequence[BadImages]
    ) -> None:
        """Write the shard of these samples. Raises UserError where it can't be written.

        images: latents by sample and image.
        """
        items = np.zeros(len(images), ITEM)
        values = [np.empty(0, VALUES)]
        start = 0
        for item, (sample, image) in zip(items, sorted(images), strict=True):
            moments = images[sample, image]
            values.append(np.concatenate([part.astype(VALUES).ravel() for part in moments]))
            place = sample, image, start, moments.mean.shape
            item["sample"], item["image"], item["start"], item["shape"] = place
            item["checksum"] = checksum(item, values[-1])
            start += len(values[-1])
        arrays = {
            "items": items,
            "bad": np.array([(entry.sample, entry.retry) for entry in bad], BAD),
            "reasons": np.array([entry.reason for entry in bad], np.str_),
            "values": np.concatenate(values),
        }
        save_arrays(shard_folder(self.folder, samples), arrays)

    def contents(self) -> Contents:
        """Count what has been written, and list the samples without latents."""
        images = 0
        size = 0
        bad = []
        for samples in shards(self.folder):
            path = shard_folder(self.folder, samples)
            # values may be hundreds of gigabytes
            arrays = open_arrays(path, ("items", "bad", "reasons"))
            images += len(arrays["items"])
            size += sum(file.stat().st_size for file in path.iterdir())
            reasons = zip(arrays["bad"].tolist(), arrays["reasons"].tolist(), strict=True)
            bad += [BadImages(sample, reason, retry) for (sample, retry), reason in reasons]
        return Contents(images, size, bad)


class StoredLatents:
    """The latents of one source's images, read one by one."""

    def __init__(self, folder: Path, samples: int, what: str) -> None:
        """Open the latents of a source with so many samples. Raises UserError, about `what`, where some are missing."""
        self._folder = folder
        self._shards = shards(folder)
        self._starts = [shard.start for shard in self._shards]
        self._opened: dict[range, Mapping[str, np.ndarray]] = {}
        if missing := sum(map(len, gaps(self._shards, samples))):
            raise UserError(
                f"{what} are missing for {missing:,} of {samples:,} samples (in {folder}); make them with "
                "python -m mmjax.index CONFIG --latents"
            )

    def moments(self, sample: int, image: int) -> Moments:
        """Return the moments of a sample's image, float16. Raises BadMedia where there are none, or damaged ones.

        image: its number among those of the sample that the generator makes.
        """
        shard = self._shards[bisect_right(self._starts, sample) - 1]
        arrays = self._arrays(shard)
        items = arrays["items"]
        first, last = np.searchsorted(arrays["samples"], [sample, sample + 1])
        item = next((item for item in items[first:last] if item["image"] == image), None)
        if item is None:
            reasons = arrays["reasons"][arrays["bad"]["sample"] == sample]
            raise BadMedia(
                str(reasons[0]) if len(reasons) else f"there are no latents of its image {image}"
            )
        try:
            size = math.prod(item["shape"].tolist())
            values = np.asarray(arrays["values"][item["start"] : item["start"] + 2 * size])
            if checksum(item, values) == item["checksum"]:
                return Moments._make(values.reshape(2, *item["shape"]))
        except (OverflowError, ValueError):  # where its place is damaged
            pass
        raise BadMedia(
            f"its latents in {shard_folder(self._folder, shard)} are damaged; run python -m mmjax.index CONFIG "
            "--latents, which makes them again"
        )

    def _arrays(self, shard: range) -> Mapping[str, np.ndarray]:
        if shard not in self._opened:
            path = shard_folder(self._folder, shard)
            try:
                arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in NAMES}
                # Copied out: searching a field of the items would copy the whole field each time.
                self._opened[shard] = arrays | {
                    "samples": np.ascontiguousarray(arrays["items"]["sample"])
                }
            # NumPy's parser raises nearly anything on a damaged file.
            except Exception as error:
                raise BadMedia(
                    f"its latents in {path} cannot be read: {type(error).__name__}"
                ) from None
        return self._opened[shard]


def shard_folder(folder: Path, samples: range) -> Path:
    """Return the folder of the shard of these samples."""
    return folder / f"{samples.start:010}-{samples.stop:010}"


def shards(folder: Path) -> list[range]:
    """List the samples of every shard in order, damaged ones included."""
    ranges = []
    for path in sorted(folder.glob("*-*")):
        start, _, stop = path.name.partition("-")
        if start.isdigit() and stop.isdigit():
            ranges.append(range(int(start), int(stop)))
    return ranges


def gaps(shards: Sequence[range], samples: int) -> list[range]:
    """Return the samples between, before and behind these shards, which are in order."""
    ends = [0, *(shard.stop for shard in shards)]
    starts = [*(shard.start for shard in shards), samples]
    return [range(stop, start) for stop, start in zip(ends, starts, strict=True) if start > stop]


def checksum(item: np.void, values: np.ndarray) -> int:
    """Compute the checksum of an image's values and of where they are."""
    place = [int(item[name]) for name in ("sample", "image", "start")] + item["shape"].tolist()
    return zlib.crc32(values.tobytes(), zlib.crc32(repr(place).encode()))
