"""A tower's layers as runs: contiguous layers of one remat policy on one stage, stored stacked and scanned.

Scanning makes compile time independent of depth, and a run is the border at which a pipeline may cut. Parameters are
born in runs and never restacked or sliced inside jit, which would hold them twice. Outside jit, `layers_one_by_one` and
`into_runs` translate between runs and the numbered layers that checkpoints name, so another plan reads the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import Remat
from mmjax.models.attention import MaskSpec
from mmjax.models.layers import Context, KeysValues, Past
from mmjax.parallel.sharding import constrain

_ATTENTION = ("attention_output", "attention_logsumexp")
# What the policies between `none` (everything) and `full` (nothing) keep beside a layer's input, by the names that
# layers give their values. Scores, norms and activation functions, large or cheap, are computed again by all of them.
SAVED: dict[Remat, tuple[str, ...]] = {
    "products": ("linear", *_ATTENTION),
    "attention_mlp": (*_ATTENTION, "mlp_input"),
    "attention": _ATTENTION,
    "offload": ("linear", *_ATTENTION),
    "full": (),
}


Kept = dict[str, KeysValues]  # by run, of a stack with its layers in front
Of = tuple[Array | None, Array | None, KeysValues | None]  # a layer's number, whether it is near, what it keeps


@dataclass(frozen=True)
class Run:
    """Layers `start` to `stop` (exclusive) of a tower, with one remat policy."""

    start: int
    stop: int
    remat: Remat = "none"

    @property
    def name(self) -> str:
        """Its key among the parameters: `3` for one layer, `3:7` for a stack."""
        return str(self.start) if self.stop - self.start == 1 else f"{self.start}:{self.stop}"


def plan_runs(layers: int, remat: str | tuple[str, ...], cuts: tuple[int, ...] = ()) -> tuple[Run, ...]:
    """The fewest runs with one remat policy each and a border before every layer in `cuts`.

    Raises ValueError for a number of policies other than one or `layers`, an unknown policy, a cut outside 1..layers-1.
    """
    policies = (remat,) * layers if isinstance(remat, str) else remat
    if len(policies) != layers:
        raise ValueError(
            f"remat names {len(policies)} layers, the tower has {layers}; give one policy, or one per layer"
        )
    if unknown := set(policies) - set(get_args(Remat)):
        raise ValueError(f"unknown remat policy {min(unknown)!r}; known: {', '.join(get_args(Remat))}")
    if outside := [cut for cut in cuts if not 0 < cut < layers]:
        raise ValueError(
            f"a cut before layer {outside[0]} does not divide {layers} layers; cuts lie in 1..{layers - 1}"
        )
    borders = {0, layers, *cuts, *(i for i in range(1, layers) if policies[i] != policies[i - 1])}
    ordered = sorted(borders)
    return tuple(Run(a, b, policies[a]) for a, b in pairwise(ordered))


class LayerRuns(nnx.Module):
    """A tower's layers, in runs. `make` builds one layer: a module called as `layer(x, context)`.

    near: the layers whose mask is the context's `near`.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        plan: tuple[Run, ...],
        rngs: nnx.Rngs,
        near: tuple[int, ...] = (),
    ):
        key = rngs.params()
        self.plan, self.near = plan, near
        self.runs = nnx.Dict({run.name: _born(make, run, key) for run in plan})

    def __call__(
        self,
        x: Float[Array, "b t d"],
        context: Context,
        start: int = 0,
        stop: int | None = None,
        add: Sequence[Float[Array, "b t d"]] = (),
    ) -> Float[Array, "b t d"]:
        """Apply layers `start` to `stop` (default: all), and add the n-th of `add` to what layer n gives.

        Raises ValueError where `start` and `stop` are not borders of runs, or a layer with an addition is no run.
        """
        return self._through(x, context, start, stop, add)[0]

    def kept(
        self, x: Float[Array, "b t d"], context: Context, add: Sequence[Float[Array, "b t d"]] = ()
    ) -> tuple[Float[Array, "b t d"], Kept]:
        """As a call, with the keys and values of the tokens, by run: what tokens after them attend."""
        x, kept = self._through(x, context, add=add, keep=True)
        return x, jax.tree.map(_laid_out, kept)

    def after(
        self, x: Float[Array, "b t d"], context: Context, kept: Kept, mask: MaskSpec, at: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], Kept]:
        """As a call on tokens that come after others: `kept` has a column `[B, C]` for each token, `mask` says whose.

        The tokens stand in the columns from `at` on. Gives what was kept with them in it.
        """
        x, new = self._through(x, context, keep=True, past=(kept, mask, at))
        write = lambda run, tokens: jax.lax.dynamic_update_slice_in_dim(run, tokens, at, axis=-3)  # noqa: E731
        return x, jax.tree.map(_laid_out, jax.tree.map(write, kept, new))

    def _through(
        self,
        x: Array,
        context: Context,
        start: int = 0,
        stop: int | None = None,
        add: Sequence[Array] = (),
        keep: bool = False,
        past: tuple[Kept, MaskSpec, Array] | None = None,
    ) -> tuple[Array, Kept]:
        stop, kept = self.plan[-1].stop if stop is None else stop, {}
        if {start, stop} - {border for run in self.plan for border in (run.start, run.stop)}:
            raise ValueError(f"layers {start} to {stop} do not begin and end at borders of the runs {self.plan}")
        for run in self.plan:
            if start <= run.start < stop:
                near = tuple(i in self.near for i in range(run.start, run.stop))
                before = None if past is None else Past(past[0][run.name], *past[1:])
                x, new = _apply(self.runs[run.name], run, x, context, near, keep, before)
                kept |= {run.name: new} if keep else {}
                if run.start < len(add):
                    if run.stop - run.start > 1:
                        raise ValueError(f"something is added to layer {run.start}, which is no run of {self.plan}")
                    x = x + add[run.start]
        return x, kept

    def outputs(
        self, x: Float[Array, "b t d"], context: Context, layers: Sequence[int], start: int = 0, stop: int | None = None
    ) -> list[Float[Array, "b t d"]]:
        """As a call, but with the outputs of these layers, ascending, before that of the last. ValueError as there."""
        found = []
        for border in (*(layer + 1 for layer in layers), stop):
            x = self(x, context, start, border)
            found.append(x)
            start = border
        return found


def _born(make: Callable[[nnx.Rngs], nnx.Module], run: Run, key: Array) -> nnx.Module:
    """The run's layers, stacked if several. Layer i's key depends on i alone, so its values do not depend on runs."""

    def layer(i: int | Array) -> nnx.Module:
        return make(nnx.Rngs(params=jax.random.fold_in(key, i)))

    if run.stop - run.start == 1:
        return layer(run.start)
    graph = nnx.graphdef(nnx.eval_shape(lambda: layer(run.start)))
    stacked = jax.vmap(lambda i: nnx.state(layer(i)))(jnp.arange(run.start, run.stop))
    return nnx.merge(graph, stacked)


def _apply(
    layers: nnx.Module,
    run: Run,
    x: Array,
    context: Context,
    near: tuple[bool, ...],
    keep: bool = False,
    past: Past | None = None,
) -> tuple[Array, KeysValues | None]:
    """What a run makes of `x`, and with `keep` its keys and values; `past` has those of the whole run."""
    graph, params = nnx.split(layers)
    scanned = run.stop - run.start > 1
    # Only dropout asks for a layer's number; without it the program has none.
    numbers = None if context.dropout is None else jnp.arange(run.start, run.stop)
    mixed = len(set(near)) > 1
    if not mixed:
        context = context._replace(mask=context.near if near[0] else context.mask, near=None)

    def layer(params: Any, x: Array, context: Context, of: Of) -> tuple[Array, KeysValues | None]:
        number, is_near, kept = of
        if number is not None:
            context = context._replace(dropout=context.dropout._replace(layer=number))
        if is_near is not None:
            mask = jax.tree.map(partial(jnp.where, is_near), context.near, context.mask)
            context = context._replace(mask=mask, near=None)
        own = nnx.merge(graph, params)
        x, new = own.kept(x, context, past and past._replace(kept=kept)) if keep else (own(x, context), None)
        return constrain(x, "rows", "length", "width"), new

    if run.remat != "none" and not keep:
        # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier against that.
        layer = jax.checkpoint(layer, policy=_policy(run.remat), prevent_cse=not scanned)
    if not scanned:
        return layer(params, x, context, (None if numbers is None else numbers[0], None, past and past.kept))
    each = numbers, jnp.asarray(near) if mixed else None, past and past.kept
    return jax.lax.scan(lambda x, of: layer(of[0], x, context, of[1]), x, (params, each))


def _laid_out(kept: Float[Array, "*l b c m h"]) -> Float[Array, "*l b c m h"]:
    return constrain(kept, "rows", None, "kv_heads", None)


def _policy(remat: Remat) -> Callable[..., Any]:
    if remat == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=SAVED[remat],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*SAVED[remat])


def layers_one_by_one(params: Any, take: Callable[[Any, int], Any] = lambda leaf, i: leaf[i]) -> Any:
    """Nested dicts with every `{"runs": {"0:2": stacked, "2": single}}` as `{"0": ..., "1": ..., "2": ...}`.

    `take(leaf, i)` is layer i of a stacked leaf; give another to translate shapes or shardings. Dicts may lie inside
    tuples and lists (an optimizer's state); parameters may be missing (a frozen part).
    """
    if not isinstance(params, dict):
        return _inside(params, lambda x: layers_one_by_one(x, take))
    if set(params) != {"runs"}:
        return {key: layers_one_by_one(value, take) for key, value in params.items()}
    layers = {}
    for name, run in params["runs"].items():
        start, _, stop = name.partition(":")
        if not stop:
            layers[start] = run
        for i in range(int(start), int(stop or start)):
            layers[str(i)] = jax.tree.map(lambda leaf, n=i - int(start): take(leaf, n), run)
    return layers


def into_runs(
    params: Any,
    runs: Mapping[str, tuple[Run, ...]],
    stack: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """The inverse of `layers_one_by_one`: stacks the numbered layers of each tower in `runs` (by the tower's name).

    `stack(leaves)` joins the same leaf of a run's layers; give another to translate shapes or shardings.
    """
    stack = _stack if stack is None else stack
    if not isinstance(params, dict):
        return _inside(params, lambda x: into_runs(x, runs, stack))
    out = {}
    for key, value in params.items():
        if key in runs and isinstance(value, dict) and "layers" in value:
            value = {**value, "layers": {"runs": {r.name: _joined(value["layers"], r, stack) for r in runs[key]}}}
            out[key] = value
        else:
            out[key] = into_runs(value, runs, stack)
    return out


def _joined(layers: dict[str, Any], run: Run, stack: Callable[[list[Any]], Any]) -> Any:
    members = [layers[str(i)] for i in range(run.start, run.stop)]
    return members[0] if len(members) == 1 else jax.tree.map(lambda *leaves: stack(list(leaves)), *members)


def _stack(leaves: list[Any]) -> Any:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)


def _inside(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` on the members of a tuple, named tuple or list; anything else is a leaf and stays."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(function(x) for x in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(function(x) for x in tree)
    return tree
