"""A program, not a test: the gradients of one step, made by the processes that the environment names.

`python one_step.py FOLDER OUT.npz`: the tiny omni config, microbatches of several rows, every process its own rows.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_run import tiny_config

from mmjax.config import BatchConfig, Samples
from mmjax.data.budget import make_budget
from mmjax.data.index import build_index
from mmjax.data.pipeline import StepLoader
from mmjax.data.sources import open_sources
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.parallel.mesh import held_ranks, make_mesh, replicated, row_ranks
from mmjax.parallel.sharding import ShardingRules
from mmjax.training.optimizer import hyperparameters, make_optimizer
from mmjax.training.step import Executor


def main(folder: Path, out: Path) -> None:
    rows = {"llm": 8, "vision": 8, "audio": 8}
    config = tiny_config(batch=BatchConfig(Samples(96), rows, 2))
    mesh = make_mesh(config.mesh, jax.devices())
    index = build_index(open_sources(config, "train", folder), config.model.encoders)
    processes.led(lambda: index.save(folder / "index"))
    budget = make_budget(index, config, [1.0])
    loader = StepLoader(config, budget, folder / "index", folder, held_ranks(mesh), row_ranks(mesh), processes.leads())
    loaded = loader(0)

    model = Model.build(config.model, jnp.float32)
    executor = Executor(model, make_optimizer(config.optimizer, model.axes), mesh, ShardingRules(), 1)
    state, accumulated, weight = executor.init(jax.random.key(0)), executor.zeros(), np.float32(0)
    batches = [executor.put(b) for b in loaded.microbatches]
    for batch in batches:
        weight = executor.weigh(weight, batch.text.weight)
    for batch in batches:
        accumulated = executor.accumulate(state.trainable, state.frozen, accumulated, batch, weight)
    hyper, said = hyperparameters(config, executor.modules, 0), executor.said(1, float(loaded.needed_flops))
    _, _, told = executor.update(state, executor.zeros(), hyper, weight, *said)
    whole = jax.device_get(jax.jit(lambda x: x, out_shardings=replicated(mesh))(accumulated))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(whole)}
    opened = np.array([sum(int((b.text.sample >= 0).sum()) for b in loaded.microbatches)])
    if processes.leads():
        np.savez(out, **leaves, flops=np.asarray(told.needed_flops))
    np.save(out.with_suffix(f".{processes.index()}.npy"), opened)


with processes.joined():
    main(Path(sys.argv[1]), Path(sys.argv[2]))
