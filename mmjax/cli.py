"""The console command: ``mmjax COMMAND ...`` is ``python -m mmjax.COMMAND ...``.

Imports little: a command says that it starts before the libraries that it needs are loaded. Data workers import the
program's main module anew; that of the console script imports this file alone, and trains nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mmjax.config_meanings import first_line
from mmjax.config_values import did_you_mean
from mmjax.errors import UserError, leave, run_command
from mmjax.startup import begin, loaded

# In the order in which they are listed; what each does is the first line of its module's docstring.
COMMANDS = ("train", "generate", "evaluate", "export", "report", "inspect", "index", "plan", "supervise", "bench")
HELP = ("-h", "--help", "help")


def list_commands() -> str:
    """Every command on a line, with what it does."""
    width = max(map(len, COMMANDS))
    about = {name: first_line(Path(__file__).with_name(f"{name}.py")).partition(": ``")[0] for name in COMMANDS}
    lines = [f"  {name:<{width}}  {text}" for name, text in about.items()]
    return "\n".join(["mmjax COMMAND ...; mmjax COMMAND --help says more", "", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names with the others."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in HELP:
        print(list_commands(), flush=True)
        return
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    if name == "supervise":  # it has nothing to load, and ends with its own command's code
        importlib.import_module("mmjax.supervise").main(words)
        return
    begin(name)
    module = importlib.import_module(f"mmjax.{name}")
    loaded()
    module.main(words)


def run() -> NoReturn:
    """Run as the program."""
    leave(run_command(main))
