"""Measure mmjax: ``python -m mmjax.bench NAME [options] [--json] [--out F.npz]``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.benchmarks import (
    allocation,
    attention,
    balance_run,
    compile_time,
    context,
    coordination,
    dispatch,
    fill,
    frozen,
    gpu,
    grouping,
    headers,
    memory,
    nodewise,
    papers,
    peer,
    phases,
    pipeline,
    planning,
    pool,
    postbalance,
    recompute,
    rehearsal,
    remat,
    spmd,
    start,
)
from mmjax.benchmarks.harness import Measurement, add_options, check_options
from mmjax.console import print_lines, table
from mmjax.errors import check_output, command_parser, exit_process, run_command

# Benchmarks whose run() returns a list of rows, one per variant.
COMPARISONS: dict[str, Any] = {
    "allocation": allocation,
    "attention": attention,
    "compile": compile_time,
    "coordination": coordination,
    "fill": fill,
    "frozen": frozen,
    "gpu": gpu,
    "headers": headers,
    "memory": memory,
    "peer": peer,
    "phases": phases,
    "pool": pool,
    "recompute": recompute,
    "rehearsal": rehearsal,
    "remat": remat,
    "spmd": spmd,
    "start": start,
}
# Benchmarks whose run() returns one Measurement.
MEASUREMENTS: dict[str, Any] = {
    "balance-run": balance_run,
    "context": context,
    "dispatch": dispatch,
    "grouping": grouping,
    "nodewise": nodewise,
    "papers": papers,
    "pipeline": pipeline,
    "planning": planning,
    "postbalance": postbalance,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("bench", __doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in sorted((COMPARISONS | MEASUREMENTS).items()):
        options = names.add_parser(
            name, help=benchmark.__doc__, description=benchmark.__doc__, allow_abbrev=False
        )
        json_type = "list" if name in COMPARISONS else "object"
        options.add_argument(
            "--json", action="store_true", help=f"print one JSON {json_type} and nothing else"
        )
        if name in MEASUREMENTS:
            options.add_argument(
                "--out", type=Path, metavar="F.npz", help="write what the figures follow from"
            )
        add_options(options, benchmark.OPTIONS)
    args = parser.parse_args(argv)
    check_options(args, (COMPARISONS | MEASUREMENTS)[args.name].OPTIONS)
    if args.name in COMPARISONS:
        _print_comparison(COMPARISONS[args.name].run(args), args.json)
        return
    if args.out is not None:
        check_output("--out", args.out)
    _print_measurement(MEASUREMENTS[args.name].run(args), args.json, args.out)


def _print_comparison(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_lines(_to_json(rows))
        return
    print_lines(
        *table(
            [tuple(rows[0]), *(tuple(map(_format_cell, row.values())) for row in rows)], indent=""
        )
    )


def _print_measurement(measured: Measurement, as_json: bool, out: Path | None) -> None:
    if out is not None:
        with out.open("wb") as file:  # given a name, NumPy would append .npz to it
            np.savez(file, **measured.arrays)
    if as_json:
        print_lines(_to_json(dict(measured.figures)))
        return
    rows, tables = [], []
    for name, value in measured.figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append(value)
        else:
            rows.append((name, _format_cell(value), measured.paper.get(name, "")))
    print_lines(
        *table([("figure", "measured", "published" if measured.paper else ""), *rows], indent="")
    )
    for listed in tables:
        print_lines("")
        _print_comparison(listed, as_json=False)


def _to_json(figures: Any) -> str:
    return json.dumps(figures, default=lambda number: number.item())  # NumPy's


def _format_cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_cell(v)}" for name, v in value.items())
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    exit_process(run_command(main))
