"""Convert a conversation's images, clips and videos to encoder items, and place their tokens in the text."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from mmjax.config import AudioConfig, MediaLimits, Qwen2Video, VisionConfig
from mmjax.data.media.decode import Probe, VideoHeader, decoder_versions
from mmjax.data.media.decode_clips import ClipHeader, resampled_length
from mmjax.data.media.decode_images import decode_image, read_image_size
from mmjax.data.media.image_transforms import BeforeEncoder, prepare_image, prepared_sizes
from mmjax.data.media.patches import (
    ItemModules,
    item_size,
    shown_tokens,
    split_clip,
    token_grid,
)
from mmjax.data.media.preparations import before_encoder, preparation, sample_video
from mmjax.data.media.soundtrack import (
    SILENT,
    decode_clip,
    decode_sound,
    read_clip_header,
    read_sound_header,
)
from mmjax.data.media.token_layout import BeforeLlm, layout_in_order
from mmjax.data.media.video import decode_video
from mmjax.data.media.video_header import read_video_header
from mmjax.data.sample import (
    PICTURE,
    SOUND,
    ArrangedItems,
    BadSample,
    Item,
    Medium,
    Sample,
    SampleLengths,
    Text,
    TokenLayout,
)
from mmjax.data.sources.sound import Sound, interleave_sound
from mmjax.data.storage.files import FileRef, InlineBytes
from mmjax.data.storage.media_files import FrameFiles
from mmjax.data.text.conversation_tokens import OfMedia
from mmjax.errors import BadMedia, UserError

CACHED_SIZES = 1 << 16  # media whose items' sizes are cached
# decoded media that are cached, so that an image is decoded once for all its tiles
CACHED_MEDIA = 4

HASH_BYTES = 16

# encoder callbacks by the names that the config gives them
Functions = Mapping[str, Callable[..., Any]]
PROBES: dict[str, Probe] = {
    "image": read_image_size,
    "audio": read_clip_header,
    "video": read_video_header,
    SOUND: read_sound_header,
}


# Takes the encoder of each part of each medium, and the texts around its parts.
Tokenize = Callable[[OfMedia, OfMedia], Sample]
# Kind and header's size of each medium of a sample, where sound is read that of a video's behind
# the video's.
MediaSizes = Sequence[tuple[str, tuple[int, int]]]


class MediaItems(NamedTuple):
    """The items of one medium, computed from its header."""

    encoder: str
    sizes: tuple[tuple[int, ...], ...]  # one per item
    # of an image whose tokens are arranged; None: its items' tokens in order
    tokens: TokenLayout | None = None
    # rotary positions along t of a video's temporal patches; (): not by position
    times: tuple[int, ...] = ()
    # of such a video: what text behind it goes on behind
    text_after: Literal["space", "time"] = "space"
    # that stand before each part and behind the last; (): none. A part is an item, or an equal
    # share of its tokens
    texts: tuple[str, ...] = ()
    sound: Sound | None = None  # of a video, behind its temporal patches

    @property
    def items(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """List the encoder and the size of every item."""
        frames = tuple((self.encoder, size) for size in self.sizes)
        return (
            frames if self.sound is None else (*frames, (self.sound.encoder, (self.sound.samples,)))
        )

    @property
    def parts(self) -> list[str]:
        """List the encoder of each place that it has in a text."""
        if self.texts:
            return [self.encoder] * (len(self.texts) - 1)
        return [self.encoder] if self.tokens is not None else [name for name, _ in self.items]

    def numbered(self, number: int) -> MediaItems:
        """Return the items of the image of this number in its sample, which the text before it may name."""
        if not self.texts or "{image}" not in self.texts[0]:
            return self
        first, *others = self.texts
        return self._replace(texts=(first.replace("{image}", str(number)), *others))

    def count(self, encoders: ItemModules) -> int:
        """Count the LLM tokens."""
        if self.tokens is not None:
            return len(self.tokens)
        return sum(item_size(encoders[name], size).tokens for name, size in self.items)

    def segments(self, encoders: ItemModules, first: int) -> list[Item | ArrangedItems]:
        """Return what stands at each of its places; `first` is the number of its first item."""
        if self.tokens is not None:
            return [ArrangedItems(self.encoder, first, len(self.sizes), self.tokens)]
        if self.times:
            frames = [
                Item(self.encoder, first + k, patch=k, time=time, text_after=self.text_after)
                for k, time in enumerate(self.times)
            ]
            return (
                frames
                if self.sound is None
                else [*frames, Item(self.sound.encoder, first + len(frames))]
            )
        shares = len(self.parts) // len(self.sizes)
        if shares == 1:
            return [Item(self.encoder, first + k) for k in range(len(self.sizes))]
        segments = []
        for number, size in enumerate(self.sizes, start=first):
            share = item_size(encoders[self.encoder], size).tokens // shares
            segments += [
                Item(self.encoder, number, part=(k * share, (k + 1) * share)) for k in range(shares)
            ]
        return segments


class MediaProcessors:
    """Prepare images, clips and videos for a model's encoders and generators, and their tokens for its LLM."""

    def __init__(
        self,
        encoders: ItemModules,
        functions: Functions | None = None,
        limits: MediaLimits = MediaLimits(),
    ) -> None:
        """limits: those of `data.limits`. Media beyond them are bad, also while they are prepared."""
        self.encoders = dict(encoders)
        self.limits = limits
        self._eyes = {
            name: ImageProcessor.of(name, encoder, functions or {})
            for name, encoder in encoders.items()
            if "image" in encoder.media
        }
        # Many media have one of few sizes, and arranging the tokens of an image takes longer than
        # looking them up.
        self.items = lru_cache(maxsize=CACHED_SIZES)(self._items)

    @property
    def image_processors(self) -> tuple[ImageProcessor, ...]:
        """Return what prepares images for each encoder that takes them."""
        return tuple(self._eyes.values())

    @property
    def makes_pictures(self) -> bool:
        """Tell whether images of the assistant's are made by a generator."""
        return any(module.is_generator for module in self.encoders.values())

    def encoder(self, kind: Medium | Literal["picture"]) -> str:
        """Return the name of the module that takes media of a kind. Raises UserError where there is none."""
        fits = (name for name, encoder in self.encoders.items() if kind in encoder.media)
        name = next(fits, None)
        if name is None:
            remedy = "set `videos` of one of them" if kind == "video" else "add one"
            raise UserError(
                f"the data has media of the kind {kind}, but no model.encoders takes them; {remedy}"
            )
        return name

    def has_callback(self, name: str) -> bool:
        """Tell whether a function of the user's prepares the images of an encoder."""
        eyes = self._eyes.get(name)
        return eyes is not None and bool(eyes.encoder.callbacks.before_encoder)

    @property
    def sound(self) -> str:
        """Return the encoder of the videos' sound; empty where it is not read."""
        return next(filter(None, (eyes.encoder.videos.sound for eyes in self._eyes.values())), "")

    def writes_text(self, kind: Medium) -> bool:
        """Tell whether text may be written around the items of media of a kind."""
        return kind == "video" or (
            kind == "image" and any(eyes.writes_texts for eyes in self._eyes.values())
        )

    def _items(self, kind: Medium, facts: tuple[int, ...], images: int) -> MediaItems:
        """Compute a medium's items from its header; images: the number of images in its sample. Raises BadMedia.

        facts: of a video its packed header, and where it is read that of its sound.
        """
        name = self.encoder(kind)
        if kind == "image":
            return self._eyes[name].items(facts, images, self.limits)
        encoder = self.encoders[name]
        if kind == PICTURE:
            return MediaItems(
                name, prepared_sizes(before_encoder(encoder.images), facts, 1, self.limits)
            )
        if kind == "video":
            video = sample_video(encoder, VideoHeader.unpacked(facts[:2]))
            sizes = ((encoder.frames, *video.size),) * (len(video.indices) // encoder.frames)
            how = encoder.videos
            if how.interpolates:
                grids = [token_grid(encoder, frame)[1:] for frame in sizes]
                return MediaItems(
                    name, sizes, preparation(how).layout(how, encoder.connector.newline, grids)
                )
            frames = MediaItems(
                name, sizes, times=video.times, text_after=how.text_after, texts=video.texts
            )
            sound = ClipHeader._make(facts[2:]) if self.sound and facts[2:] else SILENT
            return (
                frames
                if sound == SILENT
                else frames._replace(sound=self._sound(how, sound, video.times))
            )
        samples = resampled_length(
            ClipHeader(frames=facts[0], sample_rate=facts[1]), encoder.sample_rate
        )
        return clip_items(name, encoder, samples)

    def _sound(self, how: Qwen2Video, header: ClipHeader, times: Sequence[int]) -> Sound:
        encoder = self.encoders[how.sound]
        samples = resampled_length(header, encoder.sample_rate)
        tokens = item_size(encoder, (samples,)).tokens
        # chunks of one patch each, and one that nothing cuts where there is one alone
        if how.turns == "patches":
            return Sound(
                how.sound, samples, tokens, times[1] if len(times) > 1 else tokens, marks="apart"
            )
        return Sound(how.sound, samples, tokens, how.sound_chunk, marks="together")

    def decoded(self, kind: Medium, file: FileRef, images: int) -> tuple[np.ndarray, ...]:
        """Decode a medium's file to its items, of the sizes that `items` returns. Raises BadMedia."""
        name = self.encoder(kind)
        encoder = self.encoders[name]
        if kind == "video":
            # Of a container only what is needed is read; it may be large.
            with io.BytesIO(file.read()) if isinstance(file, FrameFiles) else file.open() as opened:
                patches = decode_video(opened, encoder, self.limits)
                opened.seek(0)
                rate = self.encoders[self.sound].sample_rate if self.sound else 0
                wave = decode_sound(opened, rate, self.limits) if rate else None
            patches = tuple(map(grey, patches)) if encoder.channels == 1 else patches
            return patches if wave is None else (*patches, wave)
        if kind == "image":
            items = prepare_image(
                self._eyes[name].before_encoder,
                decode_image(file.read(), self.limits),
                images,
                self.limits,
            )
            return tuple(map(grey, items)) if encoder.channels == 1 else items
        if kind == PICTURE:
            items = prepare_image(
                before_encoder(encoder.images),
                decode_image(file.read(), self.limits),
                1,
                self.limits,
            )
            # a VAE takes colours, however many channels it makes
            pixels = encoder.latents.kind == "pixels"
            return tuple(map(grey, items)) if pixels and encoder.latents.channels == 1 else items
        wave = decode_clip(file.read(), encoder.sample_rate, self.limits)
        # Cut after resampling, as `_items` does from the header's length.
        return tuple(wave[start:stop] for start, stop in split_clip(encoder, len(wave)))

    def facts(
        self, text_tokens: int, media: Sequence[MediaItems], branches: tuple[int, ...] | None = None
    ) -> SampleLengths:
        """Return the lengths of a sample with these media, and of its branches where they are known."""
        arranged = any(medium.tokens is not None for medium in media)
        tokens = sum(medium.count(self.encoders) for medium in media) if arranged else None
        return SampleLengths(
            text_tokens, tuple(item for medium in media for item in medium.items), tokens, branches
        )


def clip_items(name: str, encoder: AudioConfig, samples: int) -> MediaItems:
    """Compute the items of a clip of so many samples for the encoder of this name. Raises BadMedia."""
    pieces = [stop - start for start, stop in split_clip(encoder, samples)]
    shown = shown_tokens(encoder, pieces)
    layout = None if shown is None else layout_in_order(shown)
    return MediaItems(name, tuple((piece,) for piece in pieces), layout)


class SampleMedia:
    """The images, clips and videos of numbered samples: their items by their headers, and decoded.

    sizes: returns the media of a sample. file: returns the encoded file of medium `number` of a
    sample.
    """

    def __init__(
        self,
        processors: MediaProcessors,
        sizes: Callable[[int], MediaSizes],
        file: Callable[[int, int], FileRef],
    ) -> None:
        self._processors = processors
        self._sizes = sizes
        self._file = file
        self._decoded = lru_cache(maxsize=CACHED_MEDIA)(self._decode)
        self._read = lru_cache(maxsize=CACHED_MEDIA)(self._read_file)

    def items(self, sample: int) -> list[MediaItems]:
        """Compute the items of every medium of a sample. Raises BadMedia."""
        sizes = _with_own_sound(self._sizes(sample))
        images = sum(kind == "image" for kind, _ in sizes)
        media = [self._processors.items(kind, size, images) for kind, size in sizes]
        number = 0
        for place, (kind, _) in enumerate(sizes):
            if kind == "image":
                media[place] = media[place].numbered(number)
                number += 1
        return media

    def facts(
        self, sample: int, text_tokens: int, branches: tuple[int, ...] | None = None
    ) -> SampleLengths:
        """Return the lengths of a sample with so much text. Raises BadSample where its media cannot be used."""
        try:
            return self._processors.facts(text_tokens, self.items(sample), branches)
        except BadMedia as bad:
            raise BadSample(str(bad)) from None

    def place(self, sample: int, tokenize: Tokenize) -> Sample:
        """Tokenize a sample's text and place its items in it. Raises BadMedia."""
        media = self.items(sample)
        placed = place_media(
            tokenize([medium.parts for medium in media], [medium.texts for medium in media]),
            media,
            self._processors.encoders,
        )
        number = 0
        for medium in media:
            if medium.sound is not None:
                placed = interleave_sound(placed, number, medium.times, medium.sound)
            number += len(medium.items)
        return placed

    def writes_text(self, sample: int) -> bool:
        """Tell whether text is written around a sample's items, which is not counted without them. Raises BadMedia."""
        return any(medium.texts or medium.sound for medium in self.items(sample))

    def item(self, sample: int, number: int) -> np.ndarray:
        """Decode one item. Raises IndexError where the sample has no such item, BadMedia where it cannot be decoded."""
        place = self._locate(sample, number)
        return self._decoded(sample, place.medium)[place.number]

    def item_hash(self, sample: int, number: int) -> bytes | None:
        """Hash the file of an item's medium with what its encoder's config does not say of how it is prepared.

        None for a video, of whose file only a part is read, and for an encoder with a callback.
        """
        place = self._locate(sample, number)
        kinds = self._kinds(sample)
        name, size = place.items.items[place.number]
        if kinds[place.medium] == "video" or self._processors.has_callback(name):
            return None
        limits = self._processors.limits
        prepared = (decoder_versions(), kinds.count("image"), limits, place.number, size)
        digest = hashlib.blake2b(self._read(sample, place.medium).content, digest_size=HASH_BYTES)
        digest.update(repr(prepared).encode())
        return digest.digest()

    def _locate(self, sample: int, number: int) -> _Place:
        # Items are numbered through all media: of media with 3 and 2 items, item 4 is item 1 of
        # medium 1.
        first = 0
        for medium, items in enumerate(self.items(sample)):
            if number < first + len(items.items):
                return _Place(medium, items, number - first)
            first += len(items.items)
        raise IndexError(f"sample {sample} has no item {number}")

    def _kinds(self, sample: int) -> list[str]:
        return [kind for kind, _ in self._sizes(sample) if kind != SOUND]

    def _read_file(self, sample: int, medium: int) -> InlineBytes:
        return InlineBytes(self._file(sample, medium).read())

    def _decode(self, sample: int, medium: int) -> tuple[np.ndarray, ...]:
        kinds = self._kinds(sample)
        kind = kinds[medium]
        file = self._file(sample, medium)
        content = file if kind == "video" else self._read(sample, medium)
        try:
            return self._processors.decoded(kind, content, kinds.count("image"))
        except BadMedia as error:
            raise BadMedia(f"{file.name}: {error}") from None


class _Place(NamedTuple):
    """Name where an item of a sample is: its medium, that medium's items, and its number among them."""

    medium: int
    items: MediaItems
    number: int


def _with_own_sound(sizes: MediaSizes) -> list[tuple[Medium, tuple[int, ...]]]:
    """Join the size of each video's sound to that of the video."""
    joined: list[tuple[Any, tuple[int, ...]]] = []
    for kind, size in sizes:
        if kind == SOUND:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((kind, size))
    return joined


@dataclass(frozen=True)
class ImageProcessor:
    """An image encoder with the functions that prepare its images and arrange their tokens."""

    name: str
    encoder: VisionConfig
    before_encoder: BeforeEncoder
    before_llm: BeforeLlm | None

    @classmethod
    def of(cls, name: str, encoder: VisionConfig, functions: Functions) -> ImageProcessor:
        """Use the encoder's callbacks where its config names some, else the standard functions."""
        callbacks = encoder.callbacks
        how = encoder.images
        layout = (
            partial(preparation(how).layout, how, encoder.connector.newline)
            if how.arranges_tokens
            else None
        )
        return cls(
            name,
            encoder,
            functions[callbacks.before_encoder]
            if callbacks.before_encoder
            else before_encoder(how),
            functions[callbacks.before_llm] if callbacks.before_llm else layout,
        )

    @property
    def writes_texts(self) -> bool:
        """Tell whether text is written between the tokens of an image."""
        return self.encoder.images.writes_texts and not self.encoder.callbacks.before_encoder

    def items(
        self, size: tuple[int, int], images: int, limits: MediaLimits = MediaLimits()
    ) -> MediaItems:
        """Compute the items of an image of (height, width), one of `images` of its sample. Raises BadMedia."""
        sizes = prepared_sizes(self.before_encoder, size, images, limits)
        grids = [token_grid(self.encoder, item_size)[1:] for item_size in sizes]
        how = self.encoder.images
        if self.before_llm is not None:
            return MediaItems(self.name, sizes, self.before_llm(size, grids))
        return MediaItems(
            self.name,
            sizes,
            texts=preparation(how).texts(how, size, grids) if self.writes_texts else (),
        )


def grey(image: np.ndarray) -> np.ndarray:
    """Convert an image uint8 `[h, w, 3]` to its luma `[h, w, 1]` (ITU-R 601), for an encoder of one channel."""
    return ((image @ np.array([299, 587, 114]) + 500) // 1000).astype(np.uint8)[..., None]


def text_tokens(sample: Sample) -> int:
    """Count the tokens of a sample's text."""
    return sum(len(segment.tokens) for segment in sample.segments if isinstance(segment, Text))


def place_media(sample: Sample, media: Sequence[MediaItems], encoders: ItemModules) -> Sample:
    """Replace a sample's places, numbered through the parts of all media, with what stands there."""
    segments: list[Item | ArrangedItems] = []
    items = 0
    for medium in media:
        segments += medium.segments(encoders, items)
        items += len(medium.items)
    return Sample(
        tuple(
            replace(segments[s.number], start=s.start) if isinstance(s, Item) else s
            for s in sample.segments
        )
    )
