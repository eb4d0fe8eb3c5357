"""Train a multimodal LLM: ``python -m mmjax.train [CONFIG] [a.b=value ...]``, or ``--resume RUN``."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from mmjax.startup import start_clock

    start_clock("train")

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mmjax.config import Config
from mmjax.config.codec import did_you_mean
from mmjax.config.loading import (
    apply_overrides,
    default_config,
    describe_with_meanings,
    find_config,
    load,
    shipped_configs,
)
from mmjax.console import mute, print_lines
from mmjax.distributed import coordination
from mmjax.distributed.watchdog import Watchdog
from mmjax.errors import UserError, exit_process, run_command
from mmjax.planning.plan_file import plan_changes
from mmjax.runtime.devices import set_gpu_memory_fraction
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder, run_folder_of
from mmjax.startup import end_loading
from mmjax.training.loop import train
from mmjax.training.signals import StopFlags


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
    if resume and not path.exists() and path.suffix != ".py" and path.parent not in (Path("."), Path("configs")):
        runs = [str(folder) for folder in sorted(path.parent.glob("*")) if RunFolder(folder).config.is_file()]
        raise UserError(f"there is no run {named}{did_you_mean(str(path), runs)}")
    if not path.is_dir() or named in shipped_configs() or not (resume or RunFolder(path).config.is_file()):
        return None
    if not resume:
        raise UserError(f"{named} is a folder, not a config; to go on with the run in it, say --resume {named}")
    if places:
        raise UserError(f"--resume {named} and run={places[-1]} both name a run; leave one of them out")
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
    if permitted != NO_CHANGES and not args.resume:
        raise UserError("--new-data and --change are of a run that goes on; say --resume, or --resume=auto")
    mode = "overwrite" if args.overwrite else args.resume or "new"
    flags = StopFlags()
    watchdog = Watchdog(config.training.watch, run_folder_of(config).stacks)
    with flags.installed(), watchdog, coordination.process_group():
        train(config, path, mode, profile=args.profile, permitted=permitted, flags=flags, watchdog=watchdog)


if __name__ == "__main__":
    exit_process(run_command(main))
