"""Recompute cheap functions in backward, where no remat policy recomputes the whole layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import jax
from jaxtyping import Array

Outputs = TypeVar("Outputs", Array, tuple[Array, ...])
_layer_recomputed: ContextVar[bool] = ContextVar("layer_recomputed", default=False)


@contextmanager
def recomputed_layer(recomputed: bool) -> Iterator[None]:
    """Trace a layer which a remat policy recomputes, or does not."""
    token = _layer_recomputed.set(recomputed)
    try:
        yield
    finally:
        _layer_recomputed.reset(token)


def keep_inputs(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Save only a cheap function's inputs for backward, which recomputes its large intermediate values.

    In a layer that a policy recomputes, the policy alone decides.
    """
    # In a scan XLA cannot merge the recomputation with the original. An adapter's small product is
    # kept.
    policy = jax.checkpoint_policies.save_only_these_names("adapter")
    checkpointed = jax.checkpoint(function, prevent_cse=False, policy=policy)

    @wraps(function)
    def call(*arrays: Any) -> Outputs:
        return (function if _layer_recomputed.get() else checkpointed)(*arrays)

    return call
