"""Make or restore the training state of a run, and save it in the background."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from mmjax.config import Config
from mmjax.config.loading import to_json
from mmjax.config.model import quantized_layers
from mmjax.console import print_lines
from mmjax.data.plan.budget import OF_START, OLDER_PLANNERS, PLANNER
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.model import Model, restrict
from mmjax.runtime.checkpoint import CheckpointStore
from mmjax.runtime.checkpoint_commit import Retention, saved_steps, set_aside
from mmjax.runtime.checkpoint_metadata import (
    CheckpointMetadata,
    DamagedCheckpoint,
    DataState,
    checkpoint_step,
)
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.memory_snapshots import MemorySnapshots
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.snapshot_files import SnapshotFolder, Whole
from mmjax.runtime.weights import load_pretrained, modules_by_folder
from mmjax.startup import activity
from mmjax.training.run_data import RunData

Params = dict[str, Any]
T = TypeVar("T")


def restore_or_init(
    make_trainer: Callable[..., T],
    folder: RunFolder,
    resumed: bool,
    snapshots: SnapshotFolder | None = None,
) -> tuple[T, State]:
    """Make a trainer and its first state: fresh, or restored from the newest readable checkpoint of a resumed run.

    make_trainer: makes one that begins at `first_step`, with a snapshot in memory where there is
    one of that step. Unreadable newer checkpoints are set aside.
    Raises UserError if there are checkpoints and none is readable.
    """
    damaged: list[tuple[int, DamagedCheckpoint]] = []
    # Process 0 lists the checkpoints for all, so that all try the same ones.
    saved = coordination.run_on_leader(lambda: saved_steps(folder.checkpoints)) if resumed else []
    whole = snapshots.whole_snapshots() if snapshots is not None else {}
    # Of a step that is both on disk and in memory, the snapshot is read.
    found = [(step, None) for step in saved] + [(step, whole[step]) for step in whole]
    for step, snapshot in sorted(found, key=lambda x: (x[0], x[1] is not None))[::-1] or [
        (0, None)
    ]:
        trainer = make_trainer(first_step=step, snapshots=snapshots, snapshot=snapshot)
        try:
            state = trainer.init_state()
        except DamagedCheckpoint as error:
            if snapshot is None:
                damaged.append((step, error))
            else:
                print_lines(f"WARNING {error}")
            continue
        for newer, error in damaged:
            aside = coordination.run_on_leader(
                lambda newer=newer: set_aside(folder.checkpoints, newer).name
            )
            print_lines(
                f"WARNING {error}; it is set aside as {aside}, and the run goes on from step {step}"
            )
        return trainer, state
    older = (
        f"nor can the {len(damaged) - 1} before it"
        if len(damaged) > 1
        else "there is no older one here"
    )
    raise UserError(
        f"{damaged[0][1]}; {older}; restore the folder, or start afresh with --overwrite",
        everywhere=True,
    )


class RunCheckpoints:
    """The first state and the checkpoints of a run."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        data: RunData,
        executor: Executor,
        snapshots: SnapshotFolder | None = None,
        snapshot: Whole | None = None,
    ) -> None:
        """snapshots: where snapshots in memory are taken. snapshot: the one to restore, if any."""
        self._config = config
        self._folder = folder
        self._data = data
        self._executor = executor
        retention = Retention(config.training.keep, config.training.keep_every)
        self._store = CheckpointStore(folder.checkpoints, executor, retention)
        self._memory = None if snapshots is None else MemorySnapshots(snapshots, executor)
        self._snapshot = snapshot
        # step of the newest checkpoint on disk, restored or begun to be saved
        self._newest = data.launch.first if snapshot is None else 0
        self._checked = 0  # step of the last save whose failure was looked for

    def compile(self) -> None:
        """Compile the program that saving runs."""
        self._store.prepare()

    # ----------------------------------------------------------------------------------------------
    # the first state

    def init_state(self) -> State:
        """Restore the state of a resumed run; else make one from `init_from`, pretrained weights or random parameters.

        Raises DamagedCheckpoint, and UserError where a checkpoint does not go with the config or
        the data.
        """
        executor = self._executor
        first = self._data.launch.first
        if self._memory is not None:
            print_lines(f"memory {self._memory.describe()}")
        if first:
            if self._snapshot is None:
                state, saved = self._store.restore(first)
            else:
                state, saved = self._memory.restore(self._snapshot)
            self._check_data(saved)
            place = ", from memory" if self._snapshot else ""
            print_lines(f"resumed {self._folder.path} at step {first}{place}")
            return state
        key = jax.random.key(self._config.seed)
        if self._config.init_from:
            return executor.init(key, self._other_run_parameters(Path(self._config.init_from)))
        state = executor.init(key, load_pretrained(executor.model, executor.parameter_shardings))
        for folder, modules in modules_by_folder(self._config.model).items():
            print_lines(f"weights of {', '.join(modules)} from {folder}")
        return state

    def _check_data(self, saved: CheckpointMetadata) -> None:
        """Raise UserError where a checkpoint does not go with the data or the length of the run."""
        path = self._folder.path
        steps = self._config.training.steps
        if saved.data.planner not in {PLANNER, *OLDER_PLANNERS}:
            raise UserError(
                f"{path} was planned by another version of mmjax, which put other samples into its steps; "
                "go on with that version, or start another run from its parameters with init_from="
            )
        current = asdict(self._data_state(saved.step))
        # An older planner's budget has no prices, and such a run goes on without them.
        unpriced = {name: [] for name in OF_START} | {"planner": saved.data.planner}
        saved_state = asdict(saved.data) | {
            "planner": PLANNER,
            "budget": unpriced | saved.data.budget,
        }
        changed = [key for key, value in saved_state.items() if current[key] != value]
        # A segment that begins here has other data, which the user permitted.
        if changed and self._data.launch.segment.first != saved.step:
            raise UserError(
                f"{path} was trained on other data ({', '.join(changed)} differ); restore the data, go on "
                "with what there is now by --new-data, or start another run from its parameters with init_from="
            )
        if steps < saved.step:
            raise UserError(
                f"{path} has done {saved.step} steps already, more than training.steps={steps}; give at least "
                f"{saved.step}, or score it with python -m mmjax.evaluate"
            )

    def _other_run_parameters(self, run: Path) -> Params:
        """Restore the parameters of another run's newest checkpoint, without adapters where it has none."""
        source = RunFolder(run)
        executor = self._executor
        try:
            model = executor.model
            trained = source.stored_config().model
            adapted = bool(trained.lora)
            if adapted and not model.config.lora:
                raise UserError(
                    "that run has adapters and this model has none: give it the same model.lora, or merge them with "
                    "python -m mmjax.export and start from that folder"
                )
            if quantized_layers(trained) != quantized_layers(model.config):
                raise UserError(
                    "that run quantises other weights than this model: give it the same quantize, or export that run "
                    "with python -m mmjax.export and start from that folder"
                )
            step = checkpoint_step(source.checkpoints)
            if model.config.lora and not adapted:
                model = Model.build(replace(model.config, lora={}), model.dtype)
            shardings = restrict(executor.parameter_shardings, model.abstract)
            params = restore_parameters(source.checkpoints, step, model, shardings)
        except UserError as error:
            raise UserError(f"init_from={run}: {error}") from error
        print_lines(f"parameters of {run} after {step} steps")
        return params

    # ----------------------------------------------------------------------------------------------
    # saving

    def save(self, step: int, state: State, best_step: int) -> None:
        """Begin to save the state after `step` steps, unless that was begun already.

        best_step: of the best evaluation, whose checkpoint is kept; 0 = none.
        """
        if step == self._newest:
            return
        self._newest = step
        self._store.wait()  # for the save before, whose failure would be forgotten by the next one
        self.warn_of_failure()
        self._store.retention = replace(self._store.retention, best=best_step)
        self._store.save(state, to_json(self._config), self._data_state(step))

    def take_snapshot(self, step: int, state: State) -> None:
        """Begin to write the state after `step` steps into the memory of the hosts."""
        if error := self._memory.wait():
            print_lines(f"WARNING a snapshot could not be written: {error}; the run goes on")
        self._memory.save(state, to_json(self._config), self._data_state(step))

    def warn_of_failure(self) -> None:
        """Warn once where the last save has failed; the checkpoint before it is kept, and the run goes on."""
        finished = self._store.finished_save
        if finished is None or finished.step == self._checked:
            return
        self._checked = finished.step
        if finished.error:
            saved = saved_steps(self._folder.checkpoints)
            newest = (
                f"the checkpoint after step {saved[-1]} is kept" if saved else "there is none yet"
            )
            print_lines(
                f"WARNING step {finished.step} could not be saved: {finished.error}; {newest}, and the run goes on"
            )

    def check_saved(self) -> None:
        """Wait for the last save. Raises UserError where it is not whole on disk."""
        with activity("saving"):
            error = self._store.wait()
        if error:
            saved = saved_steps(self._folder.checkpoints)
            newest = f"step {saved[-1]}, which is kept," if saved else "the start"
            raise UserError(
                f"the last state could not be saved: {error}; make room, and go on from {newest} with --resume",
                everywhere=True,
            )
        if self._memory is not None:
            self._memory.remove()

    def close(self) -> None:
        """Wait for the last save, whether it succeeds or not."""
        self._store.wait()
        if self._memory is not None:
            self._memory.wait()

    def _data_state(self, step: int) -> DataState:
        """Return the position in the data before `step`."""
        launch = self._data.launch
        # as a checkpoint gives it back
        budget = json.loads(json.dumps(asdict(self._data.loader.budget)))
        return DataState(
            step=step,
            index=launch.fingerprint,
            budget=budget,
            planner=PLANNER,
            segment=launch.segment.first,
        )
