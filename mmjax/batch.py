"""The contract between data and models: packed arrays of static shape of one microbatch.

Named tuples of arrays (NumPy from the loader, JAX on devices), which are pytrees without
registration. Every array but `send` is `[row, position, ...]`; a row packs several samples (LLM) or
items (encoders). Rows are ordered by rank, with equally many per rank.

Encoder tokens reach the text in two steps. Every rank sends its peers the positions of its
connector output `[its rows * L']` that `send` names. Then `slots` indexes, for each text position,
the received tokens `[peers * width]` followed by the rank's own output. Interpolated images need a
weighted sum of tokens: `WeightedSlots`.

Images that a generator makes are items as well, and its exchange goes the other way: `send` names
positions of the LLM, whose hidden states `condition` indexes.

Under context parallelism a rank is `context` devices, each with as many blocks of tokens of every
row, of which row and slots hold one device's after the other's. Each device encodes items and
exchanges as above; then `spread` says which of the tokens here go to each device of the rank, and
slots index these `[context * width]` before the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any  # numpy.ndarray in the loader, jax.Array in the step

# Bits of `kind` and `sees`: text, then the encoders and generators, then the branches of a sample.
TEXT_KIND = 1  # the bit of text
FIRST_BRANCH_BIT = 12
# of `ItemBatch.coordinates`, and of `TextBatch.position` where it has three
TIME, ROW, COLUMN = range(3)
PADDING = -1  # in `sample`, `source`, `owner`, `item`, `slots` and `send`: nothing here


class MaskSpec(NamedTuple):
    """Attention mask in integers per token, every field int32 `[*B, T]`; `allowed` evaluates it."""

    sample: Array  # which of the row's samples, -1 = padding
    pos: Array  # index in the row before any permutation
    span: Array  # item whose tokens attend each other bidirectionally, 0 = none
    kind: Array  # one bit: this token's modality (bit 0 = text)
    sees: Array  # bits of the kinds that this query may attend causally
    # sliding window: causal keys, the query itself included; None: unlimited
    reach: Array | None = None


def allowed(q: MaskSpec, k: MaskSpec) -> Array:
    """Evaluate the mask: bool `[*B, Q, K]`, in the library whose arrays these are.

    A query attends keys of its own sample: those of its span, and earlier ones of a kind that it
    sees, in its window.
    """
    q = MaskSpec._make(None if x is None else x[..., :, None] for x in q)
    k = MaskSpec._make(None if x is None else x[..., None, :] for x in k)
    same_span = (q.span == k.span) & (q.span != 0)
    causal = (k.pos <= q.pos) & ((q.sees & k.kind) != 0)
    if q.reach is not None:
        causal &= k.pos > q.pos - q.reach
    return (q.sample == k.sample) & (q.sample >= 0) & (same_span | causal)


class WeightedSlots(NamedTuple):
    """Slots of an encoder whose tokens are interpolated: up to four per text position, with their weights."""

    slot: Array  # int32 [R, T, 4], -1 = nothing
    share: Array  # float32 [R, T, 4]


class TextBatch(NamedTuple):
    """Inputs and targets of the LLM. All int32 `[R, T]`, but `weight` float32."""

    token: Array  # 0 at positions of encoder tokens and of padding
    target: Array  # label: the next token
    weight: Array  # of this position's loss
    # RoPE position, restarts with each sample; [R, T, 3] (t, y, x) for an LLM with rotary sections
    position: Array
    sample: Array  # these five as in MaskSpec
    pos: Array
    span: Array
    kind: Array
    sees: Array
    source: Array  # number of the sample's data source, -1 = padding
    owner: Array  # the sample's id in the length index, -1 = padding
    offset: Array  # index in the sample
    # Per encoder: index into the received tokens and the rank's own, -1 = none; or several with
    # weights. Per generator: which of an image's learned queries stands here, -1 = none.
    slots: dict[str, Array | WeightedSlots]
    # Per encoder `[ranks * context, peers, width]`: own tokens that go to each peer, -1 = nothing.
    # Per generator: own positions of the LLM whose hidden states do.
    send: dict[str, Array]
    # Under context parallelism, per encoder `[ranks * context, context, width]`: tokens for each
    # device of the rank.
    spread: dict[str, Array] = {}  # noqa: RUF012
    # Per generator int32 [its rows, I * queries]: of the row's up to I images, which hidden state
    # of each query, among those received and the rank's own positions, -1 = none.
    condition: dict[str, Array] = {}  # noqa: RUF012
    # float32 [R, T] by name, of each position's target: what the loss reads of answers (`inputs` of
    # `config.losses`).
    loss_inputs: dict[str, Array] = {}  # noqa: RUF012
    # (), which has no array, where samples may have branches and layers of the LLM read tokens in
    # order; else None. It is part of the tree's structure, so that the program knows.
    branches: tuple[()] | None = None

    @property
    def mask(self) -> MaskSpec:
        """The attention mask of layers without a sliding window."""
        return MaskSpec(self.sample, self.pos, self.span, self.kind, self.sees)


TABLES = ("send", "spread", "condition")  # of the exchanges, by ranks and not by rows of the LLM
TOKEN_FIELDS = tuple(
    field
    for field in TextBatch._fields
    if field not in ("slots", "loss_inputs", "branches", *TABLES)
)  # [R, T] each


def chunk_numbers(item: Array, time: Array, column: Array, chunk: int) -> Array:
    """Number the chunks that items are cut into, `[R, L]`, by the column that each begins in; -1 = padding.

    Of each position: its item, -1 = padding, its time in the item, and its column in the row. With
    chunks of 4 items 0 0 0 0 0 0 1 1, which begin at time 0, are the chunks 0 0 0 0 4 4 6 6.
    """
    return (column - time % chunk + 1) * (item >= 0) - 1


def branch_gap(running_max: Callable[[Array], Array], sample: Array, kind: Array) -> Array:
    """Count the tokens of other branches between a token and the end of branch 0 in its sample, int32 `[R, T]`.

    Of rows in order. The kinds 1 1 A A B B, of two tokens and the branches A and B, give 0 0 0 0 2
    2.

    running_max: along rows, of the library whose arrays these are.
    """
    xp = kind.__array_namespace__()
    branch = kind >> FIRST_BRANCH_BIT  # 0 in branch 0
    sample_before, branch_before = (
        xp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=-2) for x in (sample, branch)
    )
    column = xp.broadcast_to(xp.arange(kind.shape[1], dtype=xp.int32), kind.shape)
    begins = (branch != branch_before) | (sample != sample_before)
    forks = begins & ((branch_before <= 0) | (sample != sample_before))
    begin, fork = (running_max(xp.where(where, column, 0)) for where in (begins, forks))
    return xp.where(branch > 0, begin - fork, 0)


class ItemBatch(NamedTuple):
    """Inputs of an encoder, or what a generator learns to make: patches in merge order, or frames in time order."""

    values: Array  # [R, L, F]: pixels of a patch, uint8, or log-mel bins or latents, float32
    item: Array  # int32 [R, L]: which of the row's items, -1 = padding
    # int32 [R, L, 3]: (t, y, x) of a patch, (t, 0, 0) of a frame. Whisper's extractor pads clips
    # with silence: frames there are (t, -1, 0), which the convolutions read and the layers do not.
    coordinates: Array
    owner: Array  # int32 [R, L]: id of the item's sample in the length index, -1 = padding
    offset: Array  # int32 [R, L]: index among the positions of all items of that sample and encoder


class EncodedItems(ItemBatch):
    """Items whose values are what a frozen encoder made of them before the step: the input of its connector.

    `values` are `[R, L / stride, W]`, of the encoder's `output_stride` and `output_width`; other
    fields are as of the items themselves.
    """


class Microbatch(NamedTuple):
    """The rows of every module for one forward and backward pass."""

    text: TextBatch  # None: of a pipeline's stage without the LLM
    items: dict[str, ItemBatch]  # by encoder and generator; of a pipeline's stage its own
