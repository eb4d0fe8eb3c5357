"""Compute the logged numbers of a step: loss, balance, throughput, and where its time went."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from mmjax.balance.metrics import dist_ratio, pad_ratio
from mmjax.balance.parts import LLM
from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.row_shapes import RankLayout
from mmjax.distributed import coordination
from mmjax.runtime.compile_cache import CompileCounter
from mmjax.runtime.devices import open_files, peak_memory_used, resident_memory
from mmjax.runtime.optimizer import Hyperparameters
from mmjax.runtime.step import Executor, StepReport
from mmjax.training.metrics import MetricValue

Scalars = dict[str, float]


def balance_scalars(loaded: LoadedStep, modules: Sequence[str], layout: RankLayout, flops: np.ndarray) -> Scalars:
    """Measure the fill of a step's rows and the balance of its ranks, whichever process holds them.

    By module: fill, pad ratio (OmniBal eq. 1), dist ratio over ranks (eq. 2) and the fullest rank over the mean one;
    the latter two also as they would be with balance `none`. straggler_wait: the share of the step in which a rank
    waits, on average, for the fullest one of each phase. flops: float64 `[modules]`, per position; they weigh the
    phases.
    """
    ranks = layout.topology.ranks
    scalars = Scalars()
    # All devices of a rank share its part of the LLM, while each encoder rank has its own part.
    weights = np.where(np.arange(len(modules)) == LLM, flops / layout.topology.encoders_per_rank, flops)
    useful = budget = 0
    for k, module in enumerate(modules):
        rows = ranks * layout.rows[k]
        used = [work.useful[k, :rows] for work in loaded.work]  # useful positions of each row, by microbatch
        positions = sum(rows * int(work.lengths[k]) for work in loaded.work)
        module_useful = int(sum(u.sum() for u in used))
        scalars[f"fill/{module}"] = module_useful / positions
        scalars[f"pad_ratio/{module}"] = float(np.mean([pad_ratio(u) if u.any() else 0.0 for u in used]))
        useful += module_useful
        budget += positions
    for suffix, placement in (("", "balanced"), ("_before", "unbalanced")):
        by_rank = sum(getattr(work, placement) for work in loaded.work)
        for k, module in enumerate(modules):
            any_work = by_rank[k].any()
            scalars[f"dist_ratio{suffix}/{module}"] = float(dist_ratio(by_rank[k])) if any_work else 0.0
            maximum_over_mean = by_rank[k].max() / by_rank[k].mean() if any_work else 1.0
            scalars[f"max_over_mean{suffix}/{module}"] = float(maximum_over_mean)
        # Ranks wait for each other between phases, so a step takes the sum of the phases' maxima.
        scalars[f"straggler_wait{suffix}"] = float(1 - weights @ by_rank.mean(1) / (weights @ by_rank.max(1)))
    return scalars | {"useful/budget": useful / budget}


def exchange_scalars(loaded: LoadedStep, encoders: Sequence[str], topology: Topology, token_bytes: int) -> Scalars:
    """Count the bytes that the all-to-alls of a step's forward pass send between ranks, with and without padding.

    The backward pass sends as much. token_bytes: of one encoder token.
    """
    ranks = topology.ranks
    peers = topology.peers
    # Every rank sends `widths` tokens to each of its other peers, filled or not.
    sent = sum(work.widths for work in loaded.work) * ranks * (peers - 1) * token_bytes
    useful = sum(work.moved for work in loaded.work) * token_bytes
    scalars = {f"all_to_all_bytes/{e}": float(n) for e, n in zip(encoders, sent, strict=True)}
    scalars |= {f"all_to_all_useful_bytes/{e}": float(n) for e, n in zip(encoders, useful, strict=True)}
    # Share of a rank's other peers that are on other nodes.
    away = max(0, peers - topology.ranks_per_node) / max(1, peers - 1)
    return scalars | {"inter_node_share": away if sent.any() else 0.0}


class DeviceBatch(NamedTuple):
    """One step's batches on the devices, and on the host."""

    arrays: tuple[Microbatch, ...]
    loaded: LoadedStep
    waited: float  # seconds that the loop waited for it
    busy: float  # seconds from requesting it to having it on the devices


@dataclass
class StepTimes:
    """Running statistics of step times, in seconds."""

    steps: int = 0
    total: float = 0.0
    waited: float = 0.0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # without waiting for data

    def add(self, seconds: float, waited: float) -> None:
        """Add a step, and how much of it was waiting for data."""
        self.steps += 1
        self.total += seconds
        self.waited += waited
        self._last.append(seconds - waited)

    def typical(self) -> float:
        """Return the median seconds of a step without waiting for data."""
        return float(np.median(self._last))


@dataclass(eq=False)
class StepMetrics:
    """Times a run's steps, and computes the numbers to log for each. peak: FLOP/s of all devices together."""

    config: Config
    executor: Executor
    loader: StepLoader
    programs: CompileCounter
    peak: float
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self._processes = [f"process {p} ({host})" for p, host in enumerate(coordination.hosts())]
        self.begin()

    def begin(self) -> None:
        """Mark the end of compiling: programs compiled from here on count as compiled after the start."""
        self._compiled_at_start = self.programs.requested
        self.go_on()

    def go_on(self) -> None:
        """Restart the step timer, so that what happened between steps is not charged to the next one."""
        self._ended = time.monotonic()

    @property
    def compiled(self) -> int:
        """Return the number of programs that were compiled after the start."""
        return self.programs.requested - self._compiled_at_start

    def of(self, ready: DeviceBatch, report: StepReport, hyper: Hyperparameters) -> dict[str, MetricValue]:
        """Return the numbers of the step that has just ended. report: on the host."""
        clock = time.monotonic()
        seconds = clock - self._ended
        self._ended = clock
        # The wait for data may have begun before the previous step was logged, and so exceed this step's time.
        waited = min(ready.waited, seconds)
        self.times.add(seconds, waited)
        loss = report.report.loss
        weight = report.report.weight
        loaded = ready.loaded
        modules = ("llm", *self.config.model.encoders)
        layout = self.loader.layout
        token_bytes = self.config.model.llm.width * self.executor.model.dtype.itemsize
        tokens = dict(zip(("text", *modules[1:]), loaded.tokens.tolist(), strict=True))
        names = self.config.data.sources
        memory = peak_memory_used(self.executor.mesh)
        return {
            "loss": float(loss.sum() / weight.sum()),
            **{f"loss/{n}": float(x / w) for n, x, w in zip(names, loss, weight, strict=True) if w > 0},
            "gradient_norm": float(report.gradient_norm),
            **{f"learning_rate/{group}": float(rate) for group, (rate, _) in hyper.rates.items()},
            **balance_scalars(loaded, modules, layout, self.loader.planner.placer.flops),
            **exchange_scalars(loaded, modules[1:], layout.topology, token_bytes),
            "epoch": float(loaded.epoch),
            # Without those that could not be read.
            "samples": len(loaded.samples) - int(report.spoiled.count),
            "samples/s": len(loaded.samples) / seconds,
            "tokens/s": sum(tokens.values()) / seconds,
            **{f"tokens/s/{modality}": n / seconds for modality, n in tokens.items()},
            "mfu": float(report.needed_flops) / seconds / self.peak,
            "programs_compiled": self.compiled,
            "seconds/step": seconds,
            "seconds/data_wait": waited,
            "plan_ms": 1e3 * float(loaded.plan_seconds),
            "seconds/load": float(loaded.load_seconds),
            "data_wait_share": waited / seconds,
            **self._slowest(report.busy),
            "memory/host": resident_memory(),
            **({} if memory is None else {"memory/device": memory}),
            "open_files": open_files(),
        }

    def _slowest(self, busy: jax.Array) -> dict[str, MetricValue]:
        """Name the process that was ready last."""
        if len(self._processes) == 1:
            return {}
        # `busy` has an entry per device; all of a process have the same.
        device = int(np.argmax(busy))
        process = self.executor.mesh.devices.flat[device].process_index
        return {"slowest": self._processes[process], "seconds/slowest": float(busy[device])}
