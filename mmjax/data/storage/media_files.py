"""Media that are no file as it lies: a stretch of a clip, or a video as the images of its frames."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import soundfile

from mmjax.data.media.mp3 import decode_mp3, is_mp3, read_mp3_header
from mmjax.data.sample import BadSample
from mmjax.data.storage.files import (
    PIECE,
    ArchiveMember,
    FileRef,
    LocalFile,
    check_bytes,
    hash_strings,
    one_line,
    raise_unreadable,
)
from mmjax.errors import BadMedia


def state_of(stored: FileRef) -> str:
    """Return the stamp of a file, of one of this machine with the time at which the system has last changed it.

    No program can set that time back. But it changes with a file's name and permissions too, and
    differs between copies, so that it serves for one start on one host.
    """
    if isinstance(stored, FrameFiles):
        return hash_strings(*map(state_of, stored.files))
    if isinstance(stored, ArchiveMember | AudioSegment):
        return state_of(stored.file)
    if not isinstance(stored, LocalFile):
        return stored.stamp()
    with raise_unreadable(stored.name):
        status = os.stat(stored.name)
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


_TOLERANCE = 0.02  # seconds; durations in manifests are rounded


@dataclass(frozen=True)
class AudioSegment:
    """The `duration` seconds (None: to the end) of an encoded clip from `offset` on.

    Name, stamp and header are the whole file's, so that the header is read once for all cuts of a
    file.
    """

    file: FileRef
    offset: float
    duration: float | None

    @property
    def name(self) -> str:
        return self.file.name

    def stamp(self) -> str:
        return self.file.stamp()

    def open(self) -> BinaryIO:
        return self.file.open()

    def read(self) -> bytes:
        """Return the file itself where this is all of it, else a WAV of the stretch with the same samples."""
        encoded = self.file.read()
        if is_mp3(encoded):
            return self._cut_mp3(encoded)
        try:
            with soundfile.SoundFile(io.BytesIO(encoded)) as clip:
                frames = self.frames(clip.frames, clip.samplerate)
                if frames == clip.frames:
                    return encoded
                clip.seek(round(self.offset * clip.samplerate))
                # The samples stay bit for bit: integers of at most 32 bits, or floats.
                subtype = clip.subtype if soundfile.check_format("WAV", clip.subtype) else "FLOAT"
                kind = "int32" if subtype.startswith("PCM") else "float64"
                block = max(1, PIECE // clip.channels)
                sizes = (min(block, frames - start) for start in range(0, frames, block))
                blocks = (clip.read(size, kind, always_2d=True) for size in sizes)
                return self._wav(blocks, frames, clip.samplerate, clip.channels, subtype)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise BadSample(f"{self.name} cannot be read: {one_line(error)}") from None

    def _cut_mp3(self, encoded: bytes) -> bytes:
        """Return the file itself, or a WAV of the stretch with its channels averaged, as they will be anyway."""
        try:
            total, rate = read_mp3_header(io.BytesIO(encoded))
            if (frames := self.frames(total, rate)) == total:
                return encoded
            return self._wav(
                decode_mp3(encoded, round(self.offset * rate), frames), frames, rate, 1, "FLOAT"
            )
        except BadMedia as error:
            raise BadSample(f"{self.name} is a bad audio file: {error}") from None

    def _wav(
        self, blocks: Iterable[np.ndarray], frames: int, rate: int, channels: int, subtype: str
    ) -> bytes:
        file = io.BytesIO()
        with soundfile.SoundFile(file, "w", rate, channels, subtype, format="WAV") as cut:
            for block in blocks:
                cut.write(block)
                check_bytes(f"{self.name} from {self.offset} s", file.tell())
            count = cut.frames
        if count != frames:
            raise BadSample(
                f"{self.name} is truncated: {count} of {frames} frames from {self.offset} s"
            )
        return file.getvalue()

    def frames(self, total: int, rate: int) -> int:
        """Count the frames of this cut of a clip that has `total`. Raises BadSample where it reaches beyond the end."""
        start = round(self.offset * rate)
        if start >= total:
            raise BadSample(
                f"{self.name} has {total / rate:.2f} s; the clip is to start at {self.offset} s"
            )
        count = total - start if self.duration is None else round(self.duration * rate)
        if count > total - start + _TOLERANCE * rate:
            raise BadSample(
                f"{self.name} has {total / rate:.2f} s; the clip is to last {self.duration} s from {self.offset} s"
            )
        # The original file is smaller and needs no decoding here.
        is_all = start == 0 and abs(total - count) <= _TOLERANCE * rate
        return total if is_all else max(1, min(count, total - start))


@dataclass(frozen=True)
class FrameFiles:
    """A video as a list of image files in the order of time. Its header is that of its first image."""

    files: tuple[FileRef, ...]

    @property
    def name(self) -> str:
        return f"frames:{self.files[0].name}+{len(self.files) - 1}:{hash_strings(*(file.name for file in self.files))}"

    def stamp(self) -> str:
        return hash_strings(*(file.stamp() for file in self.files))

    def open(self) -> BinaryIO:
        return self.files[0].open()

    def read(self) -> bytes:
        """Return all images as one file: a ZIP that is not compressed."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for number, file in enumerate(self.files):
                archive.writestr(f"{number:06d}", file.read())
                check_bytes(self.name, content.tell())
        return content.getvalue()

    def counted(self, packed: int) -> int:
        """Put the number of frames into the packed header of one image."""
        return packed + (len(self.files) - 1 << 32)
