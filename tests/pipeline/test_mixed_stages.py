"""Stages of pieces of several towers: the gradients and updates of one mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from test_executor import assert_gradients_of_one_mesh, assert_updates_of_one_mesh, config_of, deepstack_config_of
from tiny_run import load_steps

from mmjax.config import Config
from mmjax.config.model import layers_of
from mmjax.data.plan.placement import Topology
from mmjax.models.model import Model
from mmjax.models.stage import Piece, Stage
from mmjax.parallel.sharding import AXES, ShardingRules
from mmjax.runtime.executor import Executor
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.state import make_optimizer

Layers = tuple[str, int, int]  # a tower, from its layer, to its layer
CHAIN: list[tuple[dict[str, int], list[Layers]]] = [
    ({}, [("vision", 0, 1)]),
    ({}, [("audio", 0, 2), ("vision", 1, 2), ("llm", 0, 1)]),
    ({}, [("llm", 1, 3)]),
    ({}, [("llm", 3, 4)]),
]
UNEQUAL = [({mesh: 2}, pieces) for mesh, (_, pieces) in zip(("data", "fsdp", "fsdp", "data"), CHAIN, strict=True)]
SINK = [({}, [("vision", 0, 2)]), ({}, [("audio", 0, 2), ("llm", 0, 4)])]
DEEP = [
    ({}, [("vision", 0, 2)]),
    ({}, [("audio", 0, 2), ("vision", 2, 4), ("llm", 0, 1)]),
    ({}, [("llm", 1, 2)]),
    ({}, [("llm", 2, 4)]),
]


def make_pipeline(config: Config, plan: list[tuple[dict[str, int], list[Layers]]]) -> Executor:
    """A pipeline of these stages, each on the next devices: sizes of its mesh, and its pieces."""
    cuts: dict[str, set[int]] = {}
    for _, pieces in plan:
        for tower, start, stop in pieces:
            cuts.setdefault(tower, set()).update({start, stop} - {0, layers_of(config.model, tower)})
    sorted_cuts = {tower: tuple(sorted(layers)) for tower, layers in cuts.items()}
    model = Model.build(config.model, jnp.dtype(config.training.precision), sorted_cuts)
    stages, first = [], 0
    for sizes, pieces in plan:
        shape = [sizes.get(axis, 1) for axis in AXES]
        devices = np.array(jax.devices()[first : first + np.prod(shape)]).reshape(shape)
        mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        stage = Stage(model, tuple(Piece(config.model, *piece) for piece in pieces))
        stages.append(PlacedStage(stage.description, stage, mesh))
        first += devices.size
    sources, optimizer = len(config.data.sources), make_optimizer(config.optimizer, model.axes)
    return Executor(model, optimizer, stages, ShardingRules(), sources=sources, schedule="1f1b")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "plan", "topology"),
    [
        pytest.param(config_of("by module"), CHAIN, Topology(), id="a chain"),
        pytest.param(
            config_of("by module", dropout=0.1, remat="full"), UNEQUAL, Topology(2, 2, 2), id="unequal meshes"
        ),
        pytest.param(config_of("by module", ("vision", "vision.connector", "audio")), CHAIN, Topology(), id="frozen"),
        pytest.param(config_of("by module", tied=False), SINK, Topology(), id="a sink"),
        pytest.param(deepstack_config_of("by module"), DEEP, Topology(), id="a deepstack"),
    ],
)
def test_mixed_stages_have_the_gradients_of_one_mesh(config, plan, topology, tmp_path):
    pipeline = make_pipeline(config, plan)
    batches, plain = (load_steps(config, tmp_path, 1, ranks)[0][:3] for ranks in (topology, Topology()))
    assert_gradients_of_one_mesh(config, pipeline, batches, plain)


@pytest.mark.exhaustive
def test_mixed_stages_take_the_steps_of_one_mesh(tmp_path):
    config = config_of("by module")
    config = replace(config, training=replace(config.training, clip=0.05, steps=20))
    assert_updates_of_one_mesh(config, make_pipeline(config, CHAIN), load_steps(config, tmp_path, 20))
