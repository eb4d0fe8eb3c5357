"""`python -m mmjax.plan`: what a run will do on a cluster that is not at hand, as a user reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from commands import TINY, run
from started import ROOT

from mmjax import plan, train
from mmjax.config import ExpertsConfig
from mmjax.config.loading import (
    config_parameters,
    describe_with_meanings,
    find_config,
    shipped_configs,
)
from mmjax.training.describe_plan import expert_lines


def told(capsys, *words: str) -> str:
    ended = run(capsys, plan.main, *words)
    assert ended.code == 0, ended.err
    return ended.out


def numbers(capsys, *words: str) -> dict:
    return json.loads(told(capsys, *words, "--json"))


SMALL = (
    "tiny_omni",
    "cluster=a100x2x4",
    "batch.grouping=none",
    "batch.size.count=64",
    "data.sources.embedded.samples=600",
)


@pytest.fixture(scope="module")
def small() -> dict:
    """The default data on 8 absent A100s."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(plan, "print_lines", lambda *lines: said.extend(lines))
        plan.main([*SMALL, "price=2", "--json"])
    return json.loads(said[0])


def test_the_report_tells_memory_time_balance_and_cost(capsys):
    out = told(capsys, *SMALL, "price=2.5", "training.steps=1000000")
    for text in (
        "plan   tiny_omni: 1.27M parameters, float32, on 8 x a100 (data 8)",
        "data   600 samples; 60 samples and ",
        "of 73.6 GB a device: parameters 5.1 MB",
        "step   ",
        "MFU",
        "(assumes 65% of peak, 40% in attention, 3 us a kernel): compute ",
        " s of compiling, measured for H100 on one CPU core: ",
        "  none  ",
        "  llm   ",
        "  post  ",
        "run    1,000,000 such steps take ",
        " at 2.5 an hour",
        "kept; ",
        "limits ",
    ):
        assert text in out, out


def test_its_numbers_agree_with_each_other(small):
    chosen = small["ways"]["post"]
    seconds = chosen["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds.values()) - seconds["total"])
    assert small["seconds"] == seconds
    assert seconds["idle"] == seconds["transfers"] == 0  # which one mesh has none of
    assert small["hours"] == pytest.approx(1550 * seconds["total"] / 3600)
    assert small["device_hours"] == pytest.approx(8 * small["hours"])
    assert small["cost"] == pytest.approx(2 * small["device_hours"])
    fixed = {kind: n for kind, n in small["memory"].items() if kind != "activations"}
    assert chosen["memory"] == pytest.approx(
        sum(fixed.values()) + sum(small["memory"]["activations"].values())
    )
    assert chosen["fits"]
    assert chosen["memory"] < small["room"] == pytest.approx(0.92 * 80e9)
    assert small["checkpoint"] == pytest.approx(fixed["parameters"] + fixed["optimizer"], rel=1e-4)
    assert 0 < chosen["mfu"] < 1


@pytest.mark.exhaustive
def test_on_this_machine_layers_are_measured_once_and_the_report_goes_by_them(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = (TINY, "cluster=here")
    counted = numbers(capsys, *here)
    ended = run(capsys, plan.main, *here, "--profile", "--json")
    assert "timing layers of llm" in ended.err
    measured = json.loads(ended.out)
    assert measured["cluster"] == "cpux1x8"
    times = [of["ways"]["post"]["seconds"]["compute"] for of in (counted, measured)]
    assert times[0] != times[1]
    assert [of["basis"] for of in (counted, measured)] == [
        "assumes 65% of peak",
        "from layer times measured on this machine; assumes 65% of peak outside layers",
    ]
    # What was measured here may be stated for another cluster.
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"layers": measured["layers"]}))
    elsewhere = numbers(capsys, TINY, "cluster=h100x8", "--measured", str(path))
    assert elsewhere["layers"] == measured["layers"]
    assert (
        elsewhere["basis"]
        == f"from layer times measured ({path}); assumes 65% of peak outside layers"
    )
    again = run(capsys, plan.main, *here, "--json")
    assert "timing" not in again.err
    assert json.loads(again.out)["ways"] == measured["ways"]


def test_rates_that_a_file_states_replace_the_assumed_ones_and_the_report_says_which(
    capsys, tmp_path
):
    path = tmp_path / "rates.json"
    path.write_text('{"products": 0.325, "link": 3e11}')
    words = (TINY, "cluster=a100x2x4", "mesh.fsdp=8")
    assumed = numbers(capsys, *words)["ways"]["post"]["seconds"]
    out = told(capsys, *words, "--measured", str(path))
    assert (
        f"(measured ({path}): 32% of peak; assumes 40% in attention, 3 us a kernel): compute "
        in out
    )
    assert (
        f"links  measured ({path}): 300 GB/s between devices of a node; assumes 25 GB/s to other nodes, 80%"
        in out
    )
    path.write_text('{"products": 0.325, "link": 3e11, "network": 1e7, "launch": 0}')
    stated = numbers(capsys, *words, "--measured", str(path))["ways"]["post"]["seconds"]
    assert stated["compute"] < assumed["compute"]  # kernels take longest in so small a model
    # 20 GB/s to other nodes were assumed, which computing hides
    assert stated["shards"] > 0 == assumed["shards"]
    path.write_text('{"produkts": 0.5}')
    refused = run(capsys, plan.main, *words, "--measured", str(path))
    assert refused.code == 2
    assert refused.err.startswith(
        f"error: --measured {path}: unknown key 'produkts'; its keys are products, attention,"
    )
    assert refused.err.count("\n") == 1


def test_layers_are_measured_only_on_this_machine(capsys):
    ended = run(capsys, plan.main, *SMALL, "--profile")
    assert ended.code == 2
    assert "say cluster=here" in ended.err


def test_a_step_is_compiled_only_for_gpus_that_are_described(capsys):
    ended = run(capsys, plan.main, *SMALL, "cluster=h200-nvlx8", "--compile")
    assert ended.code == 2
    assert (
        "cluster=h200-nvl: it cannot be compiled for where it is absent, only a100, h100-pcie, h100, h200 can"
        in (ended.err)
    )


@pytest.mark.exhaustive
def test_a_plan_in_which_xla_would_compute_again_by_itself_says_what_to_change(capsys):
    words = (*SMALL, "compiler.xla_gpu_memory_limit_slop_factor=0")
    assert "limits XLA would compute products again by itself" in told(capsys, *words)
    assert "XLA would" not in told(capsys, *SMALL)


def test_balancing_makes_ranks_more_equal_and_steps_no_longer(small):
    none, post = small["ways"]["none"], small["ways"]["post"]
    assert all(
        post["dist_ratio"][module] < none["dist_ratio"][module] for module in post["dist_ratio"]
    )
    assert post["seconds"]["compute"] < none["seconds"]["compute"]


@pytest.mark.exhaustive
def test_the_largest_preset_fits_2560_devices_and_not_64(capsys):
    small = (
        "omni_84b",
        "batch.size.count=512",
        "batch.rows.llm=64",
        "batch.rows.vision=64",
        "batch.rows.audio=64",
    )
    words = "cluster=h100x8x8", "mesh.fsdp=64", "training.memory_every=50"
    found = numbers(capsys, *small, *words)
    assert sum(found["parameters"].values()) == pytest.approx(84e9, rel=0.01)
    assert found["checkpoint"] == pytest.approx(12 * 84e9, rel=0.01)
    assert found["snapshots"] == pytest.approx(5 / 8 * found["checkpoint"])  # with a neighbour's
    assert found["ways"]["post"]["memory"] > 0.4 * found["room"]
    tight = told(capsys, *small, "cluster=h100x8x8", "mesh.fsdp=8")
    assert "DOES NOT FIT: the run needs " in tight
    assert re.search(r"; mesh\.fsdp=\d+ mesh\.data=\d+.* fits, with ", tight)
    assert "limits memory: shard over more devices" in tight


@pytest.mark.exhaustive
def test_products_in_float8_take_less_time_where_a_device_has_them_and_are_refused_where_not(
    capsys,
):
    words = (
        "tiny_text",
        "model.llm.layers=4",
        "model.llm.width=1024",
        "model.llm.mlp_width=4096",
        "training.precision=bfloat16",
    )
    seconds = {
        fp8: numbers(capsys, *words, "cluster=h100", f"model.llm.fp8={fp8}")["ways"]["post"][
            "seconds"
        ]["compute"]
        for fp8 in ("off", "linears")
    }
    assert seconds["linears"] < seconds["off"]
    refused = run(capsys, plan.main, *words, "cluster=a100", "model.llm.fp8=linears")
    assert (refused.code, refused.err) == (
        2,
        "error: model.llm.fp8=linears: a100 multiplies nothing in FP8; use model.llm.fp8=off\n",
    )


SMALL_UNET = {
    "model.generators.picture": "unet",
    "model.generators.picture.widths": "4,8",
    "model.generators.picture.heads": "2,2",
    "model.generators.picture.attending": "true,false",
    "model.generators.picture.blocks": "1",
    "model.generators.picture.groups": "2",
    "model.generators.picture.queries": "4",
    "model.generators.picture.condition_width": "16",
    "model.generators.picture.size": "4,4",
    "model.generators.picture.latents.factor": "2",
    "model.generators.picture.latents.channels": "1",
    "data.sources.drawing.arguments.max_digits": "1",
    "data.sources.drawing.arguments.samples": "600",
    "data.sources.embedded.samples": "600",
}


@pytest.mark.default_cases("small")
@pytest.mark.parametrize(
    ("words", "picture", "parameters"),
    [
        (("tiny_draw", *map("=".join, SMALL_UNET.items()), "cluster=a800x2x8"), 13_705, 882e3),
        (("mllm_9b", "cluster=a800x120x8"), 865_910_724, 9e9),
        (("mllm_15b", "cluster=a800x120x8"), 865_910_724, 15e9),
        (("mllm_72b", "cluster=a800x120x8"), 865_910_724, 72e9),
    ],
    ids=["small", "9b", "15b", "72b"],
)
def test_models_that_make_images_are_planned_with_their_unet_as_a_module_of_rows(
    capsys, words, picture, parameters
):
    found = numbers(capsys, *words)
    assert found["parameters"]["picture"] == picture
    assert sum(found["parameters"].values()) == pytest.approx(parameters, rel=0.05)
    ways = found["ways"]
    assert ways["post"]["memory"] < found["room"]
    assert ways["post"]["dist_ratio"]["picture"] < ways["none"]["dist_ratio"]["picture"]


@pytest.mark.exhaustive
def test_all_ways_of_balancing_are_compared_whichever_the_config_takes(capsys, small):
    none = numbers(capsys, *SMALL, "batch.balance=none")
    assert none["balance"] == "none"
    assert none["ways"].keys() == small["ways"].keys() == {"none", "llm", "post"}
    assert none["ways"]["post"]["dist_ratio"] == small["ways"]["post"]["dist_ratio"]


@pytest.mark.exhaustive
def test_more_shards_need_less_memory_and_tensor_parallelism_costs_all_reduces(capsys, small):
    sharded = numbers(capsys, *SMALL, "mesh.fsdp=8", "training.memory_every=5")
    assert sharded["memory"]["optimizer"] == pytest.approx(
        small["memory"]["optimizer"] / 8, rel=0.1
    )  # vectors are whole
    assert sharded["checkpoint"] == pytest.approx(small["checkpoint"])
    assert (small["snapshots"], sharded["snapshots"]) == (0, 3 * sharded["checkpoint"])
    cut = numbers(capsys, *SMALL, "mesh.tensor=2", "mesh.encoders=data")
    assert (
        cut["ways"]["post"]["seconds"]["tensor"] > 0 == small["ways"]["post"]["seconds"]["tensor"]
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tiny_omni",), "say on which cluster: cluster=h100x8x8"),
        (("tiny_omni", "cluster=h10x8"), "did you mean 'h100'?"),
        (("tiny_omni", "cluster=h100x8", "price=dear"), "price=dear: give what a device costs"),
        (("tiny_omni", "cluster=h100x8", "mesh.fsdp=3"), "does not divide the 8 devices"),
        (
            ("tiny_omni", "cluster=h100x8", "mesh.tensor=8"),
            "mesh.tensor=8 does not divide model.llm.heads",
        ),
        (
            ("tiny_omni", "cluster=h100x8", "mesh.ranks_per_node=3"),
            "mesh.ranks_per_node=3: choose a divisor",
        ),
        (("tiny_onmi", "cluster=h100x8"), "tiny_omni"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(capsys, words, expected):
    ended = run(capsys, plan.main, *words)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert expected in ended.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--picture", "plan.pdf"), "--picture plan.pdf: name a file that ends in .png or .svg"),
        (
            ("--picture", "no/such/plan.svg"),
            "--picture no/such/plan.svg: name a file in a folder that exists",
        ),
        (
            ("--out", "no/such/plan.json"),
            "--out no/such/plan.json: name a file in a folder that exists",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_planning(
    capsys, monkeypatch, words, expected
):
    monkeypatch.delattr(plan, "forecast_run")
    ended = run(capsys, plan.main, TINY, "cluster=a100x8", *words)
    assert ended.code == 2
    assert ended.err == f"error: {expected}\n"


def test_a_picture_shows_memory_time_and_work_by_balance(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    found = json.loads(told(capsys, TINY, "cluster=a100x8", "--picture", str(path), "--json"))
    said = "".join(ElementTree.parse(path).getroot().itertext())
    for text in (
        "tiny on a100x1x8: ",
        "room 73.6 GB",
        "balance none: ",
        "balance post: ",
        "gradients",
        "activations of",
    ):
        assert text in said
    for kind in ("none", "post"):
        assert all(
            f"dist ratio {ratio:.3f}" in said
            for ratio in found["ways"][kind]["dist_ratio"].values()
        )
    assert all(f"MFU {way['mfu']:.1%}" in said for way in found["ways"].values())


@pytest.mark.exhaustive
def test_a_picture_is_drawn_as_png_too_and_of_a_run_that_does_not_fit(capsys, tmp_path):
    path = tmp_path / "plan.png"
    assert "DOES NOT FIT" in told(
        capsys, TINY, "cluster=a100x8", "mesh.memory=0.0001", "--picture", str(path)
    )
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_matplotlib_is_imported_for_a_picture_alone():
    code = "import sys, mmjax.plan, mmjax.bench; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.exhaustive
def test_a_plan_that_is_written_and_edited_is_what_training_runs_by(capsys, tmp_path):
    path = tmp_path / "plan.json"
    told(capsys, TINY, "cluster=a100x8", "--out", str(path))
    found = json.loads(path.read_text())
    assert found["cluster"] == "a100x1x8"
    assert found["settings"]["mesh.data"] == 8
    found["settings"] |= {
        "mesh.data": 4,
        "mesh.fsdp": 2,
        "model.llm.remat": [[1, "full"], [1, "products"]],
    }
    path.write_text(json.dumps(found))
    words = (
        "training.steps=2",
        "training.evaluate_every=0",
        f"run={tmp_path / 'run'}",
        f"plan={path}",
    )
    ended = run(capsys, train.main, TINY, *words)
    assert ended.code == 0, ended.err
    assert "on     8 x cpu (data 4 x fsdp 2)" in ended.out
    assert "remat of llm: 1 full, 1 products" in ended.out


def test_a_plan_trains_with_all_that_it_was_made_with_and_one_of_another_config_or_that_does_not_fit_is_refused(
    capsys, tmp_path
):
    path = tmp_path / "plan.json"
    words = ("mesh.tensor=2", "mesh.encoders=data", "batch.size.count=48", "optimizer.offload=true")
    words = (*words, "training.precision=bfloat16")
    told(capsys, TINY, "cluster=a100x8", *words, "--out", str(path))
    shown = run(capsys, train.main, TINY, f"plan={path}", "--show").out
    lines = [line.partition("#")[0].replace(" ", "").strip() for line in shown.splitlines()]
    assert {*words, "mesh.data=4", "training.loss_chunks=1"} <= set(lines)
    other = run(capsys, train.main, "tiny_omni", f"plan={path}", f"run={tmp_path / 'run'}")
    assert other.code == 2
    assert "was made for tiny, not for tiny_omni" in other.err
    assert not (tmp_path / "run").exists()
    tight = run(
        capsys,
        plan.main,
        TINY,
        "cluster=a100x8",
        "mesh.memory=0.0001",
        "--out",
        str(tmp_path / "tight.json"),
    )
    assert tight.code == 2
    assert "nothing is written, for the run does not fit" in tight.err
    assert not (tmp_path / "tight.json").exists()


# On which each fits, as the documents have it.
CLUSTERS = {
    "internvl": "h100x8x8",
    "internvl_26b": "h100x8x8",
    "internvl_26b_units": "h100x2x8",
    "mllm_15b": "a800x120x8",
    "mllm_72b": "a800x120x8",
    "mllm_9b": "a800x120x8",
    "omni_10b": "h100x16x8",
    "omni_10b_units": "h100x2x8",
    "omni_18b": "h100x16x8",
    "omni_84b": "h100x320x8",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_the_plan_that_is_written_of_a_shipped_config_trains_what_was_planned(
    name, recipes, monkeypatch, capsys, tmp_path
):
    planned = []
    write = plan.plan_text
    monkeypatch.setattr(
        plan, "plan_text", lambda config, *args: planned.append(config) or write(config, *args)
    )
    parameters = config_parameters(find_config(name))
    given = dict(recipes)
    if name == "internvl":
        given["llm"] = "34b"
    if name == "llava_dpo":
        given["data"] = given["checkpoint"].parent / "pairs.json"
    words = [f"{key}={value}" for key, value in given.items() if key in parameters]
    if name in ("llava_lora", "llava_dpo"):
        words.append("model.lora.llm.rank=4")
    path = tmp_path / "plan.json"
    told(
        capsys,
        name,
        f"cluster={CLUSTERS.get(name, 'a100x1x8')}",
        "training.precision=bfloat16",
        *words,
        "--out",
        str(path),
    )
    ended = run(capsys, train.main, name, f"plan={path}", "--show")
    assert ended.out == describe_with_meanings(planned[0]) + "\n", ended.err


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, object]:
    """Arguments for the recipes: a checkpoint, its parts, and data."""
    import llava_folder  # imports torch

    place = tmp_path_factory.mktemp("recipes")
    llava_folder.save_checkpoint(place / "llava")
    llava_folder.save_questions(place / "data", 400)
    llava_folder.save_parts(place)
    pairs = [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "no"} for i in range(400)]
    (place / "pairs.json").write_text(json.dumps(pairs))
    given = {
        "checkpoint": place / "llava",
        "tower": place / "tower",
        "llm": place / "llm",
        "image": "<image>",
    }
    return given | {"data": place / "data" / "data.json", "images": place / "data" / "images"}


def test_the_plan_says_how_tokens_reach_their_experts():
    experts = ExpertsConfig((0,), count=128, per_token=8, width=8)
    assert expert_lines(experts, 1) == expert_lines(None, 8) == []
    assert "the tokens of 4 devices are gathered" in expert_lines(experts, 4)[0]
    assert (
        "an all-to-all sends each of 32 devices up to 29% of a device's tokens"
        in expert_lines(experts, 32)[0]
    )
