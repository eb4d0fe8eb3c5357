"""Train a multimodal LLM: ``python -m mmjax.train [CONFIG] [a.b=value ...]``, or ``--resume RUN``."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from mmjax.startup import start_clock, use_huge_pages

    use_huge_pages()
    start_clock("train")

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from mmjax.config import Config
from mmjax.config.codec import did_you_mean, key_of
from mmjax.config.loading import (
    CONFIG_SUFFIXES,
    apply_overrides,
    config_parameters,
    default_config,
    describe_with_meanings,
    differences,
    find_config,
    load,
    shipped_configs,
)
from mmjax.config.other_names import parse_words
from mmjax.console import mute, print_lines, print_note
from mmjax.distributed import coordination
from mmjax.distributed.watchdog import Watchdog
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.planning.plan_file import Plan, read_plan
from mmjax.runtime.devices import set_gpu_memory_fraction
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder, run_folder_of
from mmjax.runtime.run_trust import HELP as TRUST_HELP
from mmjax.runtime.run_trust import check_plan
from mmjax.startup import end_loading
from mmjax.training.loop import train
from mmjax.training.signals import StopFlags


def _read_config(words: Sequence[str], plan: str, resume: bool, trust: bool) -> tuple[Config, Path]:
    """Read the config that the words name, and its file; a run resumed by its folder has its own stored config.

    trust: do what the stored config and the plan say, whoever wrote them.
    """
    named = next((word for word in words if "=" not in word), "")
    changes = [word for word in words if word is not named]
    run = _resumed_run(named, changes, resume)
    if run is None:
        path = find_config(named) if named else default_config()
        if not plan:
            return load(path, changes), path
        parameters = config_parameters(path)
        arguments = [change for change in changes if key_of(change) in parameters]
        return _with_plan(
            partial(load, path), read_plan(Path(plan)), changes, arguments, trust
        ), path
    stored = replace(run, trusted=trust).read_config(changes)
    # the folder may have been moved since it was written
    stored = replace(stored, run=str(run.path))
    changes = [change for change in changes if not change.startswith("run=")]
    if not plan:
        return apply_overrides(stored, changes), run.source
    read = read_plan(Path(plan))
    if read.arguments:
        raise UserError(
            f"plan={plan} has {read.arguments[0]}, for the function of a config file, and {run.path} has its stored "
            f"config; name the file: --resume CONFIG {read.arguments[0]} run={run.path} plan={plan}"
        )
    read = replace(read, settings=[word for word in read.settings if key_of(word) != "run"])
    return _with_plan(partial(apply_overrides, stored), read, changes, [], trust), run.source


def _resumed_run(named: str, changes: Sequence[str], resume: bool) -> RunFolder | None:
    """Find the run to resume with its stored config: its folder in the config's place, or run=FOLDER without a config.

    Returns None where the words name a config file.
    """
    places = [change.removeprefix("run=") for change in changes if change.startswith("run=")]
    if not named:
        folder = RunFolder(Path(places[-1]).resolve()) if places and resume else None
        return folder if folder and folder.config.is_file() else None
    path = Path(named).expanduser()
    if (
        resume
        and not path.exists()
        and path.suffix not in CONFIG_SUFFIXES
        and path.parent not in (Path("."), Path("configs"))
    ):
        runs = [
            str(folder)
            for folder in sorted(path.parent.glob("*"))
            if RunFolder(folder).config.is_file()
        ]
        raise UserError(f"there is no run {named}{did_you_mean(str(path), runs)}")
    if (
        not path.is_dir()
        or named in shipped_configs()
        or not (resume or RunFolder(path).config.is_file())
    ):
        return None
    if not resume:
        raise UserError(
            f"{named} is a folder, not a config; to go on with the run in it, say --resume {named}"
        )
    if places:
        raise UserError(
            f"--resume {named} and run={places[-1]} both name a run; leave one of them out"
        )
    return RunFolder(path.resolve())


class ReadConfig(Protocol):
    """Reads a config with the words of a command line, and before them those of a plan."""

    def __call__(self, overrides: Sequence[str], planned: Sequence[str]) -> Config: ...


def _with_plan(
    read: ReadConfig, plan: Plan, changes: Sequence[str], arguments: Sequence[str], trust: bool
) -> Config:
    """Read a config with the words of a plan, then those of the command line; say which of the plan's these change.

    arguments: those of the changes that the plan's own config needs too. trust: do what it says,
    whoever wrote it.
    """
    try:
        planned = read(arguments, plan.words)
        unnamed = [word for word in plan.words if key_of(word) != "name"]
        name = planned.name if unnamed == plan.words else read(arguments, unnamed).name
    except UserError as error:
        raise UserError(f"plan={plan.path}: {error}") from None
    if name != plan.config:
        raise UserError(
            f"plan={plan.path} was made for {plan.config}, not for {name}; make one for it with mmjax.plan --out"
        )
    config = read(changes, plan.words)
    if not trust:
        check_plan(plan, config, changes)
    overrides = {key_of(word): word for word in arguments}
    lines = [
        f"{word} -> {overrides[key_of(word)]}"
        for word in plan.arguments
        if overrides.get(key_of(word), word) != word
    ]
    keys = [key_of(word) for word in plan.settings]
    # Of a section that is gone, only the section is listed.
    lines += [
        line
        for line in differences(planned, config)
        if any(f"{key}.".startswith(f"{line.partition(':')[0]}.") for key in keys)
    ]
    if coordination.is_leader():
        for line in lines:
            print_note(f"plan   {plan.path}, changed on the command line: {line}")
    return config


WORDS = (
    "a config's file or name (default: tiny_omni; with --resume, a run's folder does as well: its own config), and "
    "changes to it; plan=FILE takes those of mmjax.plan --out"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    end_loading()
    configs = shipped_configs()
    width = max(map(len, configs))
    parser = command_parser(
        "train",
        __doc__,
        epilog="\n".join(
            ["configs:", *(f"  {name:<{width}}  {about}" for name, about in configs.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG | a.b=value", help=WORDS)
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the whole config with each key's meaning, and stop",
    )
    parser.add_argument(
        "--profile", action="store_true", help="time layers here first; kept for the next time"
    )
    parser.add_argument(
        "--new-data", action="store_true", help="with --resume: go on with the data as it is now"
    )
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: this part of the config may differ",
    )
    parser.add_argument(
        "--trust", action="store_true", help=f"with --resume or plan=: {TRUST_HELP}"
    )
    started = parser.add_mutually_exclusive_group()
    started.add_argument(
        "--resume",
        nargs="?",
        const="resume",
        choices=("resume", "auto"),
        help="continue the run (auto: or start it)",
    )
    started.add_argument(
        "--overwrite", action="store_true", help="replace the run that is in its folder"
    )
    # `--resume` takes a value behind `=` only: the word after it is the config, or the run's
    # folder.
    argv = [
        "--resume=resume" if word == "--resume" else word
        for word in (sys.argv[1:] if argv is None else argv)
    ]
    args = parse_words(parser, argv)
    plans = [word.removeprefix("plan=") for word in args.words if word.startswith("plan=")]
    if len(plans) > 1:
        raise UserError(
            f"plan={plans[0]} and plan={plans[1]}: a run has one plan; leave one of them out"
        )
    plan = "".join(plans)
    words = [word for word in args.words if not word.startswith("plan=")]
    config, path = _read_config(words, plan, bool(args.resume), args.trust)
    if args.show:
        print_lines(describe_with_meanings(config))
        return
    if not coordination.is_leader():
        mute()
    set_gpu_memory_fraction()
    permitted = AllowedChanges(args.new_data, tuple(args.change), args.trust)
    if (
        permitted != NO_CHANGES
        and not args.resume
        and not (plan and permitted == AllowedChanges(trust=True))
    ):
        raise UserError(
            "--new-data and --change are of a run that goes on, and --trust of that or of plan=; say --resume, or "
            "--resume=auto"
        )
    mode = "overwrite" if args.overwrite else args.resume or "new"
    flags = StopFlags()
    watchdog = Watchdog(config.training.watch, run_folder_of(config).stacks)
    with flags.installed(), watchdog, coordination.process_group():
        train(
            config,
            path,
            mode,
            profile=args.profile,
            permitted=permitted,
            flags=flags,
            watchdog=watchdog,
        )


if __name__ == "__main__":
    exit_process(run_command(main))
