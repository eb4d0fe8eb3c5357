"""What must be computed again to fit a device's memory, by how samples are balanced: plans steps, runs nothing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.balance.metrics import dist_ratio
from mmjax.balance.parts import LLM
from mmjax.balance.phases import cost_per_rank
from mmjax.benchmarks.phases import add_step_arguments, balances, check, costs_of_step, draw, read
from mmjax.config import AudioConfig, DecoderConfig, ModelConfig
from mmjax.config_files import load
from mmjax.errors import UserError
from mmjax.planning.cost import executed, frozen_modules, recomputed
from mmjax.planning.memory import fixed_bytes
from mmjax.planning.remat import Option, Options, choose, least_seconds
from mmjax.planning.work import CONV_STRIDE, Encoder, Work, merged_positions, row_work
from mmjax.training.residuals import kept_per_layer

PRESETS = ("omni-10b", "omni-18b", "omni-84b")
GB = 1e9
PRECISION, ACTIVATION = "bfloat16", 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--preset", choices=PRESETS, default=PRESETS[-1])
    parser.add_argument("--memory", type=float, default=80, metavar="GB", help="of a device")
    parser.add_argument("--host-memory", type=float, default=0, metavar="GB", help="of the host, for each device")
    parser.add_argument("--tflops", type=float, default=600, help="that products reach")
    parser.add_argument("--host-gbs", type=float, default=50, metavar="GB/S", help="between device and host, each way")
    parser.add_argument("--shards", type=int, default=256, help="devices that share the parameters (ZeRO-3)")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    add_step_arguments(parser, per_rank=16)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way of placing samples.

    A rank has one row of each module, as long as the fullest rank of all steps needs it. `policies`: how many layers of
    each tower have which. `recompute_share`: FLOPs computed again / all others; `all` if every layer were computed
    again; `bound`: what no mix goes below (layers divisible; copies to the host count by their time). `memory`: GB of
    the fullest device; where nothing fits, what would be needed at least. `pflops`: of the fullest rank in a step, with
    what it computes again.
    """
    check(args, "ranks", "steps", "per_rank", "scale", "samples", "shards")
    for option in ("memory", "tflops", "host_gbs"):
        if not getattr(args, option) > 0:
            raise UserError(f"--{option.replace('_', '-')} {getattr(args, option)}: give more than 0")
    if not args.host_memory >= 0:
        raise UserError(f"--host-memory {args.host_memory}: give at least 0")
    model, found = load(args.preset.replace("-", "_")).model, read(args)
    steps = [costs_of_step(found, sample, args.scale) for sample in draw(found, args)]
    places = balances(args.ranks, args.ranks_per_node or args.ranks)
    rows = []
    for balance in ("none", "llm", "post"):
        filled = np.array([cost_per_rank(costs, places[balance](costs), args.ranks) for costs in steps])
        ratios = np.mean([dist_ratio(step.T) for step in filled], axis=0)
        rows.append({"balance": balance, "dist_ratio": float(ratios[LLM])} | _row(model, filled.max((0, 1)), args))
    return rows


def _row(model: ModelConfig, longest: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """The best mix for rows of these positions `[modules]`."""
    shape = _shape(model, longest)
    work, frozen = row_work(model, shape), frozen_modules(model)
    towers = {"llm": model.llm, **model.encoders}
    kept = {name: kept_per_layer(model, name, shape[name], PRECISION) for name in towers}
    options = {name: _options(config, work[name], kept[name], args) for name, config in towers.items()}
    layers = {name: config.layers for name, config in towers.items()}
    tokens = {name: w.positions if name == "llm" else w.tokens for name, w in work.items()}
    fixed = sum(fixed_bytes(model, tokens, frozen, args.shards, ACTIVATION).values())
    fixed += max(of["none"].device for of in kept.values())  # a layer that is being computed again
    room, host = args.memory * GB - fixed, args.host_memory * GB
    everything = sum(f.total for f in executed(model, shape, frozen).values())

    def again(name: str, policy: str) -> int:
        return recomputed(towers[name], work[name], policy)

    full = sum(n * again(name, "full") for name, n in layers.items())
    lengths = {f"length_{name}": length for name, (_, length) in shape.items()}
    plan, least = choose(layers, options, room, host), least_seconds(layers, options, room, host)
    if plan is None or least is None:
        needed = fixed + sum(n * min(o.device for o in options[name].values()) for name, n in layers.items())
        missing = dict.fromkeys(("recompute_share", "bound"))
        return lengths | {"policies": None, **missing, "all": full / everything, "memory": needed / GB, "pflops": None}
    share = sum(again(name, policy) for name, own in plan.items() for policy in own) / everything
    used = fixed + sum(options[name][policy].device for name, own in plan.items() for policy in own)
    return lengths | {
        "policies": {name: dict(Counter(own)) for name, own in plan.items()},
        "recompute_share": share,
        "bound": least * args.tflops * 1e12 / everything,
        "all": full / everything,
        "memory": used / GB,
        "pflops": everything * (1 + share) / 1e15,
    }


def _shape(model: ModelConfig, longest: np.ndarray) -> dict[str, tuple[int, int]]:
    """One row of each tower with at least these positions in its layers."""
    shape = {"llm": (1, int(longest[LLM]))}
    for (name, encoder), positions in zip(model.encoders.items(), longest[1:], strict=True):
        group = merged_positions(encoder)
        whole = -(-int(positions) // group) * group
        shape[name] = (1, whole * (CONV_STRIDE if isinstance(encoder, AudioConfig) else 1))
    return shape


def _options(config: DecoderConfig | Encoder, work: Work, kept: Mapping[Any, Any], args: argparse.Namespace) -> Options:
    return {
        policy: Option(
            of.device,
            of.host,
            recomputed(config, work, policy) / (args.tflops * 1e12) + 2 * of.host / (args.host_gbs * GB),
        )
        for policy, of in kept.items()
    }
