"""A run that does not fit 8 absent H100s, and what the compiler says of the nearest that was named: a JSON object."""

import json
import re
import sys
from dataclasses import replace

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import compiled_bytes
from mmjax.autotune.forecast import forecast_run
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.autotune.sharded_stages import device_microbatch
from mmjax.benchmarks.memory import MODELS
from mmjax.config import BatchConfig, MeshConfig, NoGrouping, Samples
from mmjax.config.loading import apply_overrides, load
from mmjax.data.plan.length_files import index_of_lengths, omni_corpus
from mmjax.planning.hardware import parse_cluster

NODE = parse_cluster("h100x8")


def main(gigabytes: float) -> None:
    model, _ = MODELS["omni"]
    batch = BatchConfig(
        Samples(96), {"llm": 8, "vision": 8, "audio": 8}, grouping=NoGrouping(), shapes=1
    )
    config = replace(
        load("omni_10b"), model=model, batch=batch, mesh=MeshConfig(data=8, memory=gigabytes)
    )
    index = index_of_lengths(omni_corpus(20_000, 0), model.encoders)
    refused = forecast_run(config, NODE, index, [1.0])
    changed = apply_overrides(config, re.findall(r"(?:mesh|batch)\.\w+=\d+", refused.remedy))
    chosen = forecast_run(changed, NODE, index, [1.0]).chosen
    plan = chosen.plan
    shape = device_microbatch(
        changed, chosen.layout, chosen.layout.shapes[plan.fullest.largest_shape]
    )
    compiled = compiled_bytes(
        apply_memory_plan(changed, plan.policies, plan.loss_chunks), shape, aot_devices(NODE)
    )
    fits = [refused.chosen.plan.fits, plan.fits]
    print(
        json.dumps(
            {"fits": fits, "room": plan.limit.device, "planned": plan.device, "compiled": compiled}
        )
    )


if __name__ == "__main__":
    main(float(sys.argv[1]))
