"""A mixture of experts in place of a layer's MLP: no capacity, so that every token reaches all of its experts.

Copies of the tokens, one for each expert of a token, are sorted by expert, multiplied in groups of
any size, and put back where they came from. Positions that are no token of a sample reach no
expert, and what an expert computes of a token is a matter of that token alone, so packing changes
nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from mmjax.config import Activation, ExpertsConfig
from mmjax.kernels.grouped_matmul import grouped_matmul, takes
from mmjax.models.expert_routing import RouterArrays, Routes, Routing, route
from mmjax.models.layers import ACTIVATIONS, MLP
from mmjax.models.linear import Linear
from mmjax.models.matmul import looped_matmul
from mmjax.models.remat import keep_inputs
from mmjax.parallel.expert_exchange import (
    BIAS_INTO,
    BIAS_OUT,
    INTO,
    OUT,
    ExpertLayout,
    Sends,
    sum_parts,
    sum_rows,
)
from mmjax.parallel.sharding import TENSOR, Axes, platform


class ExpertMatrices(nnx.Module):
    """One matrix for each expert, initialised normal with variance 1 / fan-in, and perhaps a bias of zeros."""

    def __init__(
        self, count: int, inputs: int, outputs: int, axes: Axes, rngs: nnx.Rngs, *, biased: bool
    ):
        weight = (
            jax.random.normal(rngs.params(), (count, inputs, outputs), jnp.float32) * inputs**-0.5
        )
        self.weight = nnx.Param(weight, axes=axes)
        # Those of outputs are whole on every device, as sums are.
        bias_axes = BIAS_INTO if axes == INTO else BIAS_OUT
        self.bias = nnx.Param(jnp.zeros((count, outputs)), axes=bias_axes) if biased else None


class Router(nnx.Module):
    """One vector for each expert, whose product with a token is the expert's logit, and perhaps a correction of it."""

    def __init__(self, inputs: int, config: ExpertsConfig, rngs: nnx.Rngs):
        count = config.count

        def vector(width: int, *, made: bool, value: float = 0.0) -> nnx.Param | None:
            return nnx.Param(jnp.full(width, value), axes=(None,)) if made else None

        weight = jax.random.normal(rngs.params(), (inputs, count), jnp.float32) * inputs**-0.5
        self.weight = nnx.Param(weight, axes=("embed", None))
        # Experts are chosen by it, and that has no gradient.
        self.correction = vector(count, made=config.correction)
        self.bias = vector(count, made=config.biases)
        # of what it reads, what experts read, and the weights of each expert
        scaled = config.beside_mlp
        self.input_scale = vector(inputs, made=scaled, value=1.0)
        self.expert_input_scale = vector(inputs, made=scaled, value=1.0)
        self.share_scale = vector(count, made=scaled, value=1.0)

    def arrays(self) -> RouterArrays:
        """Return the vectors, the correction, the bias and the scales."""
        parameters = (getattr(self, name) for name in RouterArrays._fields)
        return RouterArrays(*(None if x is None else x[...] for x in parameters))


class Experts(nnx.Module):
    """A router, gated MLPs of which each token takes a few, and perhaps one that every token takes."""

    def __init__(self, config: ExpertsConfig, width: int, activation: Activation, rngs: nnx.Rngs):
        c = config
        self.router = Router(width, c, rngs)
        self.gate = ExpertMatrices(c.count, width, c.width, INTO, rngs, biased=c.biases)
        self.up = ExpertMatrices(c.count, width, c.width, INTO, rngs, biased=c.biases)
        self.down = ExpertMatrices(c.count, c.width, width, OUT, rngs, biased=c.biases)
        hidden = c.shared_width
        self.shared = MLP(width, hidden, width, activation, rngs, gated=True) if hidden else None
        gated = hidden and c.shared_gate
        self.shared_gate = Linear(width, 1, ("embed", None), rngs) if gated else None
        self.config = config
        self.activation: Activation = activation

    def __call__(
        self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """Apply the experts to tokens; return the sums of their routing as well. valid: which positions are tokens."""
        c = self.config
        layout = ExpertLayout.of(x.shape, self.gate.weight.shape)

        def on_device(
            x: Array, valid: Array, router: RouterArrays, *weights: Any
        ) -> tuple[Array, Routing]:
            tokens = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
            routes, routing = route(tokens, router, valid.reshape(len(tokens)), c)
            if router.expert_input_scale is not None:
                tokens = tokens * router.expert_input_scale.astype(tokens.dtype)
            # Sums over the tokens of all devices; turns are a number that all have in common.
            routing = layout.add_up(routing)._replace(turns=routing.turns)
            mlp = ExpertMLP(c, self.activation, layout.cuts)
            if layout.devices == 1:
                out = apply_experts(tokens, routes, *weights, layout, mlp)
            else:
                out, turns = apply_shared_experts(tokens, routes, *weights, layout, mlp)
                routing = routing._replace(turns=turns)
            return out.reshape(x.shape), routing

        parts = (self.gate, self.up, self.down)
        matrices = [part.weight[...] for part in parts]
        biases = tuple(part.bias[...] for part in parts if part.bias is not None)
        out, routing = layout.run(on_device, x, valid, self.router.arrays(), *matrices, biases)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (
                shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared
            )
        return out, routing


Biases = tuple[Array, ...]  # of gate, up and down, a vector for each expert; or none


class ExpertMLP(NamedTuple):
    """The hidden layers of experts, made of the outputs of their gate and up matrices."""

    config: ExpertsConfig
    activation: Activation
    cuts: int  # devices that have parts of a hidden layer

    def hidden(
        self, gated: Float[Array, "c f"], raised: Float[Array, "c f"], share: Float[Array, "c 1"]
    ) -> Float[Array, "c f"]:
        """Compute the hidden layer of copies of tokens in float32, in proportion to their shares."""
        c = self.config
        gated, raised = gated.astype(jnp.float32), raised.astype(jnp.float32)
        if c.weighted == "inputs":  # whose products are in proportion to them
            gated, raised, share = gated * share, raised * share, jnp.ones_like(share)
        if c.limit:
            gated = jnp.minimum(gated, c.limit)
            raised = jnp.clip(raised, -c.limit, c.limit) + 1
        return ACTIVATIONS[self.activation](gated * c.slope) / c.slope * raised * share


class Copies(NamedTuple):
    """Copies of tokens, one for each of their experts on the device, sorted by expert; all of them or a slice."""

    index: Int[Array, " c"]  # token * k + which of the token's experts; m * k: none
    place: Int[Array, "m k"]  # where each copy lies; c: not here
    sizes: Int[Array, " e"]  # of the experts

    @classmethod
    def of(cls, expert: Int[Array, "m k"], first: Int[Array, ""] | int, count: int) -> Copies:
        """Sort the copies for `count` experts from `first` on."""
        local = expert.reshape(expert.size) - first
        # With 3 experts here, from expert 5 on, and 3 tokens of 2 experts each:
        #   expert    5 6 | 0 7 | 5 1
        #   group     0 1 | 3 2 | 0 3     as seen from expert 5; 3, last in order, is elsewhere
        #   order     0 4 1 3 2 5         the copies sorted by expert; of these 4 are here
        #   index     0 4 1 3 6 6         their numbers; 6 stands for none
        #   place     0 2 | 6 3 | 1 6     where each copy has come to lie
        #   sizes     2 1 1
        group = jnp.where((local >= 0) & (local < count), local, count)
        order = jnp.argsort(group, stable=True)
        inverse = jnp.argsort(order)
        sizes = (group[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
        index, place = (
            jnp.where(rank < sizes.sum(), x, len(x))
            for x, rank in ((order, jnp.arange(len(order))), (inverse, inverse))
        )
        return cls(index, place.reshape(expert.shape), sizes)

    def slice(self, start: Int[Array, ""], size: int) -> Copies:
        """Return `size` copies from `start` on."""
        none = len(self.index)
        index = lax.dynamic_slice_in_dim(
            jnp.pad(self.index, (0, size), constant_values=none), start, size
        )
        place = self.place - start
        # Groups of 2 1 1 copies end at 2 3 4; of the two copies from 1 on at 1 2 2: sizes 1 1 0.
        ends = jnp.clip(jnp.cumsum(self.sizes) - start, 0, size)
        sizes = jnp.diff(ends, prepend=0)
        return Copies(index, jnp.where((place >= 0) & (place < size), place, size), sizes)

    def take(self, x: Float[Array, "m d"]) -> Float[Array, "c d"]:
        """Take the token of each copy."""
        per_token = self.place.shape[1]
        return sum_rows(x, (self.index // per_token)[:, None], self.place)

    def of_experts(self, vectors: Float[Array, "e f"], dtype: jnp.dtype) -> Float[Array, "c f"]:
        """Give each copy its expert's vector; 0 behind the last group."""
        ends = jnp.cumsum(self.sizes)
        copy = jnp.arange(len(self.index))[:, None]
        one = ((copy < ends) & (copy >= ends - self.sizes)).astype(dtype)
        # Its gradient sums in a fixed order, which that of indexing does not.
        with jax.named_scope("needs=0"):
            return jnp.matmul(one, vectors.astype(dtype), precision=lax.Precision.HIGHEST)

    def into(self, x: Array, gate: Array, up: Array, biases: Biases) -> list[Array]:
        """Multiply the copies of tokens `[m, d]` by their experts' matrices into the hidden layer."""
        copies = self.take(x)
        products = [grouped_product(copies, weight, self.sizes) for weight in (gate, up)]
        if not biases:
            return products
        return [
            y + self.of_experts(bias, y.dtype) for y, bias in zip(products, biases[:2], strict=True)
        ]

    def out(
        self,
        gated: Array,
        raised: Array,
        down: Array,
        share: Array,
        biases: Biases,
        mlp: ExpertMLP,
    ) -> Float[Array, "m d"]:
        """Apply the down projections to the copies, and sum each token's outputs weighted by `share` `[m, k]`."""
        # A hidden layer times its share instead of what comes out of it: a sum over copies is then
        # a plain one.
        share = sum_rows(
            share.reshape(share.size), self.index[:, None], self.place.reshape(share.size, 1)
        )
        hidden = mlp.hidden(gated, raised, share[:, None])
        # Behind the last group a product may hold anything, and so may its gradient.
        grouped = (jnp.arange(len(hidden)) < self.sizes.sum())[:, None]
        hidden = jnp.where(grouped, hidden, 0).astype(gated.dtype)
        y = grouped_product(hidden, down, self.sizes)
        if biases:
            # Each of the devices whose outputs are added up adds an equal part.
            bias = self.of_experts(biases[2] / mlp.cuts, y.dtype)
            y = y + (bias * share[:, None]).astype(y.dtype)
        return sum_rows(y, self.place, (self.index // self.place.shape[1])[:, None])


def apply_experts(
    x: Float[Array, "n d"],
    routes: Routes,
    gate: Float[Array, "e _ f"],
    up: Float[Array, "e _ f"],
    down: Float[Array, "e f _"],
    biases: Biases,
    layout: ExpertLayout,
    mlp: ExpertMLP,
) -> Float[Array, "n d"]:
    """Sum the outputs of each token's experts by their weights, in the tokens' precision; every device has all experts.

    The matrices are the device's shards of each expert.
    """
    expert, share = layout.gather(tuple(routes), layout.parts)
    copies = Copies.of(expert, 0, len(gate))

    # Tokens and matrices are gathered inside, so that backward gathers them again instead of
    # keeping them.
    def into(x: Array, gate: Array, up: Array, biases: Biases) -> list[Array]:
        weights = (layout.gather_shards(weight.astype(x.dtype), 1) for weight in (gate, up))
        return copies.into(layout.gather(x, layout.parts), *weights, biases)

    def out(gated: Array, raised: Array, down: Array, share: Array, biases: Biases) -> Array:
        down = layout.gather_shards(down.astype(x.dtype), 2)
        return layout.scatter(copies.out(gated, raised, down, share, biases, mlp), layout.parts)

    gated, raised = (checkpoint_name(y, "linear") for y in keep_inputs(into)(x, gate, up, biases))
    return keep_inputs(out)(gated, raised, down, share, biases)


def apply_shared_experts(
    x: Float[Array, "n d"],
    routes: Routes,
    gate: Float[Array, "e _ f"],
    up: Float[Array, "e _ f"],
    down: Float[Array, "e f _"],
    biases: Biases,
    layout: ExpertLayout,
    mlp: ExpertMLP,
) -> tuple[Float[Array, "n d"], Float[Array, ""]]:
    """Apply experts of which each device has some; return the turns as well in which tokens went to their devices."""
    config = mlp.config
    devices = layout.devices
    count = len(gate)
    size = config.sent_at_once(len(x), devices) if layout.sends else len(x)
    sends = Sends.of(routes.expert, config.count, size, layout) if size < len(x) else None
    computed = config.computed_at_once(len(x) * layout.sharing, devices)
    tensor = tuple(axis for axis in layout.parts if axis == TENSOR)

    def local_experts(expert: Array, tokens: Array, share: Array, *weights: Any) -> Array:
        """Sum the outputs of the device's experts for tokens, some copies at a time."""
        copies = Copies.of(expert, layout.first(count), count)

        def slice_of_copies(
            number: Array,
            copies: Copies,
            tokens: Array,
            share: Array,
            gate: Array,
            up: Array,
            down: Array,
            biases: Biases,
        ) -> Array:
            copies = copies.slice(number * computed, computed)
            hidden = copies.into(tokens, gate, up, biases)
            return copies.out(*hidden, down, share, biases, mlp)

        parts = -(-copies.sizes.sum() // computed)
        return sum_parts(slice_of_copies, parts, copies, tokens, share, *weights).astype(x.dtype)

    # In a turn each device sends every other one at most `size` of its tokens, gets as many of
    # each, applies its experts to them, and returns the sums, which are added at the tokens'
    # places.
    def turn(
        number: Array, tables: tuple[Array, Sends], x: Array, share: Array, *weights: Any
    ) -> Array:
        expert = tables[0]
        sends = tables[1].turn(number, size)
        token = sends.token.reshape(devices * size, 1)
        arrays = (
            expert.at[token[:, 0]].get(mode="fill", fill_value=config.count),
            sum_rows(x, token, sends.place),
            sum_rows(share, token, sends.place),
        )
        sums = local_experts(*layout.gather(jax.tree.map(layout.send, arrays), tensor), *weights)
        return sum_rows(layout.send(layout.scatter(sums, tensor)), sends.place, token)

    # Backward does everything again: to keep are tokens of all devices, and gathered matrices.
    def exchange(
        x: Array, share: Array, gate: Array, up: Array, down: Array, biases: Biases
    ) -> Array:
        weights: list[Any] = [
            layout.gather_shards(weight.astype(x.dtype), axis)
            for weight, axis in ((gate, 1), (up, 1), (down, 2))
        ]
        weights.append(biases)
        if sends is None:
            arrays = layout.gather((routes.expert, x, share), layout.parts)
            return layout.scatter(local_experts(*arrays, *weights), layout.parts)
        return sum_parts(turn, sends.turns, (routes.expert, sends), x, share, *weights).astype(
            x.dtype
        )

    turns = jnp.ones(()) if sends is None else sends.turns.astype(jnp.float32)
    return keep_inputs(exchange)(x, routes.share, gate, up, down, biases), turns


def grouped_product(
    x: Float[Array, "m i"], weight: Float[Array, "e i o"], sizes: Int[Array, " e"]
) -> Float[Array, "m o"]:
    """Multiply groups of rows of these sizes by a matrix each: by a kernel on GPUs, in a loop on CPUs.

    XLA for either would multiply all rows with every matrix.
    """
    if platform() == "cpu":
        return looped_matmul(x, weight, sizes)
    kernel = platform() in ("gpu", "cuda") and takes(*weight.shape[1:])
    return (grouped_matmul if kernel else jax.lax.ragged_dot)(x, weight, sizes)
