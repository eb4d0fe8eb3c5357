"""Samples of random contents, data without a run folder and an executor on one mesh, for benchmarks that train."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import layout_of_rows, on_one_mesh
from mmjax.config import Config
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.models.model import Model
from mmjax.parallel.sharding import AXES, ShardingRules
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.speed import Speed
from mmjax.runtime.executor import Executor
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.state import make_optimizer
from mmjax.training.run_data import RunData, open_data


class RandomSamples(ABC):
    """A `Source` of samples, items before text, with the lengths that `facts` says; their contents are random."""

    vocab = 256
    channels = 1  # of an image

    @abstractmethod
    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""

    def fingerprint(self) -> str:
        """Return no fingerprint: nothing keeps an index of these."""
        return ""

    def sample(self, index: int) -> Sample:
        """Put items first, then text; every text token but a sample's very first is learned."""
        facts = self.facts(index)
        tokens = np.random.default_rng(index).integers(
            self.vocab, size=facts.text_tokens, dtype=np.int32
        )
        weights = np.ones(len(tokens), np.float32)
        weights[0] = len(facts.items) > 0
        return Sample(
            (*(Item(name, k) for k, (name, _) in enumerate(facts.items)), Text(tokens, weights))
        )

    def item(self, index: int, number: int) -> np.ndarray:
        """Draw noise of an image's or a clip's size."""
        _, size = self.facts(index).items[number]
        rng = np.random.default_rng((index, number))
        if len(size) == 1:
            return rng.uniform(-1, 1, size).astype(np.float32)
        return rng.integers(256, size=(*size, self.channels), dtype=np.uint8)


@contextmanager
def opened_data(config: Config, mesh: jax.sharding.Mesh) -> Iterator[RunData]:
    """Open a config's data for a run that keeps nothing."""
    with tempfile.TemporaryDirectory() as folder:
        yield open_data(config, RunFolder(Path(folder)), 0, NO_CHANGES, mesh)


def make_executor(config: Config, mesh: jax.sharding.Mesh, **options: Any) -> Executor:
    """Make the executor of a config's model on one mesh. options: as of `Executor`."""
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    optimizer = make_optimizer(config.optimizer, model.axes, model.dtype)
    options = {"sources": 1, "accumulates": config.batch.microbatches > 1} | options
    return Executor.on_mesh(model, optimizer, mesh, ShardingRules.of(config.mesh), **options)


def plan_rows(
    config: Config,
    shape: Mapping[str, tuple[int, int]],
    mesh: Mapping[str, int],
    speed: Speed,
    room: MemoryLimit,
    widths: Mapping[str, int] | None = None,
) -> RunPlan:
    """Plan a run without data: rows of these numbers and lengths on each device of a mesh, in one microbatch.

    mesh: sizes of the axes that are not 1. widths: tokens that a device sends to each other one, by
    module.
    """
    axes = dict.fromkeys(AXES, 1) | mesh
    config = replace(config, batch=replace(config.batch, microbatches=1))
    layout = layout_of_rows(config, axes, [shape], widths, axes["fsdp"] if widths else 1)
    return plan_run(on_one_mesh(config, axes), layout, speed, room)
