"""What a position and a pair take: as executed, pairs by themselves, and none of dense attention."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.config.loading import find_config, load
from mmjax.config.model import with_changes
from mmjax.planning.flops import executed
from mmjax.planning.hardware import SHEET
from mmjax.planning.prices import pair_costs


def test_rows_take_their_positions_and_their_pairs():
    model = load(find_config("omni_10b"), ()).model
    costs = pair_costs(model)
    pairs = {"llm": 3e7, "vision": 2e6, "audio": 1e6}
    positions = {"llm": 8192, "vision": 4096, "audio": 3000}
    flops = executed(
        model, {name: (1, n) for name, n in positions.items()}, frozenset(), pairs=pairs
    )
    seconds = sum(SHEET.seconds(f.total, f.attention) for f in flops.values())
    names = list(positions)
    predicted = costs.position @ [positions[name] for name in names] + costs.pair @ [
        pairs[name] for name in names
    ]
    assert predicted == pytest.approx(seconds, rel=1e-3)
    # So many keys take as long as a position's products: of the LLM's 14,000.
    keys = costs.position / costs.pair
    assert 10_000 < keys[0] < 18_000
    assert keys[2] < keys[1] < keys[0]


def test_dense_attention_has_no_pairs_and_frozen_modules_take_less():
    model = load(find_config("omni_10b"), ()).model
    changes = {name: {"attention": "dense"} for name in ("llm", "vision", "audio")}
    assert not pair_costs(with_changes(model, changes)).pair.any()
    frozen = pair_costs(model, frozen=frozenset({"vision", "vision.connector"}))
    usual = pair_costs(model)
    assert np.all(
        np.array([frozen.position[1], frozen.pair[1]])
        < 0.5 * np.array([usual.position[1], usual.pair[1]])
    )
    slower = pair_costs(model, SHEET._replace(attention=SHEET.attention / 2))
    np.testing.assert_allclose(slower.pair, 2 * usual.pair, rtol=0.01)  # beside what is no product
    np.testing.assert_allclose(slower.position, usual.position)
