"""A mixture of experts in place of a layer's MLP: no capacity, so that every token reaches all of its experts.

Copies of the tokens, one for each expert of a token, are sorted by expert, multiplied in groups of any size, and put
back where they came from. Positions that are no token of a sample reach no expert, and
what an expert computes of a token is a matter of that token alone, so packing changes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from mmjax.config import Activation, ExpertsConfig
from mmjax.kernels.grouped_matmul import grouped_matmul, takes
from mmjax.models.expert_routing import Routes, Routing, route
from mmjax.models.layers import ACTIVATIONS, MLP, Linear, keep_inputs
from mmjax.parallel.expert_exchange import INTO, OUT, ExpertLayout
from mmjax.parallel.sharding import Axes, platform


class ExpertMatrices(nnx.Module):
    """One matrix for each expert, initialised normal with variance 1 / fan-in."""

    def __init__(self, count: int, inputs: int, outputs: int, axes: Axes, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (count, inputs, outputs), jnp.float32) * inputs**-0.5
        self.weight = nnx.Param(weight, axes=axes)


class Router(nnx.Module):
    """One vector for each expert, whose product with a token is the expert's logit."""

    def __init__(self, inputs: int, count: int, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (inputs, count), jnp.float32) * inputs**-0.5
        self.weight = nnx.Param(weight, axes=("embed", None))


class Experts(nnx.Module):
    """A router, gated MLPs of which each token takes a few, and perhaps a gated one that every token takes."""

    def __init__(self, config: ExpertsConfig, width: int, activation: Activation, rngs: nnx.Rngs):
        c = config
        self.router = Router(width, c.count, rngs)
        self.gate = ExpertMatrices(c.count, width, c.width, INTO, rngs)
        self.up = ExpertMatrices(c.count, width, c.width, INTO, rngs)
        self.down = ExpertMatrices(c.count, c.width, width, OUT, rngs)
        hidden = c.shared_width
        self.shared = MLP(width, hidden, width, activation, rngs, gated=True) if hidden else None
        self.shared_gate = Linear(width, 1, ("embed", None), rngs) if hidden else None
        self.config = config
        self.activation: Activation = activation

    def __call__(self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"]) -> tuple[Float[Array, "b t d"], Routing]:
        """Apply the experts to tokens; return the sums of their routing as well. valid: which positions are tokens."""
        c = self.config
        layout = ExpertLayout.of(x.shape, self.gate.weight.shape)

        def on_device(x: Array, valid: Array, router: Array, *matrices: Array) -> tuple[Array, Routing]:
            tokens = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
            routes, routing = route(tokens, router, valid.reshape(len(tokens)), c.per_token, c.normalized)
            out = grouped_mlp(tokens, routes, *matrices, layout, self.activation)
            return out.reshape(x.shape), layout.add_up(routing)

        matrices = (self.gate.weight[...], self.up.weight[...], self.down.weight[...])
        out, routing = layout.run(on_device, x, valid, self.router.weight[...], *matrices)
        if self.shared is not None:
            out = out + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out, routing


def grouped_mlp(
    x: Float[Array, "n d"],
    routes: Routes,
    gate: Float[Array, "e _ f"],
    up: Float[Array, "e _ f"],
    down: Float[Array, "e f _"],
    layout: ExpertLayout,
    activation: Activation,
) -> Float[Array, "n d"]:
    """Sum the outputs of each token's experts by their weights, in the tokens' precision.

    The matrices are those of the device's experts, its shard of each.
    """
    width = x.shape[1]
    count = len(gate)
    routes = layout.gather(routes)
    tokens, per_token = routes.expert.shape
    local = routes.expert.reshape(tokens * per_token) - layout.first(count)
    # Copies for other experts come last: of 3 experts here, 5 5 0 7 1 1 as seen from expert 5 is 0 0 _ 2 _ _.
    group = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(group, stable=True)
    inverse = jnp.argsort(order)
    sizes = (group[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    # Behind the last group a product may hold anything, and so may its gradient.
    grouped = (jnp.arange(tokens * per_token) < sizes.sum())[:, None]

    # Tokens and matrices are gathered inside, so that backward gathers them again instead of keeping them.
    def into(x: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        copies = jnp.broadcast_to(layout.gather(x)[:, None], (tokens, per_token, width))
        copies = jnp.where(grouped, permute(copies.reshape(tokens * per_token, width), order, inverse), 0)
        weights = [layout.gather_shards(weight.astype(x.dtype), 1) for weight in (gate, up)]
        return tuple(grouped_product(copies, weight, sizes) for weight in weights)

    def out(gated: Array, raised: Array, down: Array, share: Array) -> Array:
        hidden = jnp.where(grouped, ACTIVATIONS[activation](gated) * raised, 0)
        y = grouped_product(hidden, layout.gather_shards(down.astype(x.dtype), 2), sizes)
        y = permute(jnp.where(grouped, y, 0), inverse, order).reshape(tokens, per_token, width)
        return layout.scatter(jnp.einsum("nkd,nk->nd", y.astype(jnp.float32), share).astype(x.dtype))

    def both(x: Array, gate: Array, up: Array, down: Array, share: Array) -> Array:
        return out(*into(x, gate, up), down, share)

    if layout.exchanges:
        # There is room for all tokens of all devices, in case they take these experts: too much to keep.
        return keep_inputs(both)(x, gate, up, down, routes.share)
    gated, raised = (checkpoint_name(y, "linear") for y in keep_inputs(into)(x, gate, up))
    return keep_inputs(out)(gated, raised, down, routes.share)


def grouped_product(
    x: Float[Array, "m i"], weight: Float[Array, "e i o"], sizes: Int[Array, " e"]
) -> Float[Array, "m o"]:
    """Multiply groups of rows of these sizes by a matrix each, by a kernel on GPUs, for which XLA has none."""
    kernel = platform() in ("gpu", "cuda") and takes(*weight.shape[1:])
    return (grouped_matmul if kernel else jax.lax.ragged_dot)(x, weight, sizes)


@jax.custom_vjp
def permute(x: Float[Array, "n d"], order: Int[Array, " n"], inverse: Int[Array, " n"]) -> Float[Array, "n d"]:
    """Take rows in this order; the gradient takes them in the inverse one, where JAX's own would scatter them."""
    return x[order]


permute.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)),
    lambda orders, gradient: (gradient[orders[1]], None, None),
)
