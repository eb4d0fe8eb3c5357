"""Measure mmjax: ``python -m mmjax.bench NAME [options] [--json]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mmjax.benchmarks import attention, compile_time, fill
from mmjax.errors import run_command
from mmjax.training.console import say, table

BENCHMARKS = {"attention": attention, "compile": compile_time, "fill": fill}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.bench", description=__doc__, allow_abbrev=False)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        options = names.add_parser(name, help=benchmark.__doc__, description=benchmark.__doc__, allow_abbrev=False)
        options.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
        benchmark.add_arguments(options)
    args = parser.parse_args(argv)
    rows = BENCHMARKS[args.name].run(args)
    if args.json:
        say(json.dumps(rows))
        return
    say(*table([tuple(rows[0]), *(tuple(map(_cell, row.values())) for row in rows)], indent=""))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_command(main))
