"""Compare the units that units=auto chooses with the papers' allocations and with one mesh, on absent H100s."""

from __future__ import annotations

import argparse
import time
from typing import Any

from mmjax.autotune.forecast import forecast_best_mesh
from mmjax.config.loading import load
from mmjax.data.plan.length_index import LengthIndex, index_of_lengths, omni_corpus
from mmjax.pipeline.choose_units import allocation_problem, choose_units
from mmjax.planning.allocate import allocate
from mmjax.planning.allocation_baselines import allocate_by_flops, allocate_mmscale
from mmjax.planning.hardware import Cluster, parse_cluster
from mmjax.planning.step_time import Speed

CONFIGS = ("omni_10b", "internvl_26b", "omni_84b")
CLUSTERS = ("h100x8", "h100x8x8", "h100x320x8")
SAMPLES = 200_000  # whose lengths are drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--config", choices=CONFIGS, action="append", help="default: all")
    parser.add_argument("--cluster", action="append", help=f"default: {', '.join(CLUSTERS)}")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one row for each config and cluster.

    Seconds of a step: `simulated` by the search of its own choice, of MMScale's (section 4.2) and of devices by FLOPs;
    `units` and `one_mesh` as `mmjax.plan` forecasts both. `search`: CPU seconds that the search takes. A field is None
    where nothing fits.
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
    began = time.process_time()
    allocate(problem)
    search = time.process_time() - began
    found = {"simulated": ours, "mmscale": allocate_mmscale(problem), "by_flops": allocate_by_flops(problem)}
    units = choose_units(config, cluster, index, [1.0], lambda _: speed)
    mesh = forecast_best_mesh(config, cluster, index, [1.0], speed)
    return {
        "config": name,
        "cluster": str(cluster),
        "search": round(search, 2),
        **{key: None if allocation is None else allocation.seconds for key, allocation in found.items()},
        "units": None if units is None else units.seconds,
        "one_mesh": None if mesh is None else mesh.time.total,
    }
