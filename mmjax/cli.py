"""The console command: ``mmjax COMMAND ...`` is ``python -m mmjax.COMMAND ...``.

Imports little, so that a command's first line is printed before its libraries are loaded. Data
workers import the main module of the program again; that of the console script imports this file
alone, and trains nothing.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from mmjax import __version__
from mmjax.config.codec import did_you_mean
from mmjax.config.meanings import first_line
from mmjax.errors import UserError, exit_process, run_command
from mmjax.startup import end_loading, start_clock, use_huge_pages

# In the order of --help, which describes each with the first line of its module's docstring.
COMMANDS = (
    "init", "train", "generate", "chat", "evaluate", "export", "report", "studio", "inspect", "index", "plan",
    "rehearse", "verify", "supervise", "families", "bench", "doctor",
)  # fmt: skip
WITHOUT_LIBRARIES = ("supervise", "doctor")  # nothing to wait for before their first line
HELP = ("-h", "--help", "help")
VERSION = ("-V", "--version", "version")


def list_commands() -> str:
    """Format the commands, one a line with its description."""
    width = max(map(len, COMMANDS))
    lines = [
        "mmjax COMMAND ...; mmjax COMMAND --help says more, mmjax --version which one this is",
        "",
    ]
    for name in COMMANDS:
        description = first_line(Path(__file__).with_name(f"{name}.py")).partition(": ``")[0]
        lines.append(f"  {name:<{width}}  {description}")
    return "\n".join(lines)


def describe_version() -> str:
    """Describe the versions of mmjax and of what it runs on."""
    try:
        jax_version = metadata.version("jax")
    except metadata.PackageNotFoundError:
        jax_version = "is missing"
    return f"mmjax {__version__} (JAX {jax_version}, Python {platform.python_version()})"


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the command that the first word names with the other words as its arguments; return its exit code."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in HELP:
        print(list_commands(), flush=True)
        return 0
    if name in VERSION:
        print(describe_version(), flush=True)
        return 0
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    if name in WITHOUT_LIBRARIES:
        return importlib.import_module(f"mmjax.{name}").main(arguments)
    start_clock(name)
    module = importlib.import_module(f"mmjax.{name}")
    end_loading()
    return module.main(arguments)


def run() -> NoReturn:
    """Run as the program."""
    use_huge_pages()
    exit_process(run_command(main))
