"""Which rows a gradient that is not a finite number comes from, where every loss is one: found by trying parts of them.

It takes a few gradients, two for each halving, and a second array of them; it is done only when a step was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mmjax.batch import Microbatch
from mmjax.parallel.mesh import replicated
from mmjax.training.state import TrainState
from mmjax.training.step import Executor

MOST_TRIALS = 64


def samples_behind(
    executor: Executor,
    state: TrainState,
    batches: Sequence[Microbatch],
    noise: np.ndarray | None,
    spoiled: Sequence[int],
) -> list[int]:
    """Ids of the samples in the rows whose own gradient is not finite; empty where no rows alone have such."""
    weight, batches, _ = executor.weighed(batches, spoiled)
    whole = replicated(executor.mesh)
    finite = jax.jit(lambda gradients: jnp.isfinite(optax.tree.norm(gradients)), out_shardings=whole)
    mask = jax.jit(lambda weights, rows: jnp.where(rows[:, None], weights, 0.0))
    here = jax.jit(lambda x: x, out_shardings=whole)
    found: list[int] = []
    for batch in batches:

        def bad(rows: list[int], batch: Microbatch = batch) -> bool:
            chosen = np.isin(np.arange(batch.text.weight.shape[0]), rows)
            alone = batch._replace(text=batch.text._replace(weight=mask(batch.text.weight, chosen)))
            drops = noise if executor.model.drops else None
            of = executor.accumulate(state.trainable, state.frozen, executor.zeros(), alone, weight, drops)
            return not bool(finite(of.gradients))

        owner = np.asarray(here(batch.text.owner))
        rows = halved(list(range(len(owner))), bad, MOST_TRIALS)
        found += np.unique(owner[rows][owner[rows] >= 0]).tolist()
    return found


def halved(of: list[int], bad: Callable[[list[int]], bool], most: int) -> list[int]:
    """The members that are bad alone, found by halving; where that takes more than `most` trials, also their parts."""
    found, parts = [], [of]
    for _ in range(most):
        if not parts:
            return sorted(found)
        part = parts.pop()
        if bad(part):
            middle = len(part) // 2
            found += part if len(part) == 1 else []
            parts += [half for half in (part[:middle], part[middle:]) if half] if len(part) > 1 else []
    return sorted(found + [member for part in parts for member in part])
