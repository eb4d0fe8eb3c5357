"""Settle a step of stages on several meshes: one report, the same on all devices, and whether every stage may update.

Each stage has the gradients of its own parameters and some the losses. What their devices have
becomes one array of all devices by shards that lie there already, and one small program sums it up:

    device     0   1   2   3
    squares    a   a   b   b     of the gradients of two stages, each replicated on two devices
    counted    1   0   1   0     so that norm = sqrt(a + b)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.losses.step_losses import Losses
from mmjax.models.layer_stacks import Params
from mmjax.parallel.sharding import AXES, replicated
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.passes import Gradients, Passes, PlacedStage, StagedBatch
from mmjax.runtime.shared import add_on_mesh
from mmjax.runtime.state import Hyperparameters, Optimizer
from mmjax.runtime.step_report import StepReport, is_valid, report_step

UnreadableSamples = tuple[jax.Array, jax.Array]  # ids and number


class WeighedBatches(NamedTuple):
    """A step's microbatches on the devices, with weight 0 where a sample is unreadable, and what its report needs."""

    batches: list[StagedBatch]
    # of the LLM's tokens, and by name of generators' patches, on the stage of the loss
    weights: dict[str, jax.Array]
    reports: ProcessReport  # of all processes
    unreadable: UnreadableSamples  # of any process


class StepSettlement:
    """The program that settles steps. `loss_devices`: the number of a device of each stage that makes losses."""

    def __init__(
        self,
        stages: Sequence[PlacedStage],
        passes: Passes,
        mesh: Mesh,
        meet: Callable[[Any], Any],
        optimizer: Optimizer,
    ) -> None:
        """mesh: of all devices. meet: waits for arrays, and for all processes."""
        self._passes = passes
        self._mesh = mesh
        self._meet = meet
        self._meshes = [placed.mesh for placed in stages]
        self._per_device = NamedSharding(mesh, PartitionSpec(AXES))
        numbers = {device: number for number, device in enumerate(mesh.devices.flat)}
        self.loss_devices = {
            n: numbers[placed.mesh.devices.flat[0]]
            for n, placed in enumerate(stages)
            if placed.stage.losses
        }
        # What is replicated on a mesh counts once, by its first device.
        firsts = {mesh.devices.flat[0] for mesh in self._meshes}
        self._counts = np.array([device in firsts for device in numbers], np.float32)
        self._squares = [
            jax.jit(partial(_square_norm, optimizer), out_shardings=replicated(mesh))
            for mesh in self._meshes
        ]
        self._settle = jax.jit(self._settle_step, out_shardings=replicated(mesh))

    def __call__(
        self, gradients: Gradients, weighed: WeighedBatches, hyper: Hyperparameters
    ) -> tuple[StepReport, jax.Array]:
        """Report a step to all devices, and whether it may update."""
        passes = self._passes
        # Squares of the stages that share a mesh are added up on it. A stage that another process
        # has counts there.
        squares: dict[Mesh, jax.Array] = {}
        for mesh, local, square, sums in zip(
            self._meshes, passes.local, self._squares, gradients.sums, strict=True
        ):
            if not local:
                continue
            norm = square(sums.gradients, hyper)
            squares[mesh] = (
                add_on_mesh(squares[mesh], norm) if mesh in squares else passes.wait(norm)
            )
        norms = self._on_all_devices(
            list(squares.values()), jax.ShapeDtypeStruct((1,), jnp.float32)
        )
        losses = {}
        for number in self.loss_devices:
            parts = (gradients.sums[number].losses,) if passes.local[number] else ()
            losses[number] = jax.tree.map(
                lambda s, *x: self._on_all_devices([y.reshape(-1) for y in x], s),
                passes.programs[number].sums.losses,
                *parts,
            )
        norms, losses = self._meet((norms, losses))
        return passes.wait(self._settle(norms, losses, weighed.reports, weighed.unreadable))

    def _on_all_devices(self, parts: list[jax.Array], struct: jax.ShapeDtypeStruct) -> jax.Array:
        """Join arrays `[n]`, each replicated on some of the devices, to `[devices * n]`, with zeros on the others.

        struct: of n numbers.
        """
        shards = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
        zeros = np.zeros(struct.size, struct.dtype)
        local = [
            shards[d] if d in shards else jax.device_put(zeros, d) for d in self._mesh.local_devices
        ]
        return jax.make_array_from_single_device_arrays(
            (self._mesh.size * len(zeros),), self._per_device, local
        )

    def _settle_step(
        self,
        norms: jax.Array,
        losses: dict[int, Losses],
        reports: ProcessReport,
        unreadable: UnreadableSamples,
    ) -> tuple[StepReport, jax.Array]:
        """Report the step, and whether it may update. norms: squares `[devices]`; losses: `[devices * n]` each."""
        norm = jnp.sqrt(jnp.sum(norms * self._counts))
        total = Losses()
        images: dict[str, jax.Array] = {}
        for number, device in self.loss_devices.items():
            # Only the devices of the stage that makes them have the losses.
            part = jax.tree.map(
                lambda x, struct, device=device: x.reshape(self._mesh.size, -1)[device].reshape(
                    struct.shape
                ),
                losses[number],
                self._passes.programs[number].sums.losses,
            )
            images |= part.images
            total = part if part.loss is not None else total
        report = report_step(total._replace(images=images), norm, reports, unreadable)
        patches = sum(count for _, count in images.values())
        return report, is_valid(report, total.weight.sum() + patches)


def _square_norm(optimizer: Optimizer, sums: Params, hyper: Hyperparameters) -> jax.Array:
    """Compute the sum of squares of all gradients of parameters that this step trains, float32 `[1]`."""
    gradients = jax.tree.leaves(optimizer.mask_frozen(sums, hyper))
    return sum((jnp.sum(jnp.square(x)) for x in gradients), jnp.float32(0)).reshape(1)
