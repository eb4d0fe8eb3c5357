"""A tower's layers as stacks ("runs"): contiguous layers of one remat policy on one stage, stored stacked and scanned.

Where layers of several kinds take turns, such as three with a delta net and one with attention, a
stack is one scan over the periods: the layers at each place of a period are stored stacked, under a
name with a step, such as `3:32:4`.

Scanning makes compile time independent of depth, and a pipeline may cut between stacks. Parameters
are initialised as stacks and never restacked or sliced inside jit, which would hold them twice.
Outside jit, `unstack_layers` and `stack_layers` convert between stacks and the numbered layers that
checkpoints name, so that a run with other stacks reads the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import Remat
from mmjax.models.expert_routing import Routing
from mmjax.models.kv_cache import KVCacheView, LayerCache
from mmjax.models.layers import Context
from mmjax.models.parameter_keys import ParameterKeys
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


Params = dict[str, Any]  # nested, by module and attribute; leaves are arrays
# by name of stored layers; those of several layers have a leading layer axis
KVCache = dict[str, LayerCache]


class LayerInputs(NamedTuple):
    """Values that differ between the layers of a stack, scanned beside their parameters."""

    index: Array | None  # in the stack, where it has gradient accumulators
    number: Array | None  # index in the tower, for dropout
    windowed: Array | None  # 1 with a window, 0 without, where the stack has layers of both kinds
    cache: LayerCache | None


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


def named_layers(name: str) -> range:
    """Return the layers that a name stands for: the inverse of `layers_name`."""
    numbers = [int(number) for number in name.split(":")]
    return range(*numbers) if len(numbers) > 1 else range(numbers[0], numbers[0] + 1)


def plan_stacks(
    layers: int,
    remat: str | tuple[str, ...],
    cuts: tuple[int, ...] = (),
    kinds: Sequence[Hashable] = (),
) -> tuple[LayerStack, ...]:
    """Divide layers into the fewest stacks with one remat policy each and a border before every layer in `cuts`.

    Policies (a, a, b, b) and the cut 1 give the stacks 0, 1 and 2:4. kinds: of every layer; by
    default all are alike. Between borders there is one scan over the periods of the kinds, and what
    is left of a period is divided by kind. Raises ValueError for a number of policies other than
    one or `layers`, an unknown policy, a cut outside 1..layers-1.
    """
    policies = (remat,) * layers if isinstance(remat, str) else remat
    if len(policies) != layers:
        raise ValueError(
            f"remat names {len(policies)} layers, the tower has {layers}; give one policy, or one per layer"
        )
    if unknown := set(policies) - set(get_args(Remat)):
        raise ValueError(
            f"unknown remat policy {min(unknown)!r}; known: {', '.join(get_args(Remat))}"
        )
    if outside := [cut for cut in cuts if not 0 < cut < layers]:
        raise ValueError(
            f"a cut before layer {outside[0]} does not divide {layers} layers; cuts lie in 1..{layers - 1}"
        )
    # A border lies before layer 0, behind the last, at every cut, and wherever the policy changes.
    borders = sorted(
        {0, layers, *cuts, *(i for i in range(1, layers) if policies[i] != policies[i - 1])}
    )
    stacks = []
    for start, stop in pairwise(borders):
        for kind_start, kind_stop, period in _periods(
            kinds[start:stop] or (None,) * (stop - start)
        ):
            stacks.append(
                LayerStack(start + kind_start, start + kind_stop, policies[start], period)
            )
    return tuple(stacks)


def _periods(kinds: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Divide layers of these kinds into stacks: (start, stop, period) each.

    Kinds a a b a a b a give (0, 6, 3) and (6, 7, 1).
    """
    length = len(kinds)
    # The shortest period that repeats at least once, if only a part of one is left at the end.
    repeats = (p for p in range(1, length // 2 + 1) if kinds[p:] == kinds[:-p])
    if period := next(repeats, 0):
        stop = length // period * period
        rest = _periods(kinds[stop:]) if stop < length else []
        return [(0, stop, period), *((stop + a, stop + b, p) for a, b, p in rest)]
    changes = [i for i in range(1, length) if kinds[i] != kinds[i - 1]]
    return [(a, b, 1) for a, b in pairwise([0, *changes, length])]


class LayerStacks(nnx.Module):
    """A tower's layers, in stacks. `make(i, rngs)` builds a layer like layer i, a `TransformerLayer`.

    windowed: indices of the layers that attend under the context's `window_mask`.
    """

    def __init__(
        self,
        make: Callable[[int, nnx.Rngs], nnx.Module],
        plan: tuple[LayerStack, ...],
        rngs: nnx.Rngs,
        windowed: tuple[int, ...] = (),
    ):
        key = rngs.params()
        self.plan = plan
        self.windowed = windowed
        # Gradient accumulators of scanned stacks by name, as `seed_accumulators` wants them; set by
        # `models.model`.
        self.accumulators: dict[str, Any] = nnx.data({})
        # Of the mixtures of experts of the layers that have run, with a leading layer axis.
        self.routings: list[Routing] = nnx.data([])
        self.runs = nnx.Dict(
            {
                name: _init_stack(make, layers, key)
                for run in plan
                for name, layers in run.parts.items()
            }
        )

    def __call__(
        self,
        x: Float[Array, "b t d"],
        context: Context,
        start: int = 0,
        stop: int | None = None,
        add: Sequence[Float[Array, "b t d"]] = (),
    ) -> Float[Array, "b t d"]:
        """Apply layers `start` to `stop` (default: all), adding `add[n]` to the output of layer `start + n`.

        Raises ValueError where `start` and `stop` are not borders of stacks, or `add` reaches into
        a stack of several.
        """
        return self._forward(x, context, start, stop, add)[0]

    def forward_with_kv(
        self,
        x: Float[Array, "b t d"],
        context: Context,
        add: Sequence[Float[Array, "b t d"]] = (),
        past: KVCacheView | None = None,
    ) -> tuple[Float[Array, "b t d"], KVCache]:
        """Apply all layers; return their keys and values too, written into the cache of `past` if given (decode)."""
        x, cache = self._forward(x, context, add=add, with_kv=True, past=past)
        if past is not None:
            cache = {
                name: past.cache[name].updated(new, past.column) for name, new in cache.items()
            }
        return x, {name: layer.constrained() for name, layer in cache.items()}

    def _forward(
        self,
        x: Array,
        context: Context,
        start: int = 0,
        stop: int | None = None,
        add: Sequence[Array] = (),
        with_kv: bool = False,
        past: KVCacheView | None = None,
    ) -> tuple[Array, KVCache]:
        stop = self.plan[-1].stop if stop is None else stop
        if {start, stop} - {border for run in self.plan for border in (run.start, run.stop)}:
            raise ValueError(
                f"layers {start} to {stop} do not begin and end at borders of the runs {self.plan}"
            )
        cache = {}
        for run in self.plan:
            if start <= run.start < stop:
                stored = {name: self.runs[name] for name in run.parts}
                sums = {
                    name: self.accumulators[name]
                    for name in run.parts
                    if self.accumulators.get(name)
                }
                x, layer_cache, sums, routings = apply_stack(
                    stored, run, x, context, self.windowed, with_kv, past, sums
                )
                self.accumulators.update(sums)
                self.routings.extend(routings)
                if with_kv:
                    cache |= layer_cache
                # `add` has an entry for each of the LLM's first layers; `Model.build` made each of
                # those a stack of its own.
                if run.start - start < len(add):
                    if run.stop - run.start > 1:
                        raise ValueError(
                            f"something is added to layer {run.start}, which is no run of {self.plan}"
                        )
                    x = x + add[run.start - start]
        return x, cache

    @property
    def routing(self) -> Routing | None:
        """Return the routing of all layers with experts that have run, one after the other."""
        return (
            jax.tree.map(lambda *parts: jnp.concatenate(parts), *self.routings)
            if self.routings
            else None
        )

    def outputs(
        self,
        x: Float[Array, "b t d"],
        context: Context,
        layers: Sequence[int],
        start: int = 0,
        stop: int | None = None,
    ) -> list[Float[Array, "b t d"]]:
        """Apply layers `start` to `stop`; return the outputs of `layers` (ascending), then that of the last layer.

        Raises ValueError where these are not the last layers of stacks.
        """
        outputs = []
        # A layer's output is there when the stack that it ends has run.
        for border in (*(layer + 1 for layer in layers), stop):
            x = self(x, context, start, border)
            outputs.append(x)
            start = border
        return outputs


def _init_stack(
    make: Callable[[int, nnx.Rngs], nnx.Module], layers: range, key: Array
) -> nnx.Module:
    """Initialise layers, stacked if several. Layer i's key depends on i alone, so stacks do not matter."""

    def layer(i: int | Array) -> nnx.Module:
        # The key of the tower, folded with the layer's index in it: under `vmap` i is a tracer, and
        # the values are the same.
        return make(layers.start, ParameterKeys(jax.random.fold_in(key, i)))

    if len(layers) == 1:
        return layer(layers.start)
    # vmap over the indices initialises the layers stacked; their common structure comes from any
    # one of them.
    graph = nnx.graphdef(nnx.eval_shape(lambda: layer(layers.start)))
    stacked = jax.vmap(lambda i: nnx.state(layer(i)))(jnp.asarray(layers))
    return nnx.merge(graph, stacked)


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
    # The graphs are static; of a stack every parameter has a leading axis of layers.
    graphs = {}
    params = {}
    for name, module in stored.items():
        accumulated = nnx.traversals.flatten_mapping(accumulators.get(name, {}))
        graphs[name], *params[name] = nnx.split(
            module, lambda path, _, paths=accumulated: path in paths, ...
        )
    scanned = len(run.parts[next(iter(stored))]) > 1
    # Where all layers of a stack are alike, the mask is chosen here; a scan over both kinds takes
    # one of two by index.
    kinds = {i in windowed for i in range(run.start, run.stop)}
    mixed = len(kinds) > 1
    context = context.stacked() if mixed else context.of_layers(kinds.pop())

    def layer(
        graph: Any, params: list[Any], x: Array, context: Context, inputs: LayerInputs
    ) -> tuple[Array, LayerCache | None, Routing | None]:
        if inputs.number is not None:
            context = context._replace(dropout=context.dropout._replace(layer=inputs.number))
        if inputs.windowed is not None:
            context = context.of_layer(inputs.windowed)
        # Merged inside, because a scan and `jax.checkpoint` pass only arrays.
        module = nnx.merge(graph, *params)
        with recomputed_layer(run.remat != "none"):
            x, layer_cache, routing = module(x, context, past and past._replace(cache=inputs.cache))
        return constrain(x, "rows", "sequence", "width"), layer_cache if with_kv else None, routing

    if run.remat != "none" and not with_kv:
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
            cache=past and past.cache[name],
        )
        for name, layers in run.parts.items()
    }
    if not scanned:
        (name,) = stored
        number = None if context.dropout is None else inputs[name].number[0]
        x, layer_cache, routing = layer(
            graphs[name], params[name], x, context, inputs[name]._replace(number=number)
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
            x, layer_cache, routing = layer(graphs[name], [trained, untrained], x, context, inputs)
            if with_kv:
                cache[name] = layer_cache
            if routing is not None:
                routings.append(routing)
        return (x, accumulators), (cache, routings)

    # The carry is the residual stream; parameters, numbers and caches are sliced along their
    # leading axis. What a cache keeps comes out stacked, and so does routing.
    xs = {name: (params[name], inputs[name]) for name in stored}
    (x, accumulators), (cache, routings) = jax.lax.scan(body, (x, accumulators), xs)
    return x, cache, accumulators, routings


# A scan's gradients would come out stacked, as a second tree beside that of the sums of the
# microbatches before. So the sums go through the scan, unchanged, and what its backward pass
# carries is the gradient with respect to them: it begins behind the last layer as the sums
# themselves, and every layer adds its parameters' gradients to its slice.


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


def key_names(path: Any) -> tuple[str, ...]:
    """Convert a JAX key path of nested dicts to strings."""
    return tuple(str(key.key) for key in path)


def split_layers(path: tuple[str, ...]) -> tuple[tuple[str, ...], range]:
    """Split the layers off the path of a parameter: `llm.layers.runs.3:7.up` is `llm.layers.up` of layers 3 to 6.

    A stack of more than one layer has a leading axis of layers. Outside of stacks the layers are
    `range(1)`.
    """
    if "runs" not in path:
        return path, range(1)
    position = path.index("runs")
    return (*path[:position], *path[position + 2 :]), named_layers(path[position + 1])


def split_scanned(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split nested dicts into the parameters of scanned stacks and the others, each without the other's branches."""
    parts: tuple[dict[tuple[str, ...], Any], ...] = ({}, {})
    for path, leaf in nnx.traversals.flatten_mapping(params).items():
        scanned = any(key == "runs" and ":" in name for key, name in pairwise(path))
        parts[0 if scanned else 1][path] = leaf
    return tuple(map(nnx.traversals.unflatten_mapping, parts))


def unstack_layers(params: Any, take: Callable[[Any, int], Any] = lambda leaf, i: leaf[i]) -> Any:
    """Unstack nested dicts: every `{"runs": {"0:2": stacked, "2": single}}` becomes `{"0": ..., "1": ..., "2": ...}`.

    `take(leaf, i)` is layer i of a stacked leaf; give another to translate shapes or shardings.
    Dicts may lie inside tuples and lists (an optimizer's state); parameters may be missing (a
    frozen part).
    """
    if not isinstance(params, dict):
        return _map_members(params, lambda x: unstack_layers(x, take))
    if set(params) != {"runs"}:
        return {key: unstack_layers(value, take) for key, value in params.items()}
    layers = {}
    for name, run in params["runs"].items():
        numbers = named_layers(name)
        if len(numbers) == 1:
            layers[name] = run
            continue
        for n, i in enumerate(numbers):
            # The default argument binds n now: a closure would see the loop's last one.
            layers[str(i)] = jax.tree.map(lambda leaf, n=n: take(leaf, n), run)
    return layers


def _stack(leaves: list[Any]) -> Any:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)


def stack_layers(
    params: Any,
    runs: Mapping[str, tuple[LayerStack, ...]],
    stack: Callable[[list[Any]], Any] = _stack,
) -> Any:
    """Stack the numbered layers of each tower in `runs` (by the tower's name): the inverse of `unstack_layers`.

    `stack(leaves)` joins the same leaf of a stack's layers; give another to translate shapes or
    shardings.
    """
    if not isinstance(params, dict):
        return _map_members(params, lambda x: stack_layers(x, runs, stack))

    def join(layers: dict[str, Any], numbers: range) -> Any:
        members = [layers[str(i)] for i in numbers]
        return (
            members[0]
            if len(members) == 1
            else jax.tree.map(lambda *leaves: stack(list(leaves)), *members)
        )

    out = {}
    for key, value in params.items():
        if key in runs and isinstance(value, dict) and "layers" in value:
            # A pipeline stage has some of the stacks.
            parts = {name: layers for run in runs[key] for name, layers in run.parts.items()}
            stacks = {
                name: layers
                for name, layers in parts.items()
                if str(layers.start) in value["layers"]
            }
            joined = {name: join(value["layers"], layers) for name, layers in stacks.items()}
            out[key] = value | {"layers": {"runs": joined}}
        else:
            out[key] = stack_layers(value, runs, stack)
    return out


def _map_members(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the members of a tuple, named tuple or list; return anything else, a leaf, as it is."""
    # Named tuples take their members one by one, other tuples an iterable.
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(function(x) for x in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(function(x) for x in tree)
    return tree
