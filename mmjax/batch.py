"""The contract between data and models: packed, static arrays of one microbatch.

Named tuples of arrays (NumPy from the loader, JAX on devices): pytrees everywhere without registration. Every array
but `send` is `[row, position, ...]`; a row holds several samples (LLM) or items (encoders), one after the other. Rows
are in the order of the ranks that hold them, as many for each.

Encoder tokens reach the text in two steps: every rank sends to its peers what `send` names, positions of its own
connector output `[its rows * L']`; then each text position takes the token that `slots` names from what its rank got,
`[peers * width]`, followed by what the rank made itself. Where an encoder's images are
interpolated, that is a sum of several tokens, by shares: `Mixed`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any  # numpy.ndarray in the loader, jax.Array in the step

PADDING = -1  # in `sample`, `source`, `owner`, `item`, `slots` and `send`: nothing here


class Mixed(NamedTuple):
    """What the positions of a text take of an encoder, each up to four tokens."""

    slot: Array  # int32 [R, T, 4], -1 = nothing
    share: Array  # float32 [R, T, 4]


class TextBatch(NamedTuple):
    """What the LLM reads. All int32 `[R, T]`, but `weight` float32."""

    token: Array  # 0 where an item's token or padding stands
    target: Array  # the token that should follow
    weight: Array  # of this position's loss
    position: Array  # RoPE position, restarts with each sample; [R, T, 3] (t, y, x) for an LLM with rotary sections
    sample: Array  # which of the row's samples, -1 = padding
    pos: Array  # index in the row before any permutation
    span: Array  # item whose tokens see each other both ways, 0 = none
    kind: Array  # one bit: this token's modality (bit 0 = text)
    sees: Array  # bits of the kinds that this query may attend causally
    source: Array  # number of the sample's data source, -1 = padding
    owner: Array  # the sample's id in the length index, -1 = padding
    offset: Array  # index in the sample
    # Per encoder: index into what the rank got of its tokens and made itself, -1 = not from it; or several of them.
    slots: dict[str, Array | Mixed]
    send: dict[str, Array]  # per encoder `[ranks, peers, width]`: what a rank made that goes to each peer, -1 = nothing


class ItemBatch(NamedTuple):
    """What an encoder reads: patches in merge order, or frames in time order."""

    values: Array  # [R, L, F]: pixels of a patch, uint8, or log-mel bins, float32
    item: Array  # int32 [R, L]: which of the row's items, -1 = padding
    # int32 [R, L, 3]: (t, y, x) of the patch, (t, 0, 0) of the frame; (t, -1, 0) of one after its clip's end, which the
    # convolutions see but no layer: it is the silence that Whisper's extractor pads a clip with.
    coordinates: Array
    owner: Array  # int32 [R, L]: id of the item's sample in the length index, -1 = padding
    offset: Array  # int32 [R, L]: index among the positions of all items of that sample and encoder


class Microbatch(NamedTuple):
    """One forward and backward pass's worth of rows of every module."""

    text: TextBatch
    items: dict[str, ItemBatch]  # by encoder
