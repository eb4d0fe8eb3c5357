"""Planned bytes of every stage of omni_10b on units, and what XLA compiles for absent H100s: a JSON object.

``python tests/autotune/compiled_stages.py full divided``: with this remat policy in all layers, on
these units.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import compile_run
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.autotune.run_plan import plan_run
from mmjax.config import ExpertsConfig, MeshConfig, Remat, Unit
from mmjax.config.loading import load
from mmjax.data.plan.length_files import index_of_lengths, omni_corpus
from mmjax.data.plan.step_plan import make_planner
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.remat import MemoryLimit
from mmjax.planning.speed import Speed
from mmjax.runtime.units import units_topology

ENCODERS = ("vision", "audio")
UNITS = {
    "plain": {
        "encoders": Unit(modules=ENCODERS, data=4),
        "llm": Unit(pipeline=3, fsdp=2, tensor=2),
    },
    "divided": {
        "encoders": Unit(modules=ENCODERS, data=2, tensor=2, encoders="data"),
        "llm": Unit(pipeline=3, fsdp=2, tensor=2, sequence_parallel="on"),
    },
    "experts": {"encoders": Unit(modules=ENCODERS, data=4), "llm": Unit(pipeline=3, expert=4)},
}


def main(policy: Remat, layout_name: str = "plain") -> None:
    base = load("omni_10b")
    units = UNITS[layout_name]
    if layout_name == "experts":
        experts = ExpertsConfig(layers=tuple(range(28)), count=16, per_token=2, width=2368)
        base = replace(
            base, model=replace(base.model, llm=replace(base.model.llm, experts=experts))
        )
    rows = {"llm": 2, "vision": 4, "audio": 4}
    batch = replace(
        base.batch, size=replace(base.batch.size, count=128), rows=rows, microbatches=16
    )
    towers = {"llm": base.model.llm, **base.model.encoders}
    policies = {name: (policy,) * tower.layers for name, tower in towers.items()}
    config = apply_memory_plan(
        replace(base, batch=batch, mesh=MeshConfig(), units=units), policies, 1
    )
    cluster = parse_cluster("h100x2x8")
    devices = aot_devices(cluster)
    index = index_of_lengths(omni_corpus(20_000, config.seed), config.model.encoders)
    layout = make_planner(index, config, [1.0], units_topology(config.units), max_steps=4)[1]
    speed = Speed(cluster.device.rates(config.training.precision))
    plan = plan_run(config, layout, speed, MemoryLimit(math.inf))
    programs = compile_run(config, layout, plan, devices)
    found = {}
    for stage in plan.stages:
        compiled = {name: program.bytes for name, program in programs[stage.name].items()}
        found[stage.name] = {"planned": stage.bytes, "compiled": compiled}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
