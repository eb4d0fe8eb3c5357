"""One training session: everything that a run needs between its config and its loop."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax import startup
from mmjax.autotune.memory_plan import plan_key, write_memory_plan
from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.config.loading import to_json
from mmjax.console import ProgressLine, print_lines, size
from mmjax.data.loading.step_loader import LoadedStep, StepLoader, spelled
from mmjax.data.loading.workers import steps
from mmjax.data.plan.step_plan import PLANNER
from mmjax.disk import atomic_write
from mmjax.distributed import coordination
from mmjax.distributed.watchdog import Watchdog
from mmjax.errors import UserError
from mmjax.inference.evaluation import Answered, Evaluator, Scores, exact_match_by_group
from mmjax.models.model import Model, Params, merge, modules_of
from mmjax.planning.remat import MemoryPlan
from mmjax.runtime.checkpoint import (
    CheckpointMetadata,
    CheckpointStore,
    DataState,
    checkpoint_step,
    restore_parameters,
)
from mmjax.runtime.checkpoint_commit import saved_steps
from mmjax.runtime.devices import CompileCounter, peak_memory_used
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.state import (
    Hyperparameters,
    TrainState,
    all_parameters,
    hyperparameters,
    parameter_shardings,
    state_from,
)
from mmjax.runtime.step import Accumulated, Executor, Said, StepReport
from mmjax.runtime.weights import load_pretrained, modules_by_folder
from mmjax.training import announce
from mmjax.training.best import BestMetric
from mmjax.training.metrics import DeviceBatch, MetricsLog, MetricValue, StepMetrics
from mmjax.training.nonfinite import NonFiniteWatch, samples_with_bad_gradients
from mmjax.training.run_data import Launch, append_launch
from mmjax.training.signals import ProfilerTrace, StopFlags
from mmjax.training.unreadable import UnreadableSamples

SETTLED = 5  # steps after which step times say something


class Running(NamedTuple):
    """A step that was started; its numbers are read when the next one is under way."""

    step: int
    ready: DeviceBatch
    report: StepReport


@dataclass(repr=False)
class Session:
    """A run's folder, programs, data, checkpoints and log. `mmjax.train` opens it and walks the loop."""

    config: Config
    folder: RunFolder
    life: Launch
    mesh: Mesh
    executor: Executor
    loader: StepLoader
    left_out: UnreadableSamples
    checkpoints: CheckpointStore
    evaluator: Evaluator
    programs: CompileCounter
    peak: float  # FLOP/s of all devices together
    fitted: MemoryPlan
    asked: StopFlags
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.stopping = False  # some process was asked to, and all know it
        self.tracer = ProfilerTrace(self.folder.traces)
        self._bad_numbers = NonFiniteWatch(self.config.training, self.loader.index.name)
        self.start_seconds: dict[str, float] = {}  # until the first step was done, by activity; of a command alone
        self.best = BestMetric.resume(self.config.training, self.folder.metrics, self.life.first)
        self.end = self.life.first if self.best.exhausted else self.config.training.steps
        self._saved = self.life.first  # the step of the newest checkpoint, begun to be saved or restored
        self._told_save = 0  # the step of the last save that something was said of
        self._running: Running | None = None
        self._numbers = StepMetrics(self.config, self.executor, self.loader, self.programs, self.peak)
        self._log: MetricsLog | None = None
        self._batches: Iterator[LoadedStep] = iter(())

    def __repr__(self) -> str:
        return f"Session({self.config.name!r}, {str(self.folder.path)!r})"

    # ------------------------------------------------------------------------------------------------ before the loop

    def start(self) -> TrainState:
        """The state to begin with: of a checkpoint where the run goes on, from `init_from`, or fresh.

        No file changes before. Raises TornCheckpoint.
        """
        with startup.activity("reading the checkpoint" if self.life.first else "making parameters"):
            return self._start()

    def _start(self) -> TrainState:
        executor = self.executor
        first = self.life.first
        metrics = self.evaluator.metrics("validation")
        if self.best.metric and self.best.metric not in metrics:
            raise UserError(
                f"training.keep_best={self.best.metric}: evaluations of this run give "
                f"{', '.join(metrics) or 'nothing, since no source has a validation split'}; name one of them",
                everywhere=True,
            )
        if first:
            state, saved = self.checkpoints.restore(first)
            self._check_goes_with(saved)
            print_lines(f"resumed {self.folder.path} at step {first}")
        elif self.config.init_from:
            params = self._parameters_of(Path(self.config.init_from))
            begin = lambda p: state_from(executor.model, executor.optimizer, executor.frozen, p)  # noqa: E731
            state = jax.jit(begin, out_shardings=executor.shardings)(params)
        else:
            pretrained = load_pretrained(executor.model, parameter_shardings(executor.model, self.mesh, executor.rules))
            state = executor.init(jax.random.key(self.config.seed), pretrained)
            for folder, modules in modules_by_folder(self.config.model).items():
                print_lines(f"weights of {', '.join(modules)} from {folder}")
        if coordination.is_leader():
            write_memory_plan(self.folder.fit, plan_key(self.config, self.mesh), self.fitted)
            self._log = MetricsLog(
                self.folder.metrics, first, self.config.training.wandb, json.loads(to_json(self.config))
            )
        return state

    def _check_goes_with(self, saved: CheckpointMetadata) -> None:
        """Raises UserError where a checkpoint does not go with the data or the length of the run."""
        step = saved.step
        current = asdict(self.data_state(step))
        begins = self.life.segment.first == step  # with other data, as was said
        if saved.data.planner != PLANNER:
            raise UserError(
                f"{self.folder.path} was planned by another version of mmjax, which put other samples into its steps; "
                "go on with that version, or start another run from its parameters with init_from="
            )
        if changed := [key for key, value in asdict(saved.data).items() if current[key] != value and not begins]:
            raise UserError(
                f"{self.folder.path} was trained on other data ({', '.join(changed)} differ); restore the data, go on "
                "with what there is now by --new-data, or start another run from its parameters with init_from="
            )
        if self.config.training.steps < step:
            raise UserError(
                f"{self.folder.path} has done {step} steps already, more than "
                f"training.steps={self.config.training.steps}; give at least {step}, or score it with "
                "python -m mmjax.evaluate"
            )

    def _parameters_of(self, run: Path) -> Params:
        source = RunFolder(run)
        try:
            model = self.executor.model
            adapted = bool(source.read_config().model.lora)
            if adapted and not model.config.lora:
                raise UserError(
                    "that run has adapters and this model has none: give it the same model.lora, or merge them with "
                    "python -m mmjax.export and start from that folder"
                )
            step = checkpoint_step(source.checkpoints)
            fresh: Params = {}
            if model.config.lora and not adapted:
                adapters = self.executor.born(frozenset(modules_of(model.abstract)))
                fresh = merge(*adapters(jax.random.key(self.config.seed)))
                model = Model.build(replace(model.config, lora={}), model.dtype)
            shardings = parameter_shardings(model, self.mesh, self.executor.rules)
            params = merge(restore_parameters(source.checkpoints, step, model, shardings), fresh)
        except UserError as error:
            raise UserError(f"init_from={run}: {error}") from error
        print_lines(f"parameters of {run} after {step} steps")
        return params

    def complete(self, first: int) -> bool:
        """Return whether all steps are done, and say so."""
        if first < self.end or (self.evaluator.metrics("test") and self.folder.scored_step() != self.end):
            return False
        if self.end < self.config.training.steps:
            print_lines(f"{self._stopped_early()}; to go on, resume with a larger training.patience")
        else:
            print_lines(f"all {self.end} steps are done; to go on, resume with a larger training.steps")
        return True

    def _stopped_early(self) -> str:
        best = self.best
        return (
            f"{best.metric} has not improved for {best.stale} evaluations, the last after step {self.end} "
            f"(best {best.value:.4g} after step {best.step})"
        )

    def data_state(self, step: int) -> DataState:
        """Return the position in the data before `step`."""
        budget = json.loads(json.dumps(asdict(self.loader.budget)))
        return DataState(step, self.life.fingerprint, budget, PLANNER, self.life.segment.first)

    def describe(self, first: int) -> Microbatch:
        """Print what will run and how it fits; return the first microbatch, as an example of all."""
        self.watchdog.at("planning", first)
        with startup.activity("planning the first step"):  # a first start compiles the planner
            example = self.loader(first)
        announce.print_run_summary(self.config, self.executor.model, self.mesh, self.loader, example)
        print_lines(*announce.describe_memory_plan(self.fitted))
        return example.microbatches[0]

    def compile(self, state: TrainState, example: Microbatch, first: int) -> Accumulated:
        """Compile every program ahead: gradients of each shape, update, saving, answering."""
        self.watchdog.at("compiling", first)
        began = time.monotonic()
        with startup.activity("compiling the programs of a step"):
            accumulated = self.executor.zeros()
            shapes = announce.padding_microbatches(self.loader.layout.shapes, example)
            self.executor.compile(state, accumulated, shapes, self.hyperparameters(first))
        with startup.activity("compiling those of saving and answering"):
            self.checkpoints.prepare()
            self.evaluator.compile(all_parameters(state))
        print_lines(
            f"compiled {self.programs.compiled} programs in {time.monotonic() - began:.1f} s"
            + (f", {self.programs.from_cache} came from the cache" if self.programs.from_cache else "")
        )
        self._numbers.begin()
        return accumulated

    def hyperparameters(self, step: int) -> Hyperparameters:
        """The run-time arguments of update `step`."""
        return hyperparameters(self.config, self.executor.modules, step)

    # ------------------------------------------------------------------------------------------------ inside the loop

    def batches(self, first: int) -> Iterator[DeviceBatch]:
        """The steps' batches, on the devices; workers begin to load them at once, and this life is written down."""
        if coordination.is_leader():
            append_launch(self.folder.history, self.life)
        data = self.config.data
        self._batches = steps(self.loader, first, self.end, data.workers, data.prefetch)
        return self._arrive(first)

    def _arrive(self, first: int) -> Iterator[DeviceBatch]:
        for step in itertools.count(first):
            self.watchdog.at("waiting for data", step)
            began = time.monotonic()
            with startup.activity("waiting for data"):
                loaded = next(self._batches, None)
            if loaded is None:
                return
            waited = time.monotonic() - began
            self.watchdog.at("running", step)
            arrays = tuple(self.executor.put(b) for b in loaded.microbatches)
            yield DeviceBatch(arrays, loaded, waited, time.monotonic() - began)

    def said(self, ready: DeviceBatch) -> Said:
        """Collect what this process reports to the others with a step."""
        loaded = ready.loaded
        work = float(loaded.needed_flops)
        return Said(int(loaded.digest), int(loaded.content), work, ready.busy, bool(self.asked.stop))

    def ran(self, step: int, ready: DeviceBatch, report: StepReport, state: TrainState, progress: ProgressLine) -> None:
        """Note a step that was started and gave this state, and write down the one before, which is done by now."""
        self.settle(state, progress)
        self._running = Running(step, ready, report)
        if self.tracer.before(step + 1, self.asked.trace):
            self.asked.trace = False

    def settle(self, state: TrainState, progress: ProgressLine) -> None:
        """Write down the step under way, waiting for it to end. Raises UserError where it is to be the last."""
        if self._running is None:
            return
        step, ready, report = self._running
        self._running = None
        report = jax.device_get(report)
        self.left_out.settle(step, report.spoiled)
        self._check_updated(step, report)
        self.stopping = bool(report.stop)
        scalars = self._numbers.of(ready, report, self.hyperparameters(step))
        low, high = map(int, report.content)
        extra = {"batch": spelled(low + (high << 32)), "worst": self._bad_numbers.worst(report.worst)}
        self._write(step + 1, scalars | extra)
        progress.update(step + 1, scalars)
        spoiled = [int(sample) for sample in report.spoiled.samples if sample >= 0]
        find_bad_gradients = partial(
            samples_with_bad_gradients, self.executor, state, ready.arrays, self.noise(step), spoiled
        )
        self._bad_numbers.settle(step, report, find_bad_gradients, ready.loaded.samples.tolist())
        self._tell_save()
        if not self.start_seconds:
            self.start_seconds = startup.seconds()
        if self._numbers.times.steps == SETTLED:
            typical = self._numbers.times.typical()
            if (used := peak_memory_used(self.mesh)) is not None:
                print_lines(f"memory {size(used)} of a device used so far, {size(self.fitted.device)} predicted")
            load = float(ready.loaded.load_seconds)  # the first steps' includes opening everything
            print_lines(announce.loader_verdict(load, self.config.data.workers, typical))

    def _write(self, done: int, scalars: Mapping[str, MetricValue]) -> None:
        if self._log is not None:
            self._log.write(done, scalars)

    def _tell_save(self) -> None:
        """Warn where the save that was begun last has failed; the one before is kept, and the run goes on."""
        ended = self.checkpoints.ended
        if ended is None or ended.step == self._told_save:
            return
        self._told_save = ended.step
        if ended.error:
            saved = saved_steps(self.folder.checkpoints)
            newest = f"the checkpoint after step {saved[-1]} is kept" if saved else "there is none yet"
            print_lines(f"WARNING step {ended.step} could not be saved: {ended.error}; {newest}, and the run goes on")

    def _check_updated(self, step: int, report: StepReport) -> None:
        """Raises UserError where the step has updated nothing."""
        if not report.agreed:
            raise UserError(
                f"the processes planned different batches for step {step + 1}, so nothing was updated: they do not see "
                "the same data, config or version of mmjax; make them the same and go on with --resume",
                everywhere=True,
            )
        if not report.report.weight.sum() > 0:
            raise UserError(
                f"no token of step {step + 1} has a loss weight, so there is nothing to learn from; give the answers "
                "in its samples a weight above 0 (Text.weights)",
                everywhere=True,
            )

    def noise(self, step: int) -> np.ndarray:
        """Return the dropout seed of a step."""
        return np.array([self.config.seed, step], np.uint32)

    def due(self, done: int, every: int) -> bool:
        """Return whether a periodic action is due after `done` steps; never at the end of the run."""
        return every > 0 and done % every == 0 and done < self.config.training.steps

    def evaluate(self, done: int, state: TrainState, progress: ProgressLine) -> None:
        """Settle the last step, evaluate on the validation split, log the scores and show one answer.

        Where the scores are the best so far by `training.keep_best`, the state is saved.
        """
        self.settle(state, progress)
        self.watchdog.at("evaluating")
        scores, answered = self._scores(done, state, "validation")
        if scores:
            print_lines(f"step {done}  validation, {announce.score_line(scores)}")
        if answered:
            print_lines(f"  {answered[done % len(answered)]}")
        if self.best.update(done, scores):
            print_lines(f"  best {self.best.metric} so far; its checkpoint is kept")
            self.save(done, state, progress)
        elif self.best.exhausted:
            self.end = done
            print_lines(self._stopped_early())
        self._numbers.go_on()

    def _scores(self, done: int, state: TrainState, split: str) -> tuple[Scores, list[Answered]]:
        """Evaluate on a split after `done` steps and log the scores, named as in metrics.jsonl; with the answers."""
        params = all_parameters(state)
        replies = self.evaluator.answer(params, split)
        answered = [a for of_source in replies.values() for a in of_source.answered]
        scores = exact_match_by_group(answered) | self.evaluator.loss(params, split)
        self.left_out.say_questions(self.evaluator.left_out)
        scores = {f"{split}/{name}": value for name, value in scores.items()}
        if scores:
            self._write(done, scores)
        return scores, answered

    def save(self, done: int, state: TrainState, progress: ProgressLine) -> None:
        """Begin to save the state after `done` steps, whose last is settled first so that no bad numbers are kept."""
        self.settle(state, progress)
        self._save(done, state)

    def _save(self, done: int, state: TrainState) -> None:
        """Begin to save the state after `done` steps, unless that was begun already."""
        if done == self._saved:
            return
        self.watchdog.at("saving")
        self._saved = done
        self.checkpoints.wait()  # for the save before, whose failure would be forgotten by the next one
        self._tell_save()
        self.checkpoints.retention = replace(self.checkpoints.retention, best=self.best.step)
        self.checkpoints.save(state, to_json(self.config), self.data_state(done))

    def stop(self, done: int, state: TrainState, progress: ProgressLine) -> None:
        """Save the state after `done` steps, where that was asked for in mid-run."""
        self.save(done, state, progress)
        self._check_saved()
        print_lines(
            f"stopped as asked after step {done}, which is saved; go on with --resume", f"run    {self.folder.path}"
        )

    # ------------------------------------------------------------------------------------------------- after the loop

    def finish(self, first: int, state: TrainState) -> None:
        """Save, evaluate on the test split, and say where everything is and what to try next."""
        self._save(self.end, state)
        self.watchdog.at("evaluating")
        scores, _ = self._scores(self.end, state, "test")
        self.watchdog.at("saving")
        self._check_saved()
        if scores:
            scores = {name.removeprefix("test/"): value for name, value in scores.items()}
            if coordination.is_leader():
                self._write_scores({"step": self.end} | scores)
            print_lines(*announce.score_table(scores))
        if self.best.step:
            print_lines(
                f"best   {self.best.metric} {self.best.value:.4g} after step {self.best.step}; its checkpoint is kept "
                f"(--step {self.best.step} of evaluate, generate and export)"
            )
        times = self._numbers.times
        total = times.total or 1.0
        print_lines(
            f"{self.end - first} steps in {total:.0f} s, {times.waited / total:.1%} of it waiting for data; "
            f"{time.monotonic() - self.began:.0f} s in all; {self._numbers.compiled} programs compiled after the start",
            f"run    {self.folder.path}",
            *announce.next_commands(self.folder.path, tuple(self.config.model.encoders)),
        )

    def _write_scores(self, scores: Mapping[str, float]) -> None:
        """Write the scores of the test split, whole or not at all: where there is no room they are made again later."""
        try:
            with atomic_write(self.folder.scores) as partial:
                partial.write_text(json.dumps(scores, indent=2) + "\n")
        except OSError as error:
            print_lines(f"WARNING {self.folder.scores} cannot be written: {error.strerror}; the scores are below")

    def _check_saved(self) -> None:
        """Raises UserError where the last state is not whole on disk."""
        with startup.activity("saving"):
            error = self.checkpoints.wait()
        if error:
            saved = saved_steps(self.folder.checkpoints)
            newest = f"step {saved[-1]}, which is kept," if saved else "the start"
            raise UserError(
                f"the last state could not be saved: {error}; make room, and go on from {newest} with --resume",
                everywhere=True,
            )

    def close(self) -> None:
        """Let the workers go, finish the checkpoint that is being written, and close the log; also in mid-run."""
        self.watchdog.at("closing")
        if isinstance(self._batches, Generator):
            self._batches.close()
        self.tracer.close()
        self.checkpoints.close()
        if self._log is not None:
            self._log.close()
