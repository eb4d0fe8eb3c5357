"""The contract between data and models: packed arrays of static shape, one microbatch.

Named tuples of arrays (NumPy from the loader, JAX on devices) are pytrees everywhere without registration. Every array
but `send` is `[row, position, ...]`; a row packs several samples (LLM) or items (encoders), one after the other. Rows
are ordered by rank, and every rank has the same number.

Encoder tokens reach the text in two steps. Each rank sends the positions `send` of its connector's output
`[its rows * L']` to its peers. Each text position then gathers the token at index `slots` from the received tokens
`[peers * width]`, followed by the rank's own output. Where an encoder's images are interpolated it is a weighted sum of
several tokens: `Mixed`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any  # numpy.ndarray in the loader, jax.Array in the step

PADDING = -1  # in `sample`, `source`, `owner`, `item`, `slots` and `send`: nothing here


class Mixed(NamedTuple):
    """Up to four encoder tokens for each text position, and their weights in its sum."""

    slot: Array  # int32 [R, T, 4], -1 = none
    share: Array  # float32 [R, T, 4]


class TextBatch(NamedTuple):
    """Inputs of the LLM. All are int32 `[R, T]` but `weight`, which is float32."""

    token: Array  # 0 at positions of items and padding
    target: Array  # the next token
    weight: Array  # of this position's loss
    position: Array  # RoPE position, restarts with each sample; [R, T, 3] (t, y, x) for an LLM with rotary sections
    sample: Array  # index among the row's samples, -1 = padding
    pos: Array  # index in the row before any permutation
    span: Array  # item whose tokens attend to each other bidirectionally, 0 = none
    kind: Array  # one bit: this token's modality (bit 0 = text)
    sees: Array  # bits of the modalities that this query may attend to causally
    source: Array  # index of the sample's data source, -1 = padding
    owner: Array  # the sample's id in the length index, -1 = padding
    offset: Array  # index in the sample
    # Per encoder: index into the tokens that the rank received and then its own, -1 = not from this encoder.
    slots: dict[str, Array | Mixed]
    send: dict[str, Array]  # per encoder `[ranks, peers, width]`: positions that a rank sends each peer, -1 = none


class ItemBatch(NamedTuple):
    """Inputs of an encoder: patches in merge order, or frames in time order."""

    values: Array  # [R, L, F]: pixels of a patch, uint8, or log-mel bins, float32
    item: Array  # int32 [R, L]: index among the row's items, -1 = padding
    # int32 [R, L, 3]: (t, y, x) of a patch, (t, 0, 0) of a frame. (t, -1, 0) is a frame of the silence that Whisper's
    # extractor pads a clip with: only the convolutions read it, the layers do not.
    coordinates: Array
    owner: Array  # int32 [R, L]: id of the item's sample in the length index, -1 = padding
    offset: Array  # int32 [R, L]: index among the positions of all items of that sample and encoder


class Microbatch(NamedTuple):
    """The rows of every module for one forward and backward pass."""

    text: TextBatch
    items: dict[str, ItemBatch]  # by encoder
