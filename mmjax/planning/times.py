"""How long a step takes on a cluster: from operations, bytes and links, and layers' times where they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from mmjax.config import AdamW, DecoderConfig, ModelConfig, Muon
from mmjax.planning.clusters import REACHED_MOVING, Cluster
from mmjax.planning.cost import executed, frozen_modules, parameters, policies_of
from mmjax.planning.layer_times import Speed
from mmjax.planning.memory import MASTER, OnDevice, Spread, moments
from mmjax.planning.work import Encoder, row_work

PASSES = 3  # over what layers would keep: written forward, read backward, and as many gradients


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update on every device, by what they go to."""

    compute: float  # forward and backward
    recompute: float  # more than with everything kept
    shards: float  # gathering parameters and scattering gradients, behind computing as far as that lasts
    tensor: float  # all-reduces of tensor parallelism
    exchange: float  # of encoder tokens
    update: float

    @property
    def total(self) -> float:
        """Of the whole step."""
        return max(self.compute + self.recompute, self.shards) + self.tensor + self.exchange + self.update

    def over(self, steps: int) -> StepTime:
        """Of one of so many steps, where this is of all; the update is that of one already."""
        parts = {f.name: getattr(self, f.name) / steps for f in fields(self)}
        return StepTime(**parts | {"update": self.update})


@dataclass(frozen=True)
class Machine:
    """A cluster, the sizes of the mesh on it, and how it computes. activation: bytes of an activation."""

    cluster: Cluster
    mesh: Mapping[str, int]
    spread: Spread
    speed: Speed
    activation: int
    loss_chunks: int = 1


def step_time(
    model: ModelConfig,
    microbatches: Sequence[OnDevice],
    unsaved: Mapping[str, float],
    machine: Machine,
    optimizer: AdamW | Muon,
) -> StepTime:
    """All of these microbatches, and one update.

    unsaved: bytes that one position of one layer of each tower would keep without remat. `recompute` is what the
    layers' policies add to keeping everything; measured, it may be below 0.
    """
    times = [_microbatch(model, batch, unsaved, machine) for batch in microbatches]
    summed = {f.name: sum(getattr(t, f.name) for t in times) for f in fields(StepTime)}
    counts, frozen = parameters(model), frozen_modules(model)
    own = moments(model, frozen, optimizer)
    # Parameters, gradients and moments are read, and all but the gradients written; these are cleared.
    held = MASTER * sum((2 * counts[module] + n) * machine.spread.part_of(module) for module, n in own.items())
    return StepTime(**summed | {"update": 2 * held / machine.speed.rates.memory})


def _microbatch(model: ModelConfig, batch: OnDevice, unsaved: Mapping[str, float], machine: Machine) -> StepTime:
    device, frozen = machine.cluster.device, frozen_modules(model)
    towers, rates = {"llm": model.llm, **model.encoders}, machine.speed.rates
    measured = {name: machine.speed.layer(name, batch.shape[name]) for name in towers}
    known = {name: of for name, of in measured.items() if of is not None}
    counted = _changed(model, {name: {"layers": 0, "remat": "none"} for name in known})
    plain = _changed(counted, {name: {"remat": "none"} for name in towers})
    runs = ((plain, 1), (counted, machine.loss_chunks))
    once, all_of_it = (_flops(m, batch, frozen, machine, chunks) / rates.flops for m, chunks in runs)
    work = row_work(model, batch.shape)
    moved = sum(
        c.layers * work[name].positions * unsaved[name] / machine.spread.parts(name)
        for name, c in towers.items()
        if name not in known
    )
    again = all_of_it - once
    for name, of in known.items():
        policies, parts = policies_of(towers[name]), machine.spread.parts(name)
        once += len(policies) * of["none"] / parts
        again += sum(of[policy] - of["none"] for policy in policies) / parts
    sent = sum(batch.peers * n for n in batch.widths.values()) * model.llm.width * machine.activation
    in_node = batch.peers * machine.mesh["tensor"] <= machine.cluster.per_node
    return StepTime(
        compute=once + PASSES * moved / rates.memory,
        recompute=again,
        shards=_shards(model, machine, frozen),
        tensor=sum(_tensor(c, work[name].positions, machine.spread.parts(name), machine) for name, c in towers.items()),
        exchange=2 * sent / (REACHED_MOVING * (device.link if in_node else device.network)),
        update=0.0,
    )


def _changed(model: ModelConfig, towers: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
    """The model with these changes to its towers."""
    encoders = {name: replace(e, **towers.get(name, {})) for name, e in model.encoders.items()}
    return replace(model, llm=replace(model.llm, **towers.get("llm", {})), encoders=encoders)


def _flops(model: ModelConfig, batch: OnDevice, frozen: Set[str], machine: Machine, loss_chunks: int) -> float:
    flops = executed(model, batch.shape, frozen, loss_chunks)
    return sum(f.total / machine.spread.parts(module.removesuffix(".connector")) for module, f in flops.items())


def _shards(model: ModelConfig, machine: Machine, frozen: Set[str]) -> float:
    """Parameters gathered forward and backward, gradients scattered, and summed over `data`."""
    counts, mesh = parameters(model), machine.mesh
    whole = sum(counts.values())
    trainable = sum(n for module, n in counts.items() if module not in frozen)
    parts = mesh["tensor"]
    gathered = _between(2 * machine.activation * whole / parts, mesh["fsdp"], parts, machine.cluster)
    scattered = _between(MASTER * trainable / parts, mesh["fsdp"], parts, machine.cluster)
    summed = 2 * MASTER * trainable / (parts * mesh["fsdp"])
    return gathered + scattered + _between(summed, mesh["data"], parts * mesh["fsdp"], machine.cluster)


def _between(size: float, group: int, stride: int, cluster: Cluster) -> float:
    """Seconds to gather or scatter `size` bytes among `group` devices of which neighbours are `stride` apart.

    Inside a node, over its links. Between nodes, all groups of a node share its adapters.
    """
    if group == 1:
        return 0.0
    device, together = cluster.device, max(1, min(group, cluster.per_node // stride))
    nodes = -(-group // together)
    inside = size * (group - 1) / group / device.link
    groups = min(stride, cluster.per_node)  # of this kind on a node
    outside = size * groups * (nodes - 1) / nodes / (cluster.per_node * device.network) if nodes > 1 else 0.0
    return max(inside, outside) / REACHED_MOVING


def _tensor(config: DecoderConfig | Encoder, positions: int, parts: int, machine: Machine) -> float:
    """Two all-reduces of activations in each layer forward, two backward, and again what is computed again."""
    if parts == 1:
        return 0.0
    again = sum(policy in ("attention_mlp", "attention", "full") for policy in policies_of(config))
    size = 2 * (parts - 1) / parts * positions * config.width * machine.activation
    return (4 * config.layers + 2 * again) * size / (REACHED_MOVING * machine.cluster.device.link)
