"""Find the rows of a step whose gradient is not finite although every loss is, by bisection.

It takes two gradients for each halving and memory for a second array of them, and only runs when a step was lost.
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

MAX_TRIALS = 64


def samples_with_bad_gradients(
    executor: Executor,
    state: TrainState,
    batches: Sequence[Microbatch],
    noise: np.ndarray | None,
    unreadable: Sequence[int],
) -> list[int]:
    """Return the ids of the samples in rows whose gradient is not finite; empty where no rows have such by themselves.

    unreadable: samples that this process could not read, whose weight is zero.
    """
    weight, batches, _ = executor.weighed(batches, unreadable)
    everywhere = replicated(executor.mesh)
    finite = jax.jit(lambda gradients: jnp.isfinite(optax.tree.norm(gradients)), out_shardings=everywhere)
    replicate = jax.jit(lambda x: x, out_shardings=everywhere)
    isolate = jax.jit(_isolate)
    samples: list[int] = []
    for batch in batches:

        def bad(rows: list[int], batch: Microbatch = batch) -> bool:
            selected = np.isin(np.arange(batch.text.weight.shape[0]), rows)
            drops = noise if executor.model.drops else None
            part = isolate(batch, selected)
            sums = executor.accumulate(state.trainable, state.frozen, executor.zeros(), part, weight, drops)
            return not bool(finite(sums.gradients))

        owner = np.asarray(replicate(batch.text.owner))
        rows = bisect_bad(list(range(len(owner))), bad, MAX_TRIALS)
        samples += np.unique(owner[rows][owner[rows] >= 0]).tolist()
    return samples


def _isolate(batch: Microbatch, rows: jax.Array) -> Microbatch:
    """Keep these rows, bool `[R]`, and the items of their samples; empty the others entirely.

    A weight of zero would not do: where a derivative is infinite, zero times it is NaN.
    """

    def keep(x: jax.Array, mask: jax.Array, empty: int) -> jax.Array:
        mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x, jnp.array(empty, x.dtype))

    text = batch.text
    # Owners of removed rows become PADDING - 1, which is the owner of no item, not even of padding.
    owners = keep(text.owner, rows, PADDING - 1)
    plain = {f: keep(getattr(text, f), rows, 0) for f in ("token", "weight", "span", "kind", "sees")}
    slots = {e: jax.tree.map(lambda x: keep(x, rows, PADDING), slot) for e, slot in text.slots.items()}
    items = {}
    for encoder, item in batch.items.items():
        mask = jnp.isin(item.owner, owners)
        items[encoder] = item._replace(values=keep(item.values, mask, 0), item=keep(item.item, mask, PADDING))
    return Microbatch(text._replace(**plain, sample=keep(text.sample, rows, PADDING), slots=slots), items)


def bisect_bad(members: list[int], bad: Callable[[list[int]], bool], max_trials: int) -> list[int]:
    """Return the members that are bad by themselves, found by bisection.

    After `max_trials` trials, all members of the parts that are not decided yet are returned, too.
    """
    culprits: list[int] = []
    parts = [members]
    for _ in range(max_trials):
        if not parts:
            return sorted(culprits)
        part = parts.pop()
        if not bad(part):
            continue
        if len(part) == 1:
            culprits += part
        else:
            middle = len(part) // 2
            parts += [half for half in (part[:middle], part[middle:]) if half]
    return sorted(culprits + [member for part in parts for member in part])
