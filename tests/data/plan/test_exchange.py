"""Arrays of all ranks: an exchange by their tables brings every item's tokens where its sample wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made import AUDIO, VISION, Made, clip, image, load, random_samples, text
from planned import (
    BALANCE_KINDS,
    BALANCES,
    GROUPINGS,
    KINDS,
    SPREAD,
    TOPOLOGIES,
    samples_of,
    with_shapes,
)

from mmjax.batch import Microbatch
from mmjax.config import NoGrouping, PostBalance, Samples
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.media.patches import ItemInput, item_input
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.sample import Item, Text

ENCODERS = {"vision": VISION, "audio": AUDIO}
GROUP = {"vision": 4, "audio": 6}  # positions of the encoder for one token of the LLM


def exchange(made: np.ndarray, send: np.ndarray) -> np.ndarray:
    """What each rank has after the all-to-all: from its peers `[peers * width]`, then its own. made: `[ranks, n]`."""
    ranks, peers, width = send.shape
    chunks = np.where(send >= 0, np.take_along_axis(made[:, None], np.maximum(send, 0), axis=2), -1)
    got = np.empty((ranks, peers * width), made.dtype)
    for rank in range(ranks):
        node = rank // peers * peers
        got[rank] = np.concatenate([chunks[node + peer, rank - node] for peer in range(peers)])
    return np.concatenate([got, made], axis=1)


def found_by_text(batch: Microbatch, encoder: str, made: np.ndarray) -> np.ndarray:
    """For each text position what it takes of `made` `[ranks, n]`, -1 where it takes nothing."""
    send, slots = batch.text.send[encoder], batch.text.slots[encoder]
    has = np.repeat(exchange(made, send), len(slots) // len(send), axis=0)
    return np.where(slots >= 0, np.take_along_axis(has, np.maximum(slots, 0), axis=1), -1)


def item_tokens(source: Made, sample: int) -> list[tuple[str, int, int] | None]:
    """For each token of a sample (encoder, item, which of its tokens), or None for text."""
    tokens: list[tuple[str, int, int] | None] = []
    for segment in source.samples[sample][0]:
        if isinstance(segment, Text):
            tokens += [None] * len(segment.tokens)
        else:
            tokens += [
                (segment.encoder, segment.number, n)
                for n in range(_tokens(source, sample, segment))
            ]
    return tokens


def _prepared(source: Made, sample: int, item: int, encoder: str) -> ItemInput:
    return item_input(ENCODERS[encoder], source.samples[sample][1][item])


def _tokens(source: Made, sample: int, item: Item) -> int:
    return len(_prepared(source, sample, item.number, item.encoder).values) // GROUP[item.encoder]


def numbered(
    plan: MicrobatchPlan, module: int, group: int
) -> tuple[np.ndarray, dict[tuple[int, int, int], int]]:
    """A connector output `[ranks, n]` with a number for each token, and that of (sample in the plan, item, token)."""
    rows, length = plan.rows[module], plan.shape.lengths[module]
    made = np.full((plan.topology.ranks * rows, length // group), -1)
    ids: dict[tuple[int, int, int], int] = {}
    for part in np.flatnonzero(plan.module == module):
        sample = plan.sample_of()[part]
        for n in range(plan.length[part] // group):
            key = (int(sample), int(part - plan.part_start[sample] - 1), n)
            made[plan.row[part], plan.offset[part] // group + n] = ids[key] = len(ids)
    return made.reshape(plan.topology.ranks, -1), ids


def check(source: Made, plan: MicrobatchPlan, batch: Microbatch) -> int:
    """Every item token is where its sample's own order wants it. Returns how many crossed ranks."""
    text, crossed = batch.text, 0
    for module, (encoder, group) in enumerate(GROUP.items(), start=1):
        made, ids = numbered(plan, module, group)
        found = found_by_text(batch, encoder, made)
        used = np.zeros(found.shape, bool)
        for i, sample in enumerate(plan.samples.tolist()):
            row, begin = plan.row[plan.part_start[i]], plan.offset[plan.part_start[i]]
            tokens = item_tokens(source, sample)
            expected = [-1 if t is None or t[0] != encoder else ids[i, t[1], t[2]] for t in tokens]
            at = slice(begin, begin + len(tokens))
            assert found[row, at].tolist() == expected
            assert text.owner[row, at].tolist() == [sample] * len(tokens)
            assert text.offset[row, at].tolist() == list(range(len(tokens)))
            used[row, at] = True
        assert np.all(found[~used] == -1)
        assert np.all(text.owner[~used] == -1)
        ranks, peers, width = text.send[encoder].shape
        assert (ranks, peers, width) == (
            plan.topology.ranks,
            plan.topology.peers,
            plan.shape.widths[module - 1],
        )
        crossed += int((text.send[encoder] >= 0).sum())
    return crossed


def microbatches(loader: StepLoader, steps: int) -> list[tuple[MicrobatchPlan, Microbatch]]:
    plans = [m for step in range(steps) for m in loader.plan(step).microbatches]
    return [(m, pack_microbatch(m, loader.batch_layout, loader.reader)) for m in plans]


@pytest.mark.covering(2)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_every_item_token_arrives_where_its_sample_wants_it(grouping, balance, topology, tmp_path):
    source = random_samples(40, seed=1)
    loader = load(source, tmp_path, topology, grouping=grouping, balance=balance, size=Samples(12))
    moved = sum(check(source, *made) for made in microbatches(loader, 3))
    if topology.peers == 1 and loader.layout.topology.peers == 1:
        assert moved == 0
    if balance == PostBalance(locality="off") and grouping.kind == "none" and topology.ranks > 1:
        assert moved > 20


def test_owner_and_offset_name_the_patches_and_frames_of_every_item(tmp_path):
    source = random_samples(120, seed=2)  # more than a chunk, so that none comes twice in a step
    changes: dict[str, Any] = {
        "grouping": NoGrouping(chunk_steps=8),
        "balance": PostBalance(locality="off"),
    }
    for plan, batch in microbatches(
        load(source, tmp_path, Topology(4, 4, 4), size=Samples(12), **changes), 4
    ):
        for module, (encoder, items) in enumerate(batch.items.items(), start=1):
            used = np.zeros(items.owner.shape, bool)
            for sample in plan.samples.tolist():
                numbers = [n for n, (e, _) in enumerate(source.facts(sample).items) if e == encoder]
                values = [_prepared(source, sample, n, encoder).values for n in numbers]
                here = np.argwhere(items.owner == sample)
                order = np.argsort(items.offset[tuple(here.T)])
                at = tuple(here[order].T)
                assert items.offset[at].tolist() == list(range(sum(map(len, values))))
                if values:
                    np.testing.assert_array_equal(items.values[at], np.concatenate(values))
                used[at] = True
            assert np.all(items.owner[~used] == -1)
            assert not items.values[~used].any()
            assert used.sum() == plan.length[plan.module == module].sum()


def test_a_sample_spread_over_its_node_comes_back_in_its_own_order(tmp_path):
    rng = np.random.default_rng(0)
    items = tuple(Item(("vision", "audio")[n % 2], n) for n in range(10))
    arrays = [image(rng, 16, 16) if n % 2 == 0 else clip(rng, 120) for n in range(10)]
    wide = ((text(rng, 3, first=True), *items, text(rng, 2)), arrays)
    source = Made([wide, *random_samples(30, seed=3).samples])
    for balance in BALANCES:
        for topology in TOPOLOGIES[1:4]:
            rows = dict.fromkeys(("llm", "vision", "audio"), topology.ranks)
            changes = {
                "grouping": NoGrouping(chunk_steps=8),
                "balance": balance,
                "rows": rows,
                "size": Samples(4),
            }
            folder = tmp_path / f"{balance}{topology}"
            loader = load(source, folder, topology, **changes)
            at_home, over_peers = loader.planner.placer.needs_alone(0)
            lengths = -(-over_peers[:3] // 12) * 12
            assert at_home[1] > lengths[1]
            planned = with_shapes(loader.planner, Shape(tuple(lengths.tolist()), (64, 64)))
            plans = planned.placer.place(Group(np.arange(6), None))
            assert sorted(samples_of(plans).tolist()) == list(range(6))
            for plan in plans:
                moved = check(
                    source, plan, pack_microbatch(plan, loader.batch_layout, loader.reader)
                )
                assert moved > 0 or 0 not in plan.samples


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=SPREAD)
def test_an_empty_microbatch_and_one_of_text_alone_exchange_nothing(topology, tmp_path):
    rng = np.random.default_rng(0)
    words = [((text(rng, 5, first=True),), []) for _ in range(10)]
    source = Made([*words, *random_samples(30, seed=3).samples])
    loader = load(source, tmp_path, topology, grouping=NoGrouping(chunk_steps=8), size=Samples(12))
    for samples in (np.zeros(0, np.int64), np.arange(10)):
        (plan,) = loader.planner.placer.place(Group(samples, None))
        batch = pack_microbatch(plan, loader.batch_layout, loader.reader)
        assert check(source, plan, batch) == 0
        assert sorted(set(batch.text.owner[batch.text.owner >= 0].tolist())) == samples.tolist()
        assert all(
            np.all(items.owner == -1) and np.all(items.item == -1) for items in batch.items.values()
        )
