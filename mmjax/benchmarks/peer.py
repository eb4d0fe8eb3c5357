"""Race mmjax against transformers' Trainer and PEFT: the same samples and weights, in turns on one CPU core."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.peer_data import write_records
from mmjax.benchmarks.peer_process import Side, Task, environment_of_side
from mmjax.benchmarks.processes import end_with_error
from mmjax.console import print_note
from mmjax.errors import UserError, check_output

BATCH = 8  # samples
WARM_STEPS = 2
TOLERANCE = 1e-5  # of first losses in float32, over the loss; bfloat16 rounds differently
TOLERANCE_BFLOAT16 = 1e-2
LIBRARIES = ("torch", "transformers", "peft", "accelerate")
INSTALL = 'pip install "mmjax[peer]"'
STRATEGIES = {"padded": "random", "grouped": "group_by_length"}  # Trainer's train_sampling_strategy


@dataclass(frozen=True)
class Case:
    """One race. against: the ways in which the Trainer draws samples, each a training of its own."""

    data: str = "uneven"
    size: str = "small"
    tune: str = "full"
    dtype: str = "float32"
    against: tuple[str, ...] = ("padded", "grouped")

    def __str__(self) -> str:
        return f"{self.data} {self.size} {self.tune} {self.dtype}"


# A side's reply to a request: its samples, their tokens in the LLM without padding, the positions of
# the LLM's rows; seconds by the clock (`wall`), of the CPU in all its processes (`cpu`) and in those
# that it has started (`workers`); the loss of its last step and the numbers of its samples.
Turn = dict[str, Any]
FIGURES = {  # of a row: what is divided by what, both summed over turns
    "tokens/CPU s": ("tokens", "cpu"),
    "samples/s": ("samples", "wall"),
    "useful": ("tokens", "positions"),
    "loading": ("workers", "cpu"),
}


@dataclass(frozen=True)
class Race:
    """Hold the rows of a case, and by side the tokens trained on and the loss after its first step and every turn."""

    case: Case
    rows: list[dict[str, Any]]
    losses: dict[str, list[tuple[int, float]]]


STANDARD = (
    Case(),
    Case(data="near-equal", against=("padded",)),
    Case(tune="lora", against=("padded",)),
    Case(data="text", against=("padded",)),
)
TINY = Case(data="tiny", size="tiny", against=("padded",))


OPTIONS: Options = {
    "--data": option(
        None,
        "sets of samples; all combinations of what is named; without any: the usual ones",
        choices=("uneven", "near-equal", "text"),
        nargs="+",
    ),
    "--sizes": option(None, "7.8 or 20.9 million parameters", choices=("small", "mid"), nargs="+"),
    "--tune": option(choices=("full", "lora"), nargs="+"),
    "--dtypes": option(choices=("float32", "bfloat16"), nargs="+"),
    "--against": option(
        None, "how the Trainer draws samples", choices=tuple(STRATEGIES), nargs="+"
    ),
    "--segments": option(5, "times that each side has its turn", minimum=1),
    "--steps": option(6, "of a turn", minimum=1),
    "--records": option(240, "samples of a set, each step has 8", minimum=BATCH),
    "--start": option(
        False, "also time how long both sides take to their first step, cold and warm"
    ),
    "--core": option(
        None, "that both sides are pinned to, or several; default: the first", type=int, nargs="+"
    ),
    "--huge-pages": option(False, "give the Trainer the huge pages that mmjax takes"),
    "--picture": option(
        None, "draw tokens a second, and the first losses", metavar="F.png|svg", type=Path
    ),
    "--seed": option(0, minimum=0),
    "--tiny": option(False, "one small race, to see that it runs"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Run all races; return a row for each and each way in which the Trainer draws samples."""
    _check(args)
    cases = _cases(args)
    cores = set(args.core or [min(os.sched_getaffinity(0))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = sorted({case.data for case in cases})
        sizes = sorted({case.size for case in cases})
        prepare(folder, sets, sizes, args.records, args.seed, environment_of_side(1))
        races = [_race(folder, number, case, cores, args) for number, case in enumerate(cases)]
    if args.picture is not None:
        _draw(args.picture, races)
    return [row for race in races for row in race.rows]


def missing_libraries() -> str:
    """Name the libraries of the Trainer's side that are not installed."""
    return " and ".join(name for name in LIBRARIES if importlib.util.find_spec(name) is None)


def _check(args: Namespace) -> None:
    if missing := missing_libraries():
        raise UserError(f"bench peer needs {missing}; install with: {INSTALL}")
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            "bench peer pins processes to a core and reads their clocks as Linux has them; run it there"
        )
    if args.picture is not None:
        check_output("--picture", args.picture, (".png", ".svg"))
    usable = os.sched_getaffinity(0)
    if other := sorted(set(args.core or ()) - usable):
        raise UserError(f"--core {other[0]}: choose of {', '.join(map(str, sorted(usable)))}")


def _cases(args: Namespace) -> Sequence[Case]:
    usual = TINY if args.tiny else Case()
    sets = (None, None) if args.tiny else (args.data, args.sizes)
    named = (*sets, args.tune, args.dtypes)
    if not args.tiny and not any((*named, args.against)):
        return STANDARD
    defaults = (usual.data, usual.size, usual.tune, usual.dtype)
    against = tuple(args.against or usual.against)
    lists = (given or [default] for given, default in zip(named, defaults, strict=True))
    return [Case(*chosen, against=against) for chosen in itertools.product(*lists)]


def prepare(
    folder: Path,
    sets: Sequence[str],
    sizes: Sequence[str],
    records: int,
    seed: int,
    variables: Mapping[str, str],
) -> None:
    """Write records, checkpoints and the Trainer's samples."""
    for name in sets:
        write_records(folder / "data" / name, name, records, seed)
    task = json.dumps([str(folder), sizes, sets, seed])
    command = [sys.executable, "-m", "mmjax.benchmarks.peer_trainer", "prepare", task]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ended.returncode:
        end_with_error(
            ended.returncode,
            ended.stderr.splitlines(),
            "the Trainer's samples could not be prepared",
        )


def _race(folder: Path, number: int, case: Case, cores: set[int], args: Namespace) -> Race:
    """Start all sides of a case, compare their first losses, and let them train in turns."""
    place = folder / f"race{number}"
    # With --start nothing is compiled at a case's first start, else Numba's programs are those of
    # other commands.
    variables = {"NUMBA_CACHE_DIR": str(place / "numba")} if args.start else {}
    if args.huge_pages:
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"

    def start(name: str, again: str = "") -> Side:
        print_note(f"{case}: {'second' if again else 'first'} start of {name}")
        task = Task(
            folder=str(place / f"{name}{again}"),
            checkpoint=str(folder / case.size),
            data=str(folder / "data" / case.data),
            tune=case.tune,
            precision=case.dtype,
            batch=BATCH,
            seed=args.seed,
            strategy=STRATEGIES.get(name, ""),
        )
        side = "mmjax" if name == "mmjax" else "trainer"
        return Side(f"mmjax.benchmarks.peer_{side}", task, cores, variables)

    names = ("mmjax", *case.against)
    starts: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(closing(start(name))) for name in names}
        first = sides["mmjax"].request(steps=1)
        starts["cold start s"] = {"mmjax": sides["mmjax"].start_seconds + first["wall"]}
        errors = {}
        untimed = {"mmjax": [first]}
        for name in case.against:
            errors[name] = _compare(case, first, sides[name].request(loss_of=first["numbers"]))
            untimed[name] = [sides[name].request(steps=1)]
            starts["cold start s"][name] = sides[name].start_seconds + untimed[name][0]["wall"]
        for name, side in sides.items():
            untimed[name].append(side.request(steps=WARM_STEPS))
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for turn in range(args.segments):
            for name, side in sides.items():
                turns[name].append(side.request(steps=args.steps))
            rates = (f"{name} {_ratio(turns[name][-1:], 'tokens', 'cpu'):.0f}" for name in names)
            print_note(
                f"{case}: turn {turn + 1} of {args.segments}, tokens a CPU second: {', '.join(rates)}"
            )
        memory = {name: side.peak_memory() / 1e9 for name, side in sides.items()}
    if not args.start:
        starts = {}
    else:
        starts["warm start s"] = {}
        for name in names:
            with closing(start(name, "again")) as side:
                starts["warm start s"][name] = side.start_seconds + side.request(steps=1)["wall"]
    rows = [
        _row(case, name, turns, {"GB": memory} | starts) | {"loss error": errors[name]}
        for name in case.against
    ]
    return Race(case, rows, {name: _losses([*untimed[name], *turns[name]]) for name in names})


def _losses(turns: Sequence[Turn]) -> list[tuple[int, float]]:
    """Return the tokens trained on and the last step's loss after every turn."""
    tokens = itertools.accumulate(turn["tokens"] for turn in turns)
    return [(count, turn["loss"]) for count, turn in zip(tokens, turns, strict=True)]


def _draw(path: Path, races: Sequence[Race]) -> None:
    from mmjax.reporting.plots import plot_race  # Matplotlib takes a second

    rates = {}
    for race in races:
        for row in race.rows:
            name = f"{row['data']}, LoRA" if row["tune"] == "lora" else row["data"]
            name += "" if row["dtype"] == "float32" else f", {row['dtype']}"
            name += "" if row["size"] == "small" else f", {row['size']}"
            by_length = " (by length)" if row["Trainer"] == "grouped" else ""
            rates[f"{name}{by_length}"] = tuple(row["tokens/CPU s"].values())
    first = races[0]
    names = {"mmjax": "mmjax", "padded": "Trainer", "grouped": "Trainer, grouped by length"}
    plot_race(
        path, rates, {names[name]: losses for name, losses in first.losses.items()}, str(first.case)
    )


def _compare(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the relative difference of the losses of the same samples. Raises UserError where it is too large."""
    if ours["tokens"] != theirs["tokens"]:
        raise UserError(
            f"{case}: the same samples have {ours['tokens']} tokens in mmjax and {theirs['tokens']} there"
        )
    error = abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"])
    if not error <= (TOLERANCE if case.dtype == "float32" else TOLERANCE_BFLOAT16):
        raise UserError(
            f"{case}: the first losses differ by {error:.2g} of {theirs['loss']:.6f}, mmjax has {ours['loss']:.6f}"
        )
    return error


def _row(
    case: Case, name: str, turns: dict[str, list[Turn]], figures: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Compare mmjax with a Trainer. figures: of both by side."""
    both = {"mmjax": turns["mmjax"], "Trainer": turns[name]}
    ratios = [
        _ratio([ours], "tokens", "cpu") / _ratio([theirs], "tokens", "cpu")
        for ours, theirs in zip(*both.values(), strict=True)
    ]
    compared = {
        figure: {side: _ratio(of_side, *names) for side, of_side in both.items()}
        for figure, names in FIGURES.items()
    }
    padding = {side: 1 - useful for side, useful in compared.pop("useful").items()}
    rates = compared["tokens/CPU s"]
    return {
        "data": case.data,
        "size": case.size,
        "tune": case.tune,
        "dtype": case.dtype,
        "Trainer": name,
        "ratio": rates["mmjax"] / rates["Trainer"],
        "min": min(ratios),
        "median": statistics.median(ratios),
        "max": max(ratios),
        **compared,
        "padding": padding,
        **{
            figure: {"mmjax": values["mmjax"], "Trainer": values[name]}
            for figure, values in figures.items()
        },
    }


def _ratio(turns: Sequence[Turn], figure: str, over: str) -> float:
    """Divide a figure by another one, both summed over turns."""
    return sum(turn[figure] for turn in turns) / sum(turn[over] for turn in turns)
