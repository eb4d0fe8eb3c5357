"""The model, the samples and the steps of `balance-run`, planned and trained: four ways to balance the same steps.

Lengths of real samples are divided by `--scale`, and images, clips and tokens of these lengths are
made from a sample's
number: what a step costs depends on lengths alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.balance.waits import Waits, mean_waits
from mmjax.batch import Microbatch
from mmjax.benchmarks.corpora import divided
from mmjax.benchmarks.processes import run_worker
from mmjax.benchmarks.synthetic_run import RandomSamples, make_executor
from mmjax.config import (
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    LlmBalance,
    LogMel,
    ModelConfig,
    NoBalance,
    NoGrouping,
    PostBalance,
    Samples,
    TrainingConfig,
    VisionConfig,
)
from mmjax.config.model import frozen_modules
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.budget import Budget, prices_of
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology, waits_of
from mmjax.data.plan.placer import Balance
from mmjax.data.plan.step_plan import RankLayout, StepPlan, StepPlanner, choose_layout, make_placer
from mmjax.data.sample import SampleLengths
from mmjax.parallel.sharding import local_ranks, make_mesh, replicated
from mmjax.planning.flops import executed
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import CompileCounter
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import StagedBatch
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import Hyperparameters, hyperparameters

MODES: dict[str, Balance] = {
    "none": NoBalance(),
    "llm": LlmBalance(),
    "off": PostBalance(locality="off"),  # every phase by itself: OrchMLLM
    "post": PostBalance(),
}
PHASES = ("llm", "vision", "audio")
VOCAB = 256
RANKS_PER_NODE = 8

# The lengths of a step are divided, and so are its operations, but not what an update, the sum of
# gradients and reading the weights cost. So that these do not hide the phases, only connectors are
# trained, as in the first stage of LLaVA, and layers are narrow. The LLM and the vision encoder
# have as many operations each, whatever that gains.
_TOWER = {"width": 256, "heads": 16, "mlp_width": 1024, "frozen": True}
_CONNECTOR = ConnectorConfig(mlp_width=128)
MODEL = ModelConfig(
    DecoderConfig(**_TOWER, layers=80, kv_heads=16, head_width=16, vocab=VOCAB),
    {
        "vision": VisionConfig(**_TOWER, layers=96, patch=4, channels=1, connector=_CONNECTOR),
        "audio": AudioConfig(
            **_TOWER,
            layers=48,
            clips=LogMel(mels=16, sample_rate=4000, window=64, hop=32),
            connector=_CONNECTOR,
        ),
    },
)


# --------------------------------------------------------------------------------------------------
# samples


@dataclass(frozen=True)
class LengthSource(RandomSamples):
    """Samples of given lengths: at most an image and a clip, then text. int64 `[n]`: text tokens, patches, frames."""

    text: np.ndarray
    vision: np.ndarray
    audio: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    def facts(self, index: int) -> SampleLengths:
        """Make an image a strip of two rows of patches, so that it has as many as the length, or one more."""
        items: list[tuple[str, tuple[int, ...]]] = []
        clips = MODEL.encoders["audio"].clips
        if patches := int(self.vision[index]):
            side = MODEL.encoders["vision"].patch
            items.append(("vision", (2 * side, -(-patches // 2) * side)))  # 7 patches: 2 rows of 4
        if frames := int(self.audio[index]):
            items.append(("audio", (clips.window + (frames - 1) * clips.hop,)))
        return SampleLengths(int(self.text[index]), tuple(items))


def scaled(corpus: Mapping[str, np.ndarray], scale: int) -> LengthSource:
    """Divide all lengths by `scale`, to at least 1 where there is anything; LLM tokens hold the items."""

    vision, audio, llm = (divided(corpus[key], scale) for key in ("vision", "audio", "llm_tokens"))
    items = sum(
        -(-length // MODEL.encoders[name].positions_per_token)
        for name, length in (("vision", vision), ("audio", audio))
    )
    return LengthSource(np.maximum(llm - items, 1), vision, audio)


def open_lengths(file: str, split: str) -> LengthSource:
    """Open the samples that were written to an `.npz` file; for `FunctionSource`."""
    del split
    with np.load(file) as lengths:
        return LengthSource(**{key: lengths[key] for key in lengths.files})


# --------------------------------------------------------------------------------------------------
# steps


@dataclass(frozen=True)
class Trial:
    """The same steps of samples balanced in several ways, all in one ladder of shapes but "off", which sends widely."""

    configs: dict[str, Config]  # by mode
    planners: dict[str, StepPlanner]
    budget: Budget
    layouts: dict[str, RankLayout]

    def plans(self, mode: str, steps: int) -> list[StepPlan]:
        """Plan the first steps."""
        return [self.planners[mode].plan(step) for step in range(steps)]

    def waits(self, plans: Sequence[StepPlan]) -> Waits:
        """Compute how long ranks wait in these steps, and what of their time is for padding; mean over steps."""
        planner = self.planners["none"]
        prices = prices_of(self.configs["none"], self.budget)
        return mean_waits(
            [waits_of(plan.microbatches, prices, planner.grouper.index) for plan in plans]
        )


def make_trial(index: LengthIndex, lengths: Path, ranks: int, per_rank: int, seed: int) -> Trial:
    """Plan steps of `per_rank` samples a rank, one row per rank and module. lengths: the file of `open_lengths`."""
    config = Config(
        name="balance-run",
        data=DataConfig(
            {"lengths": FunctionSource(f"{__name__}:open_lengths", {"file": str(lengths)})},
            workers=0,
        ),
        batch=BatchConfig(
            Samples(ranks * per_rank),
            dict.fromkeys(PHASES, ranks),
            grouping=NoGrouping(),
            alignment=1,  # of lengths that are divided: a real one of 64
        ),
        model=MODEL,
        training=TrainingConfig(steps=1000),
        seed=seed,
    )
    configs = {
        m: replace(config, batch=replace(config.batch, balance=balance))
        for m, balance in MODES.items()
    }
    budget = make_budget(index, config, [1.0])
    grouper = StepGrouper(index, config.batch, [1.0], seed, budget)
    per_node = next(n for n in range(min(ranks, RANKS_PER_NODE), 0, -1) if ranks % n == 0)
    topology = Topology(ranks, per_node, per_node)
    common_layout = choose_layout(
        grouper, config, topology, tuple(MODES[m] for m in MODES if m != "off")
    )
    layouts = dict.fromkeys(MODES, common_layout) | {
        "off": choose_layout(grouper, configs["off"], topology)
    }
    planners = {
        m: StepPlanner(grouper, make_placer(grouper, c, layouts[m])) for m, c in configs.items()
    }
    return Trial(configs, planners, budget, layouts)


def work_per_rank(plan: StepPlan) -> np.ndarray:
    """Count positions of each module on each rank, int64 `[modules, ranks]`: no padding of rows."""
    first = plan.microbatches[0]
    work = np.zeros((len(first.rows), first.topology.ranks), np.int64)
    for m in plan.microbatches:
        np.add.at(work, (m.module, m.rank()), m.length)
    return work


def executed_flops(plan: StepPlan) -> float:
    """Count what a rank computes in a step, forward and backward, by the shapes that it runs in."""
    return float(sum(_executed(m) for m in plan.microbatches))


def _executed(plan: MicrobatchPlan) -> int:
    shape = {name: (plan.rows[k], plan.shape.lengths[k]) for k, name in enumerate(PHASES)}
    return sum(f.total for f in executed(MODEL, shape, frozen_modules(MODEL)).values())


def predicted_gain(trial: Trial, steps: int) -> float:
    """Predict how many times as long `none` takes as `post`, median over steps, by executed operations."""
    none, post = (
        np.array([executed_flops(p) for p in trial.plans(mode, steps)]) for mode in ("none", "post")
    )
    return float(np.median(none / post))


# ----------------------------------------------------------------------------------------------
# trained in processes


@dataclass(frozen=True)
class Task:
    """Hold what all processes do. loaders: by mode; they load the same samples for each step."""

    loaders: dict[str, StepLoader]
    steps: int


class Prepared(NamedTuple):
    """Hold one step of one mode, on the devices."""

    arrays: tuple[StagedBatch, ...]
    loaded: LoadedStep


@dataclass
class Trainer:
    """Hold an executor and the state that it trains."""

    executor: Executor
    state: State
    accumulated: list[Sums | None]
    hyper: Hyperparameters

    def step(self, step: Prepared) -> bool:
        """Run one update to its end; return whether all processes had planned the same."""
        report = ProcessReport(
            int(step.loaded.digest), needed_flops=float(step.loaded.needed_flops)
        )
        self.state, self.accumulated, outcome = self.executor.step(
            self.state, self.accumulated, step.arrays, self.hyper, report
        )
        jax.block_until_ready((self.state, self.accumulated, outcome))
        return bool(outcome.agreed)


def measure(task: Task, folder: Path) -> dict[str, object]:
    """Measure seconds of each step by mode, and count the programs compiled while they ran."""
    trainer = _make_trainer(next(iter(task.loaders.values())).config)
    barrier = _make_barrier(trainer.executor)
    steps = [_prepare(task, trainer.executor, step) for step in range(task.steps)]
    _warm_up(trainer, steps, barrier)
    programs = CompileCounter()
    modes = list(task.loaders)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    busy: dict[str, list[float]] = {mode: [] for mode in modes}
    for number, step in enumerate(steps):
        # Step 0 runs modes 0 1 2 3, step 1 modes 1 2 3 0: whatever drifts meanwhile meets all modes
        # alike.
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
            barrier()
            began = time.perf_counter()
            busy_before = time.process_time()
            agreed = trainer.step(step[mode])
            seconds[mode].append(time.perf_counter() - began)
            busy[mode].append(time.process_time() - busy_before)
            if not agreed:
                raise AssertionError(
                    f"step {number}, mode {mode}: the processes planned different batches"
                )
    return {"seconds": seconds, "busy": busy, "compiled": programs.requested}


def _make_trainer(config: Config) -> Trainer:
    """Build a trainer with all ranks along the data axis: every process has the model whole."""
    executor = make_executor(config, make_mesh(config.mesh, jax.devices()))
    state = executor.init(jax.random.key(config.seed))
    return Trainer(executor, state, executor.zeros(), hyperparameters(config, 0))


def _make_barrier(executor: Executor) -> Callable[[], None]:
    """Make a barrier: it returns when all processes' devices have come to it."""
    ones = jax.make_array_from_process_local_data(
        executor.per_device, np.ones(len(executor.mesh.local_devices), np.float32)
    )
    total = jax.jit(jnp.sum, out_shardings=replicated(executor.mesh))
    return lambda: jax.block_until_ready(total(ones))


def _prepare(task: Task, executor: Executor, step: int) -> dict[str, Prepared]:
    """Pack and put every mode's batches of one step before any clock runs. Raises where they hold other samples."""
    prepared = {}
    for mode, loader in task.loaders.items():
        loaded = replace(loader, ranks=local_ranks(executor.mesh))(step)
        prepared[mode] = Prepared(tuple(executor.put(b) for b in loaded.microbatches), loaded)
    first, *rest = (np.sort(p.loaded.samples) for p in prepared.values())
    if not all(np.array_equal(first, samples) for samples in rest):
        raise AssertionError(f"step {step} has different samples by mode")
    return prepared


def _warm_up(
    trainer: Trainer, steps: list[dict[str, Prepared]], barrier: Callable[[], None]
) -> None:
    """Compile everything, and run a step with each shape: first runs also allocate."""
    barrier()
    shapes: dict[Shape, tuple[Microbatch, Prepared]] = {}
    for step in steps:
        for prepared in step.values():
            loaded = prepared.loaded
            for lengths, widths, batch in zip(
                loaded.lengths, loaded.widths, loaded.microbatches, strict=True
            ):
                shape = Shape(tuple(lengths.tolist()), tuple(widths.tolist()))
                shapes.setdefault(shape, (batch, prepared))
    examples = list(shapes.values())
    trainer.executor.compile(trainer.state, [batch for batch, _ in examples], trainer.hyper)
    for _, prepared in examples:
        trainer.step(prepared)


if __name__ == "__main__":  # of a folder with a task
    run_worker(measure)
