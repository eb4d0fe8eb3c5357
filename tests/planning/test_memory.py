"""What a device holds beside activations is what the trainer puts there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mmjax.config import AdamW, MeshConfig
from mmjax.config_files import load
from mmjax.models.model import Model
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.memory import fixed_bytes
from mmjax.training.optimizer import make_optimizer
from mmjax.training.step import Executor

TOKENS = {"llm": 64, "vision": 16, "audio": 8}


def on_first_device(tree) -> int:
    first = jax.devices()[0]
    return sum(s.data.nbytes for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first)


@pytest.mark.parametrize("name", ["tiny_omni", "tiny_frozen"])
def test_parameters_gradients_and_moments_of_a_sharded_run_are_as_predicted(name):
    config = load(name)
    mesh = make_mesh(MeshConfig(1, fsdp=8), jax.devices()[:8])
    model = Model.build(config.model, jnp.float32)
    executor = Executor(model, make_optimizer(AdamW(), model.axes), mesh, ShardingRules(), 1)
    state, sums = executor.init(jax.random.key(0)), executor.zeros()
    predicted = fixed_bytes(config.model, TOKENS, model.frozen, 8, 4)
    # Biases and scales stay whole, which widths of hundreds still show.
    assert on_first_device((state.trainable, state.frozen)) == pytest.approx(predicted["parameters"], rel=0.1)
    assert on_first_device(sums.gradients) == pytest.approx(predicted["gradients"], rel=0.1)
    assert on_first_device(state.optimizer) == pytest.approx(predicted["optimizer"], rel=0.1)


def test_one_device_gathers_nothing_and_frozen_modules_have_no_moments():
    model = load("tiny_omni").model
    alone = fixed_bytes(model, TOKENS, frozenset(), 1, 4)
    assert alone["gathered"] == 0
    assert alone["optimizer"] == 2 * alone["gradients"] == 2 * alone["parameters"]
    frozen = fixed_bytes(model, TOKENS, frozenset({"llm"}), 1, 4)
    assert frozen["optimizer"] < 0.9 * alone["optimizer"]
    assert frozen["parameters"] == alone["parameters"]
    assert alone["logits"] == 64 * model.llm.vocab * 8
    assert alone["features"] == 24 * model.llm.width * 8
