"""Rebuild the batch of a past step and look at it: ``python -m mmjax.inspect RUN --step N [--rank R] [--out FOLDER]``.

Shows sample ids, text with the trained tokens marked, images, clips, the attention mask and where
each item was encoded, from the run folder and its data alone, without an accelerator. The batch's
hash is compared with the log's. ``--ids FIRST:LAST`` lists the samples of many steps, or of all.
"""

from __future__ import annotations

import json
import re
import sys
import wave
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.console import print_lines, table
from mmjax.data.loading.replay import (
    PackedRow,
    PlacedSample,
    Replayed,
    describe_window,
    seen_by_layers,
)
from mmjax.data.plan.length_index import index_key
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.reporting.rows import item_image
from mmjax.runtime.run_dir import RunFolder, logged_records
from mmjax.runtime.run_trust import HELP as TRUST_HELP
from mmjax.training.run_data import Launch, launch_of_step, loader_of, read_launches

TRAINED = "\033[1m", "\033[0m"  # around trained tokens on a terminal; elsewhere [[ and ]]
# Grey values by `seen_by_layers`: seen by no layer, by the layers without a sliding window only, by
# all layers.
MASK_SHADES = np.array([255, 160, 0], np.uint8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("inspect", __doc__)
    parser.add_argument("run", type=Path, help="the folder that mmjax.train printed")
    shown = parser.add_mutually_exclusive_group(required=True)
    shown.add_argument("--step", type=int, help="as the log counts them, from 1")
    shown.add_argument(
        "--ids",
        nargs="?",
        const=":",
        metavar="FIRST:LAST",
        help="list the samples of these steps (default: of all)",
    )
    parser.add_argument("--rank", type=int, help="the rows of this rank alone")
    parser.add_argument("--out", type=Path, help="a folder for images, clips and masks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    args = parser.parse_args(argv)
    folder = RunFolder(args.run, trusted=args.trust)
    folder.stored_config()
    if args.ids:
        _list_ids(folder, args.ids, args.json)
        return
    replayed, launch = replay(folder, args.step)
    ranks = launch.layout.topology.ranks
    if args.rank is not None and not 0 <= args.rank < ranks:
        raise UserError(f"--rank {args.rank}: the step had {ranks} ranks; give 0 to {ranks - 1}")
    logged = record_of(folder, args.step)
    _check_readable(replayed, launch, args.step)
    rows = list(replayed.rows(args.rank))
    if args.json:
        print_lines(json.dumps(_as_json(replayed, rows, logged, args.step)))
    else:
        print_lines(*_report(replayed, launch, rows, logged, args.step))
    if args.out:
        print_lines(f"images, clips and masks are in {write(replayed, rows, args.out)}")
        if window := describe_window(launch.config.model.llm):
            print_lines(f"masks: {window}")
    if logged.get("batch", replayed.content) != replayed.content:
        raise UserError(
            f"the rows of step {args.step} hash to {replayed.content}, and {logged['batch']} was logged: the data has "
            "changed since, or this is another version of mmjax"
        )


def replay(folder: RunFolder, number: int) -> tuple[Replayed, Launch]:
    """Rebuild step `number` of a run, counted from 1. Returns it and the launch that ran it; raises UserError."""
    done = _steps_done(folder)
    if not 1 <= number <= done:
        raise UserError(f"--step {number}: {folder.path} has logged {done} steps; give 1 to {done}")
    launch = _launch_of(folder, number)
    return Replayed(loader_of(launch, folder), number - 1), launch


def _steps_done(folder: RunFolder) -> int:
    """Return the number of the last step that was logged. Raises UserError where none was."""
    done = max(
        (record["step"] for record in logged_records(folder.metrics) if "loss" in record), default=0
    )
    if not done:
        raise UserError(f"{folder.metrics} has no step yet, so there is nothing to look at")
    return done


def _launch_of(folder: RunFolder, number: int) -> Launch:
    """Find the launch that ran step `number`, counted from 1, to load its data again.

    Raises UserError where the history does not have it, and where that would execute or fetch what
    others wrote.
    """
    launch = launch_of_step(folder.history, number - 1, folder.due_samples)
    if launch is None:
        raise UserError(
            f"{folder.history} does not tell of step {number}; it is kept since runs have a history"
        )
    folder.check(launch.config)
    return launch


def step_ids(folder: RunFolder, first: int, last: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each step from `first` to `last`, counted from 1, with the names of its samples."""
    # Each launch has data and settings of its own, so the steps between two launches share a
    # loader.
    starts = sorted(
        {first}
        | {
            launch["first"] + 1
            for launch in read_launches(folder.history)
            if launch["first"] >= first
        }
    )
    for begin, end in pairwise([*starts, last + 1]):
        if begin > last:
            return
        loader = loader_of(_launch_of(folder, begin), folder)
        for number in range(begin, min(end, last + 1)):
            yield number, [loader.index.name(int(k)) for k in loader.plan(number - 1).samples()]


def _list_ids(folder: RunFolder, text: str, as_json: bool) -> None:
    """Print the samples of the steps FIRST:LAST, either of which may be left out. Raises UserError."""
    done = _steps_done(folder)
    match = re.fullmatch(r"(\d{0,15})(:?)(\d{0,15})", text)
    first = int(match[1] or 1) if match else 0
    last = int(match[3] or done) if match and match[2] else first
    if not 1 <= first <= last <= done:
        raise UserError(
            f"--ids {text}: {folder.path} has logged {done} steps; give FIRST:LAST within 1:{done}"
        )
    ids = step_ids(folder, first, last)
    if as_json:
        print_lines(json.dumps({str(number): names for number, names in ids}))
        return
    for number, names in ids:
        print_lines(f"{number}: {' '.join(names)}")


def _check_readable(replayed: Replayed, launch: Launch, number: int) -> None:
    """Raises UserError where the step cannot be rebuilt because its data has changed."""
    # Files that have changed may raise anything; the key of the index tells whether they did.
    try:
        _ = replayed.loaded
    except Exception as error:
        loader = replayed.loader
        model = loader.config.model
        if index_key(loader.sources, model.item_modules, model.llm) == launch.index:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"step {number} cannot be made again: the data has changed since; restore it ({reason[:200]})"
        ) from error


def record_of(folder: RunFolder, number: int) -> dict[str, Any]:
    """Read the logged metrics of a step, empty if there are none."""
    for record in logged_records(folder.metrics):
        if record["step"] == number and "loss" in record:
            return record
    return {}


def _report(
    replayed: Replayed,
    launch: Launch,
    rows: Sequence[PackedRow],
    logged: dict[str, Any],
    number: int,
) -> Iterator[str]:
    """Format a step for a person."""
    topology = launch.layout.topology
    yield (
        f"step {number}: {len(replayed.plan.samples())} samples on {topology.ranks} rank(s), "
        f"{len(replayed.plan.microbatches)} microbatch(es); run from step {launch.first + 1} on by {launch.processes} "
        f"process(es), {launch.devices}"
    )
    if not logged:
        yield f"batch {replayed.content}; nothing was logged of it"
    else:
        same = (
            "as it was logged"
            if logged.get("batch") == replayed.content
            else f"LOGGED AS {logged.get('batch')}"
        )
        norm = logged.get("gradient_norm", "not logged")
        yield f"batch {replayed.content}, {same}; loss {logged['loss']}, gradient norm {norm}"
        if worst := logged.get("worst"):
            yield "worst losses: " + ", ".join(f"{name} {loss}" for name, loss in worst.items())
    for unreadable, reason in replayed.loaded.unreadable.items():
        yield f"left out: {replayed.loader.index.name(unreadable)}: {reason}"
    for row in rows:
        used = sum(s.end - s.begin for s in row.samples)
        yield f"microbatch {row.microbatch}, rank {row.rank}, row {row.row}: {used} of {row.length} positions"
        for sample in row.samples:
            yield f"  {sample.begin}-{sample.end}  {sample.name}"
            yield f"    {_marked_text(replayed, sample)}"
            items = [
                (
                    f"item {i.number}",
                    i.encoder,
                    f"rank {i.rank}, row {i.row}",
                    f"{i.begin}-{i.begin + i.positions}",
                )
                for i in sample.items
            ]
            yield from table(items, indent="    ") if items else ()


def _marked_text(replayed: Replayed, sample: PlacedSample) -> str:
    """Format a sample's text on one line with the trained tokens marked."""
    begin, end = TRAINED if sys.stdout.isatty() else ("[[", "]]")
    pieces = replayed.pieces(sample.id)
    return "".join(f"{begin}{p.text}{end}" if p.trained else p.text for p in pieces).replace(
        "\n", "\\n"
    )


def _as_json(
    replayed: Replayed, rows: Sequence[PackedRow], logged: dict[str, Any], number: int
) -> dict[str, Any]:
    """Build the JSON object of `--json`."""
    return {
        "step": number,
        "batch": replayed.content,
        "logged": logged.get("batch"),
        "samples": [replayed.loader.index.name(int(k)) for k in replayed.plan.samples()],
        "rows": [
            {
                "microbatch": row.microbatch,
                "rank": row.rank,
                "row": row.row,
                "length": row.length,
                "samples": [
                    {
                        "sample": s.name,
                        "begin": s.begin,
                        "end": s.end,
                        "text": [
                            [p.text, p.trained, p.branch, p.item] for p in replayed.pieces(s.id)
                        ],
                        "items": [vars(item) for item in s.items],
                    }
                    for s in row.samples
                ],
            }
            for row in rows
        ],
    }


def write(replayed: Replayed, rows: Sequence[PackedRow], out: Path) -> Path:
    """Write every item as an image or a clip, and every row's mask as an image with a line per query."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out}: {error.strerror}; name a folder that you may write"
        ) from None
    for row in rows:
        name = f"microbatch{row.microbatch}-rank{row.rank}-row{row.row}"
        layers = seen_by_layers(replayed.text_of(row), replayed.loader.config.model.llm)
        Image.fromarray(MASK_SHADES[layers]).save(out / f"{name}-mask.png")
        for sample in row.samples:
            for item in sample.items:
                stem = f"{name}-{sample.name}-item{item.number}"
                encoder = replayed.loader.config.model.item_modules[item.encoder]
                try:
                    value = replayed.item(sample.id, item.number)
                except (OSError, ValueError):  # its sample was left out, as is printed above
                    continue
                if encoder.modality == "audio":
                    _write_clip(out / f"{stem}.wav", value, encoder.clips.sample_rate)
                else:
                    item_image(value).save(out / f"{stem}.png")
    return out


def _write_clip(path: Path, samples: np.ndarray, rate: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    exit_process(run_command(main))
