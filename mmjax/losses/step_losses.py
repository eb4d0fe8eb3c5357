"""Sum token losses by data source and find the samples with the highest losses, inside the step.

A sample's loss is the mean over its tokens, which stand side by side in one row, so that nothing is
computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import DecoderConfig, ExpertsConfig, ModelConfig
from mmjax.models.expert_routing import Routing, balance_loss, z_loss
from mmjax.models.sample_totals import ends_sample
from mmjax.parallel.sharding import CONTEXT, active

MAX_WORST = 32  # samples of a step whose losses are reported


class ExpertSums(NamedTuple):
    """Router statistics of a step's mixtures of experts, summed over its microbatches."""

    tokens: jax.Array  # float32 [layers, experts]: that each expert got, in each layer that has any
    balance: jax.Array  # float32 []: mean of the microbatches' balance losses by their loss weight
    z: jax.Array  # float32 []: the same of the router's z losses
    # float32 []: in which tokens went to the devices of their experts, beyond one a layer
    extra_turns: jax.Array


class Losses(NamedTuple):
    """The losses of a step's microbatches; of a stage, those that it makes."""

    # float32 [sources]: weighted sum over each source's tokens; None: no LLM's loss
    loss: jax.Array | None = None
    weight: jax.Array | None = None  # float32 [sources]: sum of the loss weights
    # int32 [MAX_WORST]: ids with the highest losses, in descending order
    worst_samples: jax.Array | None = None
    # float32 [MAX_WORST]: theirs; 0 = no sample, Inf = not finite
    worst_losses: jax.Array | None = None
    not_finite: jax.Array | None = None  # int32 []: number of samples whose loss is not finite
    experts: ExpertSums | None = None
    images: Mapping[str, jax.Array] = {}  # float32 [2] by generator: sum of errors, patches
    # float32 [] by name: sums over tokens of what the loss measures
    measures: Mapping[str, jax.Array] = {}


def zero_losses(
    model: ModelConfig, towers: Sequence[str], sources: int, measures: Sequence[str]
) -> Losses | None:
    """Make zeros to add the losses of these towers to; None where there are none."""
    if not towers:
        return None
    images = {name: jnp.zeros(2) for name in towers if name != "llm"}
    if "llm" not in towers:
        return Losses(images=images)
    return Losses(
        loss=jnp.zeros(sources),
        weight=jnp.zeros(sources),
        worst_samples=jnp.zeros(MAX_WORST, jnp.int32),
        worst_losses=jnp.zeros(MAX_WORST),
        not_finite=jnp.zeros((), jnp.int32),
        experts=_zero_expert_sums(model.llm),
        images=images,
        measures={name: jnp.zeros(()) for name in measures},
    )


def _zero_expert_sums(config: DecoderConfig) -> ExpertSums | None:
    if config.experts is None:
        return None
    tokens = jnp.zeros((sum(config.expert_layers), config.experts.count))
    zero = jnp.zeros(())
    return ExpertSums(tokens=tokens, balance=zero, z=zero, extra_turns=zero)


def add_losses(total: Losses | None, part: Losses | None) -> Losses | None:
    """Add a microbatch's losses."""
    if total is None:
        return None
    worst: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if total.loss is not None:
        samples = jnp.concatenate([total.worst_samples, part.worst_samples])
        worst = highest_losses(samples, jnp.concatenate([total.worst_losses, part.worst_losses]))
    samples_of = {"worst_samples": None, "worst_losses": None}
    added = jax.tree.map(jnp.add, total._replace(**samples_of), part._replace(**samples_of))
    return added._replace(worst_samples=worst[0], worst_losses=worst[1])


def expert_sums(routing: Routing | None, share: jax.Array) -> ExpertSums | None:
    """Compute a microbatch's part of a step's sums; None where there are no experts. share: of the step's loss weight.

    The balance loss is of all tokens of a microbatch, wherever they lie: a product of sums over its
    tokens.
    """
    if routing is None:
        return None
    return ExpertSums(
        tokens=routing.tokens,
        balance=share * balance_loss(routing),
        z=share * z_loss(routing),
        extra_turns=jnp.maximum(routing.turns - 1, 0).sum(),
    )


def expert_loss(sums: ExpertSums | None, config: ExpertsConfig | None) -> jax.Array | float:
    """Compute the auxiliary losses of experts, as weighted in the training loss."""
    return 0.0 if sums is None else config.balance_loss * sums.balance + config.z_loss * sums.z


def sum_by_source(losses: jax.Array, text: TextBatch, sources: int) -> tuple[jax.Array, jax.Array]:
    """Sum losses and weights of tokens by source, float32 `[sources]`."""
    # A product with one-hot vectors [R, T, sources] rather than a scatter, whose order of additions
    # is not fixed on GPUs.
    one_hot = (text.source[..., None] == jnp.arange(sources)).astype(jnp.float32)
    by_source = jnp.einsum("rt,rts->s", losses, one_hot)
    return by_source, jnp.einsum("rt,rts->s", text.weight, one_hot)


def image_loss(
    errors: Mapping[str, jax.Array],
    items: Mapping[str, ItemBatch],
    totals: Mapping[str, jax.Array],
    model: ModelConfig,
) -> tuple[jax.Array | float, dict[str, jax.Array]]:
    """Compute a microbatch's part of the generators' loss.

    Each generator's is the mean error over the patches of the whole step, times its weight. Also
    returns the sums of errors and the number of patches by generator, float32 `[2]`. totals:
    patches of the whole step.
    """
    loss: jax.Array | float = 0.0
    sums = image_sums(errors, items)
    for name, (total, _) in sums.items():
        loss += model.towers[name].flow.weight * total / jnp.maximum(totals[name], 1)
    return loss, sums


def image_sums(
    errors: Mapping[str, jax.Array], items: Mapping[str, ItemBatch]
) -> dict[str, jax.Array]:
    """Sum the errors of every generator's patches and count these, float32 `[2]`."""
    return {
        name: jnp.stack([error.sum(), (items[name].item >= 0).sum(dtype=jnp.float32)])
        for name, error in errors.items()
    }


def worst_samples(losses: jax.Array, text: TextBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the samples of a microbatch with the highest losses, by its tokens' weighted losses `[R, T]`.

    Returns ids int32 `[MAX_WORST]` in the length index and losses float32 `[MAX_WORST]`, as
    `highest_losses`, and the number of samples whose loss is not finite, int32 `[]`. A sample's
    loss is the mean over its weighted tokens, Inf where it is not finite.
    """
    # Each rank names the worst of its own rows, and only these are compared over the ranks: the
    # same for any mesh, since of equal losses the first counts both times.
    rows = (losses, text.weight, text.sample, text.owner)
    current = active()
    if current is None:
        return _worst_of_rows(*rows)
    over = PartitionSpec(current.rules.rows)
    if current.mesh.shape[CONTEXT] > 1:
        # These few numbers of a token are gathered, and samples put together again.
        rows = (*rows, text.pos)

    def worst_of_rank(*rows: jax.Array) -> tuple[jax.Array, ...]:
        if rows[4:]:
            order = jnp.argsort(rows[4], axis=1)
            rows = [jnp.take_along_axis(x, order, axis=1) for x in rows[:4]]
        return jax.tree.map(lambda x: x[None], _worst_of_rows(*rows))

    run_on_ranks = jax.shard_map(
        worst_of_rank, mesh=current.mesh, in_specs=over, out_specs=over, check_vma=False
    )
    ids, means, not_finite = run_on_ranks(*rows)
    return *highest_losses(ids.reshape(-1), means.reshape(-1)), not_finite.sum(dtype=jnp.int32)


def _worst_of_rows(
    losses: jax.Array, weights: jax.Array, sample: jax.Array, owner: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the worst samples of rows. sample: numbers in the row, owner: ids in the length index; all `[R, T]`."""
    # Only at a sample's last token are the running sums the sample's: the others count as 0, which
    # `highest_losses` leaves out.
    loss, weight = _running_sums(losses, weights, sample)
    counts = ends_sample(sample) & (sample >= 0) & (weight > 0)
    mean = jnp.where(counts, loss / weight, 0.0)
    mean = jnp.where(jnp.isfinite(mean), mean, jnp.inf)
    return *highest_losses(owner.reshape(-1), mean.reshape(-1)), (mean == jnp.inf).sum(
        dtype=jnp.int32
    )


def highest_losses(ids: jax.Array, losses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Select the `MAX_WORST` highest losses with their ids, in descending order; zeros where there are fewer."""
    missing = max(0, MAX_WORST - len(losses))
    losses, order = jax.lax.top_k(jnp.pad(losses, (0, missing)), MAX_WORST)
    return jnp.where(losses > 0, jnp.pad(ids, (0, missing))[order], 0), losses


def _running_sums(
    losses: jax.Array, weights: jax.Array, sample: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add up from each sample's first token to every position `[R, T]`: at its last, the sums are the sample's."""
    # A scan, by which NaN does not pass from one sample to the next.
    begins = jnp.concatenate(
        [jnp.ones_like(sample[:, :1], bool), sample[:, 1:] != sample[:, :-1]], axis=1
    )

    def combine(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # (begins, loss, weight) of a stretch of tokens and of the next: where the next one begins a
        # sample, what was summed before it is dropped.
        return a[0] | b[0], *(jnp.where(b[0], y, x + y) for x, y in zip(a[1:], b[1:], strict=True))

    _, loss, weight = jax.lax.associative_scan(combine, (begins, losses, weights), axis=1)
    return loss, weight
