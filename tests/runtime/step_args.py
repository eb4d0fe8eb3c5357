"""Arguments of the programs of a step by shape, so that nothing is computed or allocated for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from tiny_run import weights

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.runtime.device_batch import ProcessReport, put_report, put_rows
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import hyperparameters


class StepArguments(NamedTuple):
    """The arguments of the programs of a step, by their names."""

    accumulate: tuple[Any, ...]
    update: tuple[Any, ...]


def step_arguments(config: Config, executor: Executor, batch: Microbatch) -> StepArguments:
    """The arguments for a step of this microbatch."""

    def structs(tree: Any, layouts: Any) -> Any:
        return jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree, layouts
        )

    state = structs(executor.states[0].abstract, executor.states[0].shardings)
    of_losses = {name: jax.ShapeDtypeStruct((), np.float32) for name in weights([batch])}
    reports = put_report(ProcessReport(), executor.mesh)
    noise = np.zeros(2, np.uint32) if executor.model.is_random else None
    put = put_rows(batch, executor.mesh, executor.rules)
    unreadable = jax.eval_shape(executor.merge_unreadable, reports.unreadable)
    hyper = hyperparameters(config, 0)
    return StepArguments(
        (
            state.trainable,
            state.frozen,
            executor.sums if executor.accumulates else None,
            put,
            of_losses,
            noise,
        ),
        (state, executor.sums, hyper, of_losses, reports, unreadable),
    )
