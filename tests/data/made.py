"""Hand-made samples for the data path: a source that counts what is opened, and a config small enough to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mmjax.balance.parts import Parts
from mmjax.config import (
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    LogMel,
    ModelConfig,
    PackGrouping,
    Samples,
    TrainingConfig,
    VisionConfig,
)
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan import step_plan
from mmjax.data.plan.length_index import LengthIndex, build_index
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import Item, Sample, SampleLengths, Text

VOCAB = 50
ONE_RANK = Topology()
DRY_RUN_STEPS = 16  # enough to find shapes by, and quick
# 4 x 4 pixels a token
VISION = VisionConfig(1, 16, 2, 16, patch=2, channels=1, connector=ConnectorConfig(merge=2))
AUDIO = AudioConfig(
    1,
    16,
    2,
    16,
    LogMel(mels=3, sample_rate=1000, window=8, hop=4),
    connector=ConnectorConfig(merge=3),
)


class Made:
    """A `Source` of samples given as segments, with their items' arrays; notes what is read and what is opened."""

    def __init__(self, samples: list[tuple[tuple[Text | Item, ...], list[np.ndarray]]]) -> None:
        self.samples = samples
        self.read: list[int] = []
        self.opened: list[tuple[int, int]] = []
        self.measured: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> str:
        return "made"

    def facts(self, index: int) -> SampleLengths:
        self.measured.append(index)
        segments, items = self.samples[index]
        text = sum(len(s.tokens) for s in segments if isinstance(s, Text))
        placed = sorted((s for s in segments if isinstance(s, Item)), key=lambda s: s.number)
        sizes = [
            a.shape[:2] if s.encoder == "vision" else a.shape
            for s, a in zip(placed, items, strict=True)
        ]
        return SampleLengths(
            text, tuple((s.encoder, size) for s, size in zip(placed, sizes, strict=True))
        )

    def sample(self, index: int) -> Sample:
        self.read.append(index)
        return Sample(self.samples[index][0])

    def item(self, index: int, number: int) -> np.ndarray:
        self.opened.append((index, number))
        return self.samples[index][1][number]


def text(
    rng: np.random.Generator, n: int, branch: int = 0, start: int | None = None, first: bool = False
) -> Text:
    """Random tokens and weights; the `first` text of a branch has no weight on its first token."""
    weights = rng.integers(0, 3, n).astype(np.float32)
    weights[: int(first)] = 0
    return Text(rng.integers(1, VOCAB, n).astype(np.int32), weights, branch, start)


def image(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 1)).astype(np.uint8)


def clip(rng: np.random.Generator, samples: int) -> np.ndarray:
    return rng.uniform(-1, 1, samples).astype(np.float32)


def random_samples(count: int, seed: int) -> Made:
    """Text, images and clips in any order, two or three branches at the end of some, some RoPE positions given."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        segments: list[Text | Item] = []
        items: list[np.ndarray] = []
        for _ in range(rng.integers(1, 6)):
            kind, start = rng.integers(3), [None, None, int(rng.integers(100))][rng.integers(3)]
            if kind == 0:
                segments.append(text(rng, int(rng.integers(1, 6)), start=start, first=not segments))
            else:
                segments.append(Item(("vision", "audio")[kind - 1], len(items), start))
                size = rng.integers(1, 15, 2)
                items.append(
                    image(rng, *size) if kind == 1 else clip(rng, int(rng.integers(1, 150)))
                )
        for branch in range(1, rng.integers(1, 4)):
            segments.append(
                text(rng, int(rng.integers(1, 5)), branch, [None, 64][rng.integers(2)], first=True)
            )
            if rng.random() < 0.3:
                segments.append(text(rng, 2, branch))
        samples.append((tuple(segments), items))
    return Made(samples)


def random_texts(lengths: list[int], seed: int = 0) -> Made:
    """Samples of text alone, of these lengths."""
    rng = np.random.default_rng(seed)
    return Made([((text(rng, n, first=True),), []) for n in lengths])


def config(items: str = "causal", **changes: Any) -> Config:
    """Both encoders, three rows of each module, six samples a step; `changes` replace fields of the batch."""
    llm = DecoderConfig(1, 16, 2, 1, 8, 16, VOCAB, items=items)
    encoders = {"vision": VISION, "audio": AUDIO}
    rows = dict.fromkeys(("llm", *encoders), 3)
    batch = BatchConfig(Samples(6), rows, grouping=PackGrouping(chunk_steps=8), alignment=4)
    return Config(
        name="made",
        data=DataConfig({"made": FunctionSource("config:make")}, workers=0),
        batch=replace(batch, **changes),
        model=ModelConfig(llm, encoders),
        training=TrainingConfig(steps=10),
    )


def load(
    source: Made,
    folder: Path,
    topology: Topology = ONE_RANK,
    ranks: range | None = None,
    encoder_ranks: range | None = None,
    **changes: Any,
) -> StepLoader:
    """A loader of one source that was opened already, so that it can be asked what was read."""
    made = config(**changes)
    index = index_of(source, made)
    index.save(folder / "index")
    ranks = range(topology.ranks) if ranks is None else ranks
    with mock.patch.object(step_plan, "DRY_RUN_STEPS", DRY_RUN_STEPS):
        planner, laid_out = make_planner(index, made, [1.0], topology)
    held = ranks, ranks.start == 0, encoder_ranks
    loader = StepLoader(made, planner.grouper.budget, laid_out, folder / "index", folder, *held)
    loader.__dict__["sources"] = {"made": source}  # where the loader keeps what it opened
    source.read.clear(), source.opened.clear()
    return loader


def index_of(source: Made, made: Config) -> LengthIndex:
    """Its length index."""
    return build_index({"made": source}, made.model.encoders)


def plan_of(
    parts: Parts, row: np.ndarray, lengths: tuple[int, ...], samples: np.ndarray
) -> MicrobatchPlan:
    """One rank's plan by hand: parts one after the other in these rows, of which there are as many as they name."""
    rows = tuple(int(row[parts.module == k].max(initial=0)) + 1 for k in range(len(lengths)))
    offset = np.zeros(len(row), np.int64)
    for place in set(zip(parts.module.tolist(), row.tolist(), strict=True)):
        at = (parts.module == place[0]) & (row == place[1])
        offset[at] = np.cumsum(parts.length[at]) - parts.length[at]
    shape = Shape(lengths, (0,) * (len(lengths) - 1))
    placed = (parts.module, row, offset, parts.length, parts.length**2)
    return MicrobatchPlan(samples, parts.sample_start, *placed, shape, rows, Topology(), row)
