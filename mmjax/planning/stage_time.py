"""Time of a run's stages on a cluster: passes of a microbatch by cause, transfers, and what follows the last pass.

Charged are products, attention, launches, the bytes of activations and weights, and collectives.
Gathering shards hides behind a pass as far as that lasts. One mesh is one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from mmjax.config import ModelConfig, OptimizerConfig, Remat, Tower, UnetConfig
from mmjax.config.model import (
    adapted_modules,
    adapters_by_layer,
    frozen_modules,
    layer_count,
    linear_layers,
    module_of_layer,
    stacked_towers,
)
from mmjax.cost.table import module_parameters
from mmjax.planning.exchange_time import (
    ClusterRun,
    all_to_all_seconds,
    collective_seconds,
    context_seconds,
    dispatch_seconds,
    exchange_seconds,
    recomputed_attention,
    recomputed_reduces,
    tensor_seconds,
)
from mmjax.planning.flops import Flops, attention_flops, runs_twice, stage_flops
from mmjax.planning.memory import MASTER, DeviceBatch
from mmjax.planning.unet import unet_blocks
from mmjax.planning.work import Work, connector_mlps, layer_sizes, row_work

PASSES = 3  # over activations: written in forward, read in backward, and gradients of the same size
# That a layer launches, as compiled for H100 without remat: 56 to 60 and 62 to 74.
FORWARD_KERNELS, BACKWARD_KERNELS = 58, 72
MUON_ITERATIONS = 5  # of Newton-Schulz
# Over an adapter's input and output, in forward and backward; its products are too narrow to hide
# that. Forward reads the input for `a`, writes what `b` returns, and adds it to the layer's output.
# Backward scales the output's gradient, reads it for the gradients of `b` and of `a`'s output,
# reads the input for the gradient of `a`, and adds the input's gradient to the layer's.
ADAPTER_PASSES = ((1, 4), (5, 4))


class PassTime(NamedTuple):
    """Seconds of a pass by cause, which add up to it."""

    compute: float = 0.0
    recompute: float = 0.0  # beyond saving everything; measured, it may be below 0
    # gathering parameters and scattering gradients, beyond what computing hides
    shards: float = 0.0
    tensor: float = 0.0  # what tensor-parallel devices exchange with nothing computed beside it
    exchange: float = 0.0  # of encoder tokens, and of the tokens that go to experts
    # of context parallelism: keys and values that arrive later than the kernel asks, or heads
    context: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the pass."""
        return sum(self)


@dataclass(frozen=True)
class StageRun:
    """Layers of a tower on the devices of a cluster. Bytes are those of one device."""

    tower: str
    layers: range
    policies: tuple[Remat, ...]  # of its layers
    devices: range
    machine: ClusterRun  # with the stage's own mesh
    trainable: float  # parameters in float32
    frozen: float  # parameters in the precision of the computation, or quantised
    moments: float
    has_backward: bool
    # bytes that one position of a layer saves without remat, before tensor parallelism
    unsaved: float
    experts: float = 0.0  # of trainable and frozen, those of experts
    copies: int = 1  # of the layers, each on as many devices
    logits_again: bool = False  # whether backward makes the loss's logits again
    # whether it is of the run's only stage, whose gradients every microbatch adds over `data`
    only_stage: bool = False

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
        return model.towers[self.tower]


def pass_times(
    model: ModelConfig,
    stage: StageRun,
    batch: DeviceBatch,
    computed: tuple[float, float] | None = None,
) -> tuple[PassTime, PassTime]:
    """Estimate the time of a microbatch's forward and backward pass.

    batch: on each device. computed: seconds that both passes compute, recomputation among them,
    where they were measured.
    """
    machine = stage.machine
    config = stage.config(model)
    work = row_work(model, batch.shape, batch.pairs)[stage.tower]
    layers = len(stage.policies)
    compute, recompute = (
        (computed, 0.0) if computed else _compute_seconds(model, stage, batch, work)
    )
    # Both passes gather the parameters; backward scatters gradients.
    trained = machine.activation / MASTER * stage.trainable
    is_frozen = "llm" in frozen_modules(model)
    experts = stage.experts if is_frozen else machine.activation / MASTER * stage.experts
    # An encoder that encodes once runs before the step, where its weights are whole.
    read = 0.0 if config.encode == "once" else stage.frozen
    gathered = _gather_seconds(stage, trained + read, experts)
    scattered = _gather_seconds(stage, trained, 0.0 if is_frozen else experts)
    if stage.only_stage:
        scattered += _add_over_data_seconds(stage)
    tensor, context, exchanges = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
    if config.is_stack:
        tensor = tensor_seconds(config, work.positions, stage.parts, machine)
    if stage.tower == "llm":
        # The first ranks send encoders' tokens on to those whose rows they are in; the last ones
        # hidden states.
        first = stage.layers.start == 0
        last = stage.layers.stop == config.layers
        widths = {
            name: n
            for name, n in batch.widths.items()
            if (last if name in model.towers_behind("llm") else first)
        }
        exchange = (
            exchange_seconds(model, replace(batch, widths=widths), machine)
            if widths or first
            else 0.0
        )
        dispatched = sum(model.llm.expert_layers[stage.layers.start : stage.layers.stop])
        exchanges = tuple(
            exchange + dispatched * of_layer
            for of_layer in dispatch_seconds(model.llm, work, machine)
        )
        context = context_seconds(model.llm, batch, machine)
    forward = PassTime(
        compute=compute[0],
        shards=max(0.0, gathered - compute[0]),
        tensor=layers * tensor[0],
        exchange=exchanges[0],
        context=layers * context[0],
    )
    if not stage.has_backward:
        return forward, PassTime()
    backward = PassTime(
        compute=compute[1],
        recompute=recompute,
        shards=max(0.0, gathered + scattered - compute[1] - recompute),
        tensor=layers * tensor[1] + recomputed_reduces(stage.policies) * tensor[0],
        exchange=exchanges[1],
        context=layers * context[1] + recomputed_attention(stage.policies) * context[0],
    )
    return forward, backward


def _compute_seconds(
    model: ModelConfig, stage: StageRun, batch: DeviceBatch, work: Work
) -> tuple[tuple[float, float], float]:
    """Estimate the seconds of computation and its memory traffic: both passes, and recomputation."""
    machine = stage.machine
    config = stage.config(model)
    rates = machine.speed.rates
    parts = stage.parts
    is_stack = config.is_stack
    measured = machine.speed.layer(stage.tower, batch.shape[stage.tower])
    if config.encode == "once":  # no layer runs in the step
        measured = None
    # Layers that were timed are taken out of the operations, and their times added.
    counted = () if measured else stage.policies
    saved = ("none",) * len(counted) if is_stack else stage.policies
    flops = stage_flops(
        model,
        stage.tower,
        stage.layers,
        saved,
        batch.shape,
        pairs=batch.pairs,
        reference=machine.reference,
    )
    attention = 0.0
    if config.attention in ("flash", "auto"):
        # One forward pass of it; of a UNet, its share of all.
        share = flops.forward / (flops.total or 1.0)
        attention = (
            len(counted) * attention_flops(model, stage.tower, work)
            if is_stack
            else share * flops.attention
        )

    def backward_seconds(flops: Flops) -> float:
        return (
            rates.seconds(
                flops.backward, max(0.0, flops.attention - attention), flops.float8_backward
            )
            / parts
        )

    forward = rates.seconds(flops.forward, attention, flops.float8_forward) / parts
    backward = backward_seconds(flops)
    recompute = 0.0
    if saved != counted or stage.logits_again:
        executed = stage_flops(
            model,
            stage.tower,
            stage.layers,
            counted,
            batch.shape,
            stage.logits_again,
            batch.pairs,
            machine.reference,
        )
        recompute = backward_seconds(executed) - backward
    if measured:
        forward += len(stage.policies) * measured["forward"] / parts
        backward += len(stage.policies) * (measured["none"] - measured["forward"]) / parts
        recompute += sum(measured[policy] - measured["none"] for policy in stage.policies) / parts
    # Written in forward; read in backward, with gradients of the same size.
    activations = len(counted) * work.positions * stage.unsaved / parts / rates.memory
    kernels = len(counted) if is_stack else len(unet_blocks(config))
    kernels *= config.encode != "once"
    forward += kernels * FORWARD_KERNELS * rates.launch + activations
    backward += kernels * BACKWARD_KERNELS * rates.launch + (PASSES - 1) * activations
    # A generator's connector stands before its layers.
    has_connector = (
        stage.layers.start == 0 if config.is_generator else stage.layers.stop == config.layers
    )
    shares = {
        stage.tower: len(counted) / config.layers,
        f"{stage.tower}.connector": float(has_connector),
    }
    for module in adapted_modules(model):
        if share := shares.get(module):
            adapters = adapter_seconds(model, module, work, machine)
            forward += share * adapters[0] / parts
            backward += share * adapters[1] / parts
    # Weights are cast for both passes; in backward, gradients of the computation's precision are
    # added to float32 sums. Measured layers were timed with their casts and with writing their
    # gradients, and are added where there are more.
    trainable = stage.trainable / MASTER
    timed = 0.0
    if measured and stage.tower not in frozen_modules(model):
        of_layer = module_parameters(model)[stage.tower].layers / config.layers
        timed = len(stage.policies) * of_layer * machine.sharding.part_of(stage.tower)
    cast = 0 if machine.activation == MASTER else MASTER + machine.activation
    added = machine.activation + 2 * MASTER
    forward += cast * (trainable - timed) / rates.memory
    backward += (cast + machine.activation + added) * (trainable - timed) / rates.memory
    if batch.microbatches > 1:
        backward += added * timed / rates.memory
    return (forward, backward), recompute


def adapter_seconds(
    model: ModelConfig, module: str, work: Work, machine: ClusterRun
) -> tuple[float, float]:
    """Estimate the seconds in which a module's adapters move activations through memory, (forward, backward)."""
    sizes = linear_layers(model)
    names = [name for name in adapters_by_layer(model) if module_of_layer(name) == module]
    inputs, outputs = (
        sum(layer_count(model, name) * sizes[name][side] for name in names) for side in (0, 1)
    )
    positions = work.tokens if module.endswith(".connector") else work.positions
    value = positions * machine.activation / machine.speed.rates.memory
    forward, backward = (
        value * (read * inputs + written * outputs) for read, written in ADAPTER_PASSES
    )
    return forward, backward


def _gather_seconds(stage: StageRun, size: float, experts: float) -> float:
    """Estimate the seconds to gather or scatter parameters of `size` bytes on a device, `experts` of them of experts.

    Those are not gathered along `expert`, which has others on each device.
    """
    cluster = stage.machine.cluster
    devices = stage.machine.sharding.experts
    everywhere = collective_seconds(
        stage.gathered * (size - experts), stage.gathered, stage.parts, cluster
    )
    shards = stage.gathered // devices
    return everywhere + collective_seconds(shards * experts, shards, stage.parts * devices, cluster)


def edge_seconds(
    model: ModelConfig, sender: StageRun, receiver: StageRun, batch: DeviceBatch
) -> float:
    """Estimate the seconds in which a microbatch's activations go to the next stage, or their gradients come back.

    batch: on each device of the sender. Every device of a tensor-parallel group takes its rows
    whole; those of the sender's groups share the sending.
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
    """Estimate the seconds in which a step's float32 gradients are added up behind its passes.

    Over the ranks of `data`, where not every microbatch's are. Copies of a stage have another
    all-reduce for their gradients, and one for the updated values.
    """
    over_data = 0.0 if stage.only_stage else _add_over_data_seconds(stage)
    cluster = stage.machine.cluster
    return over_data + collective_seconds(
        2 * 2 * stage.trainable, stage.copies, len(stage.devices), cluster
    )


def _add_over_data_seconds(stage: StageRun) -> float:
    # An all-reduce is a reduce-scatter and an all-gather: twice the bytes.
    machine = stage.machine
    stride = machine.parameter_shards * machine.mesh["tensor"]
    return collective_seconds(2 * stage.trainable, machine.mesh["data"], stride, machine.cluster)


def update_seconds(model: ModelConfig, stage: StageRun, optimizer: OptimizerConfig) -> float:
    """Estimate the seconds of a stage's update, Muon's gathers included."""
    seconds = elementwise_update_seconds(stage.trainable, stage.moments, optimizer, stage.machine)
    is_stack = stage.config(model).is_stack
    if optimizer.has_muon and is_stack and stage.tower not in frozen_modules(model):
        seconds += muon_seconds(model, len(stage.layers), stage.tower, stage.machine)
    return seconds


def elementwise_update_seconds(
    trainable: float, moments: float, optimizer: OptimizerConfig, machine: ClusterRun
) -> float:
    """Estimate the seconds of an update, without Muon's exchanges. trainable, moments: bytes on a device."""
    rates = machine.speed.rates
    # Parameters, gradients and moments are read; parameters and moments are written, and gradients
    # cleared. Before, gradients are read for their norm: AdamW moves 36 bytes a parameter.
    seconds = (5 * trainable + 2 * moments) / rates.memory
    if optimizer.over_data:  # each copy updates its share of the parameters, which all then gather
        stride = machine.parameter_shards * machine.mesh["tensor"]
        seconds += collective_seconds(trainable, machine.mesh["data"], stride, machine.cluster)
    # From the host's memory and back.
    return seconds + (2 * moments / rates.host if optimizer.offload else 0.0)


def muon_seconds(model: ModelConfig, layers: int, tower: str, machine: ClusterRun) -> float:
    """Estimate the seconds of Muon's update of so many layers of a tower."""
    config = stacked_towers(model)[tower]
    layer = layer_sizes(config)
    matrices = module_parameters(model)[tower].matrices / config.layers
    parts = machine.sharding.parts(tower)
    fsdp = machine.parameter_shards
    layers = -(-layers // (fsdp * parts))  # of the device that has most
    sides = 2 * [layer.queries] + 2 * [layer.keys] + (2 + layer.gated) * [layer.mlp]
    sides += 4 * [layer.cross] if layer.cross else []
    flops = sum(newton_schulz_flops(layer.width, side) for side in sides)
    size = 2 * layers * matrices * machine.activation
    links = all_to_all_seconds(size, fsdp, parts, machine.cluster) + all_to_all_seconds(
        size, parts, 1, machine.cluster
    )
    return layers * flops / machine.speed.rates.flops + links


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Count the FLOPs that orthogonalize a matrix: a square, its square, and their product with the matrix."""
    short = min(rows, columns)
    return MUON_ITERATIONS * (4 * short**2 * max(rows, columns) + 2 * short**3)
