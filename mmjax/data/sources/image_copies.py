"""Write copies of a data set's images as small as its model uses them, so that large photos are decoded once.

Copies have the names that the records have for the images, so that the records are those of the
copies too. They are upright; an image that is no larger than what is used is copied as it is.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mmjax.config import Filter, MediaLimits
from mmjax.data.media.decode_images import decode_image
from mmjax.data.media.image_transforms import LazyImage, Size, encode_image, smaller_size
from mmjax.data.sample import BadSample
from mmjax.data.sources.chat_files import ChatFiles
from mmjax.data.sources.processors import ImageProcessor
from mmjax.data.storage.files import FileRef, LocalFile, hash_strings, is_url
from mmjax.disk import atomic_write, read_json
from mmjax.errors import BadMedia, UserError

MADE_FOR = "copies.json"  # in the folder: what the copies are made for
LOSSLESS = (".png", ".bmp", ".gif", ".tif", ".tiff")  # names whose copies are
_VERSION = "1"


class Copy(NamedTuple):
    """The outcome for one image."""

    name: str
    original_bytes: int  # bytes
    copy_bytes: int  # bytes; 0 where there is no copy
    state: str  # shrunk, as it was, there already, bad
    reason: str = ""  # why it is bad


@dataclass(frozen=True)
class CopyMaker:
    """Writes copies into a folder, for these image encoders and limits."""

    folder: Path
    processors: Sequence[ImageProcessor]
    limits: MediaLimits

    @property
    def filter(self) -> Filter:
        """Return the filter of resizing, which the preparation would use."""
        return getattr(self.processors[0].encoder.images, "filter", "bicubic")

    def prepare_folder(self) -> None:
        """Make the folder, or go on with it. Raises UserError where its copies are made for other encoders."""
        made_for = hash_strings(_VERSION, *(repr(p.encoder.images) for p in self.processors))
        path = self.folder / MADE_FOR
        known = read_json(path, {}).get("made_for")
        if known is None and self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"--shrink {self.folder}: it holds other files; name a new folder")
        if known not in (None, made_for):
            raise UserError(
                f"--shrink {self.folder}: its copies are for a model that prepares images in another way"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial_file:
            partial_file.write_text(f'{{"made_for": "{made_for}"}}\n')

    def copies(self, images: Mapping[str, FileRef], multiple: bool) -> Iterator[Copy]:
        """Write copies of files by the names that records have for them, on all cores, unless they are there.

        multiple: whether some record has more than one image.
        """
        make = partial(self._copy, counts=(1, 2) if multiple else (1,))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            yield from pool.map(make, images, images.values())

    def _copy(self, name: str, file: FileRef, counts: Sequence[int]) -> Copy:
        path = self.folder / name
        try:
            if path.exists() and _is_current(path, file):
                return Copy(name, 0, path.stat().st_size, "there already")
            content = file.read()
            pixels = decode_image(content, self.limits)
            size = self._size(pixels.shape[:2], counts)
        except (BadSample, BadMedia) as error:
            return Copy(name, 0, 0, "bad", f"{file.name}: {error}")
        small = content
        if size != pixels.shape[:2]:
            image = LazyImage(pixels.shape[:2], pixels, self.limits.pixels).resized(
                size, self.filter
            )
            small = encode_image(image.pixels, name.lower().endswith(LOSSLESS))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial_file:
            partial_file.write_bytes(small)
            if isinstance(file, LocalFile):  # by which the next run knows it
                modified = os.stat(file.name).st_mtime_ns
                os.utime(partial_file, ns=(modified, modified))
        return Copy(name, len(content), len(small), "as it was" if small is content else "shrunk")

    def _size(self, size: Size, counts: Sequence[int]) -> Size:
        """Return the smallest size that all encoders take as they take this one."""
        sizes = [
            smaller_size(p.before_encoder, size, count, self.limits)
            for p in self.processors
            for count in counts
        ]
        largest = max(sizes, key=lambda one: one[0] * one[1])
        same = all(
            self._taken(p, largest, count) == self._taken(p, size, count)
            for p in self.processors
            for count in counts
        )
        return largest if same else size

    def _taken(self, processor: ImageProcessor, size: Size, count: int) -> tuple[object, ...]:
        items = processor.items(size, count, self.limits)
        return items.sizes, items.texts, items.count({processor.name: processor.encoder})


def _is_current(copy: Path, file: FileRef) -> bool:
    return (
        not isinstance(file, LocalFile) or copy.stat().st_mtime_ns == os.stat(file.name).st_mtime_ns
    )


def named_images(
    records: ChatFiles, progress: Callable[[int], None]
) -> tuple[dict[str, FileRef], int, bool]:
    """List the files of a data set's images by the names that records have for them.

    Returns also how many images have no name below the folder (an absolute path, a URL, bytes in
    the record), and whether some record has several images. Records that cannot be used are left
    out.
    """
    images: dict[str, FileRef] = {}
    unnamed = 0
    multiple = False
    for index in range(len(records)):
        try:
            references = records.references(index)
            files = records.media(index)
        except BadSample:
            continue
        of_record = [
            (r, f) for (kind, r), f in zip(references, files, strict=True) if kind == "image"
        ]
        multiple |= len(of_record) > 1
        for reference, file in of_record:
            if (name := _name_below(reference)) is None:
                unnamed += 1
            else:
                images[name] = file
        progress(index + 1)
    return images, unnamed, multiple


def _name_below(reference: object) -> str | None:
    if isinstance(reference, Mapping):
        reference = reference.get("path") if reference.get("bytes") is None else None
    if not isinstance(reference, str) or is_url(reference) or reference.startswith("data:"):
        return None
    name = posixpath.normpath(reference)
    return None if name.startswith(("/", "../")) or name in (".", "..", MADE_FOR) else name
