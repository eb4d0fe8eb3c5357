"""Show a packed row and single samples: text with the trained tokens marked, images, clips, and the attention mask."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmjax.batch import TOKEN_FIELDS, TextBatch
from mmjax.config import Tower
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.replay import (
    PackedRow,
    PlacedSample,
    Replayed,
    describe_window,
    seen_by_layers,
    spoken,
)
from mmjax.data.media.patches import log_mel_frames
from mmjax.data.sample import Text
from mmjax.errors import UserError
from mmjax.reporting.charts import AREA, WIDE
from mmjax.reporting.drawing import Drawing, data_uri, png_uri, series_colours, text_width
from mmjax.reporting.run import Planned, Worst

SAMPLES = 12  # shown of a row
WORST_LISTED = 16
WORST_SHOWN = 4
CHARACTERS = 6_000  # shown of a sample
SIDE = 320  # largest side of an image in pixels; the page enlarges small ones
PLAIN_PIXELS = 96 * 96  # images up to this size are stored without loss
MASK = 600  # largest side of a mask in pixels
# RGB by `seen_by_layers`: seen by no layer, by the layers without a sliding window only, by all
# layers.
MASK_COLOURS = [255, 255, 255, 178, 189, 204, 68, 84, 106]
# Sizes of a clip's spectrogram and wave in pixels.
CLIP = (300, 64)
WAVE = (300, 46)
STRIP = 30  # height of the strip with the contents of a row's positions


@dataclass(frozen=True)
class ShownItem:
    """An image, or a clip's log-mel frames and wave."""

    caption: str
    picture: str = ""  # a data URI
    wave: str = ""  # SVG
    width: int = 0  # on the page, in pixels


@dataclass(frozen=True)
class ShownPiece:
    """A piece of text, or consecutive items."""

    text: str = ""
    trained: bool = False
    branch: int = 0  # the branch of the conversation that starts here; 0: the same as before
    items: tuple[ShownItem, ...] = ()


class ShownToken(NamedTuple):
    """A token of a text."""

    id: int
    text: str  # that it says alone
    trained: bool


@dataclass(frozen=True)
class ShownSample:
    """A sample's text and items."""

    name: str
    caption: str
    pieces: tuple[ShownPiece, ...]
    left_out: str = ""  # why not all of it is shown
    tokens: tuple[ShownToken, ...] = ()
    hidden_tokens: int = 0  # tokens that are not listed


@dataclass(frozen=True)
class ShownRow:
    """A row of the LLM."""

    caption: str
    strip: str  # SVG of the contents of its positions
    mask: str  # SVG; empty: not shown
    window: str  # describes the layers with a sliding window; empty: none
    legend: dict[str, str]
    samples: tuple[ShownSample, ...]
    hidden_samples: int  # samples that are not shown


@dataclass
class Shower:
    """Shows samples of planned steps."""

    planned: Planned
    image_budget: int  # bytes of the page that images and clips may still take
    max_tokens: int = 0  # listed of a sample

    @cached_property
    def _packed(self) -> dict[tuple[int, int], TextBatch]:
        """The rows that were packed, by microbatch and rank."""
        return {}

    @cached_property
    def replayed(self) -> Replayed:
        """Load the last of the planned steps."""
        return Replayed(self.planned.loader, self.planned.first + len(self.planned.plans) - 1)

    def row(self) -> ShownRow | None:
        """Show the last step's row with items of most encoders, and among these the one with most samples."""
        rows = list(self.replayed.rows())
        if not rows:
            return None
        row = max(
            rows,
            key=lambda r: (len({i.encoder for s in r.samples for i in s.items}), len(r.samples)),
        )
        return self.shown_row(row, SAMPLES, with_mask=True)

    def shown_row(self, row: PackedRow, samples: int, with_mask: bool = False) -> ShownRow:
        """Show a row of the last step with its first samples."""
        text = self._text_of(row)
        used = sum(s.end - s.begin for s in row.samples)
        return ShownRow(
            caption=f"Step {self.replayed.step + 1}, microbatch {row.microbatch}, rank {row.rank}, row {row.row}: "
            f"{len(row.samples)} samples in {used:,} of {row.length:,} positions",
            strip=self._strip(text, row),
            mask=self._mask(text) if with_mask else "",
            window=describe_window(self.planned.launch.config.model.llm),
            legend=self._legend,
            samples=tuple(self._placed_sample(sample) for sample in row.samples[:samples]),
            hidden_samples=max(0, len(row.samples) - samples),
        )

    def worst(self, worst: Sequence[Worst]) -> list[ShownSample]:
        """Show the samples with the largest losses, of steps that this launch has run."""
        shown = []
        for entry in worst:
            # Ids of earlier launches may be of other data.
            sample = self._id(entry.sample)
            if (
                sample is not None
                and entry.step > self.planned.launch.first
                and len(shown) < WORST_SHOWN
            ):
                shown.append(
                    self._sample(
                        sample, entry.sample, f"loss {entry.loss:.4g} in step {entry.step}", {}
                    )
                )
        return shown

    def _placed_sample(self, sample: PlacedSample) -> ShownSample:
        places = {
            item.number: f"{item.encoder}: rank {item.rank}, row {item.row}, {item.begin}-{item.begin + item.positions}"
            for item in sample.items
        }
        return self._sample(
            sample.id, sample.name, f"positions {sample.begin}-{sample.end}", places
        )

    def _sample(self, sample: int, name: str, caption: str, places: dict[int, str]) -> ShownSample:
        """Show a sample by its id. places: captions of its items, by number."""
        try:
            pieces = self.replayed.pieces(sample)
            encoders = self._encoders(sample)
        except (OSError, ValueError, UserError) as error:
            return ShownSample(name, caption, (), f"It cannot be read: {error}")
        shown: list[ShownPiece] = []
        characters = branch = 0
        first_items = [piece.item for piece in pieces if piece.item is not None]
        for piece in pieces:
            if piece.item is not None:
                # A piece stands for all items up to the next piece's first one: the tiles of an
                # image, say.
                end = min(
                    (n for n in first_items if n > piece.item),
                    default=max(encoders, default=-1) + 1,
                )
                items = tuple(
                    self._item(sample, n, encoders[n], places.get(n, encoders[n]))
                    for n in range(piece.item, end)
                    if n in encoders
                )
                neighbours = shown.pop().items if shown and shown[-1].items else ()
                shown.append(ShownPiece(items=neighbours + items))
                continue
            text = piece.text[: max(0, CHARACTERS - characters)]
            shown.append(
                ShownPiece(text, piece.trained, piece.branch if piece.branch != branch else 0)
            )
            characters += len(piece.text)
            branch = piece.branch
        excess = characters - CHARACTERS
        left_out = f"{excess:,} more characters are left out here" if excess > 0 else ""
        listed = [(token, piece.trained) for piece in pieces for token in piece.tokens]
        source = self.replayed.source(sample)
        tokens = tuple(
            ShownToken(token, spoken(source, [token]), trained)
            for token, trained in listed[: self.max_tokens]
        )
        return ShownSample(name, caption, tuple(shown), left_out, tokens, len(listed) - len(tokens))

    def _encoders(self, sample: int) -> dict[int, str]:
        """Map the numbers of a sample's items to their encoders."""
        segments = self.replayed.loader.reader.sample(sample).segments
        return {
            s.number + k: s.encoder
            for s in segments
            if not isinstance(s, Text)
            for k in range(getattr(s, "items", 1))
        }

    def _item(self, sample: int, number: int, encoder: str, caption: str) -> ShownItem:
        if self.image_budget <= 0:
            return ShownItem(f"{caption} (left out: the page is large enough)")
        config = self.planned.launch.config.model.item_modules[encoder]
        try:
            item = shown_item(config, self.replayed.item(sample, number), caption)
        except (OSError, ValueError, UserError) as error:
            return ShownItem(f"{caption}: cannot be opened: {error}")
        needed = len(item.picture) + len(item.wave)
        if needed > self.image_budget:
            return ShownItem(f"{caption} (left out: the page is large enough)")
        self.image_budget -= needed
        return item

    def _id(self, name: str) -> int | None:
        """Find the id of a sample by its name, "source[index]"; None where the length index has none such."""
        index = self.planned.loader.index
        source, _, number = name.removesuffix("]").rpartition("[")
        names = index.source_name.tolist()
        if source not in names or not number.isdecimal():
            return None
        start, end = index.source_start[names.index(source) :][:2].tolist()
        return start + int(number) if start + int(number) < end else None

    # ----------------------------------------------------------------------------------------------
    # the row's arrays

    def _text_of(self, row: PackedRow) -> TextBatch:
        """Pack a row's arrays, `[T]`, and load only its rank's rows for it."""
        key = row.microbatch, row.rank
        if key not in self._packed:
            plan = self.replayed.plan.microbatches[row.microbatch]
            loader = self.replayed.loader
            ranks = range(row.rank, row.rank + 1)
            self._packed[key] = pack_microbatch(
                plan, loader.batch_layout, loader.reader, ranks, None, unreadable={}
            ).text
        batch = self._packed[key]
        fields = {f: getattr(batch, f)[row.row] for f in TOKEN_FIELDS}
        return TextBatch(**fields, slots={}, send={})

    @property
    def _legend(self) -> dict[str, str]:
        modules = self.planned.launch.config.model.item_modules
        return {"text": "grey", "trained on": "green"} | series_colours(modules)

    def _contents(self, text: TextBatch) -> list[tuple[int, int, str]]:
        """List the runs of positions with the same contents, without padding, as (begin, end, colour)."""
        names = list(self._legend)
        used = text.sample >= 0
        contents = np.where(used, names.index("text"), -1)
        # A position's weight is of the loss of the token after it: that one is trained on.
        trained = np.zeros(len(contents), bool)
        trained[1:] = (text.weight[:-1] > 0) & (text.sample[1:] == text.sample[:-1])
        contents[trained & used] = names.index("trained on")
        for name in self.planned.launch.config.model.item_modules:
            contents[(text.kind == self.replayed.loader.batch_layout.bit(name)) & used] = (
                names.index(name)
            )
        # [5, 5, -1, 3] changes after the positions 1 and 2, so its runs begin at 0, 2 and 3.
        borders = [0, *(np.flatnonzero(np.diff(contents)) + 1).tolist(), len(contents)]
        return [
            (begin, end, self._legend[names[contents[begin]]])
            for begin, end in pairwise(borders)
            if contents[begin] >= 0
        ]

    def _strip(self, text: TextBatch, row: PackedRow) -> str:
        """Draw the contents of a row's positions, from left to right, with a line where a sample ends."""
        scale = WIDE / row.length  # pixels of a position
        drawing = Drawing(WIDE, STRIP + 20)
        for begin, end, colour in self._contents(text):
            drawing.bars([(begin * scale, 0, end * scale, STRIP)], colour, opacity=AREA)
        for sample in row.samples:
            drawing.line(sample.end * scale, [0, STRIP + 16], "ink")
            if (sample.end - sample.begin) * scale > text_width(sample.name):
                middle = (sample.begin + sample.end) / 2 * scale
                drawing.label(middle, STRIP + 15, sample.name, anchor="middle")
        return drawing.svg("strip")

    def _mask(self, text: TextBatch) -> str:
        """Draw the attention mask, queries downwards and keys to the right, with a bar of the contents along both."""
        mask = seen_by_layers(text, self.planned.launch.config.model.llm)
        length = len(mask)
        bar = max(4, length // 60)
        start = bar + 2
        every = -(-length // MASK)
        if every > 1:
            # Downsample by the maximum: a block is as visible as the most visible of its positions.
            starts = np.arange(0, length, every)
            mask = np.maximum.reduceat(np.maximum.reduceat(mask, starts, axis=0), starts, axis=1)
        image = Image.fromarray(mask)
        image.putpalette(MASK_COLOURS)
        drawing = Drawing(start + length, start + length)
        drawing.picture(start, start, length, length, image=image, style="mask")
        for begin, end, colour in self._contents(text):
            above = (start + begin, 0, start + end, bar)
            beside = (0, start + begin, bar, start + end)
            drawing.bars([above, beside], colour, opacity=AREA)
        return drawing.svg("square")


def shown_item(config: Tower, value: np.ndarray, caption: str, side: int = SIDE) -> ShownItem:
    """Show a decoded item of an encoder: an image of at most `side` pixels, or a clip."""
    if config.modality == "audio":
        caption = f"{caption}; {len(value) / config.clips.sample_rate:.2f} s"
        return ShownItem(
            caption, mel_picture(log_mel_frames(config, value)), wave_picture(value), CLIP[0]
        )
    picture, width = image_picture(value, side)
    return ShownItem(f"{caption}; {value.shape[1]} x {value.shape[0]}", picture, "", width)


def item_image(value: np.ndarray) -> Image.Image:
    """Make a Pillow image of a decoded item, `[height, width, channels]`; a single channel is grey."""
    return Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)


def image_picture(
    value: np.ndarray, side: int = SIDE, plain: int = PLAIN_PIXELS
) -> tuple[str, int]:
    """Encode an image as a data URI. Returns it and its width on the page, where small images are enlarged.

    side: the largest in pixels. plain: images of up to so many pixels are stored without loss.
    """
    image = item_image(value)
    if image.width * image.height <= plain:
        zoom = max(1, min(6, 120 // max(image.size)))
        return png_uri(image), image.width * zoom
    file = io.BytesIO()
    image.thumbnail((side, side))
    image.convert("RGB").save(file, "JPEG", quality=80)
    return data_uri("jpeg", file.getvalue()), image.width


def mel_picture(frames: np.ndarray) -> str:
    """Encode log-mel frames `[n, mels]` as a data URI: time to the right, low frequencies at the bottom."""
    low, high = float(frames.min()), float(frames.max())
    shades = ((frames - low) / ((high - low) or 1) * 255).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(shades.T[::-1]))
    if image.width > 2 * CLIP[0]:
        image = image.resize((2 * CLIP[0], image.height), Image.Resampling.BOX)
    return png_uri(image)


def wave_picture(samples: np.ndarray) -> str:
    """Draw the outline of a clip's wave `[n]`, SVG."""
    width, height = WAVE
    # The highest and the lowest sample of each pixel column.
    starts = np.unique(np.linspace(0, len(samples), width, endpoint=False).astype(int))
    upper = np.maximum.reduceat(samples, starts)
    lower = np.minimum.reduceat(samples, starts)
    x = np.linspace(0, width, len(starts))
    peak = float(np.abs(samples).max()) or 1.0
    y = height / 2 * (1 - np.concatenate([upper, lower[::-1]]) / peak)
    drawing = Drawing(width, height)
    drawing.area(np.concatenate([x, x[::-1]]), y, "orange")
    return drawing.svg("wave")
