"""Clusters by name: devices as their data sheets have them, and nothing that has none."""

from __future__ import annotations

import pytest

from mmjax.errors import UserError
from mmjax.planning.hardware import DEVICES, Cluster, find_device, parse_cluster


@pytest.mark.parametrize(
    ("kind", "name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", 312e12, 156e12),
        ("NVIDIA A800-SXM4-80GB", "a800", 312e12, 156e12),
        ("NVIDIA A40", "a40", 149.7e12, 74.8e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989.4e12, 494.7e12),
        ("NVIDIA H100 PCIe", "h100-pcie", 756.5e12, 378e12),
        ("NVIDIA H100 NVL", "h100-nvl", 835.5e12, 417.5e12),
        ("NVIDIA H200", "h200", 989.4e12, 494.7e12),
        ("TPU v5 lite", "v5e", 197e12, 197e12),
        ("TPU v5p", "v5p", 459e12, 459e12),
        ("TPU v5", "v5p", 459e12, 459e12),
    ],
)
def test_a_device_is_known_by_what_jax_calls_it(
    kind: str, name: str, bfloat16: float, float32: float
) -> None:
    device = find_device(kind)
    assert device is not None
    assert (device.name, device.peak("bfloat16"), device.peak("float32")) == (
        name,
        bfloat16,
        float32,
    )


@pytest.mark.parametrize("kind", ["NVIDIA RTX A4000", "NVIDIA H200 MIG 1g.18gb", "cpu"])
def test_other_devices_and_slices_of_gpus_are_not_known(kind: str) -> None:
    assert find_device(kind) is None


@pytest.mark.parametrize(
    ("name", "nodes", "per_node"),
    [("h100x8x8", 8, 8), ("h100x4", 1, 4), ("H100", 1, 1), ("h100-pciex2x4", 2, 4)],
)
def test_a_cluster_is_named_by_its_device_nodes_and_devices_of_a_node(
    name: str, nodes: int, per_node: int
) -> None:
    cluster = parse_cluster(name)
    assert (cluster.nodes, cluster.per_node, cluster.devices) == (nodes, per_node, nodes * per_node)
    assert parse_cluster(str(cluster)) == cluster


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_links_are_slower_than_memory_and_the_network_no_faster_than_links(device) -> None:
    assert device.bandwidth > device.link >= device.network
    assert device.bfloat16 >= device.float32
    assert parse_cluster(device.name) == Cluster(device)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10x8x8", "there is no device 'h10': did you mean 'h100'?"),
        ("x8", "write DEVICExNODESxCOUNT, as in h100x8x8"),
        ("h100x0x8", "at least one node"),
        ("h100x8x8x8", "there is no device 'h100x8'"),
        ("", "there is no device ''"),
    ],
)
def test_what_is_no_cluster_is_refused_with_the_way_to_write_one(name: str, says: str) -> None:
    with pytest.raises(UserError, match=f"cluster={name}: ") as raised:
        parse_cluster(name)
    assert says in str(raised.value)
