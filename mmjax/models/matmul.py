"""Products and reductions over channels, in the shapes that XLA computes fast on a CPU."""

from __future__ import annotations

from jaxtyping import Array, Float

from mmjax.parallel.sharding import active, platform


def on_one_cpu() -> bool:
    """Return whether activations lie whole on a single CPU device."""
    current = active()
    return platform() == "cpu" and (current is None or current.mesh.size == 1)


def as_matrix(x: Float[Array, "*b c"]) -> Array:
    """Reshape `[..., c]` to `[n, c]` on a single CPU; return it as it is elsewhere.

    XLA's CPU libraries multiply and reduce matrices. Of arrays with more dimensions, be they of size 1, backward passes
    transpose copies first, and reductions take up to 20 times as long (docs/measurements/peer.md). On a mesh, merged
    dimensions could not stay sharded.
    """
    return x.reshape(-1, x.shape[-1]) if on_one_cpu() and x.size else x


def matmul(x: Float[Array, "*b i"], weight: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    """Multiply activations by a matrix."""
    return (as_matrix(x) @ weight).reshape(*x.shape[:-1], weight.shape[-1])
