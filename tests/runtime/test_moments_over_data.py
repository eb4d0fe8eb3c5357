"""Moments that copies of the parameters share: a part on each, the same updates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import Adafactor, AdamW, MeshConfig, Muon
from mmjax.parallel.sharding import ShardingRules, make_mesh, sharding
from mmjax.runtime.state import TrainState, make_optimizer, shardings_with_moments

COPIES = 4
AXES = {
    "llm": {
        "embed": {"weight": ("vocab", "embed")},
        "layers": {
            "runs": {"0:3": {"mlp": {"up": {"weight": ("embed", "mlp"), "bias": ("mlp",)}}}}
        },
    }
}
SHAPES = {
    "llm": {
        "embed": {"weight": (64, 32)},
        "layers": {"runs": {"0:3": {"mlp": {"up": {"weight": (3, 32, 48), "bias": (3, 48)}}}}},
    }
}
HYPER = {"clip": np.float32(0.5)} | {
    f"{rate}/{group}": np.float32(value)
    for rate, value in (("learning_rate", 1e-2), ("weight_decay", 0.1))
    for group in ("llm", "llm/matrix", "llm/other")
}
MESH = make_mesh(MeshConfig(COPIES, fsdp=2), jax.devices()[: 2 * COPIES])


def draw(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape
    )


def updated(config: Any, steps: int = 3) -> tuple[Any, TrainState, Any]:
    """Parameters and moments after some updates, and the shardings of the state."""
    optimizer = make_optimizer(config, AXES)
    parameters = draw(0)
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    laid = jax.tree.map(
        lambda axes, x: sharding(MESH, ShardingRules(), x.shape, axes),
        AXES,
        parameters,
        is_leaf=is_axes,
    )
    shardings = shardings_with_moments(optimizer, parameters, laid, {}, mesh=MESH)
    state = jax.jit(optimizer.init, out_shardings=shardings.optimizer)(parameters)
    update = jax.jit(
        lambda g, state, p: optimizer.update(g, state, p, HYPER)[:2],
        out_shardings=(laid, shardings.optimizer),
    )
    parameters = jax.device_put(parameters, laid)
    for step in range(1, steps + 1):
        parameters, state = update(jax.device_put(draw(step), laid), state, parameters)
    return parameters, state, shardings


def bytes_on_device(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize(
    "config",
    [
        AdamW(),
        AdamW(moments="bfloat16"),
        AdamW(moments="int8", ema=0.9),
        Muon(),
        Adafactor(moments="float32"),
    ],
    ids=["float32", "bfloat16", "int8", "muon", "adafactor"],
)
def test_moments_over_data_take_a_part_of_the_bytes_and_update_alike(config):
    parameters, moments, shardings = updated(config)
    divided = updated(replace(config, over_data=True))
    exact = isinstance(config, AdamW) and config.moments != "int8"
    tolerance = 0.0 if exact else 1e-6
    alike = partial(np.testing.assert_allclose, rtol=0, atol=tolerance)
    jax.tree.map(alike, divided[0], parameters)
    if isinstance(config, AdamW):
        jax.tree.map(alike, divided[1], moments)
    assert jax.tree.map(lambda x: x.spec, divided[2].trainable) == jax.tree.map(
        lambda x: x.spec, shardings.trainable
    )
    # Counters and Adafactor's factors of rows and columns are whole.
    assert 1 <= bytes_on_device(divided[1]) / (bytes_on_device(moments) / COPIES) < 1.5


def test_a_moment_that_nothing_divides_stays_whole():
    optimizer = make_optimizer(AdamW(over_data=True), {"llm": {"norm": {"scale": ("embed",)}}})
    parameters = {"llm": {"norm": {"scale": jnp.zeros(6)}}}
    laid = {"llm": {"norm": {"scale": sharding(MESH, ShardingRules(), (6,), (None,))}}}
    moments = shardings_with_moments(optimizer, parameters, laid, {}, mesh=MESH).optimizer.mu
    assert moments["llm"]["norm"]["scale"].is_fully_replicated
