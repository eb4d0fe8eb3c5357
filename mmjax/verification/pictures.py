"""Take the images out of a batch's pixels, as their encoder sees them, and tell whose they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from mmjax.config import Qwen2Video, VisionConfig
from mmjax.verification.dumped_batch import DumpedBatch
from mmjax.verification.faults import Finding, finding
from mmjax.verification.references import Place, References
from mmjax.verification.segments import Segment

# Of 255 levels, by the root of the mean square: as much as processors differ by rounding.
ROUNDING = 4.0
# The arrays of a medium, and of its grids.
ARRAYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
SECONDS = "second_per_grid_ts"


def cut_pictures(batch: DumpedBatch, medium: str, encoder: VisionConfig) -> list[np.ndarray]:
    """Return the images of an array `[height, width, channels]`, or the temporal patches `[frames, ...]`, in 0..255.

    Empty where their layout is not known.
    """
    name, grid_name = ARRAYS[medium]
    values = batch.arrays[name].astype(np.float32)
    grids = batch.arrays.get(grid_name)
    if grids is not None and values.ndim in (2, 4):
        pictures = list(_unpatched(values, grids.tolist(), encoder))
    elif values.ndim >= 4 and values.shape[-3] == encoder.channels:
        images = np.moveaxis(values.reshape(-1, *values.shape[-3:]), 1, -1)
        sizes = batch.arrays.get("image_sizes")
        if values.ndim == 4 and sizes is not None and len(sizes) == len(images):
            cropped = zip(images, sizes.tolist(), strict=True)
            pictures = [image[:height, :width] for image, (height, width) in cropped]
        else:  # rows are padded with images of zeros
            pictures = [image for image in images if image.any()]
    else:
        return []
    mean, std = (np.array(x, np.float32) for x in (encoder.mean, encoder.std))
    return [(picture * std + mean) * 255 for picture in pictures]


def _unpatched(
    values: np.ndarray, grids: Sequence[Sequence[int]], encoder: VisionConfig
) -> Iterator[np.ndarray]:
    """Put patches together, which follow each other by windows, as for Qwen-VL, or by rows, one by one."""
    side, patch, channels = encoder.token_side, encoder.patch, encoder.channels
    window = 1 if values.ndim == 4 else side
    if sum(map(math.prod, grids)) != len(values) or values[:1].size % (channels * patch**2):
        return
    first = 0
    for times, rows, columns in grids:
        if rows % window or columns % window:
            return
        part = values[first : first + times * rows * columns]
        first += times * rows * columns
        windows = part.reshape(
            times, rows // window, columns // window, window, window, channels, -1, patch, patch
        )
        frames = windows.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
        yield from frames.reshape(times, -1, rows * patch, columns * patch, channels)


def distance(picture: np.ndarray, item: np.ndarray) -> float:
    """Return by how many levels two images differ, as the root of the mean square; of other sizes inf."""
    picture, item = (x if x.ndim == 4 else x[None] for x in (picture, item))
    if picture.shape[1:] != item.shape[1:] or item.shape[0] not in (1, picture.shape[0]):
        return math.inf
    return float(np.sqrt(np.mean(np.square(picture - item.astype(np.float32)))))


class Pictures:
    """The images of a batch, in their order; those of videos with them where one array holds both."""

    def __init__(self, batch: DumpedBatch, known: References) -> None:
        encoders = known.layout.modules.values()
        self.encoder = next((e for e in encoders if isinstance(e, VisionConfig)), None)
        self._known = known
        self.of: dict[str, list[np.ndarray]] = {}
        for medium, (name, _) in ARRAYS.items():
            if self.encoder is not None and name in batch.arrays and batch.arrays[name].size:
                self.of[medium] = cut_pictures(batch, medium, self.encoder)
        self.next = dict.fromkeys(ARRAYS, 0)  # the image that the next sample begins with
        self.compared: set[str] = set()  # arrays whose images have the sizes that samples' have

    def array_of(self, place: Place) -> str:
        """Return the medium whose array has an item."""
        return "image" if place.medium == "video" and "video" not in self.of else place.medium

    def choose(self, samples: Sequence[int]) -> int:
        """Choose of samples with the same text the one whose first image is nearest to the next."""

        def far(sample: int) -> float:
            place = next(iter(self._known.reference(sample).places), None)
            if place is None or not self.of.get(self.array_of(place)):
                return 0
            index = self.next[self.array_of(place)]
            return abs(self._find(sample, place, index, math.inf) - index)

        # The first that is next ends the search: of others nothing needs to be decoded.
        best, nearest = samples[0], math.inf
        for sample in samples if len(samples) > 1 else ():
            if (apart := far(sample)) < nearest:
                best, nearest = sample, apart
            if not nearest:
                break
        for medium, shown in self.of.items():
            places = [p for p in self._known.reference(best).places if self.array_of(p) == medium]
            if places and shown:
                index = self.next[medium] + len(places) - 1
                self.next[medium] = int(self._find(best, places[-1], index, index)) + 1
        return best

    def _find(self, sample: int, place: Place, index: int, absent: float) -> float:
        """Return where an item is among the images, nearest to where it should be; or else `absent`."""
        shown = self.of[self.array_of(place)]
        item = self._known.item(sample, place.number)
        near = sorted(range(len(shown)), key=lambda number: abs(number - index))
        return next((k for k in near if distance(shown[k], item) <= ROUNDING), absent)


def picture_faults(pictures: Pictures, segments: Sequence[Segment]) -> Iterator[Finding]:
    """Compare the images of a batch with those of its samples, by what they show."""
    for medium, shown in pictures.of.items():
        owners = [
            (segment, place)
            for segment in segments
            for place in (segment.reference.places if segment.reference else ())
            if pictures.array_of(place) == medium
        ]
        items = [
            segment.known.item(segment.reference.sample, place.number) for segment, place in owners
        ]
        if {x.shape[-3:] for x in shown} & {x.shape[-3:] for x in items}:
            pictures.compared.add(medium)
            has_unknown = any(segment.reference is None for segment in segments)
            yield from _compare_pictures(shown, items, owners, has_unknown)


def _compare_pictures(
    shown: Sequence[np.ndarray],
    items: Sequence[np.ndarray],
    owners: Sequence[tuple[Segment, Place]],
    has_unknown: bool,
) -> Iterator[Finding]:
    """Tell missing, doubled and exchanged images apart. has_unknown: some images may be of no known sample."""
    right = [distance(*pair) <= ROUNDING for pair in zip(shown, items, strict=False)]
    if all(right) and len(shown) == len(items):
        return

    def found(number: int, fault: str, message: str) -> Finding:
        segment, place = owners[number]
        tokens = segment.pairs[segment.pairs[:, 1] >= place.begin, 0]
        message = f"item {place.number} {message}"
        return finding(segment, fault, int(tokens[0]) if len(tokens) else 0, message)

    # Images that look alike are one: the first item of them.
    kinds = [_nearest(item, items) for item in items]
    matched = [_nearest(picture, items) for picture in shown]
    known = [kind for kind in matched if kind is not None]
    strange = 0 if has_unknown else len(matched) - len(known)
    lacking = Counter(kinds) - Counter(known)
    doubled = Counter(known) - Counter(kinds)
    # Those whose placeholders are missing may be missing too.
    for number, (segment, place) in enumerate(owners):
        if place.begin not in segment.pairs[:, 1] and lacking[kinds[number]]:
            lacking[kinds[number]] -= 1
            kinds[number] = None
    for number in +lacking:
        if strange:
            apart = distance(shown[min(number, len(shown) - 1)], items[number])
            message = f"is not among the batch's images; that in its place differs by {apart:.0f} of 255 levels"
            yield found(number, "other image", message)
            strange -= 1
        else:
            yield found(number, "missing image", "is not among the batch's images")
    for number in doubled:
        yield found(
            number, "doubled image", "is among the batch's images more often than in its text"
        )
    if strange and not +lacking:
        yield found(
            len(items) - 1, "doubled image", f"is not the last: {strange} more are of no sample"
        )
    if not +lacking and not doubled:
        order = [(number, kind) for number, kind in enumerate(kinds) if kind is not None]
        for (number, kind), other_kind in zip(order, known, strict=True):
            if kind != other_kind:
                segment, place = owners[other_kind]
                whose = f"in its place is item {place.number} of {segment.name}"
                yield found(number, "images in another order", f"is elsewhere; {whose}")


def _nearest(image: np.ndarray, items: Sequence[np.ndarray]) -> int | None:
    """Return the first of the items that differ least from an image; None where all differ by more than rounding."""
    apart = [distance(image, item) for item in items]
    return int(np.argmin(apart)) if apart and min(apart) <= ROUNDING else None


def stamp_faults(
    pictures: Pictures, batch: DumpedBatch, segments: Sequence[Segment]
) -> Iterator[Finding]:
    """Compare the seconds of each video's temporal patches, from which a model computes positions."""
    seconds = batch.arrays.get(SECONDS)
    how = pictures.encoder.videos if pictures.encoder else None
    if seconds is None or not isinstance(how, Qwen2Video) or not how.tokens_per_second:
        return
    videos: list[tuple[Segment, list[Place]]] = []
    for segment in segments:
        for place in segment.reference.places if segment.reference else ():
            if place.medium == "video" and not place.patch:
                videos.append((segment, []))
            if place.medium == "video":
                videos[-1][1].append(place)
    for (segment, places), step in zip(
        videos, seconds.reshape(-1).astype(np.float32), strict=False
    ):
        expected = [place.time for place in places]
        fed = np.arange(len(expected), dtype=np.float32) * (
            np.float32(how.tokens_per_second) * step
        )
        if fed.astype(int).tolist() != expected:
            token = int(np.argmax(segment.aligned(segment.reference.medium + 1) > 0))
            stand = f"its temporal patches stand at {fed.astype(int).tolist()}, and should at {expected}"
            yield finding(segment, "video stamps", token, f"{SECONDS} says {step:g}: {stand}")
