"""A stretch of a clip's file, cut when it is read."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO

import soundfile

from mmjax.data.conversation import BadSample
from mmjax.data.stored import Stored, one_line

_TOLERANCE = 0.02  # seconds by which a manifest's duration may miss the whole file's: it is rounded


@dataclass(frozen=True)
class Cut:
    """From `offset` on for `duration` seconds (None: to the end) of an encoded clip."""

    whole: Stored
    offset: float
    duration: float | None

    @property
    def name(self) -> str:
        """The whole file's: its header is read once for all its cuts."""
        return self.whole.name

    def stamp(self) -> str:
        """The whole file's."""
        return self.whole.stamp()

    def open(self) -> BinaryIO:
        """The whole file, for its header."""
        return self.whole.open()

    def read(self) -> bytes:
        """The file itself where this is all of it, else a WAV of the stretch with the same samples."""
        encoded = self.whole.read()
        try:
            with soundfile.SoundFile(io.BytesIO(encoded)) as clip:
                frames = self.frames(clip.frames, clip.samplerate)
                if frames == clip.frames:
                    return encoded
                clip.seek(round(self.offset * clip.samplerate))
                subtype = clip.subtype if soundfile.check_format("WAV", clip.subtype) else "FLOAT"
                kind = "int32" if subtype.startswith("PCM") else "float64"
                cut, rate = clip.read(frames, kind, always_2d=True), clip.samplerate
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise BadSample(f"{self.name} cannot be read: {one_line(error)}") from None
        if len(cut) != frames:
            raise BadSample(f"{self.name} is truncated: {len(cut)} of {frames} frames from {self.offset} s")
        file = io.BytesIO()
        soundfile.write(file, cut, rate, subtype, format="WAV")
        return file.getvalue()

    def frames(self, whole: int, rate: int) -> int:
        """How many frames this is of a clip that has `whole`. Raises BadSample where it begins behind its end."""
        start = round(self.offset * rate)
        if start >= whole:
            raise BadSample(f"{self.name} has {whole / rate:.2f} s; the clip is to start at {self.offset} s")
        wanted = whole - start if self.duration is None else round(self.duration * rate)
        if wanted > whole - start + _TOLERANCE * rate:
            raise BadSample(
                f"{self.name} has {whole / rate:.2f} s; the clip is to last {self.duration} s from {self.offset} s"
            )
        near = start == 0 and abs(whole - wanted) <= _TOLERANCE * rate
        return whole if near else max(1, min(wanted, whole - start))
