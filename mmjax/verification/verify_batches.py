"""Say what is wrong with the batches of another trainer, by what training would feed of each of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from mmjax.errors import UserError
from mmjax.verification.dumped_batch import DumpedBatch
from mmjax.verification.faults import (
    Finding,
    label_faults,
    mask_faults,
    padding_faults,
    position_faults,
    token_faults,
)
from mmjax.verification.pictures import ARRAYS, SECONDS, Pictures, picture_faults, stamp_faults
from mmjax.verification.references import References
from mmjax.verification.segments import Segment, cut_rows

# What is not compared where an array is absent.
ABSENT = {
    "labels": "which tokens are trained on",
    "position_ids": "positions, which the model counts itself",
}


def verify_batch(
    batch: DumpedBatch, known: References
) -> tuple[list[Segment], list[Finding], list[str]]:
    """Return the samples of a batch, its faults, each once for a sample, and what is not compared, a line each."""
    vocab = len(known.chat.tokenizer)
    if batch.ids.min() < 0 or batch.ids.max() >= vocab:
        worst = batch.ids.min() if batch.ids.min() < 0 else batch.ids.max()
        raise UserError(
            f"{batch.name}: input_ids holds {worst}; the tokenizer has the tokens 0 to {vocab - 1}"
        )
    pictures = Pictures(batch, known)
    segments = cut_rows(batch, known, pictures.choose)
    if not segments:
        raise UserError(f"{batch.name}: input_ids holds nothing but padding")
    findings = {}
    for finding in _findings(batch, segments, pictures):
        findings.setdefault((finding.fault, finding.sample), finding)
    return segments, list(findings.values()), list(_unchecked(batch, segments, pictures))


def _findings(
    batch: DumpedBatch, segments: Sequence[Segment], pictures: Pictures
) -> Iterator[Finding]:
    for _, row in groupby(segments, key=lambda segment: segment.row):
        in_row = list(row)
        for segment in in_row:
            yield from token_faults(segment)
            yield from label_faults(segment)
            yield from position_faults(segment, len(in_row) > 1)
        yield from mask_faults(batch, in_row)
    yield from padding_faults(batch, segments)
    yield from picture_faults(pictures, segments)
    yield from stamp_faults(pictures, batch, segments)


def _unchecked(
    batch: DumpedBatch, segments: Sequence[Segment], pictures: Pictures
) -> Iterator[str]:
    for name, what in ABSENT.items():
        if name not in batch.arrays:
            yield f"{name} is absent: {what}, are not compared"
    media = {
        place.medium
        for segment in segments
        if segment.reference
        for place in segment.reference.places
    }
    for medium in sorted(media):
        array = "image" if medium == "video" and "video" not in pictures.of else medium
        name, grid = ARRAYS.get(array, ("", ""))
        if not name:
            yield f"clips are not compared: the values of {medium}"
        elif name not in batch.arrays:
            yield f"{name} is absent: what the {medium}s show is not compared"
        elif array not in pictures.compared:
            shape = f"the shape {list(batch.arrays[name].shape)}{'' if grid in batch.arrays else f' and no {grid}'}"
            yield f"{name} has {shape}, unlike the samples' {medium}s: what it shows is not compared"
    if "video" in media and SECONDS not in batch.arrays and "position_ids" not in batch.arrays:
        yield f"{SECONDS} is absent: times of videos are compared as far as text says them"
