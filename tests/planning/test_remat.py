"""The chosen mix of remat policies is the one that trying all of them finds."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from mmjax.planning.remat import Option, choose_policies


def cost(plan, options):
    """(device bytes, host bytes, seconds) of a plan."""
    return np.sum(
        [options[tower][policy] for tower, own in plan.items() for policy in own] or [(0, 0, 0)],
        axis=0,
    )


def best_of_all(layers, options, device, host):
    """The least seconds of any mix that fits, or None."""
    mixes = [
        [(tower, mix) for mix in combinations_with_replacement(options[tower], n)]
        for tower, n in layers.items()
    ]
    costs = [cost(dict(plan), options) for plan in product(*mixes)]
    return min(
        (seconds for on, off, seconds in costs if on <= device and off <= host), default=None
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_chosen_mix_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    layers = {
        name: int(rng.integers(0, 5)) for name in ("llm", "vision", "audio")[: rng.integers(1, 4)]
    }
    options = {}
    for tower in layers:
        policies = ("none", "products", "attention_mlp", "offload")[: rng.integers(1, 5)]
        fastest = rng.choice([0, -5e-4])  # below 0 where keeping takes longer than computing again
        options[tower] = {
            policy: Option(*rng.uniform((0, 0, fastest), (1e9, 1e8, 1e-3))) for policy in policies
        }
    least = sum(n * min(o.device for o in options[t].values()) for t, n in layers.items())
    most = sum(n * max(o.device for o in options[t].values()) for t, n in layers.items())
    device = rng.uniform(0.9 * least, 1.05 * most)
    host = rng.choice([np.inf, rng.uniform(0, 3e8)])
    plan, wanted = (
        choose_policies(layers, options, device, host),
        best_of_all(layers, options, device, host),
    )
    if wanted is None:
        assert plan is None
        return
    assert {tower: len(own) for tower, own in plan.items()} == layers
    on, off, seconds = cost(plan, options)
    assert on <= device * (1 + 1e-9)
    assert off <= host * (1 + 1e-9)
    assert seconds == pytest.approx(wanted, rel=1e-9)


def test_layers_that_keep_least_come_first_and_alike_ones_stand_together():
    options = {
        "llm": {"none": Option(10, 0, 0), "attention": Option(4, 0, 1), "full": Option(1, 0, 3)}
    }
    plan = choose_policies({"llm": 80}, options, 400)["llm"]
    assert Counter(plan).total() == 80
    assert plan == tuple(sorted(plan, key=("full", "attention", "none").index))


def test_eighty_layers_of_each_of_three_towers_are_planned_exactly():
    rng = np.random.default_rng(0)
    policies = ("none", "products", "attention_mlp", "attention", "offload", "full")
    kept, seconds = (
        np.sort(rng.uniform(1e8, 1e9, (3, 6)))[:, ::-1],
        np.sort(rng.uniform(0, 1e-2, (3, 6))),
    )
    options = {
        tower: {p: Option(k, 0, s) for p, k, s in zip(policies, kept[i], seconds[i], strict=True)}
        for i, tower in enumerate(("llm", "vision", "audio"))
    }
    layers = dict.fromkeys(options, 80)
    plan = choose_policies(layers, options, 1e11)
    on, _, seconds_of_plan = cost(plan, options)
    assert on <= 1e11
    # One layer's step to the next policy is the most that rounding a continuous optimum can cost.
    relaxed = choose_policies(layers, options, 1e11 + kept.max())
    assert cost(relaxed, options)[2] <= seconds_of_plan
    assert plan == choose_policies(layers, options, 1e11)


def test_what_fits_nowhere_is_not_planned():
    assert choose_policies({"llm": 2}, {"llm": {"full": Option(5, 0, 1)}}, 9.9) is None
    assert choose_policies({"llm": 2}, {"llm": {"offload": Option(0, 5, 1)}}, 9.9, 9.9) is None
    assert choose_policies({}, {}, 0) == {}
    assert choose_policies({"llm": 0}, {"llm": {"full": Option(5, 0, 1)}}, 0) == {"llm": ()}
