"""Config of videos: the fields of each kind, their check, and how they are read from transformers' processors.

The frames, texts and order of tokens that a kind makes are a file of
`mmjax/data/media/preparations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmjax.config.checks import check, ordered
from mmjax.config.processor_fields import Filter, ProcessorFields
from mmjax.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalSize,
    PositiveFloat,
    PositiveInt,
    at_least,
)

# frames that Qwen's own tools take per second where a folder does not say; transformers takes every
# frame
FPS = 2.0


class VideoKind:
    """Base of the ways to take frames of a video, and to resize them.

    `from_hf` of a kind reads the fields of `hf_processor`; what they leave open is as in the kind
    itself. It raises UserError, naming file and field, for what is unknown.
    """

    hf_patches = True  # the processor also says how frames are patched
    text_after = "space"  # text goes on behind a video's rows and columns
    sound = ""  # encoder of the videos' own sound; empty: not read
    interpolates = False  # a position of the LLM may be made of several tokens

    def check_sound(self, where: str, frames: int, clips: Sequence[str], has_time: bool) -> None:
        """Raise UserError where frames and sound, if both are read, cannot be interleaved by positions in time.

        frames: of a temporal patch. clips: names of the model's audio encoders. has_time: positions
        have an axis t.
        """


@dataclass(frozen=True)
class NoVideo(VideoKind):
    """The encoder takes no videos."""

    kind: Literal["none"] = "none"


def sampling_of(fields: ProcessorFields) -> dict[str, Any]:
    """Read the rate and the bounds."""
    if fields.value("num_frames") is not None:
        raise fields.refused("num_frames", "frames are taken by fps; set it to null")
    return {
        **fields.pixel_bounds(),
        "fps": fields.number("fps", FPS),
        "min_frames": fields.count("min_frames"),
        "max_frames": fields.count("max_frames"),
        "filter": fields.filter(),
    }


def frame_pixels(fields: ProcessorFields) -> int:
    """Return the pixels of the most tokens of a frame where these are capped, else 0."""
    unit = (fields.count("patch_size") * fields.count("merge_size")) ** 2  # pixels of a token
    tokens = fields.count("max_video_tokens")
    return tokens * unit if fields.flag("cap_pixels_per_frame") else 0


@dataclass(frozen=True)
class Qwen2Video(VideoKind):
    """Frames at a rate, with bounds on the pixels of each, as for Qwen2.5-VL; their time is a rotary position."""

    fps: PositiveFloat = 2.0  # frames taken per second of the video
    min_frames: PositiveInt = 4  # taken of a video that has them
    max_frames: int = 768  # taken of any video
    min_pixels: PositiveInt = 128 * 28 * 28  # of a resized frame
    max_pixels: int = 768 * 28 * 28  # of a resized frame
    # of all temporal patches, which get equal shares, but no less than min_pixels; 0: no limit
    total_pixels: NonNegativeInt = 0
    # rotary positions along t for each second; 0: one for each temporal patch
    tokens_per_second: NonNegativeFloat = 4.0
    filter: Filter = "bicubic"  # of resizing
    # of a temporal patch: of the frames taken, or by `fps` alone
    seconds: Literal["sampled", "nominal"] = "sampled"
    # text goes on behind a video's rows and columns, or its time too
    text_after: Literal["space", "time"] = "space"
    # encoder of the videos' own sound, whose tokens are interleaved with the frames'; empty: not
    # read
    sound: str = ""
    # rotary positions along t of the chunks of frames and sound that take turns
    sound_chunk: int = 50
    kind: Literal["qwen2_video"] = "qwen2_video"
    # frames and sound take turns in chunks (Qwen2.5-Omni), or each temporal patch comes before the
    # sound from its time on (Qwen3-Omni, which counts parts of positions: patches must take whole
    # ones)
    turns: Literal["chunks", "patches"] = "chunks"

    hf_processor = "Qwen2VLVideoProcessor"

    def check(self, where: str) -> None:
        ordered(where, self, "min_pixels", "max_pixels")
        ordered(where, self, "min_frames", "max_frames")

    def check_sound(self, where: str, frames: int, clips: Sequence[str], has_time: bool) -> None:
        step = frames / self.fps * self.tokens_per_second
        if self.turns == "patches":
            nominal = self.seconds == "nominal"
            check(nominal, f"{where}.seconds={self.seconds}: with turns=patches they are nominal")
            check(
                step > 0 and step.is_integer(),
                f"{where}.fps={self.fps:g}: a temporal patch takes {step:g} positions along t; take frames at a rate "
                "at which it takes whole ones",
            )
        if not self.sound:
            return
        known = f"name an audio encoder with clips.shown=all ({', '.join(clips) or 'there is none'}), or leave it out"
        check(self.sound in clips, f"{where}.sound={self.sound}: {known}")
        check(has_time, f"{where}.sound: model.llm.rope_sections is empty; positions have no time")
        nominal = self.seconds == "nominal"
        check(
            nominal, f"{where}.seconds={self.seconds}: sound takes turns with frames; use nominal"
        )
        if self.turns == "patches":
            return
        at_least(1).check(f"{where}.sound_chunk", self.sound_chunk)
        check(
            0 < step <= self.sound_chunk,
            f"{where}.fps={self.fps:g}: a temporal patch takes {step:g} positions along t, more than sound_chunk="
            f"{self.sound_chunk}, or none; take more frames per second",
        )

    def from_hf(self, fields: ProcessorFields) -> Qwen2Video:
        sampling = sampling_of(fields)
        return replace(self, **sampling, total_pixels=int(frame_pixels(fields) * 0.9))


@dataclass(frozen=True)
class Qwen3Video(VideoKind):
    """Frames at a rate, with bounds on the pixels of all together, as for Qwen3-VL; their time is written as text."""

    fps: PositiveFloat = 2.0  # frames taken per second of the video
    min_frames: PositiveInt = 4  # taken of a video that has them
    max_frames: int = 768  # taken of any video
    min_pixels: PositiveInt = 128 * 32 * 32  # of all resized frames
    max_pixels: int = 768 * 32 * 32  # of all resized frames
    frame_pixels: NonNegativeInt = 0  # of a resized frame; 0: no limit of its own
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["qwen3_video"] = "qwen3_video"

    hf_processor = "Qwen3VLVideoProcessor"

    def check(self, where: str) -> None:
        ordered(where, self, "min_pixels", "max_pixels")
        ordered(where, self, "min_frames", "max_frames")

    def from_hf(self, fields: ProcessorFields) -> Qwen3Video:
        return replace(self, **sampling_of(fields), frame_pixels=frame_pixels(fields))


@dataclass(frozen=True)
class Glm4Video(VideoKind):
    """Frames at a rate, with bounds on the pixels of all together, as for GLM-4.1V; seconds are written behind them."""

    fps: PositiveFloat = 2.0  # frames taken per second of the video
    # of a video; of a longer one as many frames are taken as of one of this length
    seconds: PositiveInt = 300
    min_pixels: PositiveInt = 112 * 112  # of all resized frames
    max_pixels: int = 28 * 28 * 2 * 30_000  # of all resized frames
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["glm4_video"] = "glm4_video"

    hf_processor = "Glm4vVideoProcessor"

    def check(self, where: str) -> None:
        ordered(where, self, "min_pixels", "max_pixels")

    def from_hf(self, fields: ProcessorFields) -> Glm4Video:
        return replace(
            self,
            **fields.pixel_bounds(),
            fps=fields.number("fps"),
            seconds=fields.count("max_duration"),
            filter=fields.filter(),
        )


@dataclass(frozen=True)
class UniformVideo(VideoKind):
    """The same number of frames of every video, all of one size, as for InternVL and LLaVA-OneVision."""

    frames: PositiveInt = 8  # taken of a video, one of each of so many equal parts
    size: OptionalSize = (448, 448)  # height and width of a resized frame; (): the video's own
    # text before each temporal patch, with {} for its number from 1 on; the first's is without line
    # breaks at its start
    label: str = ""
    filter: Filter = "bicubic"  # of resizing
    kind: Literal["uniform_video"] = "uniform_video"
    taken: Literal["middle", "first"] = "middle"  # frame of a part
    # by which each side of a frame's tokens is divided, rounded up: interpolated bilinearly
    shrink: PositiveInt = 1

    hf_patches = False

    @property
    def hf_processor(self) -> str:
        """Name the video processor of transformers that is read as this."""
        return "LlavaOnevisionVideoProcessor" if self.taken == "first" else "InternVLVideoProcessor"

    @property
    def interpolates(self) -> bool:
        """Return whether the tokens of a video's frames are interpolated."""
        return self.shrink > 1

    def from_hf(self, fields: ProcessorFields) -> UniformVideo:
        """Read the fields of a video processor: one tile for each frame, numbered in the text, or fewer tokens of each.

        LLaVA-OneVision's takes all frames that it is given; here they are `num_frames`, or as many
        as without one.
        """
        if fields.flag("do_center_crop") or not fields.flag("do_resize"):
            raise fields.refused(
                "do_resize", "frames must be resized, and not cropped; set do_center_crop to false"
            )
        if fields.height_and_width("size") != self.size:
            images = "tiles" if self.label else "images"
            height, width = self.size
            raise fields.refused(
                "size", f"the tower has {images} of {height} x {width} pixels; make them the same"
            )
        if fields.value("fps") is not None:
            raise fields.refused(
                "fps", "a fixed number of frames is taken, num_frames; set it to null"
            )
        if self.taken == "middle" and fields.value("initial_shift") not in (None, True):
            raise fields.refused("initial_shift", "only true is known")
        return replace(self, frames=fields.count("num_frames", self.frames), filter=fields.filter())


@dataclass(frozen=True)
class MuseVideo(VideoKind):
    """Frames at a rate up to a number, with a bound on the tokens of each, as for Muse Glimmer; their time is text."""

    fps: PositiveFloat = 2.0  # frames taken per second of the video
    max_frames: PositiveInt = 96  # taken of any video
    max_tokens: PositiveInt = 144  # of a temporal patch
    begin: str = "<|vid_start|>"  # text before all of a video
    between: str = "<|vid_frame_separator|>"  # text between two temporal patches
    end: str = "<|vid_end|>"  # text behind all of it
    filter: Filter = "lanczos"  # of resizing
    kind: Literal["muse_video"] = "muse_video"

    hf_processor = "MuseGlimmerVideoProcessor"

    def from_hf(self, fields: ProcessorFields) -> MuseVideo:
        if not fields.flag("do_sample_frames"):
            raise fields.refused("do_sample_frames", "frames are taken by fps; set it to true")
        if fields.value("frame_timestamp_format") != (known := "Time: {timestamp:.1f}s"):
            raise fields.refused("frame_timestamp_format", f"only {known!r} is known")
        return replace(
            self,
            fps=fields.number("fps"),
            max_frames=fields.count("num_frames"),
            max_tokens=fields.count("max_video_frame_tokens"),
            filter=fields.filter(),
        )


VideoPreparation = NoVideo | Qwen2Video | Qwen3Video | Glm4Video | UniformVideo | MuseVideo
