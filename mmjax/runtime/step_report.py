"""Report an update, the same on every process, and decide whether a step may update at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmjax.config import ModelConfig
from mmjax.errors import UserError
from mmjax.losses.step_losses import Losses
from mmjax.runtime.device_batch import ProcessReport


class StepReport(NamedTuple):
    """Report one update, the same on every process."""

    losses: Losses
    gradient_norm: jax.Array  # float32 []: before clipping
    # bool []: every process had planned the same step; where not, nothing was updated
    agreed: jax.Array
    finite: jax.Array  # bool []: loss and gradient are; where not, nothing was updated
    stop: jax.Array  # bool []: some process requests a stop
    content: jax.Array  # uint32 [2]: the hash of all rows, its lower half first
    needed_flops: jax.Array  # float32 []: of all processes' rows
    batch_seconds: jax.Array  # float32 [devices]: of each device's process
    # int32 [MAX_UNREADABLE]: ids of the samples that some process could not read, -1 = none
    unreadable: jax.Array
    # int32 []: where it is more than MAX_UNREADABLE nothing was updated
    unreadable_count: jax.Array

    @property
    def mean_loss(self) -> float:
        """Return the mean loss over tokens by weight, 0 where there are none; of a report on the host."""
        return float(self.losses.loss.sum() / (self.losses.weight.sum() or 1.0))


def check_updated(step: int, report: StepReport) -> None:
    """Raise UserError where a step has updated nothing: its batch differs by process, or has no loss weight."""
    if not report.agreed:
        raise UserError(
            f"the processes planned different batches for step {step + 1}, so nothing was updated: they do not see "
            "the same data, config or version of mmjax; make them the same and go on with --resume",
            everywhere=True,
        )
    losses = report.losses
    if not losses.weight.sum() > 0 and not any(
        patches > 0 for _, patches in losses.images.values()
    ):
        raise UserError(
            f"no token of step {step + 1} has a loss weight, so there is nothing to learn from; give the answers "
            "in its samples a weight above 0 (Text.weights)",
            everywhere=True,
        )


def loss_weights(
    model: ModelConfig, llm: Any, patches: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the divisors of a step's losses: the LLM's weight, and generators' patches (default: as many)."""
    return {"llm": llm} | {
        name: llm if patches is None else patches[name] for name in model.towers_behind("llm")
    }


def report_step(
    losses: Losses, norm: jax.Array, reports: ProcessReport, unreadable: tuple[jax.Array, jax.Array]
) -> StepReport:
    """Build the report of a step from its losses, the gradient norm and all processes' reports."""
    digests = reports.digest
    return StepReport(
        losses=losses,
        gradient_norm=norm,
        agreed=jnp.all(digests.min(0) == digests.max(0)),
        finite=jnp.isfinite(norm) & jnp.isfinite(losses.loss).all(),
        stop=reports.stop.any(),
        content=reports.content.sum(0, dtype=jnp.uint32),
        needed_flops=reports.needed_flops.sum(),
        batch_seconds=reports.batch_seconds,
        unreadable=unreadable[0],
        unreadable_count=unreadable[1],
    )


def is_valid(report: StepReport, weight: jax.Array) -> jax.Array:
    """Return whether a step may update the parameters. weight: of its losses."""
    return report.agreed & (weight > 0) & report.finite
