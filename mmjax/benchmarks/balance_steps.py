"""The model, the samples and the steps of `balance-run`, planned and trained: four ways to balance the same steps.

Lengths of real samples are divided by `--scale`, and images, clips and tokens of these lengths are
made from a sample's
number: what a step costs depends on lengths alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mmjax.balance.waits import Waits, mean_waits
from mmjax.batch import Microbatch
from mmjax.benchmarks.corpora import divided
from mmjax.benchmarks.harness import timed
from mmjax.benchmarks.planned_steps import measure_steps
from mmjax.benchmarks.processes import run_worker
from mmjax.benchmarks.synthetic_run import RandomSamples, Trainer, make_executor
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
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.placer import Balance
from mmjax.data.plan.step_plan import (
    RankLayout,
    StepPlan,
    StepPlanner,
    choose_layout,
    make_placer,
)
from mmjax.data.sample import SampleLengths
from mmjax.distributed import coordination
from mmjax.parallel.sharding import local_ranks
from mmjax.planning.flops import executed
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import CompileCounter
from mmjax.runtime.executor import Executor
from mmjax.runtime.passes import StagedBatch

MODES: dict[str, Balance] = {
    "none": NoBalance(),
    "llm": LlmBalance(),
    "off": PostBalance(locality="off"),  # every phase by itself: OrchMLLM
    "post": PostBalance(),
}
PHASES = ("llm", "vision", "audio")
LENGTHS = ("text", "vision", "audio")  # of a sample
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


def scaled(corpus: Mapping[str, np.ndarray], scale: int) -> dict[str, np.ndarray]:
    """Divide all lengths by `scale`, to at least 1 where there is anything: text tokens, patches and frames.

    LLM tokens hold the items.
    """
    lengths = {name: divided(corpus[name], scale) for name in MODEL.encoders}
    items = sum(-(-n // MODEL.encoders[name].positions_per_token) for name, n in lengths.items())
    text = np.maximum(divided(corpus["llm_tokens"], scale) - items, 1)
    return {"text": text} | lengths


def samples_of(lengths: Mapping[str, np.ndarray]) -> RandomSamples:
    """Make samples of lengths as `scaled` returns them: at most an image and a clip, then text."""
    side = MODEL.encoders["vision"].patch
    clips = MODEL.encoders["audio"].clips
    samples = []
    for text, patches, frames in zip(*(lengths[k].tolist() for k in LENGTHS), strict=True):
        # An image is a strip of two rows of patches, so that it has as many as the length, or one
        # more: 7 patches are 2 rows of 4.
        image = ("vision", (2 * side, -(-patches // 2) * side))
        clip = ("audio", (clips.window + (frames - 1) * clips.hop,))
        samples.append(SampleLengths(text, (image,) * (patches > 0) + (clip,) * (frames > 0)))
    return RandomSamples(samples)


def open_lengths(file: str, split: str) -> RandomSamples:
    """Open the samples that were written to an `.npz` file; for `FunctionSource`."""
    del split
    with np.load(file) as lengths:
        return samples_of(lengths)


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
        prices = prices_of(self.configs["none"], self.budget)
        index = self.planners["none"].grouper.index
        return mean_waits(measure_steps(plans, prices, index).waits)


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


def executed_flops(plan: StepPlan) -> float:
    """Count what a rank computes in a step, forward and backward, by the shapes that it runs in."""
    total = 0
    for m in plan.microbatches:
        shape = dict(zip(PHASES, zip(m.rows, m.shape.lengths, strict=True), strict=True))
        total += sum(f.total for f in executed(MODEL, shape, frozen_modules(MODEL)).values())
    return float(total)


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


def _step(trainer: Trainer, step: Prepared) -> bool:
    """Run one update to its end; return whether all processes had planned the same."""
    report = ProcessReport(int(step.loaded.digest), needed_flops=float(step.loaded.needed_flops))
    return bool(trainer.step(step.arrays, report).agreed)


def measure(task: Task) -> dict[str, object]:
    """Measure seconds of each step by mode, and count the programs compiled while they ran."""
    config = next(iter(task.loaders.values())).config
    # All ranks are along the data axis: every process has the model whole.
    trainer = Trainer.start(config, make_executor(config, jax.devices()))
    steps = [_prepare(task, trainer.executor, step) for step in range(task.steps)]
    _warm_up(trainer, steps)
    programs = CompileCounter()
    modes = list(task.loaders)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    busy: dict[str, list[float]] = {mode: [] for mode in modes}
    for number, step in enumerate(steps):
        # Step 0 runs modes 0 1 2 3, step 1 modes 1 2 3 0: whatever drifts meanwhile meets all modes
        # alike.
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
            coordination.wait_for_all(f"bench/{number}/{mode}")
            busy_before = time.process_time()
            agreed, taken = timed(_step, trainer, step[mode])
            seconds[mode].append(taken)
            busy[mode].append(time.process_time() - busy_before)
            if not agreed:
                raise AssertionError(
                    f"step {number}, mode {mode}: the processes planned different batches"
                )
    return {"seconds": seconds, "busy": busy, "compiled": programs.requested}


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


def _warm_up(trainer: Trainer, steps: list[dict[str, Prepared]]) -> None:
    """Compile everything, and run a step with each shape: first runs also allocate."""
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
        _step(trainer, prepared)


if __name__ == "__main__":  # of a folder with a task
    run_worker(measure)
