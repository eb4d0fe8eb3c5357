"""Costs of a step's samples and items in each phase, by which `phases` places them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmjax.balance.parts import LLM


@dataclass(frozen=True)
class Costs:
    """Costs of a step's samples and their items, in any unit; one for all phases, or times come by `Aim.share`.

    sample: float64 `[n, phases]`, phase 0 is the LLM, an encoder's column is the sum of its items.
    item_sample: int64 `[m]`; item_phase: int32 `[m]`, 1 and on; item_cost: float64 `[m]`.
    item_tokens: int64 `[m]`, LLM tokens that travel where an item is encoded on another rank than its sample's.
    Raises ValueError.
    """

    sample: np.ndarray
    item_sample: np.ndarray
    item_phase: np.ndarray
    item_cost: np.ndarray
    item_tokens: np.ndarray

    def __post_init__(self) -> None:
        if self.sample.ndim != 2 or self.sample.shape[1] < 1:
            raise ValueError("sample costs must be [n, phases], with the LLM's in the first column")
        sizes = {len(self.item_sample), len(self.item_phase), len(self.item_cost), len(self.item_tokens)}
        if len(sizes) > 1:
            raise ValueError("items must have one sample, phase, cost and number of tokens each")
        n, phases = self.sample.shape
        if np.any((self.item_sample < 0) | (self.item_sample >= n)):
            raise ValueError(f"an item belongs to a sample outside of 0 .. {n - 1}")
        if np.any((self.item_phase <= LLM) | (self.item_phase >= phases)):
            raise ValueError(f"an item belongs to a phase outside of 1 .. {phases - 1}")
        for name, value in (("sample cost", self.sample), ("item cost", self.item_cost), ("token", self.item_tokens)):
            if not (value.min(initial=0) >= 0 and value.max(initial=0) < np.inf):
                raise ValueError(f"a {name} is negative or not finite")

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def phases(self) -> int:
        """Return the number of phases: the LLM and the encoders."""
        return self.sample.shape[1]

    def take(self, samples: np.ndarray) -> tuple[Costs, np.ndarray]:
        """Select these samples, in this order; return also the indices of their items, int64 `[k]`."""
        # Old sample number -> new one; -1 for samples that are not selected.
        number = np.full(len(self), -1, np.int64)
        number[samples] = np.arange(len(samples))
        items = np.flatnonzero(number[self.item_sample] >= 0)
        costs = Costs(
            sample=self.sample[samples],
            item_sample=number[self.item_sample[items]],
            item_phase=self.item_phase[items],
            item_cost=self.item_cost[items],
            item_tokens=self.item_tokens[items],
        )
        return costs, items


def costs_of(
    llm_cost: np.ndarray,
    item_sample: np.ndarray,
    item_phase: np.ndarray,
    item_cost: np.ndarray,
    item_tokens: np.ndarray,
    phases: int,
) -> Costs:
    """Build the costs of samples whose encoder columns are summed from their items. llm_cost: `[n]`, items `[m]`."""
    n = len(llm_cost)
    flat = np.bincount(np.asarray(item_sample, np.int64) * phases + item_phase, item_cost, n * phases)
    sample = flat.reshape(n, phases)
    sample[:, LLM] = llm_cost
    return Costs(
        sample=sample,
        item_sample=np.ascontiguousarray(item_sample, np.int64),
        item_phase=np.ascontiguousarray(item_phase, np.int32),
        item_cost=np.ascontiguousarray(item_cost, np.float64),
        item_tokens=np.ascontiguousarray(item_tokens, np.int64),
    )
