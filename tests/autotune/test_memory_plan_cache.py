"""What a run decided of its memory is found again when the same is asked, and only then."""

from dataclasses import replace

import jax
import pytest
from tiny_run import tiny_config

from mmjax.autotune.memory_plan import MemoryDecision, plan_key, read_memory_plan, write_memory_plan
from mmjax.config import MeshConfig
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.memory import ModelSharding
from mmjax.planning.remat import MemoryLimit, RunPlan, StagePlan

POLICIES = {"llm": ("full", "none"), "vision": ("products",), "audio": ("none",)}
STAGE = StagePlan(
    name="all",
    devices=(0,),
    mesh={},
    layers={tower: range(len(policies)) for tower, policies in POLICIES.items()},
    policies=POLICIES,
    parameters=0,
    in_flight=1,
    fixed={},
    activations=dict.fromkeys(POLICIES, 0.0),
    largest_shape=0,
    recompute={},
    sharding=ModelSharding(),
)
FITTED = RunPlan((STAGE,), 2, MemoryLimit(1e9), 0.0, 0.0, 123.0)


def asked(config=None, devices: int = 8) -> dict:
    config = config or tiny_config()
    return plan_key(config, make_mesh(MeshConfig(data=devices), jax.devices()[:devices]))


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "fit.json"
    write_memory_plan(path, asked(), FITTED)
    return path


def test_it_is_read_as_it_was_written(kept):
    assert MemoryDecision.of(read_memory_plan(kept, asked())) == MemoryDecision(POLICIES, 2, 123.0)
    assert [p.name for p in kept.parent.iterdir()] == ["fit.json"]


def test_on_other_devices_or_with_other_settings_it_is_decided_again(kept):
    made = tiny_config()
    llm = replace(made.model, llm=replace(made.model.llm, remat="full"))
    others = (
        asked(devices=4),
        asked(replace(made, model=llm)),
        asked(replace(made, mesh=replace(made.mesh, memory=1.0))),
        asked(replace(made, training=replace(made.training, loss_chunks=4))),
    )
    assert [read_memory_plan(kept, other) for other in others] == [None] * 4


def test_a_letter_that_storage_has_changed_decides_nothing(kept):
    whole = kept.read_text()
    for was, became in (
        ("full", "none"),
        ('"loss_chunks": 2', '"loss_chunks": 3'),
        ("123.0", "923.0"),
    ):
        kept.write_text(whole.replace(was, became, 1))
        assert read_memory_plan(kept, asked()) is None
    kept.write_text(whole)
    assert read_memory_plan(kept, asked()) is not None


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[]", "{", "null", '{"asked": {}}', "\x00"])
def test_a_file_that_is_not_whole_decides_nothing(kept, text):
    kept.write_text(text)
    assert read_memory_plan(kept, asked()) is None
    kept.unlink()
    assert read_memory_plan(kept, asked()) is None
