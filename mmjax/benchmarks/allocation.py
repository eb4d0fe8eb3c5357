"""Compare the units that units=auto chooses with the papers' allocations and with one mesh, on absent H100s."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from typing import Any

from mmjax.autotune.choose_units import allocation_problem, choose_units
from mmjax.benchmarks.baselines.allocation import (
    allocate_by_flops,
    allocate_colocated,
    allocate_loosely,
    allocate_mmscale,
    allocate_replicated,
)
from mmjax.benchmarks.harness import Options, option, timed
from mmjax.config.loading import load
from mmjax.data.plan.length_files import index_of_lengths, omni_corpus
from mmjax.data.plan.length_index import LengthIndex
from mmjax.planning.allocate import allocate
from mmjax.planning.allocate_chain import allocate_chain
from mmjax.planning.hardware import Cluster, parse_cluster
from mmjax.planning.speed import Speed

CONFIGS = ("omni_10b", "internvl_26b", "omni_84b")
CLUSTERS = ("h100x8", "h100x8x8", "h100x320x8")
SAMPLES = 200_000  # whose lengths are drawn
BASELINES = {
    "mmscale": allocate_mmscale,
    "by_flops": allocate_by_flops,
    "loosely": allocate_loosely,
    "colocated": allocate_colocated,
    "replicated": allocate_replicated,
}


OPTIONS: Options = {
    "--config": option(None, "default: all", choices=CONFIGS, action="append"),
    "--cluster": option(None, f"default: {', '.join(CLUSTERS)}", action="append"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each config and cluster.

    Seconds of a step, None where nothing fits: `simulated` by the search of its own choice of units
    for one tower each, `chain` of one that is cut anywhere, then of the papers' allocations in the
    same simulator; `units`, the fastest of these two and of encoders beside the LLM, and `one_mesh`
    as `mmjax.plan` forecasts them, and `chosen`, the faster of these. `never_slower`: than
    MMScale's allocation, devices by FLOPs and one mesh. `search`: CPU seconds.
    """
    rows = []
    for name in args.config or CONFIGS:
        config = load(name)
        index = index_of_lengths(omni_corpus(SAMPLES, config.seed), config.model.encoders)
        rows += [_compare(name, parse_cluster(text), index) for text in args.cluster or CLUSTERS]
    return rows


def _compare(name: str, cluster: Cluster, index: LengthIndex) -> dict[str, Any]:
    config = load(name)
    speed = Speed(cluster.device.rates(config.training.precision))
    problem = allocation_problem(config, cluster, index, [1.0], lambda _: speed)
    ours = allocate(problem)  # compiles, where nothing has before
    _, search = timed(allocate, problem, clock=time.process_time)
    allocations = {
        "simulated": ours,
        "chain": allocate_chain(problem),
        **{name: baseline(problem) for name, baseline in BASELINES.items()},
    }
    simulated = {
        key: None if allocation is None else allocation.seconds
        for key, allocation in allocations.items()
    }
    chosen_units, mesh = choose_units(config, cluster, index, [1.0], lambda _: speed)
    units = next(iter(chosen_units), None)
    forecast = {
        "units": None if units is None else units.chosen.seconds,
        "one_mesh": None if mesh is None else mesh.seconds,
    }
    chosen = min(forecast, key=lambda key: _or_never(forecast[key]))
    return {
        "config": name,
        "cluster": str(cluster),
        "search": round(search, 2),
        **simulated,
        **forecast,
        "chosen": None if forecast[chosen] is None else chosen,
        "never_slower": _or_never(forecast[chosen]) <= _or_never(forecast["one_mesh"])
        and all(
            _or_never(simulated["simulated"]) <= _or_never(simulated[key])
            for key in ("mmscale", "by_flops")
        ),
    }


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
