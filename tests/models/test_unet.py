"""A UNet computes the same whatever is recomputed, wherever its parts lie, and whatever else is in a row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from image_rows import rows_of_images

from mmjax.config import MeshConfig, UnetConfig
from mmjax.models.unet import Unet
from mmjax.parallel.sharding import ShardingRules, activations_on, encoding, make_mesh, sharding

CONFIG = UnetConfig(
    condition_width=12,
    widths=(16, 32),
    heads=(2, 2),
    attending=(False, False),
    blocks=1,
    groups=4,
    size=(4, 6),
    queries=3,
)
ROWS, IMAGES, REST = 4, 2, 5
ITEMS = rows_of_images(
    [[CONFIG.size] * n for n in (2, 1, 2, 0)], IMAGES * CONFIG.min_patches + REST
)


def inputs(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Latents, times and conditions of rows of images."""
    latents = rng.normal(size=(*ITEMS.item.shape, CONFIG.latents.channels))
    condition = rng.normal(size=(ROWS, IMAGES * CONFIG.queries, CONFIG.condition_width))
    return tuple(
        jnp.asarray(x, jnp.float32) for x in (latents, rng.uniform(size=(ROWS, IMAGES)), condition)
    )


def initial(config: UnetConfig = CONFIG) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Unet(config, jnp.dtype("float32"), nnx.Rngs(0)))


def computed(
    graph: nnx.GraphDef, *arrays: jax.Array
) -> tuple[jax.Array, tuple[nnx.State, jax.Array]]:
    """Velocities, and the gradients of their sum of squares by parameters and condition."""
    items = jax.tree.map(jnp.asarray, ITEMS)

    def loss(state, condition, latents, time):
        velocity = nnx.merge(graph, state)(latents, items, time, condition)
        return jnp.sum(velocity**2), velocity

    state, latents, time, condition = arrays
    compute = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, velocity), gradients = compute(state, condition, latents, time)
    return velocity, gradients


def assert_close(found, wanted) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.fixture(scope="module")
def plain():
    """What one device computes, keeping everything for backward."""
    graph, state = initial()
    return computed(graph, state, *inputs(np.random.default_rng(0)))


def test_recomputing_every_block_changes_nothing(plain):
    graph, state = initial(replace(CONFIG, remat="full"))
    assert_close(computed(graph, state, *inputs(np.random.default_rng(0))), plain)


def test_a_mesh_changes_nothing(plain):
    graph, state = initial()
    mesh, rules = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()), ShardingRules()

    def placed(variable):
        axes = variable.get_metadata("axes")
        return jax.device_put(variable, sharding(mesh, rules, variable.shape, axes))

    state = jax.tree.map(placed, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    with activations_on(mesh, rules), encoding():
        assert_close(computed(graph, state, *inputs(np.random.default_rng(0))), plain)


def test_places_without_an_image_and_what_is_behind_the_last_place_give_nothing(plain):
    velocity, _ = plain
    empty = ITEMS.item < 0
    assert empty.any()
    assert not np.any(np.asarray(velocity)[empty])
    assert np.asarray(velocity)[~empty].any(-1).all()
