"""Choose the remat policy of each layer so that a run fits its devices, and describe what a run then needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from mmjax.config import DecoderConfig, ModelConfig, Remat
from mmjax.config.model import with_changes
from mmjax.planning.flops import recompute_flops
from mmjax.planning.hardware import Rates
from mmjax.planning.memory import ACTIVATION, ModelSharding, SavedBytes, kv_cache_bytes
from mmjax.planning.speed import Speed
from mmjax.planning.work import Work, row_work


class Option(NamedTuple):
    """Cost of a remat policy for one layer. With several compiled shapes, bytes are tuples, one entry per shape."""

    device: float | tuple[float, ...]  # bytes saved
    host: float | tuple[float, ...]  # bytes offloaded
    # to recompute, or to load from the host, what is not saved; below 0 where that is faster
    seconds: float


Options = Mapping[Remat, Option]
Kind = TypeVar("Kind", bound=Hashable)  # of layers


def choose_policies(
    layers: Mapping[Kind, int],
    options: Mapping[Kind, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> dict[Kind, tuple[Remat, ...]] | None:
    """Find a policy for each layer that minimises the seconds within the memory; None where nothing fits.

    Exact: a multiple-choice knapsack over the kinds of layers, as an integer program (OmniBal 4.3
    goes layer by layer).
    layers: their number of each kind, such as of a tower, where all cost the same. In a tower,
    policies that save least come first: backward starts at the tower's end, with memory at its
    peak, where there should be no recomputation on top.
    """
    choices, counts = _solve(layers, options, device, host, integral=True)
    if counts is None:
        return None
    plan: dict[Kind, tuple[Remat, ...]] = {}
    for name in layers:
        chosen = [
            (policy, n) for (tower, policy), n in zip(choices, counts, strict=True) if tower == name
        ]
        # Layers of a tower cost the same, so only how many have a policy was solved; this is their
        # order.
        chosen.sort(key=lambda pair: np.sum(options[name][pair[0]].device))
        plan[name] = tuple(policy for policy, n in chosen for _ in range(round(n)))
    return plan


def least_seconds(
    layers: Mapping[Kind, int],
    options: Mapping[Kind, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> float | None:
    """Compute a lower bound on the seconds, the optimum with divisible layers; None where nothing fits."""
    choices, counts = _solve(layers, options, device, host, integral=False)
    if counts is None:
        return None
    return float(
        sum(
            n * options[tower][policy].seconds
            for (tower, policy), n in zip(choices, counts, strict=True)
        )
    )


def _solve(
    layers: Mapping[Kind, int],
    options: Mapping[Kind, Options],
    device: float | Sequence[float],
    host: float | Sequence[float],
    integral: bool,
) -> tuple[list[tuple[Kind, Remat]], np.ndarray | None]:
    """Solve for the number of layers of each (tower, policy), integers or not; None where nothing fits."""
    choices = [(tower, policy) for tower in layers for policy in options[tower]]
    if not choices:
        return [], np.zeros(0)
    # A row per choice: device bytes of every shape, host bytes of every shape, seconds. With two
    # shapes and policies none and full of a tower:
    #     none  [8e9, 6e9,  0, 0,  0.0]
    #     full  [1e9, 1e9,  0, 0,  0.2]
    costs = np.array([np.hstack(options[tower][policy]) for tower, policy in choices], float)
    limits = np.hstack([device, host])
    unit = np.maximum(np.abs(costs).max(0), 1e-300)  # the solver's tolerances are absolute
    # One row for each tower, 1 at its choices: its layers' numbers must add up to the tower's.
    in_tower = np.array([[tower == name for tower, _ in choices] for name in layers], float)
    counts = np.array(list(layers.values()), float)
    layers_of_choice = in_tower.T @ counts
    # Where memory is ample each tower has its fastest policy throughout.
    fastest = np.zeros(len(choices))
    # of equals the first, which saves most
    fastest[np.where(in_tower > 0, costs[:, -1], np.inf).argmin(1)] = 1
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


Policies = Mapping[str, Sequence[Remat]]  # of every layer of each tower


@dataclass(frozen=True)
class MemoryLimit:
    """Memory available to a run, in bytes per device, and on its host for offloading."""

    device: float
    host: float = 0.0
    # the device is a CPU, and its bytes are a share of RAM that other programs use too
    ram: bool = False


@dataclass(frozen=True)
class StagePlan:
    """Memory and time of a stage on each of its devices. Bytes are those of the shape that needs most."""

    name: str
    devices: tuple[int, ...]  # numbers in the run's order
    mesh: dict[str, int]
    layers: dict[str, range]  # by tower, as the next
    policies: dict[str, tuple[Remat, ...]]  # configured ones too
    parameters: int  # of the stage, on all its devices together
    in_flight: int  # microbatches
    fixed: dict[str, float]  # bytes by kind
    activations: dict[str, float]  # bytes by tower, of all microbatches in flight
    largest_shape: int  # index of that shape
    recompute: dict[str, dict[Remat, float]]  # seconds of one layer of each tower, by policy
    sharding: ModelSharding
    forward: float = 0.0  # seconds of one microbatch, where it was timed
    backward: float = 0.0

    @property
    def memory(self) -> dict[str, float]:
        """Return the bytes of a device by kind."""
        return self.fixed | {"activations": sum(self.activations.values())}

    @property
    def bytes(self) -> float:
        """Return the bytes of a device."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class RunPlan:
    """The plans of a run's stages, of one on one mesh, and of its loss."""

    stages: tuple[StagePlan, ...]
    loss_chunks: int
    limit: MemoryLimit
    seconds: float  # recomputation time of all stages, averaged over the shapes
    lower_bound: float  # on `seconds`: the optimum if layers were divisible
    measured: float | None = None  # bytes of a device in total, where compiled or measured

    @property
    def policies(self) -> dict[str, tuple[Remat, ...]]:
        """Return the policies of every layer of each tower."""
        # A UNet has no layers; those of copies are the same.
        parts = {
            (tower, stage.layers[tower].start): stage.policies[tower]
            for stage in self.stages
            for tower in stage.activations
        }
        policies: dict[str, tuple[Remat, ...]] = {}
        for (tower, _), chosen in sorted(parts.items()):
            policies[tower] = policies.get(tower, ()) + chosen
        return policies

    @property
    def on_devices(self) -> list[list[StagePlan]]:
        """Return the stages by the devices that they share."""
        by_devices: dict[tuple[int, ...], list[StagePlan]] = {}
        for stage in self.stages:
            by_devices.setdefault(stage.devices, []).append(stage)
        return list(by_devices.values())

    @property
    def fullest(self) -> StagePlan:
        """Return the stage with most bytes, on the devices with most bytes."""
        return max(max(self.on_devices, key=bytes_together), key=lambda stage: stage.bytes)

    @property
    def predicted(self) -> float:
        """Return the bytes of the fullest device by the memory model."""
        return max(map(bytes_together, self.on_devices))

    @property
    def device(self) -> float:
        """Return the bytes of the fullest device."""
        return self.predicted if self.measured is None else self.measured

    @property
    def fits(self) -> bool:
        """Return whether the run fits; where it does not, every `auto` layer has the policy that saves least."""
        return self.device <= self.limit.device

    def evaluation_positions(self, llm: DecoderConfig, positions: int, activation: int) -> int:
        """Return how many positions of the LLM a rank may answer at once so that this takes no more than a step does.

        The KV cache then has the place of the activations that layers keep for backward, and a pass
        forward needs no more temporary memory per position than a step. positions: of the LLM in a
        step's microbatch on a rank.
        """
        stage = self.fullest
        transient = stage.fixed["transient"]
        per_position = kv_cache_bytes(llm, stage.sharding, activation) + transient / positions
        return min(positions, int((sum(stage.activations.values()) + transient) / per_position))

    def with_policies(self, policies: Policies, measured: float) -> RunPlan:
        """Return the plan of one stage with these policies, and the bytes that were measured with them."""
        (stage,) = self.stages
        stage = replace(
            stage,
            policies=stage.policies | {tower: tuple(chosen) for tower, chosen in policies.items()},
        )
        return replace(self, stages=(stage,), measured=measured)

    def with_times(self, times: Sequence[Sequence[float]]) -> RunPlan:
        """Return the plan with these seconds of every stage's forward and backward pass."""
        pairs = zip(self.stages, times, strict=True)
        return replace(
            self, stages=tuple(replace(stage, forward=f, backward=b) for stage, (f, b) in pairs)
        )

    def applied(self, model: ModelConfig) -> ModelConfig:
        """Return the model with these policies."""
        return with_policies(model, self.policies)


IN_A_PASS = ("copies", "transient")  # kinds that a device has of one of its stages at a time


def bytes_together(stages: Sequence[StagePlan]) -> float:
    """Add up the bytes of stages that share devices: what they hold lies side by side, and their passes run in turn."""
    passing = [sum(stage.fixed[kind] for kind in IN_A_PASS) for stage in stages]
    return sum(stage.bytes for stage in stages) - sum(passing) + max(passing)


def with_policies(model: ModelConfig, policies: Policies) -> ModelConfig:
    """Return the model with these remat policies of its layers."""
    # As a person would write it: one word where all layers have the same policy.
    remat = {tower: p[0] if len(set(p)) == 1 else tuple(p) for tower, p in policies.items()}
    return with_changes(model, {tower: {"remat": policy} for tower, policy in remat.items()})


def layer_options(
    model: ModelConfig,
    tower: str,
    shapes: Sequence[Mapping[str, tuple[int, int]]],
    saved: Sequence[Mapping[Remat, SavedBytes]],
    speed: Speed,
    parts: int,
    activation: int,
) -> dict[Remat, Option]:
    """Compute the cost of each policy for a layer of a tower on one device: bytes by shape, mean recomputation seconds.

    shapes: rows of every tower on a device. saved: of a layer on a device, in each of them.
    """
    seconds = [
        _recompute_seconds(
            model,
            tower,
            row_work(model, shape)[tower],
            by_policy,
            speed.rates,
            speed.layer(tower, shape[tower]) or {},
            parts,
            activation,
        )
        for shape, by_policy in zip(shapes, saved, strict=True)
    ]
    return {
        policy: Option(
            device=tuple(by_policy[policy].device for by_policy in saved),
            host=tuple(by_policy[policy].host for by_policy in saved),
            seconds=float(np.mean([by_policy[policy] for by_policy in seconds])),
        )
        for policy in saved[0]
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

    Where it was not measured: what is not saved is recomputed, written and read once more.
    Measured, a policy may take less time than `none`, because saving costs time too.
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


def smallest_policy(options: Options) -> Remat:
    """Return the policy that saves least on the device without offloading."""
    return min(
        (p for p in options if not np.any(options[p].host)), key=lambda p: np.sum(options[p].device)
    )
