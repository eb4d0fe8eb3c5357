"""Find what is wrong with a batch: a function for each kind of fault, which takes its samples and yields findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from mmjax.verification.dumped_batch import IGNORED, DumpedBatch
from mmjax.verification.references import MEDIA
from mmjax.verification.segments import Change, Segment

VIDEO = MEDIA.index("video")
STAMP = re.compile(r"[\d.,:\s]*")  # how the tokens look in which two time stamps differ
NEAR = 16  # tokens between a video's placeholders and its time stamps


class Finding(NamedTuple):
    """One fault of one sample."""

    fault: str
    sample: str
    token: int
    text: str  # of the token
    message: str  # what is there, and what should be


def finding(segment: Segment, fault: str, token: int, message: str) -> Finding:
    """Describe a fault of a sample, at one of its tokens."""
    token = min(token, len(segment.ids) - 1)
    return Finding(fault, segment.name, token, segment.text(token), message)


# --------------------------------------------------------------------------------------------------
# tokens


def token_faults(segment: Segment) -> Iterator[Finding]:
    """Compare the tokens of a sample."""
    reference = segment.reference
    if reference is None:
        yield finding(segment, "unknown sample", 0, "no sample of the data has such tokens")
        return
    for change in segment.changes:
        if _is_blank_end(segment, change):
            continue
        fault, message = _kind_of(segment, change)
        yield finding(segment, fault, change.token, message)


def _is_blank_end(segment: Segment, change: Change) -> bool:
    """Tell whether white space alone is missing or more behind the last answer, which teaches nothing."""
    reference = segment.reference
    assert reference is not None
    if change.token < len(segment.ids) and change.number < len(reference.ids):
        return False
    decode = segment.known.chat.tokenizer.decode
    tails = segment.ids[change.token :], reference.ids[change.number :]
    return not reference.trained[change.number :].any() and not any(
        decode(t).strip() for t in tails
    )


def _kind_of(segment: Segment, change: Change) -> tuple[str, str]:
    """Name a difference of tokens, and describe it."""
    reference = segment.reference
    assert reference is not None
    fed, expected, token, number = change
    total = len(reference.ids)
    placeholders = segment.known.placeholders
    if not fed and expected[-1].begin + expected[-1].count == total:
        return "truncated sample", f"it ends behind {token} of {total} tokens"
    if not fed and not number:
        begin = expected[-1].begin + expected[-1].count
        return "truncated sample", f"it begins with token {begin} of {total}"
    if not expected and token <= 1 and fed[0].token == reference.ids[0] == segment.ids[0]:
        return "doubled begin token", "it stands there twice, and should once"
    medium = MEDIA[int(reference.medium[number])] if number < total else ""
    if len(fed) == len(expected) == 1 and fed[0].token == expected[0].token:
        counts = (
            f"{fed[0].count} placeholders stand for the {medium}, and should {expected[0].count}"
        )
        if fed[0].begin + fed[0].count == len(segment.ids) and total - number > expected[0].count:
            return "truncated sample", f"it ends behind {len(segment.ids)} of {total} tokens"
        fewer = fed[0].count < expected[0].count
        return ("truncated image tokens" if fewer else "too many image tokens"), counts
    counts = [sum(s.token in placeholders for s in symbols) for symbols in (fed, expected)]
    if counts[0] != counts[1]:
        fault = "missing image" if counts[0] < counts[1] else "doubled image"
        return fault, f"{counts[0]} images stand here, and should {counts[1]}"
    texts = [
        segment.known.chat.tokenizer.decode([s.token for s in symbols])
        for symbols in (fed, expected)
    ]
    videos = np.flatnonzero(reference.medium == VIDEO)
    near = len(videos) and videos[0] - NEAR <= number <= videos[-1] + NEAR
    if near and all(map(STAMP.fullmatch, texts)):
        return "video stamps", f"the stamp says {texts[0]!r}, and should {texts[1]!r}"
    return "other tokens", f"there is {texts[0]!r:.80}, and should be {texts[1]!r:.80}"


# --------------------------------------------------------------------------------------------------
# labels


def label_faults(segment: Segment) -> Iterator[Finding]:
    """Compare which tokens of a sample are trained on."""
    labels = segment.batch.arrays.get("labels")
    reference = segment.reference
    if labels is None or reference is None:
        return
    labels = labels[segment.row, segment.span]
    trained = labels != IGNORED
    where = np.flatnonzero(trained)
    unlike = where[labels[where] != segment.ids[where]]
    for step, ids in ((1, np.roll(segment.ids, -1)), (-1, np.roll(segment.ids, 1))):
        if len(unlike) and np.array_equal(labels[where], ids[where]):
            turn = "behind" if step > 0 else "before"
            message = f"the label is the token {turn} it; transformers shifts labels itself"
            yield finding(segment, "labels shifted by one", int(unlike[0]), message)
            return
    for token in np.flatnonzero(trained & segment.is_placeholder)[:1].tolist():
        yield finding(segment, "label on a placeholder", token, f"it should be {IGNORED}")
    unlike = unlike[~segment.is_placeholder[unlike]]
    for token in unlike[:1].tolist():
        message = f"the label is {labels[token]}, and should be {segment.ids[token]}"
        yield finding(segment, "other label", token, message)
    yield from _turn_faults(segment, trained & ~segment.is_placeholder)


def _turn_faults(segment: Segment, trained: np.ndarray) -> Iterator[Finding]:
    reference = segment.reference
    assert reference is not None
    expected = segment.aligned(reference.trained)
    same = segment.aligned(np.ones(len(reference.ids), bool))
    lacking = expected & ~trained
    extra = trained & same & ~expected
    # A line break behind an answer teaches nothing, and some trainers train on it.
    blank = expected.copy()
    for token in np.flatnonzero(extra).tolist():
        blank[token] = bool(token and blank[token - 1] and not segment.text(token).strip())
    extra &= ~blank
    answers = np.flatnonzero(np.diff(expected, prepend=False, append=False)).reshape(-1, 2)
    if len(answers) > 1 and not extra.any():
        last = answers[-1][0]
        if lacking[:last].sum() == expected[:last].sum() and not lacking[last:].any():
            message = f"{len(answers) - 1} answers before it are not, and should be"
            yield finding(segment, "only the last turn trained", int(last), message)
            return
    if extra.any() and not lacking.any():
        every = segment.aligned(segment.known.all_answers(reference.sample))
        if np.array_equal(every & ~expected, extra):
            message = "the answers before the last are trained on, and should not be"
            yield finding(segment, "all turns trained", int(np.argmax(extra)), message)
            return
    for token in np.flatnonzero(extra)[:1].tolist():
        message = f"{extra.sum()} tokens that are no answer are trained on"
        yield finding(segment, "label is no answer", token, message)
    for token in np.flatnonzero(lacking)[:1].tolist():
        message = f"{lacking.sum()} tokens of answers are not trained on"
        yield finding(segment, "answer without label", token, message)


def padding_faults(batch: DumpedBatch, segments: Sequence[Segment]) -> Iterator[Finding]:
    """Find labels outside of all samples."""
    if (labels := batch.arrays.get("labels")) is None:
        return
    counted = labels != IGNORED
    for segment in segments:
        counted[segment.row, segment.span] = False
    for row in np.flatnonzero(counted.any(axis=1)).tolist():
        token = int(np.argmax(counted[row]))
        message = f"{counted[row].sum()} labels at padding, which should be {IGNORED}"
        text = segments[0].known.chat.tokenizer.decode([int(batch.ids[row, token])])
        yield Finding("padding trained", f"row {row}", token, text, message)


# --------------------------------------------------------------------------------------------------
# positions and mask


def position_faults(segment: Segment, packed: bool) -> Iterator[Finding]:
    """Compare the rotary positions of a sample, up to the first token that differs. packed: others are in its row."""
    reference = segment.reference
    if reference is None:
        return
    expected = reference.position
    fed = segment.batch.positions(segment.row, segment.span)
    if fed is None:
        if packed and segment.begin:
            message = "position_ids are absent, so that the model counts on from sample to sample"
            yield finding(segment, "positions not reset", 0, message)
        return
    same = segment.pairs
    count = int(np.argmin([*(same[:, 0] == same[:, 1]), False]))
    if not count:
        return
    axes = max(fed.ndim, expected.ndim) > 1
    fed, expected = (x[:count].reshape(count, -1) for x in (fed, expected))
    apart = fed - expected
    # Rotary positions count by their distances: a constant is one of padding, unless it is by axis.
    unlike = np.flatnonzero((apart != apart[0, 0]).any(axis=1))
    if len(unlike):
        token = int(unlike[0])
        in_time = (
            axes and reference.medium[token] == VIDEO and (apart[token, 1:] == apart[0, 0]).all()
        )
        fault = "video stamps" if in_time else "mRoPE positions" if axes else "other positions"
        places = [x[token].tolist() for x in (fed - apart[0, 0], expected)]
        message = f"it stands at {_spell(places[0])}, and should at {_spell(places[1])}"
        yield finding(segment, fault, token, message)
    elif packed and apart[0, 0]:
        message = f"it begins at position {fed[0, 0]}, and should at {expected[0, 0]}"
        yield finding(segment, "positions not reset", 0, message)


def _spell(position: Sequence[int]) -> str:
    return str(position[0]) if len(set(position)) == 1 else f"({', '.join(map(str, position))})"


def mask_faults(batch: DumpedBatch, segments: Sequence[Segment]) -> Iterator[Finding]:
    """Find samples of a row that attend others."""
    mask = batch.arrays.get("attention_mask")
    for segment, neighbour in permutations(segments, 2):
        if mask is not None and mask.ndim == 4:
            attended = mask[segment.row, 0, segment.span, neighbour.span]
            if (attended != 0 if mask.dtype.kind in "biu" else attended == 0).any():
                message = f"attention_mask lets it attend {neighbour.name}"
                yield finding(segment, "attends another sample", 0, message)
    for previous, segment in pairwise(segments):
        if why := _unparted(batch, previous, segment):
            message = f"it attends {previous.name}: {why}"
            yield finding(segment, "attends another sample", 0, message)


def _unparted(batch: DumpedBatch, previous: Segment, segment: Segment) -> str:
    """Return why nothing but a mask of pairs parts two neighbours of a row; empty: something does."""
    mask = batch.arrays.get("attention_mask")
    row, first = segment.row, segment.begin
    if mask is not None and mask.ndim == 4:
        return ""
    if batch.borders is not None:
        return "" if first in batch.borders else "no entry of cu_seq_lens is where it begins"
    if mask is not None:
        if mask[row, first] != mask[row, previous.end - 1]:
            return ""
        return f"attention_mask is {mask[row, first]} for both, and there are no cu_seq_lens"
    if batch.counted is None:
        return "there are no cu_seq_lens, no attention_mask and no position_ids [rows, tokens]"
    if batch.counted[row, first] != batch.counted[row, first - 1] + 1:
        return ""
    return "neither cu_seq_lens nor an attention_mask nor position_ids part them"
