"""Fit a run into the memory of its devices by choosing the remat policy of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.config import AdamW, DecoderConfig, ModelConfig, Muon, Remat
from mmjax.planning.activations import Kept, cut
from mmjax.planning.clusters import Rates
from mmjax.planning.cost import executed_logits, frozen_modules, policies_of, recomputed
from mmjax.planning.layer_times import Speed
from mmjax.planning.memory import OnDevice, Spread, fixed_bytes, kv_cache_bytes
from mmjax.planning.remat import Option, Options, choose, least_seconds
from mmjax.planning.work import Encoder, Work, row_work

KeptOfTowers = Mapping[str, Mapping[Remat, Kept]]  # what one layer of each tower keeps, by policy
Policies = Mapping[str, tuple[Remat, ...]]  # of every layer of each tower


@dataclass(frozen=True)
class Room:
    """The memory for a run: bytes of a device, and of its host for what it offloads."""

    device: float
    host: float = 0.0
    ram: bool = False  # the device is a CPU, and its bytes are a share of the RAM that other programs use too


@dataclass(frozen=True)
class Fit:
    """The memory that a run takes of a device. policies: of every layer of each tower, given ones too."""

    policies: dict[str, tuple[Remat, ...]]
    loss_chunks: int
    fixed: dict[str, float]  # bytes by kind, of the fullest shape
    activations: dict[str, float]  # bytes by tower, of the fullest shape
    unsaved: dict[str, float]  # bytes by tower: of one position of one layer, uncut, without remat
    seconds: float  # longer than with nothing computed again, of all shapes on average
    least: float  # the same if layers could be divided: what no mix goes below
    again: dict[str, dict[Remat, float]]  # seconds that one layer of each tower takes longer with a policy
    fullest: int  # shape
    spread: Spread
    room: Room
    measured: float | None = None  # bytes in all, where they were

    @property
    def device(self) -> float:
        """Bytes in all."""
        return self.predicted if self.measured is None else self.measured

    @property
    def predicted(self) -> float:
        """Bytes in all by the model of memory."""
        return sum(self.fixed.values()) + sum(self.activations.values())

    @property
    def fits(self) -> bool:
        """Return whether there is room for it. Where there is not, every layer that may choose keeps least."""
        return self.device <= self.room.device

    def evaluation_positions(self, llm: DecoderConfig, positions: int, activation: int) -> int:
        """Return how many positions of the LLM a rank may answer at once so that this takes no more than a step does.

        The KV cache then has the place of the activations that layers keep for backward, and a pass forward needs no
        more temporary memory per position than a step. positions: of the LLM in a step's microbatch on a rank.
        """
        transient = self.fixed["transient"]
        per_position = kv_cache_bytes(llm, self.spread, activation) + transient / positions
        return min(positions, int((sum(self.activations.values()) + transient) / per_position))

    def applied(self, model: ModelConfig) -> ModelConfig:
        """The model with these policies."""
        return with_policies(model, self.policies)


def with_policies(model: ModelConfig, policies: Policies) -> ModelConfig:
    """The model whose layers have these policies."""
    encoders = {name: replace(e, remat=_short(policies[name])) for name, e in model.encoders.items()}
    return replace(model, llm=replace(model.llm, remat=_short(policies["llm"])), encoders=encoders)


def fit(
    model: ModelConfig,
    shapes: Sequence[OnDevice],
    kept: Sequence[KeptOfTowers],
    spread: Spread,
    activation: int,
    optimizer: AdamW | Muon,
    speed: Speed,
    room: Room,
    loss_choices: Sequence[int] = (1,),
) -> Fit:
    """The policies that compute least again in this room; exact, over all compiled shapes at once.

    kept: of each shape, uncut. activation: bytes of an activation. Towers whose `remat` is not "auto" keep theirs.
    loss_choices: numbers of parts in which the loss may be made; more leave more room, and make the logits again.
    """
    towers: dict[str, DecoderConfig | Encoder] = {"llm": model.llm, **model.encoders}
    works, frozen = [row_work(model, shape.shape) for shape in shapes], frozen_modules(model)
    cuts = [_cut(towers, of, work, activation, spread) for of, work in zip(kept, works, strict=True)]
    unsaved = [{t: own["none"].device for t, own in c.items()} for c in cuts]
    options = {
        name: _options(
            config,
            [w[name] for w in works],
            [c[name] for c in cuts],
            speed.rates,
            [speed.layer(name, shape.shape[name]) for shape in shapes],
            spread.parts(name),
        )
        for name, config in towers.items()
    }
    given = {name: policies_of(config) for name, config in towers.items() if config.remat != "auto"}
    free = {name: config.layers for name, config in towers.items() if name not in given}
    own = {name: options[name] for name in free}
    hosts = [room.host - _bytes(given, options, s, "host") for s in range(len(shapes))]
    logits = [executed_logits(model, w["llm"]) / spread.llm / speed.rates.flops for w in works]

    def in_chunks(chunks: int) -> Fit:
        fixed = [
            fixed_bytes(model, s, layers, frozen, spread, activation, optimizer, chunks)
            for s, layers in zip(shapes, unsaved, strict=True)
        ]
        rooms = [room.device - sum(f.values()) - _bytes(given, options, s, "device") for s, f in enumerate(fixed)]
        chosen, least = choose(free, own, rooms, hosts), least_seconds(free, own, rooms, hosts)
        if chosen is None:
            chosen = {name: (_leanest(options[name]),) * layers for name, layers in free.items()}
        policies = {name: (given | chosen)[name] for name in towers}
        of_shapes = [sum(f.values()) + _bytes(policies, options, s, "device") for s, f in enumerate(fixed)]
        fullest = int(np.argmax(of_shapes))
        again = float(np.mean(logits)) if chunks > 1 else 0.0
        return Fit(
            policies,
            chunks,
            fixed[fullest],
            {name: _bytes({name: policies[name]}, options, fullest, "device") for name in towers},
            {name: kept[fullest][name]["none"].device / works[fullest][name].positions for name in towers},
            again + _seconds(policies, options),
            again + _seconds(given, options) + (np.inf if least is None else least),
            {name: {policy: option.seconds for policy, option in of.items()} for name, of in options.items()},
            fullest,
            spread,
            room,
        )

    found = map(in_chunks, loss_choices)
    return min(found, key=lambda f: (not f.fits, f.seconds if f.fits else f.device, f.loss_chunks))


def _cut(
    towers: Mapping[str, DecoderConfig | Encoder],
    kept: KeptOfTowers,
    work: Mapping[str, Work],
    activation: int,
    spread: Spread,
) -> dict[str, dict[Remat, Kept]]:
    """Return the activations of one shape that layers keep, of which tensor parallelism leaves each device its part."""
    return {
        name: {p: cut(k, towers[name], work[name].positions, activation, spread.parts(name)) for p, k in own.items()}
        for name, own in kept.items()
    }


def _options(
    config: DecoderConfig | Encoder,
    works: Sequence[Work],
    kept: Sequence[Mapping[Remat, Kept]],
    rates: Rates,
    measured: Sequence[Mapping[str, float] | None],
    parts: int,
) -> dict[Remat, Option]:
    """Return the policies open to a layer, on one device: bytes of every shape, mean seconds more than with `none`."""
    again = [_again(config, w, k, rates, m or {}, parts) for w, k, m in zip(works, kept, measured, strict=True)]
    return {
        policy: Option(
            tuple(of[policy].device for of in kept),
            tuple(of[policy].host for of in kept),
            float(np.mean([of[policy] for of in again])),
        )
        for policy in kept[0]
    }


def _again(
    config: DecoderConfig | Encoder,
    work: Work,
    kept: Mapping[Remat, Kept],
    rates: Rates,
    measured: Mapping[str, float],
    parts: int,
) -> dict[Remat, float]:
    """Seconds that one layer takes longer on one device with a policy than with `none`.

    Where it was not measured, what is not kept is computed, written and read once more. Measured, a policy may take
    less time than `none`: saving costs time too.
    """

    def seconds(policy: Remat) -> float:
        if policy in measured:
            return (measured[policy] - measured["none"]) / parts
        moved = 2 * (kept["none"].device - kept[policy].device - kept[policy].host)
        again = recomputed(config, work, policy) / parts / rates.flops + max(moved, 0) / rates.memory
        return again + 2 * kept[policy].host / rates.host

    return {policy: seconds(policy) for policy in kept}


def _bytes(policies: Mapping[str, Sequence[Remat]], options: Mapping[str, Options], shape: int, where: str) -> float:
    return float(sum(getattr(options[name][p], where)[shape] for name, own in policies.items() for p in own))


def _seconds(policies: Mapping[str, Sequence[Remat]], options: Mapping[str, Options]) -> float:
    return float(sum(options[name][policy].seconds for name, own in policies.items() for policy in own))


def _leanest(options: Options) -> Remat:
    """Return the policy that keeps least without a host."""
    return min((p for p in options if not np.any(options[p].host)), key=lambda p: np.sum(options[p].device))


def _short(policies: tuple[Remat, ...]) -> Remat | tuple[Remat, ...]:
    """One policy where all layers have the same."""
    return policies[0] if len(set(policies)) == 1 else policies
