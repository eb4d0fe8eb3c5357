"""Relative positions of patches in attention scores (MViTv2, Li et al. 2022, section 4.1), and the windows of SAM.

A query's score with a key has two terms beside their product: its products with a learned vector for the distance of
their rows, and with one for that of their columns. Both depend on the query and on the key's row or column alone, so
they are channels: of 3 x 3 patches the query is [q, r0 r1 r2, c0 c1 c2], and the key in row 1 and column 2
[k, 0 1 0, 0 0 1]. Any kernel of attention computes that.

A window that an image's edge cuts is filled with patches of zeros, which are attended: their keys and values are the
biases of the matrices that make them. There are none of them in a row. All of a window are one score of a query here,
which is subtracted from its others, so that it is that of an attention sink, 0; the share that the sink takes is the
value's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.models.remat import keep_inputs
from mmjax.models.rope import max_in_item


class Places(NamedTuple):
    """Places of patches in their image, or in their window. All int32 [R, L, 2]: of rows, and of columns."""

    place: Array
    sides: Array  # of the image, or of that part of the window that the image fills

    @classmethod
    def of(cls, patch: Int[Array, "r l 2"], item: Int[Array, "r l"], window: int = 0) -> Places:
        """Find the places of patches (row, column) in their items; window: in windows of such sides."""
        sides = 1 + max_in_item(patch, item)
        if not window:
            return cls(patch, sides)
        return cls(patch % window, jnp.minimum(sides - patch // window * window, window))


class RelativePositions(nnx.Module):
    """The learned vectors of a layer, for the distances of rows and of columns.

    side: of the square that they were learned for, of which others' distances are interpolated. longest: patches of a
    side at most. filled: the square is a window, which is filled with patches of zeros.
    """

    def __init__(self, side: int, longest: int, head_width: int, scale: float, filled: bool):
        vectors = lambda: nnx.Param(jnp.zeros((2 * side - 1, head_width)), axes=(None, None))  # noqa: E731
        self.rows = vectors()
        self.columns = vectors()
        self.side = side
        self.longest = longest
        self.scale = scale
        self.filled = filled

    def widened(
        self,
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t n h"],
        v: Float[Array, "b t n h"],
        places: Places,
        zero_key: Float[Array, "n h"],
    ) -> tuple[Array, Array, Array]:
        """Scale queries, and add the channels of distances to them and to keys; in a window those of the sink too.

        zero_key: the key of a patch of zeros.
        """

        @keep_inputs
        def widened(q: Array, k: Array, rows: Array, columns: Array, zero_key: Array) -> Array:
            unscaled = q.astype(jnp.float32)
            by_axis = [
                self._products(unscaled, vectors, places, axis)
                for axis, vectors in enumerate((rows, columns))
            ]
            scaled = unscaled * self.scale
            parts = [scaled, *by_axis]
            if self.filled:
                parts.append(-self._sink(scaled, k, by_axis, places, zero_key)[..., None])
            return jnp.concatenate(parts, axis=-1).astype(q.dtype)

        one_hot = jax.nn.one_hot(places.place, self.longest, dtype=k.dtype)
        channels = [one_hot.reshape(*one_hot.shape[:2], 2 * self.longest)]
        if self.filled:
            ones = jnp.ones_like(v[..., :1])
            channels.append(ones[:, :, 0])
            v = jnp.concatenate([v, ones], axis=-1)
        of_places = jnp.concatenate(channels, axis=-1)[:, :, None]
        of_places = jnp.broadcast_to(of_places, (*k.shape[:3], of_places.shape[-1]))
        q = widened(q, k, self.rows[...], self.columns[...], zero_key)
        return q, jnp.concatenate([k, of_places], axis=-1), v

    def completed(
        self, out: Float[Array, "b t n w"], places: Places, zero_value: Float[Array, "n h"]
    ) -> Float[Array, "b t n h"]:
        """Give what the sink took to the value of patches of zeros, or where there are none to the others."""
        if not self.filled:
            return out
        out, total = out[..., :-1].astype(jnp.float32), out[..., -1:].astype(jnp.float32)
        whole = self._is_whole(places)[:, :, None, None]
        # Nothing is attended in padding.
        alone = out / jnp.where(total > 0, total, 1)
        return jnp.where(whole, alone, out + (1 - total) * zero_value.astype(jnp.float32))

    def _is_whole(self, places: Places) -> Array:
        return jnp.all(places.sides == self.side, axis=-1)

    def _products(
        self, q: Float[Array, "b t n h"], vectors: Array, places: Places, axis: int
    ) -> Float[Array, "b t n k"]:
        """Compute the products of queries with the vectors for their distances from each row, or column."""
        products = jnp.einsum("btnh,dh->btnd", q, vectors.astype(jnp.float32))
        place, sides = places.place[..., axis, None], places.sides[..., axis, None]
        # Of sides of 3 the distances 2 1 0 -1 -2 of a query from keys before and behind it are
        # entries 4 3 2 1 0.
        distance = place - jnp.arange(self.longest)
        if self.filled:
            entry = distance + self.side - 1
            return jnp.take_along_axis(products, entry[:, :, None], axis=-1)
        # PyTorch's linear interpolation of all distances in such an image.
        scale = (2 * self.side - 1) / (2 * sides - 1).astype(jnp.float32)
        source = jnp.maximum((distance + sides - 1 + 0.5) * scale - 0.5, 0)
        last = 2 * self.side - 2
        low = jnp.minimum(jnp.floor(source).astype(jnp.int32), last)
        share = (source - low)[:, :, None]
        low, high = (
            jnp.take_along_axis(products, jnp.minimum(entry, last)[:, :, None], axis=-1)
            for entry in (low, low + 1)
        )
        # Beyond an image's last row nothing is attended.
        return jnp.where((distance > -sides)[:, :, None], low + (high - low) * share, 0)

    def _sink(
        self, q: Array, k: Array, by_axis: list[Array], places: Places, zero_key: Array
    ) -> Float[Array, "b t n"]:
        """Compute the log-sum-exp of a query's scores with the patches of zeros in its window.

        Where there are none, its own score: what the sink takes then is given back, and is at most a half.
        """
        missing = 0.0
        present = 1.0
        highest = 0.0
        for axis, scores in enumerate(by_axis):
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - jax.lax.stop_gradient(top))
            filled = jnp.arange(self.side) < places.sides[..., axis, None]
            inside = jnp.sum(jnp.where(filled[:, :, None], weights, 0), axis=-1)
            outside = jnp.sum(jnp.where(filled[:, :, None], 0, weights), axis=-1)
            # Rows that are missing have all columns, those that are there the missing ones.
            missing = missing * (inside + outside) + present * outside
            present = present * inside
            highest = highest + jax.lax.stop_gradient(top)[..., 0]
        product = jnp.einsum("btnh,nh->btn", q, zero_key.astype(jnp.float32))
        whole = self._is_whole(places)[..., None]
        of_zeros = product + highest + jnp.log(jnp.where(whole, 1.0, missing))
        own_score = jnp.einsum("btnh,btnh->btn", q, k.astype(jnp.float32))
        for axis, scores in enumerate(by_axis):
            index = jnp.minimum(places.place[..., axis, None], self.longest - 1)[:, :, None]
            own_score = own_score + jnp.take_along_axis(scores, index, axis=-1)[..., 0]
        return jnp.where(whole, jax.lax.stop_gradient(own_score), of_zeros)
