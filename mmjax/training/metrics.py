"""Measure the balance of each step: fill of rows, work per rank, bytes exchanged."""

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
    """Measure the fill of a step's rows and the balance of its ranks, whichever process holds them.

    By module: fill, pad ratio (OmniBal eq. 1), dist ratio over ranks (eq. 2) and the fullest rank over the mean one;
    the latter two also as they would be with balance `none`. straggler_wait: the share of the step in which a rank
    waits, on average, for the fullest one of each phase. flops: float64 `[modules]`, per position; they weigh the
    phases.
    """
    ranks = layout.topology.ranks
    scalars = Scalars()
    # All devices of a rank share its part of the LLM, while each encoder rank has its own part.
    weights = np.where(np.arange(len(modules)) == LLM, flops / layout.topology.encoders_per_rank, flops)
    useful = budget = 0
    for k, module in enumerate(modules):
        rows = ranks * layout.rows[k]
        used = [work.useful[k, :rows] for work in loaded.work]  # useful positions of each row, by microbatch
        positions = sum(rows * int(work.lengths[k]) for work in loaded.work)
        module_useful = int(sum(u.sum() for u in used))
        scalars[f"fill/{module}"] = module_useful / positions
        scalars[f"pad_ratio/{module}"] = float(np.mean([pad_ratio(u) if u.any() else 0.0 for u in used]))
        useful += module_useful
        budget += positions
    for suffix, field in (("", "balanced"), ("_before", "unbalanced")):
        by_rank = sum(getattr(work, field) for work in loaded.work)
        for k, module in enumerate(modules):
            any_work = by_rank[k].any()
            scalars[f"dist_ratio{suffix}/{module}"] = float(dist_ratio(by_rank[k])) if any_work else 0.0
            maximum_over_mean = by_rank[k].max() / by_rank[k].mean() if any_work else 1.0
            scalars[f"max_over_mean{suffix}/{module}"] = float(maximum_over_mean)
        # Ranks wait for each other between phases, so a step takes the sum of the phases' maxima.
        scalars[f"straggler_wait{suffix}"] = float(1 - weights @ by_rank.mean(1) / (weights @ by_rank.max(1)))
    return scalars | {"useful/budget": useful / budget}


def exchange_scalars(loaded: LoadedStep, encoders: Sequence[str], topology: Topology, token_bytes: int) -> Scalars:
    """Count the bytes that the all-to-alls of a step's forward pass send between ranks, with and without padding.

    The backward pass sends as much. token_bytes: of one encoder token.
    """
    ranks = topology.ranks
    peers = topology.peers
    # Every rank sends `widths` tokens to each of its other peers, filled or not.
    sent = sum(work.widths for work in loaded.work) * ranks * (peers - 1) * token_bytes
    useful = sum(work.moved for work in loaded.work) * token_bytes
    scalars = {f"all_to_all_bytes/{e}": float(n) for e, n in zip(encoders, sent, strict=True)}
    scalars |= {f"all_to_all_useful_bytes/{e}": float(n) for e, n in zip(encoders, useful, strict=True)}
    # Share of a rank's other peers that are on other nodes.
    away = max(0, peers - topology.ranks_per_node) / max(1, peers - 1)
    return scalars | {"inter_node_share": away if sent.any() else 0.0}
