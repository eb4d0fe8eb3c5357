"""Race mmjax against transformers' Trainer and PEFT on one GPU, for `bench gpu`: the same samples and weights."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmjax.benchmarks.gpu_kernels import Sizes
from mmjax.benchmarks.harness import timed
from mmjax.benchmarks.peer import INSTALL, missing_libraries, prepare
from mmjax.benchmarks.peer_process import Task

SECONDS = 170.0  # of a race; what has not ended by then is left out
BATCH = 16  # samples of a step
TURNS = (1, 1, 4)  # steps: the first one, one that is not timed either, and those that are
Replies = Sequence[dict[str, Any]]


def measure_race(sizes: Sizes, name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Race on a set of samples: mmjax, the Trainer in all its forms, and mmjax once more where time remains.

    name: the model's size, the set and what is tuned. One after the other in processes of their own,
    since each takes as much of the GPU's memory as it can get. changes: to mmjax's config.
    """
    if missing := missing_libraries():
        return {"skipped": f"needs {missing}; install with: {INSTALL}"}
    if not sizes.tiny and not importlib.import_module("torch").cuda.is_available():
        return {"skipped": "the torch that is installed finds no GPU"}
    size, data, tune = ("tiny", "tiny", name.split()[2]) if sizes.tiny else name.split()
    deadline = time.monotonic() + (math.inf if sizes.tiny else SECONDS)
    batch = 2 if sizes.tiny else BATCH
    steps = [{"steps": count} for count in TURNS]
    variables = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        prepare(folder, [data], [size], batch * (1 + sum(TURNS)), 0, variables)
        task = Task(
            folder="",
            checkpoint=str(folder / size),
            data=str(folder / "data" / data),
            tune=tune,
            precision="bfloat16",
            batch=batch,
            seed=0,
            changes=changes,
        )

        def run(side: str, place: Path, requests: Replies) -> Replies:
            """Run a side to its end, or until the deadline; return the replies that it made."""
            place.mkdir()
            file = place / "task.json"
            file.write_text(json.dumps(asdict(replace(task, folder=str(place), requests=requests))))
            command = [sys.executable, "-m", f"mmjax.benchmarks.peer_{side}", str(file)]
            replies = place / "replies"
            remaining = None if sizes.tiny else max(deadline - time.monotonic(), 1)
            with replies.open("w") as out, suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=variables, stdout=out, timeout=remaining, check=False)
            lines = replies.read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]

        ours, seconds = timed(run, "mmjax", folder / "mmjax", steps)
        if len(ours) <= len(TURNS):
            return {"error": f"mmjax replied {len(ours)} times in {seconds:.0f} s"}
        numbers = ours[1]["numbers"]
        theirs = run("trainer", folder / "trainer", [{"loss_of": numbers}, *steps])
        again = time.monotonic() + seconds < deadline
        return race_figures(
            ours, theirs, run("mmjax", folder / "again", steps) if again else []
        ) | {"mmjax, all of its run, s": seconds}


def race_figures(ours: Replies, theirs: Replies, again: Replies) -> dict[str, Any]:
    """Compare what both sides replied; the best of the Trainer's forms is the rival."""
    trainings = {"mmjax": ours, "mmjax again": again}
    figures = {"mmjax, loss of its first samples": ours[1]["loss"]}
    for form, replies in itertools.groupby(theirs, _form):
        counted = []
        for reply in replies:
            if "positions" in reply:
                counted.append(reply)
            else:
                figures["Trainer, loss of mmjax's first samples"] = reply["loss"]
        trainings[form] = counted
    rates = {}
    for label, replies in trainings.items():
        # A form whose batch had no room is followed by one of half the batch.
        if len(replies) <= len(TURNS):
            continue
        before, first, untimed, last = replies
        seconds = last["clock"] - untimed["clock"]
        rates[label] = last["tokens"] / seconds
        figures |= {
            f"{label}, tokens/s": rates[label],
            f"{label}, samples/s": last["samples"] / seconds,
            f"{label}, padding": 1 - last["tokens"] / last["positions"],
            f"{label}, GB": last["GB"],
            f"{label}, first step, s": first["clock"] - before["clock"],
        }
    if not theirs:
        figures["Trainer"] = "made no step in time, or ended with an error"
    if forms := rates.keys() - {"mmjax", "mmjax again"}:
        best = max(forms, key=lambda label: rates[label])
        figures["best of the Trainer"] = best
        figures["mmjax / best of the Trainer, tokens/s"] = rates["mmjax"] / rates[best]
    return figures


def _form(reply: Mapping[str, Any]) -> str:
    order = "grouped by length" if reply["strategy"] == "group_by_length" else "padded"
    kind = "checkpointing" if reply["checkpointing"] else "no checkpointing"
    return f"Trainer, {order}, {kind}, {reply['batch']} at once, {reply['attention']}"
