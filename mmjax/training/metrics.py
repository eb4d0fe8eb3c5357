"""Numbers of each step: how full, how balanced, how fast; kept as JSON lines and TensorBoard scalars."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter

from mmjax.balance.metrics import dist_ratio, pad_ratio
from mmjax.data.pipeline import LoadedStep

Scalars = dict[str, float]


def balance_scalars(loaded: LoadedStep, rows: Mapping[str, int], ranks: int) -> Scalars:
    """Fill, pad ratio and dist ratio of every phase of a step (OmniBal eq. 1 and 2, over rows and over ranks).

    rows: of every module in a microbatch, the LLM first. All of them count, whichever process holds them.
    """
    scalars: Scalars = {}
    useful = budget = 0
    for k, (module, count) in enumerate(rows.items()):
        of_rows = [u[k, :count] for u in loaded.useful]
        room = sum(count * int(length[k]) for length in loaded.lengths)
        used = int(sum(r.sum() for r in of_rows))
        scalars[f"fill/{module}"] = used / room
        scalars[f"pad_ratio/{module}"] = float(np.mean([pad_ratio(r) if r.any() else 0.0 for r in of_rows]))
        by_rank = sum(_per_rank(r, ranks) for r in of_rows)
        scalars[f"dist_ratio/{module}"] = float(dist_ratio(by_rank)) if by_rank.any() else 0.0
        useful, budget = useful + used, budget + room
    return scalars | {"useful/budget": useful / budget}


def _per_rank(rows: np.ndarray, ranks: int) -> np.ndarray:
    padded = np.pad(rows, (0, -len(rows) % ranks))
    return padded.reshape(ranks, -1).sum(1)


class MetricsLog:
    """Writes every record to `metrics.jsonl` and to TensorBoard; a record's step is the number of updates done.

    Opened after `done` updates, it drops what an earlier life recorded beyond them, so that no step stands there twice.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= done]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.rename(path)
        self._file = path.open("a", buffering=1)
        self._board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=done + 1)

    def write(self, step: int, scalars: Mapping[str, float | str]) -> None:
        """One record. NaN and Inf are kept as strings: JSON has none."""
        record = {"step": step, "time": round(time.time(), 3)}
        record |= {k: _plain(v) for k, v in scalars.items()}
        self._file.write(json.dumps(record) + "\n")
        for key, value in scalars.items():
            if not isinstance(value, str):
                self._board.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Flush both."""
        self._file.close()
        self._board.close()


def _plain(value: float | str) -> float | str:
    if isinstance(value, str):
        return value
    value = float(value)
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut off when its process was killed
        return math.inf
