"""Costs of a tower's parts in proportion to its work, as plain numbers, and what they depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import ModelConfig
from mmjax.config.model import with_changes, with_one_item_module

# of work, as `planning.work.Work` has them
UNITS = ("positions", "pairs", "inputs", "tokens", "blocks", "taken")


def _row(number: int) -> property:
    return property(lambda cost: cost.rates[number])


@dataclass(frozen=True, eq=False)
class Cost:
    """Costs of a part of a tower for each unit of its work."""

    rates: np.ndarray  # float64 [costs, units], the costs as they follow here

    needed_forward = _row(0)  # products that the result needs, however it is computed
    needed_backward = _row(1)
    forward = _row(2)  # products that run
    backward = _row(3)
    again = _row(4)  # of forward, that run once more in backward
    beside_forward = _row(5)  # elementwise operations
    beside_backward = _row(6)
    device = _row(7)  # bytes kept between the passes
    host = _row(8)  # bytes offloaded between the passes
    float8_forward = _row(9)  # of forward, in FP8
    float8_backward = _row(10)  # of backward and again, in FP8

    @classmethod
    def zero(cls) -> Cost:
        return cls(np.zeros((11, len(UNITS))))

    def __add__(self, addend: Cost) -> Cost:
        return Cost(self.rates + addend.rates)

    def times(self, factor: float) -> Cost:
        return Cost(factor * self.rates)


class Ends(NamedTuple):
    """Costs of what stands around a tower's layers."""

    entry: Cost
    exit: Cost
    connector: Cost
    kinds: tuple[int, ...]  # of every layer, numbered by their first layer


class SameModel:
    """A model as an argument of what is cached: the same object is the same model, and is kept."""

    def __init__(self, model: ModelConfig):
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, SameModel) and self.model is value.model


class ModuleParameters(NamedTuple):
    """Counts of a module's parameters."""

    total: int
    layers: int  # in a tower's layers
    matrices: int  # of these in matrices; of a connector's all that are in matrices
    experts: int  # that a router chooses from


@dataclass(frozen=True, eq=False)
class TowerTrace:
    """A tower as it is traced: alone, with what is trained in it and before it."""

    model: ModelConfig
    tower: str
    frozen: frozenset[str]
    upstream: bool  # whether the gradient of what other towers put in is wanted
    attention: Literal["dense", "blockwise"]
    dtype: str  # of the activations

    @cached_property
    def text(self) -> str:
        """Return all that the costs depend on."""
        return str(self)

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        tower: str,
        frozen: frozenset[str],
        upstream: bool,
        attention: str,
        dtype: str,
    ) -> TowerTrace:
        """Leave out all that does not matter to the tower's costs."""
        config = model.towers[tower]
        if config.is_stack:
            changes = {"attention": attention, "remat": "none"}
        else:
            attention = "dense"
            changes = {"attention": attention}
        model = with_changes(model, {tower: changes})
        if tower == "llm":
            model = ModelConfig(model.llm, lora=model.lora)
        else:
            llm = replace(
                model.llm,
                layers=1,
                vocab=8,
                remat="none",
                attention="dense",
                experts=None,
                delta_net=None,
            )
            model = with_one_item_module(llm, tower, model.towers[tower], model.lora)
        return cls(model, tower, frozen & {tower, f"{tower}.connector"}, upstream, attention, dtype)
