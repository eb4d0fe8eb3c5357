"""Random mixtures on eight devices of what units can be: the gradients of one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_executor import assert_same_gradients, config_of
from test_frozen_reference import FROZEN, GRPO, LLM, VISION, adapted

from mmjax.config import Config, CrossEntropy, ExpertsConfig, LossConfig, Unit
from mmjax.config.training import unit_devices

EXPERTS = ExpertsConfig(
    layers=(0, 1, 3), count=4, per_token=2, width=24, balance_loss=0.3, z_loss=0.05
)
LAYOUTS = (  # of four devices
    {"expert": 2, "tensor": 2, "sequence_parallel": "overlap"},
    {"expert": 2, "fsdp": 2},
    {"context": 2, "tensor": 2, "sequence_parallel": "on"},
    {"data": 2, "context": 2},
)
ENCODERS = (
    {"vision": Unit(data=2), "audio": Unit(context=2)},
    {"encoders": Unit(modules=("vision", "audio"), tensor=2, context=2, encoders="data")},
    {
        "encoders": Unit(
            modules=("audio", "vision"), tensor=2, sequence_parallel="overlap", pipeline=2
        )
    },
)


def mixture(seed: int) -> tuple[Config, str, LossConfig]:
    """Units, a schedule and a loss of a seed."""
    rng = np.random.default_rng(seed)

    def choose(options: Sequence[Any]) -> Any:
        return options[rng.integers(len(options))]

    layout = choose(LAYOUTS)
    if rng.random() < 0.5:
        cuts = choose(((), ("vision.1",), ("audio.1",), ("llm.2",)))
        units = {"all": Unit(modules=("vision", "audio", "llm"), pipeline=2, cuts=cuts, **layout)}
    else:
        units = choose(ENCODERS) | {"llm": Unit(**layout)}
    config = config_of(
        "by module", tied=bool(rng.integers(2)), remat=choose(("none", "full", "products"))
    )
    llm = replace(config.model.llm, experts=EXPERTS)
    config = replace(config, units=units, model=replace(config.model, llm=llm))
    loss: LossConfig = CrossEntropy()
    if rng.random() < 0.5:
        frozen = config_of("by module", FROZEN).model
        config = replace(config, model=replace(frozen, llm=replace(llm, frozen=True)))
        config, loss = adapted(config, *choose(((LLM,), (LLM, VISION)))), GRPO
    return config, choose(("1f1b", "eager", "gpipe")), loss


@pytest.mark.exhaustive
# experts, context and tokens divided, alone and in a chain
@pytest.mark.parametrize("seed", [12, 14, 23, 27])
def test_any_mixture_has_the_gradients_of_one_mesh(seed, tmp_path):
    config, schedule, loss = mixture(seed)
    assert sum(map(unit_devices, config.units.values())) == 8
    assert_same_gradients(config, tmp_path, schedule, loss)
