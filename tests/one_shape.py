"""Plans of runs on one mesh whose rows have given lengths, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import layout_of_rows, on_one_mesh
from mmjax.config import Config
from mmjax.parallel.sharding import AXES
from mmjax.planning.hardware import Rates
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.speed import Speed

SPEED = Speed(Rates(1e11, 1e10, 1e9))
Rows = Mapping[str, tuple[int, int]]  # (rows, row length) of every tower on a rank


def plan_of(
    config: Config,
    shapes: Sequence[Rows],
    mesh: Mapping[str, int] | None = None,
    *,
    widths: Mapping[str, int] | None = None,
    peers: int = 1,
    gigabytes: float = np.inf,
    host: float = 0.0,
    speed: Speed = SPEED,
) -> RunPlan:
    """The plan of a run whose mesh has these axes, the others of size 1."""
    sizes = dict.fromkeys(AXES, 1) | dict(mesh or {})
    layout = layout_of_rows(config, sizes, shapes, widths, peers)
    return plan_run(
        on_one_mesh(config, sizes), layout, speed, MemoryLimit(gigabytes * 1e9, host * 1e9)
    )


def with_settings(
    config: Config, precision: str = "float32", microbatches: int = 1, chunks: int = 1
) -> Config:
    training = replace(config.training, precision=precision, loss_chunks=chunks)
    return replace(
        config, training=training, batch=replace(config.batch, microbatches=microbatches)
    )
