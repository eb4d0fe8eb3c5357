"""Cut a stretch out of a clip's file when it is read."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO

import soundfile

from mmjax.data.conversation import BadSample
from mmjax.data.storage.files import FileRef, one_line

_TOLERANCE = 0.02  # seconds; durations in manifests are rounded


@dataclass(frozen=True)
class AudioSegment:
    """The `duration` seconds (None: to the end) of an encoded clip from `offset` on.

    Name, stamp and header are the whole file's, so that the header is read once for all cuts of a file.
    """

    whole: FileRef
    offset: float
    duration: float | None

    @property
    def name(self) -> str:
        return self.whole.name

    def stamp(self) -> str:
        return self.whole.stamp()

    def open(self) -> BinaryIO:
        return self.whole.open()

    def read(self) -> bytes:
        """Return the file itself where this is all of it, else a WAV of the stretch with the same samples."""
        encoded = self.whole.read()
        try:
            with soundfile.SoundFile(io.BytesIO(encoded)) as clip:
                frames = self.frames(clip.frames, clip.samplerate)
                if frames == clip.frames:
                    return encoded
                clip.seek(round(self.offset * clip.samplerate))
                # The samples stay bit for bit: integers of at most 32 bits, or floats.
                subtype = clip.subtype if soundfile.check_format("WAV", clip.subtype) else "FLOAT"
                kind = "int32" if subtype.startswith("PCM") else "float64"
                rate = clip.samplerate
                cut = clip.read(frames, kind, always_2d=True)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise BadSample(f"{self.name} cannot be read: {one_line(error)}") from None
        if len(cut) != frames:
            raise BadSample(f"{self.name} is truncated: {len(cut)} of {frames} frames from {self.offset} s")
        file = io.BytesIO()
        soundfile.write(file, cut, rate, subtype, format="WAV")
        return file.getvalue()

    def frames(self, total: int, rate: int) -> int:
        """Count the frames of this cut of a clip that has `total`. Raises BadSample where it reaches beyond the end."""
        start = round(self.offset * rate)
        if start >= total:
            raise BadSample(f"{self.name} has {total / rate:.2f} s; the clip is to start at {self.offset} s")
        count = total - start if self.duration is None else round(self.duration * rate)
        if count > total - start + _TOLERANCE * rate:
            raise BadSample(
                f"{self.name} has {total / rate:.2f} s; the clip is to last {self.duration} s from {self.offset} s"
            )
        # The original file is smaller and needs no decoding here.
        is_all = start == 0 and abs(total - count) <= _TOLERANCE * rate
        return total if is_all else max(1, min(count, total - start))
