"""Plan the memory of a run: choose the remat policy of each layer so that the run fits its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import DecoderConfig, ModelConfig, OptimizerConfig, Remat
from mmjax.config.model import towers_of, with_changes
from mmjax.planning.flops import executed_logits, frozen_modules, layer_policies, recompute_flops
from mmjax.planning.hardware import Rates
from mmjax.planning.memory import (
    ACTIVATION,
    DeviceBatch,
    ModelSharding,
    SavedBytes,
    divide_by_tensor_parallelism,
    fixed_bytes,
    kv_cache_bytes,
    update_bytes,
)
from mmjax.planning.step_time import Speed
from mmjax.planning.work import Work, row_work


class Option(NamedTuple):
    """Cost of a remat policy for one layer. With several compiled shapes, bytes are tuples, one entry per shape."""

    device: float | tuple[float, ...]  # bytes saved
    host: float | tuple[float, ...]  # bytes offloaded
    seconds: float  # to recompute, or to load from the host, what is not saved; below 0 where that is faster


Options = Mapping[Remat, Option]


def choose_policies(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> dict[str, tuple[Remat, ...]] | None:
    """Find a policy for each layer that minimises the seconds within the memory; None where nothing fits.

    Exact: a multiple-choice knapsack over the kinds of layers, as an integer program (OmniBal 4.3 goes layer by layer).
    layers: their number in each tower, where all layers cost the same. In a tower, policies that save least come first:
    backward starts at the tower's end, with memory at its peak, where there should be no recomputation on top.
    """
    choices, counts = _solve(layers, options, device, host, integral=True)
    if counts is None:
        return None
    plan: dict[str, tuple[Remat, ...]] = {}
    for name in layers:
        chosen = [(policy, n) for (tower, policy), n in zip(choices, counts, strict=True) if tower == name]
        # Layers of a tower cost the same, so only how many have a policy was solved; this is their order.
        chosen.sort(key=lambda pair: np.sum(options[name][pair[0]].device))
        plan[name] = tuple(policy for policy, n in chosen for _ in range(round(n)))
    return plan


def least_seconds(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> float | None:
    """Compute a lower bound on the seconds, the optimum with divisible layers; None where nothing fits."""
    choices, counts = _solve(layers, options, device, host, integral=False)
    if counts is None:
        return None
    return float(sum(n * options[tower][policy].seconds for (tower, policy), n in zip(choices, counts, strict=True)))


def _solve(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float],
    integral: bool,
) -> tuple[list[tuple[str, Remat]], np.ndarray | None]:
    """Solve for the number of layers of each (tower, policy), integers or not; None where nothing fits."""
    choices = [(tower, policy) for tower in layers for policy in options[tower]]
    if not choices:
        return [], np.zeros(0)
    # A row per choice: device bytes of every shape, host bytes of every shape, seconds.
    costs = np.array([np.hstack(options[tower][policy]) for tower, policy in choices], float)
    limits = np.hstack([device, host])
    unit = np.maximum(np.abs(costs).max(0), 1e-300)  # the solver's tolerances are absolute
    # One row for each tower, 1 at its choices: its layers' numbers must add up to the tower's.
    in_tower = np.array([[tower == name for tower, _ in choices] for name in layers], float)
    counts = np.array(list(layers.values()), float)
    layers_of_choice = in_tower.T @ counts
    # Where memory is ample each tower has its fastest policy throughout.
    fastest = np.zeros(len(choices))
    fastest[np.where(in_tower > 0, costs[:, -1], np.inf).argmin(1)] = 1  # of equals the first, which saves most
    unlimited = layers_of_choice * fastest
    if (unlimited @ costs[:, :-1] <= limits).all():
        return choices, unlimited
    from scipy.optimize import Bounds, LinearConstraint, milp  # a quarter of a second

    # Every layer gets one policy, and the bytes of every shape stay below its limits.
    solution = milp(
        costs[:, -1] / unit[-1],
        integrality=np.full(len(choices), int(integral)),
        bounds=Bounds(0, layers_of_choice),
        constraints=[
            LinearConstraint(in_tower, counts, counts),
            LinearConstraint((costs[:, :-1] / unit[:-1]).T, -np.inf, limits / unit[:-1]),
        ],
        options={"mip_rel_gap": 0},
    )
    return choices, solution.x


SavedByTower = Mapping[str, Mapping[Remat, SavedBytes]]  # bytes saved by one layer of each tower, by policy
Policies = Mapping[str, Sequence[Remat]]  # of every layer of each tower


@dataclass(frozen=True)
class MemoryLimit:
    """Memory available to a run, in bytes per device, and on its host for offloading."""

    device: float
    host: float = 0.0
    ram: bool = False  # the device is a CPU, and its bytes are a share of RAM that other programs use too


@dataclass(frozen=True)
class MemoryPlan:
    """A memory plan: remat policies and the bytes per device that a run needs with them."""

    policies: dict[str, tuple[Remat, ...]]  # of every layer of each tower, configured ones too
    loss_chunks: int
    fixed: dict[str, float]  # bytes by kind, of the largest shape
    activations: dict[str, float]  # bytes by tower, of the largest shape
    unsaved: dict[str, float]  # bytes by tower per position of one layer without remat or tensor parallelism
    seconds: float  # recomputation time, averaged over the shapes
    lower_bound: float  # on `seconds`: the optimum if layers were divisible
    recompute_seconds: dict[str, dict[Remat, float]]  # of one layer of each tower, by policy
    largest_shape: int  # index of the largest shape
    sharding: ModelSharding
    limit: MemoryLimit
    measured: float | None = None  # bytes in total, where compiled or measured

    @property
    def device(self) -> float:
        """Return the total bytes per device."""
        return self.predicted if self.measured is None else self.measured

    @property
    def predicted(self) -> float:
        """Return the total bytes per device by the memory model."""
        return sum(self.fixed.values()) + sum(self.activations.values())

    @property
    def fits(self) -> bool:
        """Return whether the run fits; where it does not, every `auto` layer has the policy that saves least."""
        return self.device <= self.limit.device

    def evaluation_positions(self, llm: DecoderConfig, positions: int, activation: int) -> int:
        """Return how many positions of the LLM a rank may answer at once so that this takes no more than a step does.

        The KV cache then has the place of the activations that layers keep for backward, and a pass forward needs no
        more temporary memory per position than a step. positions: of the LLM in a step's microbatch on a rank.
        """
        transient = self.fixed["transient"]
        per_position = kv_cache_bytes(llm, self.sharding, activation) + transient / positions
        return min(positions, int((sum(self.activations.values()) + transient) / per_position))

    def applied(self, model: ModelConfig) -> ModelConfig:
        """Return the model with these policies."""
        return with_policies(model, self.policies)


@dataclass(frozen=True)
class StagePlan:
    """The memory and time of a stage, on each of its devices, for the largest compiled shape."""

    name: str
    devices: tuple[int, ...]  # numbers in the run's order
    mesh: dict[str, int]
    layers: dict[str, range]  # by tower, as the next
    policies: dict[str, tuple[Remat, ...]]
    parameters: int  # of the stage, on all its devices together
    in_flight: int
    memory: dict[str, float]  # bytes by kind
    forward: float  # seconds of one microbatch
    backward: float

    @property
    def bytes(self) -> float:
        """Total bytes of a device."""
        return sum(self.memory.values())


def with_policies(model: ModelConfig, policies: Policies) -> ModelConfig:
    """Return the model with these remat policies of its layers."""
    # One policy where all layers have the same.
    # As a person would write it: one word for all layers where that says it.
    remat = {tower: p[0] if len(set(p)) == 1 else tuple(p) for tower, p in policies.items()}
    return with_changes(model, {tower: {"remat": policy} for tower, policy in remat.items()})


def plan_memory(
    model: ModelConfig,
    shapes: Sequence[DeviceBatch],
    saved: Sequence[SavedByTower],
    sharding: ModelSharding,
    activation: int,
    optimizer: OptimizerConfig,
    speed: Speed,
    limit: MemoryLimit,
    loss_choices: Sequence[int] = (1,),
) -> MemoryPlan:
    """Find the policies with the least recomputation that fit in memory; exact, for all compiled shapes at once.

    saved: for each shape, before tensor parallelism. activation: bytes of an activation. Towers whose `remat` is not
    "auto" keep theirs. loss_choices: numbers of loss chunks; more need less memory, and any but 1 recomputes logits.
    """
    works = [row_work(model, shape.shape) for shape in shapes]
    frozen = frozen_modules(model)
    options = _tower_options(model, shapes, works, saved, sharding, activation, speed)
    without_remat = [{tower: options[tower]["none"].device[s] for tower in options} for s in range(len(shapes))]
    logits = [executed_logits(model, work["llm"]) / sharding.llm / speed.rates.flops for work in works]

    def with_chunks(chunks: int) -> MemoryPlan:
        fixed = [
            fixed_bytes(model, shape, layers, frozen, sharding, activation, optimizer, chunks)
            for shape, layers in zip(shapes, without_remat, strict=True)
        ]
        policies, bound = _choose_auto_policies(model, options, [sum(kinds.values()) for kinds in fixed], limit)
        totals = [sum(kinds.values()) + _bytes(policies, options, s, "device") for s, kinds in enumerate(fixed)]
        if optimizer.offload:
            for s, kinds in enumerate(fixed):
                beyond = max(0.0, update_bytes(model, kinds, sharding, optimizer) - totals[s])
                kinds["transient"] += beyond
                totals[s] += beyond
        largest = int(np.argmax(totals))
        logits_again = float(np.mean(logits)) if chunks > 1 else 0.0
        return MemoryPlan(
            policies=policies,
            loss_chunks=chunks,
            fixed=fixed[largest],
            activations={name: _bytes({name: p}, options, largest, "device") for name, p in policies.items()},
            unsaved={name: saved[largest][name]["none"].device / works[largest][name].positions for name in options},
            seconds=logits_again + _seconds(policies, options),
            lower_bound=logits_again + bound,
            recompute_seconds={
                name: {policy: o.seconds for policy, o in by_policy.items()} for name, by_policy in options.items()
            },
            largest_shape=largest,
            sharding=sharding,
            limit=limit,
        )

    # The fastest plan that fits, or the smallest if none does; of equals the one with the fewest chunks.
    return min(
        map(with_chunks, loss_choices), key=lambda f: (not f.fits, f.seconds if f.fits else f.device, f.loss_chunks)
    )


def _choose_auto_policies(
    model: ModelConfig, options: Mapping[str, Mapping[Remat, Option]], fixed: Sequence[float], limit: MemoryLimit
) -> tuple[dict[str, tuple[Remat, ...]], float]:
    """Choose the policies of the towers whose `remat` is "auto"; the others keep theirs.

    fixed: bytes of each shape that no policy changes. Returns all towers' policies, those that save least where nothing
    fits, and a lower bound on their recomputation seconds, infinite where nothing fits.
    """
    towers = towers_of(model)
    configured = {name: layer_policies(config) for name, config in towers.items() if config.remat != "auto"}
    auto = {name: config.layers for name, config in towers.items() if name not in configured}
    auto_options = {name: options[name] for name in auto}
    # Bytes that remain for the layers whose policy is to be chosen, by shape.
    device_limit = [limit.device - used - _bytes(configured, options, s, "device") for s, used in enumerate(fixed)]
    host_limit = [limit.host - _bytes(configured, options, s, "host") for s in range(len(fixed))]
    chosen = choose_policies(auto, auto_options, device_limit, host_limit)
    bound = least_seconds(auto, auto_options, device_limit, host_limit)
    if chosen is None:
        chosen = {name: (_smallest(options[name]),) * layers for name, layers in auto.items()}
    policies = {name: (configured | chosen)[name] for name in towers}
    return policies, _seconds(configured, options) + (np.inf if bound is None else bound)


def _tower_options(
    model: ModelConfig,
    shapes: Sequence[DeviceBatch],
    works: Sequence[Mapping[str, Work]],
    saved: Sequence[SavedByTower],
    sharding: ModelSharding,
    activation: int,
    speed: Speed,
) -> dict[str, dict[Remat, Option]]:
    """Compute what each policy costs one layer of each tower on one device."""
    return {
        tower: _options(
            model,
            tower,
            [work[tower] for work in works],
            [by_tower[tower] for by_tower in saved],
            speed.rates,
            [speed.layer(tower, shape.shape[tower]) for shape in shapes],
            sharding.parts(tower),
            activation,
            sharding.sequence_parallel != "off",
        )
        for tower in towers_of(model)
    }


def _options(
    model: ModelConfig,
    tower: str,
    works: Sequence[Work],
    saved: Sequence[Mapping[Remat, SavedBytes]],
    rates: Rates,
    measured: Sequence[Mapping[str, float] | None],
    parts: int,
    activation: int,
    by_sequence: bool,
) -> dict[Remat, Option]:
    """Compute what each policy costs one layer on one device: bytes for every shape, and mean recomputation seconds."""
    config = towers_of(model)[tower]
    on_device = [
        {
            policy: divide_by_tensor_parallelism(full, config, policy, work.positions, activation, parts, by_sequence)
            for policy, full in by_policy.items()
        }
        for work, by_policy in zip(works, saved, strict=True)
    ]
    seconds = [
        _recompute_seconds(model, tower, work, by_policy, rates, times or {}, parts, activation)
        for work, by_policy, times in zip(works, on_device, measured, strict=True)
    ]
    return {
        policy: Option(
            device=tuple(by_policy[policy].device for by_policy in on_device),
            host=tuple(by_policy[policy].host for by_policy in on_device),
            seconds=float(np.mean([by_policy[policy] for by_policy in seconds])),
        )
        for policy in on_device[0]
    }


def _recompute_seconds(
    model: ModelConfig,
    tower: str,
    work: Work,
    saved: Mapping[Remat, SavedBytes],
    rates: Rates,
    measured: Mapping[str, float],
    parts: int,
    activation: int,
) -> dict[Remat, float]:
    """Estimate, by policy, how many seconds longer than with `none` one layer takes on one device.

    Where it was not measured: what is not saved is recomputed, written and read once more. Measured, a policy may take
    less time than `none`, because saving costs time too.
    """

    dtype = next(name for name, size in ACTIVATION.items() if size == activation)

    def seconds(policy: Remat) -> float:
        if policy in measured:
            return (measured[policy] - measured["none"]) / parts
        # Bytes that are neither on the device nor the host are written and read once more.
        moved = 2 * (saved["none"].device - saved[policy].device - saved[policy].host)
        flops = recompute_flops(model, tower, work, policy, dtype)
        on_device = flops / parts / rates.flops + max(moved, 0) / rates.memory
        return on_device + 2 * saved[policy].host / rates.host

    return {policy: seconds(policy) for policy in saved}


def _bytes(policies: Policies, options: Mapping[str, Options], shape: int, memory: Literal["device", "host"]) -> float:
    return float(sum(getattr(options[name][p], memory)[shape] for name, layers in policies.items() for p in layers))


def _seconds(policies: Policies, options: Mapping[str, Options]) -> float:
    return float(sum(options[name][policy].seconds for name, layers in policies.items() for policy in layers))


def _smallest(options: Options) -> Remat:
    """Return the policy that saves least on the device without offloading."""
    return min((p for p in options if not np.any(options[p].host)), key=lambda p: np.sum(options[p].device))
