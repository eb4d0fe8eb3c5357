"""Compute the logged numbers of a step: loss, how full and equal the ranks were, speed, and where its time went."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import jax
import numpy as np

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.loader import LoadedStep, StepLoader
from mmjax.parallel import processes
from mmjax.training.metrics import balance_scalars, exchange_scalars
from mmjax.training.metrics_log import Value
from mmjax.training.optimizer import Hyperparameters
from mmjax.training.profile import host_memory, memory_used, open_files
from mmjax.training.programs import ProgramCounter
from mmjax.training.step import Executor, StepReport


class Ready(NamedTuple):
    """One step's batches on the devices, and what is known of them on the host."""

    arrays: tuple[Microbatch, ...]
    loaded: LoadedStep
    waited: float  # seconds that the loop stood still for it
    busy: float  # seconds from asking for it to having it on the devices


class Times:
    """Running statistics of step times."""

    def __init__(self) -> None:
        self.steps, self.total, self.waited = 0, 0.0, 0.0
        self._last: deque[float] = deque(maxlen=100)  # without waiting for data

    def add(self, seconds: float, waited: float) -> None:
        """One more step, and how much of it was waiting for data."""
        self.steps, self.total, self.waited = self.steps + 1, self.total + seconds, self.waited + waited
        self._last.append(seconds - waited)

    def typical(self) -> float:
        """Seconds of a step whose data is there."""
        return float(np.median(self._last))


class StepNumbers:
    """Takes a run's time, and says what there is to say of each step."""

    def __init__(
        self, config: Config, executor: Executor, loader: StepLoader, programs: ProgramCounter, peak: float
    ) -> None:
        """peak: FLOP/s of all devices together."""
        self._config, self._executor, self._loader = config, executor, loader
        self._programs, self._peak = programs, peak
        self._processes = [f"process {p} ({host})" for p, host in enumerate(processes.hosts())]
        self.times = Times()
        self.begin()

    def begin(self) -> None:
        """The programs are compiled: from here on steps are run, and nothing should be compiled any more."""
        self._compiled_at_start = self._programs.requested
        self.go_on()

    def go_on(self) -> None:
        """Restart the step timer, so that what happened between steps is not charged to the next one."""
        self._ended = time.monotonic()

    @property
    def compiled(self) -> int:
        """Programs that were compiled after the start."""
        return self._programs.requested - self._compiled_at_start

    def of(self, ready: Ready, report: StepReport, hyper: Hyperparameters) -> dict[str, Value]:
        """The numbers of a step that has ended now; of its report on the host."""
        now = time.monotonic()
        seconds, self._ended = now - self._ended, now
        # A wait may have begun before the step before this one was settled: no more than this step's time is its own.
        waited = min(ready.waited, seconds)
        self.times.add(seconds, waited)
        loss, weight, loaded = report.report.loss, report.report.weight, ready.loaded
        modules, layout = ("llm", *self._config.model.encoders), self._loader.layout
        token_bytes = self._config.model.llm.width * self._executor.model.dtype.itemsize
        tokens = dict(zip(("text", *modules[1:]), loaded.tokens.tolist(), strict=True))
        names = self._config.data.sources
        return {
            "loss": float(loss.sum() / weight.sum()),
            **{f"loss/{n}": float(x / w) for n, x, w in zip(names, loss, weight, strict=True) if w > 0},
            "gradient_norm": float(report.gradient_norm),
            **{f"learning_rate/{group}": float(rate) for group, (rate, _) in hyper.rates.items()},
            **balance_scalars(loaded, modules, layout, self._loader.planner.placer.flops),
            **exchange_scalars(loaded, modules[1:], layout.topology, token_bytes),
            "epoch": float(loaded.epoch),
            "samples": len(loaded.samples) - int(report.spoiled.count),
            "samples/s": len(loaded.samples) / seconds,
            "tokens/s": sum(tokens.values()) / seconds,
            **{f"tokens/s/{modality}": n / seconds for modality, n in tokens.items()},
            "mfu": float(report.needed_flops) / seconds / self._peak,
            "programs_compiled": self.compiled,
            "seconds/step": seconds,
            "seconds/data_wait": waited,
            "plan_ms": 1e3 * float(loaded.plan_seconds),
            "seconds/load": float(loaded.load_seconds),
            "data_wait_share": waited / seconds,
            **self._slowest(report.busy),
            **self._memory(),
            "open_files": open_files(),
        }

    def _memory(self) -> dict[str, Value]:
        device = memory_used(self._executor.mesh)
        return {"memory/host": host_memory()} | ({} if device is None else {"memory/device": device})

    def _slowest(self, busy: jax.Array) -> dict[str, Value]:
        """The process that was ready last."""
        if len(self._processes) == 1:
            return {}
        device = int(np.argmax(busy))
        process = self._executor.mesh.devices.flat[device].process_index
        return {"slowest": self._processes[process], "seconds/slowest": float(busy[device])}
