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
from itertools import pairwise
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import Remat
from mmjax.models.expert_routing import Routing
from mmjax.models.kv_cache import KeyValue, KVCacheView
from mmjax.models.layers import Context
from mmjax.models.parameter_keys import ParameterKeys
from mmjax.models.stack_scan import KVCache, LayerStack, apply_stack

Params = dict[str, Any]  # nested, by module and attribute; leaves are arrays


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

    windowed: indices of the layers that attend under the context's `window_mask`. merge_after:
    layers whose last one merges positions; 0: none does. key_sources: those, each a stack of its
    own, whose keys and values layers behind them share.
    """

    def __init__(
        self,
        make: Callable[[int, nnx.Rngs], nnx.Module],
        plan: tuple[LayerStack, ...],
        rngs: nnx.Rngs,
        windowed: tuple[int, ...] = (),
        merge_after: int = 0,
        key_sources: tuple[int, ...] = (),
    ):
        key = rngs.params()
        self.plan = plan
        self.windowed = windowed
        self.merge_after = merge_after
        self.key_sources = key_sources
        # keys and values of those that have run, by field of the context
        self.shared: dict[str, KeyValue] = nnx.data({})
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
    ) -> Float[Array, "b s e"]:
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
                merged = 0 < self.merge_after <= run.start
                of_run = context.behind_merger() if merged else context._replace(merged=None)
                is_source = run.start in self.key_sources
                x, layer_cache, sums, routings = apply_stack(
                    stored,
                    run,
                    x,
                    of_run._replace(**self.shared),
                    self.windowed,
                    with_kv or is_source,
                    past,
                    sums,
                )
                if is_source:
                    self._share(run, layer_cache, past)
                self.accumulators.update(sums)
                self.routings.extend(routings)
                if with_kv:
                    # layers that share keys have nothing to keep
                    cache |= {name: kept for name, kept in layer_cache.items() if kept is not None}
                # `add` has an entry for each of the LLM's first layers; `Model.build` made each of
                # those a stack of its own.
                if run.start - start < len(add):
                    if run.stop - run.start > 1:
                        raise ValueError(
                            f"something is added to layer {run.start}, which is no run of {self.plan}"
                        )
                    x = x + add[run.start - start]
        return x, cache

    def _share(self, run: LayerStack, cache: KVCache, past: KVCacheView | None) -> None:
        """Keep the keys and values of a layer for those that share them, the ones before new tokens among them."""
        ((name, new),) = cache.items()
        whole = new if past is None else past.cache[name].updated(new, past.column)
        self.shared["window_shared" if run.start in self.windowed else "shared"] = whole

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
    ) -> list[Float[Array, "b s _"]]:
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


# A scan's gradients would come out stacked, as a second tree beside that of the sums of the
# microbatches before. So the sums go through the scan, unchanged, and what its backward pass
# carries is the gradient with respect to them: it begins behind the last layer as the sums
# themselves, and every layer adds its parameters' gradients to its slice.


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

    # {"llm": {"layers": {"0": a, "1": b, "2": c}}} with the stacks 0:2 and 2 becomes
    # {"llm": {"layers": {"runs": {"0:2": [a, b], "2": c}}}}.
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
