"""The length index: how much of every module each sample needs, known before anything is decoded.

Media facts come from headers (image sizes, clip durations); lengths follow from them and the
encoders' preprocessing. The index is cached by the sources' fingerprints as flat arrays,
memory-mapped by every worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.balance.mask_work import causal_pairs
from mmjax.balance.parts import LLM, Parts, ranges
from mmjax.config import DecoderConfig
from mmjax.config.generators import Tower
from mmjax.data.media.patches import ItemModules, item_size
from mmjax.data.plan.attended_pairs import (
    MaskRules,
    branched_pairs,
    item_pairs,
    pairs_by_length,
    runs_of,
    sample_pairs,
)
from mmjax.data.sample import BadSample, SampleLengths, Source, with_place
from mmjax.data.storage.array_store import Damaged, open_arrays, print_recomputation, save_arrays
from mmjax.errors import BadMedia, UserError
from mmjax.startup import activity


def pairs_of_lengths(
    llm: DecoderConfig | None,
    modules: Sequence[Tower | None],
    llm_tokens: np.ndarray,
    item_encoder: np.ndarray,
    item_useful: np.ndarray,
) -> dict[str, np.ndarray]:
    """Estimate the pairs of an index from its other arrays, by their names. None: no layer of a module has windows."""
    of_items = np.zeros(len(item_encoder), np.int64)
    for number, module in enumerate(modules):
        items = item_encoder == number
        of_items[items] = pairs_by_length(module, item_useful[items])
    tokens = llm_tokens.astype(np.int64)
    return {
        "pairs": causal_pairs(tokens, 0) if llm is None else pairs_by_length(llm, tokens),
        "item_pairs": of_items,
    }


# An item while the index is built; each field becomes one array `item_*` of the index.
_ITEM = np.dtype(
    [
        *((name, np.int32) for name in ("encoder", "positions", "tokens", "useful")),
        ("pairs", np.int64),
    ]
)

PAIRS = ("pairs", "item_pairs")  # arrays of an index
OUTLIER = 8  # times as many tokens as the median sample


@dataclass(frozen=True)
class LengthIndex:
    """Lengths of all sources' samples, one source after the other; items in CSR over samples."""

    source_name: np.ndarray  # str [sources]
    source_start: np.ndarray  # int64 [sources + 1]: first sample of each source
    text_tokens: np.ndarray  # int32 [n]
    # int32 [n, modules]: positions of each module, the LLM (text and items together) first
    totals: np.ndarray
    item_start: np.ndarray  # int64 [n + 1]: first item of each sample
    item_encoder: np.ndarray  # int32 [p]: number of the encoder or generator, in the model's order
    item_positions: np.ndarray  # int32 [p]: of the encoder's row, alignment included
    item_useful: np.ndarray  # int32 [p]: of those, patches or frames that hold something
    item_tokens: np.ndarray  # int32 [p]: of the LLM, which its encoder makes or its generator reads
    # int32 [encoders]: of an encoder's row for each token that it gives the LLM; or 1
    positions_per_token: np.ndarray
    pairs: np.ndarray  # int64 [n]: of a query and a key in the LLM, of one head, mean of its layers
    item_pairs: np.ndarray  # int64 [p]: the same in the item's module
    # Samples that cannot be used, whose lengths are 0, and why.
    bad: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))  # int64 [b], in order
    reason: np.ndarray = field(default_factory=partial(np.empty, 0, "U1"))  # str [b]
    # Of sources that are read in order; both are empty where there are none.
    # int64 [sources]: 0: not in order
    window: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))
    # int64 [f]: first of each file
    file_start: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def llm_tokens(self) -> np.ndarray:
        """int32 `[n]`: text and items together."""
        return self.totals[:, LLM]

    def source_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of the source of each sample."""
        return np.searchsorted(self.source_start, samples, side="right") - 1

    def name(self, sample: int) -> str:
        """Name a sample for messages: "source[index]"."""
        source = int(self.source_of(np.array(sample)))
        return f"{self.source_name[source]}[{sample - self.source_start[source]}]"

    def longest(self, limit: int) -> str:
        """Name the longest sample of at most `limit` LLM tokens where it stands out, for messages; else empty."""
        tokens = np.where(self.llm_tokens > limit, 0, self.llm_tokens)
        sample = int(np.argmax(tokens))
        usual = int(np.median(tokens))
        if tokens[sample] < OUTLIER * max(usual, 1):
            return ""
        return (
            f"the longest sample, {self.name(sample)}, has {tokens[sample]:,} LLM tokens, the median {usual:,}; "
            "data.max_tokens=N leaves out longer ones"
        )

    def parts(self, samples: np.ndarray | None = None) -> Parts:
        """Return the parts of samples for balancing: an LLM part each (module 0), then its items (1 + encoder)."""
        samples = np.arange(len(self)) if samples is None else samples
        start, item, is_item = self._parts_of(samples)
        module = np.zeros(len(is_item), np.int32)
        module[is_item] = 1 + self.item_encoder[item]
        length = np.empty(len(is_item), np.int64)
        length[~is_item] = self.llm_tokens[samples]
        length[is_item] = self.item_positions[item]
        pairs = np.empty(len(is_item), np.int64)
        pairs[~is_item] = self.pairs[samples]
        pairs[is_item] = self.item_pairs[item]
        return Parts(start, module, length, pairs)

    def useful(self, samples: np.ndarray) -> np.ndarray:
        """Count the positions of each of these samples' parts that hold something, int64 `[p]`: no alignment."""
        _, item, is_item = self._parts_of(samples)
        useful = np.empty(len(is_item), np.int64)
        useful[~is_item] = self.llm_tokens[samples]
        useful[is_item] = self.item_useful[item]
        return useful

    def tokens(self, samples: np.ndarray) -> np.ndarray:
        """Count the LLM tokens of each of these samples, and those that encoders make of its items, int64 `[p]`."""
        _, item, is_item = self._parts_of(samples)
        tokens = np.empty(len(is_item), np.int64)
        tokens[~is_item] = self.llm_tokens[samples]
        tokens[is_item] = self.item_tokens[item]
        return tokens

    def _parts_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sample's first part `[n + 1]`, the indices of its items, and which parts are items `[p]`."""
        first = self.item_start[samples]
        items = self.item_start[samples + 1] - first
        start = np.concatenate([[0], np.cumsum(items + 1, dtype=np.int64)])
        is_item = np.ones(start[-1], bool)
        is_item[start[:-1]] = False
        return start, ranges(first, items), is_item

    def fingerprint(self) -> str:
        """Hash everything that decides which samples a step has.

        Not why samples are bad, which names files by their paths, nor pairs, which decide where
        they are processed.
        """
        digest = hashlib.sha256()
        for f in fields(self):  # arrays that are empty change nothing
            if f.name not in ("reason", *PAIRS):
                digest.update(np.ascontiguousarray(getattr(self, f.name)).tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write one file per array, and their hashes. A folder that is there and whole stays as it is."""
        with suppress(Damaged):
            LengthIndex.open(folder)
            return
        save_arrays(folder, {name: getattr(self, name) for name in _names(bool(len(self.window)))})

    @classmethod
    def open(cls, folder: Path) -> LengthIndex:
        """Memory-map what `save` wrote. Raises Damaged where it is not that."""
        names = _names((folder / "window.npy").exists())
        if any((folder / f"{name}.npy").exists() for name in PAIRS):
            return cls(**open_arrays(folder, names))
        # Of a run that began before pairs were counted, whose steps can be made again.
        arrays = open_arrays(folder, [name for name in names if name not in PAIRS])
        modules = (None,) * (arrays["totals"].shape[1] - 1)
        useful = arrays["item_useful"]
        return cls(
            **arrays,
            **pairs_of_lengths(
                None, modules, arrays["totals"][:, LLM], arrays["item_encoder"], useful
            ),
        )


def _names(in_order: bool) -> list[str]:
    """Name the arrays of an index. in_order: some of its sources are read in order."""
    return [
        f.name for f in fields(LengthIndex) if in_order or f.name not in ("window", "file_start")
    ]


def _windows(sources: Mapping[str, Source]) -> list[int]:
    """Return the window of each source; nothing where no source is read in order."""
    windows = [int(getattr(source, "window", 0)) for source in sources.values()]
    return windows if any(windows) else []


def build_index(
    sources: Mapping[str, Source], encoders: ItemModules, llm: DecoderConfig | None = None
) -> LengthIndex:
    """Index every sample of every source; those that their source cannot use are in `bad`.

    llm: whose pairs are counted, by what samples consist of; None: those of causal attention, by
    lengths. Raises UserError where an item has no encoder or a size is impossible.
    """
    numbers = {name: k for k, name in enumerate(encoders)}
    text: list[int] = []
    item_count: list[int] = []
    item_rows: list[tuple[int, int, int, int, int]] = []  # as in _ITEM
    extra: list[int] = []  # LLM tokens beyond those of text and items
    bad: dict[int, str] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, int, int, int]] = {}
    pairs: list[int] = []  # of samples
    rules = None if llm is None else MaskRules.of(encoders, llm.items)
    every = ((name, source, i) for name, source in sources.items() for i in range(len(source)))
    with activity("indexing samples", sum(map(len, sources.values()))) as counted:
        for counted.done, (source_name, source, i) in enumerate(every, start=1):
            try:
                facts = source.facts(i)
                rows = [
                    (numbers.get(e), *_measured(encoders, e, size, sizes))
                    for e, size in facts.items
                ]
            except (BadSample, BadMedia) as error:
                bad[len(text)] = with_place(source, i, error)
                facts = SampleLengths(0, ())
                rows = []
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
            item_tokens = [tokens for _, _, tokens, *_ in rows]
            extra.append(0 if facts.item_tokens is None else facts.item_tokens - sum(item_tokens))
            if rules is not None:
                used = facts.text_tokens or rows
                tokens = facts.text_tokens + sum(item_tokens) + extra[-1]
                pairs.append(
                    _sample_pairs(source, i, facts, tokens, item_tokens, rules, llm) if used else 0
                )
    items = np.array(item_rows, _ITEM)
    # CSR: the items of sample i are item_start[i] : item_start[i + 1].
    item_start = np.concatenate([[0], np.cumsum(item_count, dtype=np.int64)])
    totals = np.zeros((len(text), 1 + len(encoders)), np.int32)
    totals[:, LLM] = np.array(text, np.int64) + np.array(extra, np.int64)
    sample = np.repeat(np.arange(len(text)), item_count)
    # An item counts in two columns: its tokens in the LLM's, its positions in its encoder's.
    np.add.at(totals, (sample, LLM), items["tokens"])
    np.add.at(totals, (sample, 1 + items["encoder"]), items["positions"])
    source_start = np.concatenate(
        [[0], np.cumsum([len(s) for s in sources.values()], dtype=np.int64)]
    )
    windows = _windows(sources)
    return LengthIndex(
        source_name=np.array(list(sources), np.str_),
        source_start=source_start,
        text_tokens=np.array(text, np.int32),
        totals=totals,
        item_start=item_start,
        item_encoder=items["encoder"],
        item_positions=items["positions"],
        item_tokens=items["tokens"],
        item_useful=items["useful"],
        positions_per_token=np.array([e.positions_per_token for e in encoders.values()], np.int32),
        pairs=causal_pairs(totals[:, LLM].astype(np.int64), 0)
        if llm is None
        else np.array(pairs, np.int64),
        item_pairs=items["pairs"],
        bad=np.array(list(bad), np.int64),
        reason=np.array(list(bad.values()), np.str_),
        window=np.array(windows, np.int64),
        file_start=_file_starts(sources, source_start, windows),
    )


def _file_starts(
    sources: Mapping[str, Source], source_start: np.ndarray, windows: Sequence[int]
) -> np.ndarray:
    """Return the first sample of each file of the sources that are read in order, int64 `[f]`."""
    starts = [
        first + np.cumsum([0, *(count for _, count in source.files())])[:-1]
        for first, source, window in zip(
            source_start.tolist(), sources.values(), windows, strict=False
        )
        if window
    ]
    return np.concatenate([np.zeros(0, np.int64), *starts])


def _sample_pairs(
    source: Source,
    number: int,
    facts: SampleLengths,
    tokens: int,
    item_tokens: Sequence[int],
    rules: MaskRules,
    llm: DecoderConfig,
) -> int:
    """Count the pairs of a sample of so many tokens: by its facts, its outline where the source has it, or its text."""
    if facts.branches is not None and rules.items == "causal":
        return branched_pairs(tokens - sum(facts.branches), facts.branches, llm)
    sample = getattr(source, "outline", source.sample)(number)
    return sample_pairs(runs_of(sample, item_tokens, rules), llm)


def _measured(
    encoders: ItemModules,
    encoder: str,
    size: tuple[int, ...],
    known: dict[tuple[str, tuple[int, ...]], tuple[int, int, int, int]],
) -> tuple[int, int, int, int]:
    """Measure an item as in _ITEM, once for each size.

    ValueError where there is no such encoder, or it cannot take the size.
    """
    if (measured := known.get((encoder, size))) is None:
        if encoder not in encoders:
            have = ", ".join(encoders) or "none"
            raise ValueError(
                f"it has an item for module {encoder!r}; the model's encoders and generators: {have}"
            )
        module = encoders[encoder]
        lengths = item_size(module, size)
        measured = known[encoder, size] = (*lengths, item_pairs(module, size, lengths.valid))
    return measured


def index_key(
    sources: Mapping[str, Source], encoders: ItemModules, llm: DecoderConfig | None = None
) -> str:
    """Name the folder of these sources' index: another where any of them, or how the LLM attends, differs."""
    windows = _windows(sources)
    key = json.dumps(
        [
            [[name, len(source), source.fingerprint()] for name, source in sources.items()],
            repr(dict(encoders)),
            _names(bool(windows)),
            *([windows] if windows else []),
            [] if llm is None else [llm.items, llm.window, len(llm.windowed), llm.layers],
            *(["chunked"] if llm and llm.chunked else []),
        ]
    )
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def cached_index(
    sources: Mapping[str, Source],
    encoders: ItemModules,
    folder: Path,
    llm: DecoderConfig | None = None,
) -> tuple[LengthIndex, Path]:
    """Memory-map the index of these sources under `folder`; build it where missing or damaged. Return its path."""
    path = folder / index_key(sources, encoders, llm)
    try:
        return LengthIndex.open(path), path
    except Damaged as damage:
        print_recomputation(damage)
    build_index(sources, encoders, llm).save(path)
    return LengthIndex.open(path), path
