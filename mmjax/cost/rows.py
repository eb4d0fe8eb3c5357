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

PRIME = 200_003  # larger than any width of a model, which therefore has no such factor


@dataclass(frozen=True)
class Row:
    """The row that a tower is traced on."""

    length: int
    amounts: Mapping[str, int]  # of work, by unit
    primes: Mapping[str, int]  # factors of what grows with the length, the images or the blocks
    unit: str = "positions"  # of what grows with the length
    pair_share: float = 1.0  # of the row's pairs, those of layers that have fewer positions

    def rate_of(self, count: float, unit: str) -> tuple[str, float]:
        """Return the unit that a count grows with, and the count per unit. unit: the one of the row's length."""
        # A decoder's row has 256 q tokens, with q = PRIME. 2 * 256 q * 4096 * 4096 operations have
        # one factor q: 2 * 4096 * 4096 a position. 2 * (256 q)^2 * 64 have two: 2 * 64 a pair.
        powers = Counter({name: _power(count, prime) for name, prime in self.primes.items()})
        if self.unit == "tokens":
            # A UNet's row is a batch of images, each computed by itself. What grows with the square
            # of their number, as a comparison of all positions with all images, counts as for one.
            return unit, count / self.primes["length"] ** max(
                0, powers["length"] - 1
            ) / self.amounts[unit]
        if powers["length"] > 1:
            unit = "pairs"
        elif sum(powers.values()) > 1:
            # Factors of two kinds, images and blocks: `ImageBlocks.take` is a product with one-hot
            # vectors of every block and every image of the row.
            unit = "taken"
        else:
            unit = next((name for name in ("tokens", "blocks") if powers[name]), unit)
        return unit, count / self.amounts[unit]


def _power(number: int, prime: int) -> int:
    """Return how often a prime divides a number; 0 for 0."""
    power = 0
    while number and number % prime == 0:
        number //= prime
        power += 1
    return power


def row_of(model: ModelConfig, tower: str) -> Row:
    """Choose a row for a tower."""
    config = model.towers[tower]
    if not config.is_stack:
        # A UNet: a row of PRIME images, of `min_patches` positions each.
        length = PRIME * config.min_patches
        amounts = {"pairs": length * config.min_patches, "tokens": PRIME * config.condition_tokens}
        return Row(length, amounts, {"length": PRIME}, "tokens")
    if config.is_generator:
        return _row_of_images(config.min_patches, config.condition_tokens)
    if tower == "llm":
        length = positions = 2 * MAX_BLOCK * PRIME
        return Row(length, {"positions": positions, "pairs": positions**2}, {"length": PRIME})
    # An encoder takes rows of whole strides and windows, here in whole blocks of attention too.
    # Windows that are filled where an image cuts them may have any number of its patches.
    stride = config.stride
    multiple = 1 if config.relative_side else config.window_inputs or 1
    length = math.lcm(stride * config.pool * MAX_BLOCK, config.shortest_row, multiple) * PRIME
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

    # Three primes tell apart what grows with images (n), blocks (n + 1 = 2 p, so p) and positions
    # (l): a row has l positions with n * size < l < (n + 1) * size, which fill n + 1 blocks of
    # `size`. The larger the images, the fewer: l stays near 2^30, so that its square is below 2^63.
    images = max(PRIME, min(2**24, 2**30 // size)) | 1
    while True:
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


# Named scope of products that stand for something cheaper, and how many operations a position
# really needs in the forward pass (`gated_delta_net.gated_delta_rule`).
NEEDS = re.compile(r"needs=(\d+)")


def count_cost(
    operations: Iterable[Operations], row: Row, unit: Callable[[Operations], str], layers: int = 1
) -> Cost:
    """Add up operations per unit of work. unit: of operations that grow with the row. layers: traced layers."""
    # The properties of a Cost are views of its rows: adding to one adds to `cost.rates`.
    cost = Cost.zero()
    needs: dict[str, float] = {}
    backward: set[str] = set()
    for x in operations:
        if x.of_pair:
            place, rate = UNITS.index("pairs"), x.count * row.pair_share
        else:
            name, rate = row.rate_of(x.count, unit(x))
            place, rate = UNITS.index(name), rate / layers
        # JAX names the scopes of transposed, that is backward, equations so.
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
                needs[match[0]] = float(match[1])
                backward |= {match[0]} if is_backward else set()
            else:
                (cost.needed_backward if is_backward else cost.needed_forward)[place] += rate
    # Backward needs two products for each one of forward: one for each operand's gradient.
    cost.needed_forward[0] += sum(needs.values())
    cost.needed_backward[0] += 2 * sum(needs[scope] for scope in backward)
    return cost
