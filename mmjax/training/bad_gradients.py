"""Which rows a gradient that is not a finite number comes from, where every loss is one: found by trying parts of them.

It takes a few gradients, two for each halving, and a second array of them; it is done only when a step was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mmjax.batch import PADDING, Microbatch
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
    alone = jax.jit(_alone)
    here = jax.jit(lambda x: x, out_shardings=whole)
    found: list[int] = []
    for batch in batches:

        def bad(rows: list[int], batch: Microbatch = batch) -> bool:
            chosen = np.isin(np.arange(batch.text.weight.shape[0]), rows)
            drops = noise if executor.model.drops else None
            part = alone(batch, chosen)
            of = executor.accumulate(state.trainable, state.frozen, executor.zeros(), part, weight, drops)
            return not bool(finite(of.gradients))

        owner = np.asarray(here(batch.text.owner))
        rows = halved(list(range(len(owner))), bad, MOST_TRIALS)
        found += np.unique(owner[rows][owner[rows] >= 0]).tolist()
    return found


def _alone(batch: Microbatch, rows: jax.Array) -> Microbatch:
    """These rows, bool `[R]`, and the items of their samples; nothing in the others, not even without weight.

    Where a derivative is infinite, a gradient of zero makes NaN of it.
    """

    def kept(x: jax.Array, keep: jax.Array, other: int) -> jax.Array:
        return jnp.where(keep.reshape(*keep.shape, *(1,) * (x.ndim - keep.ndim)), x, jnp.array(other, x.dtype))

    text, own = batch.text, kept(batch.text.owner, rows, PADDING - 1)
    plain = {f: kept(getattr(text, f), rows, 0) for f in ("token", "weight", "span", "kind", "sees")}
    slots = {e: jax.tree.map(lambda x: kept(x, rows, PADDING), of) for e, of in text.slots.items()}
    items = {}
    for encoder, of in batch.items.items():
        keep = jnp.isin(of.owner, own)
        items[encoder] = of._replace(values=kept(of.values, keep, 0), item=kept(of.item, keep, PADDING))
    return Microbatch(text._replace(**plain, sample=kept(text.sample, rows, PADDING), slots=slots), items)


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
