"""Plan what must be computed again to fit a device's memory, by how samples are balanced: plans steps, runs nothing."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmjax.balance.parts import LLM, dist_ratio
from mmjax.balance.phases import cost_per_rank
from mmjax.benchmarks.corpora import draw_steps, steps_options
from mmjax.benchmarks.harness import Options, named, option
from mmjax.benchmarks.phases import balances
from mmjax.benchmarks.synthetic_run import plan_rows
from mmjax.config import AdamW, Config, ModelConfig, Remat
from mmjax.config.loading import load
from mmjax.config.model import frozen_modules
from mmjax.planning.flops import executed, recompute_flops
from mmjax.planning.hardware import Rates
from mmjax.planning.memory import GB
from mmjax.planning.remat import MemoryLimit
from mmjax.planning.speed import Speed
from mmjax.planning.work import row_work

PRESETS = ("omni-10b", "omni-18b", "omni-84b")
PRECISION = "bfloat16"


OPTIONS: Options = steps_options(16) | {
    "--preset": option(PRESETS[-1], choices=PRESETS),
    "--memory": option(80.0, "of a device", above=0, metavar="GB"),
    "--host-memory": option(0.0, "of the host, for each device", minimum=0, metavar="GB"),
    "--tflops": option(600.0, "that products reach", above=0),
    "--memory-gbs": option(2700.0, "that its memory reaches", above=0, metavar="GB/S"),
    "--host-gbs": option(50.0, "between device and host, each way", above=0, metavar="GB/S"),
    "--shards": option(256, "devices that share the parameters (ZeRO-3)", minimum=1),
    "--ranks": option(64, minimum=1),
    "--steps": option(10, minimum=1),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Plan one row for each way of placing samples.

    A rank has one row of each module, as long as the fullest rank of all steps needs it.
    `policies`: how many layers of each tower have which. `recompute_share`: FLOPs computed again /
    all others; `all` if every layer were computed again. `seconds`: what that takes a step, and
    `bound`, which no mix goes below (layers divisible). `memory`: GB of the fullest device; where
    nothing fits, what would be needed at least. `pflops`: of the fullest rank in a step, with what
    it computes again.
    """
    config = load(args.preset.replace("-", "_"))
    steps = list(draw_steps(args))
    places = balances(args.ranks, args.ranks_per_node or args.ranks)
    rows = []
    for balance in ("none", "llm", "post"):
        filled = np.array(
            [cost_per_rank(costs, places[balance](costs), args.ranks) for costs in steps]
        )
        ratios = np.mean([dist_ratio(step.T) for step in filled], axis=0)
        rows.append(
            {"balance": balance, "dist_ratio": ratios[LLM]} | _row(config, filled.max((0, 1)), args)
        )
    return rows


def _row(config: Config, longest: np.ndarray, args: Namespace) -> dict[str, Any]:
    """Plan the best mix for rows of these positions `[modules]`."""
    model = config.model
    shape = _shape(model, longest)
    work = row_work(model, shape)
    towers = {"llm": model.llm, **model.encoders}
    speed = Speed(Rates(args.tflops * 1e12, args.memory_gbs * GB, args.host_gbs * GB))
    room = MemoryLimit(args.memory * GB, args.host_memory * GB)
    training = replace(config.training, precision=PRECISION, loss_chunks=1)
    config = replace(config, training=training, optimizer=AdamW())
    plan = plan_rows(config, shape, {"fsdp": args.shards}, speed, room)
    needed = sum(f.total for f in executed(model, shape, frozen_modules(model)).values())

    def recomputed(policies: Mapping[str, Sequence[Remat]]) -> float:
        """Return the FLOPs that these policies of layers compute again, over all others."""
        flops = (
            recompute_flops(model, name, work[name], policy)
            for name, mix in policies.items()
            for policy in mix
        )
        return sum(flops) / needed

    share = recomputed(plan.policies)
    row = named("length_", shape, (length for _, length in shape.values())) | {
        "policies": {name: dict(Counter(mix)) for name, mix in plan.policies.items()},
        "recompute_share": share,
        "seconds": plan.seconds,
        "bound": plan.lower_bound,
        "pflops": needed * (1 + share) / 1e15,
    }
    if not plan.fits:
        row |= dict.fromkeys(("policies", "recompute_share", "seconds", "bound", "pflops"))
    everything = {name: ["full"] * config.layers for name, config in towers.items()}
    return row | {"all": recomputed(everything), "memory": plan.device / GB}


def _shape(model: ModelConfig, longest: np.ndarray) -> dict[str, tuple[int, int]]:
    """Shape one row of each tower with at least these positions in its layers."""
    shape = {"llm": (1, int(longest[LLM]))}
    for (name, encoder), positions in zip(model.encoders.items(), longest[1:], strict=True):
        group = encoder.token_positions
        rounded = -(-int(positions) // group) * group
        shape[name] = (1, rounded * encoder.stride)
    return shape
