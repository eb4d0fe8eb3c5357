"""What a device holds beside activations is what the trainer puts there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_shape import plan_of, with_settings

from mmjax.config import (
    Adafactor,
    AdamW,
    Config,
    DecoderConfig,
    ExpertsConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    Muon,
    OptimizerConfig,
)
from mmjax.config.loading import load
from mmjax.models.layer_stacks import split_scanned
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.planning.memory import (
    ModelSharding,
    dispatch_bytes,
    layer_matrices,
    parameter_bytes,
    saved_bytes,
)
from mmjax.planning.work import layer_sizes
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import make_optimizer

EIGHT = {"fsdp": 8}


def on_first_device(tree) -> int:
    first = jax.devices()[0]
    return sum(
        s.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for s in leaf.addressable_shards
        if s.device == first
    )


def held(config: Config, mesh: dict[str, int] | None = None, **settings: Any) -> dict[str, float]:
    """Bytes by kind, apart from saved activations, of rows of 64 positions."""
    shape = dict.fromkeys(("llm", *config.model.item_modules), (1, 64))
    ranks = math.prod((mesh or {}).values())
    config = with_settings(config, **settings)
    return plan_of(config, [shape], mesh, widths={"vision": 8}, peers=min(4, ranks)).fullest.fixed


OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamW(),
    "adamw-bfloat16": AdamW(moments="bfloat16"),
    "adamw-int8": AdamW(moments="int8"),
    "muon": Muon(),
    "muon-int8": Muon(moments="int8"),
    "adafactor": Adafactor(),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tiny_omni", "tiny_frozen"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_gradients_and_moments_of_a_sharded_run_are_as_predicted(name, optimizer):
    config = replace(load(name), optimizer=optimizer)
    mesh = make_mesh(MeshConfig(1, fsdp=8), jax.devices()[:8])
    model = Model.build(config.model, jnp.float32)
    executor = Executor.on_mesh(
        model, make_optimizer(optimizer, model.axes), mesh, ShardingRules(), sources=1
    )
    state, sums = executor.init(jax.random.key(0)), executor.zeros()
    predicted = held(config, EIGHT, microbatches=2)
    assert on_first_device((state.trainable, state.frozen)) == predicted["parameters"]
    assert on_first_device(sums[0].gradients) == predicted["gradients"]
    assert on_first_device(state.stages[0].optimizer) == pytest.approx(
        predicted["optimizer"], abs=64
    )  # counts of updates


@pytest.mark.parametrize("how", ["int8", "fp8", "nf4"])
def test_quantised_weights_take_the_bytes_of_their_codes_and_scales(how):
    base = load("tiny_omni").model
    llm = replace(
        base.llm, width=64, heads=4, kv_heads=2, head_width=16, mlp_width=128, quantize=how
    )
    model = replace(base, llm=llm, lora={"llm": LoraConfig(("llm.layers.*",))})
    built = Model.build(model, jnp.bfloat16)
    executor = Executor.on_mesh(
        built,
        make_optimizer(AdamW(), built.axes),
        make_mesh(MeshConfig(1), jax.devices()[:1]),
        ShardingRules(),
        sources=1,
    )
    frozen = executor.states[0].abstract.frozen["llm"]
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(frozen))
    assert parameter_bytes(model, built.frozen, 2)["llm"] == stored


def test_lora_of_a_7b_model_is_planned_below_16_gb_where_its_weights_are_quantised():
    """One row of 4,096 tokens in the shape of Qwen2.5-7B, all layers computed again; docs/measurements/gpu.md."""
    llm = DecoderConfig(
        28, 3584, 28, 4, 128, 18_944, 152_064, tied=False, attention="flash", remat="full"
    )
    planned = {}
    for how in ("none", "int8", "nf4"):
        model = ModelConfig(
            replace(llm, quantize=how), lora={"llm": LoraConfig(("llm.layers.*",), rank=64)}
        )
        config = replace(load("tiny_omni"), model=model, optimizer=AdamW())
        planned[how] = (
            plan_of(with_settings(config, "bfloat16", chunks=8), [{"llm": (1, 4096)}]).device / 1e9
        )
    assert planned["nf4"] < planned["int8"] < 16 < planned["none"]
    assert planned["nf4"] == pytest.approx(9.9, abs=0.5)


def test_what_is_frozen_has_no_gradients_and_moments_and_lies_in_the_precision_of_the_computation():
    config = replace(load("tiny_omni"), optimizer=AdamW())
    frozen = replace(
        config, model=replace(config.model, llm=replace(config.model.llm, frozen=True))
    )
    whole, part = (held(c, precision="bfloat16", microbatches=2) for c in (config, frozen))
    for kind in ("gradients", "optimizer", "copies"):
        assert part[kind] < 0.9 * whole[kind]
    # and a count of updates
    assert whole["optimizer"] == pytest.approx(2 * whole["gradients"], rel=1e-5)
    assert whole["gradients"] == whole["parameters"]
    llm = whole["gradients"] - part["gradients"]
    assert part["parameters"] == whole["parameters"] - llm / 2


def test_moments_of_two_bytes_and_one_are_a_half_and_a_quarter_and_adafactor_has_one_or_none():
    omni = load("tiny_omni")
    optimizer = lambda o: held(replace(omni, optimizer=o))["optimizer"]  # noqa: E731
    for whole in (AdamW(), Muon()):
        # Vectors stay float32, codes have a scale for each row, and Adafactor has factors.
        assert optimizer(replace(whole, moments="bfloat16")) == pytest.approx(
            optimizer(whole) / 2, rel=0.02
        )
        assert optimizer(replace(whole, moments="int8")) == pytest.approx(
            optimizer(whole) / 4, rel=0.1
        )
    assert optimizer(Adafactor()) == pytest.approx(optimizer(AdamW()) / 4, rel=0.1)
    assert optimizer(Adafactor(b1=0.0)) < 0.05 * optimizer(AdamW())
    saved = [saved_bytes(omni.model, 4, o) for o in (AdamW(), AdamW(moments="int8"))]
    assert saved[0] == pytest.approx(3 / 1.5 * saved[1])


def test_copies_of_the_parameters_divide_moments_over_data_alone():
    omni = load("tiny_omni")
    whole, divided = (
        replace(omni, optimizer=AdamW(over_data=over_data)) for over_data in (False, True)
    )
    four = {"fsdp": 2, "data": 4}
    # all have the count of updates
    quarter = pytest.approx(held(whole, four)["optimizer"] / 4, rel=1e-4)
    assert held(divided, four) == held(whole, four) | {"optimizer": quarter}
    assert held(divided, {"fsdp": 2}) == held(whole, {"fsdp": 2})


def test_moments_in_host_memory_take_none_between_updates_and_their_own_in_one():
    omni = load("tiny_omni")
    adamw = replace(omni, optimizer=AdamW())
    there = replace(omni, optimizer=AdamW(offload=True))
    shape = dict.fromkeys(("llm", "vision", "audio"), (1, 64))
    on_device, in_passes = (plan_of(c, [shape]) for c in (adamw, there))
    assert in_passes.fullest.fixed["optimizer"] == 0
    assert in_passes.device < on_device.device
    # The update has its peak: moments are loaded when activations are gone.
    kinds = ("parameters", "gradients", "batch", "optimizer")
    assert in_passes.device == pytest.approx(sum(on_device.fullest.fixed[kind] for kind in kinds))


def test_muons_update_counts_where_it_takes_more_than_the_copies_that_are_gone_by_then():
    omni = load("tiny_omni")
    layer = layer_sizes(omni.model.llm)
    alone = replace(omni, model=replace(omni.model, encoders={}))
    deep = replace(alone, model=replace(alone.model, llm=replace(alone.model.llm, layers=16)))
    for config, layers in ((alone, 1), (deep, 2)):  # of one of eight devices
        found = held(config, EIGHT, microbatches=2)
        adamw = held(replace(config, optimizer=AdamW()), EIGHT, microbatches=2)["transient"]
        matrices = layer_matrices(config.model)["llm"] / config.model.llm.layers
        update = 2 * 4 * layers * matrices + 4 * layer.width * layer.mlp
        assert found["transient"] == max(adamw, update - found["copies"]) > adamw
    single = [
        held(replace(deep, optimizer=o), microbatches=2)["transient"] for o in (AdamW(), Muon())
    ]
    assert single[0] == single[1]


def test_with_one_microbatch_gradients_of_matrices_take_the_precision_of_the_computation_and_none_wait_to_be_added():
    config = replace(load("tiny_omni"), optimizer=AdamW())
    one, several = (held(config, precision="bfloat16", microbatches=n) for n in (1, 2))
    model = Model.build(config.model, jnp.bfloat16)
    matrices = [x.size for x in jax.tree.leaves(split_scanned(model.abstract)[0])]
    assert several["gradients"] - one["gradients"] == 2 * sum(matrices)
    assert several["copies"] - one["copies"] == 2 * (several["gradients"] / 4 - sum(matrices))


@pytest.mark.parametrize("chunks", [1, 8])
def test_the_moment_of_the_loss_is_the_logits_of_a_part_and_the_sums_of_its_products(chunks):
    config = replace(load("tiny_omni"), optimizer=AdamW())
    config = replace(
        config, model=replace(config.model, llm=replace(config.model.llm, vocab=65_536))
    )
    vocab, width = config.model.llm.vocab, config.model.llm.width
    alone, shared = (held(config, mesh, microbatches=2, chunks=chunks) for mesh in ({}, EIGHT))
    # Parts of the tokens have no activations in float32, whose gradient they make once.
    assert alone["transient"] == 4 * 64 * (vocab / chunks + (1 + (chunks == 1)) * width)
    # On many devices a part of the table is gathered for both passes, and has its gradient whole.
    table = width * vocab / chunks
    assert shared["transient"] == 4 * 64 * (vocab / chunks + 2 * width) + 2 * 4 * table
    # In bfloat16 the gradient of the logits has an array of its own, and they are gone before the
    # table's comes.
    half = held(config, EIGHT, precision="bfloat16", microbatches=2, chunks=chunks)["transient"]
    assert half == 4 * 64 * 2 * width + 2 * table + max(
        6 * 64 * vocab / chunks, 2 * 64 * vocab / chunks + 2 * table
    )
    others = {kind for kind, n in held(config, microbatches=2).items() if n != alone[kind]}
    assert others == ({"transient"} if chunks > 1 else set())


def test_parts_of_the_tokens_take_the_cast_table_and_what_of_its_float32_gradient_has_no_room_yet():
    config = load("tiny_omni")

    def moment(frozen: bool, microbatches: int) -> float:
        llm = replace(config.model.llm, vocab=65_536, tied=True, frozen=frozen)
        changed = replace(config, model=replace(config.model, llm=llm))
        return held(changed, precision="bfloat16", microbatches=microbatches, chunks=8)["transient"]

    width = config.model.llm.width
    part = 64 * (6 * 65_536 / 8 + 4 * width)  # logits with their gradient, and the activations'
    table = 65_536 * width
    assert moment(True, 1) == moment(True, 2) == part
    assert moment(False, 1) == part + 2 * table
    # Where gradients are added up, the room of those outside the layers is half of what these take.
    assert part + 2 * table < moment(False, 2) <= part + 4 * table


def test_with_one_microbatch_what_is_temporary_lies_where_the_gradient_of_an_embedding_of_its_own_will():
    config = load("tiny_omni")
    llm = replace(config.model.llm, tied=False)
    table = 4 * llm.vocab * llm.width
    found = {}
    for tied in (False, True):
        model = replace(config.model, llm=replace(llm, tied=tied))
        found[tied] = [
            held(replace(config, model=model), microbatches=n)["transient"] for n in (1, 2)
        ]
    assert found[False][0] == max(found[False][1] - table, 0)
    assert found[True][0] == found[True][1]


def test_sharded_matrices_of_attentions_output_and_of_down_lie_on_the_device_twice():
    config = replace(load("tiny_omni"), optimizer=AdamW())
    copies = [held(config, mesh)["copies"] for mesh in ({}, EIGHT)]
    towers = (config.model.llm, *config.model.encoders.values())
    sizes = [(tower.layers, layer_sizes(tower)) for tower in towers]
    twice = 4 * sum(layers * size.width * (size.queries + size.mlp) for layers, size in sizes)
    assert copies[1] == pytest.approx((copies[0] + twice) / 8, rel=0.05)  # vectors are not divided


def test_tensor_parallelism_cuts_the_logits():
    config = load("tiny_omni")
    config = replace(config, model=replace(config.model, llm=replace(config.model.llm, vocab=8192)))
    streams = 2 * 4 * 64 * config.model.llm.width
    whole, halved = (
        held(config, mesh)["transient"] - streams for mesh in (EIGHT, {"fsdp": 4, "tensor": 2})
    )
    assert halved == whole / 2


def test_an_exchange_has_room_for_what_is_sent_and_what_arrives_and_two_steps_batches_lie_on_the_device():
    config = load("tiny_omni")
    found = held(config, {"data": 4})
    assert found["exchange"] == 2 * 4 * 8 * config.model.llm.width * 4
    assert held(config, {"data": 4}, microbatches=3)["batch"] == 3 * found["batch"]
    text = 4 * 64 * (12 + 2)
    assert found["batch"] > 2 * text


def test_memory_of_a_layer_with_experts_does_not_grow_with_the_devices_that_share_them():
    experts = ExpertsConfig((0,), count=128, per_token=8, width=64)
    llm = DecoderConfig(1, 512, 8, 8, 64, 512, vocab=8, experts=experts)
    shared = [dispatch_bytes(llm, 4096, ModelSharding(experts=n), 2) for n in (1, 8, 32)]
    copies = 2 * 8 * 4096 * 4 * 512
    assert shared[0] == copies
    assert copies < shared[1] < shared[2] < 3 * copies  # not 8 and 32 times as many
