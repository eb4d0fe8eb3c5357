"""Config of clips: the fields of each kind, their check, and how Whisper's extractor is read.

The frames that a kind makes are a file of `mmjax/data/media/preparations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mmjax.config.checks import check
from mmjax.config.processor_fields import ProcessorFields
from mmjax.config.ranges import (
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)

HF_RATE = 16_000  # Hz; the extractor's filters end at 8 kHz whatever the rate


class ClipKind:
    """Base of the ways to make frames of clips, for an audio encoder."""

    reads_silence = False  # behind a clip convolutions read silence, of which they make a token
    mirrored = False  # clips are continued by their mirror image
    # of every clip, with its silence, where the layers attend them; 0: a clip's own
    fixed_frames = 0
    # tokens that the LLM sees: all that the encoder makes, or those of the clip alone
    shown: str = "all"


@dataclass(frozen=True)
class LogMel(ClipKind):
    """Log-mel frames of a clip of any length, normalised by its loudest bin."""

    mels: PositiveInt = 80  # bins per frame
    sample_rate: PositiveInt = 16_000  # Hz
    window: Annotated[int, at_least(2)] = 400  # samples
    hop: PositiveInt = 160  # samples
    kind: Literal["log_mel"] = "log_mel"

    def check(self, where: str) -> None:
        check(
            self.hop <= self.window,
            f"{where}.hop={self.hop} is longer than window={self.window}: samples would be skipped; make hop smaller",
        )
        bins = self.window // 2 + 1  # of a real FFT
        check(
            self.mels <= bins,
            f"{where}.mels={self.mels}: window={self.window} has only {bins} frequencies; make mels at most that",
        )


@dataclass(frozen=True)
class WhisperMel(ClipKind):
    """Log-mel frames of Whisper's extractor, in windows of `seconds` padded with silence."""

    mels: PositiveInt = 80  # bins per frame
    sample_rate: PositiveInt = 16_000  # Hz
    window: Annotated[
        int, Limit(lambda n: n >= 2 and n % 2 == 0, "must be even, and at least 2")
    ] = 400  # samples
    hop: PositiveInt = 160  # samples
    seconds: PositiveInt = 30  # length of the window
    # a clip longer than the window is bad, or becomes several items, or stays whole: its frames are
    # computed at once, with end=silence of as many windows as it fills
    longer: Literal["refuse", "split", "whole"] = "refuse"
    # frames that the encoder's layers attend to and output tokens for: the clip's, as in
    # Qwen2-Audio, or the window's with its silence, as in Whisper; models from checkpoints have
    # their family's
    attended: Literal["clip", "window"] = "clip"
    kind: Literal["whisper_mel"] = "whisper_mel"
    # behind a clip: silence up to the window's end; or its mirror image, and what is no whole hop
    # makes no frame
    end: Literal["silence", "mirror"] = "silence"
    # samples; to a shorter clip silence is added that counts as a part of it
    shortest: NonNegativeInt = 0
    # tokens that the LLM sees: of all attended frames, or of the clip's alone, where they are whole
    # (GLM-ASR)
    shown: Literal["all", "clip"] = "all"

    @property
    def reads_silence(self) -> bool:
        """Return whether convolutions read silence behind a clip, of which they make a token."""
        return self.attended == "clip"

    @property
    def mirrored(self) -> bool:
        """Return whether clips are continued by their mirror image."""
        return self.end == "mirror"

    @property
    def window_frames(self) -> int:
        """Return the frames of a whole window."""
        return self.seconds * self.sample_rate // self.hop

    @property
    def fixed_frames(self) -> int:
        """Return the frames of every clip where the layers attend those of the window, else 0."""
        return self.window_frames if self.attended == "window" else 0

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> WhisperMel:
        """Read Whisper's extractor, or Qwen3-ASR's. Raises UserError, naming file and field, for what is unknown."""
        for name in ("dither", "padding_value"):
            if fields.value(name):
                raise fields.refused(name, "only 0 is known")
        if fields.value("padding_side") not in (None, "right"):
            raise fields.refused("padding_side", "only 'right' is known")
        how = cls(
            mels=fields.count("feature_size"),
            sample_rate=fields.count("sampling_rate"),
            window=fields.count("n_fft"),
            hop=fields.count("hop_length"),
            seconds=fields.count("chunk_length"),
            shortest=fields.value("min_length", 0),
        )
        if how.sample_rate != HF_RATE:
            raise fields.refused("sampling_rate", f"only {HF_RATE} is known")
        if how.window % 2:
            raise fields.refused("n_fft", "only even windows are known")
        return how


@dataclass(frozen=True)
class UsmMel(ClipKind):
    """Log-mel frames of magnitudes, of a clip's whole frames alone (Universal Speech Model, Gemma 4)."""

    mels: PositiveInt = 128  # bins per frame
    sample_rate: PositiveInt = 16_000  # Hz
    window: Annotated[int, at_least(2)] = 320  # samples
    hop: PositiveInt = 160  # samples
    seconds: PositiveInt = 30  # of the longest clip
    low: NonNegativeFloat = 0.0  # Hz, where the filters begin
    high: PositiveFloat = 8000.0  # Hz, where they end
    floor: PositiveFloat = 1e-3  # added to magnitudes, of which the logarithm is taken
    kind: Literal["usm_mel"] = "usm_mel"

    @property
    def fft(self) -> int:
        """Return the samples of a transform: the window's with zeros up to a power of two."""
        return 1 << (self.window - 1).bit_length()

    def check(self, where: str) -> None:
        check(
            self.low < self.high <= self.sample_rate / 2,
            f"{where}.low={self.low} and high={self.high}: make them rise, up to half of the sample rate",
        )

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> UsmMel:
        """Read Gemma 4's extractor. Raises UserError, naming file and field, for what is not known."""
        plain = {"dither": 0, "padding_value": 0, "preemphasis": 0, "fft_overdrive": False}
        plain |= {"input_scale_factor": 1, "per_bin_mean": None, "per_bin_stddev": None}
        for name, known in plain.items():
            if fields.value(name) not in (known, None):
                raise fields.refused(name, f"only {known} is known")
        if fields.value("padding_side") not in (None, "right"):
            raise fields.refused("padding_side", "only 'right' is known")
        rate = fields.count("sampling_rate")
        if rate != HF_RATE:
            raise fields.refused("sampling_rate", f"only {HF_RATE} is known")
        window, hop = (
            round(rate * fields.number(name) / 1000)
            for name in ("frame_length_ms", "hop_length_ms")
        )
        return cls(
            mels=fields.count("feature_size"),
            sample_rate=rate,
            window=window,
            hop=hop,
            low=fields.number("min_frequency"),
            high=fields.number("max_frequency"),
            floor=fields.number("mel_floor"),
        )


@dataclass(frozen=True)
class Waveform(ClipKind):
    """Frames of a clip's samples as they are, the last with zeros behind them (Gemma 4 Unified)."""

    samples: PositiveInt = 640  # of a frame
    sample_rate: PositiveInt = 16_000  # Hz
    kind: Literal["waveform"] = "waveform"

    @property
    def mels(self) -> int:
        """Return the width of a frame."""
        return self.samples

    @classmethod
    def from_hf(cls, fields: ProcessorFields) -> Waveform:
        """Read Gemma 4 Unified's extractor. Raises UserError, naming file and field, for what is not known."""
        for name, known in (("padding_value", 0), ("padding_side", "right")):
            if fields.value(name, known) != known:
                raise fields.refused(name, f"only {known} is known")
        return cls(fields.count("audio_samples_per_token"), fields.count("sampling_rate"))


AudioPreparation = LogMel | WhisperMel | UsmMel | Waveform
