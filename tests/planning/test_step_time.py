"""Seconds of a step follow from operations, bytes and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmjax.config import AdamW, LoraConfig, Muon
from mmjax.config.loading import load
from mmjax.cost.table import module_parameters, parameters
from mmjax.planning.flops import executed
from mmjax.planning.hardware import (
    ATTENTION_EFFICIENCY,
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    LAUNCH_SECONDS,
    Cluster,
    parse_cluster,
)
from mmjax.planning.memory import DeviceBatch, ModelSharding
from mmjax.planning.step_time import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    ClusterRun,
    LayerTimes,
    Speed,
    StepTime,
    overlap_pays,
    step_time,
)
from mmjax.planning.work import layer_sizes

MODEL = replace(load("omni_10b").model, encoders={})
IN_LAYERS = module_parameters(MODEL)["llm"]
BATCH = DeviceBatch({"llm": (1, 4096)}, {})
UNSAVED = {"llm": 0.0}


def machine(name: str, **mesh: int) -> ClusterRun:
    cluster: Cluster = parse_cluster(name)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | mesh
    return ClusterRun(
        cluster,
        sizes,
        ModelSharding(sizes["fsdp"] * sizes["tensor"], sizes["tensor"]),
        Speed(cluster.device.rates("bfloat16")),
        2,
    )


def seconds(on: ClusterRun, model=MODEL, batches=(BATCH,), unsaved=UNSAVED) -> StepTime:
    return step_time(model, batches, unsaved, on, AdamW())


def test_one_device_computes_and_updates_and_waits_for_nobody():
    found = seconds(machine("h100"))
    (flops,) = executed(MODEL, BATCH.shape, frozenset()).values()
    whole = sum(parameters(MODEL).values())
    products = (flops.total - flops.attention) / (COMPUTE_EFFICIENCY * 989.4e12)
    attention = flops.attention / (ATTENTION_EFFICIENCY * 989.4e12)
    # Float32 weights cast twice (4 + 2 bytes), bfloat16 gradients (2 written, 2 read) added to the sum (4 + 4).
    weights = (2 * 6 + 4 + 8) * whole / (BANDWIDTH_EFFICIENCY * 3.35e12)
    launches = (FORWARD_KERNELS + BACKWARD_KERNELS) * MODEL.llm.layers * LAUNCH_SECONDS
    assert found.compute == pytest.approx(products + attention + weights + launches)
    assert found.shards == found.tensor == found.exchange == found.recompute == 0
    assert found.update == pytest.approx(36 * whole / (BANDWIDTH_EFFICIENCY * 3.35e12))
    assert found.total == pytest.approx(found.compute + found.update)


def test_moments_of_fewer_bytes_are_read_and_written_faster():
    on = machine("h100")
    whole, bfloat16, int8 = (
        step_time(MODEL, (BATCH,), UNSAVED, on, AdamW(moments=m)).update for m in ("float32", "bfloat16", "int8")
    )
    # Five passes over 4 bytes of parameters and gradients, and two over 8, 4 or 2 of moments.
    assert bfloat16 == pytest.approx(28 / 36 * whole)
    assert int8 == pytest.approx(24 / 36 * whole)


def test_muon_exchanges_its_shards_twice_and_multiplies_whole_layers():
    layer = layer_sizes(MODEL.llm)
    sides = [layer.queries, layer.keys, layer.keys, layer.queries, *[layer.mlp] * (2 + layer.gated)]
    flops = 0.0
    for side in sides:
        short, long = sorted((layer.width, side))
        flops += 5 * 2 * (short * long * short + short * short * short + short * short * long)
    counts = parameters(MODEL)["llm"]

    def muon(**mesh: int) -> float:
        """Seconds beside those of passing over parameters, gradients and moments."""
        on = machine("h100x8", **mesh)
        passed = (36 * counts - 8 * IN_LAYERS.matrices) * on.sharding.part_of("llm")
        return step_time(MODEL, (BATCH,), UNSAVED, on, Muon()).update - passed / on.speed.rates.memory

    rate = COMPUTE_EFFICIENCY * 989.4e12
    assert muon(data=8) == pytest.approx(MODEL.llm.layers * flops / rate)
    layers = -(-MODEL.llm.layers // 8)  # of one device, at most
    links = 2 * 2 * layers * IN_LAYERS.matrices / MODEL.llm.layers * 7 / 8 / (BANDWIDTH_EFFICIENCY * 450e9)
    assert muon(fsdp=8) == pytest.approx(layers * flops / rate + links)
    # Over two axes the first exchange is followed by another.
    assert muon(fsdp=4, tensor=2) > muon(fsdp=8)


def test_what_is_computed_again_takes_the_time_of_its_operations():
    again = seconds(machine("h100"), replace(MODEL, llm=replace(MODEL.llm, remat="full")))
    once = seconds(machine("h100"))
    assert again.compute == once.compute
    assert 0.15 < again.recompute / once.compute < 0.4


def test_measured_layers_take_their_measured_time_and_the_rest_is_counted():
    on = machine("h100")
    measured = LayerTimes(1, {4096: {"none": 0.02, "full": 0.025, "products": 0.018}})
    known = replace(on, speed=Speed(on.speed.rates, {"llm": measured}))
    model = replace(MODEL, llm=replace(MODEL.llm, remat=("full",) * 20 + ("products",) * (MODEL.llm.layers - 20)))
    found = seconds(known, model, unsaved={"llm": 1e5})
    rest = seconds(on, replace(MODEL, llm=replace(MODEL.llm, layers=0))).compute
    assert found.compute == pytest.approx(0.02 * MODEL.llm.layers + rest)
    assert found.recompute == pytest.approx(20 * 0.005 - 0.002 * (MODEL.llm.layers - 20))
    # Several microbatches also add their gradients up: 2 bytes to a sum of 4 that is read and written.
    added = 10 * IN_LAYERS.layers / on.speed.rates.memory
    several = seconds(known, model, [replace(BATCH, microbatches=2)] * 2, unsaved={"llm": 1e5})
    assert several.compute == pytest.approx(2 * (found.compute + added))


def test_a_loss_in_chunks_makes_its_logits_again():
    once, again = seconds(machine("h100")), seconds(replace(machine("h100"), loss_chunks=8))
    assert again.compute == once.compute
    products = 2 * MODEL.llm.vocab * MODEL.llm.width * 4096
    assert again.recompute == pytest.approx(products / (COMPUTE_EFFICIENCY * 989.4e12), rel=0.01)


def test_activations_that_are_kept_move_through_memory():
    moved = seconds(machine("h100"), unsaved={"llm": 1e5})
    layers = MODEL.llm.layers
    extra = 3 * layers * 4096 * 1e5 / (BANDWIDTH_EFFICIENCY * 3.35e12)
    assert moved.compute - seconds(machine("h100")).compute == pytest.approx(extra)


def test_adapters_read_and_write_what_goes_into_and_comes_out_of_their_layers():
    llm = MODEL.llm
    adapted = replace(MODEL, lora={"llm": LoraConfig(("llm.layers.*.mlp.*",), rank=16)})
    inputs, outputs = 2 * llm.width + llm.mlp_width, 2 * llm.mlp_width + llm.width
    found = seconds(machine("h100"), adapted).compute
    (flops,) = executed(adapted, BATCH.shape, frozenset({"llm"})).values()
    products = (flops.total - flops.attention) / (COMPUTE_EFFICIENCY * 989.4e12)
    attention = flops.attention / (ATTENTION_EFFICIENCY * 989.4e12)
    launches = (FORWARD_KERNELS + BACKWARD_KERNELS) * llm.layers * LAUNCH_SECONDS
    weights = (2 * 6 + 4 + 8) * llm.layers * 16 * (inputs + outputs)  # of the adapters, which alone are trained
    moved = 2 * 4096 * llm.layers * (6 * inputs + 8 * outputs)
    memory = (weights + moved) / (BANDWIDTH_EFFICIENCY * 3.35e12)
    assert found == pytest.approx(products + attention + launches + memory)


def test_gathering_between_nodes_is_slower_than_inside_one_and_hidden_behind_computing():
    inside, between = seconds(machine("h100x8", fsdp=8)), seconds(machine("h100x8x1", fsdp=8))
    assert between.shards > 5 * inside.shards > 0
    assert inside.total == pytest.approx(max(inside.compute, inside.shards) + inside.update)
    whole = sum(parameters(MODEL).values())
    size = (2 * 2 + 2) * whole  # bfloat16 forward and backward, and gradients
    assert inside.shards == pytest.approx(size * 7 / 8 / (BANDWIDTH_EFFICIENCY * 450e9))
    assert between.shards == pytest.approx(size * 7 / 8 / (BANDWIDTH_EFFICIENCY * 50e9))


def test_all_devices_of_a_node_share_its_adapters():
    alone, eight = seconds(machine("h100x8x1", fsdp=8)), seconds(machine("h100x8x8", fsdp=64))
    assert eight.shards == pytest.approx(alone.shards / 8)


def test_tensor_parallelism_halves_the_operations_and_costs_all_reduces():
    whole, halved = seconds(machine("h100")), seconds(machine("h100x2", tensor=2))
    launches = (FORWARD_KERNELS + BACKWARD_KERNELS) * MODEL.llm.layers * LAUNCH_SECONDS  # as many kernels, each smaller
    assert halved.compute - launches == pytest.approx((whole.compute - launches) / 2)
    layers, width = MODEL.llm.layers, MODEL.llm.width
    assert halved.tensor == pytest.approx(4 * layers * 4096 * width * 2 / (BANDWIDTH_EFFICIENCY * 450e9))
    assert halved.update == pytest.approx(whole.update / 2)


def test_overlapped_exchanges_cost_launches_and_what_no_product_of_a_chunk_hides():
    devices = 4
    on = machine("h100x4", tensor=devices)
    way = lambda name: replace(on, sharding=replace(on.sharding, sequence_parallel=name))  # noqa: E731
    layer, layers = layer_sizes(MODEL.llm), MODEL.llm.layers
    send = 4096 / devices * layer.width * 2 / (BANDWIDTH_EFFICIENCY * 450e9)
    product = 2 * 4096 / devices * layer.width / devices / (COMPUTE_EFFICIENCY * 989.4e12)
    qkv, up, out = layer.queries + 2 * layer.keys, 2 * layer.mlp, layer.queries
    # MLPs hide all that they send; attention's products are shorter than a send, and its output's backward is two.
    assert product * up > product * layer.mlp > send > product * qkv
    exposed = 3 * (send - product * qkv) + (send - product * out) + max(0, send - 2 * product * out)
    launches = 4 * (2 + 4) * LAUNCH_SECONDS
    assert seconds(way("overlap")).tensor == pytest.approx((devices - 1) * layers * (exposed + launches))
    # Gathered and scattered: once in forward for each of four products, and six times in backward.
    assert seconds(way("on")).tensor == pytest.approx((devices - 1) * layers * 10 * send)
    assert seconds(way("off")).tensor == pytest.approx((devices - 1) * layers * 8 * send)


def test_overlap_pays_where_rows_are_long_and_not_where_launches_take_longer():
    on = machine("h100x4", tensor=4)
    assert overlap_pays(MODEL, BATCH, on, ["llm"])
    assert not overlap_pays(MODEL, DeviceBatch({"llm": (1, 128)}, {}), on, ["llm"])
    assert not overlap_pays(MODEL, BATCH, machine("h100"), ["llm"])


def test_microbatches_add_up_and_the_update_comes_once():
    one, three = seconds(machine("h100x8", fsdp=8)), seconds(machine("h100x8", fsdp=8), batches=(BATCH,) * 3)
    assert three.compute == pytest.approx(3 * one.compute)
    assert three.shards == pytest.approx(3 * one.shards)
    assert three.update == one.update
    mean = three.mean_over(3)
    assert (mean.compute, mean.update) == (pytest.approx(one.compute), one.update)


def test_encoder_tokens_travel_over_the_links_of_a_node_or_where_peers_are_on_several_over_the_network():
    model = load("omni_10b").model
    batch = DeviceBatch({"llm": (1, 4096), "vision": (1, 4096), "audio": (1, 4096)}, {"vision": 10, "audio": 0}, 8)
    unsaved = dict.fromkeys(batch.shape, 0.0)
    inside, between = (seconds(machine(name, data=8), model, (batch,), unsaved) for name in ("h100x8", "h100x2x4"))
    sent = 2 * 8 * 10 * model.llm.width * 2
    assert inside.exchange == pytest.approx(sent / (BANDWIDTH_EFFICIENCY * 450e9))
    assert between.exchange == pytest.approx(sent / (BANDWIDTH_EFFICIENCY * 50e9))
