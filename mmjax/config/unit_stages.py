"""Cut the modules of a unit into its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from mmjax.config.model import ModelConfig
from mmjax.config.training import Unit, unit_modules
from mmjax.errors import UserError


class LayerRange(NamedTuple):
    """Consecutive layers of a tower."""

    tower: str
    start: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


def chain_of(model: ModelConfig, modules: Sequence[str]) -> tuple[str, ...]:
    """Order modules as a microbatch runs through them: encoders as they are given, the LLM, generators."""
    return tuple(
        sorted(modules, key=lambda tower: (tower == "llm") + 2 * model.towers[tower].is_generator)
    )


def cut_unit(model: ModelConfig, name: str, unit: Unit) -> list[tuple[LayerRange, ...]]:
    """Cut the chain of a unit's modules into the layers of its stages, in the order of the chain.

    Without `cuts` (runs find some that are balanced) into equally many layers: of the LLM, or the
    first module, with what stands before and behind in the first and last stage; of the chain,
    where that has too few. Raises UserError for cuts that are not in the chain, or not in its
    order.
    """
    modules = unit_modules(name, unit)
    towers = chain_of(model, modules)
    counts = [model.towers[tower].layers for tower in towers]
    firsts = dict(zip(towers, accumulate(counts, initial=0), strict=False))
    stages = unit.pipeline * unit.virtual
    main = "llm" if "llm" in modules else modules[0]
    first, count = (
        (firsts[main], model.towers[main].layers)
        if model.towers[main].layers >= stages
        else (0, sum(counts))
    )
    places = [
        0,
        *(first + round(count * stage / stages) for stage in range(1, stages)),
        sum(counts),
    ]
    if unit.cuts:
        cuts = [_parse_cut(model, f"units.{name}.cuts", cut, towers, main) for cut in unit.cuts]
        places[1:-1] = [firsts[tower] + layer for tower, layer in cuts]
    if len(places) != stages + 1 or not all(a < b for a, b in pairwise(places)):
        choices = (
            f"{t}.{int(t == towers[0])} to {t}.{n - 1}" for t, n in zip(towers, counts, strict=True)
        )
        written = ",".join(map(str, unit.cuts))
        raise UserError(
            f"units.{name}.cuts={written}: give {stages - 1} in ascending order, among {', '.join(choices)}"
        )
    return [_layers_between(model, firsts, start, stop) for start, stop in pairwise(places)]


def _layers_between(
    model: ModelConfig, firsts: Mapping[str, int], start: int, stop: int
) -> tuple[LayerRange, ...]:
    """Return the layers of a stage, encoders by name. firsts: place of every tower's first layer in the chain."""
    layers = []
    for tower, first in sorted(
        firsts.items(), key=lambda item: item[0] if item[0] in model.encoders else "~"
    ):
        piece = LayerRange(
            tower, max(0, start - first), min(model.towers[tower].layers, stop - first)
        )
        layers += [piece] * bool(piece.layers)
    return tuple(layers)


def _parse_cut(
    model: ModelConfig, where: str, cut: int | str, towers: Sequence[str], main: str
) -> tuple[str, int]:
    """Return the tower and the layer before which a stage begins: of "vision.16", or of a number."""
    tower, _, number = (
        f"{main}.{cut}".rpartition(".") if isinstance(cut, int) else cut.rpartition(".")
    )
    if tower not in towers or not number.isdecimal():
        raise UserError(
            f"{where} has {cut!r}; name a layer of {', '.join(towers)}, such as {main}.1"
        )
    layers = model.towers[tower].layers
    if int(number) >= layers:
        following = towers[towers.index(tower) + 1 :]
        alternative = f", or {following[0]}.0 to cut behind it" if following else ""
        raise UserError(
            f"{where} has {cut!r}: {tower} has {layers} layers; give {tower}.{layers - 1} at most{alternative}"
        )
    return tower, int(number)
