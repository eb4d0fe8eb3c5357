"""Pack prompts into rows for generation: each in a row of its own, with its items on the same rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM, Parts
from mmjax.batch import Microbatch
from mmjax.config import CrossEntropy, LossConfig, ModelConfig
from mmjax.data.loading.context import spread_over_context
from mmjax.data.loading.packing import Reader, pack_microbatch
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.sample import Source, with_place
from mmjax.errors import UserError

UNIT = 16  # tokens: row lengths are 1, 2, 3, 4, 6, 8, 12, ... of them


@dataclass(frozen=True)
class BatchLimits:
    """Limit how much a rank answers together. Rows are a power of two, so that few programs are compiled."""

    rows: int = 64  # prompts, at most
    tokens: int = 16_384  # of their rows, answers included, at most; a longer prompt is alone


class _Chunk(NamedTuple):
    """Prompts of one batch, with the row on its rank and the offset in it of each of their parts."""

    prompts: np.ndarray  # int64 [n]
    columns: int
    parts: Parts
    rank: np.ndarray  # int64 [parts]
    row: np.ndarray  # int32 [parts]
    offset: np.ndarray  # int64 [parts]
    lengths: tuple[int, ...]  # of a row of every module
    rows: tuple[int, ...]  # of every module on a rank


def _read_item(prompts: Source, model: ModelConfig, index: int, number: int) -> np.ndarray:
    """Read an item; of an image to be made zeros, as its size alone counts."""
    module, size = prompts.facts(index).items[number]
    generator = model.towers[module]
    if not generator.is_generator:
        return prompts.item(index, number)
    latents = generator.latents
    if vae := generator.step_vae:
        return np.zeros((*size, vae.image_channels), np.uint8)
    dtype = np.uint8 if generator.takes_pixels else np.float32
    return np.zeros((*(side // latents.factor for side in size), latents.channels), dtype)


class PromptRows:
    """Batches of a source's samples, each in a row of its own with its items on the same rank.

    prompts: samples whose text ends where the answer begins, or whole samples whose loss is wanted.
    max_answer: tokens that an answer may take. groups: sets of prompts that will be asked together;
    all batches then have one shape, that of the largest, so that one program serves them all.
    Without groups prompts of similar length share a shape.
    """

    def __init__(
        self,
        prompts: Source,
        model: ModelConfig,
        topology: Topology,
        max_answer: int,
        batch_limits: BatchLimits | None = None,
        groups: Sequence[Sequence[int]] = (),
        loss: LossConfig = CrossEntropy(),
    ) -> None:
        self._index = build_index({"prompt": prompts}, model.item_modules)
        self._layout = BatchLayout.of(model, loss)
        self._max_answer = max_answer
        self._batch_limits = batch_limits or BatchLimits()
        # Items are encoded where their prompt is, so nothing travels.
        self._topology = replace(topology, peers=1, ranks_per_node=1)
        # of the columns, so that devices can have as many each
        self._unit = math.lcm(UNIT, topology.context)
        read_item = partial(_read_item, prompts, model)
        self._reader = Reader(
            sample=prompts.sample,
            facts=prompts.facts,
            item=read_item,
            source_of=self._index.source_of,
            name=self._index.name,
            with_place=partial(with_place, prompts),
        )
        if len(self._index.bad):
            raise UserError(f"{self._index.name(int(self._index.bad[0]))}: {self._index.reason[0]}")
        limit = model.llm.max_tokens
        if self.longest + max_answer > limit:
            name = self._index.name(int(self._index.llm_tokens.argmax()))
            raise UserError(
                f"{name}: {self.longest} tokens and an answer of {max_answer} are more than the {limit} positions that "
                "the LLM learned; ask for shorter answers, or leave the prompt out"
            )
        # Row lengths and rows on a rank, by module.
        self.one_shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if groups:
            self.one_shape = self._common_shape([np.asarray(group, np.int64) for group in groups])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, its items' included."""
        return int(self._index.llm_tokens.max(initial=0))

    def batches(
        self, numbers: Sequence[int] | None = None, unreadable: dict[int, str] | None = None
    ) -> Iterator[tuple[np.ndarray, Microbatch]]:
        """Yield all prompts, or these, with those of similar length together.

        With each batch int64 `[rows]`: the prompt in each row, or -1. One that cannot be read goes
        into `unreadable` with the reason; without that it is a UserError that names it.
        """
        chosen = np.arange(len(self)) if numbers is None else np.asarray(numbers, np.int64)
        for chunk in self._chunks(chosen):
            plan = self._plan(chunk)
            packed = pack_microbatch(plan, self._layout, self._reader, unreadable=unreadable)
            # In their order, as the columns of a KV cache.
            packed = spread_over_context(packed, plan, self._layout, balanced=False)
            present = {
                name
                for k, name in enumerate(self._layout.modules, start=1)
                if np.any(plan.module == k) or (self.one_shape and self.one_shape[1][k])
            }
            prompt = np.full(len(packed.text.token), -1)
            readable = ~np.isin(chunk.prompts, list(unreadable or ()))
            prompt[plan.row[plan.part_start[:-1]]] = np.where(readable, chunk.prompts, -1)
            yield (
                prompt,
                packed._replace(
                    items={n: batch for n, batch in packed.items.items() if n in present}
                ),
            )

    def _chunks(self, prompts: np.ndarray) -> Iterator[_Chunk]:
        """Divide prompts into batches, those of similar length together."""
        columns = np.array(
            [round_up_to_step(int(n), self._unit) for n in self._index.llm_tokens[prompts]],
            np.int64,
        )
        if self.one_shape:
            columns[:] = self.one_shape[0][LLM]
        for length in np.unique(columns).tolist():
            waiting = prompts[columns == length]
            capacity = self._topology.ranks * self._capacity(length)
            for first in range(0, len(waiting), capacity):
                yield self._chunk(waiting[first : first + capacity], length)

    def _capacity(self, columns: int) -> int:
        """Return the number of prompts with rows of this length that a rank answers together: a power of two."""
        rows = min(
            self._batch_limits.rows,
            max(1, self._batch_limits.tokens // (columns + self._max_answer)),
        )
        return 1 << rows.bit_length() - 1

    def _chunk(self, prompts: np.ndarray, columns: int) -> _Chunk:
        """Deal prompts to the ranks in turn; each rank's items go into its first rows that have room for them."""
        # Prompts 0 to 6 on two ranks, each in a row of its own, its items wherever on the rank they
        # fit:
        #   rank 0   LLM | 0 | 2 | 4 | 6 |   encoder | 0 0 2 | 4 6 |
        #   rank 1   LLM | 1 | 3 | 5 |   |   encoder | 1 3   | 5   |
        ranks = self._topology.ranks
        encoders_per_rank = self._topology.encoders_per_rank
        parts = self._index.parts(prompts)
        number = np.arange(len(prompts))
        rank = (number % ranks)[parts.sample()]
        row, offset = np.zeros(len(parts.module), np.int32), np.zeros(len(parts.module), np.int64)
        row[parts.module == LLM] = number // ranks
        # Seven prompts on two ranks: ceil(7 / 2) = 4 rows each.
        lengths = [columns]
        rows = [_power_of_two(-(-len(prompts) // ranks))]
        for k, name in enumerate(self._layout.modules, start=1):
            items = np.flatnonzero(parts.module == k)
            length = (
                self.one_shape[0][k]
                if self.one_shape
                else self._row_length(name, k, parts.length[items])
            )
            row[items], offset[items] = _first_fit(parts.length[items], rank[items], length)
            lengths.append(length)
            rows.append(
                encoders_per_rank
                * _power_of_two(-(-int(row[items].max(initial=0) + 1) // encoders_per_rank))
            )
        if self.one_shape:
            rows = [max(pair) for pair in zip(rows, self.one_shape[1], strict=True)]
        return _Chunk(prompts, columns, parts, rank, row, offset, tuple(lengths), tuple(rows))

    def _common_shape(
        self, groups: Sequence[np.ndarray]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the row lengths and rows of every module that hold any batch of these groups."""
        parts = self._index.parts()
        lengths = [round_up_to_step(self.longest, self._unit)]
        for k, name in enumerate(self._layout.modules, start=1):
            lengths.append(self._row_length(name, k, parts.length[parts.module == k]))
        self.one_shape = tuple(lengths), (0,) * len(lengths)
        needed = np.array([chunk.rows for group in groups for chunk in self._chunks(group)])
        # encoders that no prompt needs
        needed[:, ~np.isin(np.arange(len(lengths)), parts.module)] = 0
        return tuple(lengths), tuple(needed.max(0).tolist())

    def _plan(self, chunk: _Chunk) -> MicrobatchPlan:
        parts = chunk.parts
        rows = np.array(chunk.rows)
        # With 4 rows per rank, row 2 of rank 1 is row 1 * 4 + 2 = 6 of the batch.
        row = (chunk.rank * rows[parts.module] + chunk.row).astype(np.int32)
        return MicrobatchPlan(
            samples=chunk.prompts,
            part_start=parts.sample_start,
            module=parts.module,
            row=row,
            offset=chunk.offset,
            length=parts.length,
            pairs=parts.pairs,
            shape=Shape(chunk.lengths, (0,) * (len(rows) - 1)),
            rows=chunk.rows,
            topology=self._topology,
            unbalanced_row=row,
        )

    def _row_length(self, encoder: str, module: int, positions: np.ndarray) -> int:
        """Return a row length that holds the longest of these items; in steps, where items differ in length."""
        unit = math.lcm(8, int(self._index.positions_per_token[module - 1]))
        config = self._layout.modules[encoder]
        longest = max(1, int(positions.max(initial=0)))
        alike = config.modality == "image" and bool(config.images.item_size)
        # 29 positions in units of 8: ceil(29 / 8) * 8 = 32.
        return -(-longest // unit) * unit if alike else round_up_to_step(longest, unit)


def round_up_to_step(n: int, unit: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units that holds `n`."""
    units = max(1, -(-n // unit))
    power = _power_of_two(units)
    return unit * (power * 3 // 4 if power > 2 and units <= power * 3 // 4 else power)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _first_fit(
    length: np.ndarray, rank: np.ndarray, row_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each item the row on its rank, and where it begins there."""
    row, offset = np.zeros(len(length), np.int32), np.zeros(len(length), np.int64)
    filled: dict[int, list[int]] = {}  # by rank, how far each of its rows is taken
    for i, (n, owner) in enumerate(zip(length.tolist(), rank.tolist(), strict=True)):
        rows = filled.setdefault(owner, [])
        fits = next((k for k, taken in enumerate(rows) if taken + n <= row_length), len(rows))
        if fits == len(rows):
            rows.append(0)
        row[i] = fits
        offset[i] = rows[fits]
        rows[fits] += n
    return row, offset
