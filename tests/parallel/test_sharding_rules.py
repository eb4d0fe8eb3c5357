from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from mmjax.config import MeshConfig
from mmjax.parallel.sharding import ShardingRules, activations_on, constrain, make_mesh, sharding

RULES = ShardingRules()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(2, fsdp=2, tensor=2), jax.devices())


def test_rules_translate_logical_axes_to_mesh_axes():
    assert RULES.spec(("embed", "heads")) == PartitionSpec(("fsdp", "expert", "context"), "tensor")
    assert RULES.spec(("rows", None, "width")) == PartitionSpec(
        ("data", "fsdp", "expert"), None, None
    )
    assert ShardingRules(embed=()).spec(("vocab", "embed")) == PartitionSpec("tensor", None)


def test_an_unknown_axis_is_named_beside_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown logical axis 'haeds'.*heads"):
        RULES.spec(("embed", "haeds"))


def test_two_dimensions_never_share_a_mesh_axis():
    with pytest.raises(ValueError, match="put mesh axis 'expert' on two dimensions"):
        RULES.spec(("rows", "embed"))


@pytest.mark.parametrize(
    ("shape", "axes", "shard"),
    [
        ((8, 6), ("embed", "mlp"), (4, 3)),
        ((3, 8, 6), ("embed", "mlp"), (3, 4, 3)),  # a stack of three layers
        ((7, 6), ("embed", "mlp"), (7, 3)),  # 7 does not divide by fsdp=2
        ((43, 6), ("vocab", "embed"), (43, 3)),
        ((6,), (None,), (6,)),
        ((3, 6), (None,), (3, 6)),
        ((8, 5, 6), ("rows", "length", "width"), (2, 5, 6)),
    ],
)
def test_an_array_is_cut_where_its_mesh_axes_divide_it_and_whole_elsewhere(
    mesh, shape, axes, shard
):
    assert sharding(mesh, RULES, shape, axes).shard_shape(shape) == shard


def test_more_axes_than_dimensions_are_refused(mesh):
    with pytest.raises(ValueError, match="more than the dimensions"):
        sharding(mesh, RULES, (8,), ("embed", "mlp"))


def test_activations_are_laid_out_inside_the_context_and_left_alone_outside(mesh):
    x = jnp.zeros((8, 6, 43))

    def layers(x):
        return constrain(x * 2, "rows", "length", "vocab")

    with activations_on(mesh, RULES):
        assert jax.jit(layers)(x).sharding.shard_shape(x.shape) == (2, 6, 43)
        assert jax.jit(layers)(x[..., :42]).sharding.shard_shape((8, 6, 42)) == (2, 6, 21)
    assert constrain(x, "rows", "length", "vocab") is x


def test_on_one_device_nothing_is_constrained():
    x = jnp.zeros((8, 6))
    with activations_on(make_mesh(MeshConfig(), jax.devices()[:1]), RULES):
        assert constrain(x, "rows", "width") is x


def test_the_layout_is_forgotten_when_tracing_fails(mesh):
    x = jnp.zeros((8, 6))
    with pytest.raises(ValueError, match="unknown logical axis"), activations_on(mesh, RULES):
        constrain(x, "rows", "wdith")
    assert constrain(x, "rows", "width") is x
