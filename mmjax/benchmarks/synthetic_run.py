"""Samples of random contents, data without a run folder and an executor on one mesh, for benchmarks that train."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.memory_plan import fit_run
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import layout_of_rows, on_one_mesh
from mmjax.config import Config, ModelConfig, Remat
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.models.model import Model
from mmjax.parallel.sharding import AXES, make_mesh
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.schedules import stage_cuts
from mmjax.planning.speed import Speed
from mmjax.runtime.compiler_options import compiler_options
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import StagedBatch
from mmjax.runtime.placement import place_stages
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import Hyperparameters, hyperparameters, make_optimizer
from mmjax.runtime.step_report import StepReport
from mmjax.training.run_data import RunData, open_data


@dataclass(frozen=True)
class RandomSamples:
    """A `Source` of samples of these lengths, items before text; their contents are random."""

    lengths: Sequence[SampleLengths]
    vocab: int = 256
    channels: int = 1  # of an image
    behind: tuple[str, ...] = ()  # modules whose items stand behind the text
    delay: float = 0.0  # seconds that reading an item takes

    def __len__(self) -> int:
        return len(self.lengths)

    def fingerprint(self) -> str:
        """Return no fingerprint: nothing keeps an index of these."""
        return ""

    def facts(self, index: int) -> SampleLengths:
        """Return the lengths of a sample."""
        return self.lengths[index]

    def sample(self, index: int) -> Sample:
        """Learn every text token but a sample's very first."""
        facts = self.facts(index)
        tokens = np.random.default_rng(index).integers(
            self.vocab, size=facts.text_tokens, dtype=np.int32
        )
        weights = np.ones(len(tokens), np.float32)
        weights[0] = len(facts.items) > 0
        items = [Item(name, k) for k, (name, _) in enumerate(facts.items)]
        before = [item for item in items if item.encoder not in self.behind]
        return Sample((*before, Text(tokens, weights), *items[len(before) :]))

    def item(self, index: int, number: int) -> np.ndarray:
        """Draw noise of an image's or a clip's size."""
        time.sleep(self.delay)
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


def make_executor(config: Config, devices: Sequence[jax.Device], **options: Any) -> Executor:
    """Make the executor of a config's model on one mesh or on those of units. options: as of `Executor`."""
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    optimizer = make_optimizer(config.optimizer, model.axes, model.dtype)
    options = {"sources": 1, "accumulates": config.batch.microbatches > 1} | options
    return Executor(model, optimizer, place_stages(config, model, devices), **options)


@dataclass
class Trainer:
    """Hold an executor and the state that it trains."""

    executor: Executor
    state: State
    sums: list[Sums]
    hyper: Hyperparameters

    @classmethod
    def start(cls, config: Config, executor: Executor) -> Trainer:
        """Make random parameters."""
        state = executor.init(jax.random.key(config.seed))
        return cls(executor, state, executor.zeros(), hyperparameters(config, 0))

    def step(
        self, batches: Sequence[StagedBatch], report: ProcessReport | None = None
    ) -> StepReport:
        """Run one update to its end. report: of this process."""
        noise = np.zeros(2, np.uint32)
        self.state, self.sums, outcome = self.executor.step(
            self.state, self.sums, batches, self.hyper, report, noise
        )
        jax.block_until_ready((self.state, self.sums, outcome))
        return outcome


Fit = Callable[[Config, jax.sharding.Mesh, RunData], tuple[Config, RunPlan]]


def fit_data(config: Config, mesh: jax.sharding.Mesh, data: RunData) -> tuple[Config, RunPlan]:
    """Plan a config's run on a mesh. Raises UserError where it does not fit."""
    layout_of = partial(data.layout_of, mesh=mesh)
    return config, fit_run(config, mesh, layout_of(config), layout_of)[0]


class Prepared(NamedTuple):
    """A model that fits its devices, its programs, and steps of its samples."""

    config: Config
    plan: RunPlan
    loader: StepLoader
    executor: Executor
    steps: list[LoadedStep]


def prepare(
    config: Config, devices: Sequence[jax.Device], steps: int, fit: Fit = fit_data
) -> Prepared:
    """Plan a config's run on one mesh, and load its first steps; compile nothing."""
    mesh = make_mesh(config.mesh, devices)
    with opened_data(config, mesh) as data:
        config, plan = fit(config, mesh, data)
        loaded = [data.loader(number) for number in range(steps)]
    executor = make_executor(
        replace(config, model=plan.applied(config.model)),
        devices,
        loss_chunks=plan.loss_chunks,
        compiler_options=compiler_options(config.compiler, devices[0]),
    )
    return Prepared(config, plan, data.loader, executor, loaded)


def with_policies(model: ModelConfig, policies: Mapping[str, Remat]) -> ModelConfig:
    """Recompute all layers of each tower by one policy."""
    encoders = {name: replace(c, remat=policies[name]) for name, c in model.encoders.items()}
    return replace(model, llm=replace(model.llm, remat=policies["llm"]), encoders=encoders)


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
