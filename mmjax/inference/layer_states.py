"""Take what a model computes at every place, and compare what two computations of the same samples have there."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import PADDING, ItemBatch, Microbatch, TextBatch
from mmjax.data.plan.length_index import LengthIndex
from mmjax.losses.cross_entropy import losses_in_chunks
from mmjax.models.layer_stacks import Params, key_names
from mmjax.models.layers import Context
from mmjax.models.model import Model
from mmjax.parallel.sharding import encoding
from mmjax.runtime.stage_program import Sums

# kinds of places that are no layers
INPUTS, LOSSES, GRADIENTS = "inputs", "token losses", "gradients"

# of a text, whatever its neighbours are
FIELDS = ("token", "target", "weight", "position", "kind", "sees")


class Place(NamedTuple):
    """A place in the computation, in its order; one check is of all places of a kind."""

    number: int
    name: str
    kind: str


class State(NamedTuple):
    """Values at all positions of a place, with the sample of each (-1: none), and its index among the sample's."""

    owner: Any  # int32 [R, L]
    offset: Any  # int32 [R, L]
    value: Any  # [R, L, *]

    def by_sample(self) -> dict[int, np.ndarray]:
        """Return the values of every sample in its own order, `[n, *]`."""
        owner = np.ravel(self.owner)
        order = np.lexsort((np.ravel(self.offset), owner))
        order = order[owner[order] != PADDING]
        samples, first = np.unique(owner[order], return_index=True)
        values = np.reshape(self.value, (len(owner), -1))
        return {
            int(k): values[rows]
            for k, rows in zip(samples, np.split(order, first[1:]), strict=False)
        }


States = dict[Place, State]

# the largest relative difference at a place, and the sample that has it
Differences = dict[Place, tuple[float, str]]


def input_states(batch: Microbatch) -> States:
    """Return what the towers read."""
    fields = [("llm", batch.text, name) for name in FIELDS]
    fields += [
        (encoder, items, name)
        for encoder, items in batch.items.items()
        for name in ("values", "coordinates")
    ]
    return {
        Place(number - len(fields), f"{tower} {name}", INPUTS): State(
            rows.owner, rows.offset, getattr(rows, name)
        )
        for number, (tower, rows, name) in enumerate(fields)
    }


def layer_states(model: Model, params: Params, batch: Microbatch, loss_chunks: int) -> States:
    """Compute the output of every layer and the loss of every token; the model's stacks are single layers."""
    module = model.module(params)
    states: States = {}

    def record(
        name: str, kind: str, tower: Any, rows: TextBatch | ItemBatch, context: Context, value: Any
    ) -> None:
        owner, offset = tower.origin(rows)
        owner = jnp.where(context.mask.sample >= 0, owner, PADDING)
        group = owner.shape[1] // value.shape[1]  # positions that a connector merges
        states[Place(len(states), name, kind)] = State(owner[:, ::group], offset[:, ::group], value)

    def layers(
        name: str, tower: Any, rows: Any, context: Context, x: Any, add: Sequence[Any] = ()
    ) -> Iterator[Any]:
        if context.rotation is not None:
            angles = jnp.concatenate(context.rotation[:2], axis=-1)
            record(f"{name} rotary positions", f"{name} positions", tower, rows, context, angles)
        record(f"{name} embedding", f"{name} embedding", tower, rows, context, x)
        for i in range(tower.config.layers):
            x = tower.layers(x, context, i, i + 1, add[i : i + 1])
            kind = "windowed" if i in getattr(tower.config, "windowed", ()) else "full"
            if name == "llm" and tower.config.delta_layers[i]:
                kind = "delta net"
            if name == "llm" and tower.config.convolution_layers[i]:
                kind = "convolution"
            record(f"{name} layer {i} ({kind})", f"{name} layers, {kind}", tower, rows, context, x)
            yield x

    features = {}
    for name, encoder in module.encoders.items():
        items, connector = batch.items[name], module.connectors[name]
        with encoding():
            context = module.context(name, items, None)
            outputs = list(layers(name, encoder, items, context, encoder.embedded(items)))
            deepstack = enumerate(connector.deepstack)
            deeper = {n: encoder.restored(outputs[i], items) for n, i in deepstack}
            finished = module.finished(name, dict(enumerate(outputs)), items)
            features[name] = module.connected(name, finished, deeper, items)
        tokens = features[name][:, : features[name].shape[1] - (connector.newline is not None)]
        record(f"{name} connector", f"{name} connector", encoder, items, context, tokens)
    x, add = module.embedded(batch.text, features)
    context = module.text_context(x, batch.text)
    *_, x = layers("llm", module.llm, batch.text, context, x, add)
    hidden, output_table = module.llm.hidden_and_table(x)
    record("llm final norm", "llm final norm", module.llm, batch.text, context, hidden)
    losses = losses_in_chunks(
        hidden, output_table, batch.text, loss_chunks, model.config.llm.logit_cap
    )
    record(LOSSES, LOSSES, module.llm, batch.text, context, losses)
    for name, errors in module.generator_errors(hidden, batch.text, batch.items, None).items():
        items = batch.items[name]
        owner = jnp.where(items.item >= 0, items.owner, PADDING)
        states[Place(len(states), f"{name} errors", f"{name} errors")] = State(
            owner, items.offset, errors
        )
    return states


def relative_difference(actual: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """Return the largest difference over the largest expected value, or over `floor` if that is larger; Inf for NaN."""
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = (x.astype(np.float64) for x in (actual, expected))
    difference = float(np.abs(actual - expected).max(initial=0.0))
    scale = max(float(np.abs(expected).max(initial=0.0)), floor) or 1.0
    return math.inf if math.isnan(difference) else difference / scale


def compare_states(
    actual: Sequence[States], expected: Sequence[States], index: LengthIndex
) -> Differences:
    """Compare the values of every sample in some microbatches with those that it has in others."""
    differences = {}
    for place in actual[0]:
        ours, theirs = (
            {k: x for s in states for k, x in s[place].by_sample().items()}
            for states in (actual, expected)
        )
        # one nat: smaller losses are small differences of large logits
        floor = float(place.kind == LOSSES)
        missing = np.empty((0, 0))
        by_sample = [
            (relative_difference(ours.get(k, missing), theirs.get(k, missing), floor), k)
            for k in ours | theirs
        ]
        relative, sample = max(by_sample, default=(0.0, 0))
        differences[place] = relative, index.name(sample)
    return differences


def compare_gradients(actual: Sums, expected: Sums) -> Differences:
    """Compare every leaf of the gradients, of whole lists of microbatches."""
    leaves = jax.tree.leaves_with_path(expected.gradients)
    # Some are 0 but for the rounding of what cancels in them, as those of key biases.
    floor = 1e-3 * max((float(np.abs(leaf).max(initial=0.0)) for _, leaf in leaves), default=0.0)
    pairs = zip(leaves, jax.tree.leaves(actual.gradients), strict=True)
    return {
        Place(sys.maxsize, ".".join(key_names(path)), GRADIENTS): (
            relative_difference(one_device, leaf, floor),
            "",
        )
        for (path, leaf), one_device in pairs
    }
