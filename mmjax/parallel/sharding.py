"""The device mesh, and how parameters and batches are sharded over it."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mmjax.config import ContextAttention, Exchange, Layout, LossConfig, ModelConfig
from mmjax.errors import UserError

AXES = ("data", "fsdp", "expert", "context", "tensor")
# axes whose product is the ranks: the rows of a batch are sharded over them
RANKS = ("data", "fsdp", "expert")
# devices that have other experts of a layer, and of other parameters other shards
EXPERT = "expert"
CONTEXT = "context"  # devices that share the tokens of a rank's rows
TENSOR = "tensor"


def make_mesh(config: Layout, devices: Sequence[jax.Device], where: str = "mesh") -> Mesh:
    """Build a mesh over all of `devices`. Raises UserError where the axes' sizes do not multiply to their number.

    where: the key of the layout.
    """
    if config.exchange == "ragged" and devices[0].platform == "cpu":
        raise UserError(
            f"{where}.exchange=ragged: a CPU has no such collective; use {where}.exchange=padded"
        )
    # Devices fill the last axis first, so neighbours in `tensor` are neighbours in number, and
    # mostly on one node.
    shape = tuple(mesh_sizes(config, len(devices)).values())
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(config: Layout, devices: int) -> dict[str, int]:
    """Resolve the size of each axis, -1 included. Raises UserError where they do not multiply to `devices`."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    # An empty product is 1: -1 alone takes all devices.
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise UserError(f"mesh.{free[0]} and mesh.{free[1]} are both -1; give all but one a size")
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"mesh sizes must be at least 1, or -1 for one of them: {_spell(sizes)}")
    if free:
        if devices % known:
            raise UserError(
                f"mesh.{free[0]}=-1 takes what the other axes leave, but {known} ({_spell(sizes)}) does not divide the "
                f"{devices} devices; use sizes whose product does"
            )
        sizes[free[0]] = devices // known
    if math.prod(sizes.values()) != devices:
        raise UserError(
            f"the mesh {_spell(sizes)} needs {math.prod(sizes.values())} devices and there are {devices}; "
            "set one axis to -1 to take what is there"
        )
    return sizes


LOSS_PARTS = (1, 2, 4, 8, 16, 32)  # numbers of chunks to choose from


def loss_parts_are_of_tokens(sizes: Mapping[str, int], loss: LossConfig) -> bool:
    """Tell whether a loss in chunks cuts the tokens on a mesh of these sizes; else it cuts the vocabulary.

    Parts of the tokens make their gradients with their logits, for which the gradient of a token's
    loss must be known: that of answers (`loss`) is not. They need all of the device's shard of the
    vocabulary at once, and add up its gradient over the parts. Where `fsdp`, `expert` or `context`
    cut the table's width, that would gather the whole table and hold a whole gradient; parts of the
    vocabulary gather a part at a time, and reduce its gradient.
    """
    return not loss.is_branched and all(sizes[axis] == 1 for axis in ShardingRules.embed)


def loss_choices(sizes: Mapping[str, int], chunks: int, model: ModelConfig) -> tuple[int, ...]:
    """List the numbers of chunks that the loss may be computed in: `chunks`, or powers of two if that is 0.

    Raises UserError where the chunks would be unequal, on any device.
    """
    tensor = sizes["tensor"]
    vocab = model.llm.vocab
    # a vocabulary that does not divide is replicated
    shard = vocab if vocab % tensor else vocab // tensor
    if chunks == 0:
        return tuple(n for n in LOSS_PARTS if shard % n == 0)
    # Each device cuts its own shard, so a chunk has an equal piece of every one.
    if shard % chunks:
        nearest = min(
            (n for n in range(1, shard + 1) if shard % n == 0), key=lambda n: abs(n - chunks)
        )
        cut = f", which mesh.tensor={tensor} cuts into {shard}" if shard < vocab else ""
        raise UserError(
            f"training.loss_chunks={chunks} does not divide model.llm.vocab={vocab}{cut}; use the nearest that does, "
            f"training.loss_chunks={nearest}, or a vocabulary that is a multiple of {chunks * tensor}"
        )
    return (chunks,)


def _spell(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def row_ranks(mesh: Mesh, axes: tuple[str, ...] = RANKS) -> int:
    """Count the ranks that the rows of a batch are sharded over, along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def encoder_axes(config: Layout) -> tuple[str, ...]:
    """Return the axes that the rows of encoders are sharded over: of an LLM row's devices, each has its own."""
    return (*RANKS, CONTEXT, TENSOR) if config.encoders == "data" else (*RANKS, CONTEXT)


def local_ranks(mesh: Mesh, axes: tuple[str, ...] = RANKS) -> range:
    """Return the ranks whose rows, sharded over `axes`, are on this process's devices.

    Raises UserError where these are not consecutive.
    """
    # An array with one row per rank: the slice that a device gets of it starts at its rank. A mesh
    # of one rank has `slice(None)`, whose start is None.
    slices = (
        rows_sharding(mesh, axes).addressable_devices_indices_map((row_ranks(mesh, axes),)).values()
    )
    ranks = sorted({rows.start or 0 for (rows,) in slices})
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise UserError(
            f"process {jax.process_index()} would hold the ranks {ranks} of the mesh {_spell(dict(mesh.shape))}; "
            "choose sizes with which every process has neighbouring ranks"
        )
    return range(ranks[0], ranks[0] + len(ranks))


def owned_ranks(mesh: Mesh, axes: tuple[str, ...] = RANKS) -> tuple[int, ...]:
    """Return the ranks of `local_ranks` that this process owns: a rank on several processes belongs to the first."""
    # With tensor parallelism across processes, several hold the rows of a rank.
    owner: dict[int, int] = {}
    for device, (rows,) in (
        rows_sharding(mesh, axes).devices_indices_map((row_ranks(mesh, axes),)).items()
    ):
        rank = rows.start or 0
        owner[rank] = min(owner.get(rank, device.process_index), device.process_index)
    # Every process computes the same table of owners, so none needs to ask another.
    return tuple(rank for rank in local_ranks(mesh, axes) if owner[rank] == jax.process_index())


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that replicates on every device."""
    return NamedSharding(mesh, PartitionSpec())


def without_shards(struct: jax.ShapeDtypeStruct, layout: NamedSharding | None = None) -> jax.Array:
    """Return an array of which this process has no shard, a placeholder for other processes' arrays.

    layout: None where the struct has one.
    """
    return jax.make_array_from_single_device_arrays(
        struct.shape, layout or struct.sharding, [], dtype=struct.dtype
    )


def rows_sharding(mesh: Mesh, axes: tuple[str, ...] = RANKS) -> NamedSharding:
    """Return the sharding of the leading dimension over the ranks, or over these axes."""
    return NamedSharding(mesh, PartitionSpec(axes))


def tokens_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Return the sharding of the LLM's rows, and of their tokens."""
    return NamedSharding(mesh, rules.spec(("rows", "length")))


Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of every logical axis.

    FSDP shards parameters along `embed` and gathers them where they are used; tensor parallelism
    shards `heads`, `mlp` and `vocab`, so activations are whole along `width` between layers. While
    encoders run (`encoding`), `rows` are `item_rows` and rows are whole: where these lie on
    `tensor` too, encoders are not cut but gathered, as under FSDP. Encoder tokens leave for the LLM
    from `token_rows`.
    """

    rows: tuple[str, ...] = RANKS
    item_rows: tuple[str, ...] = (*RANKS, CONTEXT)
    token_rows: tuple[str, ...] = (*RANKS, CONTEXT)
    length: tuple[str, ...] = (CONTEXT,)
    # of the tokens between layers; with sequence parallelism `tensor` too
    sequence: tuple[str, ...] = (CONTEXT,)
    ring: tuple[str, ...] = ()  # around which these tokens travel in chunks, behind products
    width: tuple[str, ...] = ()
    embed: tuple[str, ...] = ("fsdp", EXPERT, CONTEXT)
    experts: tuple[str, ...] = (EXPERT,)
    expert_embed: tuple[str, ...] = ("fsdp", CONTEXT)  # `embed` of what lies on `expert` already
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    fixed: tuple[str, ...] = ()  # of tables that are never trained
    # No axes: how queries meet the keys of other devices, and how encoder tokens travel between
    # ranks.
    context_attention: ContextAttention = "auto"
    exchange: Exchange = "padded"

    @classmethod
    def of(cls, config: Layout) -> ShardingRules:
        """Make the rules that a mesh's or a unit's config asks for."""
        rules = cls(
            item_rows=encoder_axes(config),
            context_attention=config.context_attention,
            exchange=config.exchange,
        )
        if config.sequence_parallel not in ("on", "overlap"):  # or nobody has decided
            return rules
        ring = (TENSOR,) if config.sequence_parallel == "overlap" else ()
        return replace(rules, sequence=(*rules.length, TENSOR), ring=ring)

    def spec(self, axes: Axes) -> PartitionSpec:
        """Build the partition spec of these logical axes. Raises ValueError for an unknown or a clashing axis."""
        # The rules' fields are the logical axes.
        known = {f.name for f in fields(self)} - {"context_attention", "exchange"}
        used: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for axis in axes:
            if axis is not None and axis not in known:
                raise ValueError(
                    f"unknown logical axis {axis!r} in {axes}; known: {', '.join(sorted(known))}"
                )
            mesh_axes = () if axis is None else getattr(self, axis)
            # JAX would refuse it too, but without the name of the logical axes.
            if clash := used.intersection(mesh_axes):
                raise ValueError(
                    f"logical axes {axes} put mesh axis {sorted(clash)[0]!r} on two dimensions"
                )
            used.update(mesh_axes)
            # An empty tuple and None both replicate; None is how JAX prints it.
            entries.append(mesh_axes or None)
        return partition_spec(entries)


def partition_spec(axes: Iterable[Any]) -> PartitionSpec:
    """Return the spec with these mesh axes, an entry for each dimension of an array."""
    return PartitionSpec(*axes)


class Active(NamedTuple):
    """The mesh and rules that shard a program's activations."""

    mesh: Mesh
    rules: ShardingRules


_active: contextvars.ContextVar[Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def activations_on(mesh: Mesh, rules: ShardingRules) -> Iterator[None]:
    """Lay out activations by `constrain` on this mesh while tracing inside, and send encoder tokens over it."""
    # A context variable, read while tracing: models need no mesh among their arguments.
    token = _active.set(Active(mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """Use the encoders' sharding rules for `rows` while tracing inside."""
    current = _active.get()
    if current is None:
        yield
    else:
        rules = current.rules
        # What divides rows does not divide their tokens.
        sequence, ring = (
            tuple(a for a in axes if a not in rules.item_rows)
            for axes in (rules.sequence, rules.ring)
        )
        rules = replace(rules, rows=rules.item_rows, length=(), sequence=sequence, ring=ring)
        with activations_on(current.mesh, rules):
            yield


def active() -> Active | None:
    """Return what `activations_on` set; None for one device, or a bare call."""
    current = _active.get()
    return None if current is None or current.mesh.size == 1 else current


def in_row_order(
    compute: Callable[..., jax.Array], pos: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Compute of arrays `[..., R, T]`, whose tokens stand at `pos` `[R, T]` of their rows, as of the rows in order.

    Devices that share rows permute them; elsewhere nothing is moved.
    """
    on = active()
    if on is None or on.mesh.shape[CONTEXT] == 1:
        return compute(*arrays)
    order = jnp.argsort(pos, axis=1)
    result = compute(
        *(jnp.take_along_axis(x, jnp.broadcast_to(order, x.shape), axis=-1) for x in arrays)
    )
    return jnp.take_along_axis(result, jnp.broadcast_to(pos, result.shape), axis=-1)


_no_platform: contextvars.ContextVar[bool] = contextvars.ContextVar("no_platform", default=False)


@contextlib.contextmanager
def for_no_platform() -> Iterator[None]:
    """Trace programs without platform-specific branches, and without asking JAX for devices."""
    token = _no_platform.set(True)
    try:
        yield
    finally:
        _no_platform.reset(token)


def first_device() -> jax.Device:
    """Return a device of the mesh that activations are laid out on, also an absent one; else JAX's first."""
    current = _active.get()
    return jax.devices()[0] if current is None else current.mesh.devices.flat[0]


def platform() -> str:
    """Return the platform of `first_device`."""
    return "none" if _no_platform.get() else first_device().platform


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay `x` out by its logical axes on the active mesh; without one (one device, or a bare call), `x` itself.

    A dimension that does not divide stays whole, like the parameter it meets, or XLA would
    replicate one for the other.
    """
    current = active()
    if current is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(current.mesh, current.rules, x.shape, axes))


def cut_in_shards(x: jax.Array, parts: int, *axes: str | None) -> jax.Array:
    """Cut `x` `[n, ...]` into `[parts, n / parts, ...]`, each with an equal piece of every shard of the first axis.

    So a scan over the parts moves nothing between devices. `axes` are those of `x`; `parts` must
    divide a shard.
    """
    current = active()
    shard = (
        len(x)
        if current is None
        else sharding(current.mesh, current.rules, x.shape, axes).shard_shape(x.shape)[0]
    )
    # 8 rows in 2 shards, cut in 2 parts: 0 1 2 3 | 4 5 6 7 become 0 1 4 5 and 2 3 6 7.
    pieces = x.reshape(len(x) // shard, parts, shard // parts, *x.shape[1:])
    return constrain(jnp.moveaxis(pieces, 1, 0).reshape(parts, -1, *x.shape[1:]), *axes)


def sharding(mesh: Mesh, rules: ShardingRules, shape: tuple[int, ...], axes: Axes) -> NamedSharding:
    """Return the sharding of an array of this shape; a dimension that its mesh axes do not divide stays whole on them.

    Raises ValueError where there are more axes than dimensions.
    """
    if len(axes) > len(shape):
        raise ValueError(f"logical axes {axes} are more than the dimensions of {shape}")
    # a leading axis of stacked layers is never sharded
    axes = (None,) * (len(shape) - len(axes)) + axes
    spec = list(rules.spec(axes))
    for i, names in enumerate(spec_axes(spec)):
        # JAX refuses a sharding of uneven pieces at a program's borders.
        if shape[i] % math.prod(mesh.shape[name] for name in names):
            spec[i] = None
    return NamedSharding(mesh, partition_spec(spec))


def active_spec(x: jax.Array, *axes: str | None) -> PartitionSpec:
    """Return the spec of an array with these logical axes on the active mesh, of which there must be one."""
    current = active()
    return sharding(current.mesh, current.rules, x.shape, axes).spec


def single_axes(mesh: Mesh, spec: PartitionSpec) -> tuple[str, ...] | None:
    """Return the axes of one device that a spec does not name; None if there are none.

    Gradients of a `shard_map` are summed over the axes that a spec leaves out. An axis of size 1 may
    be named for a dimension that stays whole, and then needs no all-reduce.
    """
    named = {*chain(*spec_axes(spec))}
    single = tuple(axis for axis, size in mesh.shape.items() if size == 1 and axis not in named)
    return single or None


def spec_axes(spec: Sequence[Any]) -> list[tuple[str, ...]]:
    """Return the mesh axes that cut each dimension: P("data", None, ("fsdp", "tensor")) is one, none and two."""
    return [(entry,) if isinstance(entry, str) else entry or () for entry in spec]


def tree_shardings(mesh: Mesh, rules: ShardingRules, shapes: Any, axes: Any) -> Any:
    """Return the sharding of every array of a tree. axes: the logical axes of each, in a tree of the same nesting."""
    return jax.tree.map(
        lambda names, shape: sharding(mesh, rules, shape.shape, names),
        axes,
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
