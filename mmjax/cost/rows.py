"""Rows that towers are traced on, whose sizes tell what an operation grows with.

Sizes that grow with a row have prime factors of their own, larger than any width, so one trace
tells how everything grows: with q the prime of a row's length, 2 * q**2 * 64 operations are of
pairs of positions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmjax.config import ModelConfig
from mmjax.cost.operations import Operations
from mmjax.cost.rates import UNITS, Cost
from mmjax.kernels.tiles import MAX_BLOCK

PRIME = 200_003


@dataclass(frozen=True)
class Row:
    """The row that a tower is traced on."""

    length: int
    amounts: Mapping[str, int]  # of work, by unit
    primes: Mapping[str, int]  # factors of what grows with the length, the images or the blocks
    unit: str = "positions"  # of what grows with the length

    def rate_of(self, count: float, unit: str) -> tuple[str, float]:
        """Tell what a count grows with, and how much for each. unit: the one of the row's length."""
        powers = Counter({name: _power(count, prime) for name, prime in self.primes.items()})
        if self.unit == "tokens":
            # What a row's images have to do with each other, as of one image.
            return unit, count / self.primes["length"] ** max(
                0, powers["length"] - 1
            ) / self.amounts[unit]
        if powers["length"] > 1:
            unit = "pairs"
        elif sum(powers.values()) > 1:
            unit = "taken"
        else:
            unit = next((name for name in ("tokens", "blocks") if powers[name]), unit)
        return unit, count / self.amounts[unit]


def _power(number: int, prime: int) -> int:
    power = 0
    while number and number % prime == 0:
        number //= prime
        power += 1
    return power


def row_of(model: ModelConfig, tower: str) -> Row:
    """Choose a row for a tower."""
    config = model.towers[tower]
    if not config.is_stack:
        length = PRIME * config.min_patches
        amounts = {"pairs": length * config.min_patches, "tokens": PRIME * config.condition_tokens}
        return Row(length, amounts, {"length": PRIME}, "tokens")
    if config.is_generator:
        return _row_of_images(config.min_patches, config.condition_tokens)
    if tower == "llm":
        length = positions = 2 * MAX_BLOCK * PRIME
        return Row(length, {"positions": positions, "pairs": positions**2}, {"length": PRIME})
    stride = config.stride
    multiple = config.window_inputs or 1
    length = math.lcm(stride * MAX_BLOCK, config.shortest_row, multiple) * PRIME
    positions = length // stride
    amounts = {
        "positions": positions,
        "pairs": positions**2,
        "inputs": length,
        "tokens": positions // config.token_positions,
    }
    return Row(length, amounts, {"length": PRIME})


@lru_cache
def _row_of_images(size: int, tokens: int) -> Row:
    """Choose a row of images of `size` positions or more, whose length, images and blocks have no factor in common."""

    def is_prime(n: int) -> bool:
        return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))

    images = max(PRIME, min(2**24, 2**30 // size)) | 1
    while True:
        # Blocks are one more than images: 2 p, with the images 2 p - 1.
        images += 2
        if not (is_prime(images) and is_prime((images + 1) // 2)):
            continue
        for length in range(size * images + 1, size * (images + 1)):
            if is_prime(length):
                blocks = images + 1
                amounts = {
                    "positions": length,
                    "pairs": length**2,
                    "inputs": length,
                    "tokens": images * tokens,
                }
                amounts |= {"blocks": blocks, "taken": 2 * images * blocks}
                return Row(
                    length, amounts, {"length": length, "tokens": images, "blocks": blocks // 2}
                )


NEEDS = re.compile(r"needs=(\d+)")


def count_cost(
    operations: Iterable[Operations], row: Row, unit: Callable[[Operations], str], layers: int = 1
) -> Cost:
    """Add up operations by unit of work. unit: of those that grow with the row's length. layers: that were traced."""
    cost = Cost.zero()
    instead: dict[str, float] = {}
    for x in operations:
        if x.of_pair:
            place, rate = UNITS.index("pairs"), x.count
        else:
            name, rate = row.rate_of(x.count, unit(x))
            place, rate = UNITS.index(name), rate / layers
        is_backward = "transpose" in x.scope
        if not x.is_product:
            (cost.beside_backward if is_backward else cost.beside_forward)[place] += rate
            continue
        if x.in_float8:
            (cost.float8_backward if is_backward else cost.float8_forward)[place] += rate
        if "rematted_computation" in x.scope:
            cost.again[place] += rate
        else:
            (cost.backward if is_backward else cost.forward)[place] += rate
            if match := NEEDS.search(x.scope):
                instead["backward" if is_backward else "forward"] = float(match[1])
            else:
                (cost.needed_backward if is_backward else cost.needed_forward)[place] += rate
    cost.needed_forward[0] += instead.get("forward", 0)
    cost.needed_backward[0] += 2 * instead.get("forward", 0) * ("backward" in instead)
    return cost
