"""A run is fitted to its devices before anything is compiled, and refused with what would fit."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from one_shape import plan_of, with_settings
from tiny_run import tiny_config

from mmjax.autotune import memory_plan
from mmjax.autotune.compile_run import compiled_bytes
from mmjax.autotune.memory_plan import describe_shortage, fit_run, memory_limit, suggest_settings
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import choose_sequence_parallel, model_sharding, on_one_mesh
from mmjax.config import AdamW, Config, DecoderConfig, MeshConfig, ModelConfig
from mmjax.config.loading import apply_overrides
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import RankLayout, make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.errors import UserError
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.hardware import Device, Rates, parse_cluster
from mmjax.planning.memory import DeviceBatch, ModelSharding
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.speed import Speed
from mmjax.runtime import devices
from mmjax.training.announce import describe_memory_plan, replication_warning

SPEED = Speed(Rates(1e11, 1e10, 1e9))
MESH = {"data": 4, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    index = build_index(open_sources(tiny_config(), "train", folder), tiny_config().model.encoders)

    @cache
    def layout(microbatches: int) -> RankLayout:
        made = tiny_config()
        made = replace(made, batch=replace(made.batch, microbatches=microbatches))
        return make_planner(index, made, [1.0], Topology(4, 4, 4))[1]

    return lambda config: layout(config.batch.microbatches)


def fitted(layouts, gigabytes: float, config: Config | None = None, **mesh: int) -> RunPlan:
    config = tiny_config() if config is None else config
    return plan_run(
        on_one_mesh(config, MESH | mesh), layouts(config), SPEED, MemoryLimit(gigabytes * 1e9)
    )


def test_layers_of_frozen_towers_before_which_nothing_trains_keep_nothing(layouts):
    made = tiny_config()
    encoders = {name: replace(e, frozen=True) for name, e in made.model.encoders.items()}
    found = fitted(layouts, np.inf, replace(made, model=replace(made.model, encoders=encoders)))
    kept = found.fullest.activations
    assert kept["vision"] == kept["audio"] == 0 < kept["llm"]


@pytest.mark.exhaustive
def test_more_shards_and_more_microbatches_need_less(layouts):
    whole = fitted(layouts, np.inf)
    assert fitted(layouts, np.inf, fsdp=4, data=1).device < whole.device
    made = tiny_config()
    smaller = fitted(layouts, np.inf, replace(made, batch=replace(made.batch, microbatches=16)))
    assert smaller.fullest.memory["activations"] < whole.fullest.memory["activations"]


@pytest.mark.default_cases("float32-full")
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_with_dense_attention_of_long_rows_takes_what_is_predicted(precision, remat):
    """To 20%: 3 layers of 5.0, 8.2, 4.4 and 11.2 GB, of which no more than a ninth is anything but scores."""
    model = ModelConfig(
        DecoderConfig(3, 128, 4, 2, head_width=32, mlp_width=336, vocab=64, tied=True, remat=remat)
    )
    config = replace(tiny_config(), model=model, mesh=MeshConfig(1), optimizer=AdamW())
    config = replace(config, training=replace(config.training, precision=precision, loss_chunks=1))
    batch = DeviceBatch({"llm": (8, 3072)}, {})
    predicted = plan_of(with_settings(config, precision), [batch.shape]).device
    assert predicted == pytest.approx(compiled_bytes(config, batch, jax.devices()[:1]), rel=0.2)


def test_a_loss_in_chunks_needs_less(layouts):
    made = tiny_config()
    made = replace(
        made,
        model=replace(made.model, llm=replace(made.model.llm, vocab=4400, attention="blockwise")),
    )
    whole, chunked = (
        fitted(layouts, np.inf, replace(made, training=replace(made.training, loss_chunks=n)))
        for n in (1, 4)
    )
    assert chunked.fullest.fixed["transient"] < 0.3 * whole.fullest.fixed["transient"]


@pytest.mark.exhaustive
def test_a_memory_between_is_filled_with_a_mix_of_policies(layouts):
    most = fitted(layouts, np.inf)
    least = fitted(layouts, 1e-9)
    room = (most.device + least.device) / 2e9
    found = fitted(layouts, room)
    assert found.fits
    assert 0.8 * room * 1e9 < found.device <= room * 1e9
    assert {p for own in found.policies.values() for p in own} != {"none"}


@pytest.mark.default_cases("0.7")
@pytest.mark.parametrize("share", [0.9, 0.7, 0.65])
def test_the_nearest_run_that_fits_does_fit(layouts, share):
    least = fitted(layouts, 1e-9)
    assert not least.fits
    room = MemoryLimit(share * least.device)
    said = suggest_settings(tiny_config(), MESH, layouts, SPEED, room)
    settings = re.findall(r"((?:mesh|batch)\.\w+=\d+)", said)
    assert settings
    assert "fits, with" in said
    changed = apply_overrides(tiny_config(), settings)
    sizes = MESH | (
        {"fsdp": changed.mesh.fsdp, "data": changed.mesh.data}
        if changed.mesh != MeshConfig()
        else {}
    )
    assert plan_run(on_one_mesh(changed, sizes), layouts(changed), SPEED, room).fits


def test_a_run_that_only_a_measurement_refuses_is_never_told_to_stay_as_it_is(layouts):
    # fits by the model
    said = suggest_settings(tiny_config(), MESH, layouts, SPEED, MemoryLimit(1e12))
    settings = re.findall(r"((?:mesh|batch)\.\w+=\d+)", said)
    assert settings
    assert apply_overrides(tiny_config(), settings) != tiny_config()


@pytest.mark.exhaustive
def test_what_can_never_fit_is_said(layouts):
    said = suggest_settings(tiny_config(), MESH, layouts, SPEED, MemoryLimit(1000.0))
    assert "do not make it fit; use more devices, mesh.tensor, or a smaller model" in said
    assert re.search(
        r"the run needs \d+\.\d MB of each device and there are 0\.0 MB",
        describe_shortage(fitted(layouts, 1e-6)),
    )


def test_parameters_whose_width_the_mesh_does_not_divide_lie_whole_on_each_device(layouts):
    even, uneven = (fitted(layouts, np.inf, fsdp=n, data=24 // n) for n in (8, 12))
    assert even.fullest.sharding.shares["llm"] < 0.2 < 0.9 < uneven.fullest.sharding.shares["llm"]
    assert uneven.fullest.fixed["optimizer"] > even.fullest.fixed["optimizer"]
    assert "llm" not in replication_warning(even)
    assert re.search(
        r"the mesh \(fsdp 12, tensor 1\) does not divide the widths of .*llm",
        replication_warning(uneven),
    )


def test_tensor_parallelism_cuts_encoders_only_where_they_lie_on_its_axis():
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    assert model_sharding(MeshConfig(), sizes) == ModelSharding(8, 2, 2)
    assert model_sharding(MeshConfig(encoders="data"), sizes) == ModelSharding(8, 2, 1)


def test_exchanges_are_overlapped_by_itself_where_the_data_sheet_says_that_it_pays(layouts):
    config = tiny_config()
    wide = replace(
        config.model.llm, width=8192, heads=64, kv_heads=8, head_width=128, mlp_width=28_672
    )
    wide = replace(config, model=replace(config.model, llm=wide))

    def choice(config: Config, device: Device | None, tensor: int = 4) -> str:
        mesh = {"data": 1, "fsdp": 1, "expert": 1, "tensor": tensor, "context": 1}
        return choose_sequence_parallel(config, mesh, long, device).mesh.sequence_parallel

    layout = layouts(config)
    long = replace(layout, shapes=[layout.shapes[-1]._replace(lengths=(8192, 512, 512))])
    a800 = parse_cluster("a800").device
    assert choice(wide, a800) == "overlap"
    assert (
        choice(wide, a800, tensor=1)
        == choice(wide, None)
        == choice(wide, replace(a800, platform="cpu"))
        == "off"
    )
    assert choice(replace(wide, batch=replace(wide.batch, alignment=2)), a800) == "off"
    assert choice(replace(wide, mesh=MeshConfig(sequence_parallel="on")), a800) == "on"


def test_the_room_is_what_the_config_says_or_what_the_device_may_give_out():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert memory_limit(MeshConfig(memory=40.0), Device(None)).device == 40e9
    assert memory_limit(MeshConfig(), Device({"bytes_limit": 100})).device == 97
    assert memory_limit(MeshConfig(), Device(None)).device == math.inf


@pytest.mark.exhaustive
def test_a_cpu_has_its_ram_for_room_where_a_run_would_take_most_of_it(layouts, monkeypatch):
    mesh, nearly = make_mesh(MeshConfig(4), jax.devices()[:4]), "THAT IS NEARLY ALL THE RAM"
    most, least = fitted(layouts, np.inf), fitted(layouts, 1e-9)
    monkeypatch.setattr(memory_plan, "device_speed", lambda *_: SPEED)

    def in_ram(ram: float, config: Config | None = None) -> RunPlan:
        monkeypatch.setattr(devices, "host_ram", lambda: ram * jax.local_device_count())
        config = tiny_config() if config is None else config
        return fit_run(config, mesh, layouts(config), layouts)[0]

    ample, near, short = (
        in_ram(2 * most.device),
        in_ram(1.1 * most.device),
        in_ram((most.device + least.device) / 2),
    )
    assert ample == most
    assert nearly not in " ".join(describe_memory_plan(ample))
    assert near.policies == most.policies != short.policies
    for found in (near, short):
        assert found.fits
        assert nearly in " ".join(describe_memory_plan(found))
    with pytest.raises(
        UserError,
        match=r"needs .* and there are .* MB of RAM for it \(mesh\.memory sets.*\); .*fits, with",
    ):
        in_ram(0.7 * least.device)
    assert in_ram(0.7 * least.device, replace(tiny_config(), mesh=MeshConfig(memory=1.0))).fits


@pytest.mark.exhaustive
def test_where_nothing_else_makes_long_rows_fit_attention_by_blocks_does(layouts):
    def long_rows(config: Config) -> RankLayout:
        layout = layouts(config)
        return replace(
            layout,
            shapes=tuple(s._replace(lengths=(16_384, *s.lengths[1:])) for s in layout.shapes),
        )

    by_blocks = apply_overrides(tiny_config(), ["model.llm.attention=blockwise"])
    room = MemoryLimit(2 * fitted(long_rows, 1e-9, by_blocks).device)
    assert not fitted(long_rows, room.device / 1e9).fits
    said = suggest_settings(tiny_config(), MESH, long_rows, SPEED, room)
    assert re.match(r"model\.llm\.attention=blockwise .* fits, with", said)


@pytest.mark.parametrize(("limit", "bytes_told"), [("1000000\n", 1e6), ("max\n", None)])
def test_the_ram_is_the_containers_where_that_is_less(limit, bytes_told, tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(limit)
    physical = devices.host_ram()
    monkeypatch.setattr(
        devices, "CGROUP_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "none"))
    )
    assert devices.host_ram() == bytes_told if bytes_told else devices.host_ram() >= physical > 1e8
