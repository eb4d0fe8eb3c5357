"""Measure how long training waits for images that take their time: from 2 local workers, and from a pool of 8 CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.benchmarks.harness import Options, option
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.disk import read_json_lines
from mmjax.errors import UserError

SAMPLES = 24  # of a step
# Computing takes so much of the delay of each image: 2 workers bring one in a half of it, 8 CPUs in an eighth.
COMPUTED = 0.18


class LateImages:
    """A `Source` of tiny images, of which each takes a while to read, as from slow storage."""

    def __init__(self, split: str, tokens: int, images: int, seconds: float) -> None:
        """tokens, images: of a sample."""
        # Of the other splits only a few are read, for the score at the end of a run.
        self._samples = 200 * SAMPLES if split == "train" else SAMPLES
        self._tokens = tokens
        self._images = images
        self._seconds = seconds

    def __len__(self) -> int:
        return self._samples

    def fingerprint(self) -> str:
        return f"late {self._tokens} {self._images}"

    def facts(self, index: int) -> SampleLengths:
        return SampleLengths(self._tokens, (("vision", (8, 8)),) * self._images)

    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(2, 30, self._tokens).astype(np.int32)
        images = [Item("vision", number) for number in range(self._images)]
        return Sample((*images, Text(tokens, np.ones(self._tokens, np.float32))))

    def item(self, index: int, number: int) -> np.ndarray:
        time.sleep(self._seconds)
        return np.random.default_rng(index).integers(0, 256, (8, 8, 1)).astype(np.uint8)


OPTIONS: Options = {
    "--seconds": option(0.02, "that reading an image takes"),
    "--tokens": option(192, "of text in each sample"),
    "--steps": option(150, "of each training; the first third is not measured"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Train `tiny_vlm` without a delay, then late from workers, and from the pool.

    A step without a delay says how many images each sample has: as many as it computes in `COMPUTED` of their delay
    each, so that 8 CPUs keep up and 2 workers do not.
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
    return [{"loader": loader, "images/step": images * SAMPLES} | row for loader, row in rows.items()]


def _train(args: Namespace, folder: Path, images: int, seconds: float, *changes: str) -> dict[str, float]:
    """Train in a process of its own; return the mean seconds of a step and the share of waiting."""
    source = "data.sources.embedded"
    command = [
        sys.executable, "-m", "mmjax.train", "tiny_vlm", f"run={folder}", f"training.steps={args.steps}",
        "schedule.warmup=0", "training.evaluate_every=0", "training.checkpoint_every=0", "data.workers=2",
        "data.prefetch=1", f"batch.size.count={SAMPLES}",
        f"{source}=function", f"{source}.function=mmjax.benchmarks.pool:LateImages",
        f"{source}.arguments.tokens={args.tokens}",
        f"{source}.arguments.seconds={seconds}", f"{source}.arguments.images={images}", *changes,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"the run did not end well: {ended.stderr.strip().splitlines()[-1]}")
    measured = [r for r in read_json_lines(folder / "metrics.jsonl") if "data_wait_share" in r][args.steps // 3 :]
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
    variables = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, env=variables) as process:
        if not (address := process.stdout.readline().strip()):
            raise UserError("no Ray cluster could be started here; its own message is above")
        yield address  # closing its input ends it
