"""Count the bytes of encoder outputs on the wire, by how a step is planned; the exchange runs and is checked."""

from __future__ import annotations

from argparse import Namespace

import jax
import numpy as np

from mmjax.balance.exchange import Rearrangement, exchange_tables
from mmjax.balance.parts import offsets_by_key
from mmjax.balance.phases import (
    Costs,
    PhasePlan,
    candidate_widths,
    largest_transfer,
    place_each_phase,
    place_in_order,
    place_jointly,
    wire,
)
from mmjax.benchmarks.corpora import costs_of_step, draw_samples, read_phases, steps_options
from mmjax.benchmarks.harness import Measurement, Options, median_seconds, option, ranks_of_node
from mmjax.config import MeshConfig
from mmjax.errors import UserError
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.parallel.sharding import make_mesh, rows_sharding

OPTIONS: Options = steps_options(60) | {
    "--devices": option(8, "ranks, each a device", minimum=1),
    "--hidden": option(64, "width of an encoder's output, float32", minimum=1),
    "--locality": option(
        "on", "off: every phase is balanced by itself (OrchMLLM)", choices=("on", "off")
    ),
}


def run(args: Namespace) -> Measurement:
    """Plan a step, send its encoder outputs, and count what leaves the ranks, padding included."""
    ranks = args.devices
    peers = ranks_of_node(args.ranks_per_node, ranks, ranks, "--devices")
    lengths = read_phases(args)
    sample = draw_samples(len(lengths["llm_tokens"]), ranks * args.per_rank, args.seed)
    costs = costs_of_step(lengths, sample, args.scale)
    plan = _plan(costs, ranks, peers, args.locality)
    peers = ranks if args.locality == "off" else peers
    planned = median_seconds(lambda: _plan(costs, ranks, peers, args.locality))
    all_to_alls = 0
    for phase, chunk in enumerate(plan.width.tolist(), start=1):
        moved = _rearrange(costs, plan.item_rank, plan.sample_rank, phase)
        all_to_alls += _run_exchange(moved, chunk, ranks, peers, args.hidden)

    size = 4 * args.hidden
    total = costs.item_tokens.sum()
    useful = costs.item_tokens[plan.item_rank != plan.sample_rank[costs.item_sample]].sum()
    return Measurement(
        figures={
            "useful_bytes": size * useful,
            "wire_bytes": size * wire(plan.width, ranks, peers).sum(),
            "allgather_bytes": size * total * (ranks - 1),
            "two_step_bytes": size * _two_step_tokens(costs, ranks),
            "all_to_alls": all_to_alls,
            "output_bytes": size * total,
            "plan_milliseconds": 1e3 * planned,
        },
        arrays={"sample": sample, "sample_rank": plan.sample_rank, "item_rank": plan.item_rank},
    )


def _plan(costs: Costs, ranks: int, peers: int, locality: str) -> PhasePlan:
    if locality == "off":
        return place_each_phase(costs, ranks)
    return place_jointly(costs, ranks, peers, candidate_widths(costs))


def _rearrange(
    costs: Costs, source: np.ndarray, sample_rank: np.ndarray, phase: int
) -> Rearrangement:
    """Rearrange one encoder's items from where they are encoded to where their samples are trained on."""
    items = np.flatnonzero(costs.item_phase == phase)
    length, encoded = costs.item_tokens[items], source[items]
    target = sample_rank[costs.item_sample[items]]
    return Rearrangement(
        length=length,
        source=encoded,
        source_offset=offsets_by_key(length, encoded),
        target=target,
        target_offset=offsets_by_key(length, target),
    )


def _two_step_tokens(costs: Costs, ranks: int) -> int:
    """Count tokens on the wire where every phase is balanced apart and each output goes home first: two all-to-alls."""
    plan = place_each_phase(costs, ranks)
    in_order = place_in_order(costs, ranks)
    total = 0
    for p in range(1, costs.phases):
        back = _rearrange(costs, plan.item_rank, in_order.sample_rank, p)
        forth = _rearrange(costs, in_order.item_rank, plan.sample_rank, p)
        for moved in (back, forth):
            width = largest_transfer(moved.source, moved.target, moved.length, ranks)
            total += ranks * (ranks - 1) * width
    return total


def _run_exchange(moved: Rearrangement, chunk: int, ranks: int, peers: int, hidden: int) -> int:
    """Send the tokens, check that each arrived where it should, and count the all-to-alls of the program."""
    if len(jax.devices()) < ranks:
        raise UserError(
            f"--devices {ranks}: there are {len(jax.devices())}; on a CPU set JAX_NUM_CPU_DEVICES={ranks}"
        )
    mesh = make_mesh(MeshConfig(data=ranks), jax.devices()[:ranks])
    size, capacity = (
        max(int(np.max(offset + moved.length, initial=0)), 1)
        for offset in (moved.source_offset, moved.target_offset)
    )
    nodes = [range(first, first + peers) for first in range(0, ranks, peers)]
    tables = [exchange_tables(moved, chunk, capacity, node, node) for node in nodes]
    send, gather = (np.concatenate(of_nodes) for of_nodes in zip(*tables, strict=True))
    tokens = np.random.default_rng(0).standard_normal((ranks, size, hidden), np.float32)
    program = jax.jit(lambda *arrays: dispatch(*arrays, mesh))
    arrays = jax.device_put((tokens, send, gather), rows_sharding(mesh))
    arrived = np.asarray(program(*arrays))
    expected = np.zeros_like(arrived)
    for n, source, start, rank, to in zip(*moved, strict=True):
        expected[rank, to : to + n] = tokens[source, start : start + n]
    if not np.array_equal(arrived, expected):
        raise AssertionError("a token did not arrive where the plan wants it")
    return program.lower(*arrays).compile().as_text().count(" all-to-all(")
