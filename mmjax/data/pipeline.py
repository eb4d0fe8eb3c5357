"""Grain workers that bring packed steps ahead of the training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np
from absl import flags

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.index import LengthIndex
from mmjax.data.packing import Layout, Reader, pack_microbatch
from mmjax.data.plan import Budget, StepPlan, StepPlanner
from mmjax.data.sample import Source
from mmjax.data.sources import open_sources
from mmjax.planning.cost import frozen_modules, step_needed


class LoadedStep(NamedTuple):
    """One update's arrays, and what was planned for it."""

    step: np.ndarray  # int64 []
    digest: np.ndarray  # int64 []: hash of the step plan
    samples: np.ndarray  # int64 [n]
    plan_seconds: np.ndarray  # float64 []
    load_seconds: np.ndarray  # float64 []: opening, decoding and packing
    weight: np.ndarray  # float64 []: loss weight of the whole step
    needed_flops: np.ndarray  # float64 []: forward and backward, no padding
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True)
class StepLoader:
    """Loads step n: small enough to pickle (the config and two paths), everything else is opened in the worker."""

    config: Config
    budget: Budget
    index_folder: Path
    config_folder: Path  # where a FunctionSource's code is
    process: int = 0
    processes: int = 1

    def __call__(self, step: int) -> LoadedStep:
        begin = time.perf_counter()
        plan = self.planner.plan(int(step))
        planned = time.perf_counter()
        batches = tuple(
            pack_microbatch(m, self.layout, self.reader, self.process, self.processes) for m in plan.microbatches
        )
        model, frozen = self.config.model, frozen_modules(self.config.model)
        return LoadedStep(
            np.int64(step),
            np.int64(plan.digest()),
            plan.samples(),
            np.float64(planned - begin),
            np.float64(time.perf_counter() - planned),
            np.float64(sum(b.text.weight.sum(dtype=np.float64) for b in batches)),
            np.float64(sum(step_needed(model, b.text, b.items, frozen) for b in batches)),
            batches,
        )

    @cached_property
    def sources(self) -> dict[str, Source]:
        return open_sources(self.config, "train", self.config_folder)

    @cached_property
    def index(self) -> LengthIndex:
        return LengthIndex.open(self.index_folder)

    @cached_property
    def planner(self) -> StepPlanner:
        weights = [s.weight for s in self.config.data.sources.values()]
        return StepPlanner(self.index, self.config.batch, weights, self.config.seed, self.budget)

    @cached_property
    def layout(self) -> Layout:
        model = self.config.model
        return Layout(dict(model.encoders), model.llm.items, self.budget.rows)

    @cached_property
    def reader(self) -> Reader:
        return reader_of(self.sources, self.index.source_start)

    def plan(self, step: int) -> StepPlan:
        """The plan alone, nothing loaded."""
        return self.planner.plan(step)

    def __getstate__(self) -> dict[str, object]:
        # What was opened here stays here: a worker gets the description and opens its own.
        return {k: v for k, v in self.__dict__.items() if k in self.__dataclass_fields__}


def reader_of(sources: Mapping[str, Source], source_start: np.ndarray) -> Reader:
    """Access by global id to several sources, one after the other."""
    names, opened = list(sources), list(sources.values())

    def locate(sample: int) -> tuple[int, int]:
        s = int(np.searchsorted(source_start, sample, side="right")) - 1
        return s, sample - int(source_start[s])

    def read(sample: int):
        s, i = locate(sample)
        return opened[s].sample(i)

    def item(sample: int, number: int) -> np.ndarray:
        s, i = locate(sample)
        return opened[s].item(i, number)

    def name(sample: int) -> str:
        s, i = locate(sample)
        return f"{names[s]}[{i}]"

    return Reader(read, item, lambda ids: np.searchsorted(source_start, ids, side="right") - 1, name)


def steps(loader: StepLoader, first: int, last: int, workers: int, prefetch: int) -> Iterator[LoadedStep]:
    """Loaded steps `first` to `last` - 1, in order, prefetched by `workers` persistent processes (0: loaded here).

    The workers start at once. Grain only loads and prefetches what the plan names: step numbers go in, whole steps come
    out; raises RuntimeError where it ends early, as Grain does without a word when a worker is lost.
    """
    if first >= last:
        return iter(())
    dataset = grain.MapDataset.range(first, last).map(loader)
    if workers == 0:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=max(1, prefetch))
        return _all_of(iter(dataset.to_iter_dataset(options)), first, last)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which nobody parses here
    iterable = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=min(workers, last - first), per_worker_buffer_size=max(1, prefetch))
    iterator = iter(iterable.mp_prefetch(options))
    # Workers import JAX through Grain; they must never touch an accelerator. This process has read the variable already.
    os.environ["JAX_PLATFORMS"] = "cpu"
    iterator.start_prefetch()
    return _all_of(iterator, first, last)


def _all_of(iterator: Iterator[LoadedStep], first: int, last: int) -> Iterator[LoadedStep]:
    for step in range(first, last):
        loaded = next(iterator, None)
        if loaded is None or int(loaded.step) != step:
            raise RuntimeError(f"the data workers ended before step {step} of {last}; their own messages stand above")
        yield loaded
