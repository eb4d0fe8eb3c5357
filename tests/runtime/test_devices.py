from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from mmjax.config import MeshConfig
from mmjax.data.plan.placement import Topology
from mmjax.errors import UserError
from mmjax.parallel.sharding import make_mesh
from mmjax.runtime.devices import check_ram, mesh_topology, set_gpu_memory_fraction


@pytest.mark.parametrize(
    ("config", "topology"),
    [
        (MeshConfig(), Topology(8, 8, 8)),
        (MeshConfig(2, fsdp=2, tensor=2), Topology(4, 4, 4)),
        (MeshConfig(ranks_per_node=4), Topology(8, 4, 8)),
        (MeshConfig(ranks_per_node=1), Topology(8, 1, 8)),
    ],
)
def test_ranks_of_one_host_exchange_unless_the_config_says_how_many(config, topology):
    assert mesh_topology(make_mesh(config, jax.devices()), config) == topology


def test_ranks_that_nodes_do_not_divide_are_refused_with_the_remedy():
    config = MeshConfig(ranks_per_node=3)
    with pytest.raises(UserError, match=r"mesh\.ranks_per_node=3: choose a divisor of the 8 ranks"):
        mesh_topology(make_mesh(config, jax.devices()), config)


@pytest.mark.parametrize(("said", "used"), [(None, "0.92"), ("0.5", "0.5")])
def test_most_of_a_gpus_memory_is_used_unless_somebody_said_how_much(said, used, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", said or "")
    if said is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    set_gpu_memory_fraction()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == used


def test_a_program_that_takes_more_than_the_ram_is_refused_before_it_runs():
    def pairs(x):
        return jnp.sort(x[:, None] * x).sum()

    few, many = (
        jax.jit(pairs).lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile()
        for n in (16, 1 << 20)
    )
    check_ram(few, jax.devices("cpu")[0])
    with pytest.raises(
        UserError,
        match=r"a step takes \d+\.\d GB of RAM for each device, .*; lower batch.rows or batch",
    ):
        check_ram(many, jax.devices("cpu")[0])
