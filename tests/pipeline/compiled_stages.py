"""Planned bytes of every stage of omni_10b on units, and what XLA compiles for absent H100s: a JSON object.

``python tests/pipeline/compiled_stages.py full``: with this remat policy in all layers.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from stage_programs import compile_stage, stage_batch, stage_inputs

from mmjax.autotune.compile_memory import aot_devices
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.config import Config, MeshConfig, Remat, Unit
from mmjax.config.loading import load
from mmjax.data.plan.length_index import index_of_lengths, omni_corpus
from mmjax.data.plan.step_plan import RankLayout, make_planner
from mmjax.models.model import Model
from mmjax.pipeline.executor import PipelineExecutor
from mmjax.pipeline.stage_plan import plan_stages
from mmjax.pipeline.units import place_stages
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.memory import LOADED
from mmjax.planning.remat import MemoryLimit, StagePlan
from mmjax.planning.schedules import schedule_name, stage_cuts
from mmjax.planning.step_time import Speed
from mmjax.runtime.compiler_options import compiler_options
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.runtime.units import units_topology

UNITS = {
    "encoders": Unit(modules=("vision", "audio"), data=4),
    "llm": Unit(pipeline=3, fsdp=2, tensor=2),
}


def main(policy: Remat) -> None:
    base = load("omni_10b")
    rows = {"llm": 2, "vision": 4, "audio": 4}
    batch = replace(base.batch, size=replace(base.batch.size, count=128), rows=rows, microbatches=16)
    towers = {"llm": base.model.llm, **base.model.encoders}
    policies = {name: (policy,) * tower.layers for name, tower in towers.items()}
    config = apply_memory_plan(replace(base, batch=batch, mesh=MeshConfig(), units=UNITS), policies, 1)
    cluster = parse_cluster("h100x2x8")
    devices = aot_devices(cluster)
    index = index_of_lengths(omni_corpus(20_000, config.seed), config.model.encoders)
    layout = make_planner(index, config, [1.0], units_topology(config.units), max_steps=4)[1]
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    pipeline = PipelineExecutor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        place_stages(config, model, devices),
        sources=1,
        schedule=schedule_name(config),
        compiler_options=compiler_options(config.compiler, devices[0]),
    )
    speed = Speed(cluster.device.rates(config.training.precision))
    stages = {}
    for number, plan in enumerate(plan_stages(config, layout, speed, MemoryLimit(math.inf))):
        compiled = compiled_bytes(config, pipeline, layout, number, plan)
        stages[plan.name] = {"planned": plan.bytes, "compiled": compiled}
    print(json.dumps(stages))


def compiled_bytes(
    config: Config, pipeline: PipelineExecutor, layout: RankLayout, number: int, plan: StagePlan
) -> dict[str, int]:
    """Bytes on a device while each of a stage's programs runs, with what lies beside it, in the longest shape."""
    names = ("llm", *config.model.encoders)
    tower = names.index(pipeline.stages[number].stage.tower)
    longest = max(layout.shapes, key=lambda shape: shape.lengths[tower])
    rows = (layout.topology.ranks * n for n in layout.rows)
    shape = dict(zip(names, zip(rows, longest.lengths, strict=True), strict=True))
    width = max(longest.widths)
    programs, residuals = compile_stage(pipeline, number, shape, width, hyperparameters(config, pipeline.modules, 0))
    part = pipeline.abstract_parts[number]
    # Also what a program is not given because it does not use it: parameters and sums lie there all the same.
    state = on_device(part) + on_device(part.trainable)
    loaded = LOADED * config.batch.microbatches * on_device(stage_batch(pipeline, number, shape, width))
    passing = on_device(stage_inputs(pipeline, number, shape, width))
    in_flight = plan.in_flight * on_device(residuals)
    total = {}
    for name, program in programs.items():
        memory = program.memory_analysis()
        made = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        total[name] = made + state + loaded
        if name != "update":
            total[name] += passing + in_flight
        if name == "forward":
            total[name] -= on_device(residuals)  # one microbatch's are among what it makes
    return total


def on_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    main(sys.argv[1])
