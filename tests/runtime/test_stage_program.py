"""What the programs of stages compute, by XLA's count."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import jax
import pytest
from test_executor import config_of, make_pipeline

from mmjax.autotune.compile_run import BatchShape, RunPrograms
from mmjax.config import Unit

SHAPE = BatchShape(
    {"llm": (8, 16), "vision": (4, 64), "audio": (4, 64)}, {"vision": 16, "audio": 16}, 4
)


def flops_of_stages(*frozen: str, mlp_width: int = 512) -> dict[str, dict[str, float]]:
    """FLOPs of every stage's programs. Towers have one layer a stage, since XLA counts the body of a scan once."""
    config = config_of("by module", frozen, tied=False)
    wide = {"width": 128, "mlp_width": mlp_width}
    encoders = {name: replace(e, layers=1, **wide) for name, e in config.model.encoders.items()}
    llm = replace(config.model.llm, layers=2, head_width=32, **wide)
    config = replace(config, model=replace(config.model, llm=llm, encoders=encoders))
    pipeline = make_pipeline(config)
    programs = RunPrograms(config, pipeline, SHAPE)
    return {
        placed.name: {
            name: program.cost_analysis()["flops"]
            for name, program in programs.compile_passes(number)[0].items()
        }
        for number, placed in enumerate(pipeline.stages)
    }


@pytest.mark.exhaustive
def test_frozen_stages_compute_no_gradients_of_weights():
    trained, llm = flops_of_stages(), flops_of_stages("llm")
    towers, wider = (flops_of_stages("vision", "audio", mlp_width=width) for width in (512, 1024))
    for name in ("vision", "audio"):
        assert trained[name]["backward"] > 1.8 * trained[name]["forward"]
        # Backward goes through the connector alone: it costs the same whatever the tower is like.
        assert wider[name]["forward"] > 1.3 * towers[name]["forward"]
        assert wider[name]["backward"] == towers[name]["backward"] < 0.1 * trained[name]["backward"]
    forward = trained["llm[0:1]"]["forward"]
    assert trained["llm[0:1]"]["backward"] > 1.8 * forward
    assert llm["llm[0:1]"]["backward"] <= 1.1 * llm["llm[0:1]"]["forward"]
    # The last stage has as many layers, and logits for little more.
    assert (
        llm["llm[1:2]"]["forward_backward"]
        <= 2.1 * forward
        < trained["llm[1:2]"]["forward_backward"]
    )


def reduced_sizes(program: Any) -> list[int]:
    """Elements of every array that a program all-reduces or reduce-scatters."""
    lines = (
        line
        for line in program.as_text().splitlines()
        if re.search(r" (all-reduce|reduce-scatter)\(", line)
    )
    shapes = (
        shape
        for line in lines
        for shape in re.findall(r"\w\d+\[([\d,]*)\]", line.split(" all-reduce(")[0])
    )
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


def test_gradients_are_reduced_over_data_once_a_step_and_not_once_a_microbatch():
    units = {"encoders": Unit(modules=("vision", "audio")), "llm": Unit(data=2, pipeline=2)}
    config = replace(config_of("by module", tied=False), units=units)
    pipeline = make_pipeline(config)
    for number, (placed, program) in enumerate(
        zip(pipeline.stages, pipeline.programs, strict=True)
    ):
        if placed.stage.text:
            programs, _ = RunPrograms(config, pipeline, SHAPE._replace(peers=2)).compile_passes(
                number
            )
            layer = pipeline.model.config.llm.width**2
            assert all(size < layer for name in programs for size in reduced_sizes(programs[name]))
            reduced = reduced_sizes(program.reduce.lower(program.sums.gradients).compile())
            matrices = (p.size for p in jax.tree.leaves(program.abstract[0]) if p.size >= layer)
            assert sorted(reduced) == sorted(matrices)
