"""A plan's file says the same when it is read again, and what somebody wrote into it wrongly is named."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle, islice

import pytest

from mmjax import train
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.config import PostBalance, Unit
from mmjax.config.codec import key_of
from mmjax.config.loading import (
    config_parameters,
    describe_with_meanings,
    find_config,
    load,
    shipped_configs,
)
from mmjax.config.model import stacked_towers
from mmjax.errors import UserError
from mmjax.planning.plan_file import plan_text, read_plan

MESH = {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1, "context": 1}
POLICIES = {
    "llm": ("full", "products", "products"),
    "vision": ("none", "none"),
    "audio": ("attention", "none", "none"),
}
# Words as somebody may say them of any config, of every type of value.
WORDS = (
    "training.precision=bfloat16",
    "training.clip=1e-1",
    "training.keep_best=",
    "optimizer.offload=true",
    "batch.size.count=48",
    "batch.balance=none",
    "mesh.encoders=data",
    "pipeline.reorder=false",
    'run="runs/4 plans"',
    "name=renamed",
)
LLM = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 304,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
LLAVA = {
    "model_type": "llava",
    "text_config": LLM,
    "vision_config": TOWER,
    "image_token_index": 303,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Checkpoints of which there is only what a config reads of them."""
    place = tmp_path_factory.mktemp("checkpoints")
    for name, stored in (("llava", LLAVA), ("llm", LLM), ("tower", TOWER)):
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(stored))
    return place


def arguments_of(config: str, place) -> list[str]:
    """What the config's function asks for."""
    given = {
        "checkpoint": place / "llava",
        "data": "questions, all.json",
        "images": "4",
        "tower": place / "tower",
    }
    given |= {
        "llm": "8b" if config == "internvl" else place / "llm",
        "base": "mllm_9b",
        "trained": "llm",
    }
    parameters = config_parameters(find_config(config))
    return [f"{key}={value}" for key, value in given.items() if key in parameters]


def mixed(config):
    """The config as planning may change it: another policy in every second layer, another mesh, more loss chunks."""
    policies = {
        tower: tuple(islice(cycle(("full", "none")), config.model.towers[tower].layers))
        for tower in stacked_towers(config.model)
    }
    mesh = (
        config.mesh
        if config.units
        else replace(config.mesh, data=4, fsdp=2, sequence_parallel="overlap")
    )
    return apply_memory_plan(replace(config, mesh=mesh), policies, 4)


def written(path, planned, config, name, words=()):
    parameters = config_parameters(find_config(name))
    arguments = [word for word in words if key_of(word) in parameters]
    overrides = [word for word in words if key_of(word) not in parameters]
    unnamed = load(name, [word for word in words if key_of(word) != "name"]).name
    path.write_text(
        plan_text(planned, config, unnamed, arguments, overrides, "h100x8", {"seconds": 1.5})
    )
    return path


@pytest.fixture
def planned(tmp_path):
    config = load("tiny_omni")
    batch = replace(config.batch, balance=PostBalance(locality="off"), microbatches=2)
    chosen = replace(config, batch=batch, mesh=replace(config.mesh, data=2, fsdp=4))
    chosen = apply_memory_plan(chosen, POLICIES, 4)
    return chosen, written(tmp_path / "plan.json", chosen, config, "tiny_omni")


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_training_by_a_plan_of_any_shipped_config_trains_what_was_planned(
    name, place, tmp_path, capsys
):
    arguments = arguments_of(name, place)
    units = load(name, arguments).units
    words = [*arguments, *(word for word in WORDS if not (units and word.startswith("mesh.")))]
    config = load(name, words)
    chosen = mixed(config)
    path = written(tmp_path / "plan.json", chosen, config, name, words)
    train.main([name, f"plan={path}", "--show"])
    assert capsys.readouterr().out == describe_with_meanings(chosen) + "\n"
    assert all(f'"{key_of(word)}"' in path.read_text() for word in words)


def test_a_plan_of_other_units_than_the_configs_replaces_these(tmp_path):
    config = load("tiny_omni", ["units.all.modules=llm,vision,audio", "units.all.data=4"])
    overrides = ["units.all.modules=llm,vision,audio", "units.all.data=4"]
    units = {"vision": Unit(data=2), "audio": Unit(), "llm": Unit(pipeline=2, cuts=(1,))}
    for chosen in (replace(config, units=units), replace(config, units={})):
        read = read_plan(written(tmp_path / "plan.json", chosen, config, "tiny_omni", overrides))
        assert load("tiny_omni", planned=read.words) == chosen


def test_a_plan_is_json_with_a_line_for_each_setting_and_layers_as_runs(planned):
    text = planned[1].read_text()
    found = json.loads(text)
    assert found["settings"]["model.llm.remat"] == [[1, "full"], [2, "products"]]
    assert found["settings"]["mesh.fsdp"] == 4
    assert found["expected"] == {"seconds": 1.5}
    assert all(
        sum(f'"{key}"' in line for line in text.splitlines()) == 1 for key in found["settings"]
    )


def test_what_the_command_line_changes_back_of_a_plan_is_said_a_line_each(
    planned, tmp_path, capsys
):
    path = planned[1]
    words = ("mesh.fsdp=1", "mesh.data=2", "training.epochs=2", "seed=4", "model.llm.remat=auto")
    train.main(["tiny_omni", f"plan={path}", *words, "--show"])
    shown = capsys.readouterr()
    assert "mesh.fsdp " in shown.out
    assert [line.partition(": ")[2] for line in shown.err.splitlines()] == [
        "model.llm.remat: full,products,products -> auto",
        "mesh.fsdp: 4 -> 1",
    ]
    assert all(
        line.startswith(f"plan   {path}, changed on the command line: ")
        for line in shown.err.splitlines()
    )


def test_an_argument_that_the_command_line_changes_is_said_too(place, tmp_path, capsys):
    words = arguments_of("llava_style", place)
    config = load("llava_style", words)
    path = written(tmp_path / "plan.json", config, config, "llava_style", words)
    train.main(["llava_style", f"plan={path}", "images=photos", "--show"])
    assert (
        capsys.readouterr().err
        == f"plan   {path}, changed on the command line: images=4 -> images=photos\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{", "", "no readable plan"),
        ('"settings"', '"setings"', "settings"),
        ('"expected"', '"expcted"', "did you mean 'expected'?"),
        (
            '"version": 2',
            '"version": 1',
            "it has version 1 and this mmjax reads version 2; make one with",
        ),
        ('"version": 2, ', "", "it has version 1 and this mmjax reads version 2; make one with"),
        ('"version": 2', '"version": "2"', 'it has version "2" and'),
        ('"config": "tiny_omni"', '"config": 3', "config is 3; name the config of the plan"),
        ('"arguments": {}', '"arguments": []', "arguments is []; give an object"),
        ('"arguments": {}', '"arguments": {"checkpoint": "x"}', "unknown key 'checkpoint'"),
        ('"mesh.fsdp"', '"mesh.fsdq"', "unknown key 'mesh.fsdq': did you mean 'mesh.fsdp'?"),
        ('"mesh.fsdp"', '"mesh.data"', "'mesh.data' stands there twice; keep one of them"),
        ('"mesh.fsdp"', '"mesh.fsdp=8"', "settings has 'mesh.fsdp=8', which cannot be a key"),
        (
            '"mesh.fsdp": 4',
            '"mesh.fsdp": null',
            "settings.mesh.fsdp is null; give a number, true, false or a text",
        ),
        (
            '"mesh.fsdp": 4',
            '"mesh.fsdp": {"a": 1}',
            'settings.mesh.fsdp is {"a": 1}; give a number',
        ),
        ('"mesh.fsdp": 4', '"mesh.fsdp": [4]', "settings.mesh.fsdp is [4]; give a number"),
        ('"mesh.fsdp": 4', '"mesh.fsdp": 4.5', "mesh.fsdp: got '4.5'; expected int"),
        ('"mesh.fsdp": 4', '"mesh.fsdp": true', "mesh.fsdp: got 'true'; expected int"),
        ('"batch.microbatches": 2', '"batch.microbatches": 0', "batch.microbatches=0"),
        (
            '[2, "products"]',
            '[2, "product"]',
            'settings.model.llm.remat has [2, "product"]; give runs',
        ),
        (
            '[2, "products"]',
            '[0, "products"]',
            'settings.model.llm.remat has [0, "products"]; give runs',
        ),
        ('[2, "products"]', '[1000000000000, "products"]', "give runs"),
        ('[2, "products"]', '[3, "products"]', "model.llm.remat gives 4 policies for layers=3"),
    ],
)
def test_a_fault_in_a_plan_is_named_with_its_place(planned, old, new, expected):
    path = planned[1]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        train.main(["tiny_omni", f"plan={path}", "--show"])
    assert str(raised.value).startswith(f"plan={path}: ")
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_and_a_second_plan_are_named(tmp_path):
    with pytest.raises(UserError, match="no readable plan"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="plan=a and plan=b: a run has one plan"):
        train.main(["tiny_omni", "plan=a", "plan=b"])
