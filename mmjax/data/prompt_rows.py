"""Pack prompts for generation, one per row, in few shapes, as training samples are packed."""

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

UNIT = 16  # tokens: row lengths are 1, 2, 3, 4, 6, 8, 12, ... units


@dataclass(frozen=True)
class AtOnce:
    """Limits of a batch on one rank. Rows are a power of two, so that few programs are compiled."""

    rows: int = 64  # prompts
    tokens: int = 16_384  # of all rows including answers; a longer prompt gets a batch of its own


class PromptRows:
    """Batches of a source's prompts, each in a row of its own with its items on the same rank.

    `prompts` are samples whose text ends where the answer begins. `room`: tokens that an answer may take.
    """

    def __init__(
        self, prompts: Source, model: ModelConfig, topology: Topology, room: int, at_once: AtOnce | None = None
    ) -> None:
        self._index = build_index({"prompt": prompts}, model.encoders)
        self._arrays = Arrays.of(model)
        self._room = room
        self._at_once = at_once or AtOnce()
        # Exchange groups of one rank: items are encoded on their prompt's rank, so nothing is exchanged.
        self._topology = Topology(topology.ranks, 1, 1, topology.encoders_per_rank)
        self._reader = Reader(prompts.sample, prompts.facts, prompts.item, self._index.source_of, self._index.name)
        if len(self._index.bad):
            raise UserError(f"{self._index.name(int(self._index.bad[0]))}: {self._index.reason[0]}")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt, including its items'."""
        return int(self._index.llm_tokens.max(initial=0))

    def batches(self, spoiled: dict[int, str] | None = None) -> Iterator[tuple[np.ndarray, Microbatch]]:
        """Yield batches of prompts of similar length, each with the prompt in every row, int64 `[rows]`, -1 for none.

        A prompt that cannot be read is added to `spoiled` with the reason; without `spoiled` it raises UserError.
        """
        # Rounded lengths: each distinct one is one more program to compile.
        length = np.array([in_steps(int(n), UNIT) for n in self._index.llm_tokens], np.int64)
        for columns in np.unique(length).tolist():
            prompts = np.flatnonzero(length == columns)
            rows = min(self._at_once.rows, max(1, self._at_once.tokens // (columns + self._room)))
            batch_size = self._topology.ranks * (1 << rows.bit_length() - 1)  # rows rounded down to a power of two
            for first in range(0, len(prompts), batch_size):
                yield self._batch(prompts[first : first + batch_size], columns, spoiled)

    def _batch(
        self, prompts: np.ndarray, columns: int, spoiled: dict[int, str] | None
    ) -> tuple[np.ndarray, Microbatch]:
        plan = self._plan(prompts, columns)
        packed = pack_microbatch(plan, self._arrays, self._reader, spoiled=spoiled)
        encoders = {name for k, name in enumerate(self._arrays.encoders, start=1) if np.any(plan.module == k)}
        # `part_start[:-1]` are the LLM parts, one for each prompt. Encoders without items are left out of the batch, so
        # that their programs do not run.
        prompt_in_row = np.full(len(packed.text.token), -1)
        prompt_in_row[plan.row[plan.part_start[:-1]]] = np.where(np.isin(prompts, list(spoiled or ())), -1, prompts)
        items = {name: batch for name, batch in packed.items.items() if name in encoders}
        return prompt_in_row, packed._replace(items=items)

    def _plan(self, prompts: np.ndarray, columns: int) -> MicrobatchPlan:
        """Assign prompts to ranks round-robin, and items to the first rows of their rank that have space."""
        ranks = self._topology.ranks
        per_rank = self._topology.encoders_per_rank
        parts = self._index.parts(prompts)
        number = np.arange(len(prompts))
        rank = (number % ranks)[parts.sample()]  # of each part
        rows = [_power_of_two(-(-len(prompts) // ranks))]
        lengths = [columns]
        row = np.zeros(len(parts.module), np.int32)
        offset = np.zeros(len(parts.module), np.int64)
        # Rows are numbered rank by rank: with 2 ranks of 4 rows, prompts 0, 1, 2 go to rows 0, 4, 1.
        row[parts.module == LLM] = number % ranks * rows[0] + number // ranks
        for k, name in enumerate(self._arrays.encoders, start=1):
            items = np.flatnonzero(parts.module == k)
            lengths.append(self._row_length(name, k, parts.length[items]))
            row_on_rank, offset[items] = _first_fit(parts.length[items], rank[items], lengths[-1])
            rows.append(per_rank * _power_of_two(-(-int(row_on_rank.max(initial=0) + 1) // per_rank)))
            row[items] = rank[items] * rows[-1] + row_on_rank
        return MicrobatchPlan(
            samples=prompts,
            part_start=parts.sample_start,
            module=parts.module,
            row=row,
            offset=offset,
            length=parts.length,
            shape=Shape(tuple(lengths), (0,) * (len(rows) - 1)),
            rows=tuple(rows),
            topology=self._topology,
            unbalanced=np.zeros((len(rows), ranks * per_rank), np.int64),
        )

    def _row_length(self, encoder: str, module: int, positions: np.ndarray) -> int:
        """Round the longest item's positions up to a whole unit, or to a step where items differ in length."""
        unit = math.lcm(8, int(self._index.positions_per_token[module - 1]))
        longest = max(1, int(positions.max(initial=0)))
        config = self._arrays.encoders[encoder]
        equal_items = isinstance(config, VisionConfig) and isinstance(config.images, FixedSize | DynamicTiles | AnyRes)
        return -(-longest // unit) * unit if equal_items else in_steps(longest, unit)


class Some:
    """A subset of a source's prompts, in this order."""

    def __init__(self, prompts: Source, numbers: Sequence[int]) -> None:
        self._prompts = prompts
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def fingerprint(self) -> str:
        return f"{self._prompts.fingerprint()}:{list(self._numbers)}"

    def facts(self, index: int) -> Facts:
        return self._prompts.facts(self._numbers[index])

    def sample(self, index: int) -> Sample:
        return self._prompts.sample(self._numbers[index])

    def item(self, index: int, number: int) -> np.ndarray:
        return self._prompts.item(self._numbers[index], number)


def in_steps(n: int, unit: int) -> int:
    """Round `n` up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units."""
    units = max(1, -(-n // unit))
    # Steps of 2^k and 3 * 2^(k - 1) waste at most a third, and there are few: 5 or 6 become 6, 7 or 8 become 8.
    power = _power_of_two(units)
    return unit * (power * 3 // 4 if power > 2 and units <= power * 3 // 4 else power)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _first_fit(length: np.ndarray, rank: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each item its row on its rank, and its offset in that row."""
    row = np.zeros(len(length), np.int32)
    offset = np.zeros(len(length), np.int64)
    filled: dict[int, list[int]] = {}  # positions taken in each row, by rank
    for i, (n, r) in enumerate(zip(length.tolist(), rank.tolist(), strict=True)):
        rows = filled.setdefault(r, [])
        row[i] = k = next((k for k, taken in enumerate(rows) if taken + n <= row_length), len(rows))
        if k == len(rows):
            rows.append(0)
        offset[i] = rows[k]
        rows[k] += n
    return row, offset
