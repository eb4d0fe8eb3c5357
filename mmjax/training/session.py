"""One training session: everything that a run needs between its config and its loop."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.config_files import to_json
from mmjax.data.pipeline import LoadedStep, StepLoader, steps
from mmjax.data.plan import PLANNER
from mmjax.errors import UserError
from mmjax.models.model import Model, merge, modules_of
from mmjax.parallel import processes
from mmjax.planning.fit import Fit
from mmjax.training import announce
from mmjax.training.checkpoint import Checkpoints, DataState, newest, read_saved, restore_parameters, steps_in
from mmjax.training.console import ProgressLine, say, size
from mmjax.training.evaluation import Evaluator, exact_match
from mmjax.training.kept_fit import asked_of, write_fit
from mmjax.training.left_out import LeftOut
from mmjax.training.metrics import MetricsLog, Scalars, balance_scalars, exchange_scalars
from mmjax.training.optimizer import Hyperparameters, hyperparameters
from mmjax.training.pretrained import by_folder, load_pretrained
from mmjax.training.profile import memory_used
from mmjax.training.programs import ProgramCounter
from mmjax.training.run_folder import RunFolder
from mmjax.training.state import TrainState, all_parameters, parameter_shardings, state_from
from mmjax.training.step import Accumulated, Executor, StepReport
from mmjax.training.watchdog import Watchdog

Params = dict[str, Any]

SETTLED = 5  # steps after which step times say something


class Ready(NamedTuple):
    """One step's batches on the devices, and what is known of them on the host."""

    arrays: tuple[Microbatch, ...]
    loaded: LoadedStep
    waited: float  # seconds that the loop stood still for it


class Running(NamedTuple):
    """A step that was started; its numbers are read when the next one is under way."""

    step: int
    ready: Ready
    report: StepReport


@dataclass
class Session:
    """A run's folder, programs, data, checkpoints and log. `mmjax.train` opens it and walks the loop."""

    config: Config
    folder: RunFolder
    resumed: bool
    mesh: Mesh
    executor: Executor
    loader: StepLoader
    left_out: LeftOut
    checkpoints: Checkpoints
    evaluator: Evaluator
    programs: ProgramCounter
    peak: float  # FLOP/s of all devices together
    fitted: Fit
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self._running: Running | None = None
        self._step_ended = self.began
        self._times: list[tuple[float, float]] = []  # (step, of it waited for data), seconds
        self._compiled_at_start = 0
        self._log: MetricsLog | None = None
        self._batches: Iterator[LoadedStep] = iter(())

    # ------------------------------------------------------------------------------------------------ before the loop

    def start(self) -> tuple[TrainState, int]:
        """The state to begin with and the first step: fresh, from `init_from`, or resumed; no file changes before."""
        executor, saved_steps = self.executor, steps_in(self.folder.checkpoints) if self.resumed else []
        first = 0
        if saved_steps:
            first = self._first_after(saved_steps[-1])
            state, _ = self.checkpoints.restore(first)
            say(f"resumed {self.folder.path} at step {first}")
        elif self.config.init_from:
            params = self._parameters_of(Path(self.config.init_from))
            begin = lambda p: state_from(executor.model, executor.optimizer, executor.frozen, p)  # noqa: E731
            state = jax.jit(begin, out_shardings=executor.shardings)(params)
        else:
            given = load_pretrained(executor.model, parameter_shardings(executor.model, self.mesh, executor.rules))
            state = executor.init(jax.random.key(self.config.seed), given)
            for folder, modules in by_folder(self.config.model).items():
                say(f"weights of {', '.join(modules)} from {folder}")
        if processes.leads():
            write_fit(self.folder.fit, asked_of(self.config, self.mesh), self.fitted)
            self._log = MetricsLog(self.folder.metrics, first)
        return state, first

    def _first_after(self, step: int) -> int:
        """The step to go on with from checkpoint `step`. Raises UserError where data or length do not go with it."""
        saved = read_saved(self.folder.checkpoints, step)
        now = asdict(self.data_state(step))
        if saved.data.planner != PLANNER:
            raise UserError(
                f"{self.folder.path} was planned by another version of mmjax, which put other samples into its steps; "
                "go on with that version, or start another run from its parameters with init_from="
            )
        if changed := [key for key, value in asdict(saved.data).items() if now[key] != value]:
            raise UserError(
                f"{self.folder.path} was trained on other data ({', '.join(changed)} differ); restore the data, or "
                "start another run from its parameters with init_from="
            )
        if self.config.training.steps < step:
            raise UserError(
                f"{self.folder.path} has done {step} steps already, more than "
                f"training.steps={self.config.training.steps}; give at least {step}, or score it with "
                "python -m mmjax.evaluate"
            )
        return step

    def _parameters_of(self, run: Path) -> Params:
        source = RunFolder(run)
        try:
            model, adapted = self.executor.model, bool(source.read_config().model.lora)
            if adapted and not model.config.lora:
                raise UserError(
                    "that run has adapters and this model has none: give it the same model.lora, or merge them with "
                    "python -m mmjax.export and start from that folder"
                )
            step = newest(source.checkpoints)
            fresh: Params = {}
            if model.config.lora and not adapted:
                adapters = self.executor.born(frozenset(modules_of(model.abstract)))
                fresh = merge(*adapters(jax.random.key(self.config.seed)))
                model = Model.build(replace(model.config, lora={}), model.dtype)
            shardings = parameter_shardings(model, self.mesh, self.executor.rules)
            params = merge(restore_parameters(source.checkpoints, step, model, shardings), fresh)
        except UserError as error:
            raise UserError(f"init_from={run}: {error}") from error
        say(f"parameters of {run} after {step} steps")
        return params

    def complete(self, first: int) -> bool:
        """Whether there is nothing left to do, which it says."""
        steps_done = self.config.training.steps
        if first < steps_done or (self.evaluator.sources and self.folder.scored_step() != steps_done):
            return False
        say(f"all {steps_done} steps are done; to go on, resume with a larger training.steps")
        return True

    def data_state(self, step: int) -> DataState:
        """Where the data will be before `step`."""
        budget = json.loads(json.dumps(asdict(self.loader.budget)))
        return DataState(step, self.loader.index.fingerprint(), budget, PLANNER)

    def compile(self, state: TrainState, first: int) -> Accumulated:
        """Say what will run, then compile every program ahead: gradients of each shape, update, saving, answering."""
        self.watchdog.at("compiling", first)
        example = self.loader(first)
        announce.what_will_run(self.config, self.executor.model, self.mesh, self.loader, example)
        say(*announce.how_it_fits(self.fitted))
        began = time.monotonic()
        accumulated = self.executor.zeros()
        shapes = announce.empty_like(self.loader.layout.shapes, example.microbatches[0])
        self.executor.compile(state, accumulated, shapes, self.hyperparameters(first))
        self.checkpoints.prepare()
        self.evaluator.prepare(all_parameters(state))
        say(
            f"compiled {self.programs.compiled} programs in {time.monotonic() - began:.1f} s"
            + (f", {self.programs.from_cache} came from the cache" if self.programs.from_cache else "")
        )
        self._compiled_at_start = self.programs.requested
        self._step_ended = time.monotonic()
        return accumulated

    def hyperparameters(self, step: int) -> Hyperparameters:
        """The run-time arguments of update `step`."""
        return hyperparameters(self.config, self.executor.modules, step)

    # ------------------------------------------------------------------------------------------------ inside the loop

    def batches(self, first: int) -> Iterator[Ready]:
        """The steps' batches, on the devices; workers begin to load them at once."""
        data = self.config.data
        self._batches = steps(self.loader, first, self.config.training.steps, data.workers, data.prefetch)
        return self._arrive(first)

    def _arrive(self, first: int) -> Iterator[Ready]:
        for step in itertools.count(first):
            self.watchdog.at("waiting for data", step)
            began = time.monotonic()
            loaded = next(self._batches, None)
            if loaded is None:
                return
            waited = time.monotonic() - began
            self.watchdog.at("running", step)
            yield Ready(tuple(self.executor.put(b) for b in loaded.microbatches), loaded, waited)

    def ran(self, step: int, ready: Ready, report: StepReport, progress: ProgressLine) -> None:
        """Note a step that was started, and write down the one before, which is done by now."""
        self.settle(progress)
        self._running = Running(step, ready, report)

    def settle(self, progress: ProgressLine) -> None:
        """Write down the step under way, waiting for it to end. Raises UserError where its numbers are not finite."""
        if self._running is None:
            return
        step, ready, report = self._running
        self._running = None
        report = jax.device_get(report)
        self.left_out.settle(step, report.spoiled)
        self._check_updated(step, report)
        scalars = self._scalars(step, ready, report)
        self._write(step + 1, scalars)
        progress.update(step + 1, scalars)
        if not np.isfinite([scalars["loss"], scalars["gradient_norm"]]).all():
            self._stop_at_bad_numbers(step, ready)
        if len(self._times) == SETTLED:
            typical = float(np.median([t - w for t, w in self._times]))
            if (used := memory_used(self.mesh)) is not None:
                say(f"memory {size(used)} of a device used so far, {size(self.fitted.device)} predicted")
            load = float(ready.loaded.load_seconds)  # the first steps' includes opening everything
            say(announce.loader_verdict(load, self.config.data.workers, typical))

    def _write(self, done: int, scalars: Scalars) -> None:
        if self._log is not None:
            self._log.write(done, scalars)

    def _stop_at_bad_numbers(self, step: int, ready: Ready) -> None:
        saved = steps_in(self.folder.checkpoints)
        back = f"resume from step {saved[-1]} with --resume and" if saved else "start again with"
        names = ", ".join(map(self.loader.index.name, ready.loaded.samples[:3].tolist()))
        raise UserError(
            f"the loss or gradient of step {step + 1} is not a finite number; {back} a lower "
            f"optimizer.learning_rate or training.clip. Its {len(ready.loaded.samples)} samples begin with {names}",
            everywhere=True,
        )

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

    def _scalars(self, step: int, ready: Ready, report: StepReport) -> Scalars:
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        # A wait may have begun before the step before this one was settled: no more than this step's time is its own.
        waited = min(ready.waited, seconds)
        self._times.append((seconds, waited))
        loss, weight = report.report.loss, report.report.weight
        modules, layout = ("llm", *self.config.model.encoders), self.loader.layout
        token_bytes = self.config.model.llm.width * self.executor.model.dtype.itemsize
        tokens = dict(zip(("text", *modules[1:]), ready.loaded.tokens.tolist(), strict=True))
        hyper = self.hyperparameters(step)
        names = self.config.data.sources
        return {
            "loss": float(loss.sum() / weight.sum()),
            **{f"loss/{n}": float(x / w) for n, x, w in zip(names, loss, weight, strict=True) if w > 0},
            "gradient_norm": float(report.gradient_norm),
            **{f"learning_rate/{group}": float(rate) for group, (rate, _) in hyper.rates.items()},
            **balance_scalars(ready.loaded, modules, layout, self.loader.planner.placer.flops),
            **exchange_scalars(ready.loaded, modules[1:], layout.topology, token_bytes),
            "samples": len(ready.loaded.samples) - int(report.spoiled.count),
            "samples/s": len(ready.loaded.samples) / seconds,
            "tokens/s": sum(tokens.values()) / seconds,
            **{f"tokens/s/{modality}": n / seconds for modality, n in tokens.items()},
            "mfu": float(report.needed_flops) / seconds / self.peak,
            "programs_compiled": self.programs.requested - self._compiled_at_start,
            "seconds/step": seconds,
            "seconds/data_wait": waited,
            "plan_ms": 1e3 * float(ready.loaded.plan_seconds),
            "seconds/load": float(ready.loaded.load_seconds),
            "data_wait_share": waited / seconds,
        }

    def due(self, done: int, every: int) -> bool:
        """Whether something that happens every so many steps happens after `done` steps; not asked at the end."""
        return every > 0 and done % every == 0 and done < self.config.training.steps

    def evaluate(self, done: int, state: TrainState) -> None:
        """Ask some validation questions, write the scores down and show one answer."""
        self.watchdog.at("evaluating")
        answered = self.evaluator.ask_all(all_parameters(state), "validation", self.config.training.evaluate_samples)
        self.left_out.say_questions(self.evaluator.left_out)
        if answered:
            scores = exact_match(answered)
            self._write(done, {f"validation/{k}": v for k, v in scores.items()})
            say(f"step {done}  validation  {announce.brief(scores)}", f"  {answered[done % len(answered)]}")
        self._step_ended = time.monotonic()

    def save(self, done: int, state: TrainState, progress: ProgressLine) -> None:
        """Begin to save the state after `done` steps, whose last is settled first so that no bad numbers are kept."""
        self.settle(progress)
        self.watchdog.at("saving")
        self.checkpoints.save(state, to_json(self.config), self.data_state(done))

    # ------------------------------------------------------------------------------------------------- after the loop

    def finish(self, first: int, state: TrainState) -> None:
        """Save, evaluate on the test split, and say where everything is and what to try next."""
        steps_done = self.config.training.steps
        self.watchdog.at("saving", steps_done - 1)
        if first < steps_done:
            self.checkpoints.save(state, to_json(self.config), self.data_state(steps_done))
        self.watchdog.at("evaluating")
        scores = exact_match(self.evaluator.ask_all(all_parameters(state), "test"))
        self.left_out.say_questions(self.evaluator.left_out)
        if scores:
            if processes.leads():
                self.folder.scores.write_text(json.dumps({"step": steps_done} | scores, indent=2) + "\n")
            self._write(steps_done, {f"test/{k}": v for k, v in scores.items()})
            say(*announce.score_table(scores))
        self.watchdog.at("saving")
        self.checkpoints.close()
        total = sum(t for t, _ in self._times) or 1.0
        waited = sum(w for _, w in self._times)
        say(
            f"{steps_done - first} steps in {total:.0f} s, {waited / total:.1%} of it waiting for data; "
            f"{time.monotonic() - self.began:.0f} s in all; "
            f"{self.programs.requested - self._compiled_at_start} programs compiled after the start",
            f"run    {self.folder.path}",
            *announce.what_next(self.folder.path, tuple(self.config.model.encoders)),
        )

    def close(self) -> None:
        """Let the workers go, finish the checkpoint that is being written, and close the log; also in mid-run."""
        self.watchdog.at("closing")
        if isinstance(self._batches, Generator):
            self._batches.close()
        self.checkpoints.close()
        if self._log is not None:
            self._log.close()
