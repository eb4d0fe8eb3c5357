"""Steps of any grouping and balance on any devices.

Also a program, for several processes: `python balanced.py FOLDER OUT.npz CASE ...`, a case being
grouping/balance or grouping/balance/mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_run import paths, tiny_config

from mmjax.config import (
    BatchConfig,
    Config,
    IsfGrouping,
    LlmBalance,
    MeshConfig,
    NoBalance,
    NoGrouping,
    PackGrouping,
    PostBalance,
    Samples,
)
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.distributed import coordination
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, encoder_axes, local_ranks, make_mesh, replicated
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import hyperparameters, make_optimizer

STEPS = 20
GROUPINGS = {"none": NoGrouping(24), "isf": IsfGrouping(chunk_steps=24), "pack": PackGrouping(24)}
BALANCES = {
    "none": NoBalance(),
    "llm": LlmBalance(),
    "post": PostBalance(),
    "apart": PostBalance("off"),
}
CASES = [f"{grouping}/{balance}" for grouping in GROUPINGS for balance in BALANCES]
MESHES = {"data": MeshConfig(), "tensor as data": MeshConfig(tensor=2, encoders="data")}


def config_of(case: str) -> Config:
    """Four samples a rank of eight, dropout in every tower."""
    grouping, balance, *mesh = case.split("/")
    rows = {"llm": 8, "vision": 8, "audio": 8}
    batch = BatchConfig(Samples(32), rows, 1, GROUPINGS[grouping], BALANCES[balance], shapes=1)
    config = tiny_config(batch=batch, mesh=MESHES[mesh[0] if mesh else "data"])
    model = config.model
    encoders = {
        name: replace(encoder, layers=1, dropout=0.1) for name, encoder in model.encoders.items()
    }
    return replace(
        config,
        model=replace(model, llm=replace(model.llm, layers=1, dropout=0.1), encoders=encoders),
    )


@cache
def parameters() -> Any:
    """Of every case, on the host."""
    model = Model.build(config_of(CASES[0]).model, jnp.float32)
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


def run(
    case: str, folder: Path, devices: Sequence[jax.Device], steps: int = STEPS
) -> dict[str, np.ndarray]:
    """`loss` and gradients (by path) of the first step, `losses` of all, sample ids, LLM tokens that moved, widths.

    `opened`, `opened_items`: tokens of samples, and positions of items, that this process opened.
    """
    config = config_of(case)
    mesh = make_mesh(config.mesh, devices)
    index = build_index(open_sources(config, "train", folder), config.model.encoders)
    coordination.run_on_leader(
        lambda: index.save(folder / "index") if not (folder / "index").exists() else None
    )
    planner, layout = make_planner(index, config, [1.0], mesh_topology(mesh, config.mesh))
    held = local_ranks(mesh), coordination.is_leader(), local_ranks(mesh, encoder_axes(config.mesh))
    loader = StepLoader(config, planner.grouper.budget, layout, folder / "index", folder, *held)
    model = Model.build(config.model, jnp.float32)
    optimizer = make_optimizer(config.optimizer, model.axes)
    executor = Executor.on_mesh(model, optimizer, mesh, ShardingRules.of(config.mesh), sources=1)
    placed = jax.tree.map(_placed, parameters(), executor.states[0].shardings.trainable)
    state, accumulated = executor.init(jax.random.key(0), placed), executor.zeros()
    loaded = [loader(step) for step in range(steps)]

    noise, first = np.array([config.seed, 0], np.uint32), executor.zeros()
    batches, weight, *_ = executor.weigh_batches([executor.put(b) for b in loaded[0].microbatches])
    (first,) = executor.gradients(state, first, batches, weight, noise).sums
    whole = jax.device_get(jax.jit(lambda x: x, out_shardings=replicated(mesh))(first))

    losses, flops = [], []
    for step, arrays in enumerate(loaded):
        put = [executor.put(b) for b in arrays.microbatches]
        hyper, noise = hyperparameters(config, step), np.array([config.seed, step], np.uint32)
        told = ProcessReport(int(arrays.digest), needed_flops=float(arrays.needed_flops))
        state, accumulated, report = executor.step(state, accumulated, put, hyper, told, noise)
        report = jax.device_get(report)
        assert report.agreed
        losses.append(report.losses.loss.sum() / report.losses.weight.sum())
        flops.append(report.needed_flops)
    return {
        "loss": whole.losses.loss.sum() / whole.losses.weight.sum(),
        **{f"gradient.{name}": leaf for name, leaf in paths(whole.gradients).items()},
        "losses": np.array(losses),
        "flops": np.array(flops),
        "samples": np.concatenate([np.sort(arrays.samples) for arrays in loaded]),
        "moved": np.concatenate([arrays.moved for arrays in loaded]).sum(0),
        "widths": np.concatenate([arrays.widths for arrays in loaded]).max(0),
        "opened": np.array(
            [sum(int((b.text.sample >= 0).sum()) for a in loaded for b in a.microbatches)]
        ),
        "opened_items": np.array(
            [
                sum(
                    int((i.item >= 0).sum())
                    for a in loaded
                    for b in a.microbatches
                    for i in b.items.values()
                )
            ]
        ),
    }


def _placed(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def main(folder: Path, out: Path, cases: Sequence[str]) -> None:
    """Write the results of all cases; what this process alone knows goes to a file of its own."""
    found, opened = {}, {}
    for case in cases:
        result = run(case, folder, jax.devices())
        opened |= {f"{case}:{key}": result.pop(key) for key in ("opened", "opened_items")}
        found |= {f"{case}:{key}": value for key, value in result.items()}
        jax.clear_caches()
    np.savez(out.with_suffix(f".{coordination.index()}.npz"), **opened)
    if coordination.is_leader():
        np.savez(out, **found)


if __name__ == "__main__":
    with coordination.process_group():
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
