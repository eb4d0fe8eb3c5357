"""A stage is charged what one mesh is charged for its layers, and what its links take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmjax.autotune.sharded_stages import model_sharding
from mmjax.config import AdamW, ExpertsConfig, Layout, ModelConfig, SequenceParallel
from mmjax.config.loading import load
from mmjax.cost.table import module_parameters, parameters
from mmjax.planning.flops import frozen_modules
from mmjax.planning.hardware import BANDWIDTH_EFFICIENCY, parse_cluster
from mmjax.planning.memory import MASTER, DeviceBatch, moment_bytes
from mmjax.planning.stage_time import StageRun, edge_seconds, pass_seconds, reduce_seconds, update_seconds
from mmjax.planning.step_time import ClusterRun, Speed, step_time

MODEL = replace(load("omni_10b").model, encoders={})
BATCH = DeviceBatch({"llm": (1, 4096)}, {})
CLUSTER = parse_cluster("h100x4x8")


def stage(
    layers: range,
    devices: range = range(1),
    policy: str = "none",
    way: SequenceParallel = "off",
    model: ModelConfig = MODEL,
    **mesh: int,
) -> StageRun:
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | mesh
    sharding = model_sharding(Layout(**mesh, sequence_parallel=way), sizes)
    share = len(layers) / model.llm.layers / sharding.shards
    count = parameters(model)["llm"] * share
    return StageRun(
        tower="llm",
        layers=layers,
        policies=(policy,) * len(layers),
        devices=devices,
        machine=ClusterRun(CLUSTER, sizes, sharding, Speed(CLUSTER.device.rates("bfloat16")), 2),
        trainable=MASTER * count,
        frozen=0.0,
        moments=share * moment_bytes(model, frozen_modules(model), AdamW())["llm"],
        has_backward=True,
        unsaved=300e3,
        experts=MASTER * module_parameters(model)["llm"].experts * share,
    )


@pytest.mark.parametrize(
    "mesh", [{}, {"tensor": 4}, {"context": 4}, {"tensor": 4, "way": "on"}, {"tensor": 4, "way": "overlap"}]
)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_stages_together_take_what_one_mesh_takes(policy, mesh):
    ends = (range(9), range(9, 20), range(20, 28))
    stages = [stage(layers, policy=policy, **mesh) for layers in ends]
    whole = replace(MODEL, llm=replace(MODEL.llm, remat=policy))
    # The first of the LLM's stages exchanges encoders' tokens.
    batch = replace(BATCH, widths={"vision": 4096}, peers=16)
    if "context" in mesh:
        batch = replace(batch, context=mesh["context"], pairs={"llm": 4096.0 * 512})  # of short samples
    found = step_time(whole, (batch,), {"llm": 300e3}, stages[0].machine, AdamW())
    passes = [sum(pass_seconds(MODEL, one, batch)) for one in stages]
    apart = found.tensor + found.exchange + found.context
    assert sum(passes) == pytest.approx(found.compute + found.recompute + apart, rel=0.01)
    alone = sum(pass_seconds(MODEL, stages[0], replace(batch, widths={})))
    assert passes[0] - alone == pytest.approx(found.exchange)
    assert found.exchange > 0.01 * found.compute
    assert (found.context > 0) == ("context" in mesh)
    assert sum(update_seconds(MODEL, one, AdamW()) for one in stages) == pytest.approx(found.update, rel=1e-6)


def test_stages_send_tokens_to_the_devices_of_their_experts_as_one_mesh_does():
    experts = ExpertsConfig(layers=tuple(range(3, 28)), count=16, per_token=2, width=1024)
    model = replace(MODEL, llm=replace(MODEL.llm, experts=experts))
    ends = (range(9), range(9, 28))
    stages = [stage(layers, model=model, expert=8) for layers in ends]
    found = step_time(model, (BATCH,), {"llm": 300e3}, stages[0].machine, AdamW())
    alone = [replace(one, machine=stage(layers).machine) for one, layers in zip(stages, ends, strict=True)]
    sent = [sum(pass_seconds(model, one, BATCH)) for one in stages]
    kept = [sum(pass_seconds(model, one, BATCH)) for one in alone]
    assert sum(sent) - sum(kept) == pytest.approx(found.exchange)
    # In proportion to their layers with experts.
    assert sent[1] - kept[1] == pytest.approx(19 / 6 * (sent[0] - kept[0]))
    # Nobody gathers the experts of other devices: hidden behind long passes, and waited for in short ones.
    short = DeviceBatch({"llm": (1, 64)}, {})
    gathered = replace(stages[1], experts=0.0)
    assert sum(pass_seconds(model, stages[1], short)) < 0.5 * sum(pass_seconds(model, gathered, short))


def test_a_stage_without_a_backward_pass_has_none_and_short_passes_wait_for_their_shards():
    assert pass_seconds(MODEL, replace(stage(range(4)), has_backward=False), BATCH)[1] == 0
    short = DeviceBatch({"llm": (1, 64)}, {})
    alone, sharded = (pass_seconds(MODEL, stage(range(4), fsdp=n), short) for n in (1, 8))
    count = 4 / 28 * parameters(MODEL)["llm"]
    gather = 2 * count * 7 / 8 / (BANDWIDTH_EFFICIENCY * 450e9)
    assert sharded[0] == pytest.approx(gather)
    assert sharded[0] > alone[0]
    assert sharded[1] == pytest.approx(2 * gather)


def test_activations_cross_the_network_between_nodes_and_links_inside():
    sender = stage(range(14), range(2), data=2)
    inside, outside = (stage(range(14, 28), range(n, n + 4), data=2, tensor=2) for n in (2, 8))
    # Two ranks send their rows to two devices each.
    size = 2 * 4096 * MODEL.llm.width * 2
    assert edge_seconds(MODEL, sender, inside, BATCH) == pytest.approx(size / (BANDWIDTH_EFFICIENCY * 450e9))
    assert edge_seconds(MODEL, sender, outside, BATCH) == pytest.approx(size / (BANDWIDTH_EFFICIENCY * 50e9))


def test_devices_that_share_a_row_pass_their_own_tokens_on():
    sender, receiver = (stage(range(14), range(n, n + 4), context=4) for n in (0, 4))
    batch = DeviceBatch({"llm": (1, 4096)}, {}, context=4)
    size = 4096 * MODEL.llm.width * 2
    assert edge_seconds(MODEL, sender, receiver, batch) == pytest.approx(size / (BANDWIDTH_EFFICIENCY * 450e9))


def test_gradients_are_added_over_data_alone():
    one, four = stage(range(14)), stage(range(14), data=4)
    assert reduce_seconds(one) == 0
    assert reduce_seconds(four) == pytest.approx(2 * four.trainable * 3 / 4 / (BANDWIDTH_EFFICIENCY * 450e9))
