"""Put packed microbatches and reports on a mesh's devices, and leave out rows of those that lie there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.batch import PADDING, TABLES, EncodedItems, ItemBatch, Microbatch, TextBatch
from mmjax.config import Encoder, Generator
from mmjax.data.loading.context import tokens_on_device
from mmjax.data.plan.placement import Shape
from mmjax.parallel.sharding import (
    ShardingRules,
    local_ranks,
    row_ranks,
    rows_sharding,
    tokens_sharding,
)

# samples of a step that may be left out: where more cannot be read, it is not the samples
MAX_UNREADABLE = 32


class ProcessReport(NamedTuple):
    """Report one process's part of a step to all processes, with the update."""

    digest: int = 0  # hash of the step's plan, 63 bits; must be the same everywhere
    # sum of the hashes of its rows, 64 bits; a row that several processes hold counts once
    content: int = 0
    needed_flops: float = 0.0  # of its ranks' rows, without padding
    # from requesting the batch to having it on the devices: others wait at most so long
    batch_seconds: float = 0.0
    stop: bool = False  # a signal requests a stop
    unreadable: Sequence[int] = ()  # ids in the length index of the samples that it could not read


class TowerRows(NamedTuple):
    """The rows of a tower's batches that this process packs."""

    local: range  # ranks whose rows they are
    ranks: int  # in all
    per_rank: int = 0  # rows; 0 where no process needs the shapes of others'


def put_rows(batch: Microbatch, mesh: Mesh, rules: ShardingRules) -> Microbatch:
    """Put a microbatch, made for the ranks of `mesh` and whole on every process, on the devices."""
    items = {name: put_tower_rows(part, None, mesh, rules) for name, part in batch.items.items()}
    return Microbatch(put_tower_rows(batch.text, None, mesh, rules), items)


def put_local_rows(batch: Microbatch, mesh: Mesh, rules: ShardingRules) -> Microbatch:
    """Put a microbatch of the rows of this process's ranks on the devices; as many for each rank."""
    text, items = (
        TowerRows(local_ranks(mesh, axes), row_ranks(mesh, axes))
        for axes in (rules.rows, rules.item_rows)
    )
    parts = {name: put_tower_rows(part, items, mesh, rules) for name, part in batch.items.items()}
    return Microbatch(put_tower_rows(batch.text, text, mesh, rules), parts)


def put_tower_rows(
    part: TextBatch | ItemBatch, rows: TowerRows | None, mesh: Mesh, rules: ShardingRules
) -> TextBatch | ItemBatch:
    """Put a tower's batch on the devices. rows: those that it has, as many for each rank; None: all."""

    def put(x: np.ndarray, layout: NamedSharding) -> jax.Array:
        if rows is None:
            return jax.make_array_from_callback(x.shape, layout, x.__getitem__)
        # Tables of the exchange have an entry for each device of a rank, the others as many as the
        # rank has rows. 6 rows of this process's ranks 2 and 3, of 8 ranks in all: rows 6 to 11 of
        # 24.
        per_rank = len(x) // len(rows.local)
        shape = (per_rank * rows.ranks, *x.shape[1:])

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(shape[0])
            return x[
                first - per_rank * rows.local.start : last - per_rank * rows.local.start, *index[1:]
            ]

        return jax.make_array_from_callback(shape, layout, shard, dtype=x.dtype)

    return jax.tree.map(put, part, batch_shardings(part, mesh, rules))


def batch_shardings(
    part: TextBatch | ItemBatch, mesh: Mesh, rules: ShardingRules
) -> TextBatch | ItemBatch:
    """Return the sharding of every array of a tower's batch."""
    if isinstance(part, ItemBatch):
        return jax.tree.map(lambda _: rows_sharding(mesh, rules.item_rows), part)
    # A process holds the tables of all devices of its ranks; what generators are sent goes from
    # rank to rank.
    by_device, by_rank = (rows_sharding(mesh, axes) for axes in (rules.token_rows, rules.rows))
    tables = {
        table: {name: by_rank if name in part.condition else by_device for name in arrays}
        for table, arrays in tables_of(part).items()
    }
    tokens = tokens_sharding(mesh, rules)
    return jax.tree.map(lambda _: tokens, without_tables(part))._replace(**tables)


def tables_of(text: TextBatch) -> dict[str, dict[str, jax.Array]]:
    """Return a text's tables of the exchanges by their names."""
    return {table: getattr(text, table) for table in TABLES}


def without_tables(text: TextBatch) -> TextBatch:
    """Return a text without the tables of the exchanges: what is left has the rows of the LLM."""
    return text._replace(**{table: {} for table in TABLES})


def padding_microbatches(
    shapes: Sequence[Shape],
    first: Microbatch,
    encoders: Mapping[str, Encoder | Generator],
    tower_rows: Mapping[str, TowerRows] | None = None,
) -> list[Microbatch]:
    """Make an all-padding microbatch of every shape, to compile ahead; `first` gives dtypes and rows.

    tower_rows: that this process packs, where `first` may lack items that go to copies of encoders
    elsewhere.
    """

    def resize(x: np.ndarray, length: int, rows: int | None = None) -> np.ndarray:
        return np.zeros((x.shape[0] if rows is None else rows, length, *x.shape[2:]), x.dtype)

    batches = []
    for shape in shapes:
        text = jax.tree.map(partial(resize, length=shape.lengths[0]), without_tables(first.text))
        widths = zip(first.text.send.items(), shape.widths, strict=True)
        lengths = zip(first.items.items(), shape.lengths[1:], strict=True)
        send = {e: np.zeros((*x.shape[:2], width), x.dtype) for (e, x), width in widths}
        counts = {e: rows.per_rank * len(rows.local) for e, rows in (tower_rows or {}).items()}
        items = {}
        for (e, x), length in lengths:
            items[e] = jax.tree.map(partial(resize, length=length, rows=counts.get(e)), x)
            if isinstance(x, EncodedItems):
                positions = length // encoders[e].output_stride
                items[e] = items[e]._replace(values=resize(x.values, positions, counts.get(e)))
        condition = {
            e: resize(
                x, encoders[e].max_images(items[e].item.shape[1]) * encoders[e].condition_tokens
            )
            for e, x in first.text.condition.items()
        }
        spread = {}
        for e, x in first.text.spread.items():
            length = first.items[e].item.shape[1]
            new_length = items[e].item.shape[1]
            # Beside what peers send, a device has slots for each of its rows.
            rows = (x.shape[2] - prod(first.text.send[e].shape[1:])) // tokens_on_device(
                encoders[e], 1, length, 0, 0
            )
            width = tokens_on_device(encoders[e], rows, new_length, *send[e].shape[1:])
            spread[e] = np.zeros((*x.shape[:2], width), x.dtype)
        batches.append(
            Microbatch(text._replace(send=send, spread=spread, condition=condition), items)
        )
    return batches


def weigh(
    total: jax.Array, weight: jax.Array, owner: jax.Array, unreadable: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add a microbatch's loss weights `[R, T]` to the total; return it and them, 0 where a sample is unreadable."""
    # [R, T, 1] against [MAX_UNREADABLE]. Where more samples are unreadable than ids are sent, the
    # others are unknown: then nothing counts, and the step updates nothing.
    excluded = (owner[..., None] == unreadable).any(-1) | (count > MAX_UNREADABLE)
    weight = jnp.where(excluded, 0.0, weight)
    return total + weight.sum(), weight


def weigh_images(
    total: jax.Array, items: ItemBatch, unreadable: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add a generator's patches to the total; return it and `items.item`, PADDING where a sample is unreadable."""
    excluded = (items.owner[..., None] == unreadable).any(-1) | (count > MAX_UNREADABLE)
    item = jnp.where(excluded, PADDING, items.item)
    return total + (item >= 0).sum(dtype=jnp.float32), item


@jax.jit
def isolate_rows(batch: Microbatch, owner: jax.Array, rows: jax.Array) -> Microbatch:
    """Keep these rows, bool `[R]`, and the items of their samples; empty the others entirely.

    owner: of the text's tokens, int32 `[R, T]`. Of a stage without the LLM the text is None.
    """
    # A weight of zero would not do: where a derivative is infinite, zero times it is NaN.

    def select(x: jax.Array, mask: jax.Array, empty: int) -> jax.Array:
        mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x, jnp.array(empty, x.dtype))

    # Owners of removed rows become PADDING - 1, which is the owner of no item, not even of padding.
    owners = select(owner, rows, PADDING - 1)
    items = {}
    for name, of_tower in batch.items.items():
        mask = jnp.isin(of_tower.owner, owners)
        # outputs of an encoder have a position for several inputs, which are of one item
        stride = mask.shape[1] // of_tower.values.shape[1]
        values = select(of_tower.values, mask[:, ::stride], 0)
        items[name] = of_tower._replace(values=values, item=select(of_tower.item, mask, PADDING))
    text = batch.text
    if text is not None:
        plain = {
            f: select(getattr(text, f), rows, 0)
            for f in ("token", "weight", "span", "kind", "sees")
        }
        slots = {
            e: jax.tree.map(lambda x: select(x, rows, PADDING), slot)
            for e, slot in text.slots.items()
        }
        text = text._replace(**plain, sample=select(text.sample, rows, PADDING), slots=slots)
    return Microbatch(text, items)


def bisect_bad(members: list[int], bad: Callable[[list[int]], bool], max_trials: int) -> list[int]:
    """Return the members that are bad by themselves, found by bisection.

    After `max_trials` trials, all members of the parts that are not decided yet are returned, too.
    """
    # A stack of undecided parts. Members 0..7 of which 5 is bad: 0..7, 4..7, 6..7 (good), 4..5, 5
    # (bad), 4 (good), 0..3 (good), in 7 trials; each further bad member costs about two for each
    # halving.
    culprits: list[int] = []
    parts = [members]
    for _ in range(max_trials):
        if not parts:
            return sorted(culprits)
        part = parts.pop()
        if not bad(part):
            continue
        if len(part) == 1:
            culprits += part
        else:
            middle = len(part) // 2
            parts += [half for half in (part[:middle], part[middle:]) if half]
    return sorted(culprits + [member for part in parts for member in part])


def put_report(report: ProcessReport, mesh: Mesh) -> ProcessReport:
    """Put a process's report on each of its devices in a mesh: every field becomes an array `[devices, ...]`."""
    devices = len(mesh.local_devices)
    content = np.zeros((devices, 2), np.uint32)
    content[0] = _two_words(report.content)  # the programs add it up over devices
    unreadable = np.full((devices, MAX_UNREADABLE + 1), PADDING, np.int32)
    ids = list(report.unreadable)[: MAX_UNREADABLE + 1]
    unreadable[0, : len(ids)] = ids
    # A rank's rows are counted once for each of the devices that share them.
    shared = len(local_ranks(mesh)) * mesh.size // row_ranks(mesh)
    arrays = ProcessReport(
        digest=np.tile(_two_words(report.digest), (devices, 1)),
        content=content,
        needed_flops=np.full(devices, report.needed_flops / shared, np.float32),
        batch_seconds=np.full(devices, report.batch_seconds, np.float32),
        stop=np.full(devices, report.stop),
        unreadable=unreadable,
    )
    on_devices = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, on_devices), arrays)


def _two_words(number: int) -> np.ndarray:
    """Split 64 bits into two words, uint32 `[2]`, the lower first: 0x1_0000_0002 is 2, 1."""
    return np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)


def merge_unreadable(samples: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the ids of each device, int32 `[devices, n]`, every id once: int32 `[MAX_UNREADABLE]`, and their number."""
    ids = -jnp.sort(-samples.reshape(-1))
    # An id stays where it differs from the one before: 7, 7, 3, -1 becomes 7, -1, 3, -1.
    unique = jnp.where(
        (ids >= 0) & (ids != jnp.pad(ids[:-1], (1, 0), constant_values=PADDING)), ids, PADDING
    )
    return jax.lax.top_k(unique, MAX_UNREADABLE)[0], (unique >= 0).sum()
