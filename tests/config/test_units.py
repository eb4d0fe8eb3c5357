"""Units take devices, and their stages layers and layouts."""

from __future__ import annotations

import jax
import pytest

from mmjax.config.loading import find_config, load
from mmjax.config.training import unit_devices
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import CONTEXT, RANKS, TENSOR, ShardingRules
from mmjax.planning.reorder import make_reordering
from mmjax.planning.schedules import list_stages, schedule_name, stage_cuts, unit_graph
from mmjax.runtime.passes import stage_graph
from mmjax.runtime.placement import place_stages
from mmjax.runtime.units import unit_meshes, units_topology

ALL = "units.all.modules=llm,vision,audio"
BESIDE = ("units.vision.beside=llm", "units.audio.beside=llm", "units.llm.pipeline=3")
GOOD = ("units.vision.data=2", "units.audio.fsdp=1", "units.llm.pipeline=3")


def test_units_take_devices_in_order_and_their_stages_layers():
    config = load(find_config("tiny_omni"), GOOD)
    model = Model.build(config.model, "float32", stage_cuts(config))
    placed = place_stages(config, model, jax.devices()[:6])
    assert [(p.name, [d.id for d in p.mesh.devices.flat]) for p in placed] == [
        ("vision", [0, 1]),
        ("audio", [2]),
        ("llm[0:1]", [3]),
        ("llm[1:2]", [4]),
        ("llm[2:3]", [5]),
    ]
    assert schedule_name(config) == "1f1b"
    with pytest.raises(
        UserError,
        match=r"the units need 6 devices \(vision 2 \+ audio 1 \+ llm 3\) and there are 8",
    ):
        unit_meshes(config, jax.devices())


def test_every_stage_has_the_layout_of_its_unit():
    words = (
        *("units.vision.tensor=2", "units.vision.encoders=data", "units.audio.context=2"),
        *(
            "units.llm.tensor=2",
            "units.llm.sequence_parallel=overlap",
            "mesh.context_attention=gather",
        ),
    )
    config = load(find_config("tiny_omni"), words)
    model = Model.build(config.model, "float32", stage_cuts(config))
    vision, audio, llm = place_stages(config, model, jax.devices()[:6])
    assert vision.rules == ShardingRules(
        item_rows=(*RANKS, CONTEXT, TENSOR), context_attention="gather"
    )
    assert audio.rules == ShardingRules(context_attention="gather")
    sequence = (CONTEXT, TENSOR)
    assert llm.rules == ShardingRules(sequence=sequence, ring=(TENSOR,), context_attention="gather")
    own = load(find_config("tiny_omni"), (*words, "units.llm.context_attention=heads"))
    assert place_stages(own, model, jax.devices()[:6])[2].rules.context_attention == "heads"
    # Two ranks of each encoder's rows, on one rank of the LLM.
    assert units_topology(config.units).encoders_per_rank == 2
    ragged = load(find_config("tiny_omni"), (*words, "units.llm.exchange=ragged"))
    with pytest.raises(
        UserError, match=r"units\.llm\.exchange=ragged: a CPU .*; use units\.llm\.exchange=padded"
    ):
        unit_meshes(ragged, jax.devices()[:6])


@pytest.mark.parametrize(
    "words",
    [
        GOOD,
        ("units.both.modules=vision,audio", "units.llm.pipeline=2", "units.llm.cuts=1"),
        (ALL, "units.all.pipeline=3"),
        (ALL, "units.all.pipeline=4", "units.all.cuts=(vision.1,audio.1,llm.1)"),
        (
            "units.vision.data=2",
            "units.audio.data=1",
            "units.llm.pipeline=2",
            "units.llm.virtual=2",
            "model.llm.layers=4",
        ),
    ],
)
def test_microbatches_are_reordered_by_the_stages_that_are_run(words):
    config = load(find_config("tiny_omni"), (*words, "batch.microbatches=4"))
    cuts = stage_cuts(config)
    placed = place_stages(
        config,
        Model.build(config.model, "float32", cuts),
        jax.devices()[: sum(map(unit_devices, config.units.values()))],
    )
    times = make_reordering(config, (4, 4, 4), ((128, 256, 128), (256, 256, 128)))
    run = stage_graph(placed)
    assert (times.graph.depths, times.graph.workers) == (run.depths, run.workers)
    llm = [number for number, stage in enumerate(placed) if stage.stage.text]
    # A row twice as long takes the LLM more than twice as long, and no encoder longer; the last
    # stage has the logits.
    for number, on_devices in enumerate(placed):
        short, long = times.forward[number]
        # Of a stage that encodes too, only the LLM's part grows.
        whole = 2 if on_devices.stage.towers == ("llm",) else 1
        assert long > whole * short - 2 if number in llm else long == short
        assert times.backward[number, 0] > times.forward[number, 0]


def test_encoders_rows_are_planned_for_ranks_that_all_units_divide():
    config = load(
        find_config("tiny_omni"), ("units.vision.data=3", "units.audio.data=1", "units.llm.data=2")
    )
    topology = units_topology(config.units)
    assert (topology.ranks, topology.encoders_per_rank) == (2, 3)


def test_devices_that_share_a_row_of_the_llm_take_as_many_encoder_rows_each():
    words = ("units.vision.data=3", "units.audio.data=1", "units.llm.data=2", "units.llm.context=2")
    config = load(find_config("tiny_omni"), words)
    topology = units_topology(config.units)
    # 12 encoder ranks, 3 for each of the LLM's 4 devices.
    assert (topology.ranks, topology.context, topology.encoders_per_rank) == (2, 2, 6)
    meshes = unit_meshes(config, jax.devices())
    assert [dict(mesh.shape) for mesh in meshes["llm"]] == [
        {"data": 2, "fsdp": 1, "expert": 1, "context": 2, "tensor": 1}
    ]


def test_encoders_beside_the_llm_have_a_copy_on_each_of_its_stages_and_no_devices_of_their_own():
    config = load(find_config("tiny_omni"), (*BESIDE, "units.vision.virtual=2", "units.llm.data=2"))
    assert schedule_name(config) == "nested"
    assert sum(map(unit_devices, config.units.values())) == 6
    stages = list_stages(config)
    assert [stage.name for stage in stages[:4]] == [
        "vision[0:1] copy 0",
        "vision[1:2] copy 0",
        "vision[0:1] copy 1",
        "vision[1:2] copy 1",
    ]
    assert stage_cuts(config)["vision"] == (1,)
    model = Model.build(config.model, "float32", stage_cuts(config))
    graph = stage_graph(place_stages(config, model, jax.devices()[:6]))
    assert graph == unit_graph(config)
    (first,) = (number for number, stage in enumerate(stages) if stage.name == "llm[0:1]")
    assert len(graph.producers[first]) == 6
    assert {graph.workers[s] for s in graph.producers[first]} == {0, 1, 2}
