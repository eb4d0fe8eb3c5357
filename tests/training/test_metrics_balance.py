"""What a step tells of its ranks, on a step small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.balance.waits import Prices
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.step_plan import RankLayout
from mmjax.training.metrics import balance_scalars, exchange_scalars

MODULES = ("llm", "vision", "audio")
# Two ranks: of the LLM two rows each, of the encoders one.
LAYOUT = RankLayout(Topology(2, 2, 1), (2, 1, 1), (Shape((10, 8, 6), (3, 0)),))


def work(
    useful, balanced, unbalanced, widths=(3, 0), moved=(2, 0), lengths=(10, 8, 6), pairs=None
) -> dict[str, np.ndarray]:
    """The planned work of one microbatch, by the fields of LoadedStep."""
    fields = {"useful": useful, "lengths": lengths, "widths": widths, "moved": moved}
    fields |= {"balanced": balanced, "unbalanced": unbalanced}
    pairs = np.zeros_like(balanced) if pairs is None else pairs
    fields |= {"pairs": pairs, "unbalanced_pairs": pairs}
    return {name: np.array(values, np.int64) for name, values in fields.items()}


def prices(*position: float, pair: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Prices:
    return Prices(np.array(position), np.array(pair))


def step(*of: dict[str, np.ndarray]) -> LoadedStep:
    others = dict.fromkeys(LoadedStep._fields)
    return LoadedStep(
        **others | {name: np.stack([fields[name] for fields in of]) for name in of[0]}
    )


ONE = work(
    [[10, 5, 10, 5], [8, 4, 0, 0], [0, 0, 0, 0]],
    [[15, 15], [8, 4], [0, 0]],
    [[20, 10], [0, 12], [0, 0]],
)
TWO = work(
    [[10, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]],
    [[10, 0], [4, 0], [0, 0]],
    [[0, 10], [4, 0], [0, 0]],
)


def test_rows_are_as_full_and_as_equal_as_they_are_counted():
    scalars = balance_scalars(step(ONE), MODULES, LAYOUT, prices(1.0, 2.0, 1.0))
    assert scalars["fill/llm"] == pytest.approx(30 / 40)
    assert scalars["fill/vision"] == pytest.approx(12 / 16)
    assert scalars["fill/audio"] == 0
    assert scalars["pad_ratio/llm"] == pytest.approx((0 + 5 + 0 + 5) / (10 * 4))
    assert scalars["pad_ratio/vision"] == pytest.approx(4 / 16)
    assert scalars["pad_ratio/audio"] == 0
    assert scalars["useful/budget"] == pytest.approx(42 / (40 + 16 + 12))


def test_ranks_are_as_equal_as_they_are_counted_now_and_as_they_would_be_without_balance():
    scalars = balance_scalars(step(ONE), MODULES, LAYOUT, prices(1.0, 2.0, 1.0))
    assert scalars["dist_ratio/llm"] == 0
    assert scalars["dist_ratio/vision"] == pytest.approx(4 / 16)
    assert scalars["max_over_mean/vision"] == pytest.approx(8 / 6)
    assert scalars["dist_ratio_before/llm"] == pytest.approx(10 / 40)
    assert scalars["dist_ratio_before/vision"] == pytest.approx(12 / 24)
    assert scalars["max_over_mean_before/llm"] == pytest.approx(20 / 15)
    for suffix in ("", "_before"):
        assert (scalars[f"dist_ratio{suffix}/audio"], scalars[f"max_over_mean{suffix}/audio"]) == (
            0,
            1,
        )
    assert scalars["straggler_wait_before"] == pytest.approx(1 - (15 + 2 * 6) / (20 + 2 * 12))


def test_devices_that_share_rows_are_as_equal_in_encoders_as_they_are_counted_by_rank():
    layout = RankLayout(Topology(2, 2, 1, 4, context=2), (2, 4, 4), LAYOUT.shapes)
    balanced = [[15] * 8, [4, 4, 2, 2, 1, 3, 3, 1], [0] * 8]
    one = work([[10] * 8] * 3, balanced, balanced)
    scalars = balance_scalars(step(one), MODULES, layout, prices(1.0, 1.0, 1.0))
    # 8 and 4 positions of one rank, 4 and 4
    assert scalars["sp_ratio/vision"] == pytest.approx((4 / 16 + 0) / 2)
    assert scalars["sp_ratio/audio"] == 0
    assert "sp_ratio/llm" not in scalars
    assert "sp_ratio/vision" not in balance_scalars(
        step(ONE), MODULES, LAYOUT, prices(1.0, 1.0, 1.0)
    )


def test_microbatches_of_a_step_are_counted_together():
    scalars = balance_scalars(step(ONE, TWO), MODULES, LAYOUT, prices(1.0, 1.0, 1.0))
    assert scalars["fill/llm"] == pytest.approx(40 / 80)
    assert scalars["dist_ratio/llm"] == pytest.approx((25 - 20) / 25)
    assert scalars["dist_ratio/vision"] == pytest.approx((12 - 8) / 12)
    assert scalars["pad_ratio/vision"] == pytest.approx((4 / 16 + 4 / 8) / 2)


def test_rows_of_one_length_leave_nobody_waiting_however_full_and_what_is_empty_is_padding():
    equal = work([[10, 10, 10, 10], [8, 8, 0, 0], [6, 6, 0, 0]], *[[[20, 20], [8, 8], [6, 6]]] * 2)
    scalars = balance_scalars(step(equal), MODULES, LAYOUT, prices(3.0, 1.0, 1.0))
    assert scalars["straggler_wait"] == 0
    assert all(scalars[f"fill/{module}"] == 1 for module in MODULES)
    alone = work([[10, 0, 0, 0], [0] * 4, [0] * 4], *[[[10, 0], [0, 0], [0, 0]]] * 2)
    scalars = balance_scalars(step(alone), MODULES, LAYOUT, prices(1.0, 1.0, 1.0))
    assert scalars["straggler_wait"] == 0
    assert scalars["padding"] == pytest.approx(1 - 10 / (40 + 16 + 12))


def test_a_rank_with_one_long_sample_keeps_those_with_short_ones_waiting_in_every_microbatch():
    """Of equal positions: one sample of 8,192 attends to 8 times as many pairs as eight of 1,024."""
    layout = RankLayout(Topology(2, 2, 2), (1, 1, 1), (Shape((8192, 8, 8), (0, 0)),))
    long, short = 8192 * 8193 // 2, 8 * 1024 * 1025 // 2
    useful = [[8192, 8192], [0, 0], [0, 0]]
    first, second = (
        work(useful, useful, useful, (0, 0), (0, 0), (8192, 8, 8), [[*ranks], [0, 0], [0, 0]])
        for ranks in ((long, short), (short, long))
    )
    of = prices(1.0, 1.0, 1.0, pair=(1 / 4096, 0.0, 0.0))
    scalars = balance_scalars(step(first), MODULES, layout, of)
    rows = 8192 + 8 + 8
    longest, mean = rows + long / 4096, rows + (long + short) / 2 / 4096
    assert scalars["straggler_wait"] == pytest.approx(1 - mean / longest)
    assert scalars["straggler_wait"] > 0.2
    assert scalars["max_pairs_over_mean/llm"] == pytest.approx(2 * long / (long + short))
    # By prices that were measured a pair takes half as long; what a data sheet says stands beside
    # it.
    measured = balance_scalars(step(first), MODULES, layout, of, of.times(2.0, 1.0))
    assert measured["straggler_wait_sheet"] == scalars["straggler_wait"]
    assert measured["straggler_wait"] == pytest.approx(1 - (rows + mean) / (rows + longest))
    assert measured["padding"] == pytest.approx(scalars["padding"])
    # Over both microbatches the ranks have the same, but they meet in each.
    assert (
        balance_scalars(step(first, second), MODULES, layout, of)["straggler_wait"]
        == scalars["straggler_wait"]
    )


def test_a_padded_exchange_sends_its_width_between_all_pairs_of_peers():
    scalars = exchange_scalars(step(ONE, TWO), MODULES[1:], LAYOUT.topology, token_bytes=4)
    assert scalars["all_to_all_bytes/vision"] == (3 + 3) * 2 * 1 * 4
    assert scalars["all_to_all_useful_bytes/vision"] == (2 + 2) * 4
    assert scalars["all_to_all_bytes/audio"] == scalars["all_to_all_useful_bytes/audio"] == 0
    assert scalars["inter_node_share"] == 1  # a rank's one peer is on another node


@pytest.mark.parametrize(
    ("topology", "share"),
    [
        (Topology(8, 8, 8), 0),
        (Topology(8, 4, 8), 0),
        (Topology(8, 8, 4), 4 / 7),
        (Topology(16, 16, 4), 12 / 15),
    ],
)
def test_what_leaves_a_node_is_what_goes_to_peers_on_others(topology, share):
    scalars = exchange_scalars(step(ONE), MODULES[1:], topology, token_bytes=1)
    assert scalars["inter_node_share"] == pytest.approx(share)
    assert scalars["all_to_all_bytes/vision"] == 3 * topology.ranks * (topology.peers - 1)


def test_where_nothing_is_sent_nothing_leaves_a_node():
    still = ONE | {"widths": np.zeros(2, np.int64), "moved": np.zeros(2, np.int64)}
    scalars = exchange_scalars(step(still), MODULES[1:], Topology(8, 8, 4), token_bytes=4)
    assert not any(scalars.values())
    text_alone = work([[10]], [[10]], [[10]], widths=(), moved=(), lengths=(10,))
    assert exchange_scalars(step(text_alone), (), Topology(), 4) == {"inter_node_share": 0}
