"""Units that do not say where they are cut have stages that take equally long."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from mmjax.config import Config, Unit
from mmjax.config.loading import find_config, load
from mmjax.config.unit_stages import chain_of
from mmjax.planning.balanced_cuts import with_balanced_cuts
from mmjax.planning.flops import layer_flops
from mmjax.planning.schedules import list_stages

ROWS, LENGTHS = (4, 4, 4), ((256, 256, 128),)  # of the LLM, vision and audio


def cut(unit: Unit, words: tuple[str, ...] = (), resumed: dict[str, Unit] | None = None) -> Config:
    config = load(
        find_config("tiny_omni"), ("model.llm.layers=5", "model.encoders.vision.layers=4", *words)
    )
    others = {name: Unit() for name in ("vision", "audio", "llm") if name not in unit.modules}
    return with_balanced_cuts(replace(config, units={"all": unit} | others), ROWS, LENGTHS, resumed)


def seconds(config: Config) -> np.ndarray:
    """What every layer of the chain runs."""
    shape = {"llm": (4, 256), "vision": (4, 256), "audio": (4, 128)}
    towers = chain_of(config.model, config.units["all"].modules)
    return np.array(
        [flops.total for tower in towers for flops in layer_flops(config.model, tower, shape)]
    )


@pytest.mark.parametrize("modules", [("vision", "audio", "llm"), ("audio", "vision"), ("llm",)])
@pytest.mark.parametrize(
    "words", [(), ("model.encoders.vision.frozen=true", "model.encoders.audio.frozen=true")]
)
def test_no_other_cuts_have_a_largest_stage_that_is_much_smaller(modules, words):
    config = cut(Unit(modules=modules, pipeline=3), words)
    layers = seconds(config)
    sizes = [
        sum(len(piece.layers) for piece in s.pieces) for s in list_stages(config) if s.unit == "all"
    ]
    chosen = max(part.sum() for part in np.split(layers, np.cumsum(sizes)[:-1]))
    ends = ((0, *cuts, len(layers)) for cuts in combinations(range(1, len(layers)), 2))
    best = min(max(layers[a:b].sum() for a, b in pairwise(cuts)) for cuts in ends)
    assert chosen <= 1.05 * best + 1


def test_a_resumed_unit_is_cut_as_before_and_one_that_names_cuts_as_they_are():
    unit = Unit(modules=("vision", "audio", "llm"), pipeline=2)
    assert cut(replace(unit, cuts=("llm.4",))).units["all"].cuts == ("llm.4",)
    balanced = cut(unit).units["all"]
    assert balanced.cuts not in ((), ("llm.4",))
    # Runs of earlier versions went on with equally many layers of the LLM.
    for cuts in (("llm.4",), ()):
        assert cut(unit, resumed={"all": replace(unit, cuts=cuts)}).units["all"].cuts == cuts
    assert (
        cut(unit, resumed={"all": replace(unit, pipeline=3, cuts=("llm.1", "llm.4"))}).units["all"]
        == balanced
    )
