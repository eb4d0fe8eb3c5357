"""Time of a pipeline's stages on a cluster: passes of a microbatch, transfers, and what follows a step's last pass.

A stage is charged as one mesh is (`planning.step_time`): products, attention, launches, the bytes of activations and
weights, and collectives. Gathering shards hides behind a pass as far as that lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmjax.config import ModelConfig, Muon, OptimizerConfig, Remat, UnetConfig
from mmjax.config.generators import Tower
from mmjax.planning.flops import attention_flops, frozen_modules, runs_twice, stage_flops
from mmjax.planning.memory import MASTER, DeviceBatch
from mmjax.planning.step_time import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    PASSES,
    ClusterRun,
    adapter_seconds,
    collective_seconds,
    context_seconds,
    dispatch_seconds,
    elementwise_update_seconds,
    exchange_seconds,
    muon_seconds,
    recomputed_reduces,
    tensor_seconds,
)
from mmjax.planning.unet import unet_blocks
from mmjax.planning.work import connector_mlps, row_work


@dataclass(frozen=True)
class StageRun:
    """Some layers of a tower on the devices of a cluster. Bytes are those of one device."""

    tower: str
    layers: range
    policies: tuple[Remat, ...]  # of its layers
    devices: range
    machine: ClusterRun  # with the stage's own mesh
    trainable: float  # parameters in float32
    frozen: float  # parameters in the precision of the computation, or quantised
    moments: float
    has_backward: bool
    unsaved: float  # bytes that one position of a layer saves without remat, before tensor parallelism
    experts: float = 0.0  # of trainable and frozen, those of experts
    copies: int = 1  # of the layers, each on as many devices

    @property
    def ranks(self) -> int:
        """Count the ranks over which its rows lie; those of the LLM may be spread over several devices each."""
        return self.shards // (self.machine.mesh["context"] if self.tower == "llm" else 1)

    @property
    def parts(self) -> int:
        """Count the tensor-parallel parts of its layers."""
        return self.machine.sharding.parts(self.tower)

    @property
    def gathered(self) -> int:
        """Count the devices over which its parameters are gathered: where `tensor` divides rows, over that too."""
        return self.machine.parameter_shards * self.machine.mesh["tensor"] // self.parts

    @property
    def shards(self) -> int:
        """Count the parts into which its positions are divided."""
        return self.machine.mesh["data"] * self.gathered

    def config(self, model: ModelConfig) -> Tower | UnetConfig:
        """Return the tower's config."""
        return {"llm": model.llm, **model.item_modules}[self.tower]


def pass_seconds(model: ModelConfig, stage: StageRun, batch: DeviceBatch) -> tuple[float, float]:
    """Estimate the seconds of a microbatch's forward and backward pass. batch: on each device."""
    machine = stage.machine
    config = stage.config(model)
    rates, parts = machine.speed.rates, stage.parts
    work = row_work(model, batch.shape, batch.pairs)[stage.tower]
    unet = isinstance(config, UnetConfig)
    measured = machine.speed.layer(stage.tower, batch.shape[stage.tower])
    # Layers that were timed are taken out of the operations, and their times added.
    counted = () if measured else stage.policies
    flops = stage_flops(
        model, stage.tower, stage.layers, counted, batch.shape, machine.loss_chunks, batch.pairs, machine.reference
    )
    attention = 0.0
    if config.attention in ("flash", "auto"):
        # One forward pass of it; of a UNet, its share of all.
        share = flops.forward / (flops.total or 1.0)
        attention = len(counted) * attention_flops(model, stage.tower, work) if not unet else share * flops.attention
    forward = rates.seconds(flops.forward, attention, flops.float8_forward) / parts
    backward = rates.seconds(flops.backward, max(0.0, flops.attention - attention), flops.float8_backward) / parts
    if measured:
        forward += len(stage.policies) * measured["forward"] / parts
        backward += sum(measured[policy] - measured["forward"] for policy in stage.policies) / parts
    # Written in forward; read in backward, with gradients of the same size.
    activations = len(counted) * work.positions * stage.unsaved / parts / rates.memory
    of_tower = 1 if unet else config.layers
    adapters = [len(counted) / of_tower / parts * s for s in adapter_seconds(model, stage.tower, work, machine)]
    kernels = len(unet_blocks(config)) if unet else len(counted)
    # Weights are cast for both passes; in backward, gradients of the computation's precision are added to float32 sums.
    # Measured layers were timed with their casts and with writing their gradients.
    elements = stage.trainable / MASTER / rates.memory
    cast = 0 if machine.activation == MASTER or measured else MASTER + machine.activation
    written = 0 if measured else machine.activation
    forward += kernels * FORWARD_KERNELS * rates.launch + activations + adapters[0] + cast * elements
    backward += kernels * BACKWARD_KERNELS * rates.launch + (PASSES - 1) * activations + adapters[1]
    backward += (cast + written + machine.activation + 2 * MASTER) * elements
    # Both passes gather the parameters; backward scatters gradients.
    trained = machine.activation / MASTER * stage.trainable
    is_frozen = "llm" in frozen_modules(model)
    experts = stage.experts if is_frozen else machine.activation / MASTER * stage.experts
    gathered = _gather_seconds(stage, trained + stage.frozen, experts)
    scattered = _gather_seconds(stage, trained, 0.0 if is_frozen else experts)
    exchange = 0.0
    if stage.tower == "llm":
        # The first ranks send encoders' tokens on to those whose rows they are in; the last ones hidden states.
        first, last = stage.layers.start == 0, stage.layers.stop == config.layers
        widths = {name: n for name, n in batch.widths.items() if (last if name in model.generators else first)}
        exchange = exchange_seconds(model, replace(batch, widths=widths), machine) if widths or first else 0.0
    late = context_seconds(model.llm, batch, machine) if stage.tower == "llm" else (0.0, 0.0)
    between = (0.0, 0.0) if unet else tensor_seconds(config, work.positions, parts, machine)
    dispatch = [0.0, 0.0]
    if stage.tower == "llm":
        in_layers = sum(model.llm.expert_layers[stage.layers.start : stage.layers.stop])
        dispatch = [in_layers * seconds for seconds in dispatch_seconds(model.llm, work, machine)]
    layers = len(stage.policies)
    forward = max(forward, gathered) + layers * (between[0] + late[0]) + exchange + dispatch[0]
    if not stage.has_backward:
        return forward, 0.0
    waits = layers * (between[1] + late[1]) + recomputed_reduces(stage.policies) * between[0]
    waits += stage.policies.count("full") * late[0]
    return forward, max(backward, gathered + scattered) + waits + exchange + dispatch[1]


def _gather_seconds(stage: StageRun, size: float, experts: float) -> float:
    """Estimate the seconds to gather or scatter parameters of `size` bytes on a device, `experts` of them of experts.

    Those are not gathered along `expert`, which has others on each device.
    """
    cluster, devices = stage.machine.cluster, stage.machine.sharding.experts
    everywhere = collective_seconds(stage.gathered * (size - experts), stage.gathered, stage.parts, cluster)
    shards = stage.gathered // devices
    return everywhere + collective_seconds(shards * experts, shards, stage.parts * devices, cluster)


def edge_seconds(model: ModelConfig, sender: StageRun, receiver: StageRun, batch: DeviceBatch) -> float:
    """Estimate the seconds in which a microbatch's activations go to the next stage, or their gradients come back.

    batch: on each device of the sender. Every device of a tensor-parallel group takes its rows whole; those of the
    sender's groups share the sending.
    """
    work = row_work(model, batch.shape)[sender.tower]
    if sender.tower == receiver.tower:
        numbers = work.positions * sender.config(model).width
    else:
        # A generator takes the hidden states of its tokens.
        token_work = row_work(model, batch.shape)[receiver.tower] if sender.tower == "llm" else work
        numbers = token_work.tokens * connector_mlps(sender.config(model)) * model.llm.width
    if sender.machine.reference and runs_twice(sender.tower, model):
        numbers *= 1.5  # activations go twice, and gradients come back once
    total = numbers * sender.machine.activation * sender.shards
    largest = max(total / receiver.shards, total * receiver.parts / len(sender.devices))
    cluster = sender.machine.cluster
    nodes = {device // cluster.per_node for device in (*sender.devices, *receiver.devices)}
    return largest / (cluster.device.link_rate if len(nodes) == 1 else cluster.device.network_rate)


def reduce_seconds(stage: StageRun) -> float:
    """Estimate the seconds in which the ranks of `data` add up a step's float32 gradients: an all-reduce.

    Copies of a stage have another one for their gradients, and one for the updated values.
    """
    mesh = stage.machine.mesh
    cluster = stage.machine.cluster
    stride = stage.machine.parameter_shards * mesh["tensor"]
    between_copies = collective_seconds(2 * 2 * stage.trainable, stage.copies, len(stage.devices), cluster)
    return collective_seconds(2 * stage.trainable, mesh["data"], stride, cluster) + between_copies


def update_seconds(model: ModelConfig, stage: StageRun, optimizer: OptimizerConfig) -> float:
    """Estimate the seconds of a stage's update, Muon's gathers included."""
    seconds = elementwise_update_seconds(stage.trainable, stage.moments, optimizer, stage.machine)
    unet = isinstance(stage.config(model), UnetConfig)
    if isinstance(optimizer, Muon) and not unet and stage.tower not in frozen_modules(model):
        seconds += muon_seconds(model, len(stage.layers), stage.tower, stage.machine)
    return seconds
