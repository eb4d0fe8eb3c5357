"""Rows whose tokens are spread over devices: who gets which, and how encoder tokens reach them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from made import load, random_samples

from mmjax.balance.mask_work import Mask, allowed_keys, block_work
from mmjax.balance.token_blocks import distribute, token_order
from mmjax.batch import PADDING, TOKEN_FIELDS, Microbatch
from mmjax.data.loading.context import context_block, spread_over_context
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.parallel.encoder_exchange import dispatch

GROUP = {"vision": 4, "audio": 6}  # positions of the encoder for one token of the LLM
TOPOLOGIES = {
    "2": Topology(1, 1, 1, 2, 2),
    "4 with tensor 2": Topology(1, 1, 1, 8, 4),
    "2 ranks of 2": Topology(2, 2, 2, 2, 2),
    "4 ranks of 2 in nodes of 2": Topology(4, 2, 2, 2, 2),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The batches of two steps on these ranks, before and after their tokens are spread."""

    @cache
    def batches(topology: Topology) -> list[tuple[Microbatch, Microbatch]]:
        loader = load(random_samples(60, seed=0), tmp_path_factory.mktemp("data"), topology)
        plans = [m for step in range(2) for m in loader.plan(step).microbatches]
        whole = [pack_microbatch(m, loader.batch_layout, loader.reader) for m in plans]
        return [
            (b, spread_over_context(b, m, loader.batch_layout))
            for b, m in zip(whole, plans, strict=True)
        ]

    return batches


def taken(batch: Microbatch) -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
    """By encoder, for each (sample, token) of the text the (sample, position) whose encoder token it gets."""
    text, found = batch.text, {}
    for name, items in batch.items.items():
        named = np.stack([items.owner, items.offset], axis=-1)[:, :: GROUP[name]].astype(np.float32)
        placed = np.asarray(
            dispatch(
                named + 1, text.send[name], text.slots[name], None, spread=text.spread.get(name)
            ),
            np.int64,
        )
        at = zip(*np.nonzero(text.slots[name] >= 0), strict=True)
        found[name] = {(int(text.owner[p]), int(text.offset[p])): tuple(placed[p] - 1) for p in at}
    return found


@pytest.mark.default_cases("4 with tensor 2", "4 ranks of 2 in nodes of 2")
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_every_position_gets_the_encoder_token_that_it_gets_from_one_device(packed, topology):
    wanted: dict[str, dict] = {}
    for _, batch in packed(ONE_RANK):
        for name, tokens in taken(batch).items():
            wanted[name] = wanted.get(name, {}) | tokens
    found: dict[str, dict] = {}
    crossed = 0
    for _, batch in packed(topology):
        for name, tokens in taken(batch).items():
            found[name] = found.get(name, {}) | tokens
            crossed += int((batch.text.spread[name] >= 0).sum())
    assert found == wanted
    assert crossed > 0  # tokens that another device of the rank encoded


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_rows_are_reordered_as_a_whole_and_only_inside(packed, topology):
    for before, after in packed(topology):
        order = after.text.pos
        assert np.array_equal(np.sort(order, axis=1), before.text.pos)
        for field in TOKEN_FIELDS:
            rows = np.arange(len(order))[:, None]
            assert np.array_equal(
                getattr(after.text, field), getattr(before.text, field)[rows, order]
            ), field


def test_rows_of_a_gated_delta_net_stay_in_order(tmp_path):
    loader = load(random_samples(60, seed=0), tmp_path, TOPOLOGIES["4 with tensor 2"])
    in_order = replace(loader.batch_layout, in_order=True)
    reordered = []
    for plan in loader.plan(0).microbatches:
        whole = pack_microbatch(plan, loader.batch_layout, loader.reader)
        spread = spread_over_context(whole, plan, in_order)
        for field in TOKEN_FIELDS:
            np.testing.assert_array_equal(getattr(spread.text, field), getattr(whole.text, field))
        balanced = spread_over_context(whole, plan, loader.batch_layout)
        reordered.append(np.any(balanced.text.pos != whole.text.pos))
    assert any(reordered)


def test_devices_attend_nearly_as_many_keys_as_each_other_in_a_long_row():
    rng = np.random.default_rng(0)
    length, context = 1 << 15, 8
    sample = np.sort(rng.integers(0, 12, length)).astype(np.int32)
    mask = Mask(
        sample,
        np.arange(length, dtype=np.int32),
        *(np.full(length, x, np.int32) for x in (0, 1, 1)),
    )
    keys = allowed_keys(mask)
    block = context_block(length, context)
    order, _ = token_order(distribute(block_work(mask, block), context), length, block)
    work = keys[order].reshape(context, -1).sum(1)
    assert work.max() <= 1.001 * work.mean()


@pytest.mark.parametrize(
    ("length", "context", "block"), [(1 << 15, 8, 128), (2048, 2, 128), (160, 2, 8), (24, 3, 1)]
)
def test_blocks_are_as_long_as_the_kernels_where_each_device_has_several(length, context, block):
    assert context_block(length, context) == block


def test_no_array_of_a_batch_changes_where_each_device_has_whole_rows(packed):
    for before, after in packed(ONE_RANK):
        assert after is before


def test_padding_stays_padding(packed):
    for _, batch in packed(TOPOLOGIES["2"]):
        nothing = batch.text.sample == PADDING
        assert nothing.any()
        assert not jax.tree.reduce(
            max,
            {name: slots[nothing].max(initial=-1) >= 0 for name, slots in batch.text.slots.items()},
        )
