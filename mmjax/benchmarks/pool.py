"""Measure how long training waits for images that take their time: from 2 local workers, and from a pool of 8 CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.processes import SHORT, train
from mmjax.benchmarks.synthetic_run import RandomSamples
from mmjax.data.sample import SampleLengths
from mmjax.errors import UserError

SAMPLES = 24  # of a step
# Computing takes so much of the delay of each image: 2 workers bring one in a half of it, 8 CPUs in
# an eighth.
COMPUTED = 0.18


def late_images(split: str, tokens: int, images: int, seconds: float) -> RandomSamples:
    """Make samples of so many tokens and tiny images, of which each takes a while to read, as from slow storage."""
    # Of the other splits only a few are read, for the score at the end of a run.
    samples = 200 * SAMPLES if split == "train" else SAMPLES
    facts = SampleLengths(tokens, (("vision", (8, 8)),) * images)
    return RandomSamples([facts] * samples, vocab=30, delay=seconds)


OPTIONS: Options = {
    "--seconds": option(0.02, "that reading an image takes"),
    "--tokens": option(192, "of text in each sample"),
    "--steps": option(150, "of each training; the first third is not measured"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Train `tiny_vlm` without a delay, then late from workers, and from the pool.

    A step without a delay says how many images each sample has: as many as it computes in
    `COMPUTED` of their delay each, so that 8 CPUs keep up and 2 workers do not.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = partial(_train, args)
        first = train(folder / "first", 4, 0.0)
        images = max(1, round(first["seconds/step"] / (COMPUTED * args.seconds * SAMPLES)))
        rows = {"no delay": train(folder / "none", images, 0.0)}
        rows["2 workers"] = train(folder / "workers", images, args.seconds)
        with _cluster(8) as address:
            rows["pool of 8"] = train(folder / "pool", images, args.seconds, f"data.pool={address}")
    return [
        {"loader": loader, "images/step": images * SAMPLES} | row for loader, row in rows.items()
    ]


def _train(
    args: Namespace, folder: Path, images: int, seconds: float, *changes: str
) -> dict[str, float]:
    """Train in a process of its own; return the mean seconds of a step and the share of waiting."""
    source = "data.sources.embedded"
    words = (
        "tiny_vlm",
        *SHORT,
        f"training.steps={args.steps}",
        "data.workers=2",
        "data.prefetch=1",
        f"batch.size.count={SAMPLES}",
        f"{source}=function",
        f"{source}.function=mmjax.benchmarks.pool:late_images",
        f"{source}.arguments.tokens={args.tokens}",
        f"{source}.arguments.seconds={seconds}",
        f"{source}.arguments.images={images}",
        *changes,
    )
    measured = [r for r in train(folder, words, {}) if "data_wait_share" in r][args.steps // 3 :]
    total = sum(r["seconds/step"] for r in measured)
    wait = sum(r["seconds/data_wait"] for r in measured)
    return {"seconds/step": total / len(measured), "data_wait_share": wait / total}


@contextmanager
def _cluster(cpus: int) -> Iterator[str]:
    """Start a Ray cluster of one node on this machine, and yield its address."""
    script = (
        "import ray.cluster_utils, sys; "
        f"made = ray.cluster_utils.Cluster(True, head_node_args={{'num_cpus': {cpus}, 'include_dashboard': False}}); "
        "print(made.address, flush=True); sys.stdin.read(); made.shutdown()"
    )
    pipe = subprocess.PIPE
    variables = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, env=variables
    ) as process:
        if not (address := process.stdout.readline().strip()):
            raise UserError("no Ray cluster could be started here; its own message is above")
        yield address  # closing its input ends it
