from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Without LLVM's optimizations: half the time to compile; what XLA partitions and allocates stays the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
