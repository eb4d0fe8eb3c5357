"""The programs of a step on one mesh are those of the specification, letter by letter, whatever a model is made of."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from drawing import UNET, drawing_config
from one_mesh import assert_programs_are_those_of_one_mesh, gradient_program, lowered_text
from step_args import step_arguments
from tiny_run import MESHES, load_steps, make_executor, tiny_config, with_answers

from mmjax.config import CrossEntropy, ExpertsConfig, LoraConfig
from mmjax.config.loading import load
from mmjax.config.losses import Dpo, Grpo
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.models.multimodal import MultimodalModel

TINY = tiny_config()
DRAWING = drawing_config()
CONFIGS = Path(__file__).parents[2] / "configs"
FOUR_RANKS = Topology(4, 4, 4)


def with_llm(**changes):
    return replace(
        TINY, model=replace(TINY.model, llm=replace(TINY.model.llm, layers=4, **changes))
    )


def with_encoders(config, **changes):
    encoders = {
        name: replace(encoder, **changes) for name, encoder in config.model.encoders.items()
    }
    return replace(config, model=replace(config.model, encoders=encoders))


def with_adapters(loss, *patterns):
    frozen = {
        n: replace(e, frozen=True, connector=replace(e.connector, frozen=True))
        for n, e in TINY.model.encoders.items()
    }
    model = replace(TINY.model, llm=replace(TINY.model.llm, frozen=True), encoders=frozen)
    return replace(
        TINY, model=replace(model, lora={"adapters": LoraConfig(patterns, 4)}), loss=loss
    )


EXPERTS = ExpertsConfig(
    layers=(0, 1, 3),
    count=4,
    per_token=2,
    width=24,
    shared_width=16,
    balance_loss=0.01,
    z_loss=0.001,
)
DEEPSTACK = with_llm()
DEEPSTACK.model.encoders["vision"] = replace(
    DEEPSTACK.model.encoders["vision"], layers=4, deepstack=(0, 1, 3)
)
CASES = {
    "one device": (TINY, "one device", ONE_RANK),
    "data 2 x fsdp 2 x tensor 2": (TINY, "data=2 x fsdp=2 x tensor=2", FOUR_RANKS),
    "encoders by data": (
        replace(TINY, batch=replace(TINY.batch, rows={"llm": 3, "vision": 2, "audio": 2})),
        "data=2 x fsdp=2 x tensor=2, encoders=data",
        Topology(4, 4, 4, encoders_per_rank=2),
    ),
    "dropout, frozen encoders, remat": (
        with_encoders(with_llm(dropout=0.1, remat="full"), dropout=0.1, frozen=True),
        "one device",
        ONE_RANK,
    ),
    "experts with losses": (with_llm(experts=EXPERTS), "one device", ONE_RANK),
    "deepstack": (DEEPSTACK, "one device", ONE_RANK),
    "context 2, loss in 2 chunks": (
        replace(TINY, training=replace(TINY.training, loss_chunks=2)),
        "context=2",
        Topology(1, 1, 1, 2, 2),
    ),
    "context and overlapped products": (
        TINY,
        "data=2 x context=2 x tensor=2, overlap",
        Topology(2, 2, 2, 2, 2),
    ),
    "a generator": (DRAWING, "one device", ONE_RANK),
    "a UNet": (
        replace(DRAWING, model=replace(DRAWING.model, generators={"picture": UNET})),
        "one device",
        ONE_RANK,
    ),
    "DPO beside adapters in the LLM": (
        with_adapters(Dpo(0.1), "llm.*.attention.*"),
        "one device",
        ONE_RANK,
    ),
    "GRPO beside adapters in two towers": (
        with_adapters(Grpo(beta=0.1), "llm.*.attention.*", "vision.*.attention.*"),
        "fsdp=4 x tensor=2",
        FOUR_RANKS,
    ),
}
SHIPPED = (
    "tiny_audio",
    "tiny_draw",
    "tiny_frozen",
    "tiny_omni",
    "tiny_text",
    "tiny_video",
    "tiny_vlm",
)


@pytest.mark.default_cases("context and overlapped products")
@pytest.mark.parametrize("case", CASES)
def test_any_model_and_mesh_has_the_programs_of_the_specification(case, tmp_path):
    config, mesh, topology = CASES[case]
    (batches,) = load_steps(config, tmp_path, 1, topology)
    executor = make_executor(config, MESHES[mesh])
    batch = (
        with_answers(batches[:1], config.loss)[0] if config.loss != CrossEntropy() else batches[0]
    )
    assert_programs_are_those_of_one_mesh(executor, step_arguments(config, executor, batch))


@pytest.mark.exhaustive
def test_one_microbatch_has_gradients_in_the_precision_of_the_computation(tmp_path):
    config = replace(TINY, training=replace(TINY.training, precision="bfloat16"))
    executor = make_executor(config, MESHES["one device"], accumulates=False)
    batch = load_steps(config, tmp_path, 1)[0][0]
    assert_programs_are_those_of_one_mesh(executor, step_arguments(config, executor, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_have_the_programs_of_the_specification(name, tmp_path):
    for file in CONFIGS.glob("tiny_*.py"):  # each begins with another
        shutil.copy(file, tmp_path)
    config = load(shutil.copy(CONFIGS / f"{name}.py", tmp_path / "config.py"), ["data.workers=0"])
    executor = make_executor(config, MESHES["one device"])
    batch = load_steps(config, tmp_path, 1)[0][0]
    assert_programs_are_those_of_one_mesh(executor, step_arguments(config, executor, batch))


@pytest.mark.exhaustive
def test_encoders_in_another_order_are_another_program(tmp_path, monkeypatch):
    executor = make_executor(TINY, MESHES["one device"])
    given = step_arguments(TINY, executor, load_steps(TINY, tmp_path, 1)[0][0]).accumulate
    own, encode = lowered_text(executor.programs[0].forward_backward, given), MultimodalModel.encode
    monkeypatch.setattr(
        MultimodalModel, "encode", lambda self, items, noise: encode(self, reverse(items), noise)
    )
    assert lowered_text(gradient_program(executor), given) != own


def reverse(items):
    return dict(reversed(items.items()))
