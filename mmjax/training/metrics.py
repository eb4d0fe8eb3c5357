"""Numbers of each step: how full, how balanced, how fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.balance.metrics import dist_ratio, pad_ratio
from mmjax.balance.parts import LLM
from mmjax.data.layout import RankLayout
from mmjax.data.loader import LoadedStep
from mmjax.data.placement import Topology

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
