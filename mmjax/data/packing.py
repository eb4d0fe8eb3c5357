"""From a microbatch's plan to its arrays: only what the wanted rows hold is opened and decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.batch import PADDING, ItemBatch, Microbatch, TextBatch
from mmjax.config import AudioConfig, DecoderConfig, VisionConfig
from mmjax.data.media import prepare
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.sample import Item, Sample, Text
from mmjax.errors import UserError

TEXT_KIND = 1
FIRST_BRANCH_BIT = 12  # below: text and up to eleven encoders
MAX_BRANCHES = 30 - FIRST_BRANCH_BIT


@dataclass(frozen=True)
class Layout:
    """What the arrays look like: the encoders in their order, and how an item's tokens attend in the LLM."""

    encoders: dict[str, VisionConfig | AudioConfig]
    items: str  # DecoderConfig.items
    rows: tuple[int, ...]  # of every module per microbatch, the LLM first

    @classmethod
    def of(cls, llm: DecoderConfig, encoders: dict[str, VisionConfig | AudioConfig], rows: tuple[int, ...]) -> Layout:
        return cls(encoders, llm.items, rows)

    def merge(self, encoder: str) -> int:
        """Encoder positions per LLM token."""
        config = self.encoders[encoder]
        return config.connector.merge**2 if isinstance(config, VisionConfig) else 2 * config.connector.merge

    def features(self, encoder: str) -> int:
        """Width of one patch or frame."""
        config = self.encoders[encoder]
        return config.patch**2 * config.channels if isinstance(config, VisionConfig) else config.mels


@dataclass(frozen=True)
class Reader:
    """How the loader gets at samples: by global id."""

    sample: Callable[[int], Sample]
    item: Callable[[int, int], np.ndarray]
    source_of: Callable[[np.ndarray], np.ndarray]
    name: Callable[[int], str]  # for messages: "source[index]"


def share_of(rows: int, process: int, processes: int) -> range:
    """The rows of one module that a process holds: contiguous, the first processes one more where they do not divide."""
    each, more = divmod(rows, processes)
    start = process * each + min(process, more)
    return range(start, start + each + (process < more))


def pack_microbatch(
    plan: MicrobatchPlan, layout: Layout, reader: Reader, process: int = 0, processes: int = 1
) -> Microbatch:
    """The rows of `plan` that `process` of `processes` holds, as arrays.

    Raises UserError, naming the sample, where what was loaded is not what the length index promised.
    """
    shares = [share_of(r, process, processes) for r in layout.rows]
    encoders = list(layout.encoders)
    items = {}
    for k, encoder in enumerate(encoders, start=1):
        items[encoder] = _pack_items(plan, k, layout, encoder, shares[k], reader)
    return Microbatch(_pack_text(plan, layout, shares[0], reader), items)


def _pack_items(
    plan: MicrobatchPlan, module: int, layout: Layout, encoder: str, share: range, reader: Reader
) -> ItemBatch:
    shape = (len(share), plan.shape[module])
    values = np.zeros((*shape, layout.features(encoder)), np.float32)
    item = np.full(shape, PADDING, np.int32)
    coordinates = np.zeros((*shape, 3), np.int32)
    in_row = np.zeros(len(share), np.int32)
    sample_of_part = np.repeat(np.arange(len(plan.samples)), np.diff(plan.part_start))
    for part in np.flatnonzero(plan.module == module):
        row = plan.row[part] - share.start
        if not 0 <= row < len(share):
            continue
        index = sample_of_part[part]
        sample, number = int(plan.samples[index]), int(part - plan.part_start[index] - 1)
        value, where, valid = prepare(layout.encoders[encoder], reader.item(sample, number))
        if len(value) != plan.length[part] or not np.isfinite(value).all():
            problem = "holds NaN or Inf" if len(value) == plan.length[part] else (
                f"has {len(value)} positions where its header promised {plan.length[part]}"
            )
            raise UserError(f"item {number} ({encoder}) of sample {reader.name(sample)} {problem}; fix or remove the file")
        at = slice(plan.offset[part], plan.offset[part] + len(value))
        values[row, at], coordinates[row, at] = value, where
        item[row, at] = np.where(valid, in_row[row], PADDING)
        in_row[row] += 1
    return ItemBatch(values, item, coordinates)


def _pack_text(plan: MicrobatchPlan, layout: Layout, share: range, reader: Reader) -> TextBatch:
    shape = (len(share), plan.shape[0])
    zeros = lambda: np.zeros(shape, np.int32)  # noqa: E731
    batch = TextBatch(
        token=zeros(),
        target=zeros(),
        weight=np.zeros(shape, np.float32),
        position=zeros(),
        sample=np.full(shape, PADDING, np.int32),
        pos=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        span=zeros(),
        kind=zeros(),
        sees=zeros(),
        source=np.full(shape, PADDING, np.int32),
        slots={e: np.full(shape, PADDING, np.int32) for e in layout.encoders},
    )
    sources = reader.source_of(plan.samples)
    in_row = np.zeros(len(share), np.int32)
    spans = np.zeros(len(share), np.int32)
    for index, sample in enumerate(map(int, plan.samples)):
        part = plan.part_start[index]
        row = plan.row[part] - share.start
        if not 0 <= row < len(share):
            continue
        at = slice(int(plan.offset[part]), int(plan.offset[part] + plan.length[part]))
        item_parts = range(part + 1, plan.part_start[index + 1])
        written = write_sample(_row_views(batch, row, at), reader.sample(sample), layout, plan, item_parts, spans[row])
        if written != plan.length[part]:
            raise UserError(
                f"sample {reader.name(sample)} has {written} tokens where the length index promised {plan.length[part]}; "
                "its source's facts() and sample() disagree"
            )
        batch.sample[row, at], batch.source[row, at] = in_row[row], sources[index]
        in_row[row] += 1
        spans[row] += len(item_parts)
    return batch


def _row_views(batch: TextBatch, row: int, at: slice) -> TextBatch:
    views = {f: getattr(batch, f)[row, at] for f in TextBatch._fields if f != "slots"}
    return TextBatch(**views, slots={e: s[row, at] for e, s in batch.slots.items()})


def write_sample(
    row: TextBatch, sample: Sample, layout: Layout, plan: MicrobatchPlan, item_parts: Sequence[int], first_span: int
) -> int:
    """Write one sample's tokens into its stretch of a row (views `[n]`); how many there were.

    A token is the target of the token before it in its own branch. Branches see branch 0 and themselves: each has a kind
    bit of its own, so the mask spec needs nothing more.
    """
    encoder_bits = {e: 2 << k for k, e in enumerate(layout.encoders)}
    everyone = TEXT_KIND | sum(encoder_bits.values())
    at = 0
    shared_end = 0  # RoPE position after branch 0
    branch_end: dict[int, int] = {}
    last: dict[int, int] = {}  # last token written of each branch, -1 = an item, which predicts nothing across branches
    room = len(row.token)
    for segment in sample.segments:
        branch = segment.branch if isinstance(segment, Text) else 0
        begin = branch_end.get(branch, shared_end) if segment.start is None else segment.start
        if isinstance(segment, Text):
            n = len(segment.tokens)
            if branch > MAX_BRANCHES:
                raise UserError(f"a sample has {branch} branches; at most {MAX_BRANCHES} fit the mask")
            own = 1 << (FIRST_BRANCH_BIT + branch - 1) if branch else TEXT_KIND
            if at + n <= room:
                here = slice(at, at + n)
                row.token[here], row.kind[here], row.sees[here] = segment.tokens, own, everyone | own
                previous = last.get(branch, PADDING)
                if previous >= 0:
                    row.target[previous], row.weight[previous] = segment.tokens[0], segment.weights[0]
                elif segment.weights[0] and branch:
                    raise UserError("the first token of a branch has a loss weight, but no token before it predicts it")
                row.target[at : at + n - 1], row.weight[at : at + n - 1] = segment.tokens[1:], segment.weights[1:]
                last[branch] = at + n - 1
        else:
            part = item_parts[segment.number]
            merge = layout.merge(segment.encoder)
            n = int(plan.length[part]) // merge
            if at + n <= room:
                here = slice(at, at + n)
                k = list(layout.encoders).index(segment.encoder) + 1
                first = int(plan.row[part]) * (plan.shape[k] // merge) + int(plan.offset[part]) // merge
                row.slots[segment.encoder][here] = np.arange(first, first + n)
                isolated, causal = layout.items == "isolated", layout.items == "causal"
                row.kind[here], row.sees[here] = encoder_bits[segment.encoder], 0 if isolated else everyone
                row.span[here] = 0 if causal else first_span + segment.number + 1
                last[0] = at + n - 1
        if at + n <= room:
            row.position[here] = np.arange(begin, begin + n)
        at += n
        branch_end[branch] = begin + n
        shared_end = branch_end[0] if 0 in branch_end else 0
    return at
