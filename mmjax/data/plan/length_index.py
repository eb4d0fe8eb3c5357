"""The length index: how much of every module each sample needs, known before anything is decoded.

Media facts come from headers (image sizes, clip durations); lengths follow from them and the encoders' preprocessing.
What results is kept by the sources' fingerprints as flat arrays, memory-mapped by every worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.balance.parts import Parts
from mmjax.data.conversation import BadSample
from mmjax.data.media.patches import Encoders, item_size, positions_per_token
from mmjax.data.sample import SampleLengths, Source
from mmjax.data.storage.array_store import Damaged, open_arrays, print_recomputation, save_arrays
from mmjax.errors import BadMedia, UserError
from mmjax.startup import activity

OUTLIER = 8  # times as many tokens as the median sample


@dataclass(frozen=True)
class LengthIndex:
    """Lengths of all sources' samples, one source after the other; items in CSR over samples."""

    source_name: np.ndarray  # str [sources]
    source_start: np.ndarray  # int64 [sources + 1]: first sample of each source
    text_tokens: np.ndarray  # int32 [n]
    totals: np.ndarray  # int32 [n, modules]: positions of each module, the LLM (text and items together) first
    item_start: np.ndarray  # int64 [n + 1]: first item of each sample
    item_encoder: np.ndarray  # int32 [p]: number of the encoder, in the model's order
    item_positions: np.ndarray  # int32 [p]: of the encoder's row, alignment included
    item_useful: np.ndarray  # int32 [p]: of those, patches or frames that hold something
    item_tokens: np.ndarray  # int32 [p]: that its encoder makes for the LLM
    positions_per_token: np.ndarray  # int32 [encoders]: of an encoder's row for each token that it gives the LLM
    # Samples that cannot be used, whose lengths are 0, and why.
    bad: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))  # int64 [b], in order
    reason: np.ndarray = field(default_factory=partial(np.empty, 0, "U1"))  # str [b]

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def llm_tokens(self) -> np.ndarray:
        """int32 `[n]`: text and items together."""
        return self.totals[:, 0]

    def source_of(self, samples: np.ndarray) -> np.ndarray:
        """Number of the source of each sample."""
        return np.searchsorted(self.source_start, samples, side="right") - 1

    def name(self, sample: int) -> str:
        """Name a sample for messages: "source[index]"."""
        source = int(self.source_of(np.array(sample)))
        return f"{self.source_name[source]}[{sample - self.source_start[source]}]"

    def longest(self) -> str:
        """Name the longest sample and its LLM tokens where it stands out, for messages; else empty."""
        tokens = self.llm_tokens
        sample, usual = int(np.argmax(tokens)), int(np.median(tokens))
        if tokens[sample] < OUTLIER * max(usual, 1):
            return ""
        return f"the longest sample, {self.name(sample)}, has {tokens[sample]:,} LLM tokens, the median {usual:,}"

    def parts(self, samples: np.ndarray | None = None) -> Parts:
        """Return the parts of samples for balancing: an LLM part each (module 0), then its items (1 + encoder)."""
        samples = np.arange(len(self)) if samples is None else samples
        start, item, is_item = self._parts_of(samples)
        module, length = np.zeros(len(is_item), np.int32), np.empty(len(is_item), np.int64)
        length[~is_item] = self.llm_tokens[samples]
        module[is_item], length[is_item] = 1 + self.item_encoder[item], self.item_positions[item]
        return Parts(start, module, length)

    def useful(self, samples: np.ndarray) -> np.ndarray:
        """Positions of each of these samples' parts that hold something, int64 `[p]`: no alignment."""
        _, item, is_item = self._parts_of(samples)
        useful = np.empty(len(is_item), np.int64)
        useful[~is_item], useful[is_item] = self.llm_tokens[samples], self.item_useful[item]
        return useful

    def tokens(self, samples: np.ndarray) -> np.ndarray:
        """LLM tokens of each of these samples, and those that encoders make of its items, int64 `[p]`."""
        _, item, is_item = self._parts_of(samples)
        tokens = np.empty(len(is_item), np.int64)
        tokens[~is_item], tokens[is_item] = self.llm_tokens[samples], self.item_tokens[item]
        return tokens

    def _parts_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sample's first part `[n + 1]`, the indices of its items, and which parts are items `[p]`."""
        first = self.item_start[samples]
        items = self.item_start[samples + 1] - first
        start = np.concatenate([[0], np.cumsum(items + 1, dtype=np.int64)])
        is_item = np.ones(start[-1], bool)
        is_item[start[:-1]] = False
        return start, np.arange(items.sum()) + np.repeat(first - np.cumsum(items) + items, items), is_item

    def fingerprint(self) -> str:
        """A hash of everything that planning depends on."""
        digest = hashlib.sha256()
        for f in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, f.name)).tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write one file per array, and their hashes. A folder that is there and whole stays as it is."""
        with suppress(Damaged):
            LengthIndex.open(folder)
            return
        save_arrays(folder, {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def open(cls, folder: Path) -> LengthIndex:
        """Memory-map what `save` wrote. Raises Damaged where it is not that."""
        return cls(**open_arrays(folder, [f.name for f in fields(cls)]))


def build_index(sources: Mapping[str, Source], encoders: Encoders) -> LengthIndex:
    """Index every sample of every source; those that their source cannot use are in `bad`.

    Raises UserError where an item has no encoder or a size is impossible.
    """
    numbers = {name: k for k, name in enumerate(encoders)}
    text, item_count, item_rows, more = [], [], [], []  # more: LLM tokens than those of text and items
    bad: dict[int, str] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, int, int]] = {}
    every = ((name, source, i) for name, source in sources.items() for i in range(len(source)))
    with activity("indexing samples", sum(map(len, sources.values()))) as counted:
        for counted.done, (source_name, source, i) in enumerate(every, start=1):
            try:
                facts = source.facts(i)
                rows = [(numbers.get(e), *_measured(encoders, e, size, sizes)) for e, size in facts.items]
            except (BadSample, BadMedia) as found:
                bad[len(text)] = str(found)
                facts, rows = SampleLengths(0, ()), []
            except ValueError as error:
                raise UserError(f"sample {source_name}[{i}]: {error}") from error
            else:
                if not facts.text_tokens and not facts.items:
                    raise UserError(
                        f"sample {source_name}[{i}] is empty: neither text nor items; leave it out of its source"
                    )
            text.append(facts.text_tokens)
            item_count.append(len(rows))
            item_rows += rows
            of_items = sum(row[2] for row in rows)
            more.append(0 if facts.item_tokens is None else facts.item_tokens - of_items)
    items = np.array(item_rows, np.int32).reshape(-1, 4)
    item_start = np.concatenate([[0], np.cumsum(item_count, dtype=np.int64)])
    totals = np.zeros((len(text), 1 + len(encoders)), np.int32)
    totals[:, 0] = np.array(text, np.int64) + np.array(more, np.int64)
    sample = np.repeat(np.arange(len(text)), item_count)
    np.add.at(totals, (sample, 0), items[:, 2])
    np.add.at(totals, (sample, 1 + items[:, 0]), items[:, 1])
    return LengthIndex(
        source_name=np.array(list(sources), np.str_),
        source_start=np.concatenate([[0], np.cumsum([len(s) for s in sources.values()], dtype=np.int64)]),
        text_tokens=np.array(text, np.int32),
        totals=totals,
        item_start=item_start,
        item_encoder=items[:, 0],
        item_positions=items[:, 1],
        item_tokens=items[:, 2],
        item_useful=items[:, 3],
        positions_per_token=np.array([positions_per_token(e) for e in encoders.values()], np.int32),
        bad=np.array(list(bad), np.int64),
        reason=np.array(list(bad.values()), np.str_),
    )


def _measured(
    encoders: Encoders,
    encoder: str,
    size: tuple[int, ...],
    known: dict[tuple[str, tuple[int, ...]], tuple[int, int, int]],
) -> tuple[int, int, int]:
    """`item_size`, of each size once. ValueError where there is no such encoder, or it cannot take the size."""
    if (found := known.get((encoder, size))) is None:
        if encoder not in encoders:
            have = ", ".join(encoders) or "none"
            raise ValueError(f"it has an item for encoder {encoder!r}; the model's encoders: {have}")
        found = known[encoder, size] = item_size(encoders[encoder], size)
    return found


def index_key(sources: Mapping[str, Source], encoders: Encoders) -> str:
    """The name of the folder of these sources' index: another where any of them differs."""
    key = json.dumps(
        [
            [[name, len(source), source.fingerprint()] for name, source in sources.items()],
            repr(dict(encoders)),
            [f.name for f in fields(LengthIndex)],
        ]
    )
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def cached_index(sources: Mapping[str, Source], encoders: Encoders, folder: Path) -> tuple[LengthIndex, Path]:
    """The index of these sources under `folder`, memory-mapped, and its path; built where it is not, or not whole."""
    path = folder / index_key(sources, encoders)
    try:
        return LengthIndex.open(path), path
    except Damaged as damage:
        print_recomputation(damage)
    build_index(sources, encoders).save(path)
    return LengthIndex.open(path), path
