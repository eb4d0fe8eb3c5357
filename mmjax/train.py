"""Train a multimodal LLM: ``python -m mmjax.train [CONFIG] [a.b=value ...]``, or ``--resume RUN``."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from mmjax.startup import begin

    begin("train")

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from mmjax.config import Config
from mmjax.config_files import callbacks_of, default_config, describe_with_meanings, edit, find, load, shipped
from mmjax.data.workers import refuse_in_worker
from mmjax.errors import UserError, heed_interrupts, leave, run_command
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.parallel.mesh import check_heads, make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.plan_file import plan_changes
from mmjax.startup import activity, loaded
from mmjax.training.checkpoint import Checkpoints, TornCheckpoint
from mmjax.training.checkpoint_commit import Retention, set_aside, steps_in
from mmjax.training.console import ProgressLine, mute, say
from mmjax.training.devices import choose_devices, topology_of, use_most_memory
from mmjax.training.evaluation import Evaluator, question_sources
from mmjax.training.fitting import fit_on_mesh
from mmjax.training.kept_fit import Decision, asked_of, read_fit
from mmjax.training.left_out import LeftOut
from mmjax.training.optimizer import make_optimizer
from mmjax.training.profile import peak_of
from mmjax.training.programs import ProgramCounter, keep_programs
from mmjax.training.run_data import open_data
from mmjax.training.run_folder import NOTHING, Mode, Permitted, RunFolder, claim, run_folder
from mmjax.training.run_lock import locked
from mmjax.training.session import Session
from mmjax.training.signals import Asked, heed
from mmjax.training.state import TrainState
from mmjax.training.step import Executor
from mmjax.training.watchdog import Watchdog


@dataclass(frozen=True)
class Start:
    """The options with which a run is started or resumed."""

    devices: Sequence[jax.Device]
    watchdog: Watchdog
    asked: Asked
    permitted: Permitted = NOTHING
    profile: bool = False


def open_session(config: Config, folder: RunFolder, step: int, start: Start) -> Session:
    """Everything a run needs to go on from `step`, in a folder that it has claimed."""
    profile, mesh = start.profile, make_mesh(config.mesh, start.devices)
    check_heads(mesh.shape, config.mesh, config.model)
    keep_programs(folder.programs)
    programs = ProgramCounter()

    with activity("opening the data"):
        data = open_data(config, folder, step, start.permitted, mesh)
    config = data.life.config  # with its epochs as steps
    before = processes.led(lambda: read_fit(folder.fit, asked_of(config, mesh))) if step and not profile else None
    with activity("predicting memory"):
        decided, longest = before and Decision.of(before), data.index.longest()
        fitted = fit_on_mesh(config, mesh, partial(data.layout_of, mesh=mesh), profile, decided, longest)
    functions = callbacks_of(config.model, folder.path)
    model = Model.build(fitted.applied(config.model), jnp.dtype(config.training.precision), functions=functions)
    rules = ShardingRules.of(config.mesh)
    optimizer = make_optimizer(config.optimizer, model.axes)
    executor = Executor(model, optimizer, mesh, rules, data.sources, config.mesh.exchange, fitted.loss_chunks)
    retention = Retention(config.training.keep, config.training.keep_every)
    checkpoints = Checkpoints(folder.checkpoints, executor, retention)
    topology = topology_of(mesh, config.mesh)
    with activity("opening the questions"):
        questions = question_sources(config, ("validation", "test"), folder.path)
        evaluator = Evaluator(model, mesh, rules, questions, config, topology, start.watchdog.beat)
    peak = peak_of(start.devices, config.training.precision)
    left_out = LeftOut(data.quarantine, data.index.name)
    parts = mesh, executor, data.loader, left_out, checkpoints, evaluator, programs, peak, fitted
    return Session(config, folder, data.life, *parts, start.asked, start.watchdog)


def begin(config: Config, folder: RunFolder, resumed: bool, start: Start) -> tuple[Session, TrainState]:
    """A session, and the state that it begins with: of the newest checkpoint that can be read, where it goes on.

    Those that cannot are set aside. Raises UserError where there are some, and none can be read.
    """
    torn: list[tuple[int, TornCheckpoint]] = []
    saved = processes.led(lambda: steps_in(folder.checkpoints)) if resumed else []
    for step in reversed(saved or [0]):
        session = open_session(config, folder, step, start)
        try:
            state = session.start()
        except TornCheckpoint as error:
            torn.append((step, error))
            continue
        for other, error in torn:
            aside = processes.led(lambda other=other: set_aside(folder.checkpoints, other).name)
            say(f"WARNING {error}; it is set aside as {aside}, and the run goes on from step {step}")
        return session, state
    more = f"nor can the {len(torn) - 1} before it" if len(torn) > 1 else "there is no older one here"
    raise UserError(f"{torn[0][1]}; {more}; restore the folder, or start afresh with --overwrite", everywhere=True)


def train(
    config: Config,
    source: Path,
    mode: Mode = "new",
    devices: Sequence[jax.Device] | None = None,
    profile: bool = False,
    permitted: Permitted = NOTHING,
    asked: Asked | None = None,
    watchdog: Watchdog | None = None,
) -> Session:
    """Train as the config says.

    `source` is the config's file, of which the run keeps a copy; `devices` are by default all of the kind that the
    config names. profile: time layers on them before `remat=auto` is decided. permitted: what may differ from the run
    that is gone on with. asked: by signals, to stop in mid-run for instance. watchdog: looks after this process.
    """
    refuse_in_worker()
    devices = choose_devices(config.device) if devices is None else devices
    watchdog = watchdog or Watchdog(config.training.watch, run_folder(config).stacks)
    start = Start(devices, watchdog, asked or Asked(), permitted, profile)
    with heed_interrupts(), locked_together(run_folder(config).path):
        with claim_together(config, source, mode, permitted) as (folder, resumed):
            session, state = begin(config, folder, resumed, start)
        first, training = session.life.first, session.config.training
        with closing(session):
            if session.complete(first):
                return session
            example = session.describe(first)
            batches = session.batches(first)  # workers start now: they find the planner compiled
            accumulated = session.compile(state, example, first)
            with ProgressLine(first, training.steps) as progress:
                for step, ready in enumerate(batches, start=first):
                    hyper, said, noise = session.hyperparameters(step), session.said(ready), session.noise(step)
                    spoiled = session.left_out.of_step(ready.loaded)
                    state, accumulated, report = session.executor.step(
                        state, accumulated, ready.arrays, hyper, said, noise, spoiled
                    )
                    session.ran(step, ready, report, state, progress)
                    if session.stopping:
                        session.stop(step + 1, state, progress)
                        return session
                    if session.due(step + 1, training.evaluate_every):
                        session.evaluate(step + 1, state, progress)
                    if session.due(step + 1, training.checkpoint_every):
                        session.save(step + 1, state, progress)
                session.settle(state, progress)
            session.finish(first, state)
    return session


@contextmanager
def locked_together(folder: Path) -> Iterator[None]:
    """Process 0 holds a run's folder for all."""
    with ExitStack() as held:
        processes.led(lambda: held.enter_context(locked(folder)))
        yield


@contextmanager
def claim_together(config: Config, source: Path, mode: Mode, permitted: Permitted) -> Iterator[tuple[RunFolder, bool]]:
    """`claim` by process 0 for all; the others learn what it found. Only process 0 changes files."""
    if processes.leads():
        with ExitStack() as claimed:
            found: list[tuple[RunFolder, bool]] = []

            def enter() -> bool:
                found.append(claimed.enter_context(claim(config, source, mode, permitted)))
                return found[0][1]

            processes.led(enter)
            yield found[0]
    else:
        yield run_folder(config), processes.led(lambda: None)


def _config_of(words: Sequence[str], plan: str, resume: bool) -> tuple[Config, Path]:
    """Read the config that the words name, with its file; of a run that is resumed without one, the run's own."""
    named = next((word for word in words if "=" not in word), "")
    changes = [word for word in words if word is not named]
    run = _run_named(named, changes, resume)
    if run is None:
        path = find(named) if named else default_config()
        return _planned(partial(load, path), changes, plan), path
    own = replace(run.read_config(), run=str(run.path))  # it goes on where it lies now
    changes = [change for change in changes if not change.startswith("run=")]
    return _planned(partial(edit, own), changes, plan), run.source


def _run_named(named: str, changes: Sequence[str], resume: bool) -> RunFolder | None:
    """Find the run that is resumed with its own config: by its folder in the config's place, or by run=FOLDER alone."""
    places = [change.removeprefix("run=") for change in changes if change.startswith("run=")]
    if not named:
        folder = RunFolder(Path(places[-1]).resolve()) if places and resume else None
        return folder if folder and folder.config.is_file() else None
    path = Path(named).expanduser()
    if not path.is_dir() or named in shipped() or not (resume or RunFolder(path).config.is_file()):
        return None
    if not resume:
        raise UserError(f"{named} is a folder, not a config; to go on with the run in it, say --resume {named}")
    if places:
        raise UserError(f"--resume {named} and run={places[-1]} both name a run; leave one away")
    return RunFolder(path.resolve())


def _planned(read: Callable[[Sequence[str]], Config], changes: Sequence[str], plan: str) -> Config:
    """The config with the changes of a plan's file, if there is one, and then these."""
    if not plan:
        return read(changes)
    name, planned = plan_changes(Path(plan))
    if name != (own := read(changes).name):
        raise UserError(f"plan={plan} was made for {name}, not for {own}; make one for it with mmjax.plan --out")
    return read([*planned, *changes])


def _list_configs() -> str:
    known = shipped()
    width = max(map(len, known))
    return "\n".join(["configs:", *(f"  {name:<{width}}  {about}" for name, about in known.items())])


WORDS = (
    "a config's file or name (default: tiny_omni; with --resume, a run's folder does as well: its own config), and "
    "changes to it; plan=FILE takes those of mmjax.plan --out"
)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    loaded()
    parser = argparse.ArgumentParser(
        prog="python -m mmjax.train",
        description=__doc__,
        epilog=_list_configs(),
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
    given = ["--resume=resume" if word == "--resume" else word for word in (sys.argv[1:] if argv is None else argv)]
    args = parser.parse_intermixed_args(given)
    plan = next((word.removeprefix("plan=") for word in args.words if word.startswith("plan=")), "")
    words = [word for word in args.words if not word.startswith("plan=")]
    config, path = _config_of(words, plan, bool(args.resume))
    if args.show:
        say(describe_with_meanings(config))
        return
    if not processes.leads():
        mute()
    use_most_memory()
    permitted = Permitted(args.new_data, tuple(args.change))
    if permitted != NOTHING and not args.resume:
        raise UserError("--new-data and --change are of a run that goes on; say --resume, or --resume=auto")
    mode, asked = "overwrite" if args.overwrite else args.resume or "new", heed()
    with Watchdog(config.training.watch, run_folder(config).stacks) as watchdog, processes.joined():
        train(config, path, mode, profile=args.profile, permitted=permitted, asked=asked, watchdog=watchdog)


if __name__ == "__main__":
    leave(run_command(main))
