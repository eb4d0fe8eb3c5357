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
    """Costs of a part of a tower for each unit of its work.

    With `forward = [2e9, 512, 0, 0, 0, 0]`, a row of p positions and q pairs of them takes 2e9 p +
    512 q operations in the forward pass.
    """

    rates: np.ndarray  # float64 [11, len(UNITS)], a row for each property, in the order of these

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
    """Costs of a tower outside its layers: embedding or stem, head, connector."""

    entry: Cost
    exit: Cost
    connector: Cost
    # For every layer the first one that is like it: 0 0 0 3 0 0 0 3 where every fourth differs.
    kinds: tuple[int, ...]


class SameModel:
    """A model as the key of a cache, compared by identity: configs hold dicts and have no hash."""

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
    """All that a tower's costs depend on, and so the key under which they are cached."""

    model: ModelConfig
    tower: str
    frozen: frozenset[str]
    upstream: bool  # whether the gradient of what other towers put in is wanted
    attention: Literal["dense", "blockwise"]
    dtype: str  # of the activations

    @cached_property
    def text(self) -> str:
        """Return the key as text."""
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
        """Reduce the model to what the tower's costs depend on, so that few traces serve many configs.

        Other towers are left out. Of an encoder's or generator's LLM only the width matters: it is
        replaced by one of one layer and 8 tokens.
        """
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
                convolution=None,
            )
            model = with_one_item_module(llm, tower, model.towers[tower], model.lora)
        return cls(model, tower, frozen & {tower, f"{tower}.connector"}, upstream, attention, dtype)
