"""Apply a stack of layers: one layer, or a scan whose layers may be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from mmjax.config import Remat
from mmjax.models.dropout import dropping
from mmjax.models.expert_routing import Routing
from mmjax.models.kv_cache import KVCacheView, LayerCache
from mmjax.models.layers import Context
from mmjax.models.remat import recomputed_layer
from mmjax.parallel.sharding import constrain

_ATTENTION = ("attention_output", "attention_logsumexp")
# What each policy saves beside a layer's input, by the names given with `checkpoint_name`; `none`
# saves everything. Scores, norms and activation functions, which are large or cheap, are recomputed
# by all policies.
SAVED: dict[Remat, tuple[str, ...]] = {
    "products": ("linear", *_ATTENTION),
    "attention_mlp": (*_ATTENTION, "mlp_input"),
    "attention": _ATTENTION,
    "offload": ("linear", *_ATTENTION),
    "full": (),
}

# by name of stored layers; those of several layers have a leading layer axis, and those that share
# another's keys have None
KVCache = dict[str, LayerCache | None]


class LayerInputs(NamedTuple):
    """Values that differ between the layers of a stack, scanned beside their parameters."""

    index: Array | None  # in the stack, where it has gradient accumulators
    number: Array | None  # index in the tower, for dropout
    windowed: Array | None  # 1 with a window, 0 without, where the stack has layers of both kinds
    cache: LayerCache | None
    token: Array | None  # of the context's `token_inputs`


@dataclass(frozen=True)
class LayerStack:
    """Layers `start` to `stop` (exclusive) of a tower, with one remat policy; their kinds repeat every `period`."""

    start: int
    stop: int
    remat: Remat = "none"
    period: int = 1

    @property
    def parts(self) -> dict[str, range]:
        """Return the layers that are stored together, of one kind each, by their key among the parameters."""
        ranges = [range(self.start + i, self.stop, self.period) for i in range(self.period)]
        return {layers_name(layers): layers for layers in ranges}


def layers_name(layers: range) -> str:
    """Name layers that are stored together: `3` for one layer, `3:7` for a stack, `3:32:4` for every fourth layer."""
    if len(layers) == 1:
        return str(layers.start)
    step = "" if layers.step == 1 else f":{layers.step}"
    return f"{layers.start}:{layers.stop}{step}"


def slice_of(layers: range) -> slice:
    """Return the slice that takes these layers of an array of all."""
    return slice(layers.start, layers.stop, layers.step)


def apply_stack(
    stored: Mapping[str, nnx.Module],
    run: LayerStack,
    x: Array,
    context: Context,
    windowed: tuple[int, ...],
    with_kv: bool,
    past: KVCacheView | None,
    accumulators: dict[str, Any],
) -> tuple[Array, KVCache, dict[str, Any], list[Routing]]:
    """Apply a stack, whose layers are `stored` by the names of its parts, to `x`; with what a cache keeps, if wanted.

    windowed: layers of the tower with a window. past: has the cache of the whole tower.
    accumulators: by name, of some parameters of a scanned stack; returned for `seed_accumulators`.
    Also returns the routing of experts.
    """
    # The graphs are static; of a stack every parameter has a leading axis of layers. A stack of
    # layers 0 to 8 whose kinds repeat every 3 has the parts 0:9:3, 1:9:3 and 2:9:3 of three layers
    # each, and one step of the scan applies one layer of every part.
    graphs = {}
    params = {}
    for name, module in stored.items():
        accumulated = nnx.traversals.flatten_mapping(accumulators.get(name, {}))
        graphs[name], *params[name] = nnx.split(
            module, lambda path, _, paths=accumulated: path in paths, ...
        )
    steps = len(run.parts[next(iter(stored))])
    scanned = steps > 1
    # Where all layers of each part are alike, their masks are chosen here; a scan over both kinds
    # takes one of two by index.
    kinds = {name: {i in windowed for i in layers} for name, layers in run.parts.items()}
    mixed = any(len(of_part) > 1 for of_part in kinds.values())
    context, token_inputs = context._replace(token_inputs=None), context.token_inputs
    contexts = {
        name: context.stacked() if mixed else context.of_layers(of_part.pop())
        for name, of_part in kinds.items()
    }

    def layer(
        graph: Any, params: list[Any], x: Array, context: Context, inputs: LayerInputs
    ) -> tuple[Array, LayerCache | None, Routing | None]:
        if inputs.number is not None:
            context = context._replace(dropout=context.dropout._replace(layer=inputs.number))
        if inputs.windowed is not None:
            context = context.of_layer(inputs.windowed)
        context = context._replace(token_inputs=inputs.token)
        # Merged inside, because a scan and `jax.checkpoint` pass only arrays.
        module = nnx.merge(graph, *params)
        with recomputed_layer(run.remat != "none"), dropping(context.dropout):
            x, layer_cache, routing = module(x, context, past and past._replace(cache=inputs.cache))
        return constrain(x, "rows", "sequence", "width"), layer_cache if with_kv else None, routing

    if run.remat != "none" and past is None:
        # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier
        # against that.
        layer = jax.checkpoint(
            layer, policy=_policy(run.remat), prevent_cse=not scanned, static_argnums=0
        )
    # Only dropout needs a layer's number; without it the program has none.
    inputs = {
        name: LayerInputs(
            index=jnp.arange(len(layers)) if name in accumulators else None,
            number=None if context.dropout is None else jnp.asarray(layers),
            windowed=jnp.asarray([i in windowed for i in layers], jnp.int32) if mixed else None,
            cache=past and past.cache.get(name),
            token=None if token_inputs is None else token_inputs[slice_of(layers)],
        )
        for name, layers in run.parts.items()
    }
    if not scanned:
        (name,) = stored
        first = lambda array: None if array is None else array[0]  # noqa: E731
        inputs_of_one = inputs[name]._replace(
            number=first(inputs[name].number), token=first(inputs[name].token)
        )
        x, layer_cache, routing = layer(
            graphs[name], params[name], x, contexts[name], inputs_of_one
        )
        routings = [] if routing is None else [jax.tree.map(lambda sums: sums[None], routing)]
        return x, {name: layer_cache} if with_kv else {}, {}, routings

    def body(
        carry: tuple[Array, dict[str, Any]], xs: dict[str, tuple[list[Any], LayerInputs]]
    ) -> tuple[tuple[Array, dict[str, Any]], tuple[KVCache, list[Routing]]]:
        x, accumulators = carry
        accumulators = dict(accumulators)
        cache = {}
        routings = []
        # in the order of the layers, which dicts that JAX has passed on do not have
        for name in stored:
            (trained, untrained), inputs = xs[name]
            if inputs.index is not None:
                trained, accumulators[name] = _accumulate(trained, accumulators[name], inputs.index)
            x, layer_cache, routing = layer(
                graphs[name], [trained, untrained], x, contexts[name], inputs
            )
            if with_kv:
                cache[name] = layer_cache
            if routing is not None:
                routings.append(routing)
        return (x, accumulators), (cache, routings)

    # The carry is the residual stream; parameters, numbers and caches are sliced along their
    # leading axis. What a cache keeps comes out stacked, and so does routing.
    xs = {name: (params[name], inputs[name]) for name in stored}
    (x, accumulators), (cache, routings) = jax.lax.scan(
        body,
        (x, accumulators),
        xs,
        length=steps,  # of layers that may have no parameters
    )
    return x, cache, accumulators, routings


@jax.custom_vjp
def seed_accumulators(x: Array, passed: Any, accumulators: Any) -> Array:
    """Return `x`, on which the loss depends; make the new accumulators the gradient with respect to the accumulators.

    passed: the accumulators behind the last layer. The parameters themselves get no gradient.
    """
    return x


seed_accumulators.defvjp(
    lambda x, passed, sums: (x, sums), lambda sums, gradient: (gradient, sums, None)
)


@jax.custom_vjp
def _accumulate(
    params: Any, accumulators: dict[str, Any], index: Array
) -> tuple[Any, dict[str, Any]]:
    """Return one layer's parameters, and the accumulators whose slice `index` gets their gradients in backward."""
    return params, accumulators


def _add_gradients(
    index: Array, cotangents: tuple[Any, dict[str, Any]]
) -> tuple[None, dict[str, Any], None]:
    # With one opaque index XLA reads, adds and writes a slice in one pass; without, it copies the
    # slice before.
    index = jax.lax.optimization_barrier(index)

    def add(total: Array, gradient: Array) -> Array:
        layer = jax.lax.dynamic_slice_in_dim(total, index, 1) + gradient
        return jax.lax.dynamic_update_slice_in_dim(total, layer.astype(total.dtype), index, 0)

    gradients, accumulators = cotangents
    return None, jax.tree.map(add, accumulators, nnx.to_pure_dict(gradients)), None


_accumulate.defvjp(
    lambda params, accumulators, index: ((params, accumulators), index), _add_gradients
)


def _policy(remat: Remat) -> Callable[..., Any]:
    """Return JAX's checkpoint policy of this name."""
    if remat == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=SAVED[remat],
            # All named values go to pinned host memory; nothing but the layer's input stays on the
            # device.
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*SAVED[remat])
