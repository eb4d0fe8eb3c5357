"""Numbers of each step: how full, how balanced, how fast; kept as JSON lines and TensorBoard scalars."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmjax.balance.metrics import dist_ratio, pad_ratio
from mmjax.balance.parts import LLM
from mmjax.data.layout import RankLayout
from mmjax.data.pipeline import LoadedStep
from mmjax.data.placement import Topology
from mmjax.errors import UserError

Scalars = dict[str, float]


def balance_scalars(loaded: LoadedStep, modules: Sequence[str], layout: RankLayout, flops: np.ndarray) -> Scalars:
    """How full and how equal the rows and ranks of a step are, whichever process holds them.

    By module: fill, pad ratio (OmniBal eq. 1), dist ratio over ranks (eq. 2) and the fullest rank over the mean one,
    these two also as they would be with balance `none`. straggler_wait: the share of the step in which a rank waits,
    on average, for the fullest one of each phase. flops: float64 `[modules]`, of a position; they weigh the phases.
    """
    ranks, scalars = layout.topology.ranks, Scalars()
    # All devices of a rank share its part of the LLM, and each encoder rank has a part for itself.
    weights = np.where(np.arange(len(modules)) == LLM, flops / layout.topology.encoders_per_rank, flops)
    useful = budget = 0
    for k, module in enumerate(modules):
        rows = ranks * layout.rows[k]
        of_rows = [work.useful[k, :rows] for work in loaded.work]
        room = sum(rows * int(work.lengths[k]) for work in loaded.work)
        used = int(sum(r.sum() for r in of_rows))
        scalars[f"fill/{module}"] = used / room
        scalars[f"pad_ratio/{module}"] = float(np.mean([pad_ratio(r) if r.any() else 0.0 for r in of_rows]))
        useful, budget = useful + used, budget + room
    for suffix, by_rank in (("", _summed(loaded, "balanced")), ("_before", _summed(loaded, "unbalanced"))):
        for k, module in enumerate(modules):
            some = by_rank[k].any()
            scalars[f"dist_ratio{suffix}/{module}"] = float(dist_ratio(by_rank[k])) if some else 0.0
            scalars[f"max_over_mean{suffix}/{module}"] = float(by_rank[k].max() / by_rank[k].mean()) if some else 1.0
        scalars[f"straggler_wait{suffix}"] = float(1 - weights @ by_rank.mean(1) / (weights @ by_rank.max(1)))
    return scalars | {"useful/budget": useful / budget}


def exchange_scalars(loaded: LoadedStep, encoders: Sequence[str], topology: Topology, token_bytes: int) -> Scalars:
    """What the all-to-alls of a step's forward pass send between ranks, padding included, and what of it is needed.

    The backward pass sends as much. token_bytes: of one encoder token.
    """
    ranks, peers = topology.ranks, topology.peers
    widths, moved = (sum(getattr(work, f) for work in loaded.work) for f in ("widths", "moved"))
    sent = widths * ranks * (peers - 1) * token_bytes
    scalars = {f"all_to_all_bytes/{e}": float(n) for e, n in zip(encoders, sent, strict=True)}
    scalars |= {f"all_to_all_useful_bytes/{e}": float(n * token_bytes) for e, n in zip(encoders, moved, strict=True)}
    # Of a rank's peers, those on other nodes.
    away = max(0, peers - topology.ranks_per_node) / max(1, peers - 1)
    return scalars | {"inter_node_share": away if sent.any() else 0.0}


def _summed(loaded: LoadedStep, field: str) -> np.ndarray:
    return sum(getattr(work, field) for work in loaded.work)


class MetricsLog:
    """Writes every record to `metrics.jsonl` and to TensorBoard; a record's step is the number of updates done.

    Opened after `done` updates, it drops what an earlier life recorded beyond them, so that no step stands there twice.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        if path.is_dir():
            raise UserError(f"{path} is a folder, and the steps are to be written there; remove it")
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= done]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.rename(path)
        self._file = path.open("a", buffering=1)
        from tensorboardX import SummaryWriter  # which imports PyTorch where that is installed, in seconds

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
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # cut off when its process was killed
        return math.inf
