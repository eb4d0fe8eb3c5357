"""Report what is in a config's data: its records, the lengths of texts and media, and tokens of videos by rate."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.config import Config, VisionConfig
from mmjax.console import count, table
from mmjax.data.media.decode import VideoHeader
from mmjax.data.media.patches import item_size
from mmjax.data.media.preparations import sample_video
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.sample import Split
from mmjax.data.sources.media_sizes import MediaFacts
from mmjax.data.sources.opening import part_name
from mmjax.data.storage.files import Conversations
from mmjax.errors import BadMedia


@dataclass(frozen=True)
class Part:
    """One split of one source."""

    source: str
    split: Split
    conversations: Conversations
    facts: MediaFacts
    encoders: tuple[str, ...] = ()
    lengths: LengthIndex | None = None  # None where the config has no chat format

    @property
    def bad(self) -> dict[int, str]:
        """Reasons of the records that cannot be used, by their index."""
        if self.lengths is not None:
            return dict(zip(self.lengths.bad.tolist(), self.lengths.reason.tolist(), strict=True))
        bad = zip(self.facts.bad.tolist(), self.facts.reason.tolist(), strict=True)
        return {index: f"{self.conversations.place(index)}: {reason}" for index, reason in bad}

    def bad_records(self) -> list[dict[str, Any]]:
        """Describe the bad records by file, line and reason. A file without lines has numbers or keys of records."""
        described = []
        for index, reason in self.bad.items():
            place = self.conversations.place(index)
            file, line = split_place(place)
            described.append(
                {"file": file, "line": line, "reason": reason.removeprefix(f"{place}: ")}
            )
        return described

    @property
    def name(self) -> str:
        """Name of the source and the split."""
        return part_name(self.source, self.split)


def split_place(place: str) -> tuple[str, int | str]:
    """Split the place of a record into its file and its line; what has none has `[number]` from 0, or a key."""
    if match := re.fullmatch(r"(.*[^:]):(\d+)", place, re.DOTALL):
        return match[1], int(match[2])
    if match := re.fullmatch(r"(.*)(\[\d+\])", place, re.DOTALL):
        return match[1], match[2]
    file, _, key = place.rpartition("::")
    return file, key


def measures(part: Part) -> dict[str, np.ndarray]:
    """Measure the usable records of a data set, by the measure's name."""
    facts = part.facts
    pixels = facts.of("image").astype(float)  # [images, 2]: height and width
    frames, rate = facts.of("audio").astype(float).T
    videos = [VideoHeader.unpacked(tuple(size)) for size in facts.of("video").tolist()]
    measured = {
        "text, characters": facts.characters[facts.good()].astype(float),
        "image, megapixels": pixels.prod(axis=1) / 1e6,
        "image, longer side": pixels.max(axis=1, initial=0),
        "clip, seconds": frames / rate,
        "video, seconds": np.array(
            [float(video.frames / video.rate) for video in videos if video.rate]
        ),
        "video, frames": np.array([float(video.frames) for video in videos]),
        "media of a record": np.diff(facts.start)[facts.good()].astype(float),
    }
    if part.lengths is not None:
        measured |= _count_tokens(part.lengths, part.encoders)
    return {name: values for name, values in measured.items() if values.any()}


def _count_tokens(lengths: LengthIndex, encoders: Sequence[str]) -> dict[str, np.ndarray]:
    """Count the LLM tokens of usable records: in total, of text, and of each encoder with any."""
    good = np.setdiff1d(np.arange(len(lengths)), lengths.bad, assume_unique=True)
    by_encoder = np.zeros((len(encoders), len(lengths)), np.int64)
    # The sample of each item: item_start [0, 2, 2, 3] has samples of 2, 0 and 1 items, and gives
    # [0, 0, 2].
    sample = np.repeat(np.arange(len(lengths)), np.diff(lengths.item_start))
    np.add.at(by_encoder, (lengths.item_encoder, sample), lengths.item_tokens)
    counts = {
        "tokens of a record": lengths.llm_tokens[good],
        "text, tokens": lengths.text_tokens[good],
    }
    for name, tokens in zip(encoders, by_encoder[:, good], strict=True):
        counts[f"{name}, tokens"] = tokens[tokens > 0]
    return {name: values.astype(float) for name, values in counts.items()}


def report(parts: Sequence[Part]) -> list[str]:
    """Format the report for a person."""
    kinds = {"images": "image", "clips": "audio", "videos": "video"}
    if not any(len(part.facts.of("video")) for part in parts):
        del kinds["videos"]
    rows = [("source", "records", "bad", *kinds)]
    sizes = [("source", "of", "count", "min", "median", "p90", "max", "sum")]
    for part in parts:
        facts = part.facts
        numbers = (len(facts), len(part.bad), *(len(facts.of(kind)) for kind in kinds.values()))
        rows.append((part.name, *(f"{n:,}" for n in numbers)))
        for name, values in measures(part).items():
            quantiles = np.quantile(values, [0, 0.5, 0.9, 1])
            sizes.append(
                (part.name, name, f"{len(values):,}", *map(count, quantiles), count(values.sum()))
            )
    return [*table(rows), *table(sizes)]


RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # frames per second that videos' tokens are told for
MAX_VIDEOS = 20_000  # whose tokens are counted at each rate
SHARES = (1.0, 0.9)  # of the videos, that are to have at most so many tokens
HIGHEST_RATE = 30.0  # frames per second
RATE_STEP = 0.05


def report_rates(config: Config, parts: Sequence[Part], budget: int | None = None) -> list[str]:
    """Tell how many tokens a video has by frames per second, where an encoder takes frames at a rate; else nothing.

    budget: tokens of a video, for which the highest rate is told at which all videos, or most, have
    no more.
    """
    encoders = config.model.encoders.values()
    encoder = next((e for e in encoders if "video" in e.media and hasattr(e.videos, "fps")), None)
    sizes = np.concatenate(
        [np.empty((0, 2), np.int64), *(part.facts.of("video") for part in parts)]
    )
    if encoder is None or not len(sizes):
        return []
    sizes = sizes[:: -(-len(sizes) // MAX_VIDEOS)]
    rows = [("tokens of a video at fps", "min", "median", "p90", "max", "sum")]

    def tokens_at(fps: float) -> np.ndarray:
        sampling = replace(encoder, videos=replace(encoder.videos, fps=fps))
        return np.array([_video_tokens(sampling, tuple(size)) for size in sizes.tolist()], float)

    for fps in sorted({*RATES, encoder.videos.fps}):
        tokens = tokens_at(fps)
        name = f"{fps:g}{' (this config)' if fps == encoder.videos.fps else ''}"
        rows.append((name, *map(count, np.quantile(tokens, [0, 0.5, 0.9, 1])), count(tokens.sum())))
    return [*table(rows), *(_describe_rate(tokens_at, budget, share) for share in SHARES if budget)]


def _describe_rate(tokens_at: Callable[[float], np.ndarray], budget: int, share: float) -> str:
    """Say up to how many frames per second this share of the videos has at most so many tokens."""

    def exceeds(step: int) -> bool:
        return bool(np.mean(tokens_at(step * RATE_STEP) <= budget) < share)

    # Steps at which too few videos fit follow all those at which enough do: the last of these.
    fitting = bisect_left(range(1, round(HIGHEST_RATE / RATE_STEP) + 1), True, key=exceeds)
    videos = "all videos have" if share == 1 else f"{share:.0%} of the videos have"
    if not fitting:
        return (
            f"       at no rate {videos} at most {budget:,} tokens; make frames smaller, or fewer "
            "(videos.max_frames)"
        )
    return f"       {videos} at most {budget:,} tokens up to videos.fps={fitting * RATE_STEP:g}"


def _video_tokens(encoder: VisionConfig, size: tuple[int, int]) -> int:
    """Count the LLM tokens of a video's frames, without text between them; 0 for one that cannot be resized."""
    try:
        video = sample_video(encoder, VideoHeader.unpacked(size))
    except BadMedia:
        return 0
    patches = len(video.indices) // encoder.frames
    return patches * item_size(encoder, (encoder.frames, *video.size)).tokens
