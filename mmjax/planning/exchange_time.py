"""Seconds in which devices of a cluster exchange what they compute: collectives, tokens, keys and values, experts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mmjax.config import (
    ContextAttention,
    DecoderConfig,
    ModelConfig,
    Remat,
    SequenceParallel,
    Tower,
    context_form,
)
from mmjax.config.model import stacked_towers
from mmjax.planning.flops import layer_policies
from mmjax.planning.hardware import Cluster
from mmjax.planning.memory import MASTER, DeviceBatch, ModelSharding
from mmjax.planning.speed import Speed
from mmjax.planning.work import Work, layer_sizes, row_work

# That a chunk of tokens launches beside those of a layer, around a ring of tensor-parallel devices,
# for each of a layer's four exchanges; as compiled for four.
FORWARD_CHUNK_KERNELS, BACKWARD_CHUNK_KERNELS = 2, 4
FORWARD_DISPATCH = 2 / 5  # share of `expert_bytes` that forward sends


@dataclass(frozen=True)
class ClusterRun:
    """A cluster, the mesh on it, and its speed. activation: bytes of an activation."""

    cluster: Cluster
    mesh: Mapping[str, int]
    sharding: ModelSharding
    speed: Speed
    activation: int
    context_attention: ContextAttention = "auto"
    reference: bool = False  # whether a step runs the model again without its adapters

    @property
    def parameter_shards(self) -> int:
        """Return over how many devices parameters are sharded and gathered, beside tensor parallelism."""
        return self.mesh["fsdp"] * self.mesh.get("expert", 1) * self.mesh.get("context", 1)


def collective_seconds(size: float, group: int, stride: int, cluster: Cluster) -> float:
    """Estimate the seconds to gather or scatter `size` bytes among `group` devices that are `stride` apart.

    Inside a node, over its links. Between nodes, all groups of a node share its adapters. With
    stride 2 on nodes of 8, a group of 16 has 4 devices on each of 4 nodes, and each node has 2 such
    groups.
    """
    if group == 1:
        return 0.0
    device = cluster.device
    nodes = _nodes(group, stride, cluster)
    inside = size * (group - 1) / group / device.link_rate
    groups = min(stride, cluster.per_node)
    outside = (
        size * groups * (nodes - 1) / nodes / (cluster.per_node * device.network_rate)
        if nodes > 1
        else 0.0
    )
    # Links and adapters work at the same time, so the slower one decides.
    return max(inside, outside)


def all_to_all_seconds(size: float, group: int, stride: int, cluster: Cluster) -> float:
    """Estimate the seconds in which each of `group` devices exchanges `size` bytes, those of the others and its own."""
    device = cluster.device
    nodes = _nodes(group, stride, cluster)
    return size * max(
        (group - 1) / group / device.link_rate, (nodes - 1) / nodes / device.network_rate
    )


def _nodes(group: int, stride: int, cluster: Cluster) -> int:
    """Count the nodes of a group of devices that are `stride` apart."""
    # How many of a group lie on one node: per_node / stride, at least one and at most all. On nodes
    # of 8, 16 devices with stride 2 lie 4 to a node, on 4 nodes; with stride 16 each on its own.
    return -(-group // max(1, min(group, cluster.per_node // stride)))


def exchange_seconds(model: ModelConfig, batch: DeviceBatch, machine: ClusterRun) -> float:
    """Estimate the seconds in which a rank sends its microbatch's tokens to its peers, and among its own devices."""
    device = machine.cluster.device
    tensor = machine.mesh["tensor"]
    token = model.llm.width * machine.activation
    sent = sum(batch.peers * n for n in batch.widths.values()) * token  # padding included
    # Ranks that exchange tokens are `context` x `tensor` devices apart.
    in_node = batch.peers * batch.context * tensor <= machine.cluster.per_node
    work = row_work(model, batch.shape)
    spread = sum(w.tokens for w in work.values()) * token
    within = all_to_all_seconds(spread, batch.context, tensor, machine.cluster)
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
    seconds = (all_to_all_seconds if sends else collective_seconds)(
        size, group, stride, machine.cluster
    )
    return FORWARD_DISPATCH * seconds, (1 - FORWARD_DISPATCH) * seconds


def expert_bytes(llm: DecoderConfig, tokens: int, devices: int, activation: int) -> int:
    """Count the bytes that a device sends in both passes to all devices that share a layer's experts, itself included.

    Forward sends tokens, with the numbers and shares of their experts, and sends sums back.
    Backward sends these tokens again and the gradients of sums, and gradients of tokens and shares
    back.
    """
    token = 5 * llm.width * activation + 5 * MASTER * llm.experts.per_token
    return devices * llm.experts.sent_at_once(tokens, devices) * token


def context_seconds(
    llm: DecoderConfig, batch: DeviceBatch, machine: ClusterRun
) -> tuple[float, float]:
    """Estimate the seconds in which a layer waits for keys and values, or exchanges heads for tokens, by pass.

    Keys arrive while the kernel works on others; the first ones are the device's own.
    """
    if batch.context == 1:
        return 0.0, 0.0
    layer = layer_sizes(llm)
    tensor = machine.mesh["tensor"]
    rates = machine.speed.rates
    positions = math.prod(batch.shape["llm"])
    channel = positions * machine.activation / machine.sharding.llm
    if (
        context_form(machine.context_attention, (llm.heads, llm.kv_heads), batch.context, tensor)
        == "heads"
    ):
        exchanged = all_to_all_seconds(
            2 * (layer.queries + layer.keys) * channel, batch.context, tensor, machine.cluster
        )
        return exchanged, exchanged
    arrive = collective_seconds(
        2 * layer.keys * channel * batch.context, batch.context, tensor, machine.cluster
    )
    # Of a pair, two products in forward and five in backward; gradients of keys and values return
    # as float32.
    product = (
        2
        * batch.pairs["llm"]
        * layer.queries
        / machine.sharding.llm
        / (rates.attention or rates.flops)
    )
    hidden = (batch.context - 1) / batch.context * product
    return max(0.0, arrive - 2 * hidden), max(
        0.0, (1 + MASTER / machine.activation) * arrive - 5 * hidden
    )


def attends_in_order(llm: DecoderConfig, context: int, machine: ClusterRun) -> bool:
    """Return whether devices that share a row attend by its parts in order, of which the last attend most.

    Balanced or by heads, they attend as much each.
    """
    heads = llm.heads, llm.kv_heads
    form = context_form(machine.context_attention, heads, context, machine.mesh["tensor"])
    return llm.reads_in_order and form == "gather"


def recomputed_attention(policies: Sequence[Remat]) -> int:
    """Count the layers whose backward pass runs attention again."""
    return sum(policy == "full" for policy in policies)


def tensor_seconds(
    config: Tower, positions: int, parts: int, machine: ClusterRun
) -> tuple[float, float]:
    """Estimate what tensor-parallel neighbours' exchanges of activations add to a layer's forward and backward pass.

    Two all-reduces each, three with attention to a condition. With sequence parallelism tokens are
    gathered for two products and scattered behind two; backward gathers those tokens again.
    Overlapped, every chunk is sent beside a product of one, and its gradients beside another or,
    after a scatter, beside two.
    """
    way = machine.sharding.sequence_parallel
    reduce = all_reduce_seconds(config, positions, parts, machine)
    if way == "off" or parts == 1:
        return all_reduces(config) * reduce, all_reduces(config) * reduce
    layer = layer_sizes(config)
    rates = machine.speed.rates
    sends = parts - 1
    send = reduce / (2 * sends)  # of a chunk: a device's tokens between layers
    # Seconds of a chunk's product with one column of the width, so `column * n` with n columns
    # hides as much of a chunk's transfer.
    column = 2 * positions / parts * layer.width / parts / rates.flops if way == "overlap" else 0.0
    cross = [layer.cross] if layer.cross else []
    gathered = layer.queries + 2 * layer.keys, *cross, (1 + layer.gated) * layer.mlp
    scattered = layer.queries, *cross, layer.mlp
    forward = sum(max(0.0, send - column * n) for n in (*gathered, *scattered))
    backward = sum(2 * max(0.0, send - column * n) for n in gathered)
    backward += sum(max(0.0, send - 2 * column * n) for n in scattered)
    launch = 2 * all_reduces(config) * rates.launch if way == "overlap" else 0.0
    return sends * (forward + FORWARD_CHUNK_KERNELS * launch), sends * (
        backward + BACKWARD_CHUNK_KERNELS * launch
    )


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


def overlap_pays(
    model: ModelConfig, batch: DeviceBatch, machine: ClusterRun, towers: Collection[str]
) -> bool:
    """Return whether a microbatch of these towers is faster with exchanges behind products than with all-reduces."""
    work = row_work(model, batch.shape)

    def seconds(way: SequenceParallel) -> float:
        on = replace(machine, sharding=replace(machine.sharding, sequence_parallel=way))
        total = 0.0
        for name, config in stacked_towers(model).items():
            if name in towers:
                forward, backward = tensor_seconds(
                    config, work[name].positions, on.sharding.parts(name), on
                )
                again = recomputed_reduces(layer_policies(config))
                total += (config.layers + again) * forward + config.layers * backward
        return total

    return seconds("overlap") < seconds("off")
