"""A packed row and single samples as a reader sees them: text with what is trained on, images, clips, and the mask."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise

import numpy as np
from PIL import Image

from mmjax.batch import TextBatch
from mmjax.config import AudioConfig, DecoderConfig
from mmjax.data.clip_items import clip_frames
from mmjax.data.packing import pack_microbatch
from mmjax.data.replay import PackedRow, PlacedSample, Replayed, describe_window, seen_by_layers
from mmjax.data.sample import Text
from mmjax.errors import UserError
from mmjax.reporting.charts import GREY, WIDE, colour_class, path
from mmjax.reporting.curves import Worst
from mmjax.reporting.lengths import data_uri
from mmjax.reporting.run import Planned

SAMPLES = 12  # of a row that are shown
WORST_LISTED, WORST_SHOWN = 16, 4
CHARACTERS = 6_000  # of a sample that are shown
SIDE = 320  # pixels of an image at most; small ones are enlarged on the page
PLAIN_PIXELS = 96 * 96  # an image as small as that stays as it is
MASK = 600  # pixels of a mask at most
MASK_COLOURS = [255, 255, 255, 178, 189, 204, 68, 84, 106]  # seen by no layer, those without a window alone, all
CLIP = 300, 64  # of a clip's picture
STRIP = 30  # height of the strip that says what a row's positions hold


@dataclass(frozen=True)
class ShownItem:
    """An image, or a clip's log-mel frames and wave. told: where it was encoded."""

    told: str
    picture: str = ""  # data URIs
    wave: str = ""  # SVG
    width: int = 0  # on the page


@dataclass(frozen=True)
class ShownPiece:
    """A stretch of text, or the items that stand there. branch: where another one begins than before."""

    text: str = ""
    trained: bool = False
    branch: int = 0
    items: tuple[ShownItem, ...] = ()


@dataclass(frozen=True)
class ShownSample:
    """One sample. told: its place or loss."""

    name: str
    told: str
    pieces: tuple[ShownPiece, ...]
    left_out: str = ""  # why not all of it is here


@dataclass(frozen=True)
class ShownRow:
    """A row of the LLM."""

    told: str
    strip: str  # SVG: what its positions hold
    mask: str  # SVG
    window: str  # which layers have the sliding window; empty: none
    legend: dict[str, int]
    samples: tuple[ShownSample, ...]
    more: int  # samples that are not shown


class Room:
    """Bytes that media may still take of the page."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, content: str) -> bool:
        """Take room for this, and return whether there was any."""
        if len(content) > self.left:
            return False
        self.left -= len(content)
        return True


@dataclass(frozen=True)
class Shower:
    """Shows samples of planned steps. room: for media."""

    planned: Planned
    room: Room

    @cached_property
    def replayed(self) -> Replayed:
        """The last of the planned steps."""
        return Replayed(self.planned.loader, self.planned.first + len(self.planned.plans) - 1)

    def row(self) -> ShownRow | None:
        """The row of the last step that holds items of most encoders, and of these the one with most samples."""
        rows = list(self.replayed.rows())
        if not rows:
            return None
        row = max(rows, key=lambda r: (len({i.encoder for s in r.samples for i in s.items}), len(r.samples)))
        text = self._text_of(row)
        used = sum(s.end - s.begin for s in row.samples)
        return ShownRow(
            f"Step {self.replayed.step + 1}, microbatch {row.microbatch}, rank {row.rank}, row {row.row}: "
            f"{len(row.samples)} samples in {used:,} of {row.length:,} positions",
            self._strip(text, row),
            self._mask(text),
            describe_window(self._llm),
            self._legend,
            tuple(self._placed(sample) for sample in row.samples[:SAMPLES]),
            max(0, len(row.samples) - SAMPLES),
        )

    def worst(self, worst: Sequence[Worst]) -> list[ShownSample]:
        """The samples with the largest losses, of steps that this life has run."""
        shown = []
        for found in worst:
            sample = self._id(found.sample)
            if sample is not None and found.step > self.planned.life.first and len(shown) < WORST_SHOWN:
                shown.append(self._sample(sample, found.sample, f"loss {found.loss:.4g} in step {found.step}", {}))
        return shown

    def _placed(self, sample: PlacedSample) -> ShownSample:
        places = {
            item.number: f"{item.encoder}: rank {item.rank}, row {item.row}, {item.begin}-{item.begin + item.positions}"
            for item in sample.items
        }
        return self._sample(sample.id, sample.name, f"positions {sample.begin}-{sample.end}", places)

    def _sample(self, sample: int, name: str, told: str, places: dict[int, str]) -> ShownSample:
        try:
            pieces = self.replayed.pieces(sample)
            encoders = self._encoders(sample)
        except (OSError, ValueError, UserError) as error:
            return ShownSample(name, told, (), f"It cannot be read: {error}")
        shown, room, branch = [], CHARACTERS, 0
        firsts = [piece.item for piece in pieces if piece.item is not None]
        for piece in pieces:
            if piece.item is not None:
                after = [n for n in firsts if n > piece.item]
                numbers = range(piece.item, min(after, default=max(encoders, default=-1) + 1))
                items = tuple(
                    self._item(sample, n, encoders[n], places.get(n, encoders[n])) for n in numbers if n in encoders
                )
                beside = shown.pop().items if shown and shown[-1].items else ()
                shown.append(ShownPiece(items=beside + items))
                continue
            text = piece.text[:room]
            shown.append(ShownPiece(text, piece.trained, piece.branch if piece.branch != branch else 0))
            room, branch = room - len(text), piece.branch
        whole = sum(len(piece.text) for piece in pieces if piece.item is None)
        left_out = f"{whole - CHARACTERS:,} more characters are left out here" if whole > CHARACTERS else ""
        return ShownSample(name, told, tuple(shown), left_out)

    def _encoders(self, sample: int) -> dict[int, str]:
        """The encoder of each of a sample's items, by its number."""
        segments = self.replayed.loader.reader.sample(sample).segments
        return {
            s.number + k: s.encoder for s in segments if not isinstance(s, Text) for k in range(getattr(s, "items", 1))
        }

    def _item(self, sample: int, number: int, encoder: str, told: str) -> ShownItem:
        if self.room.left <= 0:
            return ShownItem(f"{told} (left out: the page is large enough)")
        config = self.planned.life.config.model.encoders[encoder]
        try:
            value = self.replayed.item(sample, number)
            if isinstance(config, AudioConfig):
                frames, wave = mel_picture(clip_frames(config, value)), wave_picture(value)
                told = f"{told}; {len(value) / config.clips.sample_rate:.2f} s"
                item = ShownItem(told, frames, wave, CLIP[0])
            else:
                picture, width = image_picture(value)
                item = ShownItem(f"{told}; {value.shape[1]} x {value.shape[0]}", picture, "", width)
        except (OSError, ValueError, UserError) as error:
            return ShownItem(f"{told}: cannot be opened: {error}")
        if not self.room.take(item.picture + item.wave):
            return ShownItem(f"{told} (left out: the page is large enough)")
        return item

    def _id(self, name: str) -> int | None:
        """The id of a sample by its name, "source[index]"."""
        index = self.planned.loader.index
        source, _, number = name.removesuffix("]").rpartition("[")
        names = index.source_name.tolist()
        if source not in names or not number.isdecimal():
            return None
        start, end = index.source_start[names.index(source) :][:2].tolist()
        return start + int(number) if start + int(number) < end else None

    # ------------------------------------------------------------------------------------------------ the row's arrays

    def _text_of(self, row: PackedRow) -> TextBatch:
        """The row's arrays, `[T]`; of its rank's rows alone, which are all that is loaded."""
        replayed, spoiled = self.replayed, dict[int, str]()
        plan = replayed.plan.microbatches[row.microbatch]
        batch = pack_microbatch(
            plan, replayed.loader.arrays, replayed.loader.reader, range(row.rank, row.rank + 1), None, spoiled
        ).text
        fields = {f: getattr(batch, f)[row.row] for f in TextBatch._fields if f not in ("slots", "send")}
        return TextBatch(**fields, slots={}, send={})

    @property
    def _llm(self) -> DecoderConfig:
        return self.planned.life.config.model.llm

    @property
    def _legend(self) -> dict[str, int]:
        encoders = self.planned.life.config.model.encoders
        return {"text": GREY, "trained on": 0} | {name: k for k, name in enumerate(encoders, start=1)}

    def _held(self, text: TextBatch) -> np.ndarray:
        """The colour of what each position holds, int `[T]`; -1 where there is nothing."""
        held = np.where(text.sample >= 0, self._legend["text"], -1)
        # A position's weight is of the token after it, which is the one that is trained on.
        trained = np.zeros(len(held), bool)
        trained[1:] = (text.weight[:-1] > 0) & (text.sample[1:] == text.sample[:-1])
        held[trained & (held >= 0)] = 0
        for k, name in enumerate(self.planned.life.config.model.encoders, start=1):
            held[(text.kind == self.replayed.loader.arrays.bit(name)) & (text.sample >= 0)] = k
        return held

    def _strip(self, text: TextBatch, row: PackedRow) -> str:
        """Draw the contents of a row's positions, from left to right, with a line where a sample ends."""
        scale = WIDE / row.length
        parts = []
        for a, b, colour in _runs(self._held(text)):
            style, wide = f"area {colour_class(colour)}", (b - a) * scale
            parts.append(f'<rect class="{style}" x="{a * scale:.1f}" width="{wide:.1f}" height="{STRIP}"/>')
        for sample in row.samples:
            width = (sample.end - sample.begin) * scale
            parts.append(f'<path class="border" d="M{sample.end * scale:.1f} 0V{STRIP + 16}"/>')
            if width > 7 * len(sample.name):
                middle = (sample.begin + sample.end) / 2 * scale
                name = escape(sample.name)
                parts.append(f'<text class="tick" x="{middle:.1f}" y="{STRIP + 15}" text-anchor="middle">{name}</text>')
        return f'<svg class="strip" viewBox="0 0 {WIDE} {STRIP + 20}" role="img">{"".join(parts)}</svg>'

    def _mask(self, text: TextBatch) -> str:
        """Draw the attention mask: queries downwards, keys to the right, and along both what they are."""
        mask, held = seen_by_layers(text, self._llm), self._held(text)
        length, bar = len(held), max(4, len(held) // 60)
        every = -(-length // MASK)
        if every > 1:  # seen where any of a block is
            starts = np.arange(0, length, every)
            mask = np.maximum.reduceat(np.maximum.reduceat(mask, starts, axis=0), starts, axis=1)
        image, file = Image.fromarray(mask), io.BytesIO()
        image.putpalette(MASK_COLOURS)
        image.save(file, "PNG", bits=2, optimize=True)
        parts = [
            f'<image class="mask" x="{bar + 2}" y="{bar + 2}" width="{length}" height="{length}" '
            f'preserveAspectRatio="none" href="{data_uri("png", file.getvalue())}"/>'
        ]
        for a, b, colour in _runs(held):
            style, at, long = colour_class(colour), a + bar + 2, b - a
            parts.append(f'<rect class="area {style}" x="{at}" y="0" width="{long}" height="{bar}"/>')
            parts.append(f'<rect class="area {style}" x="0" y="{at}" width="{bar}" height="{long}"/>')
        side = length + bar + 2
        return f'<svg class="square" viewBox="0 0 {side} {side}" role="img">{"".join(parts)}</svg>'


def _runs(held: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches of equal values that are not -1: begin, end, value."""
    borders = [0, *(np.flatnonzero(np.diff(held)) + 1).tolist(), len(held)]
    return [(a, b, int(held[a])) for a, b in pairwise(borders) if held[a] >= 0]


def image_picture(value: np.ndarray) -> tuple[str, int]:
    """An image item as a data URI, and how wide it is on the page: small ones are enlarged."""
    image = Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)
    file = io.BytesIO()
    if image.width * image.height <= PLAIN_PIXELS:
        image.save(file, "PNG", optimize=True)
        times = max(1, min(6, 120 // max(image.size)))
        return data_uri("png", file.getvalue()), image.width * times
    image.thumbnail((SIDE, SIDE))
    image.convert("RGB").save(file, "JPEG", quality=80)
    return data_uri("jpeg", file.getvalue()), image.width


def mel_picture(frames: np.ndarray) -> str:
    """Log-mel frames `[n, mels]` as a data URI: time to the right, low tones below."""
    low, high = float(frames.min()), float(frames.max())
    shades = ((frames - low) / ((high - low) or 1) * 255).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(shades.T[::-1]))
    if image.width > 2 * CLIP[0]:
        image = image.resize((2 * CLIP[0], image.height), Image.Resampling.BOX)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return data_uri("png", file.getvalue())


def wave_picture(samples: np.ndarray) -> str:
    """A clip `[n]` as the outline of its wave, SVG."""
    width, height = CLIP
    starts = np.unique(np.linspace(0, len(samples), width, endpoint=False).astype(int))
    high, low = np.maximum.reduceat(samples, starts), np.minimum.reduceat(samples, starts)
    loudest = float(np.abs(samples).max()) or 1.0
    x = np.linspace(0, width, len(starts))
    y = [height / 2 * (1 - side / loudest) for side in (high, low)]
    outline = path(np.concatenate([x, x[::-1]]), np.concatenate([y[0], y[1][::-1]]))
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
    return f'<svg class="wave" {box} role="img"><path d="{outline}Z"/></svg>'
