"""Seconds of a stage's passes, and of what follows them, come from operations, bytes and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmjax.autotune.sharded_stages import model_sharding
from mmjax.config import (
    AdamW,
    ExpertsConfig,
    Layout,
    LoraConfig,
    ModelConfig,
    Muon,
    SequenceParallel,
)
from mmjax.config.loading import load
from mmjax.config.model import frozen_modules
from mmjax.cost.table import module_parameters, parameters
from mmjax.planning.exchange_time import ClusterRun, overlap_pays
from mmjax.planning.flops import executed, stage_flops
from mmjax.planning.hardware import (
    ATTENTION_EFFICIENCY,
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    LAUNCH_SECONDS,
    parse_cluster,
)
from mmjax.planning.memory import MASTER, DeviceBatch, moment_bytes
from mmjax.planning.speed import LayerTimes, Speed
from mmjax.planning.stage_time import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    PassTime,
    StageRun,
    edge_seconds,
    pass_times,
    reduce_seconds,
    update_seconds,
)
from mmjax.planning.work import layer_sizes

MODEL = replace(load("omni_10b").model, encoders={})
ADAMW = AdamW()
IN_LAYERS = module_parameters(MODEL)["llm"]
BATCH = DeviceBatch({"llm": (1, 4096)}, {})
NODE = BANDWIDTH_EFFICIENCY * 450e9  # bytes/s between devices
MEMORY = BANDWIDTH_EFFICIENCY * 3.35e12
PRODUCTS, ATTENTION = COMPUTE_EFFICIENCY * 989.4e12, ATTENTION_EFFICIENCY * 989.4e12
LAUNCHES = (FORWARD_KERNELS + BACKWARD_KERNELS) * MODEL.llm.layers * LAUNCH_SECONDS


def stage(
    layers: range = range(28),
    devices: range = range(1),
    policy: str = "none",
    way: SequenceParallel = "off",
    model: ModelConfig = MODEL,
    unsaved: float = 0.0,
    cluster: str = "h100x4x8",
    optimizer: AdamW | Muon = ADAMW,
    **mesh: int,
) -> StageRun:
    """Layers of the LLM on some devices, with what is at its ends spread over them."""
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | mesh
    sharding = model_sharding(Layout(**mesh, sequence_parallel=way), sizes)
    named = parse_cluster(cluster)
    share = len(layers) / model.llm.layers / sharding.shards
    frozen = frozen_modules(model)
    count = {module: n * share for module, n in parameters(model).items()}
    trained = sum(n for module, n in count.items() if module not in frozen)
    return StageRun(
        tower="llm",
        layers=layers,
        policies=(policy,) * len(layers),
        devices=devices,
        machine=ClusterRun(named, sizes, sharding, Speed(named.device.rates("bfloat16")), 2),
        trainable=MASTER * trained,
        frozen=2.0 * (sum(count.values()) - trained),
        moments=share * sum(moment_bytes(model, frozen, optimizer).values()),
        has_backward=True,
        unsaved=unsaved,
        experts=MASTER * module_parameters(model)["llm"].experts * share,
        only_stage=len(layers) == model.llm.layers,
    )


def passes(stage: StageRun, batch: DeviceBatch = BATCH, model: ModelConfig = MODEL) -> PassTime:
    """Both passes of a microbatch, by cause."""
    return PassTime(*map(sum, zip(*pass_times(model, stage, batch), strict=True)))


def test_one_device_computes_and_updates_and_waits_for_nobody():
    found = passes(stage())
    (flops,) = executed(MODEL, BATCH.shape, frozenset()).values()
    whole = sum(parameters(MODEL).values())
    products = (flops.total - flops.attention) / PRODUCTS
    # Float32 weights cast twice (4 + 2 bytes), bfloat16 gradients (2 written, 2 read) added to the
    # sum (4 + 4).
    weights = (2 * 6 + 4 + 8) * whole / MEMORY
    assert found.compute == pytest.approx(
        products + flops.attention / ATTENTION + weights + LAUNCHES
    )
    assert found.total == found.compute
    assert reduce_seconds(stage()) == 0
    assert update_seconds(MODEL, stage(), AdamW()) == pytest.approx(36 * whole / MEMORY)


def test_moments_of_fewer_bytes_are_read_and_written_faster():
    whole, bfloat16, int8 = (
        update_seconds(MODEL, stage(optimizer=AdamW(moments=m)), AdamW(moments=m))
        for m in ("float32", "bfloat16", "int8")
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
        run = stage(optimizer=Muon(), **mesh)
        passed = (36 * counts - 8 * IN_LAYERS.matrices) * run.machine.sharding.part_of("llm")
        return update_seconds(MODEL, run, Muon()) - passed / run.machine.speed.rates.memory

    assert muon(data=8) == pytest.approx(MODEL.llm.layers * flops / PRODUCTS)
    layers = -(-MODEL.llm.layers // 8)  # of one device, at most
    links = 2 * 2 * layers * IN_LAYERS.matrices / MODEL.llm.layers * 7 / 8 / NODE
    assert muon(fsdp=8) == pytest.approx(layers * flops / PRODUCTS + links)
    # Over two axes the first exchange is followed by another.
    assert muon(fsdp=4, tensor=2) > muon(fsdp=8)


def test_what_is_computed_again_takes_the_time_of_its_operations():
    again, once = passes(stage(policy="full")), passes(stage())
    assert again.compute == once.compute
    assert 0.15 < again.recompute / once.compute < 0.4


def test_measured_layers_take_their_measured_time_and_the_rest_is_counted():
    run = stage(unsaved=1e5)
    policies = ("full",) * 20 + ("products",) * (MODEL.llm.layers - 20)
    measured = LayerTimes(
        1, {4096: {"forward": 0.007, "none": 0.02, "full": 0.025, "products": 0.018}}
    )
    machine = replace(run.machine, speed=Speed(run.machine.speed.rates, {"llm": measured}))
    known = replace(run, machine=machine, policies=policies)
    found = passes(known)
    ends = stage_flops(MODEL, "llm", range(28), (), BATCH.shape)
    weights = (2 * 6 + 4 + 8) * (parameters(MODEL)["llm"] - IN_LAYERS.layers) / MEMORY
    assert found.compute == pytest.approx(0.02 * MODEL.llm.layers + ends.total / PRODUCTS + weights)
    assert found.recompute == pytest.approx(20 * 0.005 - 0.002 * (MODEL.llm.layers - 20))
    # Several microbatches also add their gradients up: 2 bytes to a sum of 4 that is read and
    # written.
    added = 10 * IN_LAYERS.layers / MEMORY
    assert passes(known, replace(BATCH, microbatches=2)).compute == pytest.approx(
        found.compute + added
    )


def test_a_loss_that_makes_its_logits_again_takes_their_operations():
    once, again = passes(stage()), passes(replace(stage(), logits_again=True))
    assert again.compute == once.compute
    assert again.recompute == pytest.approx(
        2 * MODEL.llm.vocab * MODEL.llm.width * 4096 / PRODUCTS, rel=0.01
    )


def test_activations_that_are_kept_move_through_memory():
    extra = 3 * MODEL.llm.layers * 4096 * 1e5 / MEMORY
    assert passes(stage(unsaved=1e5)).compute - passes(stage()).compute == pytest.approx(extra)


def test_adapters_read_and_write_what_goes_into_and_comes_out_of_their_layers():
    llm = MODEL.llm
    adapted = replace(MODEL, lora={"llm": LoraConfig(("llm.layers.*.mlp.*",), rank=16)})
    inputs, outputs = 2 * llm.width + llm.mlp_width, 2 * llm.mlp_width + llm.width
    found = passes(stage(model=adapted), model=adapted).compute
    (flops,) = executed(adapted, BATCH.shape, frozenset({"llm"})).values()
    products = (flops.total - flops.attention) / PRODUCTS
    # of the adapters, which alone are trained
    weights = (2 * 6 + 4 + 8) * llm.layers * 16 * (inputs + outputs)
    moved = 2 * 4096 * llm.layers * (6 * inputs + 8 * outputs)
    memory = (weights + moved) / MEMORY
    assert found == pytest.approx(products + flops.attention / ATTENTION + LAUNCHES + memory)


def test_gathering_is_hidden_behind_computing_as_far_as_that_lasts():
    short = DeviceBatch({"llm": (1, 64)}, {})
    long, inside, between = (
        passes(stage(cluster=name, fsdp=8), batch)
        for name, batch in (("h100x8", BATCH), ("h100x8", short), ("h100x8x1", short))
    )
    # bfloat16 forward and backward, and gradients
    size = (2 * 2 + 2) * sum(parameters(MODEL).values())
    assert long.shards == 0
    assert inside.shards == pytest.approx(size * 7 / 8 / NODE - inside.compute)
    assert between.shards == pytest.approx(
        size * 7 / 8 / (BANDWIDTH_EFFICIENCY * 50e9) - between.compute
    )
    # All devices of a node share its adapters.
    eight = passes(stage(cluster="h100x8x8", fsdp=64), short)
    assert eight.shards + eight.compute == pytest.approx((between.shards + between.compute) / 8)


def test_tensor_parallelism_halves_the_operations_and_costs_all_reduces():
    whole, halved = passes(stage()), passes(stage(cluster="h100x2", tensor=2))
    # As many kernels, each smaller.
    assert halved.compute - LAUNCHES == pytest.approx((whole.compute - LAUNCHES) / 2)
    layers, width = MODEL.llm.layers, MODEL.llm.width
    assert halved.tensor == pytest.approx(4 * layers * 4096 * width * 2 / NODE)
    whole, halved = (update_seconds(MODEL, stage(tensor=n), AdamW()) for n in (1, 2))
    assert halved == pytest.approx(whole / 2)


def test_overlapped_exchanges_cost_launches_and_what_no_product_of_a_chunk_hides():
    devices = 4
    tensor = lambda way: passes(stage(cluster="h100x4", way=way, tensor=devices)).tensor  # noqa: E731
    layer, layers = layer_sizes(MODEL.llm), MODEL.llm.layers
    send = 4096 / devices * layer.width * 2 / NODE
    product = 2 * 4096 / devices * layer.width / devices / PRODUCTS
    qkv, up, out = layer.queries + 2 * layer.keys, 2 * layer.mlp, layer.queries
    # MLPs hide all that they send; attention's products are shorter than a send, and its output's
    # backward is two.
    assert product * up > product * layer.mlp > send > product * qkv
    exposed = 3 * (send - product * qkv) + (send - product * out) + max(0, send - 2 * product * out)
    launches = 4 * (2 + 4) * LAUNCH_SECONDS
    assert tensor("overlap") == pytest.approx((devices - 1) * layers * (exposed + launches))
    # Gathered and scattered: once in forward for each of four products, and six times in backward.
    assert tensor("on") == pytest.approx((devices - 1) * layers * 10 * send)
    assert tensor("off") == pytest.approx((devices - 1) * layers * 8 * send)


def test_overlap_pays_where_rows_are_long_and_not_where_launches_take_longer():
    on = stage(cluster="h100x4", tensor=4).machine
    assert overlap_pays(MODEL, BATCH, on, ["llm"])
    assert not overlap_pays(MODEL, DeviceBatch({"llm": (1, 128)}, {}), on, ["llm"])
    assert not overlap_pays(MODEL, BATCH, stage().machine, ["llm"])


def test_encoder_tokens_travel_over_the_links_of_a_node_or_where_peers_are_on_several_over_the_network():
    model = load("omni_10b").model
    batch = DeviceBatch(
        {"llm": (1, 4096), "vision": (1, 4096), "audio": (1, 4096)}, {"vision": 10, "audio": 0}, 8
    )
    inside, between = (
        passes(stage(cluster=name, data=8), batch, model) for name in ("h100x8", "h100x2x4")
    )
    sent = 2 * 8 * 10 * model.llm.width * 2
    assert inside.exchange == pytest.approx(sent / NODE)
    assert between.exchange == pytest.approx(sent / (BANDWIDTH_EFFICIENCY * 50e9))


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"tensor": 4},
        {"context": 4},
        {"tensor": 4, "way": "on"},
        {"tensor": 4, "way": "overlap"},
    ],
)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_stages_together_take_what_one_mesh_takes(policy, mesh):
    ends = (range(9), range(9, 20), range(20, 28))
    stages = [stage(layers, policy=policy, unsaved=300e3, **mesh) for layers in ends]
    # The first of the LLM's stages exchanges encoders' tokens.
    batch = replace(BATCH, widths={"vision": 4096}, peers=16)
    if "context" in mesh:
        # of short samples
        batch = replace(batch, context=mesh["context"], pairs={"llm": 4096.0 * 512})
    whole = stage(policy=policy, unsaved=300e3, **mesh)
    found = passes(whole, batch)
    assert sum(passes(one, batch).total for one in stages) == pytest.approx(found.total, rel=0.01)
    exchanged = passes(stages[0], batch).total - passes(stages[0], replace(batch, widths={})).total
    assert exchanged == pytest.approx(found.exchange)
    assert found.exchange > 0.01 * found.compute
    assert (found.context > 0) == ("context" in mesh)
    updates = sum(update_seconds(MODEL, one, AdamW()) for one in stages)
    assert updates == pytest.approx(update_seconds(MODEL, whole, AdamW()), rel=1e-6)


def test_stages_send_tokens_to_the_devices_of_their_experts_as_one_mesh_does():
    experts = ExpertsConfig(layers=tuple(range(3, 28)), count=16, per_token=2, width=1024)
    model = replace(MODEL, llm=replace(MODEL.llm, experts=experts))
    stages = [stage(layers, model=model, expert=8) for layers in (range(9), range(9, 28))]
    first, second = (passes(one, model=model).exchange for one in stages)
    assert first + second == pytest.approx(
        passes(stage(model=model, expert=8), model=model).exchange
    )
    # In proportion to their layers with experts.
    assert second == pytest.approx(19 / 6 * first)
    # Nobody gathers the experts of other devices: hidden behind long passes, and waited for in
    # short ones.
    short = DeviceBatch({"llm": (1, 64)}, {})
    gathered = replace(stages[1], experts=0.0)
    assert passes(stages[1], short, model).total < 0.5 * passes(gathered, short, model).total


def test_a_stage_without_a_backward_pass_has_none_and_short_passes_wait_for_their_shards():
    assert pass_times(MODEL, replace(stage(range(4)), has_backward=False), BATCH)[1] == PassTime()
    short = DeviceBatch({"llm": (1, 64)}, {})
    alone, sharded = (pass_times(MODEL, stage(range(4), fsdp=n), short) for n in (1, 8))
    count = 4 / 28 * parameters(MODEL)["llm"]
    gather = 2 * count * 7 / 8 / NODE
    assert sharded[0].total == pytest.approx(gather)
    assert sharded[0].total > alone[0].total
    assert sharded[1].total == pytest.approx(2 * gather)


def test_activations_cross_the_network_between_nodes_and_links_inside():
    sender = stage(range(14), range(2), data=2)
    inside, outside = (stage(range(14, 28), range(n, n + 4), data=2, tensor=2) for n in (2, 8))
    # Two ranks send their rows to two devices each.
    size = 2 * 4096 * MODEL.llm.width * 2
    assert edge_seconds(MODEL, sender, inside, BATCH) == pytest.approx(size / NODE)
    assert edge_seconds(MODEL, sender, outside, BATCH) == pytest.approx(
        size / (BANDWIDTH_EFFICIENCY * 50e9)
    )


def test_devices_that_share_a_row_pass_their_own_tokens_on():
    sender, receiver = (stage(range(14), range(n, n + 4), context=4) for n in (0, 4))
    batch = DeviceBatch({"llm": (1, 4096)}, {}, context=4)
    size = 4096 * MODEL.llm.width * 2
    assert edge_seconds(MODEL, sender, receiver, batch) == pytest.approx(size / NODE)


def test_gradients_are_added_over_data_alone():
    one, four = stage(range(14)), stage(range(14), data=4)
    assert reduce_seconds(one) == 0
    assert reduce_seconds(four) == pytest.approx(2 * four.trainable * 3 / 4 / NODE)
    # On one mesh every microbatch adds them, behind its computing where that lasts long enough.
    whole, short = stage(data=4), DeviceBatch({"llm": (1, 64)}, {})
    assert reduce_seconds(whole) == 0
    waits = 2 * whole.trainable * 3 / 4 / NODE - pass_times(MODEL, whole, short)[1].compute
    assert passes(whole, short).shards == pytest.approx(waits)
