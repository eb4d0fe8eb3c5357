"""A plan's file says the same when it is read again, and what somebody wrote into it wrongly is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmjax.config import PostBalance
from mmjax.config.loading import apply_overrides, load
from mmjax.errors import UserError
from mmjax.planning.plan_file import plan_changes, plan_text

MESH = {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1, "context": 1}
POLICIES = {"llm": ("full", "products", "products"), "vision": ("none", "none"), "audio": ("attention", "none", "none")}


@pytest.fixture
def planned(tmp_path):
    config = load("tiny_omni")
    config = replace(config, batch=replace(config.batch, balance=PostBalance(locality="off"), microbatches=2))
    path = tmp_path / "plan.json"
    path.write_text(plan_text(config, "h100x8", MESH, POLICIES, 4, {"seconds": 1.5}))
    return config, path


def test_a_plan_that_is_read_again_changes_a_config_into_what_was_planned(planned):
    config, path = planned
    name, changes = plan_changes(path)
    changed = apply_overrides(load("tiny_omni"), changes)
    assert name == "tiny_omni"
    assert (changed.mesh.data, changed.mesh.fsdp, changed.mesh.tensor) == (2, 4, 1)
    assert changed.batch == config.batch
    assert changed.training.loss_chunks == 4
    towers = {"llm": changed.model.llm, **changed.model.encoders}
    assert {tower: towers[tower].remat for tower in towers} == POLICIES


def test_a_plan_of_tensor_parallelism_says_how_tokens_lie_between_layers(tmp_path):
    config = load("tiny_omni")
    config = replace(config, mesh=replace(config.mesh, sequence_parallel="overlap"))
    path = tmp_path / "plan.json"
    path.write_text(plan_text(config, "h100x8", MESH | {"fsdp": 2, "tensor": 2}, POLICIES, 4, {}))
    changed = apply_overrides(load("tiny_omni"), plan_changes(path)[1])
    assert changed.mesh.sequence_parallel == "overlap"


def test_a_plan_is_json_with_a_line_for_each_setting_and_layers_as_runs(planned):
    text = planned[1].read_text()
    found = json.loads(text)
    assert found["settings"]["model.llm.remat"] == [[1, "full"], [2, "products"]]
    assert found["expected"] == {"seconds": 1.5}
    assert all(sum(f'"{key}"' in line for line in text.splitlines()) == 1 for key in found["settings"])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{", "", "no readable plan"),
        ('"settings"', '"setings"', "settings"),
        ('"expected"', '"expcted"', "did you mean 'expected'?"),
        ('"mesh.fsdp"', '"mesh.fsdq"', "settings.mesh.fsdq is not a plan's"),
        ('"mesh.fsdp"', '"training.steps"', "settings.training.steps is not a plan's"),
        ('"mesh.fsdp": 4', '"mesh.fsdp": null', "settings.mesh.fsdp is null; give a number or a word"),
        ('[2, "products"]', '[2, "product"]', 'settings.model.llm.remat has [2, "product"]; give runs'),
        ('[2, "products"]', '[0, "products"]', 'settings.model.llm.remat has [0, "products"]; give runs'),
    ],
)
def test_a_fault_in_a_plan_is_named_with_its_place(planned, old, new, expected):
    path = planned[1]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        plan_changes(path)
    assert str(raised.value).startswith(f"plan={path}: ")
    assert expected in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="no readable plan"):
        plan_changes(tmp_path / "plan.json")
