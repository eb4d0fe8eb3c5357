"""What travels between ranks in a compiled step: one all-to-all an encoder each way, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import MERGE, paths, stderr_of, tiny_config

from mmjax.batch import Microbatch
from mmjax.config import (
    BatchConfig,
    Config,
    MeshConfig,
    NoBalance,
    NoGrouping,
    PostBalance,
    Samples,
)
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh, replicated
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import make_optimizer

RANKS = 8
# of the connectors' output and the LLM; no other size of the model, nor a part of it on a device
WIDTH = 56
MOVING = ("all-to-all", "all-gather", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Collective:
    """One operation of a compiled program that carries some width."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]  # of its results
    line: str
    in_scan: bool  # over layers


def config(balance: NoBalance | PostBalance) -> Config:
    """Layers recomputed in the backward pass; a width that nothing else has."""
    rows = {"llm": RANKS, "vision": RANKS, "audio": RANKS}
    made = tiny_config(batch=BatchConfig(Samples(32), rows, 1, NoGrouping(12), balance, shapes=1))
    llm = replace(made.model.llm, width=WIDTH, remat="full")
    encoders = {
        name: replace(encoder, remat="full") for name, encoder in made.model.encoders.items()
    }
    return replace(made, model=replace(made.model, llm=llm, encoders=encoders))


def first_batch(made: Config, folder: Path, topology: Topology) -> Microbatch:
    index = build_index(open_sources(made, "train", folder), made.model.encoders)
    index.save(folder / "index")
    planner, layout = make_planner(index, made, [1.0], topology)
    loader = StepLoader(
        made, planner.grouper.budget, layout, folder / "index", folder, range(topology.ranks)
    )
    (batch,) = loader(0).microbatches
    return batch


def compiled(
    made: Config,
    mesh: MeshConfig,
    batch: Microbatch,
    width: int = WIDTH,
    kinds: Sequence[str] = MOVING,
) -> tuple[Executor, list[Collective]]:
    """The programs, and of the one that accumulates gradients the collectives of these kinds that carry this width."""
    executor, text, _ = compiled_text(made, mesh, batch)
    return executor, of_width(collectives_in(text, kinds), width)


def of_width(found: Sequence[Collective], width: int = WIDTH) -> list[Collective]:
    """Those that carry this width."""
    return [c for c in found if any(width in shape for shape in c.shapes)]


def compiled_text(made: Config, mesh: MeshConfig, batch: Microbatch) -> tuple[Executor, str, str]:
    """The program that accumulates gradients, with state and batch in the shards of a run, and XLA's warnings."""
    model = Model.build(made.model, jnp.float32)
    on = make_mesh(mesh, jax.devices())
    executor = Executor.on_mesh(
        model, make_optimizer(made.optimizer, model.axes), on, ShardingRules.of(mesh), sources=1
    )
    trainable = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        executor.states[0].abstract.trainable,
        executor.states[0].shardings.trainable,
    )
    weight = {"llm": jax.device_put(np.float32(1), replicated(on))}
    arrays = executor.zeros()[0], put_rows(batch, on, executor.rules), weight
    with stderr_of() as warnings:
        text = (
            executor.programs[0].forward_backward.lower(trainable, {}, *arrays).compile().as_text()
        )
    return executor, text, warnings[0]


def collectives_in(text: str, kinds: Sequence[str]) -> list[Collective]:
    """The collectives of these kinds in a compiled program."""
    found, computation = [], ""
    bodies = set(re.findall(r" while\(.*?body=%?([\w.\-]+)", text))
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := re.search(rf" = (.*?) ({'|'.join(kinds)})(?:-start)?\(", line):
            shapes = tuple(
                tuple(map(int, dims.split(",")))
                for dims in re.findall(r"f32\[([\d,]+)\]", match[1])
            )
            found.append(Collective(match[2], shapes, line, computation in bodies))
    return found


@pytest.mark.default_cases("data=8")
@pytest.mark.parametrize("mesh", [MeshConfig(8), MeshConfig(1, fsdp=8)], ids=["data=8", "fsdp=8"])
def test_a_plan_that_must_exchange_has_one_all_to_all_forward_and_one_backward_for_each_encoder(
    mesh, tmp_path
):
    made = config(PostBalance(locality="off"))
    batch = first_batch(made, tmp_path, Topology(RANKS, RANKS, RANKS))
    assert all((send >= 0).any() for send in batch.text.send.values())
    executor, found = compiled(made, mesh, batch)
    exchanged = [c for c in found if c.kind == "all-to-all"]
    assert len(exchanged) == 2 * len(made.model.encoders)
    sent = sorted(prod(send.shape[1:]) * WIDTH for send in batch.text.send.values())
    assert sorted(sum(map(prod, c.shapes)) for c in exchanged) == sorted(2 * sent)
    assert_parameters_only(executor, [c for c in found if c.kind != "all-to-all"])


@pytest.fixture(scope="module")
def where_nothing_moves(
    tmp_path_factory,
) -> Callable[[MeshConfig], tuple[Microbatch, Executor, str, str]]:
    """A batch of a plan that moves nothing, and its `compiled_text` on a mesh."""

    @cache
    def on(mesh: MeshConfig) -> tuple[Microbatch, Executor, str, str]:
        made = config(NoBalance())
        batch = first_batch(made, tmp_path_factory.mktemp("index"), Topology(RANKS, RANKS, RANKS))
        return batch, *compiled_text(made, mesh, batch)

    return on


@pytest.mark.default_cases("fsdp=8")
@pytest.mark.parametrize("mesh", [MeshConfig(8), MeshConfig(1, fsdp=8)], ids=["data=8", "fsdp=8"])
def test_a_plan_that_moves_nothing_has_no_collective(mesh, where_nothing_moves):
    batch, executor, text, _ = where_nothing_moves(mesh)
    assert all(send.shape[-1] == 0 for send in batch.text.send.values())
    assert_parameters_only(executor, of_width(collectives_in(text, MOVING)))


def test_under_fsdp_layers_are_gathered_one_at_a_time_in_their_scan_and_no_rank_has_the_tokens_of_others(
    where_nothing_moves,
):
    batch, executor, text, warnings = where_nothing_moves(MeshConfig(1, fsdp=8))
    assert "rematerialization" not in warnings
    sharded = [x for x in paths(executor.states[0].abstract.trainable).values() if x.ndim == 3]
    found = collectives_in(text, (*MOVING, "all-reduce"))
    gathers = [(sorted(shape), c) for c in found if c.kind == "all-gather" for shape in c.shapes]
    for leaf in sharded:
        of_layer = [c for shape, c in gathers if shape == sorted(leaf.shape[1:])]
        assert any(c.in_scan for c in of_layer), (
            f"no layer's {leaf.shape[1:]} is gathered in a scan"
        )
        assert all(shape != sorted(leaf.shape) for shape, _ in gathers), (
            f"{leaf.shape}: all layers at once"
        )
    length = batch.text.token.shape[1]
    # But the vectors that ranks look up for each other, each in its own columns of the token table.
    others = [
        c
        for c in found
        if not (c.kind == "all-to-all" and all(WIDTH // RANKS in shape for shape in c.shapes))
    ]
    assert all(length not in shape for c in others for shape in c.shapes), (
        "the losses of other ranks' tokens"
    )


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("tensor", [2, 4])
def test_the_devices_of_a_rank_share_its_exchange_and_add_up_no_tokens(tensor, tmp_path):
    mesh = MeshConfig(RANKS // tensor, tensor=tensor)
    made = config(PostBalance(locality="off"))
    # as many as devices of a rank, none of which has half a head
    llm = replace(made.model.llm, heads=4, kv_heads=4)
    encoders = {name: replace(encoder, heads=4) for name, encoder in made.model.encoders.items()}
    made = replace(made, model=replace(made.model, llm=llm, encoders=encoders))
    batch = first_batch(made, tmp_path, mesh_topology(make_mesh(mesh, jax.devices()), mesh))
    _, text, _ = compiled_text(made, mesh, batch)
    found = collectives_in(text, (*MOVING, "all-reduce"))
    exchanged = [sum(map(prod, c.shapes)) for c in found if c.kind == "all-to-all"]
    sent = [prod(send.shape[1:]) * WIDTH // tensor for send in batch.text.send.values()]
    assert sorted(exchanged) == sorted(2 * sent)
    tokens = [(1, items.item.shape[1] // MERGE[name], WIDTH) for name, items in batch.items.items()]
    assert not [
        c.line for c in found if c.kind == "all-reduce" and set(tokens).intersection(c.shapes)
    ]


def test_devices_that_share_a_row_send_keys_and_tokens_alone_and_gather_no_activations(tmp_path):
    mesh = MeshConfig(1, fsdp=2, context=4)
    made = config(PostBalance())
    batch = first_batch(made, tmp_path, mesh_topology(make_mesh(mesh, jax.devices()), mesh))
    _, text, warnings = compiled_text(made, mesh, batch)
    assert "rematerialization" not in warnings
    found = collectives_in(text, (*MOVING, "all-reduce", "collective-permute"))
    rows, length = batch.text.token.shape
    rows, part = rows // mesh.fsdp, length // mesh.context
    llm = made.model.llm
    keys = (rows, part, llm.kv_heads, llm.head_width)
    sent = [c for c in found if c.kind == "collective-permute" and keys in c.shapes]
    # In a scan of layers: keys and values of three devices arrive in both passes, and their
    # gradients return.
    assert sum(c.shapes.count(keys) for c in sent) == 3 * (2 + 2 + 2)
    exchanged = [sum(map(prod, c.shapes)) for c in found if c.kind == "all-to-all"]
    tables = [
        prod(t.shape[1:]) * WIDTH for t in (*batch.text.send.values(), *batch.text.spread.values())
    ]
    assert all(exchanged.count(size) >= 2 for size in tables if size)
    tokens = {(rows, length), (rows, part)}
    whole = [
        c.line
        for c in found
        if c.kind == "all-gather"
        for shape in c.shapes
        if shape[:2] in tokens and shape[2:]
    ]
    assert not whole


def test_an_exchange_stays_inside_its_node(tmp_path):
    made = config(PostBalance())
    batch = first_batch(made, tmp_path, Topology(RANKS, 4, 4))
    send = {name: np.full((RANKS, 4, 8), -1, np.int32) for name in batch.text.send}
    _, found = compiled(made, MeshConfig(8), batch._replace(text=batch.text._replace(send=send)))
    exchanged = [c for c in found if c.kind == "all-to-all"]
    assert len(exchanged) == 4
    assert all("replica_groups={{0,1,2,3},{4,5,6,7}}" in c.line for c in exchanged)


ENCODER_WIDTH = 40  # no other size either


@pytest.mark.exhaustive
@pytest.mark.parametrize("encoders", ["data", "tensor"])
def test_encoders_spread_over_the_tensor_axis_send_no_activations_but_their_tokens(
    encoders, tmp_path
):
    mesh = MeshConfig(2, fsdp=2, tensor=2, encoders=encoders)
    made = config(NoBalance())
    narrow = {
        name: replace(encoder, width=ENCODER_WIDTH) for name, encoder in made.model.encoders.items()
    }
    made = replace(made, model=replace(made.model, encoders=narrow))
    batch = first_batch(made, tmp_path, mesh_topology(make_mesh(mesh, jax.devices()), mesh))
    lengths = {name: items.item.shape[1] for name, items in batch.items.items()}
    inside = {
        lengths["vision"],
        lengths["audio"],
        lengths["audio"] // made.model.encoders["audio"].stride,
    }
    _, found = compiled(made, mesh, batch, ENCODER_WIDTH, (*MOVING, "all-reduce"))
    activations = [c for c in found if any(inside.intersection(shape) for shape in c.shapes)]
    assert found
    assert bool(activations) == (encoders == "tensor")
    _, found = compiled(made, mesh, batch, kinds=["all-gather"])
    tokens = sorted((2, length // MERGE[name], WIDTH) for name, length in lengths.items())
    # Parameters are gathered too, in two dimensions.
    gathered = sorted(shape for c in found for shape in c.shapes if len(shape) == 3)
    assert gathered == (tokens if encoders == "data" else [])


def assert_parameters_only(executor: Executor, found: list[Collective]) -> None:
    """Nothing but parameters, or their gradients, under FSDP: on data=8 nothing at all."""
    if executor.mesh.shape["fsdp"] == 1:
        assert not found
    shapes = {leaf.shape for leaf in paths(executor.states[0].abstract.trainable).values()}
    layers = {shape[1:] for shape in shapes if len(shape) == 3}
    allowed = {tuple(sorted(n for n in shape if n > 1)) for shape in shapes | layers}
    allowed |= {
        tuple(sorted(n // 8 if i == k else n for i, n in enumerate(s)))
        for s in allowed
        for k in range(len(s))
    }
    for collective in found:
        for shape in collective.shapes:
            assert tuple(sorted(n for n in shape if n > 1)) in allowed, collective.line
