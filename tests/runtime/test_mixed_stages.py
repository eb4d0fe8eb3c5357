"""Stages of pieces of several towers: the gradients and updates of one mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from test_executor import (
    assert_gradients_of_one_mesh,
    assert_updates_of_one_mesh,
    config_of,
    deepstack_config_of,
    with_experts,
)
from tiny_run import load_steps, one_shape

from mmjax.config import Config, Layout
from mmjax.data.plan.placement import Topology
from mmjax.models.model import Model
from mmjax.models.piece import Piece
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.executor import Executor
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.state import make_optimizer

Layers = tuple[str, int, int]  # a tower, from its layer, to its layer
Plan = list[tuple[Layout, list[Layers]]]
CHAIN: Plan = [
    (Layout(), [("vision", 0, 1)]),
    (Layout(), [("audio", 0, 2), ("vision", 1, 2), ("llm", 0, 1)]),
    (Layout(), [("llm", 1, 3)]),
    (Layout(), [("llm", 3, 4)]),
]
UNEQUAL = [
    (Layout(**{mesh: 2}), pieces)
    for mesh, (_, pieces) in zip(("data", "fsdp", "fsdp", "data"), CHAIN, strict=True)
]
SINK = [(Layout(), [("vision", 0, 2)]), (Layout(), [("audio", 0, 2), ("llm", 0, 4)])]
# Layouts of stages side by side: experts shared, and not; tokens divided between layers, also
# behind products, and not.
LAYOUTS: Plan = [
    (Layout(data=2), [("vision", 0, 2)]),
    (Layout(expert=2, tensor=2), [("audio", 0, 2), ("llm", 0, 2)]),
    (Layout(expert=2), [("llm", 2, 4)]),
]
DIVIDED: Plan = [
    (Layout(tensor=2, encoders="data"), [("vision", 0, 1)]),
    (Layout(tensor=2, sequence_parallel="on"), [("vision", 1, 2), ("audio", 0, 2), ("llm", 0, 2)]),
    (Layout(tensor=2, sequence_parallel="overlap"), [("llm", 2, 4)]),
]
# All in one, and in few programs.
SINK_OF_EXPERTS: Plan = [
    (Layout(tensor=2, sequence_parallel="overlap"), [("vision", 0, 2)]),
    (
        Layout(expert=2, tensor=2, sequence_parallel="on", encoders="data"),
        [("audio", 0, 2), ("llm", 0, 4)],
    ),
]
DEEP = [
    (Layout(), [("vision", 0, 2)]),
    (Layout(), [("audio", 0, 2), ("vision", 2, 4), ("llm", 0, 1)]),
    (Layout(), [("llm", 1, 2)]),
    (Layout(), [("llm", 2, 4)]),
]


def make_pipeline(config: Config, plan: Plan) -> Executor:
    """A pipeline of these stages, each on the next devices."""
    cuts: dict[str, set[int]] = {}
    for _, pieces in plan:
        for tower, start, stop in pieces:
            cuts.setdefault(tower, set()).update(
                {start, stop} - {0, config.model.towers[tower].layers}
            )
    sorted_cuts = {tower: tuple(sorted(layers)) for tower, layers in cuts.items()}
    model = Model.build(config.model, jnp.dtype(config.training.precision), sorted_cuts)
    stages, first = [], 0
    for layout, pieces in plan:
        count = layout.ranks * layout.context * layout.tensor
        mesh = make_mesh(layout, jax.devices()[first : first + count])
        stage = Stage(model, tuple(Piece(config.model, *piece) for piece in pieces))
        stages.append(PlacedStage(stage.description, stage, mesh, ShardingRules.of(layout)))
        first += count
    sources, optimizer = len(config.data.sources), make_optimizer(config.optimizer, model.axes)
    return Executor(model, optimizer, stages, sources=sources, schedule="1f1b", loss=config.loss)


@pytest.mark.default_cases("a sink of experts")
@pytest.mark.parametrize(
    ("config", "plan", "topology"),
    [
        pytest.param(config_of("by module"), CHAIN, Topology(), id="a chain"),
        pytest.param(
            config_of("by module", dropout=0.1, remat="full"),
            UNEQUAL,
            Topology(2, 2, 2),
            id="unequal meshes",
        ),
        pytest.param(
            config_of("by module", ("vision", "vision.connector", "audio")),
            CHAIN,
            Topology(),
            id="frozen",
        ),
        pytest.param(config_of("by module", tied=False), SINK, Topology(), id="a sink"),
        pytest.param(deepstack_config_of("by module"), DEEP, Topology(), id="a deepstack"),
        pytest.param(
            with_experts(config_of("by module")), LAYOUTS, Topology(2, 2, 2), id="shared experts"
        ),
        pytest.param(
            one_shape(with_experts(config_of("by module", tied=False), range(4))),
            SINK_OF_EXPERTS,
            Topology(2, 2, 2, 2),
            id="a sink of experts",
        ),
        pytest.param(config_of("by module"), DIVIDED, Topology(1, 1, 1, 2), id="divided tokens"),
    ],
)
def test_mixed_stages_have_the_gradients_of_one_mesh(config, plan, topology, tmp_path):
    pipeline = make_pipeline(config, plan)
    batches, plain = (
        load_steps(config, tmp_path, 1, ranks)[0][:3] for ranks in (topology, Topology())
    )
    assert_gradients_of_one_mesh(config, pipeline, batches, plain)


@pytest.mark.exhaustive
def test_mixed_stages_take_the_steps_of_one_mesh(tmp_path):
    config = config_of("by module")
    config = replace(config, training=replace(config.training, clip=0.05, steps=20))
    assert_updates_of_one_mesh(
        config, make_pipeline(config, CHAIN), load_steps(config, tmp_path, 20)
    )
