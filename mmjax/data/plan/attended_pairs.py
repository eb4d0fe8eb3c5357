"""Count the (query, key) pairs that samples and items attend: exact, and known before anything is loaded.

Pairs are those of one head, averaged over a tower's layers where some of these have windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from mmjax.balance.mask_work import causal_pairs, run_pairs
from mmjax.batch import FIRST_BRANCH_BIT, TEXT_KIND
from mmjax.config import DecoderConfig, Tower
from mmjax.data.media.patches import ItemModules, clip_size, patch_grid
from mmjax.data.sample import ArrangedItems, Item, Sample, Text


class Run(NamedTuple):
    """Neighbouring tokens of a sample that attend alike, as `TextBatch` has them."""

    tokens: int
    kind: int
    sees: int
    span: int


@dataclass(frozen=True)
class MaskRules:
    """Rules by which the tokens of texts and of items attend in the LLM."""

    modules: tuple[str, ...]  # encoders, then generators
    generator_names: tuple[str, ...]  # of these, the generators
    items: str  # DecoderConfig.items
    clip_names: tuple[str, ...] = ()  # encoders of clips

    @classmethod
    def of(cls, modules: ItemModules, items: str) -> MaskRules:
        """Return the rules for a model's encoders and generators. items: `DecoderConfig.items`."""
        generator_names = tuple(name for name, module in modules.items() if module.is_generator)
        clip_names = tuple(name for name, module in modules.items() if module.modality == "audio")
        return cls(tuple(modules), generator_names, items, clip_names)

    @property
    def everyone(self) -> int:
        """Return the kinds of branch 0: text, all encoders and all generators."""
        return (TEXT_KIND << 1 + len(self.modules)) - 1

    def bit(self, module: str) -> int:
        """Return the kind bit of the tokens of a module's items."""
        return TEXT_KIND << 1 + self.modules.index(module)

    def text(self, branch: int) -> tuple[int, int]:
        """Return kind and sight of a text's tokens.

        Branches see branch 0 and themselves: each has a kind of its own, so the mask spec needs
        nothing more.
        """
        kind = 1 << (FIRST_BRANCH_BIT + branch - 1) if branch else TEXT_KIND
        return kind, self.everyone | kind

    def item(self, module: str, group: int) -> tuple[int, int, int]:
        """Return kind, sight and span of an item's tokens; group: the span of those that see each other both ways."""
        if (
            module in self.generator_names
        ):  # queries of an image to be made, which attend as text does
            return self.bit(module), self.everyone, 0
        sees = 0 if self.items == "isolated" else self.everyone
        of_clips = ("images", "in_windows") if module in self.clip_names else ()
        causal = ("causal", "prefix", *of_clips)
        return self.bit(module), sees, 0 if self.items in causal else group


def runs_of(sample: Sample, item_tokens: Sequence[int], rules: MaskRules) -> list[Run]:
    """List the runs of a sample. item_tokens: of each item, by number."""
    runs = []
    for segment in sample.segments:
        if isinstance(segment, Text):
            kind, sees = rules.text(segment.branch)
            runs.append(Run(len(segment.tokens), kind, sees, span=0))
        else:
            kind, sees, span = rules.item(segment.encoder, segment.number + 1)
            runs.append(Run(_tokens(segment, item_tokens), kind, sees, span))
    if rules.items != "prefix":
        return runs
    return _with_prefix(runs, prefix_tokens(sample, [run.tokens for run in runs]))


def _tokens(segment: Item | ArrangedItems, item_tokens: Sequence[int]) -> int:
    if isinstance(segment, ArrangedItems):
        return len(segment.tokens)
    return segment.part[1] - segment.part[0] if segment.part else item_tokens[segment.number]


def prefix_tokens(sample: Sample, lengths: Sequence[int]) -> int:
    """Count the tokens of branch 0 before the first that is trained on. lengths: of the segments."""
    count = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        if isinstance(segment, Text):
            if segment.branch:
                break
            trained = np.flatnonzero(segment.weights)
            if len(trained):
                return count + int(trained[0])
        count += n
    return count


def _with_prefix(runs: Sequence[Run], prefix: int) -> list[Run]:
    """Make one span of the first `prefix` tokens, inside which all see each other."""
    cut = []
    begin = 0
    for run in runs:
        inside = int(np.clip(prefix - begin, 0, run.tokens))
        cut += [run._replace(tokens=inside, span=1), run._replace(tokens=run.tokens - inside)]
        begin += run.tokens
    return cut


def branched_pairs(tokens: int, branches: Sequence[int], llm: DecoderConfig) -> int:
    """Count the pairs of a sample without spans, with so many tokens before branches of so many."""

    def pairs(shared: int, window: int) -> int:
        # Every branch attends as if it were the only one behind what all share.
        separate = sum(causal_pairs(shared + branch, window, llm.chunked) for branch in branches)
        return separate - (len(branches) - 1) * causal_pairs(shared, window, llm.chunked)

    return round(mean_pairs(llm, pairs, tokens))


def sample_pairs(runs: Sequence[Run], llm: DecoderConfig) -> int:
    """Count the pairs of a sample of these runs."""
    by_branch = Counter({0: 0})
    for run in runs:
        by_branch[run.kind >> FIRST_BRANCH_BIT] += run.tokens
    # Plain causal attention, or chunks, in which all attend so.
    if llm.chunked or (len(by_branch) == 1 and not any(run.span for run in runs)):
        return branched_pairs(by_branch.pop(0), list(by_branch.values()), llm)
    tokens, kind, sees, span = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    branch = kind >> FIRST_BRANCH_BIT

    def pairs(_, window: int) -> int:
        spans = np.zeros_like(span) if llm.items == "in_windows" and not window else span
        return run_pairs(tokens, kind, sees, spans, branch, window)

    return round(mean_pairs(llm, pairs, 0))


def mean_pairs(
    tower: Tower,
    pairs: Callable[[np.ndarray | int, int], np.ndarray | int],
    positions: np.ndarray | int,
):
    """Average `pairs(positions, window)` over a tower's layers; window: positions, 0 in layers without one."""
    full = pairs(positions, 0)
    window, share = _windows(tower)
    return full + (pairs(positions, window) - full) * share if window else full


def _windows(tower: Tower) -> tuple[int, float]:
    """Return the window of a tower's layers, and the share of the layers that have one; of images its side."""
    if not tower.windowed:
        return 0, 0.0
    return tower.window, tower.windowed_share


def item_pairs(module: Tower, size: tuple[int, ...], positions: int) -> int:
    """Count the pairs of an item of this size. positions: of its rows that hold something."""
    if module.modality == "audio":
        return round(mean_pairs(module, _squares, clip_size(module, size[0]).positions))
    if not module.windowed:
        return positions**2
    height, width = patch_grid(module, size[-2:])

    def windows(count: int, window: int) -> int:
        if not window:
            return count**2
        # The class token and registers are in the first window.
        first = min(height, window) * min(width, window)
        extra = (first + module.own_tokens) ** 2 - first**2
        return _squares(height, window) * _squares(width, window) + extra

    return round(mean_pairs(module, windows, positions))


def _squares(positions: int, window: int) -> int:
    """Sum the squared lengths of the windows that so many positions are cut into, one where the window is 0."""
    if not window:
        return positions**2
    windows, rest = divmod(positions, window)
    return windows * window**2 + rest**2


def pairs_by_length(tower: Tower | None, length: np.ndarray) -> np.ndarray:
    """Count pairs where only lengths are known, int64 `[n]`: samples of an LLM are causal, items attend fully.

    length: positions of the LLM, patches, or frames before the stride. None: of an unknown encoder.
    """
    length = np.asarray(length, np.int64)
    if tower is None:
        return length * length
    if tower.is_causal:
        pairs = partial(causal_pairs, chunked=tower.chunked)
        return np.rint(mean_pairs(tower, pairs, length)).astype(np.int64)

    def full(n: np.ndarray, window: int) -> np.ndarray:
        # A length does not tell which windows an image's edge cuts: all are counted as complete.
        return n * np.minimum(n, tower.window_positions) if window else n * n

    return np.rint(mean_pairs(tower, full, tower.positions_of(length))).astype(np.int64)
