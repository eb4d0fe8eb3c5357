"""Train a multimodal LLM: ``python -m mmjax.train [CONFIG] [a.b=value ...]``, or ``--resume RUN``."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from mmjax.startup import start_clock

    start_clock("train")

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from mmjax.autotune.memory_plan import ACTIVATION, MemoryDecision, plan_key, plan_memory_on_mesh, read_memory_plan
from mmjax.balance.parts import LLM
from mmjax.config import Config
from mmjax.config.loading import (
    apply_overrides,
    default_config,
    describe_with_meanings,
    find_config,
    load,
    resolve_callbacks,
    shipped_configs,
)
from mmjax.console import ProgressLine, mute, print_lines
from mmjax.data.loading.workers import refuse_in_worker
from mmjax.distributed import coordination
from mmjax.distributed.watchdog import Watchdog
from mmjax.errors import UserError, exit_process, raise_ctrl_c_once, run_command
from mmjax.inference.evaluation import Evaluator, evaluation_sources
from mmjax.inference.prompts import BatchLimits
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, check_heads, make_mesh
from mmjax.planning.plan_file import plan_changes
from mmjax.runtime.checkpoint import CheckpointStore, DamagedCheckpoint
from mmjax.runtime.checkpoint_commit import Retention, saved_steps, set_aside
from mmjax.runtime.devices import (
    CompileCounter,
    choose_devices,
    enable_compilation_cache,
    peak_flops,
    set_gpu_memory_fraction,
)
from mmjax.runtime.run_dir import NOTHING, AllowedChanges, Mode, RunFolder, claim, run_folder_of, run_lock_held
from mmjax.runtime.state import TrainState, make_optimizer
from mmjax.runtime.step import Executor
from mmjax.startup import activity, end_loading
from mmjax.training.loop import Session
from mmjax.training.run_data import open_data
from mmjax.training.signals import StopFlags, install_signal_handlers
from mmjax.training.unreadable import UnreadableSamples


def open_session(
    config: Config,
    folder: RunFolder,
    devices: Sequence[jax.Device],
    watchdog: Watchdog,
    flags: StopFlags,
    permitted: AllowedChanges = NOTHING,
    profile: bool = False,
    step: int = 0,
) -> Session:
    """Build the data, model, optimizer, checkpoints and evaluator of a run that continues from `step`.

    Other arguments are as of `train`.
    """
    mesh = make_mesh(config.mesh, devices)
    check_heads(mesh.shape, config.mesh, config.model)
    enable_compilation_cache(folder.programs)  # before anything is compiled
    programs = CompileCounter()

    with activity("opening the data"):
        data = open_data(config, folder, step, permitted, mesh)
    config = data.life.config  # training.epochs is resolved to training.steps here
    # A resumed run takes over the remat policies it was started with: others would be other programs, with other bits.
    reuse_plan = step > 0 and not profile
    stored_plan = (
        coordination.run_on_leader(lambda: read_memory_plan(folder.fit, plan_key(config, mesh))) if reuse_plan else None
    )
    with activity("predicting memory"):
        decision = MemoryDecision.of(stored_plan) if stored_plan else None
        memory_plan = plan_memory_on_mesh(
            config, mesh, partial(data.layout_of, mesh=mesh), profile, decision, data.index.longest()
        )
    functions = resolve_callbacks(config.model, folder.path)
    model = Model.build(memory_plan.applied(config.model), jnp.dtype(config.training.precision), functions=functions)
    rules = ShardingRules.of(config.mesh)
    optimizer = make_optimizer(config.optimizer, model.axes)
    executor = Executor(model, optimizer, mesh, rules, data.sources, config.mesh.exchange, memory_plan.loss_chunks)
    retention = Retention(config.training.keep, config.training.keep_every)
    checkpoints = CheckpointStore(folder.checkpoints, executor, retention)
    layout = data.loader.layout
    positions = layout.rows[LLM] * max(shape.lengths[LLM] for shape in layout.shapes)
    activation = ACTIVATION[config.training.precision]
    with activity("opening the validation and test splits"):
        evaluator = Evaluator(
            model,
            mesh,
            rules,
            evaluation_sources(config, ("validation", "test"), folder.path),
            config,
            limits={"validation": config.training.evaluate_samples},
            batch_limits=BatchLimits(tokens=memory_plan.evaluation_positions(config.model.llm, positions, activation)),
            one_shape=True,
            loss_chunks=memory_plan.loss_chunks,
            progress=lambda done: watchdog.beat(),
        )
    return Session(
        config=config,
        folder=folder,
        life=data.life,
        mesh=mesh,
        executor=executor,
        loader=data.loader,
        left_out=UnreadableSamples(data.quarantine, data.index.name),
        checkpoints=checkpoints,
        evaluator=evaluator,
        programs=programs,
        peak=peak_flops(devices, config.training.precision),
        fitted=memory_plan,
        asked=flags,
        watchdog=watchdog,
    )


def restore_or_init(open_at: Callable[..., Session], folder: RunFolder, resumed: bool) -> tuple[Session, TrainState]:
    """Open a session and its train state: fresh, or restored from the newest readable checkpoint of a resumed run.

    open_at: `open_session` with all arguments but `step`. Unreadable newer checkpoints are set aside. Raises UserError
    if there are checkpoints and none is readable.
    """
    torn: list[tuple[int, DamagedCheckpoint]] = []
    # Process 0 lists the checkpoints for all, so that all try the same ones.
    saved = coordination.run_on_leader(lambda: saved_steps(folder.checkpoints)) if resumed else []
    for step in reversed(saved or [0]):
        session = open_at(step=step)
        try:
            state = session.start()
        except DamagedCheckpoint as error:
            torn.append((step, error))
            continue
        for torn_step, error in torn:
            aside = coordination.run_on_leader(
                lambda torn_step=torn_step: set_aside(folder.checkpoints, torn_step).name
            )
            print_lines(f"WARNING {error}; it is set aside as {aside}, and the run goes on from step {step}")
        return session, state
    older = f"nor can the {len(torn) - 1} before it" if len(torn) > 1 else "there is no older one here"
    raise UserError(f"{torn[0][1]}; {older}; restore the folder, or start afresh with --overwrite", everywhere=True)


def train(
    config: Config,
    source: Path,
    mode: Mode = "new",
    devices: Sequence[jax.Device] | None = None,
    profile: bool = False,
    permitted: AllowedChanges = NOTHING,
    flags: StopFlags | None = None,
    watchdog: Watchdog | None = None,
) -> Session:
    """Train a config to its last step, or until a stop is requested, and return the closed session.

    source: the config's file, which is copied into the run folder. devices: by default all of the config's kind.
    profile: time layers before `remat=auto` is decided. permitted: what may differ from the run that is resumed.
    flags: what signals ask for, such as a stop. watchdog: ends this process when it hangs.
    """
    refuse_in_worker()
    devices = choose_devices(config.device) if devices is None else devices
    watchdog = watchdog or Watchdog(config.training.watch, run_folder_of(config).stacks)
    with raise_ctrl_c_once(), lock_run(run_folder_of(config).path):
        # Until the state is restored or made, a failure leaves the folder as it was before.
        with claim_run(config, source, mode, permitted) as (folder, resumed):
            open_at = partial(open_session, config, folder, devices, watchdog, flags or StopFlags(), permitted, profile)
            session, state = restore_or_init(open_at, folder, resumed)
        first = session.life.first
        training = session.config.training
        with closing(session):
            if session.complete(first):
                return session
            # One microbatch is enough to compile the programs of all shapes: they differ only in the rows' lengths.
            example = session.describe(first)
            batches = session.batches(first)  # starts the workers, which load while XLA compiles
            accumulated = session.compile(state, example, first)
            with ProgressLine(first, training.steps) as progress:
                for step, ready in enumerate(batches, start=first):
                    hyper = session.hyperparameters(step)
                    noise = session.noise(step)
                    unreadable = session.left_out.of_step(ready.loaded)
                    state, accumulated, report = session.executor.step(
                        state, accumulated, ready.arrays, hyper, session.said(ready), noise, unreadable
                    )
                    # Logs the step before this one: its numbers are there by now, while this one still computes.
                    session.ran(step, ready, report, state, progress)
                    # All processes agree to stop at the same step, or a collective would wait for the stopped ones.
                    if session.stopping:
                        session.stop(step + 1, state, progress)
                        return session
                    if session.due(step + 1, training.evaluate_every):
                        session.evaluate(step + 1, state, progress)
                        if session.best.exhausted:
                            session.save(step + 1, state, progress)
                            break
                    if session.due(step + 1, training.checkpoint_every):
                        session.save(step + 1, state, progress)
                session.settle(state, progress)
            session.finish(first, state)
    return session


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder in process 0 on behalf of all processes."""
    with ExitStack() as stack:
        coordination.run_on_leader(lambda: stack.enter_context(run_lock_held(folder)))
        yield


@contextmanager
def claim_run(config: Config, source: Path, mode: Mode, permitted: AllowedChanges) -> Iterator[tuple[RunFolder, bool]]:
    """Claim the run folder in process 0, the only one that changes files. Yields it, and whether the run resumes."""
    with ExitStack() as stack:

        def enter() -> bool:
            return stack.enter_context(claim(config, source, mode, permitted))[1]

        yield run_folder_of(config), coordination.run_on_leader(enter)


def _read_config(words: Sequence[str], plan: str, resume: bool) -> tuple[Config, Path]:
    """Read the config that the words name, and its file; a run resumed by its folder has its own stored config."""
    named = next((word for word in words if "=" not in word), "")
    changes = [word for word in words if word is not named]
    run = _resumed_run(named, changes, resume)
    if run is None:
        path = find_config(named) if named else default_config()
        return _with_plan(partial(load, path), changes, plan), path
    stored = replace(run.read_config(), run=str(run.path))  # the folder may have been moved since it was written
    changes = [change for change in changes if not change.startswith("run=")]
    return _with_plan(partial(apply_overrides, stored), changes, plan), run.source


def _resumed_run(named: str, changes: Sequence[str], resume: bool) -> RunFolder | None:
    """Find the run to resume with its stored config: its folder in the config's place, or run=FOLDER without a config.

    Returns None where the words name a config file.
    """
    places = [change.removeprefix("run=") for change in changes if change.startswith("run=")]
    if not named:
        folder = RunFolder(Path(places[-1]).resolve()) if places and resume else None
        return folder if folder and folder.config.is_file() else None
    path = Path(named).expanduser()
    if not path.is_dir() or named in shipped_configs() or not (resume or RunFolder(path).config.is_file()):
        return None
    if not resume:
        raise UserError(f"{named} is a folder, not a config; to go on with the run in it, say --resume {named}")
    if places:
        raise UserError(f"--resume {named} and run={places[-1]} both name a run; leave one away")
    return RunFolder(path.resolve())


def _with_plan(read: Callable[[Sequence[str]], Config], changes: Sequence[str], plan: str) -> Config:
    """Read a config with the overrides of a plan file, if one is given, and then those of the command line."""
    if not plan:
        return read(changes)
    name, planned = plan_changes(Path(plan))
    if name != (config_name := read(changes).name):
        raise UserError(
            f"plan={plan} was made for {name}, not for {config_name}; make one for it with mmjax.plan --out"
        )
    return read([*planned, *changes])


WORDS = (
    "a config's file or name (default: tiny_omni; with --resume, a run's folder does as well: its own config), and "
    "changes to it; plan=FILE takes those of mmjax.plan --out"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    end_loading()
    configs = shipped_configs()
    width = max(map(len, configs))
    parser = argparse.ArgumentParser(
        prog="python -m mmjax.train",
        description=__doc__,
        epilog="\n".join(["configs:", *(f"  {name:<{width}}  {about}" for name, about in configs.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG | a.b=value", help=WORDS)
    parser.add_argument("--show", action="store_true", help="print the whole config with each key's meaning, and stop")
    parser.add_argument("--profile", action="store_true", help="time layers here first; kept for the next time")
    parser.add_argument("--new-data", action="store_true", help="with --resume: go on with the data as it is now")
    parser.add_argument(
        "--change", action="append", default=[], metavar="KEY", help="with --resume: this part of the config may differ"
    )
    started = parser.add_mutually_exclusive_group()
    started.add_argument(
        "--resume", nargs="?", const="resume", choices=("resume", "auto"), help="continue the run (auto: or start it)"
    )
    started.add_argument("--overwrite", action="store_true", help="replace the run that is in its folder")
    # `--resume` takes a value behind `=` only: the word after it is the config, or the run's folder.
    argv = ["--resume=resume" if word == "--resume" else word for word in (sys.argv[1:] if argv is None else argv)]
    args = parser.parse_intermixed_args(argv)
    plan = next((word.removeprefix("plan=") for word in args.words if word.startswith("plan=")), "")
    words = [word for word in args.words if not word.startswith("plan=")]
    config, path = _read_config(words, plan, bool(args.resume))
    if args.show:
        print_lines(describe_with_meanings(config))
        return
    if not coordination.is_leader():
        mute()
    set_gpu_memory_fraction()
    permitted = AllowedChanges(args.new_data, tuple(args.change))
    if permitted != NOTHING and not args.resume:
        raise UserError("--new-data and --change are of a run that goes on; say --resume, or --resume=auto")
    mode = "overwrite" if args.overwrite else args.resume or "new"
    flags = install_signal_handlers()
    with Watchdog(config.training.watch, run_folder_of(config).stacks) as watchdog, coordination.process_group():
        train(config, path, mode, profile=args.profile, permitted=permitted, flags=flags, watchdog=watchdog)


if __name__ == "__main__":
    exit_process(run_command(main))
