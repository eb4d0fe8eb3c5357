"""`python -m mmjax.plan` of a config whose modules have units, on a cluster that is not at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import pytest
from commands import TINY_MEDIA, run

from mmjax import plan, train
from mmjax.autotune import layer_profile
from mmjax.autotune.compile_run import RunPrograms
from mmjax.config import Remat
from mmjax.config.loading import find_config, load
from mmjax.config.training import unit_devices
from mmjax.planning.plan_file import read_plan

SMALL = (
    "tiny_omni",
    "cluster=a100x2x4",
    "batch.size.count=64",
    "batch.microbatches=4",
    "data.sources.embedded.samples=600",
)
UNITS = ("units.vision.data=2", "units.audio.data=1", "units.llm.pipeline=2", "units.llm.fsdp=2")


def towers_of(numbers: dict) -> set[str]:
    """Whose layers have stages."""
    return {tower for stage in numbers["stages"] for tower in stage["layers"]}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[dict, Path]:
    """Numbers and plan file of the default config on units."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(plan, "print_lines", lambda *lines: said.extend(lines))
        plan.main([*SMALL, *UNITS, "--json", "--out", str(path)])
    return json.loads(said[0]), path


def test_stages_are_planned_on_the_clusters_devices_in_order_with_one_mesh_beside(planned):
    numbers, _ = planned
    assert [(stage["name"], stage["devices"]) for stage in numbers["stages"]] == [
        ("vision", [0, 1]),
        ("audio", [2]),
        ("llm[0:2]", [3, 4]),
        ("llm[2:3]", [5, 6]),
    ]
    seconds = numbers["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds.values()) - seconds["total"])
    passes = seconds["total"] - seconds["reduction"] - seconds["update"]
    assert 0 < seconds["transfers"] < seconds["idle"] < passes
    # Two replicas of the vision tower add up their gradients.
    assert seconds["reduction"] > 0
    busiest = max(4 * (stage["forward"] + stage["backward"]) for stage in numbers["stages"])
    assert busiest < passes
    assert all(sum(stage["memory"].values()) < numbers["room"] for stage in numbers["stages"])
    assert numbers["one_mesh"]["seconds"] > 0
    assert numbers["one_mesh"]["mfu"] / numbers["mfu"] == pytest.approx(
        seconds["total"] / numbers["one_mesh"]["seconds"], rel=0.2
    )


def test_the_plan_file_gives_the_units_to_a_config_that_has_none(planned):
    _, path = planned
    read = read_plan(path)
    config = load(find_config(read.config), planned=read.words)
    assert config.units["llm"].cuts  # which the plan found
    units = {name: replace(unit, cuts=()) for name, unit in config.units.items()}
    assert units == load(find_config(read.config), UNITS).units
    assert config.batch.microbatches == 4


@pytest.mark.exhaustive
def test_the_report_says_which_is_faster_why_and_what_is_assumed(capsys):
    ended = run(capsys, plan.main, *SMALL, *UNITS)
    assert ended.code == 0, ended.err
    for text in (
        "tiny_omni: 1.27M parameters, float32, on 7 of 8 x a100 (1 idle: start it on 7)",
        "units  schedule 1f1b, 4 microbatch(es)",
        "predicted bubble ",
        "choice one mesh (",
        "units vision 2 + audio 1 + llm 2 x 2: ",
        "links  assumes 300 GB/s between devices of a node, 25 GB/s to other nodes, 80% of either",
        "cluster=here --profile",
    ):
        assert text in ended.out, ended.out


def test_a_picture_shows_the_passes_of_a_step(capsys, tmp_path):
    path = tmp_path / "step.svg"
    ended = run(capsys, plan.main, *SMALL, *UNITS, "--picture", str(path))
    assert ended.code == 0, ended.err
    for text in ("planned: 1f1b, 4 microbatches", "vision encoder", "idle"):
        assert text in path.read_text()


def test_units_that_do_not_fit_the_cluster_are_refused(capsys):
    ended = run(capsys, plan.main, *SMALL, *UNITS, "units.audio.data=3")
    assert ended.code == 2
    assert "the units need 9 devices and a100x2x4 has 8" in ended.err


@pytest.mark.exhaustive
def test_units_auto_plans_units_that_fit_and_writes_what_is_faster(capsys, tmp_path):
    path = tmp_path / "plan.json"
    ended = run(capsys, plan.main, *SMALL, "units=auto", "--json", "--out", str(path))
    assert ended.code == 0, ended.err
    numbers = json.loads(ended.out)
    assert towers_of(numbers) == {"vision", "audio", "llm"}
    assert max(max(stage["devices"]) for stage in numbers["stages"]) < 8
    assert all(sum(stage["memory"].values()) < numbers["room"] for stage in numbers["stages"])
    read = read_plan(path)
    config = load(find_config(read.config), planned=read.words)
    assert set(config.units) == set(numbers["units"])
    assert config.mesh.fsdp == (1 if config.units else numbers["one_mesh"]["fsdp"])
    # both of other planned steps
    assert numbers["seconds"]["total"] <= 1.01 * numbers["one_mesh"]["seconds"]


@pytest.mark.exhaustive
def test_units_that_are_chosen_train_by_the_file_that_is_written(
    capsys, monkeypatch, tmp_path, runs
):
    path, slow = tmp_path / "plan.json", tmp_path / "slow.json"
    slow.write_text(json.dumps({"network": 1e7, "link": 1e7}))
    words = (
        TINY_MEDIA,
        "batch.size.count=64",
        "model.encoders.vision.layers=3",
        "training.evaluate_every=0",
    )
    ended = run(
        capsys,
        plan.main,
        *words,
        "cluster=a100x1x8",
        "units=auto",
        "--measured",
        slow,
        "--out",
        path,
    )
    assert ended.code == 0, ended.err
    assert "units are faster" in ended.out
    planned = load(find_config(TINY_MEDIA), planned=read_plan(path).words)
    devices = jax.devices()[: sum(map(unit_devices, planned.units.values()))]
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: devices)
    ended = run(
        capsys, train.main, TINY_MEDIA, f"plan={path}", "training.steps=3", f"run={runs / 'chain'}"
    )
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out


@pytest.mark.exhaustive
def test_a_step_of_fewer_samples_than_devices_trains_on_the_mesh_that_is_written(
    capsys, tmp_path, runs
):
    path = tmp_path / "plan.json"
    words = (TINY_MEDIA, "batch.size.count=4", "training.evaluate_every=0")
    ended = run(
        capsys, plan.main, *words, "cluster=a100x1x8", "units=auto", "--json", "--out", path
    )
    assert ended.code == 0, ended.err
    mesh = json.loads(ended.out)["one_mesh"]
    assert mesh["context"] * mesh["tensor"] > 1
    ended = run(
        capsys, train.main, TINY_MEDIA, f"plan={path}", "training.steps=3", f"run={runs / 'mesh'}"
    )
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out


@pytest.mark.exhaustive
def test_units_auto_searches_and_forecasts_by_layer_times_measured_here(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layer_profile, "ROUNDS", 1)
    here = ("cluster=here" if word.startswith("cluster=") else word for word in SMALL)
    words = (*here, "units=auto", "--profile", "--json")
    ended = run(capsys, plan.main, *words)
    assert ended.code == 0, ended.err
    assert "timing layers of llm on 1 row(s) of 256 positions" in ended.err
    found = json.loads(ended.out)
    assert found["basis"].startswith("from layer times measured on this machine")
    again = run(capsys, plan.main, *words)
    assert "timing" not in again.err
    # An LLM that takes ten times as long as the encoders gets most devices.
    layers = {
        tower: {
            "rows": 1,
            "seconds": {"256": {"forward": seconds} | dict.fromkeys(get_args(Remat), 3 * seconds)},
        }
        for tower, seconds in (("llm", 10.0), ("vision", 1.0), ("audio", 1.0))
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"layers": layers}))
    ended = run(capsys, plan.main, *SMALL, "units=auto", "--measured", path, "--json")
    stages = json.loads(ended.out)["stages"]
    assert (
        len({device for stage in stages if "llm" in stage["layers"] for device in stage["devices"]})
        > 4
    )


@pytest.mark.exhaustive
def test_every_stage_is_compiled_beside_its_plan_and_equal_ones_once(capsys, monkeypatch):
    compiled = []
    compile_stage = RunPrograms.compile
    monkeypatch.setattr(plan, "aot_devices", lambda cluster: jax.devices())
    monkeypatch.setattr(
        RunPrograms, "compile", lambda *args: compiled.append(args[1]) or compile_stage(*args)
    )
    words = (
        "units.vision.data=2",
        "units.audio.data=1",
        "units.llm.pipeline=4",
        "model.llm.layers=4",
    )
    ended = run(capsys, plan.main, *SMALL, *words, "--compile", "--json")
    assert ended.code == 0, ended.err
    numbers = json.loads(ended.out)
    programs = {"forward", "backward", "update"}
    assert {name: set(found) for name, found in numbers["programs"].items()} == {
        "vision": programs | {"reduce"},
        "audio": programs,
        "llm[0:1]": programs,
        "llm[1:2]": programs,
        "llm[2:3]": programs,
        "llm[3:4]": {"forward_backward", "update"},
    }
    # Two stages in the middle are one program, of which the first has one microbatch more in
    # flight.
    assert len(compiled) == 5
    first, second = (
        {name: of["bytes"] for name, of in numbers["programs"][stage].items()}
        for stage in ("llm[1:2]", "llm[2:3]")
    )
    assert first["update"] == second["update"]
    assert first["backward"] > second["backward"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        "omni_10b cluster=h100x8",
        "omni_18b cluster=h100x8x8",
        "omni_84b cluster=h100x8x8",
        "internvl llm=8b cluster=h100x8",
        "internvl llm=34b cluster=h100x4x8",
        "internvl llm=70b cluster=h100x8x8",
    ],
)
def test_units_of_every_large_config_are_chosen_on_a_cluster_that_holds_it(capsys, words):
    ended = run(capsys, plan.main, *words.split(), "units=auto", "--json")
    assert ended.code == 0, ended.err
    numbers = json.loads(ended.out)
    name, *arguments = (word for word in words.split() if not word.startswith("cluster="))
    assert towers_of(numbers) == {"llm", *load(find_config(name), arguments).model.encoders}
    assert all(sum(stage["memory"].values()) <= numbers["room"] for stage in numbers["stages"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        "mllm_9b cluster=a800x12x8 batch.size.count=128 batch.rows.llm=96 batch.rows.vision=96 batch.rows.picture=96 "
        "batch.microbatches=1",
        "mllm_15b cluster=a800x120x8",
        "mllm_72b cluster=a800x120x8",
    ],
)
def test_a_unet_is_behind_the_llm_in_the_units_that_are_chosen(capsys, words):
    ended = run(capsys, plan.main, *words.split(), "units=auto", "--json")
    assert ended.code == 0, ended.err
    numbers = json.loads(ended.out)
    assert towers_of(numbers) == {"vision", "llm", "picture"}
    assert [stage["in_flight"] for stage in numbers["stages"] if "picture" in stage["layers"]] == [
        1
    ]
    assert all(sum(stage["memory"].values()) <= numbers["room"] for stage in numbers["stages"])
    assert 0 <= numbers["bubble"] < 1
    assert numbers["seconds"]["total"] <= 1.05 * numbers["one_mesh"]["seconds"]
