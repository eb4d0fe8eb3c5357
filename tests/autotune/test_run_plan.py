"""A stage's remat policies fit its own devices, with what its depth keeps in flight."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_executor import config_of, deepstack_config_of, with_experts

from mmjax.autotune.memory_plan import describe_shortage
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.run_time import simulate_stages, time_stages
from mmjax.config import Config, Unit
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import RankLayout, make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.planning.balanced_cuts import with_balanced_cuts
from mmjax.planning.hardware import Rates, parse_cluster
from mmjax.planning.remat import MemoryLimit, StagePlan
from mmjax.planning.speed import Speed
from mmjax.runtime.units import units_topology

CLUSTER = parse_cluster("h100x8")
SPEED = Speed(Rates(1e9, 1e9, 1e9))


def stages_of(config: Config, layout: RankLayout, limit: float = math.inf) -> tuple[StagePlan, ...]:
    plan = plan_run(config, layout, SPEED, MemoryLimit(limit))
    assert plan.fits, describe_shortage(plan)
    return time_stages(config, layout, plan, CLUSTER, SPEED).stages


def test_deep_stages_hold_more_and_recompute_first_and_none_fits_nothing(tmp_path):
    config = config_of("all in stages", remat="auto")
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    layout = make_planner(index, config, [1.0], units_topology(config.units))[1]

    def plan(limit: float) -> dict:
        return {p.name: p for p in stages_of(config, layout, limit)}

    ample = plan(math.inf)
    first, *middle, last = ample
    assert [first, *middle, last] == [
        "audio + vision + llm[0:1]",
        "llm[1:2]",
        "llm[2:3]",
        "llm[3:4]",
    ]
    assert [p.in_flight for p in ample.values()] == [4, 3, 2, 1]
    assert {
        policy for p in ample.values() for policies in p.policies.values() for policy in policies
    } == {"none"}
    second = ample[middle[0]]
    assert second.memory["activations"] == pytest.approx(3 * ample[last].memory["activations"])
    # Layers of one device share its memory, whichever towers they are of.
    tight = plan(ample[first].bytes - 0.1 * ample[first].memory["activations"])
    assert set(sum(tight[first].policies.values(), ())) != {"none"}
    assert set(tight[last].policies["llm"]) == {"none"}
    assert tight[first].bytes < ample[first].bytes
    timeline = simulate_stages(config, list(ample.values()))
    assert 0 < timeline.bubble < 1
    assert timeline.in_flight.tolist() == [p.in_flight for p in ample.values()]
    with pytest.raises(
        AssertionError, match=r"stage .* needs .* of each device and there are 0\.3 MB"
    ):
        plan(3e5)


def test_the_llms_first_stage_holds_what_its_ranks_exchange(tmp_path):
    config = config_of("by module", tied=False)
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    layout = make_planner(index, config, [1.0], units_topology(config.units))[1]
    wide = replace(
        layout,
        topology=replace(layout.topology, peers=8),
        shapes=tuple(s._replace(widths=(10_000, 0)) for s in layout.shapes),
    )
    plain, exchanging = (stages_of(config, of) for of in (layout, wide))
    for before, after in zip(plain, exchanging, strict=True):
        if before.name.startswith("llm[0:"):
            sent_and_received = 2 * 8 * 10_000 * config.model.llm.width * 4
            assert after.memory["transient"] + after.memory["copies"] == sent_and_received
            assert after.memory["batch"] > before.memory["batch"]
        else:
            assert after.memory == before.memory


def test_devices_that_share_a_row_hold_their_part_of_it_and_room_for_all_tokens_of_their_rank(
    tmp_path,
):
    config = config_of("context", tied=False)
    llm = replace(config.model.llm, attention="blockwise")
    config = replace(config, model=replace(config.model, llm=llm))
    alone = replace(config, units=config.units | {"llm": Unit(pipeline=2)})
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    plans = []
    for of in (alone, config):
        layout = make_planner(index, of, [1.0], units_topology(of.units))[1]
        plans.append({p.name: p for p in stages_of(of, layout)})
    one, two = plans
    assert two["llm[0:2]"].mesh == {"context": 2}
    for name in ("llm[0:2]", "llm[2:4]"):
        for kind in ("parameters", "optimizer", "activations", "messages"):
            assert two[name].memory[kind] == pytest.approx(one[name].memory[kind] / 2, rel=0.2), (
                name,
                kind,
            )
        assert two[name].forward == pytest.approx(one[name].forward / 2, rel=0.2)
    # The tables say of all tokens of a rank which go to each of its devices.
    assert two["llm[0:2]"].memory["batch"] > two["llm[2:4]"].memory["batch"]
    assert one["llm[0:2]"].memory["batch"] == one["llm[2:4]"].memory["batch"]


def test_stages_hold_what_their_layouts_divide(tmp_path):
    config = config_of("by module", tied=False)
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)

    def plan(config: Config, **units: Unit) -> dict[str, StagePlan]:
        config = replace(config, units=units)
        layout = make_planner(index, config, [1.0], units_topology(config.units))[1]
        return {p.name.partition("[")[0]: p for p in stages_of(config, layout)}

    alone = plan(config, vision=Unit(data=2), audio=Unit(fsdp=2), llm=Unit())
    cut = plan(config, vision=Unit(tensor=2), audio=Unit(context=2), llm=Unit(tensor=2))
    divided = plan(
        config,
        vision=Unit(tensor=2, encoders="data"),
        audio=Unit(context=2),
        llm=Unit(tensor=2, sequence_parallel="on"),
    )
    held = {name: p.memory["activations"] for name, p in divided.items()}
    assert held["llm"] == alone["llm"].memory["activations"] / 2 < cut["llm"].memory["activations"]
    assert divided["llm"].memory["parameters"] == cut["llm"].memory["parameters"]
    # An encoder's rows over the tensor axis: parameters are cut, and layers compute other rows.
    assert (
        held["vision"]
        == alone["vision"].memory["activations"]
        < cut["vision"].memory["activations"]
    )
    parameters = [p["vision"].memory["parameters"] for p in (divided, cut, alone)]
    assert parameters[0] == parameters[1] < 0.6 * parameters[2]
    assert divided["vision"].forward == pytest.approx(alone["vision"].forward)
    # Context is more ranks for an encoder's rows, which share its parameters as those of fsdp do.
    assert cut["audio"].memory == alone["audio"].memory


@pytest.mark.exhaustive
def test_devices_that_share_experts_hold_as_much_as_those_that_share_all_parameters(tmp_path):
    config = with_experts(config_of("by module", tied=False))
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    plans = []
    for llm in (Unit(expert=2), Unit(fsdp=2)):
        of = replace(config, units=config.units | {"llm": llm})
        layout = make_planner(index, of, [1.0], units_topology(of.units))[1]
        plans.append({p.name: p for p in stages_of(of, layout)}["llm"])
    shared, sharded = plans
    assert shared.mesh == {"expert": 2}
    for kind in ("parameters", "optimizer", "activations", "messages"):
        assert shared.memory[kind] == pytest.approx(sharded.memory[kind], rel=0.01), kind
    # tokens that come from other devices
    assert shared.memory["transient"] != sharded.memory["transient"]


@pytest.mark.exhaustive
def test_stages_inside_a_deepstack_share_its_connectors_time_and_hold_the_tokens_that_wait(
    tmp_path,
):
    def plan(config: Config) -> dict:
        index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
        layout = make_planner(index, config, [1.0], units_topology(config.units))[1]
        return {p.name: p for p in stages_of(config, layout)}

    config = deepstack_config_of("deep")
    vision = config.model.encoders["vision"]
    without = replace(
        config,
        model=replace(
            config.model, encoders=config.model.encoders | {"vision": replace(vision, deepstack=())}
        ),
    )
    cut, uncut = plan(config), plan(replace(config, units=config.units | {"vision": Unit()}))
    plain = plan(without)
    for kind in ("forward", "backward"):
        both = sum(getattr(cut[name], kind) for name in ("vision[0:2]", "vision[2:4]"))
        # Each stage counts the first embedding, of a hundredth of the work.
        assert both == pytest.approx(getattr(uncut["vision"], kind), rel=0.03)
    extra = {
        name: cut[name].memory["messages"] - stage.memory["messages"]
        for name, stage in plain.items()
    }
    # Of the first tokens four microbatches wait, as many as their stage has in flight; of the last,
    # three.
    assert [cut[name].in_flight for name in ("vision[0:2]", "vision[2:4]")] == [4, 3]
    assert extra["vision[0:2]"] == extra["vision[2:4]"] == 0 < extra["llm[0:1]"]
    assert extra["llm[1:4]"] / extra["llm[0:1]"] == pytest.approx((4 + 3) / 4)


def test_copies_of_encoders_hold_as_much_whatever_the_microbatches_and_the_first_alone_has_moments(
    tmp_path,
):
    config = config_of("beside", ("audio",), remat="auto")
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    layout = make_planner(index, config, [1.0], units_topology(config.units))[1]
    by_count = {}
    for count in (12, 64):
        many = with_balanced_cuts(
            replace(config, batch=replace(config.batch, microbatches=count)),
            *layout.rows_and_lengths,
        )
        plan = plan_run(many, layout, SPEED, MemoryLimit(math.inf))
        by_count[count] = {stage.name: stage for stage in plan.stages}
        assert {tower: len(p) for tower, p in plan.policies.items()} == {
            "llm": 4,
            "vision": 2,
            "audio": 2,
        }
    few, many = by_count[12], by_count[64]
    for name in (f"{tower} copy {copy}" for tower in ("vision", "audio") for copy in range(4)):
        assert many[name].memory["activations"] == few[name].memory["activations"]
        assert many[name].in_flight == few[name].in_flight <= 3
        assert many[name].policies == many[name.replace(name[-1], "0")].policies
        assert (many[name].memory["optimizer"] > 0) == name.endswith("0")
        assert (
            many[name].memory["parameters"]
            == many[name.replace(name[-1], "0")].memory["parameters"]
        )
