"""Attention under a mask spec, which encodes in a few integers per token who attends whom, with three backends.

All mask exactly: another sample's content enters as a product with an exact zero, so it cannot
change a bit. Softmax and accumulation are float32 whatever the inputs are. On a mesh each device
computes its own rows, heads and tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from mmjax.batch import MaskSpec
from mmjax.config import ContextAttention, context_form
from mmjax.kernels.flash_attention import (
    BlockPlan,
    Scores,
    flash_attention,
    flash_forward,
    flash_gradients,
    plan_blocks,
)
from mmjax.kernels.masked_tiles import TilePlan, plan_tiles, unsupported
from mmjax.kernels.masks import select_mask
from mmjax.kernels.tiles import MAX_BLOCK, KernelTiles, tiles_for, window_block
from mmjax.kernels.window_attention import (
    ListKernel,
    MixedPlan,
    WindowPlan,
    mixed_attention,
    window_attention,
)
from mmjax.kernels.window_attention import unsupported as unsupported_windows
from mmjax.models.blockwise_attention import (
    DEFAULT_SCORING,
    Scoring,
    blockwise_attention,
    blockwise_forward,
    blockwise_gradients,
    dense_attention,
)
from mmjax.models.context_attention import (
    ContextPlan,
    Kernel,
    attend_by_heads,
    attend_in_pieces,
    plan_pieces,
    plan_specs,
)
from mmjax.parallel.sharding import CONTEXT, active, active_spec, first_device, single_axes

Backend = Literal["dense", "blockwise", "flash", "auto"]
Plan = BlockPlan | TilePlan | ContextPlan | WindowPlan | MixedPlan


def chosen_backend(backend: Backend) -> Backend:
    """Resolve `auto`: the kernel on GPUs, blocks elsewhere."""
    return ("flash" if _on_gpu() else "blockwise") if backend == "auto" else backend


def _on_gpu() -> bool:
    return first_device().platform in ("gpu", "cuda")


def describe_kernel(
    head_width: int,
    length: int,
    heads: tuple[int, int],
    dtype: jnp.dtype,
    window: int = 0,
) -> str:
    """Name the kernel of attention on a GPU, and why it is not the one for Hopper.

    window: tokens of a window that most layers attend in, at most; 0: none.
    """
    if _context_form(length, heads) == "gather":
        return "Triton (keys of other devices)"
    max_block = block_limit("flash", window, length, heads, dtype)
    reason = _unsupported_on_hopper(head_width, length, dtype, max_block)
    kernel = f"Triton ({reason})" if reason else "Mosaic GPU for Hopper"
    if not window:
        return kernel
    by_lists = unsupported_windows(window, jnp.dtype(dtype).itemsize)
    return f"{kernel}, {f'windows too ({by_lists})' if by_lists else 'Triton in windows'}"


def in_windows(
    backend: Backend, window: int, length: int, heads: tuple[int, int], dtype: jnp.dtype
) -> bool:
    """Return whether layers in windows of at most so many tokens run in the kernel of windows."""
    return (
        chosen_backend(backend) == "flash"
        and window > 0
        and unsupported_windows(window, jnp.dtype(dtype).itemsize) is None
        and _context_form(length, heads) != "gather"
    )


def block_limit(
    backend: Backend, window: int, length: int, heads: tuple[int, int], dtype: jnp.dtype
) -> int:
    """Return the tokens of a block of attention at most, in a tower of such windows.

    Where windows are attended by lists too, as on a CPU, in float32 and where they are longer than a
    block, a scan over layers of both kinds has blocks of one size, which suits windows.
    """
    if not window or in_windows(backend, window, length, heads, dtype):
        return MAX_BLOCK
    return window_block(window)


def _unsupported_on_hopper(
    head_width: int, length: int, dtype: jnp.dtype, max_block: int
) -> str | None:
    capability = getattr(first_device(), "compute_capability", None)
    return unsupported(capability, length, head_width, jnp.dtype(dtype).itemsize, max_block)


def plan_attention(
    mask: MaskSpec,
    backend: Backend,
    head_width: int,
    heads: tuple[int, int],
    dtype: jnp.dtype,
    max_block: int = MAX_BLOCK,
) -> Plan | None:
    """Plan attention under this mask for all layers of a tower; None where there is nothing to plan.

    heads: of queries, and of keys. dtype: of both. The kernel gets the blocks that it visits; where
    keys arrive over the context axis, every backend gets the masks of what arrives.
    """
    flash = chosen_backend(backend) == "flash"
    in_pieces = _context_form(mask.pos.shape[1], heads) == "gather"
    tiles = _tiles(head_width, mask.pos.shape[1], dtype, max_block, in_pieces) if flash else None
    if not in_pieces:
        if not flash:
            return None
        plan = plan_blocks(mask, tiles)
        triton = _unsupported_on_hopper(head_width, mask.pos.shape[1], dtype, max_block)
        return plan if triton else plan_tiles(mask, plan)
    # Each device plans for its own queries, from the masks of all pieces of keys (`plan_pieces`).
    current = active()
    rows = active_spec(mask.pos, "rows", "length")[0]
    ragged = current.rules.exchange == "ragged"

    def make(q_mask: MaskSpec, k_mask: MaskSpec) -> MaskSpec | BlockPlan:
        return plan_blocks(q_mask, tiles, k_mask) if flash else k_mask

    return jax.shard_map(
        partial(plan_pieces, make=make, ragged=ragged),
        mesh=current.mesh,
        in_specs=PartitionSpec(rows, CONTEXT),
        out_specs=plan_specs(current.mesh.shape[CONTEXT], rows, flash, ragged),
        check_vma=False,
    )(mask)


def _tiles(
    head_width: int, length: int, dtype: jnp.dtype, max_block: int, in_pieces: bool
) -> KernelTiles:
    """Choose the kernel's tiles for rows of this length; in_pieces: for one device's part of them."""
    length = length // active().mesh.shape[CONTEXT] if in_pieces else length
    return tiles_for(head_width, length, max_block, jnp.dtype(dtype).itemsize)


@jax.named_scope("attention")
def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m w"],
    mask: MaskSpec,
    backend: Backend,
    scoring: Scoring = DEFAULT_SCORING,
    plan: Plan | None = None,
    max_block: int = MAX_BLOCK,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n w"]:
    """Compute self-attention of `n` query heads over `m` key-value heads (n a multiple of m).

    A query that may attend nothing gets 0. plan: that of `plan_attention` for the same dtype and
    `max_block`, else it is made here. `flash` runs as a kernel on GPUs, on Hopper as one of its
    own, and interpreted elsewhere, with values padded to the width of keys, which they do not exceed. Where keys
    arrive over the context axis, `dense` is `blockwise`.
    sinks: a score of each head that takes part in the softmax, and has no value.
    Raises ValueError for an unknown backend, and where m does not divide n.
    """
    if backend not in get_args(Backend):
        raise ValueError(
            f"unknown attention backend {backend!r}; known: {', '.join(get_args(Backend))}"
        )
    heads = q.shape[2], k.shape[2]
    if heads[0] % heads[1]:
        raise ValueError(f"{heads[0]} query heads are no multiple of {heads[1]} key-value heads")
    form = _context_form(q.shape[1], heads)
    flash = chosen_backend(backend) == "flash"
    if flash and (extra := k.shape[3] - v.shape[3]):
        padded = jnp.pad(v, [(0, 0)] * 3 + [(0, extra)])
        out = attention(q, k, padded, mask, backend, scoring, plan, max_block, sinks)
        return out[..., :-extra]
    if plan is None and (flash or form == "gather"):
        plan = plan_attention(mask, backend, q.shape[3], heads, q.dtype, max_block)
    if flash:
        scale = scoring.scale or q.shape[3] ** -0.5
        tiles = _tiles(q.shape[3], q.shape[1], q.dtype, max_block, form == "gather")
        scores = Scores(scale, scoring.cap, tiles, interpret=not _on_gpu())
    # Five ways: keys arrive over the context axis; the kernel of windows, alone or in turns with one
    # by lists; the Hopper kernel; the Triton kernel; XLA operations. All but the first run on whole
    # rows, perhaps with part of the heads ("heads").
    of_heads = () if sinks is None else (sinks,)
    kernel = _flash_kernel(scores, plan) if flash else _blockwise_kernel(max_block, scoring)
    if form == "gather":
        return _per_device(partial(_attend_in_pieces, kernel), q, k, v, plan, *of_heads)
    if sinks is not None and backend != "dense":
        function = partial(_attend_with_sinks, kernel)
        tokens = plan if flash else mask
    elif isinstance(plan, WindowPlan):
        function = partial(window_attention, scale=scores.scale, interpret=scores.interpret)
        tokens = plan
    elif isinstance(plan, MixedPlan):
        function = partial(mixed_attention, scores=scores, kernel=_list_kernel(plan, q.dtype))
        tokens = plan
    elif isinstance(plan, TilePlan):
        # Mosaic GPU takes a second to load, and is not in every JAX.
        from mmjax.kernels.hopper_attention import hopper_attention

        function, tokens = partial(hopper_attention, scores=scores), plan
    elif flash:
        function, tokens = partial(flash_attention, scores=scores), plan
    elif chosen_backend(backend) == "blockwise":
        function, tokens = partial(_blockwise_rows, block=max_block, scoring=scoring), mask
    else:
        function, tokens = partial(_dense_rows, scoring=scoring), mask
        # Plain products over whole rows: the partitioner shards them by itself.
        if form is None:
            return function(q, k, v, tokens, *of_heads)
    function = partial(attend_by_heads, function) if form else function
    return _per_device(function, q, k, v, tokens, *of_heads)


def _attend_in_pieces(
    kernel: Kernel, q: Array, k: Array, v: Array, plan: ContextPlan, *sinks: Array
) -> Array:
    return attend_in_pieces(q, k, v, plan, kernel, *sinks)


def _attend_with_sinks(
    kernel: Kernel, q: Array, k: Array, v: Array, tokens: Any, sinks: Array
) -> Array:
    """Attend to whole rows, with a score of each head that has no value; tokens: what the kernel takes."""
    return attend_in_pieces(q, k, v, ContextPlan((tokens,)), kernel, sinks)


def _list_kernel(plan: MixedPlan, dtype: jnp.dtype) -> ListKernel:
    """Return the kernel that the plan of layers without windows is for."""
    if isinstance(plan.full, TilePlan):
        from mmjax.kernels.hopper_attention import hopper_forward, hopper_gradients

        return ListKernel(hopper_forward, hopper_gradients)
    return ListKernel(partial(flash_forward, dtype=dtype), partial(flash_gradients, dtype=dtype))


def _context_form(length: int, heads: tuple[int, int]) -> ContextAttention | None:
    """Choose how rows of this length attend over the context axis; None where each device has whole rows."""
    current = active()
    if current is None or CONTEXT not in current.rules.length:
        return None
    context = current.mesh.shape[CONTEXT]
    tensor = current.mesh.shape["tensor"]
    if context == 1 or length % context:
        return None
    return context_form(current.rules.context_attention, heads, context, tensor)


def _per_device(
    function: Callable[..., Array], q: Array, k: Array, v: Array, tokens: Any, *sinks: Array
) -> Array:
    """Call `function(q, k, v, tokens, *sinks)` on each device with its rows, heads and tokens.

    tokens: arrays `[rows, ...]` of all tokens, or a ContextPlan. sinks: a score of each head. SPMD
    would give each device the blocks that any device must visit, and it cannot partition a kernel.
    """
    current = active()
    if current is None:
        return function(q, k, v, tokens, *sinks)

    # Heads of queries are cut only where those of keys are too, so that a group stays together; and
    # none where the devices that would share them have rows of their own.
    by_rows = not set(current.rules.rows).isdisjoint(current.rules.kv_heads)
    heads = "kv_heads" if not by_rows and active_spec(k, None, None, "kv_heads", None)[2] else None
    q_spec = active_spec(q, "rows", "length", heads, None)
    k_spec = active_spec(k, "rows", "length", heads, None)
    single = single_axes(current.mesh, q_spec)
    q_spec, k_spec = (PartitionSpec(x[0], x[1], x[2], single) for x in (q_spec, k_spec))
    if isinstance(tokens, ContextPlan):
        flash = isinstance(tokens.pieces[0], BlockPlan)
        stacked = tokens.index is not None
        ragged = tokens.needed is not None
        token_specs = plan_specs(current.mesh.shape[CONTEXT], q_spec[0], flash, ragged, stacked)
    else:
        token_specs = jax.tree.map(
            lambda x: active_spec(x, *("rows", *(None,) * x.ndim)[: x.ndim]), tokens
        )
    return jax.shard_map(
        function,
        mesh=current.mesh,
        in_specs=(q_spec, k_spec, k_spec, token_specs, *(PartitionSpec(q_spec[2]) for _ in sinks)),
        out_specs=q_spec,
        check_vma=False,
    )(q, k, v, tokens, *sinks)


def _blockwise_rows(
    q: Array, k: Array, v: Array, mask: MaskSpec, block: int, scoring: Scoring
) -> Array:
    """Apply `blockwise_attention` to one row after the other, each of which visits its own blocks alone."""
    return _by_row(
        lambda q, k, v, mask: blockwise_attention(q, k, v, mask, mask, block, scoring),
        q,
        k,
        v,
        mask,
    )


def _dense_rows(
    q: Array, k: Array, v: Array, mask: MaskSpec, *sinks: Array, scoring: Scoring
) -> Array:
    return dense_attention(q, k, v, mask, mask, scoring, *sinks)


def _by_row(function: Callable[..., Any], *arrays: Any) -> Any:
    """Call `function` on arrays `[B, ...]` one row at a time."""
    if len(arrays[0]) == 1:
        return function(*arrays)
    # [B, ...] -> [B, 1, ...]: the function sees batches of one row.
    rows = jax.tree.map(lambda x: x[:, None], arrays)
    return jax.tree.map(lambda x: x[:, 0], jax.lax.map(lambda row: function(*row), rows))


def _blockwise_kernel(block: int, scoring: Scoring) -> Kernel:
    """Make the kernel of pieces from XLA operations."""

    def forward(
        q: Array, k: Array, v: Array, local: MaskSpec, piece: MaskSpec
    ) -> tuple[Array, Array]:
        return _by_row(
            partial(blockwise_forward, block=block, scoring=scoring), q, k, v, local, piece
        )

    def gradients(
        q: Array, k: Array, v: Array, local: MaskSpec, piece: MaskSpec, *of_output: Array
    ) -> tuple[Array, Array, Array]:
        of_row = lambda q, k, v, local, piece, *of_output: blockwise_gradients(  # noqa: E731
            q, k, v, local, piece, block, scoring, *of_output
        )
        return _by_row(of_row, q, k, v, local, piece, *of_output)

    return Kernel(forward, gradients, jnp.exp, jnp.log)


def _flash_kernel(scores: Scores, plan: Plan) -> Kernel:
    """Make the kernel of pieces from the GPU's, that for Hopper where the plan is for it."""
    if isinstance(plan, TilePlan):
        from mmjax.kernels.hopper_attention import hopper_forward, hopper_gradients

        def on_hopper(kernel: Callable[..., Any], *arrays: Any) -> Any:
            q, k, v, local, _, *of_output = arrays
            return kernel(q, k, v, select_mask(local), scores, *of_output)

        forward, gradients = (partial(on_hopper, x) for x in (hopper_forward, hopper_gradients))
        return Kernel(forward, gradients, jnp.exp2, jnp.log2)

    def forward(
        q: Array, k: Array, v: Array, local: BlockPlan, piece: BlockPlan
    ) -> tuple[Array, Array]:
        return flash_forward(q, k, v, piece, scores)

    def gradients(
        q: Array, k: Array, v: Array, local: BlockPlan, piece: BlockPlan, *of_output: Array
    ) -> tuple[Array, Array, Array]:
        return flash_gradients(q, k, v, piece, scores, *of_output)

    return Kernel(forward, gradients, jnp.exp2, jnp.log2)
