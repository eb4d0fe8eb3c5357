"""Prompts one a row, in few shapes: what text is generated from, packed as training samples are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.batch import Microbatch
from mmjax.config import AnyRes, DynamicTiles, FixedSize, ModelConfig, VisionConfig
from mmjax.data.index import build_index
from mmjax.data.packing import Reader, pack_microbatch
from mmjax.data.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.sample import Facts, Sample, Source
from mmjax.data.text_rows import Arrays
from mmjax.errors import UserError

UNIT = 16  # tokens: row lengths are 1, 2, 3, 4, 6, 8, 12, ... of them


@dataclass(frozen=True)
class AtOnce:
    """How much a rank answers together. Rows are a power of two, so that few programs are compiled."""

    rows: int = 64  # prompts, at most
    tokens: int = 16_384  # of their rows, answers included, at most; a longer prompt is alone


class PromptRows:
    """Batches of a source's prompts, each in a row of its own with its items on the same rank.

    `prompts` are samples whose text ends where the answer begins. `room`: tokens that an answer may take.
    """

    def __init__(
        self, prompts: Source, model: ModelConfig, topology: Topology, room: int, at_once: AtOnce | None = None
    ) -> None:
        self._index = build_index({"prompt": prompts}, model.encoders)
        self._arrays = Arrays.of(model)
        self._room, self._at_once = room, at_once or AtOnce()
        # Items are encoded where their prompt is, so nothing travels.
        self._topology = Topology(topology.ranks, 1, 1, topology.encoders_per_rank)
        self._reader = Reader(prompts.sample, prompts.facts, prompts.item, self._index.source_of, self._index.name)
        if len(self._index.bad):
            raise UserError(f"{self._index.name(int(self._index.bad[0]))}: {self._index.reason[0]}")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, its items' included."""
        return int(self._index.llm_tokens.max(initial=0))

    def batches(self, spoiled: dict[int, str] | None = None) -> Iterator[tuple[np.ndarray, Microbatch]]:
        """All prompts, those of like length together. With each batch int64 `[rows]`: the prompt in each row, or -1.

        One that cannot be read goes into `spoiled` with the reason; without that it is a UserError that names it.
        """
        length = np.array([in_steps(int(n), UNIT) for n in self._index.llm_tokens], np.int64)
        for columns in np.unique(length).tolist():
            waiting = np.flatnonzero(length == columns)
            most = self._topology.ranks * _rows(self._at_once, columns + self._room)
            for first in range(0, len(waiting), most):
                yield self._batch(waiting[first : first + most], columns, spoiled)

    def _batch(
        self, prompts: np.ndarray, columns: int, spoiled: dict[int, str] | None
    ) -> tuple[np.ndarray, Microbatch]:
        plan = self._plan(prompts, columns)
        packed = pack_microbatch(plan, self._arrays, self._reader, spoiled=spoiled)
        there = {name for k, name in enumerate(self._arrays.encoders, start=1) if np.any(plan.module == k)}
        lies = np.full(len(packed.text.token), -1)
        lies[plan.row[plan.part_start[:-1]]] = np.where(np.isin(prompts, list(spoiled or ())), -1, prompts)
        return lies, packed._replace(items={name: batch for name, batch in packed.items.items() if name in there})

    def _plan(self, prompts: np.ndarray, columns: int) -> MicrobatchPlan:
        """Prompts go round the ranks; a rank's items into the first rows that have room for them."""
        index, ranks = self._index, self._topology.ranks
        parts = index.parts(prompts)
        number = np.arange(len(prompts))
        home = (number % ranks)[parts.sample()]
        rows, lengths = [_power_of_two(-(-len(prompts) // ranks))], [columns]
        row, offset = np.zeros(len(parts.module), np.int32), np.zeros(len(parts.module), np.int64)
        row[parts.module == LLM] = number % ranks * rows[0] + number // ranks
        for k, name in enumerate(self._arrays.encoders, start=1):
            of = np.flatnonzero(parts.module == k)
            lengths.append(self._row_length(name, k, parts.length[of]))
            on_rank, offset[of] = _first_fit(parts.length[of], home[of], lengths[-1])
            each = self._topology.encoders_per_rank
            rows.append(each * _power_of_two(-(-int(on_rank.max(initial=0) + 1) // each)))
            row[of] = home[of] * rows[-1] + on_rank
        nothing = np.zeros((len(rows), ranks * self._topology.encoders_per_rank), np.int64)
        shape = Shape(tuple(lengths), (0,) * (len(rows) - 1))
        place = (parts.sample_start, parts.module, row, offset, parts.length)
        return MicrobatchPlan(prompts, *place, shape, tuple(rows), self._topology, nothing)

    def _row_length(self, encoder: str, module: int, positions: np.ndarray) -> int:
        """Of the longest of these items; where not all items of an encoder are of one length, in steps."""
        unit = math.lcm(8, int(self._index.positions_per_token[module - 1]))
        config, longest = self._arrays.encoders[encoder], max(1, int(positions.max(initial=0)))
        alike = isinstance(config, VisionConfig) and isinstance(config.images, FixedSize | DynamicTiles | AnyRes)
        return -(-longest // unit) * unit if alike else in_steps(longest, unit)


class Some:
    """Some prompts of a source, in this order."""

    def __init__(self, prompts: Source, numbers: Sequence[int]) -> None:
        self._prompts, self._numbers = prompts, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def fingerprint(self) -> str:
        """That of the source, and which they are."""
        return f"{self._prompts.fingerprint()}:{list(self._numbers)}"

    def facts(self, index: int) -> Facts:
        """Of that prompt."""
        return self._prompts.facts(self._numbers[index])

    def sample(self, index: int) -> Sample:
        """That prompt."""
        return self._prompts.sample(self._numbers[index])

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of that prompt."""
        return self._prompts.item(self._numbers[index], number)


def in_steps(n: int, unit: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units that holds `n`."""
    units = max(1, -(-n // unit))
    power = _power_of_two(units)
    return unit * (power * 3 // 4 if power > 2 and units <= power * 3 // 4 else power)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _rows(at_once: AtOnce, columns: int) -> int:
    """Of prompts on a rank."""
    most = min(at_once.rows, max(1, at_once.tokens // columns))
    return 1 << most.bit_length() - 1


def _first_fit(length: np.ndarray, rank: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """For each item the row on its rank, and where it begins there."""
    row, offset = np.zeros(len(length), np.int32), np.zeros(len(length), np.int64)
    filled: dict[int, list[int]] = {}
    for i, (n, at) in enumerate(zip(length.tolist(), rank.tolist(), strict=True)):
        rows = filled.setdefault(at, [])
        fits = next((k for k, taken in enumerate(rows) if taken + n <= room), len(rows))
        if fits == len(rows):
            rows.append(0)
        row[i], offset[i] = fits, rows[fits]
        rows[fits] += n
    return row, offset
