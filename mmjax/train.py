"""Train a multimodal LLM: ``python -m mmjax.train [CONFIG] [a.b=value ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.config import Config
from mmjax.config_files import callbacks_of, default_config, describe, find, load
from mmjax.data.index import LengthIndex, cached_index
from mmjax.data.layout import RankLayout
from mmjax.data.pipeline import StepLoader
from mmjax.data.plan import make_planner
from mmjax.data.quarantine import Bad, Quarantine
from mmjax.data.sample import Source
from mmjax.data.sources import look_again, notes_of, open_sources
from mmjax.errors import UserError, run_command
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.parallel.mesh import check_heads, encoder_axes, held_ranks, make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.plan_file import plan_changes
from mmjax.training.checkpoint import Checkpoints
from mmjax.training.console import ProgressLine, mute, say
from mmjax.training.devices import choose_devices, topology_of, use_most_memory
from mmjax.training.evaluation import Evaluator, question_sources
from mmjax.training.fitting import fit_on_mesh
from mmjax.training.interrupts import kept_interrupts
from mmjax.training.kept_fit import Decision, asked_of, read_fit
from mmjax.training.left_out import LeftOut
from mmjax.training.optimizer import make_optimizer
from mmjax.training.profile import peak_of
from mmjax.training.programs import ProgramCounter, keep_programs
from mmjax.training.run_folder import Mode, RunFolder, claim, run_folder
from mmjax.training.session import Session
from mmjax.training.step import Executor
from mmjax.training.watchdog import Watchdog


def open_session(
    config: Config,
    folder: RunFolder,
    resumed: bool,
    devices: Sequence[jax.Device],
    profile: bool = False,
    watchdog: Watchdog | None = None,
) -> Session:
    """Everything a run needs, in a folder that it has claimed."""
    mesh = make_mesh(config.mesh, devices)
    check_heads(mesh.shape, config.mesh, config.model)
    keep_programs(folder.programs)
    programs = ProgramCounter()

    sources = open_sources(config, "train", folder.path)
    processes.led(lambda: _indexed(sources, config, folder))
    index, index_folder = cached_index(sources, config.model.encoders, folder.index)
    weights = [s.weight for s in config.data.sources.values()]
    topology = topology_of(mesh, config.mesh)
    planner, layout = make_planner(index, config, weights, topology)
    grouper = planner.grouper
    held = held_ranks(mesh), processes.leads(), held_ranks(mesh, encoder_axes(config.mesh))
    loader = StepLoader(config, grouper.budget, layout, index_folder, folder.path, *held)
    processes.led(lambda: folder.list_oversize(map(index.name, grouper.oversize), config.data.on_oversize))
    quarantine = _quarantine(index, folder, config)

    def layouts(other: Config) -> RankLayout:
        return layout if other == config else make_planner(index, other, weights, topology)[1]

    before = processes.led(lambda: read_fit(folder.fit, asked_of(config, mesh))) if resumed and not profile else None
    fitted = fit_on_mesh(config, mesh, layouts, profile, before and Decision.of(before))
    functions = callbacks_of(config.model, folder.path)
    model = Model.build(fitted.applied(config.model), jnp.dtype(config.training.precision), functions=functions)
    rules = ShardingRules.of(config.mesh)
    optimizer = make_optimizer(config.optimizer, model.axes)
    executor = Executor(model, optimizer, mesh, rules, len(sources), config.mesh.exchange, fitted.loss_chunks)
    checkpoints = Checkpoints(folder.checkpoints, executor, config.training.keep)
    questions = question_sources(config, ("validation", "test"), folder.path)
    watchdog = watchdog or Watchdog(config.training.watch, folder.stacks)
    evaluator = Evaluator(model, mesh, rules, questions, config, topology, watchdog.beat)
    peak = peak_of(devices, config.training.precision)
    left_out = LeftOut(quarantine, index.name)
    parts = mesh, executor, loader, left_out, checkpoints, evaluator, programs, peak, fitted, watchdog
    return Session(config, folder, resumed, *parts)


def _indexed(sources: Mapping[str, Source], config: Config, folder: RunFolder) -> str:
    look_again(sources)
    for note in notes_of(sources):
        say(f"note   {note}")
    return str(cached_index(sources, config.model.encoders, folder.index)[1])


def _quarantine(index: LengthIndex, folder: RunFolder, config: Config) -> Quarantine:
    """The samples that cannot be used, which process 0 writes down. Raises UserError where they are fatal."""
    bad = [Bad(index.name(int(k)), str(reason)) for k, reason in zip(index.bad, index.reason, strict=True)]
    quarantine = Quarantine(folder.quarantine, config.data, len(index), writes=processes.leads())
    processes.led(lambda: len(quarantine.add(bad)))
    quarantine.add(bad)  # by the other processes, for whom it is the same
    if bad:
        say(f"{len(bad)} of {len(index)} samples cannot be used; they are skipped, and listed in {folder.quarantine}")
    return quarantine


def train(
    config: Config,
    source: Path,
    mode: Mode = "new",
    devices: Sequence[jax.Device] | None = None,
    profile: bool = False,
    watchdog: Watchdog | None = None,
) -> Session:
    """Train as the config says.

    `source` is the config's file, of which the run keeps a copy; `devices` are by default all of the kind that the
    config names. profile: time layers on them before `remat=auto` is decided.
    """
    devices = choose_devices(config.device) if devices is None else devices
    with claim_together(config, source, mode) as (folder, resumed):
        session = open_session(config, folder, resumed, devices, profile, watchdog)
        state, first = session.start()
    with closing(session):
        if session.complete(first):
            return session
        batches = session.batches(first)
        accumulated = session.compile(state, first)
        with ProgressLine(first, config.training.steps) as progress, kept_interrupts() as check_interrupts:
            for step, ready in enumerate(batches, start=first):
                check_interrupts()
                hyper, loaded = session.hyperparameters(step), ready.loaded
                noise = np.array([config.seed, step], np.uint32)
                state, accumulated, report = session.executor.step(
                    state,
                    accumulated,
                    ready.arrays,
                    hyper,
                    int(loaded.digest),
                    float(loaded.needed_flops),
                    noise,
                    session.left_out.of_step(loaded),
                )
                session.ran(step, ready, report, progress)
                if session.due(step + 1, config.training.evaluate_every):
                    session.evaluate(step + 1, state)
                if session.due(step + 1, config.training.checkpoint_every):
                    session.save(step + 1, state, progress)
            session.settle(progress)
        session.finish(first, state)
    return session


@contextmanager
def claim_together(config: Config, source: Path, mode: Mode) -> Iterator[tuple[RunFolder, bool]]:
    """`claim` by process 0 for all; the others learn what it found. Only process 0 changes files."""
    if processes.leads():
        with ExitStack() as claimed:
            found: list[tuple[RunFolder, bool]] = []

            def enter() -> bool:
                found.append(claimed.enter_context(claim(config, source, mode)))
                return found[0][1]

            processes.led(enter)
            yield found[0]
    else:
        yield run_folder(config), processes.led(lambda: None)


def _planned(path: Path, changes: Sequence[str], plan: str) -> Config:
    """The config with the changes of a plan's file, if there is one, and then these."""
    if not plan:
        return load(path, changes)
    name, planned = plan_changes(Path(plan))
    if name != (own := load(path, changes).name):
        raise UserError(f"plan={plan} was made for {name}, not for {own}; make one for it with mmjax.plan --out")
    return load(path, [*planned, *changes])


WORDS = "a config's file or name (default: tiny_omni), and changes to it; plan=FILE takes those of mmjax.plan --out"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.train", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="CONFIG | a.b=value", help=WORDS)
    parser.add_argument("--show", action="store_true", help="print the whole config and stop")
    parser.add_argument("--profile", action="store_true", help="time layers here first; kept for the next time")
    started = parser.add_mutually_exclusive_group()
    started.add_argument(
        "--resume", nargs="?", const="resume", choices=("resume", "auto"), help="continue the run (auto: or start it)"
    )
    started.add_argument("--overwrite", action="store_true", help="replace the run that is in its folder")
    # `--resume` takes a value behind `=` only: the word after it is the config.
    given = ["--resume=resume" if word == "--resume" else word for word in (sys.argv[1:] if argv is None else argv)]
    args = parser.parse_intermixed_args(given)
    plan = next((word.removeprefix("plan=") for word in args.words if word.startswith("plan=")), "")
    words = [word for word in args.words if not word.startswith("plan=")]
    named = next((word for word in words if "=" not in word), "")
    path = find(named) if named else default_config()
    config = _planned(path, [word for word in words if word is not named], plan)
    if args.show:
        say(describe(config))
        return
    if not processes.leads():
        mute()
    use_most_memory()
    mode: Mode = "overwrite" if args.overwrite else args.resume or "new"
    with Watchdog(config.training.watch, run_folder(config).stacks) as watchdog, processes.joined():
        train(config, path, mode, profile=args.profile, watchdog=watchdog)


if __name__ == "__main__":
    sys.exit(run_command(main))
