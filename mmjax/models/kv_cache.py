"""Keep the keys, values and states of tokens, from which a layer generates the next."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mmjax.batch import MaskSpec
from mmjax.parallel.sharding import constrain


class KeyValue(NamedTuple):
    """Rotated keys, and values, of a layer's tokens `[B, C, M, H]`; of a stack, with a leading layer axis.

    C: columns, those still to be written included. M: key-value heads.
    """

    key: Array
    value: Array

    def grown(self, room: int) -> KeyValue:
        """Return them with room for more tokens, in columns behind."""
        return jax.tree.map(
            lambda kv: jnp.pad(kv, [(0, 0)] * (kv.ndim - 3) + [(0, room), (0, 0), (0, 0)]), self
        )

    def updated(self, new: KeyValue, column: Array) -> KeyValue:
        """Return them with new tokens written from a column on."""
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=-3)
        return jax.tree.map(write, self, new)

    def constrained(self) -> KeyValue:
        """Lay them out on the active mesh."""
        return jax.tree.map(lambda kv: constrain(kv, "rows", None, "kv_heads", None), self)


class RecurrentState(NamedTuple):
    """State of a gated delta net behind a row's tokens; of a stack, with a leading layer axis."""

    delta: Array  # float32 [B, M, K, V]
    # [B, taps - 1, N]: the last ones of the convolutions of queries, keys, values
    inputs: tuple[Array, Array, Array]

    def grown(self, room: int) -> RecurrentState:
        """Return it as it is: more tokens take no room."""
        return self

    def updated(self, new: RecurrentState, column: Array) -> RecurrentState:
        """Return the state after new tokens."""
        return new

    def constrained(self) -> RecurrentState:
        """Lay it out on the active mesh."""
        inputs = tuple(constrain(x, "rows", None, "heads") for x in self.inputs)
        return RecurrentState(constrain(self.delta, "rows", "heads", None, None), inputs)


class ConvolutionState(NamedTuple):
    """Last inputs of a gated convolution behind a row's tokens; of a stack, with a leading layer axis."""

    inputs: Array  # [B, taps - 1, D]

    def grown(self, room: int) -> ConvolutionState:
        """Return it as it is: more tokens take no room."""
        return self

    def updated(self, new: ConvolutionState, column: Array) -> ConvolutionState:
        """Return the inputs after new tokens."""
        return new

    def constrained(self) -> ConvolutionState:
        """Lay it out on the active mesh."""
        return ConvolutionState(constrain(self.inputs, "rows", None, "heads"))


LayerCache = KeyValue | RecurrentState | ConvolutionState


class KVCacheView(NamedTuple):
    """The KV cache that new tokens attend, columns to be written included, and where they go in it."""

    cache: Any  # LayerCache of one layer or stack; where a tower's layers begin, of all by stack
    mask: MaskSpec  # of every column, [B, C]
    column: Array  # int32 []: of the first new token
