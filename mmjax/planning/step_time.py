"""Speed of a device: layer times measured over a grid of row lengths where it was profiled, else assumed rates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from mmjax.config import (
    ContextAttention,
    DecoderConfig,
    ModelConfig,
    Muon,
    OptimizerConfig,
    Remat,
    SequenceParallel,
    context_form,
)
from mmjax.config.generators import Tower
from mmjax.config.model import (
    adapted_modules,
    adapters_by_layer,
    layer_count,
    linear_layers,
    module_of_layer,
    towers_of,
    with_changes,
)
from mmjax.cost.table import module_parameters, parameters
from mmjax.planning.flops import executed, frozen_modules, layer_policies
from mmjax.planning.hardware import Cluster, Rates
from mmjax.planning.memory import MASTER, DeviceBatch, ModelSharding, moment_bytes_on_device
from mmjax.planning.unet import unet_blocks, unet_saved_bytes, unets
from mmjax.planning.work import Work, layer_sizes, row_work

PASSES = 3  # over activations: written in forward, read in backward, and gradients of the same size
# That a layer launches, as compiled for H100 without remat: 56 to 60 and 62 to 74.
FORWARD_KERNELS, BACKWARD_KERNELS = 58, 72
# That a chunk of tokens launches beside those, around a ring of tensor-parallel devices, for each of a layer's four
# exchanges; as compiled for four.
FORWARD_CHUNK_KERNELS, BACKWARD_CHUNK_KERNELS = 2, 4
FORWARD_DISPATCH = 2 / 5  # share of `expert_bytes` that forward sends
MUON_ITERATIONS = 5  # of Newton-Schulz
# Over an adapter's input and output, in forward and backward; its products are too narrow to hide that. Forward reads
# the input for `a`, writes what `b` returns, and adds it to the layer's output. Backward scales the output's gradient,
# reads it for the gradients of `b` and of `a`'s output, reads the input for the gradient of `a`, and adds the input's
# gradient to the layer's.
ADAPTER_PASSES = ((1, 4), (5, 4))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on every device, by cause."""

    compute: float  # forward and backward
    recompute: float  # additional time of the remat policies
    shards: float  # all-gather of parameters and reduce-scatter of gradients, overlapped with computing
    tensor: float  # what tensor-parallel devices exchange with nothing computed beside it
    exchange: float  # of encoder tokens, and of the tokens that go to experts
    context: float  # of context parallelism: keys and values that arrive later than the kernel asks, or heads
    update: float

    @property
    def total(self) -> float:
        """Return the seconds of the step: the longer of computing and sharding, plus what is not overlapped."""
        apart = self.tensor + self.context + self.exchange + self.update
        return max(self.compute + self.recompute, self.shards) + apart

    def mean_over(self, steps: int) -> StepTime:
        """Return the mean per step of a sum over `steps`; `update` is already per step."""
        means = {f.name: getattr(self, f.name) / steps for f in fields(self)}
        return StepTime(**means | {"update": self.update})


@dataclass(frozen=True)
class ClusterRun:
    """A cluster, the mesh on it, and its speed. activation: bytes of an activation."""

    cluster: Cluster
    mesh: Mapping[str, int]
    sharding: ModelSharding
    speed: Speed
    activation: int
    loss_chunks: int = 1
    context_attention: ContextAttention = "auto"
    reference: bool = False  # whether a step runs the model again without its adapters

    @property
    def parameter_shards(self) -> int:
        """Return over how many devices parameters are sharded and gathered, beside tensor parallelism."""
        return self.mesh["fsdp"] * self.mesh.get("expert", 1) * self.mesh.get("context", 1)


def step_time(
    model: ModelConfig,
    microbatches: Sequence[DeviceBatch],
    unsaved: Mapping[str, float],
    machine: ClusterRun,
    optimizer: OptimizerConfig,
) -> StepTime:
    """Estimate the time of these microbatches and one optimizer update.

    unsaved: bytes that one position of one layer of each tower would save without remat. `recompute` is relative to
    saving everything; measured, it may be below 0.
    """
    times = [_microbatch(model, batch, unsaved, machine) for batch in microbatches]
    summed = {f.name: sum(getattr(t, f.name) for t in times) for f in fields(StepTime)}
    counts = parameters(model)
    frozen = frozen_modules(model)
    trainable = MASTER * sum(
        n * machine.sharding.part_of(module) for module, n in counts.items() if module not in frozen
    )
    moments = moment_bytes_on_device(model, optimizer, machine.sharding)
    update = elementwise_update_seconds(trainable, moments, optimizer, machine)
    muon = _muon(model, machine, frozen) if isinstance(optimizer, Muon) else 0.0
    return StepTime(**summed | {"update": update + muon})


def elementwise_update_seconds(
    trainable: float, moments: float, optimizer: OptimizerConfig, machine: ClusterRun
) -> float:
    """Estimate the seconds of an update, without Muon's exchanges. trainable, moments: bytes on a device."""
    rates = machine.speed.rates
    # Parameters, gradients and moments are read; parameters and moments are written, and gradients cleared. Before,
    # gradients are read for their norm: AdamW moves 36 bytes a parameter.
    seconds = (5 * trainable + 2 * moments) / rates.memory
    if optimizer.over_data:  # each copy updates its share of the parameters, which all then gather
        stride = machine.parameter_shards * machine.mesh["tensor"]
        seconds += collective_seconds(trainable, machine.mesh["data"], stride, machine.cluster)
    # From the host's memory and back.
    return seconds + (2 * moments / rates.host if optimizer.offload else 0.0)


def _microbatch(model: ModelConfig, batch: DeviceBatch, unsaved: Mapping[str, float], machine: ClusterRun) -> StepTime:
    """Estimate the time of one microbatch, without the update."""
    rates = machine.speed.rates
    frozen = frozen_modules(model)
    towers = towers_of(model)
    profiled = {name: times for name in towers if (times := machine.speed.layer(name, batch.shape[name])) is not None}
    # Layers of profiled towers are taken out of the FLOPs, and their measured times added below.
    without_remat = with_changes(model, {name: {"remat": "none"} for name in towers})
    # Without remat and without chunks of the loss: what both recompute is counted apart.
    compute = _seconds(without_remat, batch, frozen, machine, 1, set(profiled))
    recompute = _seconds(model, batch, frozen, machine, machine.loss_chunks, set(profiled)) - compute
    compute += _weight_bytes(model, machine, frozen, profiled, batch.microbatches > 1) / rates.memory
    compute += sum(
        rates.launch * (FORWARD_KERNELS + BACKWARD_KERNELS) * c.layers
        for name, c in towers.items()
        if name not in profiled
    )
    for name, times in profiled.items():
        policies = layer_policies(towers[name])
        parts = machine.sharding.parts(name)
        compute += len(policies) * times["none"] / parts
        recompute += sum(times[policy] - times["none"] for policy in policies) / parts
    work = row_work(model, batch.shape)
    for module in set(adapted_modules(model)) - set(profiled):
        tower = module.removesuffix(".connector")
        compute += sum(adapter_seconds(model, module, work[tower], machine)) / machine.sharding.parts(tower)
    activations = sum(
        c.layers * work[name].positions * unsaved[name] / machine.sharding.parts(name)
        for name, c in towers.items()
        if name not in profiled
    )
    for name, unet in unets(model).items():
        compute += rates.launch * (FORWARD_KERNELS + BACKWARD_KERNELS) * len(unet_blocks(unet))
        images = work[name].tokens // unet.queries
        activations += unet_saved_bytes(replace(unet, remat="none"), images, machine.activation, name not in frozen)[0]
    return StepTime(
        compute=compute + PASSES * activations / rates.memory,
        recompute=recompute,
        shards=_shards(model, machine, frozen),
        tensor=sum(
            _tensor(c, work[name].positions, machine.sharding.parts(name), machine) for name, c in towers.items()
        ),
        exchange=2 * exchange_seconds(model, batch, machine)
        + sum(model.llm.expert_layers) * sum(dispatch_seconds(model.llm, work["llm"], machine)),
        context=_context(model.llm, batch, machine),
        update=0.0,
    )


def adapter_seconds(model: ModelConfig, module: str, work: Work, machine: ClusterRun) -> tuple[float, float]:
    """Estimate the seconds in which a module's adapters move activations through memory, (forward, backward)."""
    sizes = linear_layers(model)
    names = [name for name in adapters_by_layer(model) if module_of_layer(name) == module]
    inputs, outputs = (sum(layer_count(model, name) * sizes[name][side] for name in names) for side in (0, 1))
    positions = work.tokens if module.endswith(".connector") else work.positions
    value = positions * machine.activation / machine.speed.rates.memory
    forward, backward = (value * (read * inputs + written * outputs) for read, written in ADAPTER_PASSES)
    return forward, backward


def _context(llm: DecoderConfig, batch: DeviceBatch, machine: ClusterRun) -> float:
    forward, backward = context_seconds(llm, batch, machine)
    return (llm.layers + recomputed_attention(layer_policies(llm))) * forward + llm.layers * backward


def context_seconds(llm: DecoderConfig, batch: DeviceBatch, machine: ClusterRun) -> tuple[float, float]:
    """Estimate the seconds in which a layer waits for keys and values, or exchanges heads for tokens, by pass.

    Keys arrive while the kernel works on others; the first ones are the device's own.
    """
    if batch.context == 1:
        return 0.0, 0.0
    layer, tensor, rates = layer_sizes(llm), machine.mesh["tensor"], machine.speed.rates
    positions = math.prod(batch.shape["llm"])
    channel = positions * machine.activation / machine.sharding.llm
    if context_form(machine.context_attention, (llm.heads, llm.kv_heads), batch.context, tensor) == "heads":
        exchanged = _all_to_all(2 * (layer.queries + layer.keys) * channel, batch.context, tensor, machine.cluster)
        return exchanged, exchanged
    arrive = collective_seconds(2 * layer.keys * channel * batch.context, batch.context, tensor, machine.cluster)
    # Of a pair, two products in forward and five in backward; gradients of keys and values return as float32.
    product = 2 * batch.pairs["llm"] * layer.queries / machine.sharding.llm / (rates.attention or rates.flops)
    hidden = (batch.context - 1) / batch.context * product
    return max(0.0, arrive - 2 * hidden), max(0.0, (1 + MASTER / machine.activation) * arrive - 5 * hidden)


def recomputed_attention(policies: Sequence[Remat]) -> int:
    """Count the layers whose backward pass runs attention again."""
    return sum(policy == "full" for policy in policies)


def _seconds(
    model: ModelConfig,
    batch: DeviceBatch,
    frozen: Set[str],
    machine: ClusterRun,
    loss_chunks: int,
    without_layers: Set[str],
) -> float:
    """Estimate the seconds of the executed FLOPs on a device."""
    flops = executed(model, batch.shape, frozen, loss_chunks, batch.pairs, machine.reference, without_layers)
    parts = {module: machine.sharding.parts(module.removesuffix(".connector")) for module in flops}
    return sum(
        machine.speed.rates.seconds(f.total, f.attention, f.float8) / parts[module] for module, f in flops.items()
    )


def _weight_bytes(
    model: ModelConfig, machine: ClusterRun, frozen: Set[str], profiled: Collection[str], accumulates: bool
) -> float:
    """Count the bytes of parameters and gradients that a microbatch moves through a device's memory.

    Trainable parameters are cast to the precision of the computation in both passes, and their gradients, of that
    precision, added to the float32 sum. Of profiled towers' layers only the adding is counted, where a step has several
    microbatches: they were timed with their casts and with writing their gradients.
    """
    counts = parameters(model)
    part_of = machine.sharding.part_of
    trainable = sum(n * part_of(module) for module, n in counts.items() if module not in frozen)
    modules = module_parameters(model)
    timed = sum(part_of(name) * modules[name].layers for name in profiled if name not in frozen)
    cast = 0 if machine.activation == MASTER else 2 * (MASTER + machine.activation)
    added = machine.activation + 2 * MASTER
    return (cast + machine.activation + added) * (trainable - timed) + accumulates * added * timed


def _shards(model: ModelConfig, machine: ClusterRun, frozen: Set[str]) -> float:
    """Estimate the seconds to gather parameters in both passes, scatter gradients, and sum them over `data`."""
    counts = parameters(model)
    mesh = machine.mesh
    trainable = sum(n for module, n in counts.items() if module not in frozen)
    parts = mesh["tensor"]
    shards = machine.parameter_shards
    # Experts are not gathered along `expert`, which has others on each device.
    experts = module_parameters(model)["llm"].experts if machine.sharding.experts > 1 else 0

    def seconds(times: int, elements: float, experts: float) -> float:
        size = times * machine.activation / parts
        everywhere = collective_seconds(size * (elements - experts), shards, parts, machine.cluster)
        devices = machine.sharding.experts
        size_of_device = size * experts / devices
        return everywhere + collective_seconds(size_of_device, shards // devices, parts * devices, machine.cluster)

    # Twice, since FSDP frees gathered parameters after the forward pass and gathers them again.
    gathered = seconds(2, sum(counts.values()), experts)
    # Gradients have the precision of the computation until they are added to the float32 sum.
    scattered = seconds(1, trainable, experts * ("llm" not in frozen))
    # An all-reduce is a reduce-scatter and an all-gather: twice the bytes.
    reduce_bytes = 2 * MASTER * trainable / (parts * shards)
    return gathered + scattered + collective_seconds(reduce_bytes, mesh["data"], parts * shards, machine.cluster)


def _muon(model: ModelConfig, machine: ClusterRun, frozen: Set[str]) -> float:
    """Estimate the seconds in which every device receives its layers, orthogonalizes them and sends them back."""
    towers = towers_of(model)
    return sum(muon_seconds(model, c.layers, tower, machine) for tower, c in towers.items() if tower not in frozen)


def muon_seconds(model: ModelConfig, layers: int, tower: str, machine: ClusterRun) -> float:
    """Estimate the seconds of Muon's update of so many layers of a tower."""
    config = towers_of(model)[tower]
    layer = layer_sizes(config)
    matrices = module_parameters(model)[tower].matrices / config.layers
    parts = machine.sharding.parts(tower)
    fsdp = machine.parameter_shards
    layers = -(-layers // (fsdp * parts))  # of the device that has most
    sides = 2 * [layer.queries] + 2 * [layer.keys] + (2 + layer.gated) * [layer.mlp]
    sides += 4 * [layer.cross] if layer.cross else []
    flops = sum(newton_schulz_flops(layer.width, side) for side in sides)
    size = 2 * layers * matrices * machine.activation
    links = _all_to_all(size, fsdp, parts, machine.cluster) + _all_to_all(size, parts, 1, machine.cluster)
    return layers * flops / machine.speed.rates.flops + links


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Count the FLOPs that orthogonalize a matrix: a square, its square, and their product with the matrix."""
    short = min(rows, columns)
    return MUON_ITERATIONS * (4 * short**2 * max(rows, columns) + 2 * short**3)


def _all_to_all(size: float, group: int, stride: int, cluster: Cluster) -> float:
    """Estimate the seconds in which each of `group` devices exchanges `size` bytes, those of the others and its own."""
    device = cluster.device
    nodes = _nodes(group, stride, cluster)
    return size * max((group - 1) / group / device.link_rate, (nodes - 1) / nodes / device.network_rate)


def exchange_seconds(model: ModelConfig, batch: DeviceBatch, machine: ClusterRun) -> float:
    """Estimate the seconds in which a rank sends its microbatch's tokens to its peers, and among its own devices."""
    device, tensor = machine.cluster.device, machine.mesh["tensor"]
    token = model.llm.width * machine.activation
    sent = sum(batch.peers * n for n in batch.widths.values()) * token  # padding included
    # Ranks that exchange tokens are `context` x `tensor` devices apart.
    in_node = batch.peers * batch.context * tensor <= machine.cluster.per_node
    work = row_work(model, batch.shape)
    spread = sum(w.tokens for w in work.values()) * token
    within = _all_to_all(spread, batch.context, tensor, machine.cluster)
    return sent / (device.link_rate if in_node else device.network_rate) + within


def dispatch_seconds(llm: DecoderConfig, work: Work, machine: ClusterRun) -> tuple[float, float]:
    """Estimate the seconds in which a layer's tokens go to the devices of their experts and back, by pass.

    An even router is assumed, whose tokens go in one turn (`mmjax.parallel.expert_exchange`).
    """
    group = machine.sharding.experts
    if llm.experts is None or group == 1:
        return 0.0, 0.0
    size = expert_bytes(llm, work.positions, group, machine.activation)
    stride = machine.mesh.get("context", 1) * machine.mesh["tensor"]
    sends = llm.experts.sent_at_once(work.positions, group) < work.positions
    seconds = (_all_to_all if sends else collective_seconds)(size, group, stride, machine.cluster)
    return FORWARD_DISPATCH * seconds, (1 - FORWARD_DISPATCH) * seconds


def expert_bytes(llm: DecoderConfig, tokens: int, devices: int, activation: int) -> int:
    """Count the bytes that a device sends to those that share a layer's experts, in both passes, and to itself.

    Forward sends tokens, with the numbers and shares of their experts, and sends sums back. Backward sends these
    tokens again and the gradients of sums, and gradients of tokens and shares back.
    """
    token = 5 * llm.width * activation + 5 * MASTER * llm.experts.per_token
    return devices * llm.experts.sent_at_once(tokens, devices) * token


def collective_seconds(size: float, group: int, stride: int, cluster: Cluster) -> float:
    """Estimate the seconds to gather or scatter `size` bytes among `group` devices that are `stride` apart.

    Inside a node, over its links. Between nodes, all groups of a node share its adapters. With stride 2 on nodes of 8,
    a group of 16 has 4 devices on each of 4 nodes, and each node has 2 such groups.
    """
    if group == 1:
        return 0.0
    device = cluster.device
    nodes = _nodes(group, stride, cluster)
    inside = size * (group - 1) / group / device.link_rate
    groups = min(stride, cluster.per_node)
    outside = size * groups * (nodes - 1) / nodes / (cluster.per_node * device.network_rate) if nodes > 1 else 0.0
    # Links and adapters work at the same time, so the slower one decides.
    return max(inside, outside)


def _nodes(group: int, stride: int, cluster: Cluster) -> int:
    """Count the nodes of a group of devices that are `stride` apart."""
    # How many of a group lie on one node: per_node / stride, at least one and at most all.
    return -(-group // max(1, min(group, cluster.per_node // stride)))


def _tensor(config: Tower, positions: int, parts: int, machine: ClusterRun) -> float:
    """Estimate the seconds that a tower's tensor-parallel exchanges take, with those of layers that are recomputed."""
    forward, backward = tensor_seconds(config, positions, parts, machine)
    recomputed = recomputed_reduces(layer_policies(config))
    return (config.layers + recomputed) * forward + config.layers * backward


def tensor_seconds(config: Tower, positions: int, parts: int, machine: ClusterRun) -> tuple[float, float]:
    """Estimate what tensor-parallel neighbours' exchanges of activations add to a layer's forward and backward pass.

    Two all-reduces each, three with attention to a condition. With sequence parallelism tokens are gathered for two
    products and scattered behind two; backward gathers those tokens again. Overlapped, every chunk is sent beside a
    product of one, and its gradients beside another or, after a scatter, beside two.
    """
    way = machine.sharding.sequence_parallel
    reduce = all_reduce_seconds(config, positions, parts, machine)
    if way == "off" or parts == 1:
        return all_reduces(config) * reduce, all_reduces(config) * reduce
    layer = layer_sizes(config)
    rates = machine.speed.rates
    sends = parts - 1
    send = reduce / (2 * sends)  # of a chunk: a device's tokens between layers
    column = 2 * positions / parts * layer.width / parts / rates.flops if way == "overlap" else 0.0
    cross = [layer.cross] if layer.cross else []
    gathered = layer.queries + 2 * layer.keys, *cross, (1 + layer.gated) * layer.mlp
    scattered = layer.queries, *cross, layer.mlp
    forward = sum(max(0.0, send - column * n) for n in (*gathered, *scattered))
    backward = sum(2 * max(0.0, send - column * n) for n in gathered)
    backward += sum(max(0.0, send - 2 * column * n) for n in scattered)
    launch = 2 * all_reduces(config) * rates.launch if way == "overlap" else 0.0
    return sends * (forward + FORWARD_CHUNK_KERNELS * launch), sends * (backward + BACKWARD_CHUNK_KERNELS * launch)


def overlap_pays(model: ModelConfig, batch: DeviceBatch, machine: ClusterRun, towers: Collection[str]) -> bool:
    """Return whether a microbatch of these towers is faster with exchanges behind products than with all-reduces."""
    work = row_work(model, batch.shape)

    def seconds(way: SequenceParallel) -> float:
        on = replace(machine, sharding=replace(machine.sharding, sequence_parallel=way))
        configs = {name: c for name, c in towers_of(model).items() if name in towers}
        return sum(_tensor(c, work[name].positions, on.sharding.parts(name), on) for name, c in configs.items())

    return seconds("overlap") < seconds("off")


def recomputed_reduces(policies: Sequence[Remat]) -> int:
    """Count the layers that do their all-reduces again in backward: policies that save the products save the sums."""
    return sum(policy in ("attention_mlp", "attention", "full") for policy in policies)


def all_reduces(config: Tower) -> int:
    """Count the all-reduces of a layer's forward pass among tensor-parallel neighbours."""
    return 3 if layer_sizes(config).cross else 2


def all_reduce_seconds(config: Tower, positions: int, parts: int, machine: ClusterRun) -> float:
    """Estimate the seconds of one all-reduce of a layer's activations among tensor-parallel neighbours."""
    # A ring all-reduce of n bytes among p devices sends 2 (p - 1) / p * n bytes from each.
    size = 2 * (parts - 1) / parts * positions * config.width * machine.activation
    return size / machine.cluster.device.link_rate


FORWARD = "forward"  # key beside the remat policies, whose seconds are of both passes
APART = 1.25  # least ratio of neighbouring grid points


class LayerTimes(NamedTuple):
    """Measured seconds of one layer of a tower on `rows` rows, by row length: forward, and both passes by policy."""

    rows: int
    seconds: Mapping[int, Mapping[str, float]]
    source: str = "on this machine"  # where they were measured

    def interpolate(self, length: int) -> dict[str, float]:
        """Interpolate the seconds at a row length.

        Seconds per position are linear between grid points, which is exact for a time of a*n + b*n^2, as layers with
        quadratic attention have; outside the grid they are those of its end.
        """
        grid = sorted(self.seconds)
        return {
            name: length * float(np.interp(length, grid, [self.seconds[n][name] / n for n in grid]))
            for name in self.seconds[grid[0]]
        }


@dataclass(frozen=True)
class Speed:
    """A device's rates, and measured layer times of the towers that were profiled."""

    rates: Rates
    measured: Mapping[str, LayerTimes] = field(default_factory=dict)

    def layer(self, tower: str, shape: tuple[int, int]) -> dict[str, float] | None:
        """Return measured seconds of one layer on (rows, row length), by policy; None where it was not profiled."""
        if (times := self.measured.get(tower)) is None:
            return None
        rows, length = shape
        return {name: seconds * rows / times.rows for name, seconds in times.interpolate(length).items()}


def profile_lengths(lengths: Sequence[int]) -> list[int]:
    """Choose row lengths to profile for rows of these lengths: shortest, longest, and powers of two between."""
    low = min(lengths)
    high = max(lengths)
    powers = (2**k for k in range(high.bit_length()))
    return sorted({low, high} | {n for n in powers if APART * low <= n <= high / APART})
