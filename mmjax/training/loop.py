"""Train a run: restore or make its state, and run its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import jax
import numpy as np

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.console import ProgressLine, print_lines
from mmjax.data.loading.batch_hash import hex_hash
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.loading.workers import refuse_in_worker
from mmjax.distributed import coordination
from mmjax.distributed.watchdog import Watchdog
from mmjax.errors import raise_ctrl_c_once
from mmjax.models.layer_stacks import Params
from mmjax.runtime import run_dir
from mmjax.runtime.checkpoint_commit import saved_steps
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import (
    choose_devices,
    peak_flops,
)
from mmjax.runtime.executor import State
from mmjax.runtime.memory_snapshots import open_snapshots
from mmjax.runtime.passes import StagedBatch
from mmjax.runtime.snapshot_files import SnapshotFolder, Whole
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import hyperparameters
from mmjax.runtime.step_report import StepReport, check_updated
from mmjax.startup import activity, rare_collection
from mmjax.startup import seconds as startup_seconds
from mmjax.training import outcome
from mmjax.training.bad_samples import NonFiniteWatch, UnreadableSamples
from mmjax.training.evaluation import BestMetric, make_evaluator, score_split, write_test_scores
from mmjax.training.metrics import StepMetrics
from mmjax.training.metrics_log import MetricsLog, MetricValue
from mmjax.training.pass_times import time_passes
from mmjax.training.rate_probe import STEPS as PROBED_AFTER
from mmjax.training.rate_probe import RateProbe
from mmjax.training.run_checkpoints import RunCheckpoints, restore_or_init
from mmjax.training.setup import set_up
from mmjax.training.signals import ProfilerTrace, StopFlags
from mmjax.training.trackers import check_logins

WARM_STEPS = 5  # after which step times are representative


def train(
    config: Config,
    source: Path,
    mode: run_dir.Mode = "new",
    devices: Sequence[jax.Device] | None = None,
    profile: bool = False,
    permitted: run_dir.AllowedChanges = run_dir.NO_CHANGES,
    flags: StopFlags | None = None,
    watchdog: Watchdog | None = None,
    make: Callable[..., Trainer] | None = None,
) -> Trainer:
    """Train a config to its last step, or until a stop is requested, and return the closed trainer.

    source: the config's file, which is copied into the run folder. devices: by default all of the
    config's kind.
    profile: time layers before `remat=auto` is decided. permitted: what may differ from the run
    that is resumed.
    flags: requests by signals. watchdog: ends this process when it hangs. make: makes another kind
    of trainer.
    """
    refuse_in_worker()
    if projects := config.training.trackers:
        coordination.run_on_leader(partial(check_logins, projects))
    folder = run_dir.run_folder_of(config)
    devices = choose_devices(config.device) if devices is None else devices
    watchdog = watchdog or Watchdog(config.training.watch, folder.stacks)
    flags = flags or StopFlags()
    with raise_ctrl_c_once(), coordination.enter_on_leader(run_dir.lock_run(folder.path)):
        # Until data workers run, which a pool may refuse, a failure leaves the folder as it was
        # before.
        with (
            rare_collection(),
            coordination.enter_on_leader(run_dir.claim(config, source, mode, permitted)) as resumed,
        ):
            make_trainer = partial(
                make or Trainer,
                config,
                folder,
                devices,
                watchdog,
                flags,
                permitted=permitted,
                profile=profile,
            )
            snapshots = open_snapshots(config.training, folder)
            trainer, state = restore_or_init(make_trainer, folder, resumed, snapshots)
            with ExitStack() as stack:
                stack.enter_context(closing(trainer))
                example = None if trainer.is_complete() else trainer.start(state)
                closer = stack.pop_all()
        flags.again = "go on with --resume"
        try:
            with closer:
                if example is not None:
                    trainer.train(state, example)
        except KeyboardInterrupt:
            # Closing has waited for the checkpoint that was being written.
            saved = max(saved_steps(folder.checkpoints), default=0)
            print_lines(*outcome.describe_interruption(folder.path, trainer.done, saved))
            raise
    return trainer


class Trainer:
    """One start of a run in this process: mesh, data, model, programs, checkpoints, evaluation and log.

    The first step has number 0. `done` is the number of steps after which something is logged,
    evaluated or saved.
    """

    def __init__(
        self,
        config: Config,
        folder: run_dir.RunFolder,
        devices: Sequence[jax.Device],
        watchdog: Watchdog,
        flags: StopFlags,
        permitted: run_dir.AllowedChanges = run_dir.NO_CHANGES,
        profile: bool = False,
        first_step: int = 0,
        snapshots: SnapshotFolder | None = None,
        snapshot: Whole | None = None,
    ) -> None:
        """first_step: the run continues from here. snapshots, snapshot: as of `RunCheckpoints`.

        Other arguments are as of `train`.
        """
        self.folder = folder
        self.watchdog = watchdog
        self.flags = flags
        self.first_step = first_step

        self.setup = setup = set_up(config, folder, devices, first_step, permitted, profile)
        self.config = config = setup.config
        self.executor = setup.executor
        self.loader = setup.data.loader
        if config.units:
            watchdog.follow(self.executor.passes.progress, self.executor.passes.roles)

        self.checkpoints = RunCheckpoints(
            config, folder, setup.data, self.executor, snapshots, snapshot
        )
        with activity("opening the validation and test splits"):
            self.evaluator = make_evaluator(
                config,
                folder,
                self.executor,
                self.loader.layout,
                setup.memory_plan,
                report_progress=lambda done: watchdog.beat(),
            )
        self.best = BestMetric.resume(config.training, folder.metrics, first_step)
        # one after the last
        self.end_step = first_step if self.best.exhausted else config.training.steps

        self.unreadable = UnreadableSamples(setup.data.quarantine, setup.data.index.name)
        self.nonfinite = NonFiniteWatch(config.training, setup.data.index.name)
        self.profiler = ProfilerTrace(folder.traces)
        # of what process 0 logs: where it is measured, others would disturb the measurement
        leads = coordination.is_leader()
        peak = peak_flops(devices, config.training.precision) if leads else float("inf")
        self.metrics = StepMetrics(config, self.executor, self.loader, setup.programs, peak)
        self.metrics_log: MetricsLog | None = None  # of process 0
        self.probe: RateProbe | None = None  # where it would tell anything
        if not config.units:
            chunks = setup.memory_plan.loss_chunks
            probe = RateProbe(config, self.executor, self.loader, folder.rates, chunks)
            self.probe = probe if probe.tells else None
        self.batches: Iterator[LoadedStep] = iter(())
        # The step that was started last, until its report is read: step, batch, its arrays on
        # devices, and report.
        self.running: tuple[int, LoadedStep, list[StagedBatch], StepReport] | None = None
        # by a signal to any process; all learn it from the same step's report
        self.stop_requested = False
        self.began = time.monotonic()

    def __repr__(self) -> str:
        return f"Trainer({self.config.name!r}, {str(self.folder.path)!r})"

    def init_state(self) -> State:
        """Restore or make the first state, and open the log. No file changes before. Raises DamagedCheckpoint."""
        with activity("reading the checkpoint" if self.first_step else "making parameters"):
            self.best.check(self.evaluator)
            state = self.checkpoints.init_state()
            if coordination.is_leader():
                self.setup.write_decision()
                self.metrics_log = MetricsLog(self.folder.metrics, self.first_step, self.config)
            return state

    @property
    def done(self) -> int:
        """Return the steps that are done and logged."""
        return self.first_step + self.metrics.steps

    def is_complete(self) -> bool:
        """Return whether all steps are done and scored, and print so."""
        scored = not self.evaluator.metrics("test") or self.folder.scored_step() == self.end_step
        if self.first_step < self.end_step or not scored:
            return False
        if self.end_step < self.config.training.steps:
            print_lines(
                f"{self.best.describe_stop(self.end_step)}; to go on, resume with a larger training.patience"
            )
        else:
            print_lines(
                f"all {self.end_step} steps are done; to go on, resume with a larger training.steps or training.epochs"
            )
        return True

    def start(self, state: State) -> Microbatch:
        """Describe the run and start its data workers, which load while XLA compiles; return the first microbatch."""
        self.watchdog.set_phase("planning", self.first_step)
        self.setup = self.setup.with_features(state)
        example = self.setup.print_summary()
        self.start_workers()
        return example

    def start_workers(self) -> None:
        """Start the data workers, which begin to load at once."""
        self.batches = self.setup.start_workers(self.end_step)

    def compile(self, state: State, example: Microbatch) -> list[Sums | None]:
        """Compile every program ahead: of a step, of saving and of answering. Returns zero gradients."""
        self.watchdog.set_phase("compiling", self.first_step)
        began = time.monotonic()
        with activity("compiling the programs of a step"):
            accumulated = self.setup.compile_step(state, example)
        with activity("compiling those of saving and answering"):
            self.checkpoints.compile()
            self.evaluator.compile(self.evaluated_parameters(state))
        print_lines(self.setup.describe_compiled(began))
        self.metrics.start()
        return accumulated

    def train(self, state: State, example: Microbatch) -> None:
        """Run the steps until the last one, a requested stop, or evaluations that have not improved for too long."""
        config = self.config
        with rare_collection():
            accumulated = self.compile(state, example)
        stored_rates = self.probe and self.probe.read()
        self.metrics.use_probed(stored_rates)
        # in which CPUs connect, and give each other half a minute for it
        coordination.wait_for_all("first step")
        with ProgressLine(self.first_step, config.training.steps) as progress:
            for step in range(self.first_step, self.end_step):
                # Load the batch that the data workers packed ahead, and put it on the devices.
                self.watchdog.set_phase("waiting for data", step)
                began = time.monotonic()
                with activity("waiting for data"):
                    loaded = next(self.batches)
                self.metrics.add_wait(time.monotonic() - began)
                self.watchdog.set_phase("running", step)
                batches = [
                    self.executor.put(batch, n) for n, batch in enumerate(loaded.microbatches)
                ]

                if self.executor.synchronous:  # so that no step is timed with the next one
                    self.finish_step(state, progress)

                # Start the step. Devices compute it while the loop goes on, up to where its report
                # is read.
                process_report = ProcessReport(
                    digest=int(loaded.digest),
                    content=int(loaded.content),
                    needed_flops=float(loaded.needed_flops),
                    batch_seconds=time.monotonic() - began,
                    stop=bool(self.flags.stop),
                    unreadable=self.unreadable.publish(loaded.unreadable),
                )
                hyper = hyperparameters(config, step)
                noise = np.array([config.seed, step], np.uint32)
                self.flags.stepped = True
                with time_passes(self.folder.passes, self.executor, step + 1, self.first_step):
                    state, accumulated, report = self.executor.step(
                        state, accumulated, batches, hyper, process_report, noise
                    )

                # Check and log the step before: its report is there by now, while this one still
                # computes.
                self.finish_step(state, progress)
                self.running = step, loaded, batches, report
                self.profiler.before_step(step + 1, self.flags)

                # A report is the same on all processes, so that all stop, evaluate and save after
                # the same step.
                stop = self.stop_requested
                evaluate = self.is_due(step + 1, config.training.evaluate_every)
                save = stop or self.is_due(step + 1, config.training.checkpoint_every)
                snapshot = self.is_due(step + 1, config.training.memory_every) and not stop
                if evaluate or save or snapshot:
                    self.finish_step(state, progress)  # bad numbers are neither evaluated nor saved
                if snapshot:
                    self.watchdog.set_phase("saving")
                    self.checkpoints.take_snapshot(step + 1, state)
                if evaluate and not stop:
                    self.evaluate(step + 1, state)
                    if self.best.exhausted:
                        break
                if save:
                    self.save(step + 1, state)
                if stop:
                    self.checkpoints.check_saved()
                    print_lines(
                        f"stopped as asked after step {step + 1}, which is saved; go on with --resume: "
                        f"python -m mmjax.train --resume {run_dir.path_words(self.folder.path)}",
                        f"run    {self.folder.path}",
                    )
                    return
                due = step + 1 == self.first_step + PROBED_AFTER and step + 1 < self.end_step
                if self.probe is not None and stored_rates is None and due:
                    self.finish_step(state, progress)
                    accumulated = self.probe_rates(self.probe, state, accumulated, loaded)
            self.finish_step(state, progress)
        self.finish_run(state)

    def is_due(self, done: int, interval: int) -> bool:
        """Return whether something periodic is due after `done` steps; never at the end of the run. 0 = never."""
        return interval > 0 and done % interval == 0 and done < self.config.training.steps

    def finish_step(self, state: State, progress: ProgressLine) -> None:
        """Wait for the running step, check its report and log it. Raises UserError where the run cannot go on.

        state: the newest, by which rows with bad gradients are found.
        """
        if self.running is None:
            return
        step, loaded, batches, report = self.running
        self.running = None
        report = jax.device_get(report)
        self.unreadable.quarantine(step, report)
        check_updated(step, report)
        self.stop_requested = bool(report.stop)

        hyper = hyperparameters(self.config, step)
        scalars = self.metrics.compute(loaded, report, hyper)
        low, high = map(int, report.content)
        extra = {
            "batch": hex_hash(low + (high << 32)),
            "worst": self.nonfinite.worst_losses(report),
        }
        if self.metrics.steps == 1:
            extra |= {
                f"seconds/start/{name}": seconds for name, seconds in startup_seconds().items()
            }
        self.log(step + 1, scalars | extra)
        progress.update(step + 1, scalars)

        noise = np.array([self.config.seed, step], np.uint32)
        unreadable = report.unreadable[report.unreadable >= 0].tolist()
        find = partial(self.executor.find_bad, state, batches, hyper, noise, unreadable)
        self.nonfinite.check(step, report, find, loaded.samples.tolist())
        self.checkpoints.warn_of_failure()
        if self.metrics.steps == WARM_STEPS:
            # the first steps' times include opening everything
            seconds = self.metrics.typical_seconds()
            print_lines(*self.setup.describe_first_steps(loaded, seconds))

    def log(self, done: int, scalars: Mapping[str, MetricValue]) -> None:
        """Log numbers after `done` steps, on process 0."""
        if self.metrics_log is not None and scalars:
            self.metrics_log.write(done, scalars)

    def probe_rates(
        self, probe: RateProbe, state: State, accumulated: list[Sums | None], loaded: LoadedStep
    ) -> list[Sums | None]:
        """Measure what positions and pairs take, on rows of this step. Returns gradient sums of 0."""
        self.watchdog.set_phase("probing rates")
        noise = (
            np.array([self.config.seed, loaded.step], np.uint32)
            if self.executor.model.is_random
            else None
        )
        rates, accumulated = probe.measure(state, accumulated, loaded, noise, self.watchdog.beat)
        self.metrics.use_probed(rates)
        self.metrics.restart_timer()
        return accumulated

    def evaluated_parameters(self, state: State) -> Params:
        """Return the parameters that evaluations are of."""
        return self.executor.parameters(state, self.config.training.evaluated)

    def evaluate(self, done: int, state: State) -> None:
        """Score the validation split after `done` steps, and print one answer; save the state where it is the best."""
        self.watchdog.set_phase("evaluating")
        scores, answered = score_split(
            self.evaluator, self.evaluated_parameters(state), "validation"
        )
        self.unreadable.print_questions(self.evaluator.left_out)
        self.log(done, scores)
        if scores:
            print_lines(f"step {done}  validation, {outcome.score_line(scores)}")
        if answered:
            print_lines(f"  {answered[done % len(answered)]}")
        if self.best.update(done, scores):
            print_lines(f"  best {self.best.metric} so far; its checkpoint is kept")
            self.save(done, state)
        elif self.best.exhausted:
            self.end_step = done
            print_lines(self.best.describe_stop(done))
        self.metrics.restart_timer()

    def save(self, done: int, state: State) -> None:
        """Begin to save the state after `done` steps, unless that was begun already."""
        self.watchdog.set_phase("saving")
        self.checkpoints.save(done, state, self.best.step)

    def finish_run(self, state: State) -> None:
        """Save, score the test split, and print where everything is and what to try next."""
        done = self.end_step
        self.save(done, state)
        self.watchdog.set_phase("evaluating")
        scores, _ = score_split(self.evaluator, self.evaluated_parameters(state), "test")
        self.unreadable.print_questions(self.evaluator.left_out)
        self.log(done, scores)
        self.watchdog.set_phase("saving")
        self.checkpoints.check_saved()
        if scores:
            scores = {name.removeprefix("test/"): value for name, value in scores.items()}
            if coordination.is_leader():
                write_test_scores(self.folder.scores, {"step": done} | scores)
            print_lines(*outcome.score_table(scores))
        if self.best.step:
            print_lines(
                f"best   {self.best.metric} {self.best.value:.4g} after step {self.best.step}; its checkpoint is kept "
                f"(--step {self.best.step} of evaluate, generate and export)"
            )
        total = self.metrics.total_seconds or 1.0
        print_lines(
            f"{done - self.first_step} steps in {total:.0f} s, {self.metrics.wait_seconds / total:.1%} of it waiting "
            f"for data; {time.monotonic() - self.began:.0f} s in all; {self.metrics.programs_compiled} programs "
            "compiled after the start",
            f"run    {self.folder.path}",
            *outcome.next_commands(self.folder.path, self.config, self.evaluator),
        )

    def close(self) -> None:
        """End the workers, wait for the checkpoint that is being written, and close the log; also in mid-run."""
        self.watchdog.set_phase("closing")
        if isinstance(self.batches, Generator):
            self.batches.close()
        if self.setup.features is not None:
            self.setup.features.close()
        self.profiler.close()
        self.checkpoints.close()
        if self.metrics_log is not None:
            self.metrics_log.close()
